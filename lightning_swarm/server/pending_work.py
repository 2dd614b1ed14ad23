"""Work that ends in a ticket: the tensors that others wait for, or what kept them from coming."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import ended
from lightning_swarm.protocol.messages.calls import Direction
from lightning_swarm.protocol.tickets import TicketStore

_log = logging.getLogger(__name__)


class PendingWork:
    """A server's.

    Args:
        tickets: Where the results wait to be fetched.
        spawn: Runs work in a task that has an owner.

    Attributes:
        tasks: By the names of their tickets.
    """

    def __init__(self, tickets: TicketStore, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        self._tickets = tickets
        self._spawn = spawn
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._begun = asyncio.Event()

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start work that fulfils a ticket, unless it is under way, or its result is there."""
        if self._tickets.promise(name):
            task = self._spawn(self._guarded(name, work))
            self.tasks[name] = task
            self._begun.set()
            task.add_done_callback(partial(self._ended, name))

    def of(self, direction: Direction) -> list[asyncio.Task[None]]:
        """The calls that go one way."""
        return [task for name, task in self.tasks.items() if name.endswith(f"/{direction}")]

    async def begins(self, *, within_s: float) -> bool:
        """Wait until the next call is taken; whether one is."""
        self._begun.clear()
        try:
            async with asyncio.timeout(within_s):
                return await self._begun.wait()
        except TimeoutError:
            return False

    async def cancel(self, name: str) -> None:
        """Take it back, as if it had never been begun."""
        task = self.tasks.get(name)
        if task is not None:
            await ended([task])
        self._tickets.withdraw(name)

    def fail(self, prefix: str, error: SwarmError) -> None:
        """Give up what has names that begin so. Whoever waits gets the error."""
        for name, task in self.tasks.items():
            if name.startswith(prefix):
                self._tickets.fail(name, error)
                task.cancel()

    async def abort_all(self) -> None:
        """Give up all."""
        await ended(self.tasks.values())

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if self.tasks.get(name) is task:  # else it was given up, and sent again
            del self.tasks[name]

    async def _guarded(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except SwarmError as error:
            self._tickets.fail(name, error)
        except Exception as error:
            # A bug: it ends this server, and whoever waits shall not wait for ever.
            self._tickets.fail(name, SwarmError(f"internal error: {type(error).__name__}: {error}"))
            _log.exception("A call of this server failed: %s", name)
            raise


_MOST_OF_A_STEP: Final = 0.5
"""Averaging that takes longer than that has no time, and none is waited longer for."""
_LULL_OF_A_STEP: Final = 0.1
"""If nothing has come for so long, nothing comes."""
_MOST_OF_A_TIMEOUT: Final = 0.25
"""Of those who wait for this server's part."""


# All microbatches of a batch go forward before the first one goes back, so lines are busiest then. Averaging that has
# time waits for the end of the forwards: what it took of the line before, the batch would lack.
class IdleLinkWait:
    """A server's.

    Args:
        under_way: Its calls.
        timeout: Seconds that others wait for its part of a round.
    """

    def __init__(self, under_way: PendingWork, *, timeout: float) -> None:
        self._under_way = under_way
        self._timeout = timeout
        self._asked_s: float | None = None
        self._took_s = 0.0

    def averaging_took(self, took_s: float) -> None:
        """The newest averaging took so many seconds."""
        self._took_s = took_s

    async def wait(self) -> None:
        """Return when forwards are through, or if it is too late to wait for that. Once a step."""
        before_s, self._asked_s = self._asked_s, now_s()
        if before_s is None:
            return
        step_s = self._asked_s - before_s
        most_s = _MOST_OF_A_STEP * step_s
        if self._took_s > most_s:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(most_s, _MOST_OF_A_TIMEOUT * self._timeout)):
                await self._until_back(_LULL_OF_A_STEP * step_s)

    async def _until_back(self, lull_s: float) -> None:
        """Until a backward comes, or nothing does."""
        while not self._under_way.of("backward"):
            forwards = self._under_way.of("forward")
            if forwards:
                await asyncio.wait(forwards)
            elif not await self._under_way.begins(within_s=lull_s):
                return
