"""Many microbatches in a few bytes for each of their batches, and many batches in a few bytes for all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.wire import Count, Positive, WireMessage

MAX_MICROBATCHES: Final = 1 << 19
"""Of a batch."""

PLACES: Final = 1 << 26
"""Samples of a step. A batch that is granted again has another `first`, by a multiple of it."""

Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_MICROBATCHES)]
Direction = Literal["forward", "backward"]
TicketName = Annotated[str, msgspec.Meta(max_length=512)]


class Ticket(WireMessage, frozen=True):
    """A reference to a tensor that a peer holds or will hold."""

    peer_id: PeerId
    name: TicketName


class _OfAttempt(Protocol):
    """A request about an attempt of a step."""

    @property
    def generation(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def attempt(self) -> int: ...


class CallKey(WireMessage, frozen=True):
    """Names one microbatch's way through the pipeline; with a stage and a direction, one call.

    A microbatch is named by its place in the step, not by its trainer: whoever sends it again, after whatever
    fault, means the same one.
    """

    generation: Count  # raised when the run goes back
    step: Count  # also the weight version that forward and backward use
    attempt: Count  # 0, as long as nothing voids a step
    first: Count  # position in the step of the batch's first sample
    index: Index  # which microbatch of the batch
    call: Count  # which call of the pipeline within the training_step
    evaluation: bool = False  # no step counts it; `first` is 0 and `call` runs on
    weights: Count = 0  # of an evaluation: which lent ones it means; 0: those of the step

    @classmethod
    def of(cls, request: _OfAttempt, receipt: Receipt) -> CallKey:
        """Of a microbatch that a request for an attempt of a step names by its receipt."""
        first, index, call = receipt
        return cls(
            generation=request.generation,
            step=request.step,
            attempt=request.attempt,
            first=first,
            index=index,
            call=call,
        )

    def name(self, stage_index: int, direction: Direction) -> str:
        """The ticket name of one call's result."""
        kind = f"e{self.weights}." if self.evaluation else "t"
        batch = batch_name(self.generation, self.step, self.attempt, self.first, kind)
        return f"{batch}{self.index}.c{self.call}/{stage_index}/{direction}"

    def __str__(self) -> str:
        """As errors name it."""
        return f"microbatch {self.index} of the batch at {self.first} in step {self.step}"

    @property
    def receipt(self) -> Receipt:
        """What the ledger of a step knows it by."""
        return (self.first, self.index, self.call)


def batch_name(generation: int, step: int, attempt: int, first: int, kind: str = "t") -> str:
    """What the names of all calls of a batch begin with."""
    return f"g{generation}.s{step}.a{attempt}.{kind}{first}+"


Receipt = tuple[Count, Index, Count]
"""``(first, index, call)`` of a microbatch whose gradient was added; the step and attempt are the ledger's."""


class ComputeMode(WireMessage, frozen=True):
    """How to compute: all that a thread of another process does not inherit from the trainer's."""

    training: bool  # train() or eval()
    grad: bool  # keep what backward needs
    input_grad: bool = False  # the pipeline's own input wants a gradient
    autocast: str | None = None  # dtype of autocast, None for off
    default_dtype: str = "float32"
    deterministic: Literal["off", "warn", "on"] = "off"
    anomaly: bool = False


class ForwardRequest(WireMessage, frozen=True):
    """Compute one stage's output for one microbatch."""

    key: CallKey
    stage_index: int
    mode: ComputeMode
    source: Ticket | None  # the input, at the previous stage's peer; None: it comes with the message
    structure: Any  # tree of (inputs or None, extras); its tensors come with the message
    keep: bool = True  # what backward needs; False: no backward will come, whatever the mode


class BackwardRequest(WireMessage, frozen=True):
    """Compute one stage's gradients for one microbatch, and add them to the step's sum once."""

    key: CallKey
    stage_index: int
    mode: ComputeMode
    weight: Positive  # of the batch, from its grant
    accumulate: bool  # False: only the input's gradient is wanted
    source: Ticket | None  # the output's gradient, at the next stage's peer; None: it comes with the message
    # Tree of a pair; its tensors come with the message: for each output leaf its gradient or None, or None where they
    # come from `source`; and (inputs or None, extras), as in `ForwardRequest`, or None where nothing is said of them.
    structure: Any
    inputs: Ticket | None = None  # of whom to fetch the input for doing the forward again


class Computed(WireMessage, frozen=True):
    """Goes with the tensors of a finished call."""

    structure: Any  # tree of the output; of a backward, for each input leaf its gradient or None
    flags: list[bool]  # of a forward: which leaves require grad


class StageReport(WireMessage, frozen=True):
    """What a server tells of one stage's part in a finished call."""

    busy_s: float  # the compute thread's time for this microbatch so far, its forward included
    queued: int  # jobs that wait for the compute thread
    receipt: bool = False  # the gradient is in the step's sum, by this call or an earlier one


class CallReport(StageReport, frozen=True):
    """Likewise, with what came with its input."""

    # Of the stages that this came through, the nearest first.
    others: Annotated[tuple[StageReport, ...], msgspec.Meta(max_length=1024)] = ()


class CancelRequest(WireMessage, frozen=True):
    """Do not do a call that was sent before."""

    key: CallKey
    stage_index: int
    direction: Direction


class CancelReply(WireMessage, frozen=True):
    """`added`: too late, the gradient is in the sum. Else it never will be by that call."""

    added: bool


MAX_RECEIPTS: Final = 1 << 18
"""Of one message. In memory each takes a hundred times as much as on the wire."""

Receipts = list[tuple[Count, Count, Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_MICROBATCHES // 8)]]]
"""``(first, call, a bitmap over the batch's microbatches)``: eight bytes for a batch of a few."""

Run = tuple[Count, Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]]
"""``(start, stride, number)`` of places: batches of one size that stand side by side are one of these."""


def pack(receipts: Iterable[Receipt]) -> Receipts:
    """As they travel; in order, each once."""
    batches: defaultdict[tuple[int, int], int] = defaultdict(int)
    for first, index, call in receipts:
        batches[first, call] |= 1 << index
    return [
        (first, call, bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
        for (first, call), bits in sorted(batches.items())
    ]


def unpack(packed: Receipts) -> set[Receipt]:
    """What `pack` was given.

    Raises:
        ProtocolError: They are too many. Said before memory is allocated for them.
    """
    number = sum(int.from_bytes(bitmap, "little").bit_count() for _, _, bitmap in packed)
    if number > MAX_RECEIPTS:
        raise ProtocolError(f"a message may name {MAX_RECEIPTS} microbatches, got {number}")
    return {
        (first, 8 * place + bit, call)
        for first, call, bitmap in packed
        for place, byte in enumerate(bitmap)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    }


def to_runs(places: Sequence[int]) -> list[Run]:
    """As they travel; they are in order, each once."""
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
    """To look places up in: whatever a message claims, it takes no memory."""
    return tuple(range(start, start + stride * number, stride) for start, stride, number in runs)
