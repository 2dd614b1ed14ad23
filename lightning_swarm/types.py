"""The records that peers exchange, and how they are encoded.

All of them are frozen msgspec structs: decoding checks every field's type, an unknown or missing field is a
`ProtocolError`, and nothing is ever unpickled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import PeerId

PROTOCOL_VERSION = 1

Direction = Literal["forward", "backward"]

Count = Annotated[int, msgspec.Meta(ge=0)]
SmallCount = Annotated[int, msgspec.Meta(ge=0, le=1024)]
NumSamples = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
TicketName = Annotated[str, msgspec.Meta(max_length=512)]
Addresses = Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=16)]
"""Full addresses of one peer."""
ShortText = Annotated[str, msgspec.Meta(max_length=100)]


class Wire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that travels in the body of a message."""


_T = TypeVar("_T")


def encode(record: Wire) -> bytes:
    """The record as bytes."""
    return msgspec.msgpack.encode(record)


def decode(body: bytes, kind: type[_T]) -> _T:
    """The record that `body` holds.

    Raises:
        ProtocolError: `body` is no `kind`.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"a message must hold one {kind.__name__}, got {len(body)} other bytes: {error}") from error


class Member(Wire, frozen=True):
    """A peer in one of its lives: a process that was restarted has a new boot id."""

    peer_id: PeerId
    boot_id: int


class Ticket(Wire, frozen=True):
    """A reference to a tensor that a peer holds or will hold."""

    peer_id: PeerId
    name: TicketName


class CallKey(Wire, frozen=True):
    """Names one microbatch's way through the pipeline; with a stage and a direction, one call.

    A microbatch is named by its place in the step, not by its trainer: whoever sends it again, after whatever
    fault, means the same one.
    """

    generation: Count  # raised when the run goes back
    step: Count  # also the weight version that forward and backward use
    attempt: Count  # raised when the step is voided
    first: Count  # position in the step of the batch's first sample
    index: Count  # which microbatch of the batch
    call: Count  # which call of the pipeline within the training_step
    evaluation: bool = False  # no step counts it; `first` is 0 and `call` runs on
    weights: Count = 0  # of an evaluation: which lent ones it means; 0: those of the step

    def name(self, stage_index: int, direction: Direction) -> str:
        """The ticket name of one call's result."""
        kind = f"e{self.weights}." if self.evaluation else "t"
        return (
            f"g{self.generation}.s{self.step}.a{self.attempt}.{kind}{self.first}+{self.index}"
            f".c{self.call}/{stage_index}/{direction}"
        )

    @property
    def receipt(self) -> Receipt:
        """What the ledger of a step knows it by."""
        return (self.first, self.index, self.call)


Receipt = tuple[Count, Count, Count]
"""``(first, index, call)`` of a microbatch whose gradient was added; the step and attempt are the ledger's."""


class Mode(Wire, frozen=True):
    """How to compute: all that a thread of another process does not inherit from the trainer's."""

    training: bool  # train() or eval()
    grad: bool  # keep what backward needs
    input_grad: bool = False  # the pipeline's own input wants a gradient
    autocast: str | None = None  # dtype of autocast, None for off
    default_dtype: str = "float32"
    deterministic: Literal["off", "warn", "on"] = "off"
    anomaly: bool = False


class ForwardRequest(Wire, frozen=True):
    """Compute one stage's output for one microbatch."""

    key: CallKey
    stage_index: int
    mode: Mode
    source: Ticket | None  # the input, at the previous stage's peer; None: it comes with the message
    structure: Any  # tree of (inputs or None, extras); its tensors come with the message
    keep: bool = True  # what backward needs; False: no backward will come, whatever the mode


class Recompute(Wire, frozen=True):
    """All that a peer without the forward's leavings needs to do it again."""

    source: Ticket | None  # as in `ForwardRequest`
    structure: Any


class BackwardRequest(Wire, frozen=True):
    """Compute one stage's gradients for one microbatch, and add them to the step's sum once."""

    key: CallKey
    stage_index: int
    mode: Mode
    weight: Positive  # of the batch, from its grant
    accumulate: bool  # False: only the input's gradient is wanted
    source: Ticket | None  # the output's gradient, at the next stage's peer; None: it comes with the message
    present: list[bool]  # with the message: which output leaves have a gradient
    recompute: Recompute | None = None  # its tensors come with the message, after the gradients


class Computed(Wire, frozen=True):
    """Goes with the tensors of a finished call."""

    structure: Any  # forward: tree of the output. backward: None
    flags: list[bool]  # forward: which leaves require grad. backward: which input leaves have a gradient


class CallReport(Wire, frozen=True):
    """What a server tells of a finished call."""

    busy_s: float  # the compute thread's time for this microbatch so far, its forward included
    queued: int  # jobs that wait for the compute thread
    receipt: bool = False  # the gradient is in the step's sum, by this call or an earlier one


class CancelRequest(Wire, frozen=True):
    """Do not do a call that was sent before."""

    key: CallKey
    stage_index: int
    direction: Direction


class CancelReply(Wire, frozen=True):
    """`added`: too late, the gradient is in the sum. Else it never will be by that call."""

    added: bool


class Selection(Wire, frozen=True):
    """Which parameters train, and which group of the optimizer holds which: the user's word, by full names."""

    num_groups: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    groups: dict[str, Count]  # the group of each parameter that the optimizer holds
    frozen: list[str]  # parameters that require no gradient, in the model's order


class SelectRequest(Wire, frozen=True):
    """The lead's selection is another one from step `step` on, in which nothing was granted yet."""

    generation: Count
    step: Count
    selection: Selection


class SettleRequest(Wire, frozen=True):
    """Open(k), where the selection changed: every server settles it before the first grant."""

    generation: int
    step: int
    attempt: int
    selection: Selection


class GrantRequest(Wire, frozen=True):
    """A trainer with a batch in hand asks for a place in the open step."""

    step: Count  # the weight version that the trainer knows
    num_samples: NumSamples
    generation: Count  # of the run, as the trainer knows it
    gradient_scale: Positive = 1.0  # what it multiplies its losses by; one for all batches of a step


class Grant(Wire, frozen=True):
    """A lease of places in a step."""

    lease: int
    generation: int
    step: int
    attempt: int
    first: int
    weight: Positive


class Wait(Wire, frozen=True):
    """No place: the open step is full. Ask again when record `step` is applied; None: the lead has not begun yet."""

    step: Count | None


class GrantReply(Wire, frozen=True):
    """Exactly one of the three."""

    grant: Grant | None = None
    wait: Wait | None = None
    over: bool = False  # the run's last step is decided: no place will ever come


MAX_LOGS = 256
"""Names that one step's batches may log with `sync_dist=True`."""


class Logged(Wire, frozen=True):
    """What `self.log(..., sync_dist=True)` said of a batch, or of several together."""

    name: Annotated[str, msgspec.Meta(max_length=256)]
    reduce: Literal["mean", "sum", "max", "min"]
    value: float
    batch_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]  # the weight of a mean
    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool


class BatchDone(Wire, frozen=True):
    """A granted batch is through (all receipts seen by its trainer), or withdrawn."""

    step: Count  # that is meant: a late message must not close the next one
    lease: int | None  # None: the batch was withdrawn before, this only asks to close
    completed: list[Receipt]
    withdrawn: bool
    close: bool  # the lead asks to close the step with what it has
    total_weight: Positive | None  # Lightning's window; None: the weights of the counted batches add up
    generation: Count
    logs: Annotated[list[Logged], msgspec.Meta(max_length=MAX_LOGS)] = []  # for the lead, if the batch counts


class BatchDoneReply(Wire, frozen=True):
    """Whether the step closes now: then its record is worth waiting for."""

    closing: bool


class RecordRequest(Wire, frozen=True):
    """Long poll for the record of a step.

    The record waits for the lead to ask: then its loop is where it sees the step, and no validation is under way.
    """

    step: int
    generation: Count
    hyperparameters: list[dict[str, Any]] | None = None  # from the lead: to step with; one dict a parameter group


class Quit(Wire, frozen=True):
    """A trainer's loop ended by an error; nothing more of it will come."""

    reason: Annotated[str, msgspec.Meta(max_length=2000)]


class FreezeRequest(Wire, frozen=True):
    """Close(k), first part: add nothing more, and say what was added."""

    generation: int
    step: int
    attempt: int
    counted: list[Receipt]
    batches: list[Receipt]  # as in `Closing`


class StageLedger(Wire, frozen=True):
    """A server's ledger of one stage, as a bitmap over the receipts that count in it."""

    stage_index: int
    held: bytes
    num_unnamed: int  # receipts beside those
    touched: bytes  # bitmap over the stage's parameters: some counted microbatch gave it a gradient
    version_hash: int  # of weights and optimizer state before the step


class FreezeReply(Wire, frozen=True):
    """One ledger for each stage that the server holds."""

    boot_id: int
    ledgers: list[StageLedger]


class StageClosing(Wire, frozen=True):
    """Who holds which receipt of one stage."""

    roster: list[Member]
    holders: list[bytes]  # for each member, its receipts: a bitmap over those that count in this stage
    touched: bytes


class Closing(Wire, frozen=True):
    """Close(k): what counts, and who holds it. After it a server adds only what it names."""

    generation: int
    step: int
    attempt: int
    round: int
    counted: list[Receipt]  # microbatches
    batches: list[Receipt]  # one for each batch: trainers add up by batch what they hold themselves
    num_samples: Count
    total_weight: Positive
    stages: list[StageClosing]
    gradient_scale: Positive = 1.0  # the sums are gradients times this; the mean is not


class PartNorm(Wire, frozen=True):
    """The squared norm of the part of a stage's mean gradient that this server reduced."""

    stage_index: int
    squared_norm: float


class AverageReply(Wire, frozen=True):
    """The server holds the mean gradients of all its stages."""

    parts: list[PartNorm]


class Candidate(Wire, frozen=True):
    """A server that wants to join a stage's roster, and where it is reached."""

    member: Member
    stage_index: Count
    addresses: Addresses


class Record(Wire, frozen=True):
    """The decided outcome of a step; ``v_{k+1} = f(v_k, record)``."""

    closing: Closing
    outcome: Literal["apply", "skip"]
    squared_norm: float  # of the mean gradient, over all stages, each part once
    clip_factor: Annotated[float, msgspec.Meta(ge=0, le=1)]
    hyperparameters: list[dict[str, Any]]
    selection: Selection | None  # of this step, if it is not that of the step before
    next_roster: list[list[Member]]  # for each stage
    next_voters: list[Member]
    next_trainers: list[PeerId]
    newcomers: list[Candidate]  # those of the next roster that no roster before had

    @property
    def step(self) -> int:
        """The step that it decides; the weights after it have version ``step + 1``."""
        return self.closing.step


class RecordReply(Wire, frozen=True):
    """The newest record, not older than what was asked for."""

    record: Record | None  # None: not decided yet
    closing: bool  # without a record: whether it is worth waiting for; a withdrawn batch leaves a place in the step
    logs: list[Logged] = []  # to the lead: what other trainers logged of the batches that it counts, folded by name


class Proposal(Wire, frozen=True):
    """Ask a voter to accept a record under a term."""

    term: tuple[int, str]  # number, then the coordinator's peer id
    record: Record


class Vote(Wire, frozen=True):
    """A voter's answer; `term` is the highest it knows."""

    accepted: bool
    term: tuple[int, str]


class StageManifest(Wire, frozen=True):
    """A stage as every peer must find it in its own copy of the model."""

    first_block: Count  # without blocks: 0 to 0
    end_block: Count
    parameters: list[tuple[str, list[int], str]]  # full name, shape, dtype
    roster: list[Member]
    on_trainers: bool = False  # the last one may be: what stands around the pipeline. No microbatch goes there


class Manifest(Wire, frozen=True):
    """Record 0: what a run is. A peer whose own model or version differs refuses, naming the field."""

    protocol_version: int
    run_id: str
    generation: int
    seed: int
    lead: PeerId
    trainers: list[PeerId]  # the lead and others: who may ask for places, computations and state
    coordinator: PeerId
    voters: list[Member]
    target_batch_size: NumSamples | None
    gradient_clip_norm: Positive | None
    gradient_clip_value: Positive | None
    total_steps: int | None  # for schedules that a server's `configure_optimizers` builds
    stages: list[StageManifest]
    first_step: int = 0  # where the run begins, or goes on; the initial weights have this version
    max_steps: int | None = None  # no step opens beyond it
    selection: Selection | None = None  # of the first step; None: it only evaluates, and no server needs an optimizer


class RunView(Wire, frozen=True):
    """A run at a version, for whoever asks: record 0, and what changed since."""

    manifest: Manifest
    version: Count  # records before it are applied; the step that is open
    rosters: list[list[Member]]
    voters: list[Member]
    trainers: list[PeerId]


class JoinRequest(Wire, frozen=True):
    """A server asks the coordinator to become a member."""

    protocol_version: int
    boot_id: int
    addresses: Addresses
    stage_index: Count | None  # the one that it has built, if it asks again


class JoinReply(Wire, frozen=True):
    """Every server can reach the joiner and knows it for a candidate."""

    view: RunView
    stage_index: Count  # which it shall take


class FollowRequest(Wire, frozen=True):
    """A candidate asks a member of its stage for the state, and to keep the records from then on."""

    stage_index: Count


class Snapshot(Wire, frozen=True):
    """Goes with all tensors of a stage at one version: the weights, then the optimizer's state."""

    stage_index: Count
    version: Count
    version_hash: int
    weights: list[str]  # names, one a tensor
    optimizer: list[str]  # names of parameters
    structure: Any  # for each of them, the tree of its state
    selection: Selection | None  # what trains in the open step


class NextRequest(Wire, frozen=True):
    """A candidate that holds a stage at a version asks for the record that comes next."""

    stage_index: Count
    version: Count
    hold_s: Seconds  # how long to wait for it


class NextReply(Wire, frozen=True):
    """With the stage's mean gradient of that record as the only tensor. None: nothing is newer, as yet."""

    record: Record | None


class ReadyRequest(Wire, frozen=True):
    """A candidate has caught up."""

    version: Count


class ListenRequest(Wire, frozen=True):
    """A round begins: a candidate that has caught up shall hold its result, too."""

    closing: Closing
    selection: Selection | None  # as in `Record`


class ListenReply(Wire, frozen=True):
    """A candidate holds the mean gradient of the round that is under way."""

    boot_id: int
    version_hash: int  # of weights and optimizer state before the step


class Greeting(Wire, frozen=True):
    """What a peer says of itself to whoever asks."""

    protocol_version: int
    versions: Annotated[dict[ShortText, ShortText], msgspec.Meta(max_length=16)]  # of Python and of what matters here
    unix_time_s: Seconds


class ServerReport(Wire, frozen=True):
    """A server's part in a run. What is counted is counted since it was admitted."""

    lead: ShortText  # peer ids
    coordinator: ShortText
    num_stages: SmallCount  # of the run
    stages: Annotated[list[SmallCount], msgspec.Meta(max_length=1024)]  # that it holds
    first_step: Count  # where the run began, or went on
    step: Count  # that is open here
    age_s: Seconds
    num_samples: Count  # that went forward through each of its stages
    queued: Count  # jobs that wait for its compute thread


class PeerReport(Wire, frozen=True):
    """What a peer says to whoever asks. What is counted is counted since it started."""

    run_id: ShortText
    age_s: Seconds
    sent_bytes: Count
    received_bytes: Count
    server: ServerReport | None  # None: it is in no run, or holds no stage


class OtherPeer(Wire, frozen=True):
    """A server that a peer has heard of."""

    peer_id: ShortText
    addresses: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=16)]


class OtherPeers(Wire, frozen=True):
    """All of them."""

    peers: Annotated[list[OtherPeer], msgspec.Meta(max_length=1024)]


class RestartRequest(Wire, frozen=True):
    """The run goes back: the running generation is void, and the stages wait for weights of `first_step`."""

    generation: Count  # the next one
    first_step: Count
    selection: Selection | None  # of the first step, as in the manifest


class StateRequest(Wire, frozen=True):
    """Read one stage's state at a version."""

    stage_index: int
    step: int
    optimizer: bool  # False: weights and buffers. True: the optimizer's state
    generation: Count


class StageState(Wire, frozen=True):
    """Goes with the tensors of a stage's state."""

    stage_index: int
    step: int
    optimizer: bool
    names: list[str]  # weights: state-dict names, one a tensor. optimizer: parameter names
    structure: Any  # optimizer: for each parameter, the tree of its state; weights: None


class LentWeights(Wire, frozen=True):
    """Goes with weights that evaluations may mean in place of a stage's own, which stay as they are."""

    stage_index: Count
    number: Annotated[int, msgspec.Meta(ge=1)]  # by which calls mean them
    names: list[str]  # one a tensor, all of the stage; none: they are given back


def to_bitmap(bits: Iterable[bool]) -> bytes:
    """Eight flags a byte, the first one in the lowest bit."""
    flags = list(bits)
    packed = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        if flag:
            packed[i // 8] |= 1 << (i % 8)
    return bytes(packed)


def from_bitmap(packed: bytes, length: int) -> list[bool]:
    """The first `length` flags.

    Raises:
        ProtocolError: `packed` has another length.
    """
    if len(packed) != (length + 7) // 8:
        raise ProtocolError(f"a bitmap of {length} flags must have {(length + 7) // 8} bytes, got {len(packed)}")
    return [bool(packed[i // 8] >> (i % 8) & 1) for i in range(length)]
