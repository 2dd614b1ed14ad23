"""Admits joining servers to a stage's roster, and releases leaving servers from it, each by a record.

A joiner sends `JOIN`, is introduced to every server (`MEET`), and downloads the state of its stage from a member. Once
it has caught up, it sends `READY`. In a later round of averaging, the coordinator sends it `LISTEN`: it also keeps that
round's mean gradient, so that it can apply the round's record, which admits it. A member that wants to leave sends
`DRAIN`. The next record that can spare it removes it, and until that record is applied, it serves like any other.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.membership.kinds import check_one_kind, mixed_stages, needs_one_kind
from lightning_swarm.coordinator.membership.rosters import alone_in, next_rosters
from lightning_swarm.coordinator.membership.stage_lots import StageLots
from lightning_swarm.coordinator.rebalancing.balancer import Balancer
from lightning_swarm.coordinator.step.reconcile import ReconciledStep
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy, ConfigError, ProtocolError, SwarmError, Unconfirmed, Unreachable
from lightning_swarm.core.tasks import cancel_and_wait, gather
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.protocol.messages.membership import (
    DrainReply,
    DrainRequest,
    JoinReply,
    JoinRequest,
    ListenRequest,
    ReadyReply,
    ReadyRequest,
)
from lightning_swarm.protocol.messages.run import Member, StepChange
from lightning_swarm.protocol.messages.step import Candidate, Closing, Record
from lightning_swarm.protocol.rpc import DRAIN, JOIN, LISTEN, MEET, READY
from lightning_swarm.protocol.run_state import boot_ids, check_protocol_version

_log = logging.getLogger(__name__)

_MAX_MISSES: Final = 3  # missed rounds of a joiner, before it may not join for a while
_MAX_MISSING: Final = 1024  # peers whose misses are remembered
_FIRST_EXCLUSION_S: Final = 5.0  # doubles with each further miss
_MAX_CANDIDATES: Final = 64  # servers that are joining at the same time
_FIRST_READY_S: Final = 300.0  # time for a download; a slower joiner has stalled, and frees its slot if all are taken
_STALLED_S: Final = 60.0  # time for which a stalled joiner may not ask again
_MIN_PER_ROUND: Final = 2  # joiners that a round may take for one stage, even if the stage has fewer servers
_MEET_TIMEOUT_S: Final = 10.0
_MAX_HOST_PORTS: Final = 8  # addresses of a joiner that are dialed to see which peer answers there
_GRACE_S: Final = 2.0  # least time for a joiner to report that it holds the mean gradient, once the members do
_ROLLED_BACK: Final = "The run was rolled back to weights that this peer does not have. Join again."


@dataclass
class JoinBackoff:
    """The rounds that each joining peer missed in all its attempts, and the time until its next attempt.

    A joiner misses a round of averaging if it does not report in time that it holds the mean gradient.
    """

    # Peer -> (number of misses, time of its next attempt), the latest miss last.
    _missed: dict[PeerId, tuple[int, float]] = field(default_factory=dict)

    def add(self, peer: PeerId, *, now_s: float, least_s: float = 0.0) -> None:
        """Count a missed round. From `_MAX_MISSES` on, the peer may not join for a time that doubles each time."""
        count = self._missed.pop(peer, (0, 0.0))[0] + 1
        until_s = now_s + least_s
        if count >= _MAX_MISSES:
            until_s = now_s + max(least_s, _FIRST_EXCLUSION_S * 2 ** min(count - _MAX_MISSES, 20))
        self._missed[peer] = count, until_s
        if len(self._missed) > _MAX_MISSING:
            del self._missed[next(iter(self._missed))]

    def missed(self, peer: PeerId, *, now_s: float) -> tuple[int, float]:
        """Return how many rounds a peer missed, and seconds until it may join; not positive: it may now."""
        count, until_s = self._missed.get(peer, (0, 0.0))
        return count, until_s - now_s

    def clear(self, peer: PeerId) -> None:
        """Forget the misses of a peer that has joined."""
        self._missed.pop(peer, None)


@dataclass(frozen=True, eq=False)
class _Round:
    """A round of averaging whose mean gradient joiners are asked to hold, too."""

    request: ListenRequest
    version_hashes: Sequence[int | None]  # hash of each stage's weights before the step; None: not requested


@dataclass
class _WaitingServer:
    """A joining server, from its request to the record that admits it."""

    candidate: Candidate
    machine_kind: str  # see `FreezeReply.arithmetic`
    last_heard_s: float
    since_s: float  # time of its first `JOIN`, or of the first since it was last ready
    ready: bool = False
    caught_up: bool = False  # it was ready once
    asked: _Round | None = None  # the last round whose mean gradient it was asked to hold
    holds: _Round | None = None  # the round whose mean gradient it holds
    parts: Sequence[bytes] = ()  # digests of that mean's parts, if servers are strangers
    refusal: str | None = None  # the error that answers its next `READY`; None: it may still join
    weights_differ: bool = False  # refused because its weights differ from its stage's

    @property
    def may_enter(self) -> bool:
        """Return whether it may be asked to hold a round's mean gradient."""
        return self.ready and self.refusal is None


@dataclass(eq=False)
class Joiners:
    """The joining servers, their missed rounds and their stage lots, which outlive a rollback."""

    waiting: dict[PeerId, _WaitingServer] = field(default_factory=dict)
    backoff: JoinBackoff = field(default_factory=JoinBackoff)
    lots: StageLots = field(default_factory=StageLots)

    def refuse_all(self) -> None:
        """Refuse all joiners after a rollback, because they have downloaded weights of the old generation."""
        for joiner in self.waiting.values():
            joiner.refusal = _ROLLED_BACK


class ServerMembership:
    """Decides which servers join with which record, and which leave."""

    def __init__(
        self,
        context: CoordinatorContext,
        balancer: Balancer,
        joiners: Joiners,
        *,
        on_restarted_lead: Callable[[], None],  # called when the lead joins as another process
    ) -> None:
        self._transport, self._run, self._limits = context.transport, context.run, context.limits
        self._events, self._spawn, self._machine_kinds = context.events, context.spawn, context.machine_kinds
        self._balancer, self._on_restarted_lead = balancer, on_restarted_lead
        self._waiting, self._misses, self._lots = joiners.waiting, joiners.backoff, joiners.lots
        for index, roster in enumerate(self._run.rosters):
            for member in roster:
                self._lots.record_stage(member.peer_id, index)  # it may choose this stage if it joins again
        self._wait_s = context.oversight.wait_s
        self._invitations = context.invitations
        self._invitations.waiting_lists.append(self)
        self._entering: set[PeerId] = set()  # joiners that the record being decided admits
        self._leaving: dict[PeerId, None] = {}  # ordered by request; after a rollback they ask again

    def answer(self) -> None:
        """Begin to answer servers that join or leave."""
        JOIN.serve(self._transport, self._handle_join)
        READY.serve(self._transport, self._handle_ready)
        DRAIN.serve(self._transport, self._handle_drain)

    @property
    def leaving(self) -> list[PeerId]:
        """The members that asked to leave, in the order of requests."""
        return list(self._leaving)

    def has_ready_joiner(self) -> bool:
        """Return whether a joiner has caught up, so that the next record may admit it."""
        return any(joiner.may_enter for joiner in self._waiting.values())

    @property
    def targets(self) -> dict[PeerId, int]:
        """The stage of each joining peer."""
        return {peer: joiner.candidate.stage_index for peer, joiner in self._waiting.items()}

    @property
    def waiting(self) -> list[PeerId]:
        """The joining peers."""
        return list(self._waiting)

    def forget(self, peer: PeerId) -> None:
        """Drop a joiner that is gone, unless the record being decided may admit it."""
        if peer not in self._entering:
            self._waiting.pop(peer, None)

    # ------------------------------------------------------------------ the joiners' calls

    async def _handle_join(self, caller: PeerId, request: JoinRequest) -> JoinReply:
        """Let a server begin to join: choose its stage, and have all servers meet it."""
        self._drop_silent_joiners(caller)
        await self._invitations.free_lost_uses(caller)
        self._check_may_join(caller, request)
        self._invitations.reserve(caller)
        stage_index = self._fit_to_kind(caller, request, self._stage_for(caller, request.stage_index))
        member = Member(peer_id=caller, boot_id=request.boot_id)
        candidate = Candidate(member=member, stage_index=stage_index, addresses=request.addresses)
        # Added before the introductions, so that of two simultaneous joiners at least one meets the other.
        before = self._waiting.get(caller)
        since_s = now_s() if before is None or before.caught_up else before.since_s
        joiner = self._waiting[caller] = _WaitingServer(candidate, request.arithmetic, now_s(), since_s)
        try:
            await gather([self._introduce(candidate), self._check_answers(candidate)])
        except BaseException:
            if self._waiting.get(caller) is joiner:  # no newer request has replaced it
                del self._waiting[caller]
            raise
        _log.info("Server %s is joining stage %d.", caller, stage_index)
        is_unlike = stage_index in mixed_stages(self.kinds(), self._run.ties.groups())
        return JoinReply(view=self._run.view(), stage_index=stage_index, is_unlike=is_unlike)

    def _check_may_join(self, caller: PeerId, request: JoinRequest) -> None:
        """Refuse a server that may not join, or not yet; if it is the lead in a new process, report the restart."""
        manifest = self._run.manifest
        check_protocol_version(request.protocol_version)
        self._run.electorate.check_not_convicted(caller)
        if not request.addresses or any(address.rpartition("/p2p/")[2] != caller for address in request.addresses):
            raise ProtocolError(f"a joining server sends its own addresses, {caller} sent {request.addresses}")
        if manifest.selection is None:
            raise ConfigError(
                f"servers join between two steps, and run {manifest.run_id!r} takes none. Start it with all servers."
            )
        if caller == manifest.lead and request.boot_id not in boot_ids(manifest, caller):
            self._on_restarted_lead()
        if caller in self._run.servers:
            is_member = any(Member(peer_id=caller, boot_id=request.boot_id) in roster for roster in self._run.rosters)
            what = "it is in the run" if is_member else "it was restarted, and no record has removed its former process"
            raise (ConfigError if is_member else Busy)(
                f"{caller} cannot join run {manifest.run_id!r}: {what}. If another process has its identity, "
                "give every peer its own identity."
            )
        if not self._run.electorate.has_strangers:  # otherwise, a malicious stage could exclude honest servers
            self._run.differing.check_may_join(caller)
        if caller in self._entering:
            raise Busy(f"the record that is being decided may admit {caller}; it may join again after that record")
        if (wait_s := self._wait_s(caller)) > 0:
            raise Busy(f"{caller} answered pings, but no call as a step closed; it may join in {wait_s:.0f} s")
        count, wait_s = self._misses.missed(caller, now_s=now_s())
        if wait_s > 0:
            raise Busy(f"{caller} stalled or missed {count} rounds while it was joining; it may join in {wait_s:.0f} s")

    def _stage_for(self, caller: PeerId, wanted: int | None) -> int:
        """Choose a joiner's stage: `wanted`, else the stage that needs it most. Strangers' stages are drawn."""
        num_stages = self._run.num_pipeline_stages
        others = [joiner for peer, joiner in self._waiting.items() if peer != caller]
        if len(others) >= _MAX_CANDIDATES:
            raise Busy(f"at most {_MAX_CANDIDATES} servers may join at once, and {len(others)} are joining")
        if self._run.manifest.is_whole:
            return 0  # the only stage
        if wanted is not None and wanted >= num_stages:
            raise ProtocolError(f"the run has {num_stages} pipeline stages, got a request for stage {wanted}")
        by_lot = not self._run.decides(caller)
        if wanted is not None and (not by_lot or self._lots.may_choose(caller, wanted)):
            return wanted
        rosters = self._run.rosters[:num_stages]
        staying = [[member.peer_id for member in roster if member.peer_id not in self._leaving] for roster in rosters]
        if by_lot:
            joining = Counter(stage for peer, stage in self.targets.items() if peer != caller)
            num_servers = [len(roster) + joining[index] for index, roster in enumerate(staying)]
            permit = self._transport.permit_of(caller)
            invitation = None if permit is None else permit.invitation
            return self._lots.draw(caller, num_servers, invitation=invitation, waiting=self._waiting)
        return self._balancer.stage_for(caller, staying, self.targets, now_s=now_s())

    def _fit_to_kind(self, caller: PeerId, request: JoinRequest, chosen: int) -> int:
        """Return the chosen stage, or another one if stages need machines of one kind, and the chosen has others."""
        if not needs_one_kind(self._run.manifest):
            return chosen
        kinds, kind_of_joiner = self.kinds(without=caller), {request.arithmetic}
        fitting = [index for index in range(self._run.num_pipeline_stages or 1) if kinds[index] <= kind_of_joiner]
        may_choose = not self._run.electorate.has_strangers  # otherwise, the stage is drawn
        if chosen not in fitting and fitting and may_choose:
            return min(fitting, key=lambda index: len(self._run.rosters[index]))
        self._check_kind(caller, request.arithmetic, chosen)
        return chosen

    def _check_kind(self, peer: PeerId, machine_kind: str, stage_index: int) -> None:
        roster = [member.peer_id for member in self._run.rosters[stage_index]]
        known = {member: self._machine_kinds[member] for member in roster if member in self._machine_kinds}
        check_one_kind(self._run.manifest, stage_index, {**known, peer: machine_kind})

    def kinds(self, *, absent: Collection[PeerId] = (), without: PeerId | None = None) -> list[set[str]]:
        """Return the known kinds of machines that hold each stage, or are joining it."""
        present, known = self._run.present(absent), self._machine_kinds
        kinds = [{known[member.peer_id] for member in roster if member.peer_id in known} for roster in present]
        for peer, joiner in self._waiting.items():
            if peer != without:
                kinds[joiner.candidate.stage_index].add(joiner.machine_kind)
        return kinds

    def _drop_silent_joiners(self, caller: PeerId) -> None:
        """Drop joiners that were silent for too long; if all slots are taken, also joiners that did not catch up."""
        at_s = now_s()
        is_full = len(self._waiting.keys() - {caller}) >= _MAX_CANDIDATES
        for peer, joiner in list(self._waiting.items()):
            # A download may take long. But a peer can repeat its request for free, and must not keep a slot that way.
            if is_full and not joiner.caught_up and joiner.since_s < at_s - _FIRST_READY_S:
                self._misses.add(peer, now_s=at_s, least_s=_STALLED_S)
                del self._waiting[peer]
            elif joiner.last_heard_s < at_s - self._limits.join_timeout:
                del self._waiting[peer]

    async def _introduce(self, candidate: Candidate) -> None:
        """Have every server, and every joiner, meet the candidate; raise Unreachable if a server cannot."""
        newcomer = candidate.member.peer_id
        timeout = min(self._limits.call_timeout, _MEET_TIMEOUT_S)
        refusing = set[PeerId]()

        async def introduce(peer: PeerId, *, is_member: bool) -> None:
            try:
                await MEET.ask(self._transport, peer, candidate, timeout=timeout)
            except SwarmError as error:
                if is_member:
                    refusing.add(peer)
                # A keeper's report, or the reports of most servers, keep a joiner out; a few strangers' reports do not.
                counts = self._run.decides(peer) or 2 * len(refusing) > len(servers)
                if is_member and counts:
                    raise Unreachable(
                        f"every server of the run must reach a joining peer, and {peer} did not reach {newcomer} at "
                        f"{candidate.addresses} ({error}). Unless {peer} itself is gone, set `listen` (and `announce` "
                        "behind a router) to an address that the other peers can reach."
                    ) from error
                _log.info("%s, which is joining, did not meet %s: %s", peer, newcomer, error)

        servers = self._run.servers
        joining = [peer for peer in self._waiting if peer != newcomer and peer not in servers]
        await gather(
            [introduce(peer, is_member=True) for peer in servers]
            + [introduce(peer, is_member=False) for peer in joining]
        )

    async def _check_answers(self, candidate: Candidate) -> None:
        """Refuse a joiner that announces another peer's address, such as the address of the run's first machine."""
        joiner = PeerId(candidate.member.peer_id)

        async def check(host_port: HostPort) -> None:
            host_port.check_answers_as(await self._transport.identify(host_port.maddr), joiner)

        host_ports = {address.host_port for address in Address.parse_all(candidate.addresses[:_MAX_HOST_PORTS])}
        await gather(check(host_port) for host_port in host_ports if host_port.is_unique)

    async def _handle_ready(self, caller: PeerId, request: ReadyRequest) -> ReadyReply:
        """Record that a joiner has caught up with its stage, and return its turn; or raise its refusal."""
        self._run.electorate.check_not_convicted(caller)
        if caller in self._run.servers:
            return ReadyReply(num_before=0)  # sent before it got the record that admitted it
        if request.generation != self._run.manifest.generation:
            raise Busy(_ROLLED_BACK)
        joiner = self._waiting.get(caller)
        if joiner is None:
            raise ProtocolError(f"{caller} is not joining run {self._run.manifest.run_id!r} (any more)")
        if request.version > self._run.version + 1:  # its donor may apply a record sooner than this server does
            raise ProtocolError(f"step {self._run.version} is open, so no server can hold version {request.version}")
        if joiner.refusal is not None:
            del self._waiting[caller]
            raise (Unconfirmed if joiner.weights_differ else Busy)(joiner.refusal)
        stage = joiner.candidate.stage_index
        if not joiner.caught_up:
            self._events.note("download", peer=caller, stage=stage, step=self._run.version)
        joiner.ready = joiner.caught_up = True
        joiner.last_heard_s = now_s()
        ready = [
            peer for peer, other in self._waiting.items() if other.may_enter and other.candidate.stage_index == stage
        ]
        return ReadyReply(num_before=ready.index(caller))

    # ------------------------------------------------------------------ leaving servers

    async def _handle_drain(self, caller: PeerId, request: DrainRequest) -> DrainReply:
        """Record that a server wants to leave; return the stages that keep it, because no other server holds them."""
        self._run.check_generation(request.generation)
        if caller in self._entering:
            raise Busy(f"the record that is being decided may admit {caller}; it may leave after that record")
        if caller not in self._run.servers:
            if self._waiting.pop(caller, None) is None:
                raise ProtocolError(f"{caller} is not in run {self._run.manifest.run_id!r} (any more), nor joining it")
            return DrainReply(alone=[])
        self._check_may_leave(Member(peer_id=caller, boot_id=request.boot_id))
        if caller not in self._leaving:  # otherwise, the request is repeated
            self._leaving[caller] = None
            _log.info("Server %s asks to leave.", caller)
        rosters = next_rosters(self._run.rosters, leaving=self.leaving)
        staying = {member.peer_id for roster in rosters for member in roster}
        return DrainReply(alone=alone_in(rosters, caller, staying))

    def _check_may_leave(self, member: Member) -> None:
        stages = zip(self._run.rosters, self._run.manifest.stages, strict=True)
        held = [stage for roster, stage in stages if member in roster]
        if not held:
            raise ProtocolError(f"{member.peer_id} was restarted: its former process is in the run, this one is not")
        if member.peer_id == self._transport.peer_id:
            raise Busy(f"{member.peer_id} coordinates the run; it may leave once another peer coordinates")
        if any(stage.on_trainers for stage in held) and member.peer_id in self._run.trainers:
            raise ProtocolError(f"{member.peer_id} trains, and may leave only when its loop ends")

    # ------------------------------------------------------------------ a round

    def listen(self, closed: ReconciledStep, change: StepChange) -> list[asyncio.Task[None]]:
        """Ask joiners that have caught up to keep the round's mean gradient, too; return a task for each joiner."""
        closing, version_hashes = closed.closing, closed.version_hashes
        round_ = _Round(ListenRequest(closing=closing, change=change, challenge=closed.challenge), version_hashes)
        rosters = self._run.present(closing.absent)
        listening = []
        num_asked = Counter[int]()
        for joiner in self._waiting.values():
            index = joiner.candidate.stage_index
            # All members send their parts to each joiner, so only some join in one round. A joiner also waits for a
            # later round if it became ready too late for this one to have a hash of its stage.
            most = max(_MIN_PER_ROUND, len(rosters[index]))
            if joiner.may_enter and closed.challenge and version_hashes[index] is not None and num_asked[index] < most:
                num_asked[index] += 1
                joiner.asked = round_
                listening.append(self._spawn(self._listen(joiner, round_, timeout=self._limits.call_timeout)))
        return listening

    async def _listen(self, joiner: _WaitingServer, round_: _Round, *, timeout: float) -> None:
        """Ask a joiner to keep a round's mean gradient; refuse the joiner if its weights are not its stage's."""
        member = joiner.candidate.member
        try:
            reply = await LISTEN.ask(self._transport, member.peer_id, round_.request, timeout=timeout)
        except SwarmError as error:
            self._miss(joiner, str(error))
            return
        stage = joiner.candidate.stage_index
        try:
            self._check_kind(member.peer_id, joiner.machine_kind, stage)
        except ConfigError as error:  # the kind of the stage's servers was unknown when it asked to join
            joiner.refusal = str(error)
            return
        if reply.boot_id != member.boot_id:
            joiner.refusal = f"{member.peer_id} was restarted while it was joining. Join again."
        elif reply.version_hash != round_.version_hashes[stage]:
            joiner.refusal = (
                f"the weights of {member.peer_id} differ from the weights of stage {stage}, which it downloaded: its "
                "torch may compute the optimizer step differently, or its memory may be faulty. Join again."
            )
            joiner.weights_differ = True
        else:
            joiner.holds, joiner.parts = round_, reply.parts or ()
            return
        _log.warning("A server was not admitted: %s", joiner.refusal)

    async def miss_late_listeners(
        self,
        closing: Closing,
        listening: Collection[asyncio.Task[None]],
        *,
        averaging_s: float,
        parts: Sequence[Sequence[bytes]],  # stage -> digests of the mean that its joiners must hold; empty: not checked
    ) -> None:
        """Wait a little for joiners to report a round's mean, and count a miss for slower and for wrong reports."""
        if not listening:
            return
        _, late = await asyncio.wait(listening, timeout=max(_GRACE_S, averaging_s))
        await cancel_and_wait(late)
        for joiner in self._waiting.values():
            was_asked = joiner.asked is not None and joiner.asked.request.closing is closing
            holds = was_asked and joiner.holds is joiner.asked
            if was_asked and not holds and joiner.ready and joiner.refusal is None:
                self._miss(joiner, "it did not hold the round's mean in time")
            elif holds and parts and [*joiner.parts] != [*parts[joiner.candidate.stage_index]]:
                # The server that reduced a part may have sent other values to the joiner than to the members.
                joiner.holds = None
                self._miss(joiner, "it holds another mean than the members of its stage")

    async def newcomers(self, closing: Closing) -> list[Candidate]:
        """Return the joiners that still hold the round's mean gradient, and which its record therefore admits."""
        # The record may have waited long for the lead, so joiners are asked again. A joiner that has sent `JOIN` again
        # meanwhile counts as a new one, which holds no mean.
        holding = [
            joiner for joiner in self._waiting.values() if joiner.holds and joiner.holds.request.closing is closing
        ]
        self._entering = {joiner.candidate.member.peer_id for joiner in holding}  # their `JOIN` is refused from now on

        async def ask_again(joiner: _WaitingServer) -> None:
            round_, joiner.holds = joiner.holds, None
            assert round_ is not None
            await self._listen(joiner, round_, timeout=_GRACE_S)

        await gather(map(ask_again, holding))
        candidates = [joiner.candidate for joiner in holding if joiner.holds is not None]
        self._entering = {candidate.member.peer_id for candidate in candidates}
        return sorted(candidates, key=lambda candidate: candidate.member.peer_id)

    def _miss(self, joiner: _WaitingServer, reason: str) -> None:
        """Count a round that a joiner missed; after too many, refuse the joiner."""
        peer, at_s = joiner.candidate.member.peer_id, now_s()
        self._misses.add(peer, now_s=at_s)
        joiner.ready = False  # it has to send `READY` again
        _log.info("%s missed a round: %s", peer, reason)
        count, wait_s = self._misses.missed(peer, now_s=at_s)
        if wait_s > 0:
            joiner.refusal = f"{peer} missed {count} rounds: {reason}. Join again."

    def record_applied(self, record: Record) -> None:
        """Record the servers that an applied record admitted, and the leaving servers that it released."""
        for departure in record.departures:
            self._lots.record_stage(departure.member.peer_id, departure.stage_index)
        self._entering.clear()
        for peer in sorted(self._leaving.keys() - set(self._run.servers)):
            del self._leaving[peer]
            self._events.note("left", peer=peer, step=self._run.version, reason="as it asked to")
        for peer in self._waiting.keys() & self._run.electorate.convicted.keys():
            del self._waiting[peer]
        for candidate in record.newcomers:
            peer, stage = candidate.member.peer_id, candidate.stage_index
            self._waiting.pop(peer, None)
            self._misses.clear(peer)
            self._lots.record_stage(peer, stage)
            self._events.note("joined", peer=peer, stage=stage, step=self._run.version)
