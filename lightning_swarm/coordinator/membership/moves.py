"""Chooses the servers that a record releases for rebalancing, which then join another stage like newcomers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

import torch

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.membership.servers import ServerMembership
from lightning_swarm.coordinator.rebalancing.balancer import Balancer, ReportedLoad
from lightning_swarm.coordinator.rebalancing.policy import StageRelease
from lightning_swarm.core.clock import now_s
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Manifest
from lightning_swarm.protocol.messages.step import Departure, Record

_STATE_FACTOR: Final = 3  # bytes of a stage's state per byte of its weights, with two moments of the optimizer


def balancer_of(manifest: Manifest, *, now_s: float) -> Balancer:
    """Make the balancer of a run's stages, without stages on trainers."""
    state_bytes = [
        _STATE_FACTOR * sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in stage.parameters)
        for stage in manifest.stages
        if not stage.on_trainers
    ]
    return Balancer(manifest.settings.rebalancing, manifest.settings.rebalance_interval, state_bytes, now_s=now_s)


class PlannedMoves:
    """Chooses the moves that the records of a run order."""

    def __init__(self, context: CoordinatorContext, server_membership: ServerMembership, balancer: Balancer) -> None:
        self._run, self._events = context.run, context.events
        self._server_membership, self._balancer = server_membership, balancer
        self._step_aside = context.step_aside
        self._hands_over = False  # another server is to coordinate once the record is applied
        self.deferred: tuple[list[Departure], list[StageRelease]] | None = None  # choice for the next record
        self._servers_at_handover: set[PeerId] | None = None  # servers present when this one last tried to hand over

    def take_loads(self, loads: Mapping[PeerId, Mapping[int, ReportedLoad]]) -> None:
        """Pass on the loads that servers reported as the open step closed."""
        num_stages = self._run.num_pipeline_stages
        # Strangers could gather in one stage by reporting too little memory for all other stages.
        trusts = not self._run.electorate.has_strangers
        self._balancer.take_loads(
            {
                peer: {
                    index: replace(load, lacks_memory=trusts and load.lacks_memory)
                    for index, load in stages.items()
                    if index < num_stages
                }
                for peer, stages in loads.items()
            }
        )

    def choose(self, gone: Collection[PeerId]) -> tuple[list[Departure], list[StageRelease]]:
        """Choose the servers that move or give up a stage with the open step's record, except servers in `gone`."""
        chosen, self.deferred = self.deferred, None
        if chosen is not None:
            movers, releases = chosen
            staying = set(self._run.servers) - {*gone, *self._server_membership.leaving}
            chosen_peers = {*(mover.member.peer_id for mover in movers), *(release.peer for release in releases)}
            # If a peer has left meanwhile, the moves were chosen for another swarm.
            return chosen if chosen_peers <= staying and not gone else ([], [])
        self._hands_over = False  # an earlier choice was applied, or was never decided
        run = self._run
        num_stages = run.num_pipeline_stages
        pipeline, on_trainers = run.rosters[:num_stages], run.rosters[num_stages:]
        members = {member.peer_id: member for roster in pipeline for member in roster if member.peer_id not in gone}
        rosters = [[member.peer_id for member in roster if member.peer_id in members] for roster in pipeline]
        leaving, joining = self._server_membership.leaving, self._server_membership.targets
        if releases := self._balancer.releases(rosters, leaving=leaving, joining=joining, now_s=now_s()):
            return [], releases  # moves are chosen once these releases are applied
        fixed = {*leaving, *(member.peer_id for roster in on_trainers for member in roster)}
        if self._servers_at_handover == members.keys():
            fixed.add(run.coordinator)  # no server took over, so only other servers move
        moves = self._balancer.moves(rosters, fixed=fixed, joining=joining, coordinator=run.coordinator, now_s=now_s())
        if any(move.peer == run.coordinator for move in moves):
            # Hand over the role first. The next coordinator decides on all moves, including this peer's.
            self._hands_over = True
            return [], []
        return [Departure(member=members[move.peer], stage_index=move.target) for move in moves], []

    def choose_for_later(self, gone: Collection[PeerId]) -> None:
        """Choose now, because a late step's record orders no moves; the next `choose` returns the result."""
        movers, releases = self.choose(gone)
        if movers or releases or self._hands_over:
            self.deferred = movers, releases

    def record_applied(self, record: Record) -> None:
        """Record the moves and releases of an applied record."""
        if self._hands_over:
            pipeline = self._run.rosters[: self._run.num_pipeline_stages]
            self._servers_at_handover = {member.peer_id for roster in pipeline for member in roster}
            self._step_aside()
        at_s = now_s()
        for newcomer in record.newcomers:
            self._balancer.note_entered(newcomer.member.peer_id, newcomer.stage_index, now_s=at_s)
        for departure in record.departures:
            peer, target = departure.member.peer_id, departure.stage_index
            (source,) = (vacancy.stage_index for vacancy in record.left if vacancy.member == departure.member)
            self._balancer.note_left(peer, source, target, now_s=at_s)
            self._events.note("moves", peer=peer, stage=target, step=record.step)
        staying = {member for roster in self._run.rosters for member in roster}
        for vacancy in record.left:
            if vacancy.member in staying:
                self._events.note("sheds", peer=vacancy.member.peer_id, stage=vacancy.stage_index, step=record.step)
