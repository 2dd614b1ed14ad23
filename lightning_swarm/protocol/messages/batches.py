"""Messages between trainers and the coordinator: batches, their places in a step, and the step's record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.reports import EventCounts
from lightning_swarm.protocol.messages.run import MAX_PLANS, BatchNumber, EpochPlan, SeatedMembers, StepChange, Term
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import Count, NumSamples, Positive, SmallCount, WireMessage, decode

# A sum of two places must fit into an unsigned 64-bit integer, the largest number of a message.
Place = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ChangeRequest(WireMessage, frozen=True):
    """The lead sends a change of weights or trained parameters with which a step begins, before its first lease."""

    generation: Count
    step: Count
    change: StepChange


class GrantRequest(WireMessage, frozen=True):
    """A trainer with a batch asks the coordinator for a lease in the open step."""

    step: Count  # the open step, as far as the trainer knows
    num_samples: NumSamples
    generation: Count  # the run's generation, as the trainer knows it
    gradient_scale: Positive = 1.0  # the factor of the trainer's losses; the same for all batches of a step
    number: Count = 0  # serial number of the trainer's batch, so that a repeated request gets the same lease; 0: none
    # The batch, if trainers share an epoch's order. An index past the last batch asks whether the epoch is complete.
    batch: BatchNumber | None = None


class Grant(WireMessage, frozen=True):
    """The coordinator grants a trainer a lease: places for the samples of one batch in a step."""

    lease: Count
    generation: Count
    step: Count
    first: Place  # position in the step of the batch's first sample
    weight: Positive  # weight of the batch's gradients in the step's sum
    # The batch, if trainers share an epoch's order. If it is not the requested one, the trainer brings it in addition.
    batch: BatchNumber | None = None
    samples: Count = 0  # samples of that batch


class WaitForRecord(WireMessage, frozen=True):
    """The coordinator answers that the open step is full, and names the record after which the trainer asks again."""

    step: Count | None  # the record's step; None: the lead has not begun yet


class GrantReply(WireMessage, frozen=True):
    """The coordinator answers a trainer's request for a lease: exactly one field is set."""

    grant: Grant | None = None
    wait: WaitForRecord | None = None
    over: bool = False  # the run's last step is decided, so there will be no lease
    passed: bool = False  # another trainer has the batch, or it counts already; at an epoch's end: all batches count


# Most names that `sync_dist=True` may log in a step: in one trainer's batches, and in the coordinator's reply.
MAX_LOGS = 256
MAX_WEIGHT: Final = 1 << 53  # largest weight of a logged value: up to it, floats count exactly
Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]  # how the values of several batches are combined


class LoggedValue(WireMessage, frozen=True):
    """A value that `self.log(..., sync_dist=True)` logged for a batch, or the combined value of several batches."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    reduce: Reduction
    value: float
    batch_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)]  # the weight of a mean
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool

    def __post_init__(self) -> None:
        """Refuse values that Lightning refuses to log."""
        if not self.on_step and not self.on_epoch:
            raise ValueError(f"{self.name!r} must be logged for each step or for the epoch")


def fold(logs: Iterable[LoggedValue]) -> list[LoggedValue]:
    """Combine logged values by name, as if one process had logged them all."""
    folded: dict[str, LoggedValue] = {}
    for logged in logs:
        earlier = folded.get(logged.name)
        folded[logged.name] = logged if earlier is None else _combine(earlier, logged)
    return list(folded.values())


def _combine(first: LoggedValue, second: LoggedValue) -> LoggedValue:
    batch_size = min(first.batch_size + second.batch_size, MAX_WEIGHT)
    if first.reduce == "mean":
        # Two batches of size 0 have no mean. Any value will do, because its weight is 0.
        value = (first.value * first.batch_size + second.value * second.batch_size) / (batch_size or 1)
    elif first.reduce == "sum":
        value = first.value + second.value
    else:
        value = max(first.value, second.value) if first.reduce == "max" else min(first.value, second.value)
    return msgspec.structs.replace(first, value=value, batch_size=batch_size)


class MetricState(WireMessage, frozen=True):
    """The updates of one or more batches to a torchmetrics object that is logged with `sync_dist=True`."""

    name: Annotated[str, msgspec.Meta(max_length=256)]  # name of the object in the LightningModule
    num_updates: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]  # so that sums fit into 64 bits
    lengths: Annotated[list[SmallCount], msgspec.Meta(max_length=256)]  # number of tensors of each declared state


class BatchMetrics(WireMessage, frozen=True):
    """A trainer sends the coordinator a batch's metric states, before `BatchDone`; the lead gets them if it counts."""

    generation: Count
    step: Count
    lease: int
    metrics: Annotated[list[MetricState], msgspec.Meta(min_length=1, max_length=MAX_LOGS)]

    def check_tensors(self, number: int) -> None:
        """Refuse a number of tensors that does not match the states."""
        expected = sum(length for state in self.metrics for length in state.lengths)
        if number != expected:
            raise ProtocolError(f"these metrics must have {expected} tensors, got {number}")


class MetricsRequest(WireMessage, frozen=True):
    """The lead asks the coordinator for the metric states of a batch that the newest record counts."""

    generation: Count
    step: Count
    first: Count  # the batch's first position


class BatchArmed(WireMessage, frozen=True):
    """A trainer reports that servers have accepted all backward calls of a batch, and can finish it on their own."""

    generation: Count
    step: Count
    lease: int
    receipts: list[Receipt]  # the receipts that the batch will have
    # As in `BatchDone`.
    logs: Annotated[list[LoggedValue], msgspec.Meta(max_length=MAX_LOGS)] = msgspec.field(default_factory=list)


class BatchBegins(WireMessage, frozen=True):
    """The lead begins a batch whose lease it received earlier. The late step's record may come during the batch."""

    generation: Count
    step: Count
    first: Count  # the batch's first position


class BatchDone(WireMessage, frozen=True):
    """A trainer reports that a batch is complete, with all its receipts, or withdrawn."""

    step: Count  # the batch's step, so that a late message does not close the next step
    lease: int | None  # None: the batch was withdrawn before, and this message only asks to close the step
    completed: list[Receipt]
    withdrawn: bool
    close: bool  # the lead asks to close the step with the batches that it has
    # Weight of Lightning's accumulation window; None: the sum of the counted batches' weights.
    total_weight: Positive | None
    generation: Count
    noted: EventCounts  # the trainer's events so far
    first: Count = 0  # the batch's first position
    begun: bool = False  # its backward has begun, so a withdrawn batch may have gradients in the sums
    dropped: bool = False  # its own `training_step` withdrew it: no trainer may bring it again
    version: Count = 0  # the newest version that the trainer knows
    # The lead gets these if the batch counts.
    logs: Annotated[list[LoggedValue], msgspec.Meta(max_length=MAX_LOGS)] = msgspec.field(default_factory=list)
    # Only from a trainer that trains alone. If the step closes now, the call also waits for the step's end.
    ends: RecordRequest | None = None
    # Also only from such a trainer: requests a lease for the next batch, in any step that has room.
    following: GrantRequest | None = None


class BatchDoneReply(WireMessage, frozen=True):
    """The coordinator answers whether the step closes now, so that the trainer waits for its record."""

    closing: bool
    ended: RecordReply | None = None  # answers `ends`; if the step stays open: the record of step `imminent`
    grant: Grant | None = None  # answers `following`, unless the lease has to wait
    # Only to the lead, with delayed steps: the step whose record is decided, or about to be, but unknown to the lead.
    imminent: Count | None = None


class RecordRequest(WireMessage, frozen=True):
    """A trainer asks the coordinator for the record of a step, and waits until the step is decided."""

    # Without delayed steps, the coordinator decides the record only when the lead asks for it. Until then the lead's
    # loop may validate.
    step: int
    generation: Count
    version: Count  # the newest version that the trainer knows
    # Only from the lead: the hyperparameters of this step, one dict for each parameter group.
    hyperparameters: list[dict[str, Any]] | None = None
    # Hyperparameters of the previous step, if the lead does not know its record.
    before: list[dict[str, Any]] | None = None
    decided: bool = True  # wait for the record; False, with delayed steps: only until the next step is open
    epoch: Count = 0  # epoch of the lead's loop
    # Only from the lead: the versions of snapshots from which its loop could continue.
    resumable: Annotated[list[Count], msgspec.Meta(max_length=64)] | None = None


class RetireRequest(WireMessage, frozen=True):
    """A trainer reports that its loop has ended, perhaps by an error, and will bring no more batches."""

    reason: Annotated[str, msgspec.Meta(max_length=2000)]


class RecordReply(WireMessage, frozen=True):
    """The coordinator sends a trainer the newest record, which without delayed steps is at least the requested one."""

    record: Record | None  # None: there is none yet
    closing: bool  # the requested record will come; False: a batch was withdrawn, and the step has room again
    open: Count = 0  # the step that grants leases
    seats: SeatedMembers | None = None  # the members after the record, for a trainer that missed earlier records
    # Only to the lead: values that other trainers logged for batches of this record, combined by name.
    logs: list[LoggedValue] = msgspec.field(default_factory=list)
    # Only to the lead: event counts that have risen since its last reply. If many have, some come later.
    noted: dict[PeerId, EventCounts] = msgspec.field(default_factory=dict)
    # Only to the lead: first positions of other trainers' batches in this record whose metric states it may request.
    measured: list[Count] = msgspec.field(default_factory=list)


class ReportRequest(WireMessage, frozen=True):
    """A new coordinator asks a trainer for its part in the open steps."""

    term: Term
    generation: Count


class Lease(WireMessage, frozen=True):
    """A batch and its lease, as its trainer knows them."""

    grant: Grant
    request: GrantRequest
    completed: list[Receipt] | None = None  # None: not complete yet
    armed: list[Receipt] | None = None  # as in `BatchArmed`
    withdrawn: bool = False
    dropped: bool = False  # as in `BatchDone`
    logs: Annotated[list[LoggedValue], msgspec.Meta(max_length=MAX_LOGS)] = msgspec.field(default_factory=list)
    has_metrics: bool = False


class ReportReply(WireMessage, frozen=True):
    """A trainer reports to a new coordinator its batches in the open steps, and in the step before them."""

    begun: bool  # the trainer has had a lease since the run began or rolled back
    leases: list[Lease]
    closed: list[tuple[Count, Positive | None]]  # steps that the trainer asked to close, with their total weights
    # Only from the lead, if trainers share epochs' orders: plans of current epochs, and where the generation began.
    plans: Annotated[list[EpochPlan], msgspec.Meta(max_length=MAX_PLANS)] = msgspec.field(default_factory=list)
    position: BatchNumber | None = None


class RegisterRequest(WireMessage, frozen=True):
    """A trainer sends its report to a new coordinator, which may not have been able to ask for it."""

    generation: Count
    step: Count  # the open step, as far as the trainer knows
    report: ReportReply


class LeaseMetricsRequest(WireMessage, frozen=True):
    """A new coordinator asks a trainer for a batch's metric states."""

    step: Count
    lease: int


# Keys of a checkpoint without which a loop cannot continue.
NEEDED: Final = ("epoch", "global_step", "state_dict", "loops", "optimizer_states", "lr_schedulers")

Metrics = tuple[list[bytes], list[Any]]  # encoded `MetricState`s, and the tensors of all of them


class TravellingLoop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `ResumePoint` and its `LoopState` as they are sent, with `WireMessage`s encoded."""

    checkpoint: dict[str, Any]  # Lightning's, with `Awaited` in place of weights and optimizer state
    parameter_names: list[str]  # names in the optimizer's order
    # The wire format fixes these short names.
    made: dict[str, Any]  # random state when the epoch's iterator was made
    first: dict[str, Any]  # random state before the epoch's first batch was read
    now: dict[str, Any]  # random state before the next batch is read
    num_batches: int | None  # batches read from the iterator; None if the loaders keep their position themselves
    metrics: dict[str, dict[str, Any]]  # name in the module -> contents of a torchmetrics object
    results: dict[str, dict[str, Any]]  # Lightning's results of the epoch so far
    shown: dict[str, dict[str, Any]]  # values for callbacks, loggers and progress bars
    logging: dict[str, Any]  # attributes of Lightning's logger connector
    followed: dict[str, bool]  # shared metric -> whether its `forward` computes a value for each batch
    logs: dict[int, list[bytes]]  # lease -> logged values of the loop's own batch in the current step
    added: dict[int, Metrics]  # lease -> metric states of that batch
    num_counted: int  # records that the loop has counted
    heard: list[tuple[bytes, list[bytes], list[Metrics]]]  # records not yet counted by the loop, with logs and metrics
    position: tuple[int, int] | None  # the first batch that the weights have not seen
    attributes: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)  # module name -> attributes

    @classmethod
    def read(cls, value: Any) -> TravellingLoop:
        """Read another peer's loop; refuse it now if any part could not be decoded when the loop resumes."""
        try:
            loop = msgspec.convert(value, cls)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a loop's state must have the fields of `{cls.__name__}`: {error}") from error
        missing = [name for name in NEEDED if name not in loop.checkpoint]
        loops = loop.checkpoint.get("loops")
        fit_loop = loops.get("fit_loop") if isinstance(loops, dict) else None
        if missing or not isinstance(fit_loop, dict) or not isinstance(fit_loop.get("state_dict"), dict):
            raise ProtocolError(
                f"a loop's state must be a checkpoint with {', '.join(NEEDED)}; it lacks {missing or 'loops'}"
            )
        for record, logs, metrics in loop.heard:
            decode(record, Record)
            _check_decodable(logs, metrics)
        for batches in loop.logs.values():
            _check_decodable(batches, ())
        _check_decodable((), loop.added.values())
        return loop


def _check_decodable(logs: Iterable[bytes], metrics: Iterable[Metrics]) -> None:
    """Refuse logged values or metric states that cannot be decoded."""
    for value in logs:
        decode(value, LoggedValue)
    for states, tensors in metrics:
        expected = sum(sum(decode(state, MetricState).lengths) for state in states)
        if expected != len(tensors):
            raise ProtocolError(f"the states of these metrics must have {expected} tensors, got {len(tensors)}")
