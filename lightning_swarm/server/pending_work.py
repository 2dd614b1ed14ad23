"""Runs a server's calls, whose results peers fetch by tickets, and delays averaging until calls leave the link idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import OutOfMemory, SwarmError
from lightning_swarm.core.tasks import cancel_and_wait
from lightning_swarm.protocol.messages.calls import Direction, TicketKey
from lightning_swarm.protocol.tickets import TicketStore, with_key
from lightning_swarm.server.out_of_memory import is_out_of_memory

_log = logging.getLogger(__name__)


class PendingWork:
    """A server's calls in progress, each until its ticket is fulfilled."""

    def __init__(self, tickets: TicketStore, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._tickets = tickets
        self._spawn = spawn
        self.tasks: dict[str, asyncio.Task[None]] = {}  # ticket name -> call in progress
        self._begun = asyncio.Event()  # set by each call that starts

    def start(self, name: str, key: TicketKey, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start work that fulfils a ticket, unless it is in progress or done; peers need `key` to fetch the result."""
        if self._tickets.promise(name, with_key(key)):
            task = self.tasks[name] = self._spawn(self._guarded(name, work))
            self._begun.set()
            task.add_done_callback(partial(self._ended, name))

    def in_direction(self, direction: Direction) -> list[asyncio.Task[None]]:
        """Return the tasks of all forwards, or of all backwards."""
        return [task for name, task in self.tasks.items() if f"/{direction}@" in name]

    async def wait_for_next(self, *, within_s: float) -> bool:
        """Wait until another call begins; return False if none does in time."""
        self._begun.clear()
        try:
            async with asyncio.timeout(within_s):
                return await self._begun.wait()
        except TimeoutError:
            return False

    async def cancel(self, name: str) -> None:
        """Cancel a call if it is in progress, and withdraw its ticket, as if the call had never begun."""
        task = self.tasks.get(name)
        if task is not None:
            await cancel_and_wait([task])
        self._tickets.withdraw(name)

    def fail(self, prefix: str, error: SwarmError) -> None:
        """Cancel calls whose names begin with `prefix`; waiting peers receive the error."""
        for name, task in self.tasks.items():
            if name.startswith(prefix):
                self._tickets.fail(name, error)
                task.cancel()

    async def abort_all(self) -> None:
        """Cancel all calls."""
        await cancel_and_wait(self.tasks.values())

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self.tasks.get(name) is task:  # unless the call was cancelled and then sent again
            del self.tasks[name]

    async def _guarded(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except SwarmError as error:
            self._tickets.fail(name, error)
        except Exception as error:
            if is_out_of_memory(error):  # memory for received tensors; computations handle their own errors
                self._tickets.fail(name, OutOfMemory(f"this server has too little memory for {name}: {error}"))
                return
            # This is a bug, which ends the server. Waiting peers must get an error.
            self._tickets.fail(name, SwarmError(f"internal error: {type(error).__name__}: {error}"))
            _log.exception("A call of this server failed: %s", name)
            raise


_MAX_STEP_SHARE: Final = 0.5  # longest wait, as a fraction of a step; no wait if averaging itself takes longer
_IDLE_STEP_SHARE: Final = 0.1  # fraction of a step without a call, after which no call is expected
_MAX_TIMEOUT_SHARE: Final = 0.25  # longest wait, as a fraction of other peers' timeout


# All forwards of a batch precede its first backward, so links are busiest then. The averaging of a late step is not
# urgent, so it waits for the forwards to end instead of competing for bandwidth.
class IdleLinkWait:
    """Delays a late step's averaging until a server's link is idle."""

    def __init__(self, under_way: PendingWork, *, timeout: float) -> None:
        self._under_way = under_way
        self._timeout = timeout  # seconds that other peers wait for this server's part of a round
        self._asked_s: float | None = None  # time of the newest call of `wait`; two calls measure a step
        self.averaging_s = 0.0  # seconds of the newest averaging

    async def wait(self) -> None:
        """Wait for the forwards to end, but not too long. Call it once per step."""
        previous_s, self._asked_s = self._asked_s, now_s()
        if previous_s is None:  # the first step, whose duration is unknown
            return
        step_s = self._asked_s - previous_s
        max_wait_s = _MAX_STEP_SHARE * step_s
        if self.averaging_s > max_wait_s:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(max_wait_s, _MAX_TIMEOUT_SHARE * self._timeout)):
                while not self._under_way.in_direction("backward"):
                    if forwards := self._under_way.in_direction("forward"):
                        await asyncio.wait(forwards)
                    elif not await self._under_way.wait_for_next(within_s=_IDLE_STEP_SHARE * step_s):
                        return
