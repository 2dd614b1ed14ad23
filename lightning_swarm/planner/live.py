"""A live swarm as the planner needs it: its machines and its model, from what its peers say of themselves. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.planner.records import BlockProfile, Machine, ModelProfile, Setting
from lightning_swarm.planner.timeline import GOODPUT, MICROBATCH_S_PER_PARAMETER
from lightning_swarm.protocol.messages.reports import CarriedReport, HeldStage, PeerReport, SampleCosts, ServerReport
from lightning_swarm.protocol.settings import Compression


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """What is taken for granted where a swarm cannot tell.

    Args:
        line_bytes_per_s: Each way, of peers that have sent, or received, nothing long enough to tell.
        bus_bytes_per_s: Between a GPU and its host, each way.
    """

    line_bytes_per_s: float
    bus_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class LiveRates:
    """A swarm that runs.

    Args:
        model: What it trains: the blocks of a stage are taken for equal. Its tensors travel as they are.
        compression: How they really travel.
        machines: Its servers whose rate is known, the lead first.
        setting: Of its newest step; None: none was decided since it was admitted whom we ask.
        samples_per_s: That went through all stages.
        sent_bytes_per_s: Of all peers together.
        unmeasured: Peers whose rate is not known yet.
        assumed_lines: Those of the machines whose lines are assumed.
    """

    model: ModelProfile
    compression: Compression
    machines: tuple[Machine, ...]
    setting: Setting | None
    samples_per_s: float
    sent_bytes_per_s: float
    unmeasured: tuple[str, ...]
    assumed_lines: tuple[str, ...]


@dataclass(frozen=True)
class PeerThroughput:
    """Of a peer, over some time: samples/s through each of its stages, bytes/s sent."""

    samples_per_s: float
    sent_bytes_per_s: float


def read(
    reports: Mapping[PeerId, PeerReport],
    paces: Mapping[PeerId, PeerThroughput],
    assumed: Assumption,
    name: Callable[[str], str] = str,
) -> LiveRates:
    """What peers say, put together.

    Args:
        reports: Of all that answered.
        paces: Likewise, what they do now.
        assumed: What they do not know.
        name: What a peer is called, by its id.

    Raises:
        SwarmError: They know too little yet.
    """
    servers = {peer: report.server for peer, report in reports.items() if report.server is not None}
    if not servers:
        raise SwarmError("the swarm waits: no run is under way, so there is nothing to plan by. Try again when it is.")
    stages = _stages(servers)
    work = _work(stages)
    rates = _rates(servers, work)
    if not rates:
        raise SwarmError(
            "too little is measured yet: no peer has computed four microbatches of one stage. Try again in a while."
        )
    names = sorted(rates, key=lambda peer: servers[peer].lead != peer)
    lines = _lines(reports)
    pipelined = [[peer for peer, one in servers.items() if _holds(one, index)] for index in range(len(stages))]
    return LiveRates(
        model=_model(stages, work, max(one.around_parameters for one in servers.values())),
        compression=next(iter(servers.values())).compression,
        machines=tuple(_machine(name(peer), rates[peer], servers[peer], lines[peer], assumed) for peer in names),
        setting=_setting(servers.values(), len(stages)),
        samples_per_s=min(sum(paces[peer].samples_per_s for peer in peers) for peers in pipelined),
        sent_bytes_per_s=sum(pace.sent_bytes_per_s for pace in paces.values()),
        unmeasured=tuple(name(peer) for peer in reports if peer not in rates),
        assumed_lines=tuple(name(peer) for peer in names if not lines[peer].known),
    )


# ---------------------------------------------------------------------- the model


def _holds(server: ServerReport, index: int) -> bool:
    return any(stage.index == index for stage in server.held)


def _stages(servers: Mapping[PeerId, ServerReport]) -> list[tuple[HeldStage, SampleCosts]]:
    """Each stage of the pipeline, from one of those that hold it."""
    first = next(iter(servers.values()))
    num_stages = first.num_stages - (first.trainers_stage is not None)
    known: dict[int, tuple[HeldStage, SampleCosts]] = {}
    for stage in (stage for server in servers.values() for stage in server.held):
        if stage.costs is not None:
            known.setdefault(stage.index, (stage, stage.costs))
    missing = [str(index) for index in range(num_stages) if index not in known]
    if missing or not num_stages:
        raise SwarmError(
            f"too little is measured yet: nobody who answers has computed a microbatch of stage {', '.join(missing)} "
            "with a gradient. Try again in a while."
        )
    return [known[index] for index in range(num_stages)]


def _work(stages: Sequence[tuple[HeldStage, SampleCosts]]) -> list[float]:
    """What a sample computes in each stage, in flop; where compiled code does not show it, as for linear layers."""
    counted = [costs.flop for _, costs in stages]
    if any(counted):
        return counted
    return [6.0 * stage.num_parameters for stage, _ in stages]


def _model(stages: Sequence[tuple[HeldStage, SampleCosts]], work: Sequence[float], around: int) -> ModelProfile:
    blocks: list[BlockProfile] = []
    for index, ((stage, costs), flop) in enumerate(zip(stages, work, strict=True)):
        last = index == len(stages) - 1
        # What leaves the last stage is often no activation, nor is what enters the first.
        came, out = (costs.input_bytes, costs.input_number_bytes), (costs.output_bytes, costs.output_number_bytes)
        inner = max(came, out) if index == 0 and last else came if last else out
        share = BlockProfile(
            parameters=stage.num_parameters // stage.num_blocks,
            flop=flop / stage.num_blocks,
            output_bytes=inner[0],
            graph_bytes=costs.graph_bytes // stage.num_blocks,
            number_bytes=inner[1],
        )
        end = replace(
            share,
            parameters=stage.num_parameters - share.parameters * (stage.num_blocks - 1),
            output_bytes=costs.output_bytes,
            number_bytes=costs.output_number_bytes,
        )
        blocks += [share] * (stage.num_blocks - 1) + [end]
    first = stages[0][1]
    return ModelProfile(
        blocks=tuple(blocks),
        input_bytes=first.input_bytes,
        input_gradient=first.gradient_bytes > 0,
        extra_bytes=sum(costs.extra_bytes for _, costs in stages),
        around=BlockProfile(parameters=around, flop=0.0, output_bytes=0, graph_bytes=0),
        weight_bytes=max(stage.weight_bytes for stage, _ in stages),
        input_number_bytes=first.input_number_bytes,
    )


# ---------------------------------------------------------------------- the machines


_TOO_LITTLE: Final = 0.01
"""Of a mean stage's work: what a peer does at less says nothing of what it would do at more."""


def _rates(servers: Mapping[PeerId, ServerReport], work: Sequence[float]) -> dict[PeerId, float]:
    """Flop/s of each peer that was measured; of those with next to nothing to compute, what is usual among the rest."""
    found: dict[PeerId, float] = {}
    idle: list[PeerId] = []
    for peer, server in servers.items():
        measured = [stage for stage in server.held if stage.samples_per_s and stage.index < len(work)]
        if not measured:
            continue
        flop = sum(work[stage.index] for stage in measured)
        if flop < _TOO_LITTLE * statistics.fmean(work):
            idle.append(peer)
        else:
            found[peer] = flop / sum(_computing_s(stage, server) for stage in measured)
    usual = statistics.median(found.values()) if found else 0.0
    return {**found, **dict.fromkeys(idle if found else (), usual)}


def _computing_s(stage: HeldStage, server: ServerReport) -> float:
    """Of a sample, without what the planner adds for each microbatch."""
    assert stage.samples_per_s is not None
    processor = server.machine.processor if server.machine is not None else "cpu"
    added_s = stage.num_parameters * MICROBATCH_S_PER_PARAMETER[processor] / (stage.microbatch_size or 1.0)
    return max(1.0 / stage.samples_per_s - added_s, 0.5 / stage.samples_per_s)


_UNKNOWN_BYTES: Final = 1e18
"""Of memory: it limits nothing."""

_MOST_OF_IT: Final = 8.0
_FASTEST: Final = 1e12
"""Bytes/s that are believed."""


def _machine(name: str, flop_per_s: float, server: ServerReport, line: _LinkUsage, assumed: Assumption) -> Machine:
    here = server.machine
    return Machine(
        name=name,
        flop_per_s=flop_per_s,
        memory_bytes=(here.memory_bytes if here else None) or _UNKNOWN_BYTES,
        # What was measured is tensors' bytes, and the planner takes lines' bytes.
        up_bytes_per_s=line.up_bytes_per_s / GOODPUT if line.up_bytes_per_s else assumed.line_bytes_per_s,
        down_bytes_per_s=line.down_bytes_per_s / GOODPUT if line.down_bytes_per_s else assumed.line_bytes_per_s,
        latency_s=statistics.median(line.round_trips_s) / 2 if line.round_trips_s else 0.0,
        processor=here.processor if here else "cpu",
        host_memory_bytes=(here.host_memory_bytes if here else None) or 0.0,
        bus_bytes_per_s=assumed.bus_bytes_per_s if here and here.processor == "accelerator" else 0.0,
    )


@dataclass
class _LinkUsage:
    """Of a peer: what it was seen to send and to receive at its best, and the way to each other one."""

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    round_trips_s: list[float] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return self.up_bytes_per_s is not None and self.down_bytes_per_s is not None

    def sent(self, bytes_per_s: float) -> None:
        self.up_bytes_per_s = max(bytes_per_s, self.up_bytes_per_s or 0.0)

    def received(self, bytes_per_s: float) -> None:
        self.down_bytes_per_s = max(bytes_per_s, self.down_bytes_per_s or 0.0)


def _lines(reports: Mapping[PeerId, PeerReport]) -> dict[str, _LinkUsage]:
    """Of each peer, by what both ends of its links say."""
    lines: dict[str, _LinkUsage] = defaultdict(_LinkUsage)
    trips = _round_trips(reports)
    for ends, trip_s in trips.items():
        for end in ends:
            lines[end].round_trips_s.append(trip_s)
    for peer, report in reports.items():
        for link in report.links:
            trip_s = trips.get(frozenset((peer, link.peer_id)), 0.0)
            if link.sent is not None:
                lines[peer].sent(_bytes_per_s(link.sent, trip_s))
                lines[link.peer_id].received(_bytes_per_s(link.sent, trip_s))
            if link.received is not None:
                lines[link.peer_id].sent(_bytes_per_s(link.received, trip_s))
                lines[peer].received(_bytes_per_s(link.received, trip_s))
    return lines


def _bytes_per_s(carried: CarriedReport, round_trip_s: float) -> float:
    # Where the round trip is most of it, little is left, and little is known of that.
    own_s = max(carried.took_s - round_trip_s, carried.took_s / _MOST_OF_IT)
    return min(carried.num_bytes / own_s, _FASTEST) if own_s > 0.0 else _FASTEST


def _round_trips(reports: Mapping[PeerId, PeerReport]) -> dict[frozenset[str], float]:
    """Between each two peers that answered, as the luckier of them saw it: calls may be long in being answered."""
    found: dict[frozenset[str], float] = {}
    for peer, report in reports.items():
        for link in report.links:
            if link.round_trip_s is not None and link.peer_id in reports:
                ends = frozenset((peer, link.peer_id))
                found[ends] = min(link.round_trip_s, found.get(ends, link.round_trip_s))
    return found


# ---------------------------------------------------------------------- what it does now


def _setting(servers: Iterable[ServerReport], num_stages: int) -> Setting | None:
    """Of the newest step that somebody knows."""
    steps = [(server.step, server) for server in servers if server.newest is not None]
    if not steps:
        return None
    newest = max(steps, key=lambda one: one[0])[1].newest
    assert newest is not None
    sizes = [stage.microbatch_size for _, server in steps for stage in server.held if stage.microbatch_size]
    if not sizes:
        return None
    return Setting(
        num_stages=num_stages,
        microbatch_size=max(1, round(statistics.fmean(sizes))),
        batch_size=max(1, round(newest.num_samples / newest.num_batches)),
        target_batch_size=newest.num_samples,
    )
