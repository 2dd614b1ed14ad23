"""The records from which a plan is made, and the plan itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

LARGEST_BATCH: Final = 4096  # most samples of a step, unless another number is given
USUAL_MICROBATCH: Final = 8  # samples of a microbatch, for estimates that are made before its size is chosen


@dataclass(frozen=True, kw_only=True)
class Code:
    """The size and cost of a codec's output."""

    bits: float  # of an encoded number
    cpu_s: float  # seconds of a core for writing and reading a number
    smallest: int = 1  # numbers of the smallest tensor that is encoded


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """The encoding of a run's tensors; None: they travel unencoded."""

    activations: Code | None = None  # from stage to stage, from the trainer and to it
    gradients: Code | None = None  # on the way back
    averaging: Code | None = None  # sums of gradients, within a stage
    error_feedback: bool = False  # servers keep what encoding lost of these sums
    boundary_ratio: int = 1  # boundary layers send that many times fewer features from stage to stage
    uncounted: tuple[str, ...] = ()  # names of codecs whose sizes are not known


@dataclass(frozen=True)
class TransferSize:
    """One sample's share of a tensor on a link."""

    num_bytes: float
    coding_s: float  # seconds of a core for writing and reading it, half of them at either end


def encoded_size(num_bytes: float, number_bytes: int, code: Code | None) -> TransferSize:
    """Size a sample's tensor as it travels; `number_bytes` of 0: it holds no numbers that a codec takes."""
    numbers = num_bytes / number_bytes if number_bytes else 0.0
    if code is None or numbers * USUAL_MICROBATCH < code.smallest or code.bits >= 8 * number_bytes:
        return TransferSize(num_bytes, 0.0)
    return TransferSize(numbers * code.bits / 8, numbers * code.cpu_s)


Processor: TypeAlias = Literal["cpu", "accelerator"]  # on a CPU, sending and receiving take time from computing


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, and its link to all others."""

    name: str
    flop_per_s: float  # measured, not its data sheet's
    memory_bytes: float  # of the device that computes
    up_bytes_per_s: float
    down_bytes_per_s: float  # at the same time
    latency_s: float = 0.0  # to another machine, half of a round trip
    processor: Processor = "accelerator"
    host_memory_bytes: float = 0.0  # beside the device's, for offloading when the machine trains alone
    bus_bytes_per_s: float = 0.0  # between the two memories, each way; 0: it cannot offload


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """The cost of one part of a model, for one sample."""

    parameters: int
    flop: float  # forward and backward
    output_bytes: int
    graph_bytes: int  # what its backward needs of its forward
    number_bytes: int = 4  # of one number of its output; 0: it holds none that a codec takes


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A chain of blocks and what stands around it; sizes are those of one sample."""

    blocks: tuple[BlockProfile, ...]
    input_bytes: int  # from a trainer to the first block
    input_gradient: bool  # as much comes back
    extra_bytes: int = 0  # from a trainer to the last block beside its input: the targets
    # The part of the model that is in no block, on the trainer: embeddings, a head. Its output goes nowhere.
    around: BlockProfile = BlockProfile(parameters=0, flop=0.0, output_bytes=0, graph_bytes=0)
    weight_bytes: int = 4  # of one parameter
    input_number_bytes: int = 4  # of one number of the input; 0: it holds none that a codec takes, such as tokens
    wire: WireFormat = WireFormat()

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return sum(block.parameters for block in self.blocks) + self.around.parameters

    @property
    def flop(self) -> float:
        """Flop of one sample through the whole model, forward and backward."""
        return sum(block.flop for block in self.blocks) + self.around.flop

    @property
    def graph_bytes(self) -> int:
        """Size of one sample's autograd graph through the whole model."""
        return sum(block.graph_bytes for block in self.blocks) + self.around.graph_bytes


@dataclass(frozen=True, kw_only=True)
class StageProfile:
    """The cost of a run of blocks, for one sample; bytes are those that travel, after encoding."""

    parameters: int
    flop: float  # forward and backward
    input_bytes: float
    extra_bytes: int  # comes in beside the input
    gradient_bytes: float  # of the input, goes back
    output_bytes: float
    output_gradient_bytes: float  # comes back
    graph_bytes: int  # what its backward needs of its forward
    state_bytes: float  # what a server keeps where it computes, without activations
    coding_s: tuple[float, float]  # seconds of a core for coding tensors, in forward and in backward


@dataclass(frozen=True, kw_only=True)
class Times:
    """The seconds of a step, by what they are spent on."""

    forward_s: float  # the slowest stage, or link, with all microbatches of the batch
    backward_s: float  # likewise
    fill_s: float  # waiting until the last stage has its first microbatch, and the first stage its last
    around_s: float  # the trainer with what is in no stage
    averaging_s: float  # within the stages, and the optimizer's step
    closing_s: float  # deciding the step

    @property
    def step_s(self) -> float:
        """The length of a step: its parts follow one another."""
        return self.forward_s + self.backward_s + self.fill_s + self.around_s + self.averaging_s + self.closing_s


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that a plan chooses; sizes are in samples."""

    num_stages: int
    microbatch_size: int  # routed at once
    batch_size: int  # of the DataLoader; all its microbatches go forward before the first goes back
    target_batch_size: int  # of a step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The speed, traffic and memory of a swarm with one setting."""

    setting: Setting
    samples_per_s: float
    times: Times
    slowest: str  # what the forward and the backward wait for, in words
    line_share: float  # share of that time for which its link is the reason
    utilisation: float  # computed, as a share of what all machines of the list could compute
    stages: tuple[tuple[str, ...], ...]  # names of machines
    left_out: tuple[str, ...]  # machines that cannot hold a stage
    spared: tuple[str, ...]  # machines without which the swarm is faster
    boundary_bytes: tuple[int, ...]  # from each stage to the next, for one microbatch
    boundary_gradient_bytes: tuple[int, ...]  # back
    step_bytes: dict[str, int]  # sent in a step, by machine name; the most, where several have the name
    sent_bytes_per_s: float  # by all machines together, snapshots included
    state_bytes: float  # of the largest stage, without activations
    recomputed: float  # share of forwards that the worst machine computes twice for lack of memory


@dataclass(frozen=True, kw_only=True)
class OneMachine:
    """The speed of one machine with the plain Trainer, without a swarm."""

    name: str
    samples_per_s: float  # at most
    offloads: bool  # it has to keep weights and optimizer in its host's memory


@dataclass(frozen=True, kw_only=True)
class Now:
    """The current speed of a live swarm, and what the planner predicts for its setting."""

    setting: Setting | None  # None: it has decided no step yet
    samples_per_s: float  # that go through all stages
    sent_bytes_per_s: float  # by all peers together
    predicted_samples_per_s: float | None = None  # None: there is no setting, or the machines cannot do it
    unmeasured: tuple[str, ...]  # peers that the plan leaves out, as their rate is not known yet
    assumed_lines: tuple[str, ...]  # peers of the plan whose links were not measured


@dataclass(frozen=True, kw_only=True)
class Uncut:
    """The speed, traffic and memory of trainers that each compute the whole model: `num_stages=1`, `role='both'`."""

    target_batch_size: int
    computing_s: float  # of a step; whoever is free takes the next batch
    averaging_s: float  # and the optimizer's step
    closing_s: float  # deciding the step
    trainers: tuple[str, ...]  # names of machines
    left_out: tuple[str, ...]  # machines that cannot hold the model
    spared: tuple[str, ...]  # machines without which it is faster
    sent_bytes: float  # by each in a step, snapshots not included
    state_bytes: float  # without activations
    ddp_samples_per_s: float  # by the same machines with equal shares of each step, sums as they are

    @property
    def step_s(self) -> float:
        """The length of a step: its parts follow one another."""
        return self.computing_s + self.averaging_s + self.closing_s

    @property
    def samples_per_s(self) -> float:
        """The speed of all together."""
        return self.target_batch_size / self.step_s


ENOUGH: Final = 1.3  # times as fast as one machine: as much as predictions have been off, `docs/planning.md`
FAST_ENOUGH: Final = 0.9  # share of the best rate of any batch: larger ones than needed are not worth their fewer steps
SAME: Final = 0.98  # share of a rate that counts as the same rate: no reason for a cut, more stages or larger batches


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best setting of a swarm beside the best machine alone."""

    best: Prediction | None  # None: no setting fits the machines
    alone: OneMachine | None  # None: no machine holds the model
    uncut: Uncut | None = None  # None: fewer than two machines hold the model
    # Each number of stages that fits, and its samples/s with batches of the best setting's size.
    by_stages: tuple[tuple[int, float], ...] = ()

    @property
    def gain(self) -> float | None:
        """The swarm's speed, cut or not, in terms of one machine's; None: one of the two cannot train."""
        if self.samples_per_s is None or self.alone is None:
            return None
        return self.samples_per_s / self.alone.samples_per_s

    @property
    def stays_whole(self) -> bool:
        """True if a swarm without a cut is as fast as any: it is the simpler one."""
        return self.uncut is not None and (
            self.best is None or self.uncut.samples_per_s >= SAME * self.best.samples_per_s
        )

    @property
    def samples_per_s(self) -> float | None:
        """The swarm's speed; None: no swarm can train."""
        if self.stays_whole:
            assert self.uncut is not None
            return self.uncut.samples_per_s
        return None if self.best is None else self.best.samples_per_s

    @property
    def possible(self) -> bool:
        """True if anything can train the model."""
        return self.samples_per_s is not None or self.alone is not None

    def as_json(self) -> dict[str, Any]:
        """The whole plan, for programs."""
        uncut = None if self.uncut is None else {**asdict(self.uncut), "samples_per_s": self.uncut.samples_per_s}
        chosen = {"gain": self.gain, "worth_it": self.worth_it, "stays_whole": self.stays_whole}
        return {**asdict(self), "uncut": uncut, **chosen}

    @property
    def worth_it(self) -> bool:
        """True if the swarm is ahead by more than predictions are off."""
        return self.samples_per_s is not None and (self.gain is None or self.gain >= ENOUGH)
