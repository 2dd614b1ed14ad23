"""Rollback with the remaining peers of a run, and standbys that take the run over if its lead dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from lightning_swarm.coordinator.takeover import seniority
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, PeerError, ProtocolError, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import first_of, gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.run import LoopReply, LoopRequest, Manifest, ReleaseRequest
from lightning_swarm.protocol.messages.state import KeptLoop
from lightning_swarm.protocol.queries import MAX_TRIES, ask_each, ask_held, ask_view
from lightning_swarm.protocol.rpc import KEEP_LOOP, LOOP, RELEASE
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.admission import Admission

_log = logging.getLogger(__name__)

# The lead decides the version to which a run rolls back. Before that, it asks the other trainers by `LOOP` at which
# versions their loops could continue. Servers learn the version when the lead releases them, and trainers learn it from
# their servers.

_NUM_STANDBYS: Final = 3  # peers that keep the loop's state; several, because a copy is lost with its peer
_MAX_TRIED: Final = 4 * _NUM_STANDBYS  # most peers tried for one state; those that failed are tried last the next time
_POLL_S: Final = 1.0  # interval of checks whether a run can continue
_POLL_START_S: Final = 0.1  # interval of checks whether a trainer waits for the next run

# Packs a loop's state for sending; called only if there is a receiver. Raises `NotPlain` if the state cannot be sent.
PackLoop = Callable[[], Sequence[Tensor]]
# Returns whether a loop could continue at a version. Its second argument is a function of a step and places of batches,
# which returns whether the step's record counts these batches.
CanResume = Callable[[int, Callable[[int, Collection[int]], bool]], bool]


@dataclass(eq=False)
class StandbySender:
    """At the lead: sends the state of the lead's loop to the run's standbys, which are servers that could take over."""

    _transport: Transport
    _candidates: Callable[[], Awaitable[Collection[PeerId]]]  # peers that announced that they could take a run over
    _limits: Limits
    _warned: bool = field(default=False, init=False)
    _failed: set[PeerId] = field(default_factory=set, init=False)  # peers that did not accept the last state sent
    holding: Collection[PeerId] = field(default=(), init=False)  # peers with the newest state that any peer accepted

    async def send(self, run: RunState, version: int, pack: PackLoop) -> None:
        """Send the loop's state at this version of the weights; a peer that does not accept the state is no standby."""
        generation, candidates = run.manifest.generation, set(await self._candidates()) - {self._transport.peer_id}
        chosen = sorted((peer for peer in seniority(run) if peer in candidates), key=lambda peer: peer in self._failed)
        if not chosen:
            self.holding = ()
            return
        try:
            tensors = pack()
        except SwarmError as error:
            self._warn(str(error))
            return
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self._limits.loop_bytes:
            self._warn(f"it has {size} bytes, and `Limits.loop_bytes` is {self._limits.loop_bytes}. Raise the limit.")
            return
        head = KeptLoop(generation=generation, version=version)
        self.holding = await self._keep_at_some(chosen[:_MAX_TRIED], head, tensors) or self.holding

    async def _keep_at_some(self, peers: Sequence[PeerId], head: KeptLoop, tensors: Sequence[Tensor]) -> list[PeerId]:
        """Try peers in order until enough of them keep the state; return the peers that do."""
        holding: list[PeerId] = []
        while peers and len(holding) < _NUM_STANDBYS:
            missing = _NUM_STANDBYS - len(holding)
            tried, peers = peers[:missing], peers[missing:]
            answers = await gather(self._keeps(peer, head, tensors) for peer in tried)
            holding += [peer for peer, keeps in zip(tried, answers, strict=True) if keeps]
        return holding

    async def _keeps(self, peer: PeerId, head: KeptLoop, tensors: Sequence[Tensor]) -> bool:
        self._failed.add(peer)  # before the call, which is cancelled when the next state is to be sent
        try:
            await KEEP_LOOP.ask(self._transport, peer, head, tensors, timeout=self._limits.call_timeout, max_bytes=0)
        except SwarmError as error:
            _log.info("%s does not keep the state of this trainer's loop: %s", peer, error)
            return False
        self._failed.discard(peer)
        return True

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "No peer could take over this run if this process died, because no peer gets its loop's state: %s",
                reason,
            )


async def release(transport: Transport, run: RunState, first_step: int, *, timeout: float) -> list[PeerId]:
    """Release a run's servers, which then wait for its next generation at `first_step`; return those that answer."""
    request = ReleaseRequest(generation=run.manifest.generation, first_step=first_step)
    # Repeated, because a server whose answer is lost would wait for a generation that begins without it.
    return list(await ask_each(transport, run.servers, RELEASE, request, timeout=timeout, tries=MAX_TRIES))


async def why_cannot_continue(
    transport: Transport, run: RunState, num_known_dead: Callable[[], int], *, timeout: float, silence_s: float
) -> str:
    """Return why a run cannot continue even after `timeout` (a stage or most voters are missing); empty if it can."""
    deadline = now_s() + timeout
    while True:
        servers = sorted({*run.servers, *(voter.peer_id for voter in run.voters)})
        # Not pings: a server that was started again would answer them, although it is in no run.
        alive = set(await ask_held(transport, servers, timeout=silence_s))
        reason = why_lost(run, alive)
        # If all missing peers are processes of this machine that have ended, waiting is pointless.
        if not reason or now_s() >= deadline or num_known_dead() >= len(servers) - len(alive):
            return reason
        await asyncio.sleep(_POLL_S)


def why_lost(run: RunState, alive: Collection[PeerId]) -> str:
    """Return why a run cannot continue with these peers; empty if it can."""
    empty = [index for index, roster in enumerate(run.rosters) if not any(peer.peer_id in alive for peer in roster)]
    if empty:
        return f"no server of stage{'s' if len(empty) > 1 else ''} {', '.join(map(str, empty))} answers"
    num_voters, num_left = len(run.voters), sum(voter.peer_id in alive for voter in run.voters)
    if num_left * 2 > num_voters:
        return ""
    return f"only {num_left} of {num_voters} voters answer{run.electorate.remedy}"


async def newer_run(transport: Transport, run: RunState, *, timeout: float) -> Manifest | None:
    """Return the run's new manifest if another peer leads it by now, according to servers that may decide records."""
    others = [peer for peer in run.servers if peer != transport.peer_id and run.decides(peer)]
    views = await gather(ask_view(transport, peer, timeout=timeout) for peer in others)
    manifests = [view.manifest for view in views if view is not None]
    newest = max(manifests, key=lambda manifest: manifest.generation, default=None)
    if newest is None or newest.generation < run.manifest.generation or newest.lead == transport.peer_id:
        return None
    return newest


async def resumable_versions(
    transport: Transport, trainers: Iterable[PeerId], versions: Collection[int], *, timeout: float
) -> set[int]:
    """Return the versions at which the loops of all these trainers could continue; ignore trainers without answer."""
    request = LoopRequest(versions=sorted(versions))

    async def ask(trainer: PeerId) -> set[int] | None:
        try:
            return set((await LOOP.ask(transport, trainer, request, timeout=timeout)).versions)
        except PeerError as error:
            _log.info("Trainer %s does not report where it could resume: %s", trainer, error)
            return None

    answers = [answer for answer in await gather(map(ask, trainers)) if answer is not None]
    return set(versions).intersection(*answers)


async def await_loops(
    transport: Transport, trainers: Iterable[PeerId], *, timeout: float, check: Callable[[], None]
) -> None:
    """Wait until all these released trainers wait for the next run; raise a `PeerError` if one is gone or late."""
    deadline_s = now_s() + timeout
    late = list(trainers)
    while late:
        check()  # raises when waiting has become pointless
        trainer, request = late[-1], LoopRequest(versions=[])
        if (await LOOP.ask(transport, trainer, request, timeout=timeout)).waits:
            late.pop()
        elif now_s() >= deadline_s:
            raise DeadlineExceeded(
                f"trainer {trainer} was notified that the run rolls back, but did not return to it within {timeout:g} "
                "s. Raise `Limits.start_timeout` if its batches, or the start of its data loader, take longer."
            )
        else:
            await asyncio.sleep(_POLL_START_S)


class RollbackFollower:
    """A trainer that is not the lead: reports where its loop could resume, and follows rollbacks through its server."""

    def __init__(self, transport: Transport, admission: Admission, *, limits: Limits) -> None:
        self._transport = transport
        self._admission = admission
        self._limits = limits
        self.can_resume: CanResume = lambda *_: False  # called on the event loop
        self.waits = False  # this trainer waits for a run to begin
        self.run: RunState | None = None  # None: this trainer is in no run
        LOOP.serve(transport, self._handle_loop)

    def enter_run(self, run: RunState) -> None:
        """Set the run that this trainer is in."""
        self.run, self.waits = run, False

    def leave_run(self) -> None:
        """Forget the run; called before the request to join a run, which may release this trainer's server at once."""
        self.run = None
        self.can_resume = lambda *_: False

    @property
    def _lead(self) -> PeerId | None:
        return self.run.manifest.lead if self.run is not None else None

    async def _handle_loop(self, caller: PeerId, request: LoopRequest) -> LoopReply:
        lead = self._admission.membership.lead or self._lead  # first the peer that released this trainer's server
        if caller != lead:
            raise ProtocolError(f"only the lead {lead} may roll the run back, got a request of {caller}")
        versions = [version for version in request.versions if self.can_resume(version, self._counts)]
        return LoopReply(versions=versions, waits=self.waits)

    def _counts(self, step: int, firsts: Collection[int]) -> bool:
        """Return whether the step's record counts these batches; the server may have a record before the loop does."""
        return self._admission.membership.has_run and self._admission.membership.run.counts(step, firsts)

    @property
    def has_new_lead(self) -> bool:
        """True if the peer that released this trainer's server leads in place of the former lead."""
        return self._admission.membership.lead not in (None, self._lead)

    async def rollback_step(self) -> int | None:
        """Return the step to which the run rolls back after an error; None if it continues as it is, or is over."""
        if self._transport.closed:  # no other peer can reach this peer
            return None
        released, left = self._admission.released, self._admission.left
        if self.run is not None:
            await first_of(released.wait(), left.wait(), self._while_rollback_possible())
        return self._admission.continues_at if released.is_set() else None

    async def _while_rollback_possible(self) -> None:
        """Wait until no rollback can come: the run can go on, or its lead is gone or rolled back without this peer."""
        run, silence_s, wait_s = self.run, self._limits.silence_timeout, self._limits.revive_timeout
        assert run is not None
        if not await why_cannot_continue(self._transport, run, lambda: 0, timeout=wait_s, silence_s=silence_s):
            return
        deadline_s, lead = now_s() + self._limits.lead_timeout, run.manifest.lead
        while now_s() < deadline_s and await alive_among(self._transport, [lead], timeout=silence_s):
            view = await ask_view(self._transport, lead, timeout=silence_s)
            if view is not None and view.manifest.generation > run.manifest.generation:
                return
            await asyncio.sleep(_POLL_S)
