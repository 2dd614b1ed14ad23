"""What a plan is made from, and what it says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

USUAL_MICROBATCH: Final = 8
"""Samples, where something has to be known of microbatches before their size is chosen."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """What a codec makes of tensors.

    Args:
        bits: That a number takes.
        cpu_s: Seconds of a core for writing and reading a number.
        smallest: Numbers of the smallest tensor that is encoded.
    """

    bits: float
    cpu_s: float
    smallest: int = 1

    def takes(self, numbers: float, number_bytes: int) -> bool:
        """Whether tensors of so many numbers become shorter by it."""
        return numbers >= self.smallest and self.bits < 8 * number_bytes


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """How a run's tensors travel. None: as they are.

    Args:
        activations: From stage to stage, from the trainer and to it.
        gradients: On the way back.
        averaging: Sums of gradients, within a stage.
        error_feedback: Whether servers keep what was lost of these sums.
        boundary_ratio: How many times fewer features travel between stages, by layers that stand there.
        uncounted: Names of ways to travel of which it is not known what they leave.
    """

    activations: Code | None = None
    gradients: Code | None = None
    averaging: Code | None = None
    error_feedback: bool = False
    boundary_ratio: int = 1
    uncounted: tuple[str, ...] = ()


PLAIN: Final = WireFormat()
"""All travels as it is."""


@dataclass(frozen=True)
class TransferSize:
    """A sample's share of a tensor.

    Args:
        num_bytes: Over a line.
        coding_s: Seconds of a core for writing and reading it, half of them at either end.
    """

    num_bytes: float
    coding_s: float


def travelling(num_bytes: float, number_bytes: int, code: Code | None) -> TransferSize:
    """What travels of a sample.

    Args:
        num_bytes: Of its tensor.
        number_bytes: Of one number of that; 0: there is none that a codec takes.
        code: None: it travels as it is.
    """
    if code is None or not number_bytes:
        return TransferSize(num_bytes, 0.0)
    numbers = num_bytes / number_bytes
    if not code.takes(numbers * USUAL_MICROBATCH, number_bytes):
        return TransferSize(num_bytes, 0.0)
    return TransferSize(numbers * code.bits / 8, numbers * code.cpu_s)


Processor: TypeAlias = Literal["cpu", "accelerator"]
"""What computes. On a CPU, sending and receiving take time from it."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, and its line to all others.

    Args:
        name: What the plan calls it.
        flop_per_s: What it really computes, not what its data sheet says.
        memory_bytes: Of the device that computes.
        up_bytes_per_s: What its line sends.
        down_bytes_per_s: What its line receives, at the same time.
        latency_s: From it to another one; half of a round trip.
        processor: What computes.
        host_memory_bytes: Beside the device's, for offloading when it trains alone.
        bus_bytes_per_s: Between the two, each way; 0: it cannot offload.
    """

    name: str
    flop_per_s: float
    memory_bytes: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    latency_s: float = 0.0
    processor: Processor = "accelerator"
    host_memory_bytes: float = 0.0
    bus_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """What a part of a model costs.

    Args:
        parameters: How many it has.
        flop: For the forward and the backward of one sample.
        output_bytes: Of one sample.
        graph_bytes: What its backward needs of the forward of one sample.
        number_bytes: Of one number of its output; 0: they are none that a codec takes.
    """

    parameters: int
    flop: float
    output_bytes: int
    graph_bytes: int
    number_bytes: int = 4


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A chain of blocks, and what stands around it.

    Args:
        blocks: In order.
        input_bytes: What a trainer sends to the first block for one sample.
        input_gradient: Whether as much comes back.
        extra_bytes: What it sends to the last block beside that: the targets of one sample.
        around: What is in no block, on the trainer: embeddings, a head. Its output goes nowhere.
        weight_bytes: Of one parameter.
        input_number_bytes: Of one number of the input; 0: they are none that a codec takes, but tokens, say.
        wire: How its tensors travel.
    """

    blocks: tuple[BlockProfile, ...]
    input_bytes: int
    input_gradient: bool
    extra_bytes: int = 0
    around: BlockProfile = BlockProfile(parameters=0, flop=0.0, output_bytes=0, graph_bytes=0)
    weight_bytes: int = 4
    input_number_bytes: int = 4
    wire: WireFormat = PLAIN

    @property
    def parameters(self) -> int:
        """Of all."""
        return sum(block.parameters for block in self.blocks) + self.around.parameters

    @property
    def flop(self) -> float:
        """Of one sample, forward and backward, through all."""
        return sum(block.flop for block in self.blocks) + self.around.flop

    @property
    def graph_bytes(self) -> int:
        """Of one sample, through all."""
        return sum(block.graph_bytes for block in self.blocks) + self.around.graph_bytes


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """A run of blocks. Bytes are those that travel.

    Args:
        blocks: How many.
        parameters: How many.
        flop: For the forward and the backward of one sample.
        input_bytes: What comes in for one sample.
        extra_bytes: Beside that.
        gradient_bytes: What goes back for one sample.
        output_bytes: What goes out for one sample.
        output_gradient_bytes: What comes back of it.
        graph_bytes: What its backward needs of the forward of one sample.
        state_bytes: What a server keeps of it where it computes, but for activations.
        coding_s: Seconds of a core for reading and writing encoded tensors of one sample, forward and backward.
    """

    blocks: int
    parameters: int
    flop: float
    input_bytes: float
    extra_bytes: int
    gradient_bytes: float
    output_bytes: float
    output_gradient_bytes: float
    graph_bytes: int
    state_bytes: float
    coding_s: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Where the seconds of a step go.

    Args:
        forward_s: The slowest stage, or line, with all microbatches of the batch.
        backward_s: Likewise.
        fill_s: The other stages with one microbatch: until the last stage has its first, and the first its last.
        around_s: The trainer with what is in no stage.
        averaging_s: Within the stages, and the optimizer's step.
        closing_s: Deciding the step.
    """

    forward_s: float
    backward_s: float
    fill_s: float
    around_s: float
    averaging_s: float
    closing_s: float

    @property
    def step_s(self) -> float:
        """One after the other."""
        return self.forward_s + self.backward_s + self.fill_s + self.around_s + self.averaging_s + self.closing_s


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is to be chosen: in samples, but for the stages.

    Args:
        num_stages: Of the pipeline.
        microbatch_size: What is routed at once.
        batch_size: Of the DataLoader; all its microbatches go forward before the first goes back.
        target_batch_size: Of a step.
    """

    num_stages: int
    microbatch_size: int
    batch_size: int
    target_batch_size: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a swarm would do.

    Args:
        setting: With this.
        samples_per_s: Of the whole swarm.
        times: Of a step.
        slowest: What the forward and the backward wait for, in words.
        line_share: Of that time, what the line takes of it.
        utilisation: Share of what the machines could compute, of all of the list, that is computed.
        stages: Names of the machines by stage.
        left_out: Names of machines that cannot hold a stage.
        spared: Names of those without which it is faster.
        boundary_bytes: What crosses from each stage to the next for one microbatch.
        boundary_gradient_bytes: What comes back.
        step_bytes: What each machine sends in a step, by name; the most, where several have the name.
        sent_bytes_per_s: Of all machines together, snapshots included.
        state_bytes: What the largest stage keeps in memory without its activations.
        recomputed: Share of forwards, on the worst machine, that are computed again for lack of memory.
    """

    setting: Setting
    samples_per_s: float
    times: Times
    slowest: str
    line_share: float
    utilisation: float
    stages: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...]
    spared: tuple[str, ...]
    boundary_bytes: tuple[int, ...]
    boundary_gradient_bytes: tuple[int, ...]
    step_bytes: dict[str, int]
    sent_bytes_per_s: float
    state_bytes: float
    recomputed: float


@dataclass(frozen=True, kw_only=True)
class OneMachine:
    """What one machine would do without a swarm, by the plain Trainer.

    Args:
        name: Which one.
        samples_per_s: At most.
        offloads: Whether it has to keep weights and optimizer in its host's memory.
    """

    name: str
    samples_per_s: float
    offloads: bool


@dataclass(frozen=True, kw_only=True)
class Now:
    """What a live swarm does, beside a plan for it.

    Args:
        setting: With what; None: it has decided no step yet.
        samples_per_s: That go through all stages.
        sent_bytes_per_s: Of all peers together.
        predicted_samples_per_s: What the planner says of that setting; None: that its machines cannot do it, or that
            there is no setting yet.
        unmeasured: Peers that the plan leaves out, for nobody knows yet what they compute.
        assumed_lines: Peers that it has, but whose lines were not measured.
    """

    setting: Setting | None
    samples_per_s: float
    sent_bytes_per_s: float
    predicted_samples_per_s: float | None
    unmeasured: tuple[str, ...]
    assumed_lines: tuple[str, ...]


ENOUGH: Final = 1.3
"""Times as fast as one machine: as much as predictions have been off, `docs/planning.md`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do.

    Args:
        best: What the swarm would do with the best setting; None: no setting fits the machines.
        alone: The fastest machine alone; None: none holds the model.
        by_stages: Each number of stages that fits, and its samples/s with batches of the best one's size.
    """

    best: Prediction | None
    alone: OneMachine | None
    by_stages: tuple[tuple[int, float], ...] = ()

    @property
    def gain(self) -> float | None:
        """How many times as fast the swarm is; None: there is only one of the two."""
        if self.best is None or self.alone is None:
            return None
        return self.best.samples_per_s / self.alone.samples_per_s

    @property
    def possible(self) -> bool:
        """Whether anything can train the model."""
        return self.best is not None or self.alone is not None

    def as_json(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {**asdict(self), "gain": self.gain, "worth_it": self.worth_it}

    @property
    def worth_it(self) -> bool:
        """Whether the swarm is ahead by more than a prediction is off."""
        return self.best is not None and (self.gain is None or self.gain >= ENOUGH)
