"""A trainer's calls to the coordinator, repeated at its successor after a takeover. Each call may arrive twice."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    AccessDenied,
    NotCoordinator,
    NotEnlisted,
    PeerError,
    ProtocolError,
    Replaced,
    StepError,
    SwarmError,
    WentBack,
)
from lightning_swarm.core.tasks import cancel_and_wait
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.messages.batches import RegisterRequest, ReportReply
from lightning_swarm.protocol.messages.membership import EnlistRequest
from lightning_swarm.protocol.messages.run import RunView, Term
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION
from lightning_swarm.protocol.queries import ask_servers, find_promised
from lightning_swarm.protocol.rpc import ENLIST, REGISTER, VIEW, A, Call, Q, StreamRpc
from lightning_swarm.protocol.run_state import RunState, replaced_by

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_RETRY_S: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class CoordinatorTimeouts:
    """A trainer's timeouts for the coordinator, in seconds."""

    answer_s: float  # limit of one answer
    successor_s: float  # limit of all attempts of a call, at the coordinator and its successors
    # If no peer answers for this long, the other peers have ended the run. None: the run continues without this peer.
    alone_s: float | None = None


class CoordinatorCalls:
    """Calls the coordinator, and repeats a failed call at its successor."""

    def __init__(
        self, transport: Transport, run: RunState, report: Callable[[], ReportReply], timeouts: CoordinatorTimeouts
    ) -> None:
        self._transport = transport
        self._run = run
        self._report = report  # returns this trainer's part in the open steps
        self._timeouts = timeouts
        self._registered_term = run.term  # newest term whose coordinator has this trainer's report
        self._term_changed = asyncio.Event()  # set, and replaced, when a higher term is known

    async def call(self, method: Call[Q, A], request: Q) -> A:
        """Call the coordinator and return its answer; raise its error, or a `SwarmError` if there is no answer."""
        ask = partial(method.ask, self._transport, request=request, timeout=self._timeouts.answer_s)
        return await self._repeat(method.name, ask)

    async def stream(
        self, method: StreamRpc[Q, A], request: Q, tensors: Sequence[Tensor] = (), *, max_bytes: int
    ) -> tuple[A, tuple[Tensor, ...]]:
        """Send tensors to the coordinator; raise the same errors as `call`."""
        ask = partial(method.ask, self._transport, request=request, tensors=tensors, max_bytes=max_bytes)
        return await self._repeat(method.name, partial(ask, timeout=self._timeouts.answer_s))

    async def enlist(self, generation: int | None) -> tuple[RunView, int]:
        """Ask until a record names this trainer; return the run from that record on, and the lead's epoch."""
        request = EnlistRequest(protocol_version=PROTOCOL_VERSION, generation=generation)
        while True:
            reply = await self.call(ENLIST, request)
            if reply.view is None:  # no record names this trainer yet, or the lead's loop is in no epoch
                continue  # without a pause, because the coordinator delays such an answer
            if (me := self._transport.peer_id) not in reply.view.seats.trainers:
                raise ProtocolError(f"the coordinator's view of the run does not list {me} as a trainer")
            return reply.view, reply.epoch

    async def enlisted(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Make a call as a trainer of the run; if the run continued without it, enlist again and repeat the call."""
        # Then the trainer receives the missed records, which show which of its batches count.
        while True:
            try:
                return await call()
            except NotEnlisted:
                if not self._run.manifest.open_to_trainers:
                    raise
                await self.enlist(self._run.manifest.generation)

    async def find_coordinator(self) -> Collection[PeerId]:
        """Follow the highest term that servers report and voters have promised; return the servers that answered."""
        replies = await ask_servers(self._transport, self._run)
        await self._follow({reply.term for reply in replies.values()})
        return replies.keys()

    async def accept(self, caller: PeerId, term: Term) -> None:
        """Follow a caller that acts as coordinator. Refuse another peer's term, and a term that is not followed."""
        if caller != term[1]:  # a term names its coordinator
            raise ProtocolError(f"a coordinator must use its own term, got {term} from {caller}")
        # An unknown caller may be a newcomer of a record that this trainer has not applied yet. So ask the servers for
        # the term, instead of trusting the caller.
        if caller not in self._run.servers and self._run.term != term:
            await self.find_coordinator()
        else:
            await self._follow([term])
        if self._run.term != term:
            raise NotCoordinator(f"the run's term is {self._run.term}, got a request under {term}")

    async def _repeat(self, method: str, exchange: Callable[[PeerId], Coroutine[Any, Any, _T]]) -> _T:
        """Repeat an exchange until the coordinator, or a successor, has answered it."""
        answered_s = now_s()  # when any server last answered
        timeouts = self._timeouts
        deadline_s = answered_s + timeouts.successor_s
        while True:
            coordinator = self._run.coordinator
            try:
                return await self._within_term(self._registered_at(coordinator, exchange))
            except (PeerError, ProtocolError) as error:
                if self._transport.closed or isinstance(error, NotEnlisted | AccessDenied):
                    raise
                if not isinstance(error, PeerError):  # a refusal, perhaps because the run has rolled back
                    await self._check_generation(coordinator)
                    raise
                if now_s() >= deadline_s:
                    raise type(error)(
                        f"the coordinator {coordinator} did not answer {method}, and no other peer took its place "
                        f"within {timeouts.successor_s:g} s: {error}"
                        f"{self._run.electorate.remedy}"
                    ) from error
                _log.info("The request %s is repeated: %s", method, error)
                if await self._find_or_pause():
                    answered_s = now_s()
                elif timeouts.alone_s is not None and now_s() >= answered_s + timeouts.alone_s:
                    raise StepError(
                        "the run is over for this peer, because no other peer answered for "
                        f"{timeouts.alone_s:g} s. If this peer was the lead, the other peers have ended the run: start "
                        "the lead again with `ckpt_path`, and the peers. If it was another trainer and the run "
                        "continues, restart only this trainer. A larger `Limits.lead_timeout` gives more time."
                    ) from error

    async def _registered_at(self, coordinator: PeerId, exchange: Callable[[PeerId], Coroutine[Any, Any, _T]]) -> _T:
        """Call a coordinator; if it may lack this trainer's report on the open step, send the report first."""
        term = self._run.term
        if self._registered_term != term:  # a new coordinator requests reports, but may have missed this trainer
            generation, step = self._run.manifest.generation, self._run.version
            request = RegisterRequest(generation=generation, step=step, report=self._report())
            with contextlib.suppress(NotEnlisted):  # its batches do not count, or it is about to enlist
                await REGISTER.ask(self._transport, coordinator, request, timeout=self._timeouts.answer_s)
            self._registered_term = term
        return await exchange(coordinator)

    async def _within_term(self, exchange: Coroutine[Any, Any, _T]) -> _T:
        """Return the answer if it arrives while the term lasts; otherwise raise `NotCoordinator`."""
        term = self._run.term
        call, changed = asyncio.ensure_future(exchange), asyncio.ensure_future(self._term_changed.wait())
        try:
            await asyncio.wait({call, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait((call, changed))
        # Await nothing from here on, because a new coordinator may already have a report without this call's effect.
        if self._run.term != term:
            raise NotCoordinator("another peer is the coordinator now")
        return call.result()

    async def _find_or_pause(self) -> bool:
        """Look for a new coordinator, and pause if there is none; return whether any server answered."""
        former_term = self._run.term
        answered = await self.find_coordinator()
        if self._run.term == former_term:
            # After a rollback the run's new term may be lower, and is not followed. So ask a server for its generation.
            for peer in sorted(filter(self._run.decides, answered))[:1]:
                await self._check_generation(peer)
            await asyncio.sleep(_RETRY_S)
        return bool(answered)

    async def _check_generation(self, peer: PeerId) -> None:
        """Raise if the run has rolled back without this trainer, in runs that trainers may join and leave."""
        own = self._run.manifest
        if not own.open_to_trainers:
            return
        try:
            view = await VIEW.ask(self._transport, peer, None, timeout=self._timeouts.answer_s)
        except SwarmError as error:
            _log.info("%s did not report its run: %s", peer, error)
            return
        if view.manifest.run_id == own.run_id and view.manifest.generation > own.generation:
            if own.lead == self._transport.peer_id != view.manifest.lead:  # this peer was the lead before
                raise Replaced(replaced_by(view.manifest))
            raise WentBack(f"the run has rolled back to step {view.manifest.first_step}, without this trainer")

    async def _follow(self, terms: Collection[Term]) -> None:
        """Follow the highest promised of these terms if it is above the current term; calls under way are repeated."""
        timeout = self._timeouts.answer_s
        term = await find_promised(self._transport, self._run, terms, timeout=timeout)
        if term is not None and self._run.follow_term(term):
            self._term_changed.set()
            self._term_changed = asyncio.Event()


async def enter(transport: Transport, seen: RunState, timeouts: CoordinatorTimeouts) -> tuple[RunView, int]:
    """Join a run, whose state is `seen`, as a trainer, beginning at a later record. `ConfigError`: the run refuses."""
    nothing = ReportReply(begun=False, leases=[], closed=[])
    return await CoordinatorCalls(transport, seen, lambda: nothing, timeouts).enlist(None)
