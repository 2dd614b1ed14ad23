"""Calls on stages for single microbatches, and compact lists of microbatches and of batches."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.wire import Count, Positive, Seconds, WireMessage

MAX_MICROBATCHES: Final = 1 << 19  # most microbatches of a batch
# Most samples of a step. If the same batch is granted again, a multiple of this number is added to its `first`.
PLACES: Final = 1 << 26

Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MICROBATCHES)]
Direction = Literal["forward", "backward"]
TicketName = Annotated[str, msgspec.Meta(max_length=512)]
TicketKey = Annotated[bytes, msgspec.Meta(min_length=16, max_length=32)]


class Ticket(WireMessage, frozen=True):
    """A reference to a tensor that a peer holds or will hold."""

    peer_id: PeerId
    name: TicketName
    key: TicketKey | None  # presented to the holder; None: the holder knows its readers by their ids


class WaitRequest(WireMessage, frozen=True):
    """A consumer asks a producer to answer when the named tensors exist, or after `hold_s` seconds."""

    name: TicketName
    hold_s: Seconds
    take_bytes: Count | None = None  # include tensors of at most this size in the answer; None: include none
    ticket_key: TicketKey | None = None


class WaitReply(WireMessage, frozen=True):
    """A producer's answer to a consumer: whether the tensors exist."""

    ready: bool
    report: bytes = b""  # the producer's message about the tensors
    taken: bytes | None = None  # body of the message whose tensors this reply includes; None: it includes no tensors


class FetchRequest(WireMessage, frozen=True):
    """A consumer asks a producer for the named tensors, which exist."""

    name: TicketName
    ticket_key: TicketKey | None = None


class CallKey(WireMessage, frozen=True):
    """Identifies a microbatch by its place in the step, so the key does not depend on the trainer that sends it."""

    generation: Count  # rises when the run rolls back
    step: Count  # also the weight version that forward and backward use
    first: Count  # position in the step of the batch's first sample
    index: Index  # index of the microbatch in its batch
    call: Count  # counts the pipeline's calls within a training_step
    # Whether the microbatch belongs to an evaluation, which no step counts. Then `call` counts on through the
    # evaluation, and `first` is 0; for a probe, `first` is a positive multiple of `PLACES`.
    evaluation: bool = False
    weights: Count = 0  # which evaluation weights to use, by their number; 0: the weights of the step
    # Counts backwards that compute only the gradient of the input, from 1; 0: the backward that adds to the sums.
    input_only: Count = 0

    @classmethod
    def of(cls, generation: int, step: int, receipt: Receipt) -> CallKey:
        """Return the key of the microbatch of a receipt in a step."""
        first, index, call = receipt
        return cls(generation=generation, step=step, first=first, index=index, call=call)

    def name(self, stage_index: int, direction: Direction, trainer: PeerId) -> str:
        """Return the ticket name of one call's result, which ends with the id of the calling trainer."""
        # The rest of the name can be guessed. But the transport authenticates the caller's id, so no trainer can
        # cancel, replace or block another trainer's calls.
        return f"{self.result(stage_index, direction)}@{trainer}"

    def result(self, stage_index: int, direction: Direction) -> str:
        """Return the beginning of the ticket names of one call's result, which is equal for all callers."""
        kind = f"e{self.weights}." if self.evaluation else "t"
        batch = batch_name(self.generation, self.step, self.first, kind)
        # All backwards of a call share its forward, but each has a result of its own.
        backward = f".i{self.input_only}" if self.input_only and direction == "backward" else ""
        return f"{batch}{self.index}.c{self.call}{backward}/{stage_index}/{direction}"

    @property
    def adds(self) -> bool:
        """True if the backward may add its gradient to a step's sums."""
        return not self.evaluation and not self.input_only

    def __str__(self) -> str:
        """Describe the microbatch in an error's text."""
        return f"microbatch {self.index} of the batch at {self.first} in step {self.step}"

    @property
    def is_probe(self) -> bool:
        """True for a probe, whose output is only compared; repetitions of a probe draw equal random numbers."""
        return self.evaluation and self.first >= PLACES

    @property
    def receipt(self) -> Receipt:
        """The receipt under which a step's ledger lists the microbatch."""
        return (self.first, self.index, self.call)


def batch_name(generation: int, step: int, first: int, kind: str = "t") -> str:
    """Return the beginning of the names of a batch's calls; `kind` is "t" in training, "e<weights>." in evaluations."""
    return f"g{generation}.s{step}.{kind}{first}+"


# `(first, index, call)` of a microbatch whose gradient is in a sum. The step is that of the ledger.
Receipt = tuple[Count, Index, Count]


ModuleName = Annotated[str, msgspec.Meta(max_length=1024)]
AttributeName = Annotated[str, msgspec.Meta(max_length=256)]


class ModuleStates(WireMessage, frozen=True):
    """Modes and attributes that the trainer set on a stage's modules. Only differences are sent."""

    # Whether a module is in train mode, where that differs from the module around it.
    modes: Annotated[dict[ModuleName, bool], msgspec.Meta(max_length=1 << 16)] = msgspec.field(default_factory=dict)
    # Plain values. The first element of each sequence is a flag: whether the sequence is a tuple.
    attributes: Annotated[
        dict[ModuleName, Annotated[dict[AttributeName, Any], msgspec.Meta(max_length=256)]],
        msgspec.Meta(max_length=1 << 16),
    ] = msgspec.field(default_factory=dict)


BackendPrecisions = tuple[Literal["none", "ieee", "tf32"], Literal["none", "ieee", "tf32", "bf16"]]
"""Precisions of float32 products on CUDA and on the CPU, as in `torch.backends`."""
MatmulPrecision = Literal["highest", "high", "medium"] | BackendPrecisions
"""Precision of float32 products: as in `torch.set_float32_matmul_precision`, or per backend if set separately."""


class ComputeMode(WireMessage, frozen=True):
    """Settings of a computation in the trainer's thread, which servers do not inherit from that thread."""

    training: bool  # whether any module of the stage is in train mode
    grad: bool  # keep the tensors that backward needs
    input_grad: bool = False  # the pipeline's own input requires a gradient
    autocast: str | None = None  # dtype of autocast; None: off
    default_dtype: str = "float32"
    deterministic: Literal["off", "warn", "on"] = "off"  # see `torch.use_deterministic_algorithms`
    anomaly: bool = False  # see `torch.autograd.set_detect_anomaly`
    matmul_precision: MatmulPrecision = "highest"
    modules: ModuleStates | None = None


class ForwardRequest(WireMessage, frozen=True):
    """A trainer asks a server to compute one stage's output for one microbatch."""

    key: CallKey
    stage_index: int
    mode: ComputeMode
    source: Ticket | None  # the input, at the previous stage's server; None: it comes with the message
    result_key: TicketKey  # key that readers of the result must present
    # Tree of (inputs or None, extras), whose tensors come with the message. Extras are further arguments of blocks.
    structure: Any
    keep: bool = True  # keep the tensors that the backward needs; False: no backward will come, whatever the mode


class BackwardRequest(WireMessage, frozen=True):
    """A trainer asks a server to compute one stage's gradients for one microbatch, and to add them to the sum once."""

    key: CallKey
    stage_index: int
    mode: ComputeMode
    weight: Positive  # the batch's weight, from its grant
    accumulate: bool  # False: compute only the input's gradient
    source: Ticket | None  # the output's gradient, at the next stage's server; None: it comes with the message
    result_key: TicketKey  # key that readers of the result must present
    # Tree of a pair, whose tensors come with the message. First: the gradient or None of each output leaf, or None if
    # they come from `source`. Second: (inputs or None, extras) as in `ForwardRequest`, or None if they are left out.
    structure: Any
    inputs: Ticket | None = None  # the input, at another server, from which to run the forward again


class Computed(WireMessage, frozen=True):
    """The head of a message with the tensors that a call has computed."""

    structure: Any  # tree of the output; of a backward: the gradient or None of each input leaf
    flags: list[bool]  # only after a forward: which leaves require grad


class StageReport(WireMessage, frozen=True):
    """A server's report to the trainer on one stage's part in a finished call."""

    busy_s: float  # seconds of the compute thread for this microbatch so far, its forward included
    queued: int  # jobs that wait for the compute thread
    receipt: bool = False  # the gradient is in the step's sum, by this call or an earlier one


class CallReport(StageReport, frozen=True):
    """A server's report to the trainer on a finished call, with the reports that came with the call's input."""

    # Reports of the stages that the input came through, the nearest first.
    others: Annotated[tuple[StageReport, ...], msgspec.Meta(max_length=1024)] = ()


class CancelRequest(WireMessage, frozen=True):
    """A trainer cancels a call that it sent to a server."""

    key: CallKey
    stage_index: int
    direction: Direction


class CancelReply(WireMessage, frozen=True):
    """A server reports to the trainer whether the cancelled call has added its gradient; if not, it never will."""

    added: bool


MAX_RECEIPTS: Final = 1 << 18  # most receipts in a message; in memory each takes a hundred times as much as on the wire
# `(first, call, bitmap over the batch's microbatches)`. A batch of a few microbatches takes eight bytes.
Receipts = list[tuple[Count, Count, Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_MICROBATCHES // 8)]]]
# `(start, stride, number)` of places: adjacent batches of equal size need only one entry.
Run = tuple[Count, Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]]
# `(weight, trainer, number)` of batches in the order of their places: equal neighbours need only one entry.
Origins = list[tuple[Positive, PeerId, Annotated[int, msgspec.Meta(ge=1, le=MAX_RECEIPTS)]]]


class Origin(NamedTuple):
    """The weight of a batch's gradients, and the batch's trainer."""

    weight: float
    trainer: PeerId


def pack(receipts: Iterable[Receipt]) -> Receipts:
    """Pack receipts for the wire, sorted and without duplicates."""
    bits_by_call: defaultdict[tuple[int, int], int] = defaultdict(int)
    for first, index, call in receipts:
        bits_by_call[first, call] |= 1 << index
    return [
        (first, call, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
        for (first, call), bits in sorted(bits_by_call.items())
    ]


def unpack(packed: Receipts) -> set[Receipt]:
    """Unpack receipts; refuse too many of them before memory is allocated."""
    number = sum(int.from_bytes(bitmap, "little").bit_count() for _, _, bitmap in packed)
    if number > MAX_RECEIPTS:
        raise ProtocolError(f"a message may name at most {MAX_RECEIPTS} microbatches, got {number}")
    return {
        (first, 8 * position + bit, call)
        for first, call, bitmap in packed
        for position, byte in enumerate(bitmap)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    }


def to_runs(places: Sequence[int]) -> list[Run]:
    """Pack places for the wire. The places must increase."""
    runs: list[Run] = []
    for place in places:
        if runs:
            start, stride, number = runs[-1]
            if number == 1 or place == start + stride * number:
                runs[-1] = (start, place - start if number == 1 else stride, number + 1)
                continue
        runs.append((place, 1, 1))
    return runs


def to_ranges(runs: Iterable[Run]) -> tuple[range, ...]:
    """Convert runs to ranges for look-ups of places, without memory for each place that a message claims."""
    return tuple(range(start, start + stride * number, stride) for start, stride, number in runs)


def pack_origins(origins: Mapping[int, Origin]) -> Origins:
    """Pack the origins of batches, by their places, for the wire."""
    in_order = (origin for _, origin in sorted(origins.items()))
    return [(*origin, len(list(run))) for origin, run in itertools.groupby(in_order)]


def unpack_origins(packed: Origins, batches: Collection[int]) -> dict[int, Origin]:
    """Unpack the origins of batches, given by their places; refuse a wrong number before memory is allocated."""
    number = sum(length for _, _, length in packed)
    if number != len(batches):
        raise ProtocolError(
            f"each of {len(batches)} batches must have one weight and one trainer, got weights and trainers of {number}"
        )
    in_order = (Origin(weight, trainer) for weight, trainer, length in packed for _ in range(length))
    return dict(zip(sorted(batches), in_order, strict=True))
