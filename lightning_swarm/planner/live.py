"""Reads a live swarm's machines, model and speed from its peers' reports, for the planner. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.monitor.swarm_report import ObservedPeer
from lightning_swarm.network import PeerId
from lightning_swarm.planner.cost_model import GOODPUT, MICROBATCH_S_PER_PARAMETER
from lightning_swarm.planner.records import BlockProfile, Machine, ModelProfile, Now, Setting
from lightning_swarm.protocol.messages.reports import CarriedReport, HeldStage, PeerReport, SampleCosts, ServerReport
from lightning_swarm.protocol.settings import Compression


@dataclass(frozen=True, kw_only=True)
class AssumedRates:
    """The rates that are assumed where a swarm has not measured them."""

    line_bytes_per_s: float  # each way, for links that have carried nothing long enough to measure
    bus_bytes_per_s: float  # between a GPU and its host, each way


@dataclass(frozen=True, kw_only=True)
class LiveSwarm:
    """A running swarm in the planner's terms."""

    model: ModelProfile  # assumes equal blocks in a stage, and unencoded tensors
    compression: Compression  # compression in the real run
    machines: tuple[Machine, ...]  # the servers whose rate is known, the lead first
    now: Now  # its setting is of the newest step, or None if no step was decided since the asked peers joined


def read_swarm(
    reports: Mapping[PeerId, PeerReport],
    observed: Mapping[PeerId, ObservedPeer],  # the peers of `reports`, with rates over some time
    assumed: AssumedRates,
    name: Callable[[str], str] = str,  # peer id -> name
) -> LiveSwarm:
    """Combine the reports and rates of all peers that answered. Raise `SwarmError` if too little is measured."""
    servers = {peer: report.server for peer, report in reports.items() if report.server is not None}
    if not servers:
        raise SwarmError("a plan needs a run's measurements, and no run is under way. Try again once the swarm trains.")
    stages = _stages(servers)
    work = _work(stages)
    rates = _rates(servers, work)
    if not rates:
        raise SwarmError(
            "too little is measured yet: no peer has computed four microbatches of one stage. Try again in a while."
        )
    measured = sorted(rates, key=lambda peer: servers[peer].lead != peer)
    links = _link_usage(reports)
    held = {peer: {stage.index for stage in server.held} for peer, server in servers.items()}
    replicas = [[peer for peer, indices in held.items() if index in indices] for index in range(len(stages))]
    return LiveSwarm(
        model=_model(stages, work, max(server.around_parameters for server in servers.values())),
        compression=next(iter(servers.values())).compression,
        machines=tuple(_machine(name(peer), rates[peer], servers[peer], links[peer], assumed) for peer in measured),
        now=Now(
            setting=_setting(servers.values(), len(stages)),
            samples_per_s=min(sum(observed[peer].samples_per_s for peer in peers) for peers in replicas),
            sent_bytes_per_s=sum(observed[peer].sent_gb_per_hour * 1e9 / 3600 for peer in reports),
            unmeasured=tuple(name(peer) for peer in reports if peer not in rates),
            assumed_lines=tuple(
                name(peer) for peer in measured if not (links[peer].up_bytes_per_s and links[peer].down_bytes_per_s)
            ),
        ),
    )


def _stages(servers: Mapping[PeerId, ServerReport]) -> list[tuple[HeldStage, SampleCosts]]:
    """Read each stage of the pipeline from the report of a server that has measured it."""
    first = next(iter(servers.values()))
    num_stages = first.num_stages - (first.trainers_stage is not None)
    if not num_stages:
        raise SwarmError(
            "a plan needs measurements of stages, and this swarm's model is not cut: trainers are not measured. "
            "Describe machines and model in files instead."
        )
    known: dict[int, tuple[HeldStage, SampleCosts]] = {}
    for stage in (stage for server in servers.values() for stage in server.held):
        if stage.costs is not None:
            known.setdefault(stage.index, (stage, stage.costs))
    missing = [str(index) for index in range(num_stages) if index not in known]
    if missing:
        raise SwarmError(
            f"too little is measured yet: no peer that answers has computed a microbatch of stage {', '.join(missing)} "
            "with a gradient. Try again in a while."
        )
    return [known[index] for index in range(num_stages)]


def _work(stages: Sequence[tuple[HeldStage, SampleCosts]]) -> list[float]:
    """Return the flop of a sample in each stage; if compiled code hides them, estimate linear layers of its size."""
    counted = [costs.flop for _, costs in stages]
    return counted if any(counted) else [6.0 * stage.num_parameters for stage, _ in stages]


def _model(stages: Sequence[tuple[HeldStage, SampleCosts]], work: Sequence[float], num_around: int) -> ModelProfile:
    """Divide each stage into equal blocks. `num_around` counts the parameters of layers in no stage."""
    blocks: list[BlockProfile] = []
    for index, ((stage, costs), flop) in enumerate(zip(stages, work, strict=True)):
        is_last_stage = index == len(stages) - 1
        # All blocks of a stage but the last get the size of the activation at one of its ends. The last stage's output
        # and the first stage's input are often loss values or tokens instead of activations.
        at_input = (costs.input_bytes, costs.input_number_bytes)
        inner_output = (costs.output_bytes, costs.output_number_bytes)
        if is_last_stage:
            inner_output = max(at_input, inner_output) if index == 0 else at_input
        inner_block = BlockProfile(
            parameters=stage.num_parameters // stage.num_blocks,
            flop=flop / stage.num_blocks,
            output_bytes=inner_output[0],
            graph_bytes=costs.graph_bytes // stage.num_blocks,
            number_bytes=inner_output[1],
        )
        last_block = replace(
            inner_block,
            parameters=stage.num_parameters - inner_block.parameters * (stage.num_blocks - 1),
            output_bytes=costs.output_bytes,
            number_bytes=costs.output_number_bytes,
        )
        blocks += [inner_block] * (stage.num_blocks - 1) + [last_block]
    first = stages[0][1]
    return ModelProfile(
        blocks=tuple(blocks),
        input_bytes=first.input_bytes,
        input_gradient=first.gradient_bytes > 0,
        extra_bytes=sum(costs.extra_bytes for _, costs in stages),
        around=BlockProfile(parameters=num_around, flop=0.0, output_bytes=0, graph_bytes=0),
        weight_bytes=max(stage.weight_bytes for stage, _ in stages),
        input_number_bytes=first.input_number_bytes,
    )


# Share of a mean stage's work. With less work than this, a peer's measured rate shows only the cost of its calls.
_MIN_WORK: Final = 0.01


def _rates(servers: Mapping[PeerId, ServerReport], work: Sequence[float]) -> dict[PeerId, float]:
    """Return the flop/s of each measured peer; a peer with almost no work gets the median of the other peers."""
    rates: dict[PeerId, float] = {}
    idle: list[PeerId] = []
    for peer, server in servers.items():
        measured = [stage for stage in server.held if stage.samples_per_s and stage.index < len(work)]
        if not measured:
            continue
        flop = sum(work[stage.index] for stage in measured)
        if flop < _MIN_WORK * statistics.fmean(work):
            idle.append(peer)
        else:
            rates[peer] = flop / sum(_computing_s(stage, server) for stage in measured)
    usual = statistics.median(rates.values()) if rates else 0.0
    return {**rates, **dict.fromkeys(idle if rates else (), usual)}


def _computing_s(stage: HeldStage, server: ServerReport) -> float:
    """Return the seconds of a sample at a stage, without the time that the planner adds for each microbatch."""
    assert stage.samples_per_s is not None
    processor = server.machine.processor if server.machine is not None else "cpu"
    added_s = stage.num_parameters * MICROBATCH_S_PER_PARAMETER[processor] / (stage.microbatch_size or 1.0)
    # The added time is an estimate, which may exceed what was measured.
    return max(1.0 / stage.samples_per_s - added_s, 0.5 / stage.samples_per_s)


_UNKNOWN_MEMORY_BYTES: Final = 1e18  # memory that limits nothing
_FASTEST_BYTES_PER_S: Final = 1e12  # upper bound on the rate of a link
_MAX_TIME_RATIO: Final = 8.0  # largest ratio of an exchange's duration to the time in which bytes were sent


def _machine(name: str, flop_per_s: float, server: ServerReport, link: _LinkUsage, assumed: AssumedRates) -> Machine:
    """Describe a peer's machine; an unmeasured link gets the assumed rate, and unknown memory limits nothing."""
    machine = server.machine
    return Machine(
        name=name,
        flop_per_s=flop_per_s,
        memory_bytes=(machine.memory_bytes if machine else None) or _UNKNOWN_MEMORY_BYTES,
        # Peers measure the bytes of tensors, and the planner counts the bytes on links.
        up_bytes_per_s=max(link.up_bytes_per_s, default=0.0) / GOODPUT or assumed.line_bytes_per_s,
        down_bytes_per_s=max(link.down_bytes_per_s, default=0.0) / GOODPUT or assumed.line_bytes_per_s,
        latency_s=statistics.median(link.round_trips_s) / 2 if link.round_trips_s else 0.0,
        processor=machine.processor if machine else "cpu",
        host_memory_bytes=(machine.host_memory_bytes if machine else None) or 0.0,
        bus_bytes_per_s=assumed.bus_bytes_per_s if machine and machine.processor == "accelerator" else 0.0,
    )


@dataclass
class _LinkUsage:
    """The rates at which a peer sent and received, and its round trips to other peers."""

    up_bytes_per_s: list[float] = field(default_factory=list)
    down_bytes_per_s: list[float] = field(default_factory=list)
    round_trips_s: list[float] = field(default_factory=list)


def _link_usage(reports: Mapping[PeerId, PeerReport]) -> dict[str, _LinkUsage]:
    """Combine the reports of both ends of each exchange into each peer's link to all other peers."""
    usage: dict[str, _LinkUsage] = defaultdict(_LinkUsage)
    trips = _round_trips(reports)
    for ends, trip_s in trips.items():
        for end in ends:
            usage[end].round_trips_s.append(trip_s)
    for peer, report in reports.items():
        for link in report.links:
            trip_s = trips.get(frozenset((peer, link.peer_id)), 0.0)
            for carried, sender, receiver in ((link.sent, peer, link.peer_id), (link.received, link.peer_id, peer)):
                if carried is not None:
                    usage[sender].up_bytes_per_s.append(_bytes_per_s(carried, trip_s))
                    usage[receiver].down_bytes_per_s.append(_bytes_per_s(carried, trip_s))
    return usage


def _bytes_per_s(carried: CarriedReport, round_trip_s: float) -> float:
    # If the round trip took most of the time, the rest, in which bytes were sent, is small and uncertain.
    sending_s = max(carried.took_s - round_trip_s, carried.took_s / _MAX_TIME_RATIO)
    return min(carried.num_bytes / sending_s, _FASTEST_BYTES_PER_S) if sending_s > 0.0 else _FASTEST_BYTES_PER_S


def _round_trips(reports: Mapping[PeerId, PeerReport]) -> dict[frozenset[str], float]:
    """Return the round trip of each pair of answering peers: the shorter measurement, because answers may be slow."""
    round_trips: dict[frozenset[str], float] = {}
    for peer, report in reports.items():
        for link in report.links:
            if link.round_trip_s is not None and link.peer_id in reports:
                ends = frozenset((peer, link.peer_id))
                round_trips[ends] = min(link.round_trip_s, round_trips.get(ends, link.round_trip_s))
    return round_trips


def _setting(servers: Iterable[ServerReport], num_stages: int) -> Setting | None:
    """Read the setting of the newest step that any server knows."""
    decided = [server for server in servers if server.newest is not None]
    sizes = [stage.microbatch_size for server in decided for stage in server.held if stage.microbatch_size]
    if not sizes:
        return None
    newest = max(decided, key=lambda server: server.step).newest
    assert newest is not None
    return Setting(
        num_stages=num_stages,
        microbatch_size=max(1, round(statistics.fmean(sizes))),
        batch_size=max(1, round(newest.num_samples / newest.num_batches)),
        target_batch_size=newest.num_samples,
    )
