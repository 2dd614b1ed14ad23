"""How a run begins: what its starter decides, and record 0 made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from msgspec import UNSET, structs

from lightning_swarm import membership, survey
from lightning_swarm.config import Compression, SwarmConfig
from lightning_swarm.errors import ConfigError, SwarmError
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.server.model import Model
from lightning_swarm.steps import VIEW
from lightning_swarm.steps.rosters import choose_voters
from lightning_swarm.tasks import gather
from lightning_swarm.types.runs import Encoding, Manifest, Member, Selection
from lightning_swarm.types.wire import PROTOCOL_VERSION


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What the starter of a run decides.

    Args:
        ranges: The blocks of each stage.
        num_servers: How many servers to wait for.
        num_trainers: How many of them must read data, too.
        seed: Of all random draws in the stages.
        gradient_clip_norm: Over all stages; None does not clip.
        gradient_clip_value: Of each element of the mean gradient; None does not clip.
        first_step: Where the run begins, or goes on.
        selection: Which parameters train at first; None: it only evaluates.
        max_steps: No step opens beyond it; None: the trainer ends the run.
        total_steps: For schedules that servers build.
        open_to_trainers: Others may come to train, too.
        optimizer: Of which kind every peer must build it; see `server.model.kind_of`.
        generation: Later than all that the servers were in with the lead.
        former_leads: Of older generations of the run.
    """

    ranges: Sequence[range]
    num_servers: int
    num_trainers: int
    seed: int
    gradient_clip_norm: float | None
    gradient_clip_value: float | None
    first_step: int
    selection: Selection | None
    max_steps: int | None
    total_steps: int | None
    open_to_trainers: bool = False
    optimizer: str | None = None
    generation: int = 0
    former_leads: Sequence[PeerId] = ()


async def check_first(directory: Directory, transport: Transport, config: SwarmConfig) -> None:
    """One run at a time: two would take each other's servers.

    Raises:
        ConfigError: The run that would begin is under way.
    """
    for coordinator in await membership.find_runs(directory, transport, config.run_id):
        try:
            await transport.call(coordinator, VIEW, b"", timeout=config.limits.leave_timeout)
        except SwarmError:
            continue  # what is left of an earlier one
        raise ConfigError(
            f"a run has one starter, and {config.run_id!r} is under way. Serve it with `role='server'`, or "
            "start another one with another `run_id`."
        )


async def check_run_id(transport: Transport, config: SwarmConfig) -> None:
    """Whoever is to serve a run was told of peers of that run. Those that do not answer say nothing against it.

    Raises:
        ConfigError: All that answer are for other runs.
    """
    peers = {address.peer_id for address in config.initial_peers}
    found = await gather(survey.run_id_of(transport, peer, timeout=config.limits.leave_timeout) for peer in peers)
    there = sorted({run_id for run_id in found if run_id is not None})
    if there and config.run_id not in there:
        raise ConfigError(
            f"`run_id` must be that of the run to serve: {config.run_id!r} here, and {', '.join(map(repr, there))} at "
            f"{', '.join(map(str, config.initial_peers))}. Set `run_id={there[0]!r}`, or name a peer of the other run."
        )


def kept(config: SwarmConfig, manifest: Manifest) -> SwarmConfig:
    """The settings of a peer that goes on with another one's run: where the starter's word holds, those of the run."""
    return replace(
        config,
        microbatch_size=manifest.microbatch_size or None,
        compression=Compression(**structs.asdict(manifest.encoding)),
        rebalancing=manifest.rebalancing,
        rebalance_interval=manifest.rebalance_interval,
    )


def manifest(
    spec: RunSpec,
    config: SwarmConfig,
    model: Model,
    me: Member,
    servers: Sequence[Member],
    others: Sequence[Member],
    hosts: Mapping[PeerId, str],
) -> Manifest:
    """Record 0 of a run.

    Args:
        spec: The run.
        config: The starter's settings.
        model: Its copy.
        me: The starter, which leads.
        servers: Those that it begins with.
        others: Who trains beside it.
        hosts: On which machines the servers are, where that is known.
    """
    # The starter's own server coordinates: its trainer's control calls then cross no network.
    servers = sorted(servers, key=lambda member: member.peer_id != me.peer_id)
    trainers = [me, *(member for member in others if member != me)]
    rosters = membership.assign(len(spec.ranges), servers)
    stages = model.describe(spec.ranges, [*rosters, trainers])
    return Manifest(
        protocol_version=PROTOCOL_VERSION,
        run_id=config.run_id,
        generation=spec.generation,
        seed=spec.seed,
        lead=me.peer_id,
        trainers=[member.peer_id for member in trainers],
        coordinator=servers[0].peer_id,
        voters=choose_voters(rosters, servers[:1], hosts),
        target_batch_size=config.target_batch_size,
        microbatch_size=config.microbatch_size or UNSET,
        rebalancing=config.rebalancing,
        rebalance_interval=config.rebalance_interval,
        delay_optimizer_step=config.delay_optimizer_step,
        deterministic=config.deterministic,
        encoding=Encoding(**asdict(config.compression)),
        gradient_clip_norm=spec.gradient_clip_norm,
        gradient_clip_value=spec.gradient_clip_value,
        first_step=spec.first_step,
        selection=spec.selection,
        max_steps=spec.max_steps,
        total_steps=spec.total_steps,
        optimizer=spec.optimizer,
        stages=stages,
        # Layers on the trainers are held by those that the run began with.
        open_to_trainers=spec.open_to_trainers and not stages[-1].on_trainers,
        former_leads=list(spec.former_leads) or UNSET,
    )
