"""What trainers and the coordinator say of batches, places in a step, and its record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.events import EventCounts
from lightning_swarm.protocol.messages.run import MAX_PLANS, BatchNumber, EpochPlan, SeatedMembers, Selection, Term
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import Count, NumSamples, Positive, SmallCount, WireMessage, decode


def fold(logs: Iterable[LoggedValue]) -> list[LoggedValue]:
    """One entry for each name, as if its values had been logged by one process."""
    folded: dict[str, LoggedValue] = {}
    for one in logs:
        other = folded.get(one.name)
        folded[one.name] = one if other is None else _together(other, one)
    return list(folded.values())


def _together(one: LoggedValue, other: LoggedValue) -> LoggedValue:
    batch_size = one.batch_size + other.batch_size
    if one.reduce == "mean":
        # Two batches of size 0 have no mean; whatever it is, it weighs nothing.
        value = (one.value * one.batch_size + other.value * other.batch_size) / (batch_size or 1)
    elif one.reduce == "sum":
        value = one.value + other.value
    else:
        value = max(one.value, other.value) if one.reduce == "max" else min(one.value, other.value)
    return msgspec.structs.replace(one, value=value, batch_size=batch_size)


class SelectRequest(WireMessage, frozen=True):
    """The lead's selection is another one from step `step` on, in which nothing was granted yet."""

    generation: Count
    step: Count
    selection: Selection


class GrantRequest(WireMessage, frozen=True):
    """A trainer with a batch in hand asks for a place in the open step."""

    step: Count  # the weight version that the trainer knows
    num_samples: NumSamples
    generation: Count  # of the run, as the trainer knows it
    gradient_scale: Positive = 1.0  # what it multiplies its losses by; one for all batches of a step
    number: Count = 0  # of the trainer's batch, from 1: asked twice, it is granted once; 0: not told
    # Where an epoch's order is shared: which batch it is; or the end of an epoch, to hear whether all is through.
    batch: BatchNumber | None = None


class Grant(WireMessage, frozen=True):
    """A lease of places in a step."""

    lease: int
    generation: int
    step: int
    attempt: int
    first: int
    weight: Positive
    # Where an epoch's order is shared: for which batch. If not for the one that was asked for, it is brought besides.
    batch: BatchNumber | None = None
    samples: Count = 0  # of that


class WaitForRecord(WireMessage, frozen=True):
    """No place: the open step is full. Ask again when record `step` is applied; None: the lead has not begun yet."""

    step: Count | None


class GrantReply(WireMessage, frozen=True):
    """Exactly one of the four."""

    grant: Grant | None = None
    wait: WaitForRecord | None = None
    over: bool = False  # the run's last step is decided: no place will ever come
    passed: bool = False  # the batch is in other hands, or counts; at the end of an epoch: all of it is through


MAX_LOGS = 256
"""Names that one step's batches may log with `sync_dist=True`."""

Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]
"""What is made of the values of several batches."""


class LoggedValue(WireMessage, frozen=True):
    """What `self.log(..., sync_dist=True)` said of a batch, or of several together."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    reduce: Reduction
    value: float
    batch_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # the weight of a mean
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool


class MetricState(WireMessage, frozen=True):
    """What a batch, or several, added to a torchmetrics object that is logged with `sync_dist=True`."""

    name: Annotated[str, msgspec.Meta(max_length=256)]  # its place in the LightningModule
    num_updates: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    lengths: Annotated[list[SmallCount], msgspec.Meta(max_length=256)]  # tensors of each of its states, as declared


class BatchMetrics(WireMessage, frozen=True):
    """Goes with the states' tensors, before `BatchDone`: for the lead, if the batch counts."""

    generation: Count
    step: Count
    lease: int
    metrics: Annotated[list[MetricState], msgspec.Meta(min_length=1, max_length=MAX_LOGS)]


class MetricsRequest(WireMessage, frozen=True):
    """The lead asks for what came with a batch that the newest record counts."""

    generation: Count
    step: Count
    first: Count  # the batch, by its first position


class BatchArmed(WireMessage, frozen=True):
    """All backward calls of a batch were accepted, and nothing else of it is to come: it needs its trainer no more."""

    generation: Count
    step: Count
    lease: int
    receipts: list[Receipt]  # that it will have
    # As in `BatchDone`.
    logs: Annotated[list[LoggedValue], msgspec.Meta(max_length=MAX_LOGS)] = msgspec.field(default_factory=list)


class BatchBegins(WireMessage, frozen=True):
    """The lead begins a batch whose place was granted before: until it is through, a record may come that is late."""

    generation: Count
    step: Count
    first: Count  # the batch's place


class BatchDone(WireMessage, frozen=True):
    """A granted batch is through (all receipts seen by its trainer), or withdrawn."""

    step: Count  # that is meant: a late message must not close the next one
    lease: int | None  # None: the batch was withdrawn before, this only asks to close
    completed: list[Receipt]
    withdrawn: bool
    close: bool  # the lead asks to close the step with what it has
    total_weight: Positive | None  # Lightning's window; None: the weights of the counted batches add up
    generation: Count
    noted: EventCounts  # by the trainer, so far
    first: Count = 0  # the batch's place
    begun: bool = False  # its backward: when it is withdrawn, some of its gradients may be in the sums
    dropped: bool = False  # withdrawn by its own `training_step`: nobody shall bring it again
    version: Count = 0  # that the trainer knows
    # For the lead, if the batch counts.
    logs: Annotated[list[LoggedValue], msgspec.Meta(max_length=MAX_LOGS)] = msgspec.field(default_factory=list)
    # From a trainer that trains alone: if its step closes now, it waits for the end.
    ends: RecordRequest | None = None
    # Likewise: its next batch wants a place, in whichever step takes it.
    following: GrantRequest | None = None


class BatchDoneReply(WireMessage, frozen=True):
    """Whether the step closes now: then its record is worth waiting for."""

    closing: bool
    ended: RecordReply | None = None  # what `ends` asked for; or, if the step goes on, of what is imminent
    grant: Grant | None = None  # of what `following` asked for, unless it has to wait for that
    # To the lead, where steps are delayed: the record of this step, which it does not know, is decided or about to be.
    imminent: Count | None = None


class RecordRequest(WireMessage, frozen=True):
    """Long poll for the end of a step: its record; where steps are delayed, without `decided`, until the next is open.

    The record waits for the lead to ask: then its loop is where it sees the step, and no validation is under way.
    """

    step: int
    generation: Count
    version: Count  # that the trainer knows
    # From the lead: to step with; one dict a parameter group.
    hyperparameters: list[dict[str, Any]] | None = None
    before: list[dict[str, Any]] | None = None  # likewise, in the step before, if its record is not known to the lead
    decided: bool = True
    epoch: Count = 0  # of the lead's loop


class Quit(WireMessage, frozen=True):
    """A trainer's loop ended, by an error perhaps; nothing more of it will come."""

    reason: Annotated[str, msgspec.Meta(max_length=2000)]


class RecordReply(WireMessage, frozen=True):
    """The newest record; where steps are not delayed, not older than what was asked for."""

    record: Record | None  # None: there is none that was asked for
    closing: bool  # whether what was asked for is worth waiting for; a withdrawn batch leaves a place in the step
    open: Count = 0  # the step that grants places
    seats: SeatedMembers | None = None  # after the record, for a trainer that does not know those before it
    # To the lead: what other trainers logged of the batches that it counts, folded by name.
    logs: list[LoggedValue] = msgspec.field(default_factory=list)
    # To the lead: by peers that noted more than it was told before; where many did, by the others later.
    noted: dict[PeerId, EventCounts] = msgspec.field(default_factory=dict)
    # To the lead: batches of other trainers in it that came with `BatchMetrics`, by their first positions.
    measured: list[Count] = msgspec.field(default_factory=list)


class ReportRequest(WireMessage, frozen=True):
    """The caller coordinates from now on, and asks a trainer for its part of the books."""

    term: Term
    generation: Count


class Lease(WireMessage, frozen=True):
    """A batch as its trainer knows it."""

    grant: Grant
    request: GrantRequest
    completed: list[Receipt] | None = None  # None: it is under way
    armed: list[Receipt] | None = None  # as in `BatchArmed`
    withdrawn: bool = False
    dropped: bool = False  # as in `BatchDone`
    logs: Annotated[list[LoggedValue], msgspec.Meta(max_length=MAX_LOGS)] = msgspec.field(default_factory=list)
    has_metrics: bool = False


class ReportReply(WireMessage, frozen=True):
    """What a trainer did in the steps that are open, and in the one before them."""

    begun: bool  # it was granted a place since the run began, or went back
    leases: list[Lease]
    closed: list[tuple[Count, Positive | None]]  # steps that it asked to close, and their windows
    # From the lead, where epochs have an order that is shared: those that are not over, and where the generation began.
    plans: Annotated[list[EpochPlan], msgspec.Meta(max_length=MAX_PLANS)] = msgspec.field(default_factory=list)
    position: BatchNumber | None = None


class RegisterRequest(WireMessage, frozen=True):
    """A trainer's part of the books, to a coordinator that took over and may not have heard it."""

    generation: Count
    step: Count  # that the trainer takes for the open one
    report: ReportReply


class LeaseMetricsRequest(WireMessage, frozen=True):
    """The coordinator asks a trainer for the `BatchMetrics` of a batch again."""

    step: Count
    lease: int


NEEDED: Final = ("epoch", "global_step", "state_dict", "loops", "optimizer_states", "lr_schedulers")
"""Of a checkpoint: without these a loop cannot go on."""

Metrics = tuple[list[bytes], list[Any]]  # the states of metrics, and the tensors of all of them


class TravellingLoop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is in a `ResumePoint` and its `LoopState`; what has a form on the wire is in that."""

    checkpoint: dict[str, Any]
    parameter_names: list[str]
    made: dict[str, Any]
    first: dict[str, Any]
    now: dict[str, Any]
    num_batches: int | None
    metrics: dict[str, dict[str, Any]]
    results: dict[str, dict[str, Any]]
    shown: dict[str, dict[str, Any]]
    logging: dict[str, Any]
    followed: dict[str, bool]
    logs: dict[int, list[bytes]]  # of its own batches in the step that it was in, by their leases
    added: dict[int, Metrics]  # likewise, to metrics
    num_counted: int
    heard: list[tuple[bytes, list[bytes], list[Metrics]]]  # records that it had not counted, and what came with each
    position: tuple[int, int] | None  # of the first batch that the weights know nothing of

    @classmethod
    def read(cls, value: Any) -> TravellingLoop:
        """The loop in a value that came from somebody else.

        Raises:
            ProtocolError: It is none, or some part of it could not be read when the loop goes on.
        """
        try:
            came = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"the state of a loop has other fields: {error}") from error
        missing = [name for name in NEEDED if name not in came.checkpoint]
        loops = came.checkpoint.get("loops")
        fit_loop = loops.get("fit_loop") if isinstance(loops, dict) else None
        if missing or not isinstance(fit_loop, dict) or not isinstance(fit_loop.get("state_dict"), dict):
            raise ProtocolError(
                f"the state of a loop is a checkpoint with {', '.join(NEEDED)}; lacks {missing or 'loops'}"
            )
        for record, logs, metrics in came.heard:
            decode(record, Record)
            _check(logs, metrics)
        for batches in came.logs.values():
            _check(batches, ())
        _check((), came.added.values())
        return came


def _check(logs: Iterable[bytes], metrics: Iterable[Metrics]) -> None:
    for one in logs:
        decode(one, LoggedValue)
    for states, tensors in metrics:
        expected = sum(sum(decode(one, MetricState).lengths) for one in states)
        if expected != len(tensors):
            raise ProtocolError(f"the states of metrics are made of {expected} tensors, got {len(tensors)}")
