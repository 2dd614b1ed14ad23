"""The manifest of a run: the starter's decisions for all peers, most of which the next generation keeps."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET

from lightning_swarm.coordinator.membership.kinds import assign_by_kind, check_one_kind
from lightning_swarm.coordinator.membership.rosters import choose_voters
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.network.addresses import host_of
from lightning_swarm.peer import discovery, oversight
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.discovery import ServerAnnouncement
from lightning_swarm.protocol.keepers import may_decide
from lightning_swarm.protocol.messages.run import Keepers, Manifest, Member, Selection
from lightning_swarm.protocol.messages.scaling import LossScaling
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION
from lightning_swarm.server.stage_builder import PeerModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """The settings of a run that its starter decides."""

    ranges: Sequence[range]  # the blocks of each stage
    num_servers: int  # servers to wait for
    num_trainers: int  # how many of these servers must also read data
    seed: int  # seed of all random draws in the stages
    gradient_clip_norm: float | None  # bound on the norm over all stages
    gradient_clip_value: float | None  # bound on each element of the mean gradient
    first_step: int
    selection: Selection | None  # the parameters that train at first; None: the run only evaluates
    max_steps: int | None  # no step opens beyond it; None: the trainer ends the run
    total_steps: int | None  # needed by schedules that servers build
    open_to_trainers: bool = False  # further trainers may join
    scaling: LossScaling | None = None  # scaling of all trainers' losses in the first step
    optimizer: str | None = None  # the kind that every peer must build; see `model.optimizer_state.kind_of`
    # Why machines of different kinds cannot compute bit-identical optimizer steps; empty: they can.
    unportable: str = ""
    generation: int = 0  # rises with each rollback
    former_leads: Sequence[PeerId] = ()  # leads of older generations


def continued(spec: RunSpec, former: Manifest) -> RunSpec:
    """Return the spec of a run's next generation, which keeps its starter's decisions for all peers."""
    clips = {"gradient_clip_norm": former.gradient_clip_norm, "gradient_clip_value": former.gradient_clip_value}
    for name, value in clips.items():
        if getattr(spec, name) != value:
            _log.warning("The run keeps its `%s` of %s; this Trainer's is %s.", name, value, getattr(spec, name))
    # `max_steps` is not kept, because the lead's own loop ends the run.
    if None not in (spec.max_steps, former.max_steps) and spec.max_steps != former.max_steps:
        _log.warning("The run ends with this Trainer's `max_steps` of %s, not %s.", spec.max_steps, former.max_steps)
    return replace(
        spec,
        generation=former.generation + 1,
        seed=former.seed,  # steps that are computed again must draw the same random numbers
        former_leads=former.former_leads or (),
        gradient_clip_norm=former.gradient_clip_norm,
        gradient_clip_value=former.gradient_clip_value,
    )


def make_manifest(
    spec: RunSpec,
    config: SwarmConfig,
    model: PeerModel,
    me: Member,
    servers: Sequence[Member],
    others: Sequence[Member],
    announced: Mapping[PeerId, ServerAnnouncement],
    keepers: Keepers = UNSET,
) -> Manifest:
    """Return record 0 of a run that `me` starts and leads, and in which `others` train.

    `announced` are the servers' announcements. Raises `ConfigError` if no server may coordinate, or if a stage that
    needs machines of one kind has several kinds.
    """
    hosts = {peer: host_of(server.addresses) for peer, server in announced.items() if server.addresses}
    kinds = {peer: server.arithmetic for peer, server in announced.items()}

    # The first server coordinates. The starter's own server comes first, so that the lead's control calls cross no
    # network. Keepers come next, because with strangers only they may coordinate.
    def rank(server: Member) -> tuple[bool, bool]:
        return server.peer_id != me.peer_id, not may_decide(server.peer_id, keepers)

    servers = sorted(servers, key=rank)
    if not may_decide(servers[0].peer_id, keepers):
        raise ConfigError(
            "a run with strangers must be coordinated by a keeper that holds a stage, but none of its first "
            f"{len(servers)} servers is a keeper, and the starter holds no stage with `role={config.role!r}`. Leave "
            "`role` out, so that the starter serves, too, or invite a server with `lightning-swarm invite --role "
            "keeper`."
        )
    trainers = [me, *(member for member in others if member != me)]
    rosters = discovery.assign(len(spec.ranges), servers)
    # Each stage needs machines of one kind. With fewer servers than stages, each stage has a single server.
    if (config.settings.deterministic or spec.unportable) and len(servers) >= len(rosters):
        rosters = assign_by_kind(len(rosters), servers, kinds) or rosters
    stages = model.describe(spec.ranges, [*rosters, trainers])
    manifest = Manifest(
        protocol_version=PROTOCOL_VERSION,
        run_id=config.run_id,
        generation=spec.generation,
        seed=spec.seed,
        lead=me.peer_id,
        trainers=[member.peer_id for member in trainers],
        coordinator=servers[0].peer_id,
        voters=choose_voters(
            [stage.roster for stage in stages], [stage.on_trainers for stage in stages], servers[:1], hosts, keepers
        ),
        settings=config.settings,
        gradient_clip_norm=spec.gradient_clip_norm,
        gradient_clip_value=spec.gradient_clip_value,
        first_step=spec.first_step,
        selection=spec.selection,
        scaling=spec.scaling,
        max_steps=spec.max_steps,
        total_steps=spec.total_steps,
        optimizer=spec.optimizer,
        unportable=spec.unportable or UNSET,
        stages=stages,
        # Only the run's first trainers hold layers around a pipeline.
        open_to_trainers=spec.open_to_trainers and (not rosters or not stages[-1].on_trainers),
        former_leads=list(spec.former_leads) or UNSET,
        keepers=keepers,
    )
    oversight.allow_run(manifest)
    for index, stage in enumerate(manifest.stages):
        check_one_kind(manifest, index, {member.peer_id: kinds.get(member.peer_id, "") for member in stage.roster})
    return manifest
