"""Costs of a model and of its stages: computing, memory, traffic, and the time of a batch. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, TypeAlias

from lightning_swarm.core.limits import Limits
from lightning_swarm.model.partition.stage_ranges import balanced_ranges
from lightning_swarm.planner.records import (
    USUAL_MICROBATCH,
    BlockProfile,
    Machine,
    ModelProfile,
    Processor,
    StageProfile,
    TransferSize,
    encoded_size,
)

# Place of embeddings and head: in the first and the last stage (which also computes the loss), or around all stages.
Ends: TypeAlias = Literal["stages", "trainer"]

_TOKEN_BYTES: Final = 8
FLOAT32: Final = 4  # bytes of a number; gradient sums have at least float32
# Numbers per token that a block keeps for its backward, as a multiple of its width, without attention matrices.
# Source: Korthikanti et al., arXiv:2205.05198, section 4.
_GRAPH_PER_WIDTH: Final = 17


def block(width: int, sequence: int) -> BlockProfile:
    """Count the costs of a block of attention and a feed-forward network of four times the width."""
    return BlockProfile(
        parameters=12 * width * width + 13 * width,
        # Products take 2 flop a parameter and token, attention 4 a feature and pair of tokens; backward twice that.
        flop=3.0 * sequence * (2.0 * 12 * width * width + 4.0 * sequence * width),
        output_bytes=sequence * width * FLOAT32,
        graph_bytes=_GRAPH_PER_WIDTH * sequence * width * FLOAT32,
    )


def transformer(layers: int, width: int, sequence: int, vocabulary: int = 0, *, ends: Ends = "stages") -> ModelProfile:
    """Count a float32 transformer's costs; without a vocabulary, it maps samples of ``[sequence, width]``."""
    middle = (block(width, sequence),) * layers
    plain = ModelProfile(blocks=middle, input_bytes=sequence * width * FLOAT32, input_gradient=False)
    if not vocabulary:
        return plain
    embeddings, head = _embeddings_and_head(width, sequence, vocabulary)
    if ends == "trainer":
        around = replace(head, parameters=embeddings.parameters + head.parameters, output_bytes=0)
        return replace(plain, input_gradient=True, around=around)
    blocks, tokens = (embeddings, *middle, head), sequence * _TOKEN_BYTES
    return replace(plain, blocks=blocks, input_bytes=tokens, extra_bytes=tokens, input_number_bytes=0)


def _embeddings_and_head(width: int, sequence: int, vocabulary: int) -> tuple[BlockProfile, BlockProfile]:
    """Count the costs of a transformer's first and last layers. The head includes the loss, which is its output."""
    hidden, logits = sequence * width * FLOAT32, sequence * vocabulary * FLOAT32
    embeddings = BlockProfile(parameters=(vocabulary + sequence) * width, flop=0.0, output_bytes=hidden, graph_bytes=0)
    head = BlockProfile(
        parameters=vocabulary * width,
        flop=6.0 * sequence * vocabulary * width,
        output_bytes=FLOAT32,
        graph_bytes=hidden + 2 * logits,
    )
    return embeddings, head


ADAM: Final = 2  # numbers that Adam keeps for each parameter; usual optimizers keep no more


def stage_profiles(model: ModelProfile, num_stages: int) -> tuple[StageProfile, ...]:
    """Partition a model so that its slowest stage computes as little as possible, and count each stage's costs."""
    # Blocks that compute nothing, such as embeddings, count as one unit, so that they join their neighbours.
    ranges = balanced_ranges([max(1, round(block.flop / 1e6)) for block in model.blocks], num_stages)
    return tuple(_stage_profile(model, indices) for indices in ranges)


def _stage_profile(model: ModelProfile, indices: range) -> StageProfile:
    blocks = model.blocks[indices.start : indices.stop]
    incoming, gradient = _boundary_sizes(model, indices.start - 1)
    out, back = _boundary_sizes(model, indices.stop - 1)
    if indices.start == 0 and not model.input_gradient:
        gradient = TransferSize(0.0, 0.0)
    parameters = sum(block.parameters for block in blocks)
    return StageProfile(
        parameters=parameters,
        flop=sum(block.flop for block in blocks),
        input_bytes=incoming.num_bytes,
        extra_bytes=model.extra_bytes if indices.stop == len(model.blocks) else 0,
        gradient_bytes=gradient.num_bytes,
        output_bytes=out.num_bytes,
        output_gradient_bytes=back.num_bytes,
        graph_bytes=sum(block.graph_bytes for block in blocks),
        state_bytes=state_bytes(model, parameters),
        # Each end of a transfer takes half of its coding time.
        coding_s=((incoming.coding_s + out.coding_s) / 2, (gradient.coding_s + back.coding_s) / 2),
    )


def _boundary_sizes(model: ModelProfile, index: int) -> tuple[TransferSize, TransferSize]:
    """Return the link sizes of a block's output and of its gradient, per sample. Index -1 means the model's input."""
    num_bytes, number_bytes = float(model.input_bytes), model.input_number_bytes
    if index >= 0:
        num_bytes, number_bytes = model.blocks[index].output_bytes, model.blocks[index].number_bytes
    if 0 <= index < len(model.blocks) - 1:
        num_bytes /= model.wire.boundary_ratio
    forward, backward = model.wire.activations, model.wire.gradients
    return encoded_size(num_bytes, number_bytes, forward), encoded_size(num_bytes, number_bytes, backward)


def sum_bytes(model: ModelProfile) -> int:
    """Return the bytes of one number of a gradient sum."""
    return max(FLOAT32, model.weight_bytes)


def state_bytes(model: ModelProfile, parameters: int) -> float:
    """Return a server's device memory in bytes for that many parameters, without activations and snapshots."""
    # The gradient sum of the step, the mean and, with error feedback, the encoding error of the sum. Beside them are
    # the weights, the gradients of a microbatch and the optimizer's state.
    sums = 2 + model.wire.error_feedback
    return float(parameters * ((2 + ADAM) * model.weight_bytes + sums * sum_bytes(model)))


def graph_capacity(stage: StageProfile, machine: Machine) -> float:
    """Return how many samples' graphs fit into a machine beside a stage; negative if the stage itself does not fit."""
    return (machine.memory_bytes - stage.state_bytes) / max(1, stage.graph_bytes)


# ---------------------------------------------------------------------- the time of a batch

# Seconds of a core for a microbatch's forward and backward calls at a stage, both for its server and for the trainer.
# Measured by `python -m benchmarks.hops`: 1.6 ms of wall time with a core for each of the two.
CALL_S: Final = 0.0016
HANDLING_S_PER_BYTE: Final = 2.4e-9  # seconds of a core at one end, with its daemon; half of what both ends take
GOODPUT: Final = 0.94  # share of tensors in a link's bytes, beside headers, encryption and acknowledgements

MICROBATCH_S_PER_PARAMETER: Final[Mapping[Processor, float]] = {"cpu": 2e-9, "accelerator": 5e-11}
"""Seconds for each backward beyond the time of its samples: it writes and adds up a gradient of each weight, and
matrix products of few rows are slow. The CPU's is measured (blocks of width 512, a core, 1 to 32 samples of 64
tokens); the accelerator's is the CPU's divided by the ratio of their memory bandwidths."""

STEP_S_PER_PARAMETER: Final[Mapping[Processor, float]] = {"cpu": 4e-8, "accelerator": 2e-9}
"""Seconds for each step: mean, optimizer, comparison of the replicas. The CPU's is the time that a parameter adds
in `python -m benchmarks.steps`, without sending; the accelerator's follows from the bandwidths."""

PORTABLE_S_PER_PARAMETER: Final[Mapping[Processor, float]] = {"cpu": 1.2e-8, "accelerator": 6e-10}
"""Seconds that portable arithmetic adds to each step of a stage on machines of several kinds. The CPU's is measured
(AdamW, 10.5 million parameters, a core); the accelerator's follows from the bandwidths and has not been measured."""

STEP_S: Final = 0.042  # a step of four peers with almost nothing to average, by `python -m benchmarks.steps`
STEP_TRIPS: Final = 6  # successive round trips of a step: grant, freeze, two of the averaging, accept, decided


def averaged_size(model: ModelProfile, parameters: int, num_machines: int) -> TransferSize:
    """Return the size that each machine sends, and receives: reduce-scatter of sums, then all-gather of the mean."""
    number_bytes = sum_bytes(model)
    numbers = 2.0 * (num_machines - 1) / num_machines * parameters
    return encoded_size(numbers * number_bytes, number_bytes, model.wire.averaging)


def are_mixed(machines: Iterable[Machine]) -> bool:
    """Return whether a stage on these machines needs portable arithmetic, as far as the planner knows their kinds."""
    return len({machine.processor for machine in machines}) > 1


def averaging_s(machine: Machine, size: TransferSize, parameters: int, *, mixed: bool) -> float:
    """Return a machine's seconds to average gradients and step, while all machines send and receive at once."""
    line_s = size.num_bytes / min(machine.up_bytes_per_s, machine.down_bytes_per_s) / GOODPUT
    step_s = STEP_S_PER_PARAMETER[machine.processor] + mixed * PORTABLE_S_PER_PARAMETER[machine.processor]
    busy_s = 2 * size.num_bytes * HANDLING_S_PER_BYTE + parameters * step_s
    return line_s + busy_s + (size.coding_s if machine.processor == "cpu" else 0.0)


def closing_s(machines: Sequence[Machine]) -> float:
    """Return the seconds to decide a step, which depend on the machine with the highest latency."""
    return STEP_S + 2 * STEP_TRIPS * max(machine.latency_s for machine in machines)


def machine_counts(rates: Sequence[float], num_stages: int) -> list[int]:
    """Return the numbers of machines to compare: all, all but the slowest kinds, and halves of halves.

    `rates` are in the order in which machines are used, so that machines of one kind are neighbours.
    """
    num_machines, least = len(rates), max(2, num_stages)  # one machine is no swarm
    kinds = [number for number in range(2, num_machines) if rates[number] != rates[number - 1]]
    halves = [num_machines >> power for power in range(1, num_machines.bit_length())]
    return [num_machines, *sorted({count for count in (*kinds, *halves) if count >= least}, reverse=True)]


_FORWARD_SHARE: Final = 1 / 3  # share of the forward in the time that a block computes


@dataclass(frozen=True)
class StagePhase:
    """The work and traffic of one sample's forward or backward at a stage."""

    flop: float
    parameters: int  # their gradients are written once for each microbatch
    received_bytes: float  # bytes over the link
    sent_bytes: float
    coding_s: float  # seconds of a core for coding these tensors; a GPU codes beside its other work


@dataclass(frozen=True)
class PhaseTime:
    """The seconds of some work, and the link's part of them."""

    seconds: float
    line_s: float
    machine: str  # its name, or a description


@dataclass(frozen=True)
class PipelinePass:
    """The time of all microbatches of a batch through all stages, in one direction."""

    slowest: PhaseTime
    fill_s: float  # seconds of one microbatch at all stages but the slowest, and on its way from and to the trainer


def phases(stage: StageProfile, recomputed: float) -> tuple[StagePhase, StagePhase]:
    """Return a sample's forward and backward; a share `recomputed` of backwards repeats the forward."""
    backward_flop = stage.flop * (1.0 - _FORWARD_SHARE + recomputed * _FORWARD_SHARE)
    into_bytes = stage.input_bytes + stage.extra_bytes
    return (
        StagePhase(stage.flop * _FORWARD_SHARE, 0, into_bytes, stage.output_bytes, stage.coding_s[0]),
        StagePhase(
            backward_flop, stage.parameters, stage.output_gradient_bytes, stage.gradient_bytes, stage.coding_s[1]
        ),
    )


def sample_time(machine: Machine, phase: StagePhase, microbatch_size: int) -> PhaseTime:
    """Return the time that a machine needs for a sample."""
    computing_s = phase.flop / machine.flop_per_s
    computing_s += phase.parameters * MICROBATCH_S_PER_PARAMETER[machine.processor] / microbatch_size
    handling_s = (phase.received_bytes + phase.sent_bytes) * HANDLING_S_PER_BYTE + CALL_S / 2 / microbatch_size
    both_s = computing_s + phase.coding_s + handling_s
    busy_s = both_s if machine.processor == "cpu" else max(computing_s, handling_s)
    # Link and processor take turns, because microbatches share the link: most arrive late and many at once.
    line_s = _line_s(machine, phase.received_bytes, phase.sent_bytes)
    return PhaseTime(line_s + busy_s, line_s, machine.name)


def _line_s(machine: Machine, received_bytes: float, sent_bytes: float) -> float:
    return max(received_bytes / machine.down_bytes_per_s, sent_bytes / machine.up_bytes_per_s) / GOODPUT


@dataclass(frozen=True)
class Swarm:
    """Machines at their stages. In methods, `index` means a stage and `number` a machine."""

    model: ModelProfile
    machines: Sequence[Machine]  # the starter first
    stages: tuple[StageProfile, ...]
    held: list[list[int]]  # stage -> indices of its machines
    limits: Limits  # limits of the servers

    @property
    def starter(self) -> Machine:
        """The machine that trains; it also holds the last stage, with other machines."""
        return self.machines[0]

    @cached_property
    def kinds(self) -> list[list[list[int]]]:
        """The machines of each stage, in groups of equal machines. The starter is a group of its own."""
        stages: list[list[list[int]]] = []
        for numbers in self.held:
            kinds: dict[tuple[int, bool], list[int]] = {}  # equal machines of the list are one object
            for number in numbers:
                kinds.setdefault((id(self.machines[number]), number == 0), []).append(number)
            stages.append(list(kinds.values()))
        return stages

    def recomputed(self, index: int, batch_size: int) -> float:
        """Return the share of forwards that a stage computes again if all its machines had the least memory of them."""
        stage = self.stages[index]
        # Samples whose graphs a server keeps until backward; it computes the forward of the rest again.
        kept = min(graph_capacity(stage, self.machines[kind[0]]) for kind in self.kinds[index])
        kept = min(kept, self.limits.cache_bytes / max(1, stage.graph_bytes))
        return max(0.0, 1.0 - kept * len(self.held[index]) / batch_size)

    def phase(self, index: int, number: int, direction: int, batch_size: int) -> StagePhase:
        """Return a sample's forward (0) or backward (1) at a machine of a stage."""
        stage = self.stages[index]
        if number == 0:  # the starter's server and trainer share a machine, so their tensors use no link
            alone = len(self.stages) == 1
            stage = replace(
                stage,
                input_bytes=0.0 if alone else stage.input_bytes,
                extra_bytes=0,
                gradient_bytes=0.0 if alone else stage.gradient_bytes,
                output_bytes=0.0,
                output_gradient_bytes=0.0,
            )
        return phases(stage, self.recomputed(index, batch_size))[direction]

    def share(self, index: int, number: int, direction: int) -> float:
        """Return the share of a stage's microbatches that one of its machines takes, in proportion to its speed."""

        def rate(machine: int) -> float:
            phase = self.phase(index, machine, direction, 1)
            return 1.0 / sample_time(self.machines[machine], phase, USUAL_MICROBATCH).seconds

        return rate(number) / sum(len(kind) * rate(kind[0]) for kind in self.kinds[index])


def trainer_bytes(swarm: Swarm, direction: int) -> tuple[float, float]:
    """Return the bytes that the trainer receives and sends for a sample, without traffic on its own machine."""
    first, last = swarm.stages[0], swarm.stages[-1]
    elsewhere = 1.0 - swarm.share(len(swarm.stages) - 1, 0, direction)
    to_first = 1.0 if len(swarm.stages) > 1 else elsewhere
    if direction == 0:
        return elsewhere * last.output_bytes, to_first * first.input_bytes + elsewhere * last.extra_bytes
    return to_first * first.gradient_bytes, elsewhere * last.output_gradient_bytes


def pipeline_pass(swarm: Swarm, direction: int, microbatch_size: int, batch_size: int) -> PipelinePass:
    """Return the time of a batch's forward (0) or backward (1) through all stages."""
    size = min(microbatch_size, batch_size)
    stage_times, first_s = [], []
    for index, kinds in enumerate(swarm.kinds):
        times = [
            (sample_time(swarm.machines[kind[0]], swarm.phase(index, kind[0], direction, batch_size), size), len(kind))
            for kind in kinds
        ]
        stage_times.append(_stage_time(times, size, batch_size))
        mean_s = sum(count * time.seconds for time, count in times) / len(swarm.held[index])
        first_s.append(size * mean_s + max(swarm.machines[kind[0]].latency_s for kind in kinds))
    slowest = max(stage_times, key=lambda time: time.seconds)
    # The last term is the way from the trainer to the first stage, and back from the last stage.
    fill_s = sum(first_s) - first_s[stage_times.index(slowest)] + 2 * swarm.starter.latency_s
    starter = _starter_time(swarm, direction, size, batch_size)
    return PipelinePass(max(slowest, starter, key=lambda time: time.seconds), fill_s)


def _stage_time(times: Sequence[tuple[PhaseTime, int]], microbatch_size: int, batch_size: int) -> PhaseTime:
    """Return the time of a batch at a stage, from the time for a sample and the number of each kind of machine."""
    fastest_s = min(time.seconds for time, _ in times)
    # As many machines of the fastest kind would be as fast.
    slots = sum(count * fastest_s / time.seconds for time, count in times)
    rounds = max(1.0, math.ceil(batch_size / microbatch_size) / slots)  # machines take whole microbatches
    if slots == sum(count for _, count in times):  # equal machines, which finish each round together
        rounds = math.ceil(rounds)
    slowest = max((time for time, _ in times), key=lambda time: time.seconds)
    seconds = rounds * microbatch_size * fastest_s
    return PhaseTime(seconds, seconds * slowest.line_s / slowest.seconds, slowest.machine)


def _starter_time(swarm: Swarm, direction: int, microbatch_size: int, batch_size: int) -> PhaseTime:
    """Return the time of a batch at the starter's machine, which both holds a stage and trains."""
    starter, last = swarm.starter, len(swarm.stages) - 1
    share, phase = swarm.share(last, 0, direction), swarm.phase(last, 0, direction, batch_size)
    received, sent = trainer_bytes(swarm, direction)
    received, sent = received + share * phase.received_bytes, sent + share * phase.sent_bytes
    line_s = _line_s(starter, received, sent)
    stage_s = share * sample_time(starter, replace(phase, received_bytes=0.0, sent_bytes=0.0), microbatch_size).seconds
    calls_s = (received + sent) * HANDLING_S_PER_BYTE + CALL_S / 2 / microbatch_size * len(swarm.stages)
    busy_s = stage_s + calls_s if starter.processor == "cpu" else max(stage_s, calls_s)
    return PhaseTime(
        batch_size * (line_s + busy_s), batch_size * line_s, f"{starter.name}, which trains and holds a stage"
    )
