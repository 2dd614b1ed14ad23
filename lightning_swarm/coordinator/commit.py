"""Ends a step: freezes and averages the sums, has the record decided, and has servers apply it.

A server that does not answer is excluded from the rest of the step. The step's record removes it from the rosters or,
after a late step, the next record. Its microbatches are replayed on other servers (`step/reconcile.py`), and the round
is repeated.

A record may also order a snapshot. A stage's snapshots must outlive its last server, so a server of another stage, its
backup, also keeps them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import UNSET, UnsetType
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.membership.kinds import mixed_stages
from lightning_swarm.coordinator.membership.moves import PlannedMoves
from lightning_swarm.coordinator.membership.rosters import alone_in, choose_voters, next_rosters
from lightning_swarm.coordinator.membership.servers import ServerMembership
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.open_step import OpenStep, clip_factor
from lightning_swarm.coordinator.step.oversight import CheckedMeans
from lightning_swarm.coordinator.step.reconcile import ReconciledStep, SumReconciliation
from lightning_swarm.coordinator.step.reference import differences
from lightning_swarm.coordinator.step.replay_plan import choose_blamed
from lightning_swarm.coordinator.step.step_servers import StepServers
from lightning_swarm.coordinator.trainer_handlers import TrainerHandlers
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, NotCoordinator, StepError, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import host_of
from lightning_swarm.protocol.bans import active_bans, unrecorded
from lightning_swarm.protocol.keepers import convictions, is_certified_keeper, keepers_after
from lightning_swarm.protocol.messages.run import (
    MAX_KEEPERS,
    NO_CHANGE,
    HeldSnapshot,
    Keepers,
    Member,
    Selection,
    StepChange,
)
from lightning_swarm.protocol.messages.state import SnapshotOrder
from lightning_swarm.protocol.messages.step import AverageReply, Candidate, Closing, Record, Vacancy
from lightning_swarm.protocol.queries import (
    ASK_TIMEOUT_S,
    Held,
    agreed_digest,
    ask_held,
    newest_safe,
    only_recorded,
    version_to_keep,
)

_log = logging.getLogger(__name__)

_GIVEN_UP_AFTER: Final = 2.0  # snapshot intervals until an incomplete snapshot is replaced


def choose_backups(
    rosters: Sequence[Sequence[Member]],
    on_trainers: Sequence[bool],
    hosts: Mapping[PeerId, str],
    *,
    has_standbys: bool = False,
) -> list[PeerId | None]:
    """Choose for each stage a server outside it to keep its snapshots, on another host if possible; None: no server."""
    pipeline = [roster for roster, is_local in zip(rosters, on_trainers, strict=True) if not is_local]
    servers = sorted({member.peer_id for roster in pipeline for member in roster})
    num_stages_kept = dict.fromkeys(servers, 0)
    backups: list[PeerId | None] = []
    for roster, is_local in zip(rosters, on_trainers, strict=True):
        holders = {member.peer_id for member in roster}
        holder_hosts = {hosts[peer] for peer in holders if peer in hosts}
        others = [peer for peer in servers if peer not in holders]
        # A stage on trainers is lost with the trainers. Without a standby, the run then has no loop to continue.
        if (is_local and not has_standbys) or not others:
            backups.append(None)
            continue
        backup = min(others, key=lambda peer: (hosts.get(peer) in holder_hosts, num_stages_kept[peer], peer))
        num_stages_kept[backup] += 1
        backups.append(backup)
    return backups


def agreed_snapshots(
    takers: Sequence[Collection[Member]],  # stage -> servers that were ordered to take a snapshot
    reported: Mapping[PeerId, Sequence[HeldSnapshot]],  # server -> snapshots that it reports
    known: Sequence[HeldSnapshot],  # snapshots in records
    *,
    version: int,
    trusted: Sequence[PeerId] = (),  # the first of them among the takers decides instead of the majority
) -> list[HeldSnapshot]:
    """Return the new snapshots of a version on which most of a stage's `takers` agree. Pure."""
    recorded = {snapshot.stage_index for snapshot in known if snapshot.version == version}
    agreed = []
    for index, members in enumerate(takers):
        peers = [member.peer_id for member in members]
        digests = {
            peer: snapshot.digest
            for peer in peers
            for snapshot in reported.get(peer, ())
            if (snapshot.stage_index, snapshot.version) == (index, version) and index not in recorded
        }
        if (digest := agreed_digest(digests, peers, trusted=trusted)) is not None:
            agreed.append(HeldSnapshot(stage_index=index, version=version, digest=digest))
    return agreed


class SnapshotSchedule:
    """Decides when the servers take a snapshot."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._transport, self._run = context.transport, context.run
        self._interval_s = context.limits.snapshot_interval  # least seconds between snapshots; None: none
        settings = context.run.manifest.settings
        # Least steps between snapshots. The older of two is kept until the newer is complete, so the run can roll back
        # by at least as many steps.
        self._num_steps = (settings.steps_to_conviction or 1) if settings.goes_back else 1
        self._timeout = min(context.limits.call_timeout, ASK_TIMEOUT_S)
        self._last: tuple[int, float] | None = None  # version and time of the newest order
        self.hosts: dict[PeerId, str] = {}  # server -> host, as it reported for the newest order

    def is_due(self, servers: Sequence[PeerId]) -> bool:
        """Return whether the record of the open step should order a snapshot."""
        if self._interval_s is None or len(servers) < 2:  # a lone server has no backup
            return False
        if self._last is None:
            return True
        return self._run.version >= self._last[0] + self._num_steps - 1 and now_s() >= self._last[1] + self._interval_s

    async def order(
        self,
        step: int,
        next_roster: Sequence[Sequence[Member]],
        recorded: Collection[HeldSnapshot],  # snapshots in records up to this one
        resumable: Collection[int] | None,  # versions at which the lead's loop could continue; None: not reported
    ) -> SnapshotOrder | None:
        """Return the snapshot order for the record of `step`, or None if no snapshot is due."""
        at_s = now_s()
        servers = sorted({member.peer_id for roster in next_roster for member in roster})
        if self._interval_s is None or not self.is_due(servers):
            return None
        held: Held = await ask_held(self._transport, servers, timeout=self._timeout)
        if self._run.electorate.has_strangers:
            held = only_recorded(held, recorded)  # a server may report a snapshot that it does not have
        on_trainers = self._run.on_trainers
        completed = newest_safe(held, next_roster, on_trainers)
        if self._last is not None and completed != self._last[0]:
            if at_s < self._last[1] + self._interval_s * _GIVEN_UP_AFTER:
                return None  # the last snapshot is still being copied, which takes bandwidth
            _log.warning("The snapshot of version %d was not completed in time: a new one is taken.", self._last[0])
        self._last = (step + 1, at_s)
        self.hosts = {peer: reply.host for peer, reply in held.items() if reply.host}
        keep = version_to_keep(held, next_roster, on_trainers, resumable)
        has_standbys = any(reply.loops for reply in held.values())
        backups = choose_backups(next_roster, on_trainers, self.hosts, has_standbys=has_standbys)
        return SnapshotOrder(keep=keep, backups=backups)


class StepCommit:
    """Ends steps, one after the other."""

    def __init__(
        self,
        context: CoordinatorContext,
        servers: ServerCalls,
        server_membership: ServerMembership,
        moves: PlannedMoves,
        trainers: TrainerHandlers,
        *,
        fence: Callable[[OpenStep, Sequence[int]], None],  # makes servers abandon calls of struck batches
    ) -> None:
        self._context, self._run, self._events = context, context.run, context.events
        self._oversight, self._servers, self._fence = context.oversight, servers, fence
        self._server_membership, self._moves = server_membership, moves
        self._trainer_membership, self._lead = trainers.membership, trainers.lead
        self._snapshots = SnapshotSchedule(context)
        self._sums: SumReconciliation | None = None  # of the newest step that closed
        # A late step lost servers, which only the next record can remove, because late records change no roster.
        self._has_lost_servers = False
        self._differences: dict[PeerId, str] = {}  # server lost in that step -> how its weights differ

    async def finish(
        self, step: OpenStep, selection: Selection | None, change: StepChange, *, late: bool = False
    ) -> Record | None:
        """Decide the record of a step whose batches are all complete, and have the present servers apply it.

        A `late` step's record changes no membership, because the next step already takes batches. `change` is the
        change with which the step began. Returns None if batches were struck and the step takes new ones. Raises
        SwarmError if the record could not be decided.
        """
        accepted = await self._context.proposer.prepare()
        if accepted is not None:  # this peer's takeover finished all earlier proposals, so this one is a rival's
            raise NotCoordinator(f"step {step.step} is decided by another peer: a voter accepted its record")
        sums = self._sums_of(step, selection, late=late)
        while True:
            closed = await sums.close()
            if closed is None:
                return None
            squared_norm = await self._average(sums, closed, change, late=late)
            if squared_norm is not None:
                break
        hyperparameters = await self._lead.wait_until_ready(step)
        self._moves.take_loads(sums.loads)
        position = None if step.window is None else step.window.end
        record = replaced(self._step_record(closed, squared_norm, hyperparameters), position=position)
        if not late:
            newcomers = await self._server_membership.newcomers(closed.closing)
            record = await self._with_changes(record, change, newcomers, sums.step_servers.gone, sums.convicted)
        await self._context.proposer.decide(record)
        self._oversight.note_committed(record)
        await self._servers.apply(record)
        if late:
            self._has_lost_servers = bool(sums.step_servers.gone)
            self._differences = differences(sums.step_servers.gone)
            self._moves.choose_for_later(sums.step_servers.gone)
            return record
        self._has_lost_servers, self._differences = False, {}
        for ban in active_bans(record.bans):
            self._events.note("expelled", peer=ban.subject, step=record.step, reason=ban.reason)
        self._server_membership.record_applied(record)
        self._trainer_membership.record_applied(record)
        self._moves.record_applied(record)
        return record

    def wants_changes(self) -> bool:
        """Return whether the next record should change the run's membership, or order a snapshot."""
        members = self._server_membership
        must_remove = self._has_lost_servers or bool(self._new_bans() or members.leaving)
        has_moves = self._moves.deferred is not None
        return must_remove or has_moves or members.has_ready_joiner() or self._snapshots.is_due(self._run.servers)

    def _step_record(
        self, closed: ReconciledStep, squared_norm: float, hyperparameters: list[dict[str, Any]]
    ) -> Record:
        """Return a record of the optimizer step and of finished snapshots, without changes of membership."""
        version, takers = self._run.ordered_snapshot or (0, ())
        # Servers that joined after the order have no such snapshot, and servers that are gone need not confirm theirs.
        present_takers = [
            set(ordered) & set(present)
            for ordered, present in zip(takers, self._run.present(closed.closing.absent), strict=False)
        ]
        kinds = self._server_membership.kinds(absent=closed.closing.absent)
        known, trusted = self._run.snapshots, self._run.trusted
        snapshots = agreed_snapshots(present_takers, closed.snapshots, known, version=version, trusted=trusted)
        return Record(
            closing=closed.closing,
            touched=list(closed.touched),
            outcome="apply" if math.isfinite(squared_norm) else "skip",
            squared_norm=squared_norm,
            clip_factor=clip_factor(squared_norm, self._run.manifest.gradient_clip_norm),
            hyperparameters=hyperparameters,
            change=NO_CHANGE,
            left=[],
            newcomers=[],
            next_voters=None,
            departures=[],
            snapshot=None,
            enlisted=[],
            retired=[],
            snapshots=snapshots or UNSET,
            portable=mixed_stages(kinds, self._run.ties.groups()) or UNSET,
        )

    async def _with_changes(
        self,
        record: Record,
        change: StepChange,
        newcomers: Sequence[Candidate],
        gone: Collection[PeerId],
        convicted: Mapping[PeerId, str],
    ) -> Record:
        """Add the changes of the run's membership to a record."""
        convicted = self._run.electorate.new_convictions(convicted)
        gone = {*gone, *convicted}
        newcomers = [newcomer for newcomer in newcomers if newcomer.member.peer_id not in convicted]
        enlisted, retired = self._trainer_membership.next_record_changes(convicted)
        new_peers = [*(newcomer.member.peer_id for newcomer in newcomers), *enlisted]
        invited = self._context.invitations.invitations_of(new_peers)
        if not isinstance(invited, UnsetType):
            newcomers = [newcomer for newcomer in newcomers if newcomer.member.peer_id in invited]
            enlisted = [peer for peer in enlisted if peer in invited]
        movers, releases = self._moves.choose(gone)
        leaving = [*self._server_membership.leaving, *(mover.member.peer_id for mover in movers)]
        next_roster = next_rosters(
            self._run.rosters, gone=gone, leaving=leaving, releases=releases, newcomers=newcomers
        )
        staying = {member for roster in next_roster for member in roster}
        recorded = [*self._run.snapshots, *(record.snapshots or ())]
        snapshot = await self._snapshots.order(record.step, next_roster, recorded, self._lead.resumable)
        hosts = self._snapshots.hosts | {new.member.peer_id: host_of(new.addresses) for new in newcomers}
        keepers, electorate = self._new_keepers(newcomers), self._run.electorate
        voters = choose_voters(
            next_roster, self._run.on_trainers, self._run.voters, hosts, keepers_after(electorate.keepers, keepers)
        )
        return replaced(
            record,
            change=change,
            left=self._vacancies(next_roster),
            newcomers=list(newcomers),
            next_voters=None if voters == self._run.voters else voters,
            departures=[mover for mover in movers if mover.member not in staying],
            snapshot=snapshot,
            enlisted=enlisted,
            retired=retired,
            invited=invited or UNSET,
            bans=self._new_bans() or UNSET,
            keepers=keepers,
            convicted=convictions(convicted),
            goes_back=self._oversight.goes_back(self._run, record.step, convicted) or UNSET,
        )

    def _vacancies(self, next_roster: Sequence[Sequence[Member]]) -> list[Vacancy]:
        """Return the servers that leave each stage, with the reason if their weights differ."""
        reasons = self._differences | ({} if self._sums is None else differences(self._sums.step_servers.gone))
        return [
            Vacancy(member=member, stage_index=index, reason=reasons.get(member.peer_id, UNSET))
            for index, (before, after) in enumerate(zip(self._run.rosters, next_roster, strict=True))
            for member in before
            if member not in after
        ]

    def _new_keepers(self, newcomers: Sequence[Candidate]) -> Keepers:
        """Return the newcomers with a keeper's certificate, which may vote from this record on; unset if none."""
        run, transport = self._run, self._context.transport
        peers = [new.member.peer_id for new in newcomers if not run.decides(new.member.peer_id)]
        room = MAX_KEEPERS - len(run.electorate.keepers or ())
        return [peer for peer in peers if is_certified_keeper(transport, peer)][:room] or UNSET

    def _new_bans(self) -> list[bytes]:
        return unrecorded(self._run.bans, self._context.transport.bans)

    def _sums_of(self, step: OpenStep, selection: Selection | None, *, late: bool) -> SumReconciliation:
        """Return the reconciliation of a step; a step that closes again keeps its lost servers and round numbers."""
        if self._sums is None or self._sums.step is not step:
            self._sums = SumReconciliation(
                self._context,
                self._servers,
                step,
                selection,
                late=late,
                joining=lambda: not late and self._server_membership.has_ready_joiner(),
                fence=self._fence,
            )
        self._sums.oversight.is_snapshot_due = self._snapshots.is_due(self._run.servers)
        return self._sums

    async def _average(
        self, sums: SumReconciliation, closed: ReconciledStep, change: StepChange, *, late: bool
    ) -> float | None:
        """Average, and return the mean gradient's squared norm over all stages; None if the round must be repeated."""
        closing = closed.closing
        listening = [] if late else self._server_membership.listen(closed, change)
        choose = partial(self._choose_blamed, closing, ())
        answered, failed = await self._servers.average(closing, closed.named, is_late_step=late, choose_blamed=choose)
        if not failed and not any(reply.failure for reply in answered.values()):
            checked = await sums.oversight.check_means(closing, change.selection or self._run.selection, answered)
            return await self._apply_check(checked, sums, closed, listening)
        for task in listening:
            task.cancel()  # a failed round is no miss of the joiners
        self._blame(sums.step_servers, closing, failed, answered)
        return None

    async def _apply_check(
        self,
        checked: CheckedMeans,
        sums: SumReconciliation,
        closed: ReconciledStep,
        listening: Sequence[asyncio.Task[None]],
    ) -> float | None:
        """Exclude servers by the check of a round's means, and return as `_average` does."""
        closing = closed.closing
        if checked.counts:
            for peer in sorted(checked.accused.keys() - {self._servers.own}):
                # The accused server committed to its sum, so the sum still counts. A stage's only server stays.
                if not alone_in(sums.step_servers.rosters, peer, sums.step_servers.peers):
                    sums.step_servers.exclude(peer, StepError(checked.accused[peer]))
            averaging_s = now_s() - closed.began_s
            await self._server_membership.miss_late_listeners(
                closing, listening, averaging_s=averaging_s, parts=checked.parts
            )
            return checked.squared_norm
        for task in listening:
            task.cancel()
        for peer, reason in checked.convicted.items():
            sums.convict(peer, reason)
        if checked.convicted:
            self._events.note("round_repeated", step=closing.step, reason="; ".join(checked.convicted.values()))
        else:
            self._blame(sums.step_servers, closing, checked.failed, {})
        return None

    def _blame(
        self,
        servers: StepServers,
        closing: Closing,
        failed: Mapping[PeerId, SwarmError],
        answered: Mapping[PeerId, AverageReply],
    ) -> None:
        """Suspect the servers that made a round fail."""
        failures = [*map(str, failed.values()), *(reply.failure for reply in answered.values())]
        reason = "; ".join(filter(None, failures))
        self._events.note("round_repeated", step=closing.step, reason=reason)
        unreached = {peer: reply.unreached for peer, reply in answered.items()}
        choose = partial(self._choose_blamed, closing)
        blamed = choose(failed, unreached)
        if not blamed:
            refusing = {peer: reply.refusing for peer, reply in answered.items() if reply.failure}
            accused = choose((), refusing) if self._run.electorate.has_strangers else []
            servers.note_failed_round(reason, accused or refusing)
        for peer in blamed:
            servers.suspect(
                peer, failed.get(peer) or DeadlineExceeded(f"{peer} was not reached while averaging: {reason}")
            )

    def _choose_blamed(
        self, closing: Closing, failed: Collection[PeerId], unreached: Mapping[PeerId, Collection[PeerId]]
    ) -> list[PeerId]:
        """Choose the servers to blame for a failed round, by missing answers and by reports of unreached peers."""
        rosters = [[member.peer_id for member in roster] for roster in self._run.present(closing.absent)]
        # Servers of stages that share parameters also exchange gradients, so they can accuse each other.
        rosters += [[peer for index in group for peer in rosters[index]] for group in self._run.ties.groups()]
        strangers, trusted = self._run.electorate.has_strangers, self._run.trusted
        return choose_blamed(
            rosters, failed, unreached, spared=self._servers.own, has_strangers=strangers, trusted=trusted
        )
