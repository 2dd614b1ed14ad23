"""Records of machines, models and settings, from which a plan is made, and the plan itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

LARGEST_BATCH: Final = 4096  # maximum samples of a step, unless the caller sets another
USUAL_MICROBATCH: Final = 8  # samples of a microbatch, for estimates that are made before its size is chosen


@dataclass(frozen=True, kw_only=True)
class Code:
    """The size and cost of a codec's output."""

    bits: float  # bits of an encoded number
    cpu_s: float  # seconds of a core for writing and reading a number
    smallest: int = 1  # tensors of fewer numbers are not encoded


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """The encoding of a run's tensors; None: tensors are sent unencoded."""

    activations: Code | None = None  # between stages, and to and from the trainer
    gradients: Code | None = None  # in backward
    averaging: Code | None = None  # sums of gradients, within a stage
    error_feedback: bool = False  # servers keep the encoding error of their sums
    boundary_ratio: int = 1  # boundary layers send that many times fewer features from stage to stage
    uncounted: tuple[str, ...] = ()  # names of codecs whose sizes are not known


@dataclass(frozen=True)
class TransferSize:
    """One sample's share of a tensor on a link."""

    num_bytes: float
    coding_s: float  # seconds of a core for writing and reading it, half at either end


def encoded_size(num_bytes: float, number_bytes: int, code: Code | None) -> TransferSize:
    """Return the size of a sample's tensor on a link.

    Tensors are not encoded if they have no numbers to encode (`number_bytes` of 0, such as tokens), if a microbatch is
    too small for the codec, or if the codec would not make them smaller.
    """
    numbers = num_bytes / number_bytes if number_bytes else 0.0
    if code is None or numbers * USUAL_MICROBATCH < code.smallest or code.bits >= 8 * number_bytes:
        return TransferSize(num_bytes, 0.0)
    return TransferSize(numbers * code.bits / 8, numbers * code.cpu_s)


Processor: TypeAlias = Literal["cpu", "accelerator"]  # a CPU computes less while it sends or receives


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, and its link to all others."""

    name: str
    flop_per_s: float  # measured, not from its data sheet
    memory_bytes: float  # memory of the computing device
    up_bytes_per_s: float
    down_bytes_per_s: float  # while it sends at full rate
    latency_s: float = 0.0  # half of a round trip to another machine
    processor: Processor = "accelerator"
    host_memory_bytes: float = 0.0  # besides the device's memory, for offloading when the machine trains alone
    bus_bytes_per_s: float = 0.0  # between the two memories, each way; 0: it cannot offload


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """The cost of one part of a model, for one sample."""

    parameters: int
    flop: float  # forward and backward
    output_bytes: int
    graph_bytes: int  # memory that its forward keeps for its backward
    number_bytes: int = 4  # bytes of one number of its output; 0: codecs do not encode the output


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A chain of blocks and the layers around it; sizes are per sample."""

    blocks: tuple[BlockProfile, ...]
    input_bytes: int  # sent from a trainer to the first block
    input_gradient: bool  # True: a gradient of the same size comes back
    extra_bytes: int = 0  # the targets, sent from a trainer to the last block beside its input
    # The part of the model that is in no block, on the trainer, such as embeddings or a head. It sends no output.
    around: BlockProfile = BlockProfile(parameters=0, flop=0.0, output_bytes=0, graph_bytes=0)
    weight_bytes: int = 4  # bytes of one parameter
    input_number_bytes: int = 4  # bytes of one number of the input; 0: codecs do not encode it, such as tokens
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
    """The cost of consecutive blocks, for one sample; bytes on links are counted after encoding."""

    parameters: int
    flop: float  # forward and backward
    input_bytes: float
    extra_bytes: int  # received beside the input
    gradient_bytes: float  # the input's gradient, sent back
    output_bytes: float
    output_gradient_bytes: float  # received in backward
    graph_bytes: int  # memory that its forward keeps for its backward
    state_bytes: float  # a server's device memory, without activations
    coding_s: tuple[float, float]  # seconds of a core for coding tensors, in forward and in backward


@dataclass(frozen=True, kw_only=True)
class Times:
    """The seconds of each part of a step."""

    forward_s: float  # the slowest stage, or link, with all microbatches of the batch
    backward_s: float  # the slowest stage, or link, in the backward
    fill_s: float  # waiting for the first microbatch to reach the last stage, and the last one to come back
    around_s: float  # the trainer with the layers in no stage
    averaging_s: float  # averaging within the stages, and the optimizer's step
    closing_s: float  # deciding the step

    @property
    def step_s(self) -> float:
        """The length of a step, whose parts follow one another."""
        return self.forward_s + self.backward_s + self.fill_s + self.around_s + self.averaging_s + self.closing_s


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that a plan chooses; sizes are in samples."""

    num_stages: int
    microbatch_size: int  # samples that take one route together
    batch_size: int  # the DataLoader's; all microbatches of a batch go forward before the first goes back
    target_batch_size: int  # samples of a step


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The speed, traffic and memory of a swarm with one setting."""

    setting: Setting
    samples_per_s: float
    times: Times
    slowest: str  # the bottleneck of forward and backward, in words
    line_share: float  # share of the bottleneck's time that its link takes
    utilisation: float  # share of the flop that all machines of the list could compute
    stages: tuple[tuple[str, ...], ...]  # names of machines
    left_out: tuple[str, ...]  # machines that cannot hold a stage
    spared: tuple[str, ...]  # machines without which the swarm is faster
    boundary_bytes: tuple[int, ...]  # per microbatch, sent from each stage to the next
    boundary_gradient_bytes: tuple[int, ...]  # per microbatch, gradients sent from each stage to the previous one
    step_bytes: dict[str, int]  # machine name -> bytes sent in a step, the maximum of machines with that name
    sent_bytes_per_s: float  # all machines together, snapshots included
    state_bytes: float  # memory of the largest stage, without activations
    recomputed: float  # share of forwards that the worst machine computes twice for lack of memory


@dataclass(frozen=True, kw_only=True)
class OneMachine:
    """The speed of one machine with the plain Trainer, without a swarm."""

    name: str
    samples_per_s: float  # upper bound
    offloads: bool  # weights and optimizer stay in the host's memory, because the device's is too small


@dataclass(frozen=True, kw_only=True)
class Now:
    """The current speed of a live swarm, and what the planner predicts for its setting."""

    setting: Setting | None  # None: the swarm has decided no step yet
    samples_per_s: float  # samples through all stages
    sent_bytes_per_s: float  # all peers together
    predicted_samples_per_s: float | None = None  # None: no setting, or the machines cannot train with it
    unmeasured: tuple[str, ...]  # peers that the plan leaves out, because their rate is not known yet
    assumed_lines: tuple[str, ...]  # peers of the plan whose links were not measured


@dataclass(frozen=True, kw_only=True)
class Uncut:
    """The speed, traffic and memory of trainers that each compute the whole model: `num_stages=1`, `role='both'`."""

    target_batch_size: int
    computing_s: float  # of a step, in which each free trainer takes the next batch
    averaging_s: float  # averaging, and the optimizer's step
    closing_s: float  # deciding the step
    trainers: tuple[str, ...]  # names of machines
    left_out: tuple[str, ...]  # machines that cannot hold the model
    spared: tuple[str, ...]  # machines without which the swarm is faster
    sent_bytes: float  # sent by each trainer in a step, without snapshots
    state_bytes: float  # a trainer's memory, without activations
    ddp_samples_per_s: float  # DDP on the same machines: equal shares of each step, sums without encoding

    @property
    def step_s(self) -> float:
        """The length of a step, whose parts follow one another."""
        return self.computing_s + self.averaging_s + self.closing_s

    @property
    def samples_per_s(self) -> float:
        """The speed of all trainers together."""
        return self.target_batch_size / self.step_s


MIN_GAIN: Final = 1.3  # over one machine: predictions have been that far off, see `docs/planning.md`
FAST_ENOUGH: Final = 0.9  # sufficient share of the best rate of any batch: larger batches mean fewer steps
SAME: Final = 0.98  # a speed of this share of the best counts as equal; of equal settings, the simplest is chosen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best setting of a swarm, and the best machine alone for comparison."""

    best: Prediction | None  # None: no setting fits the machines
    alone: OneMachine | None  # None: no machine holds the model
    uncut: Uncut | None = None  # None: fewer than two machines hold the model
    # Each number of stages that fits, and its samples/s with batches of the best setting's size.
    by_stages: tuple[tuple[int, float], ...] = ()

    @property
    def gain(self) -> float | None:
        """The swarm's speed, cut or not, divided by one machine's; None: one of the two cannot train."""
        if self.samples_per_s is None or self.alone is None:
            return None
        return self.samples_per_s / self.alone.samples_per_s

    @property
    def stays_whole(self) -> bool:
        """True if a swarm without a cut is as fast as the best with one; it is preferred because it is simpler."""
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
        """True if a swarm or a machine can train the model."""
        return self.samples_per_s is not None or self.alone is not None

    def as_json(self) -> dict[str, Any]:
        """Return the whole plan in a form for JSON."""
        uncut = None if self.uncut is None else {**asdict(self.uncut), "samples_per_s": self.uncut.samples_per_s}
        chosen = {"gain": self.gain, "worth_it": self.worth_it, "stays_whole": self.stays_whole}
        return {**asdict(self), "uncut": uncut, **chosen}

    @property
    def worth_it(self) -> bool:
        """True if the swarm's gain exceeds the error of predictions."""
        return self.samples_per_s is not None and (self.gain is None or self.gain >= MIN_GAIN)
