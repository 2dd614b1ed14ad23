"""A batch's microbatches on their way through the stages: what each machine computes and carries, how long it takes.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from lightning_swarm.core.limits import Limits
from lightning_swarm.planner.cost_model import kept_samples
from lightning_swarm.planner.records import USUAL_MICROBATCH, Machine, ModelProfile, Processor, StageProfile

CALL_S: Final = 0.0016
"""Seconds of a core for a microbatch at a stage, there and back: as many at its server as at the trainer. By the clock
it is 1.6 ms where two cores do both, `python -m benchmarks.hops`."""

HANDLING_S_PER_BYTE: Final = 2.4e-9
"""Seconds of a core for each byte sent or received: half of what both ends take, and their daemons."""

GOODPUT: Final = 0.94
"""Of what a line carries, that is tensors and not headers, encryption or acknowledgements."""

MICROBATCH_S_PER_PARAMETER: Final[Mapping[Processor, float]] = {"cpu": 2e-9, "accelerator": 5e-11}
"""Seconds for each backward beyond what its samples take: a gradient of each weight is written and added up, and few
rows make slow products. The first is measured (blocks of width 512, a core, 1 to 32 samples of 64 tokens), the second
what memory of that many times the bandwidth would do."""

STEP_S_PER_PARAMETER: Final[Mapping[Processor, float]] = {"cpu": 4e-8, "accelerator": 2e-9}
"""Seconds for each step: mean, optimizer, comparison of the copies. The first is what `python -m benchmarks.steps`
takes more with a million parameters, without what it sends; the second is the first by the bandwidths."""

_FORWARD: Final = 1 / 3
"""Of the time that a block computes."""


@dataclass(frozen=True)
class StagePhase:
    """Forward or backward of one sample at a stage: what is computed, and what goes over the line.

    Args:
        flop: To compute.
        parameters: That get a gradient, once for each microbatch.
        received_bytes: Over the line.
        sent_bytes: Likewise.
        coding_s: Seconds of a core for reading and writing what is encoded of that. A GPU does it in passing.
    """

    flop: float
    parameters: int
    received_bytes: float
    sent_bytes: float
    coding_s: float


@dataclass(frozen=True)
class PhaseTime:
    """Seconds, how many of them are the line's, and whose they are."""

    seconds: float
    line_s: float
    what: str


@dataclass(frozen=True)
class PipelinePass:
    """All microbatches of a batch through all stages, one way."""

    slowest: PhaseTime
    fill_s: float


def phases(stage: StageProfile, recomputed: float) -> tuple[StagePhase, StagePhase]:
    """Forward and backward, if of so large a share the forward is computed again in the backward."""
    backward_flop = stage.flop * (1.0 - _FORWARD + recomputed * _FORWARD)
    return (
        StagePhase(
            stage.flop * _FORWARD, 0, stage.input_bytes + stage.extra_bytes, stage.output_bytes, stage.coding_s[0]
        ),
        StagePhase(
            backward_flop, stage.parameters, stage.output_gradient_bytes, stage.gradient_bytes, stage.coding_s[1]
        ),
    )


def pace(machine: Machine, phase: StagePhase, microbatch_size: int) -> PhaseTime:
    """What a machine needs for a sample.

    Its line and its processor take turns: all microbatches under way share the line, so most of them arrive late, and
    then there is much to compute at once.
    """
    computing_s = phase.flop / machine.flop_per_s
    computing_s += phase.parameters * MICROBATCH_S_PER_PARAMETER[machine.processor] / microbatch_size
    handling_s = (phase.received_bytes + phase.sent_bytes) * HANDLING_S_PER_BYTE + CALL_S / 2 / microbatch_size
    both_s = computing_s + phase.coding_s + handling_s
    busy_s = both_s if machine.processor == "cpu" else max(computing_s, handling_s)
    line_s = _line_s(machine, phase.received_bytes, phase.sent_bytes)
    return PhaseTime(line_s + busy_s, line_s, machine.name)


def _line_s(machine: Machine, received_bytes: float, sent_bytes: float) -> float:
    return max(received_bytes / machine.down_bytes_per_s, sent_bytes / machine.up_bytes_per_s) / GOODPUT


@dataclass(frozen=True)
class Swarm:
    """Machines at their stages.

    Args:
        model: What they train.
        machines: The starter first.
        stages: In order.
        held: By whom, as places in `machines`.
        limits: Of the servers.
    """

    model: ModelProfile
    machines: Sequence[Machine]
    stages: tuple[StageProfile, ...]
    held: list[list[int]]
    limits: Limits

    @property
    def starter(self) -> Machine:
        """Who trains, and holds the last stage with others."""
        return self.machines[0]

    @cached_property
    def kinds(self) -> list[list[tuple[int, int]]]:
        """By stage, one of each kind of its machines, and how many there are of it. The starter is of its own kind."""
        found: list[list[tuple[int, int]]] = []
        for numbers in self.held:
            kinds: dict[tuple[int, bool], list[int]] = {}
            for number in numbers:
                kinds.setdefault((id(self.machines[number]), number == 0), []).append(number)
            found.append([(same[0], len(same)) for same in kinds.values()])
        return found

    def recomputed(self, index: int, batch_size: int) -> float:
        """Of the machines of a stage, the largest share of forwards for whose graph there is no room."""
        stage = self.stages[index]
        kept = (kept_samples(stage, self.machines[n], self.limits) for n, _ in self.kinds[index])
        return max(0.0, 1.0 - min(kept) * len(self.held[index]) / batch_size)

    def phase(self, index: int, number: int, way: int, batch_size: int) -> StagePhase:
        """What a sample costs a machine at its stage. Between the starter's server and trainer nothing goes by line."""
        stage = self.stages[index]
        if number == 0:
            alone = len(self.stages) == 1
            stage = replace(
                stage,
                input_bytes=0.0 if alone else stage.input_bytes,
                extra_bytes=0,
                gradient_bytes=0.0 if alone else stage.gradient_bytes,
                output_bytes=0.0,
                output_gradient_bytes=0.0,
            )
        return phases(stage, self.recomputed(index, batch_size))[way]

    def share(self, index: int, number: int, way: int) -> float:
        """Of the microbatches, what a machine of a stage takes: as many as it is fast."""
        rates = {
            one: 1.0 / pace(self.machines[one], self.phase(index, one, way, 1), USUAL_MICROBATCH).seconds
            for one, _ in self.kinds[index]
        }
        return rates[number] / sum(count * rates[one] for one, count in self.kinds[index])


def ways_of_trainer(swarm: Swarm, way: int) -> tuple[float, float]:
    """What the trainer receives, and sends, over its line for a sample: without what its own machine's server has."""
    first, last = swarm.stages[0], swarm.stages[-1]
    elsewhere = 1.0 - swarm.share(len(swarm.stages) - 1, 0, way)
    to_first = 1.0 if len(swarm.stages) > 1 else elsewhere
    if way == 0:
        return elsewhere * last.output_bytes, to_first * first.input_bytes + elsewhere * last.extra_bytes
    return to_first * first.gradient_bytes, elsewhere * last.output_gradient_bytes


def passage(swarm: Swarm, way: int, microbatch_size: int, batch_size: int) -> PipelinePass:
    """Forward (0) or backward (1) of a batch."""
    size = min(microbatch_size, batch_size)
    found, firsts = [], []
    for index, kinds in enumerate(swarm.kinds):
        paces = [(pace(swarm.machines[n], swarm.phase(index, n, way, batch_size), size), count) for n, count in kinds]
        found.append(_together(paces, size, batch_size))
        mean_s = sum(count * one.seconds for one, count in paces) / len(swarm.held[index])
        firsts.append(size * mean_s + max(swarm.machines[n].latency_s for n, _ in kinds))
    slowest = max(found, key=lambda one: one.seconds)
    # From the trainer to the first stage, and from the last one back.
    fill_s = sum(firsts) - firsts[found.index(slowest)] + 2 * swarm.starter.latency_s
    return PipelinePass(max(slowest, _starter(swarm, way, size, batch_size), key=lambda one: one.seconds), fill_s)


def _together(paces: Sequence[tuple[PhaseTime, int]], microbatch_size: int, batch_size: int) -> PhaseTime:
    """What a stage's machines, so many of each pace, need for a batch, of which each takes whole microbatches."""
    fastest_s = min(one.seconds for one, _ in paces)
    slots = sum(count * fastest_s / one.seconds for one, count in paces)
    rounds = max(1.0, math.ceil(batch_size / microbatch_size) / slots)
    if slots == sum(count for _, count in paces):
        rounds = math.ceil(rounds)
    slowest = max((one for one, _ in paces), key=lambda one: one.seconds)
    seconds = rounds * microbatch_size * fastest_s
    return PhaseTime(seconds, seconds * slowest.line_s / slowest.seconds, slowest.what)


def _starter(swarm: Swarm, way: int, microbatch_size: int, batch_size: int) -> PhaseTime:
    """What the starter's machine needs for its stage and for the trainer beside it."""
    starter, last = swarm.starter, len(swarm.stages) - 1
    share, phase = swarm.share(last, 0, way), swarm.phase(last, 0, way, batch_size)
    received, sent = ways_of_trainer(swarm, way)
    received, sent = received + share * phase.received_bytes, sent + share * phase.sent_bytes
    line_s = _line_s(starter, received, sent)
    own_s = share * pace(starter, replace(phase, received_bytes=0.0, sent_bytes=0.0), microbatch_size).seconds
    calls_s = (received + sent) * HANDLING_S_PER_BYTE + CALL_S / 2 / microbatch_size * len(swarm.stages)
    busy_s = own_s + calls_s if starter.processor == "cpu" else max(own_s, calls_s)
    return PhaseTime(
        batch_size * (line_s + busy_s), batch_size * line_s, f"{starter.name}, which trains and holds a stage"
    )
