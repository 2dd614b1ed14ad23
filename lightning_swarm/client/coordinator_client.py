"""A trainer's calls to whoever coordinates.

Any peer may come to coordinate. A call that breaks, or that a peer refuses because it does not coordinate, is made
again at whoever the servers follow: all calls may be made twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import partial
from typing import Any, Final, TypeVar, cast

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    NotCoordinator,
    NotEnlisted,
    PeerError,
    ProtocolError,
    StepError,
    SwarmError,
    WentBack,
)
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol.messages.batches import Quit, RegisterRequest, ReportReply
from lightning_swarm.protocol.messages.membership import EnlistReply, EnlistRequest, RetireReply
from lightning_swarm.protocol.messages.run import RunView, Term
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.methods import ENLIST, REGISTER, RETIRE, VIEW
from lightning_swarm.protocol.queries import look_around
from lightning_swarm.protocol.run_state import RunState

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_RETRY_S: Final = 0.5


class CoordinatorCalls:
    """Reaches the coordinator, and follows the next one.

    Args:
        transport: This trainer's network.
        run: The run as this trainer knows it.
        report: Its part of the books of the open step, which a new coordinator is told before anything else.
        timeout: Seconds for the coordinator to answer.
        patience_s: Seconds to look for one that answers.
        alone_s: Seconds without an answer of any other peer, when the others have ended the run; None: it goes on
            without this trainer.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunState,
        report: Callable[[], ReportReply],
        *,
        timeout: float,
        patience_s: float,
        alone_s: float | None,
    ) -> None:
        self._transport = transport
        self._run = run
        self._report = report
        self._timeout = timeout
        self._patience_s = patience_s
        self._alone_s = alone_s
        self._registered = run.term  # the last one whose coordinator was told what is under way here
        self._led_anew = asyncio.Event()  # set, and replaced, when a higher term is known

    async def call(self, method: str, body: bytes) -> bytes:
        """Ask whoever coordinates.

        Raises:
            NotEnlisted: The run goes on without this trainer.
            PeerError: Nobody that does answered in time.
            StepError: The others have ended the run.
            WentBack: They go on from an earlier step, and nobody told this trainer.
            SwarmError: The answer.
        """
        return await self._repeat(
            method, partial(self._transport.call, method=method, body=body, timeout=self._timeout)
        )

    async def stream(self, method: str, message: Message, *, max_bytes: int) -> Message:
        """Likewise, with tensors."""

        async def exchange(coordinator: PeerId) -> Message:
            return await self._transport.stream(
                coordinator, method, message, timeout=self._timeout, max_bytes=max_bytes
            )

        return await self._repeat(method, exchange)

    async def find_coordinator(self) -> Collection[PeerId]:
        """Follow the highest term that any server knows of; which ones say so."""
        replies = await look_around(self._transport, self._run, timeout=self._timeout)
        for reply in replies.values():
            self._follow(reply.term)
        return replies.keys()

    async def accept(self, caller: PeerId, term: Term) -> None:
        """Follow a peer that says that it coordinates.

        Raises:
            ProtocolError: The term is not its own.
            NotCoordinator: Another one does.
        """
        if caller != term[1]:
            raise ProtocolError(f"who coordinates asks under its own term, {caller} asked under {term}")
        if caller not in self._run.servers and self._run.term != term:  # it may have joined since
            await self.find_coordinator()
        elif term >= self._run.term:
            self._follow(term)
        if self._run.term != term:
            raise NotCoordinator(f"the run is led under the term {self._run.term}, not {term}")

    async def _repeat(self, method: str, exchange: Callable[[PeerId], Coroutine[Any, Any, _T]]) -> _T:
        """Make a call at whoever coordinates, until one has answered it."""
        heard_s = now_s()
        deadline_s = heard_s + self._patience_s
        while True:
            coordinator = self._run.coordinator
            try:
                return await self._under_one_term(self._known_at(coordinator, exchange))
            except (PeerError, ProtocolError) as error:
                if self._transport.closed or isinstance(error, NotEnlisted):
                    raise
                if not isinstance(error, PeerError):
                    await self._check_generation(coordinator)
                    raise
                if now_s() >= deadline_s:
                    raise type(error)(
                        f"the coordinator {coordinator} did not answer {method}, and no other peer came to coordinate "
                        f"within {self._patience_s:g} s: {error}"
                    ) from error
                _log.info("%s is asked for again: %s", method, error)
                if await self._find():
                    heard_s = now_s()
                elif self._alone_s is not None and now_s() >= heard_s + self._alone_s:
                    raise StepError(
                        f"the run is over for this peer, which has heard of no other one for {self._alone_s:g} s: "
                        "after as long they end it without the lead, if they live. Start the lead again with "
                        "`ckpt_path`, and its peers with it; another trainer by itself, if the run goes on. Raise "
                        "`Limits.lead_timeout` to be waited for longer."
                    ) from error

    async def _known_at(self, coordinator: PeerId, exchange: Callable[[PeerId], Coroutine[Any, Any, _T]]) -> _T:
        """Before the first call to a new coordinator: it may not have heard this trainer's answer when it asked."""
        term = self._run.term
        if self._registered != term:
            generation, step = self._run.manifest.generation, self._run.version
            request = RegisterRequest(generation=generation, step=step, report=self._report())
            with contextlib.suppress(NotEnlisted):  # what it had counts nowhere; or it is about to enlist
                await self._transport.call(coordinator, REGISTER, encode(request), timeout=self._timeout)
            self._registered = term
        return await exchange(coordinator)

    async def _under_one_term(self, exchange: Coroutine[Any, Any, _T]) -> _T:
        """The answer, if it comes before another peer coordinates."""
        term = self._run.term
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_caught(exchange))
            anew = group.create_task(self._led_anew.wait())
            await asyncio.wait({asking, anew}, return_when=asyncio.FIRST_COMPLETED)
            asking.cancel()
            anew.cancel()
        if self._run.term != term:  # whoever coordinates by now may have been told already what is under way here
            raise NotCoordinator("another peer coordinates by now")
        answer, error = asking.result()
        if error is not None:
            raise error
        return cast(_T, answer)

    async def _find(self) -> bool:
        """Look who coordinates; if it is the one that did, wait a moment. Whether anybody else is there."""
        before = self._run.term
        there = await self.find_coordinator()
        if self._run.term == before:
            for peer in sorted(there)[:1]:  # of another generation it may have a lower term
                await self._check_generation(peer)
            await asyncio.sleep(_RETRY_S)
        return bool(there)

    async def _check_generation(self, peer: PeerId) -> None:
        """Raise if the run goes on without this trainer, from an earlier step, and lets others in."""
        own = self._run.manifest
        if not own.open_to_trainers:
            return
        try:
            view = decode(await self._transport.call(peer, VIEW, b"", timeout=self._timeout), RunView)
        except SwarmError as error:
            _log.info("%s shows no run: %s", peer, error)
            return
        if view.manifest.run_id == own.run_id and view.manifest.generation > own.generation:
            raise WentBack(f"the run has gone back to step {view.manifest.first_step}, without this trainer")

    def _follow(self, term: Term) -> None:
        if self._run.follow(term):
            self._led_anew.set()
            self._led_anew = asyncio.Event()


async def _caught(exchange: Coroutine[Any, Any, _T]) -> tuple[_T | None, SwarmError | None]:
    """What came of it, so that a task group is not ended by an error that is expected."""
    try:
        return await exchange, None
    except SwarmError as error:
        return None, error


_MAX_REASON = 2000


async def enter(
    transport: Transport, seen: RunState, *, timeout: float, patience_s: float, alone_s: float
) -> tuple[RunView, int]:
    """Train in a run from one of its next records on.

    Args:
        transport: This trainer's.
        seen: The run as somebody showed it.
        timeout: Seconds for an answer.
        patience_s: As in `CoordinatorCalls`.
        alone_s: Likewise.

    Returns:
        The run at a version from which on it trains, and the epoch of the lead's loop.

    Raises:
        ConfigError: The run does not take this trainer.
        SwarmError: Nobody answers, or the run broke off.
    """

    def nothing() -> ReportReply:
        return ReportReply(begun=False, leases=[], closed=[])

    calls = CoordinatorCalls(transport, seen, nothing, timeout=timeout, patience_s=patience_s, alone_s=alone_s)
    return await enlist(calls, transport.peer_id, generation=None)


async def enlist(calls: CoordinatorCalls, me: PeerId, *, generation: int | None) -> tuple[RunView, int]:
    """Ask until a record has named this trainer. `generation` as in `EnlistRequest`; the rest as in `enter`."""
    request = encode(EnlistRequest(protocol_version=PROTOCOL_VERSION, generation=generation))
    while True:
        reply = decode(await calls.call(ENLIST, request), EnlistReply)
        if reply.view is None:
            continue
        if me not in reply.view.seats.trainers:
            raise ProtocolError(f"who coordinates shows a run to {me} in which it does not train")
        return reply.view, reply.epoch


class EnlistedCalls:
    """A trainer's calls to whoever coordinates, as one who trains in the run.

    If that went on without this trainer, which was not heard of, it enlists again. Records that it missed come as to
    any other who was busy elsewhere, and so does what became of its batches.

    Args:
        calls: To whoever coordinates.
        run: As this trainer knows it.
        me: This trainer.
    """

    def __init__(self, calls: CoordinatorCalls, run: RunState, me: PeerId) -> None:
        self._calls = calls
        self._run = run
        self._me = me

    async def call(self, method: str, body: bytes) -> bytes:
        """As `CoordinatorCalls.call`."""
        return await self._repeat(partial(self._calls.call, method, body))

    async def stream(self, method: str, message: Message, *, max_bytes: int) -> Message:
        """Likewise, with tensors."""
        return await self._repeat(partial(self._calls.stream, method, message, max_bytes=max_bytes))

    async def enlist(self) -> int:
        """Be sure to train in the run. Returns the epoch of the lead's loop, once it is in one."""
        _, epoch = await enlist(self._calls, self._me, generation=self._run.manifest.generation)
        return epoch

    async def _repeat(self, exchange: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            try:
                return await exchange()
            except NotEnlisted:
                if not self._run.manifest.open_to_trainers:
                    raise
                await self.enlist()


async def retire(calls: CoordinatorCalls, reason: str) -> None:
    """Tell that nothing more will come; returns when a record has let this trainer go."""
    request = encode(Quit(reason=reason[:_MAX_REASON]))
    try:
        while not decode(await calls.call(RETIRE, request), RetireReply).retired:
            pass
    except NotEnlisted:
        return
