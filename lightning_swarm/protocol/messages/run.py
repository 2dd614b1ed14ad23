"""Messages about a run as a whole: its manifest, members, terms and rollbacks, and the shared order of its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.scaling import LossScaling
from lightning_swarm.protocol.messages.wire import Count, Positive, Seconds, ShortText, WireMessage
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.trust.certificates import MAX_USES, InvitationNumber, Uses

MAX_SIZE_CHANGES = 1 << 16  # most changes of the batch size within an epoch
MAX_PLAN_METRICS = 256
MAX_METRIC_BYTES = 4096  # size of a plan's metrics and their names, because all plans must fit into one message
MAX_SKIPPED = 1024  # most batches of a run that are skipped
MAX_PLANS = 64  # most epochs that one step may span; their plans fit into one message

Epoch = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
BatchNumber = tuple[Epoch, Index]  # an index equal to the epoch's number of batches means the end of the epoch
# `(samples of each batch, number of such batches)`, one after the other.
Sizes = Annotated[
    list[tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 30)], Index]], msgspec.Meta(max_length=MAX_SIZE_CHANGES)
]
Bits = Annotated[bytes, msgspec.Meta(max_length=1 << 13)]


class RandomNumbers(WireMessage, frozen=True):
    """States of the random generators that samplers draw from."""

    torch: Bits
    python: Bits
    python_gauss: float | None
    numpy: Bits
    numpy_place: Count
    numpy_gauss: float | None
    own: Annotated[list[Bits], msgspec.Meta(max_length=8)]  # generators of the loader and its samplers


class EpochPlan(WireMessage, frozen=True):
    """The order of an epoch's samples. Each trainer draws their indices itself, and checks them by the digest."""

    epoch: Epoch
    begin: Index  # the batch with which this generation of the run begins
    sizes: Sizes
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # digest of all indices
    random: RandomNumbers  # random states before the samplers' first draw
    last: bool  # no epoch follows
    # Metrics of validations before the epoch, as the lead's callbacks have them, by name.
    metrics: Annotated[dict[ShortText, float], msgspec.Meta(max_length=MAX_PLAN_METRICS)] = msgspec.field(
        default_factory=dict
    )

    # Batches that no step contains, because the loss diverged with them.
    skipped: Annotated[list[Index], msgspec.Meta(max_length=MAX_SKIPPED)] = msgspec.field(default_factory=list)

    @property
    def num_batches(self) -> int:
        """Batches of the epoch, skipped ones included."""
        return sum(count for _, count in self.sizes)


class PlanRequest(WireMessage, frozen=True):
    """The lead sends the coordinator the plan of an epoch."""

    generation: Count
    plan: EpochPlan
    position: BatchNumber  # the first batch that no step before this generation counts


class TakePlanRequest(WireMessage, frozen=True):
    """A trainer asks the coordinator for the plan of an epoch, and waits for it."""

    generation: Count
    epoch: Epoch


class TakePlanReply(WireMessage, frozen=True):
    """The coordinator sends a trainer the plan of an epoch."""

    plan: EpochPlan | None  # None: there is none yet, or the epoch is over
    passed: bool = False  # the epoch is over


MAX_FORMER_LEADS: Final = 16
MAX_TRAINERS: Final = 1024  # most trainers of a run at a time: each asks the coordinator several times a step

_MAX_NUMBER = 1 << 30  # leases and places of a term begin at a multiple of its number

# `(number, peer id, boot id)` of a coordinator. A restart changes its boot id. A later term is higher.
Term = tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUMBER)], ShortText, int]
NO_TERM: Final[Term] = (0, "", 0)  # lower than any other

# The lead and the other trainers, which may ask for leases, computations and state.
Trainers = Annotated[list[PeerId], msgspec.Meta(min_length=1, max_length=MAX_TRAINERS)]
SomeTrainers = Annotated[list[PeerId], msgspec.Meta(max_length=MAX_TRAINERS)]  # some of the trainers, or none


class Member(WireMessage, frozen=True):
    """A process of a peer: after a restart the peer has a new boot id."""

    peer_id: PeerId
    boot_id: int


class InvitedBy(WireMessage, frozen=True):
    """The invitation with which a peer joins a run."""

    number: InvitationNumber
    uses: Uses  # most peers that may use it


class UsedInvitation(WireMessage, frozen=True):
    """An invitation and all peers that ever used it, including departed peers, which may return."""

    number: InvitationNumber
    uses: Uses
    peers: Annotated[list[PeerId], msgspec.Meta(max_length=MAX_USES)]


UsedInvitations = list[UsedInvitation] | msgspec.UnsetType  # unset: the run needs no invitations

# Bans that the run's owner signed, see `SignedBan`; unset: there are none.
Bans = (
    Annotated[list[Annotated[bytes, msgspec.Meta(max_length=1024)]], msgspec.Meta(max_length=256)] | msgspec.UnsetType
)


MAX_KEEPERS: Final = 64  # most keepers of a run, including departed keepers, which may return

# Peers that may vote, coordinate and lead; unset: all servers may.
Keepers = Annotated[list[PeerId], msgspec.Meta(max_length=MAX_KEEPERS)] | msgspec.UnsetType


MAX_REASON: Final = 100


class Conviction(WireMessage, frozen=True):
    """A peer whose work was found to be false. It takes no part in the run any more."""

    peer: PeerId
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


# Most convictions kept over all generations of a run, the newest. A `RunView` lists each twice.
MAX_CONVICTED: Final = 64

# In the order of conviction; unset: there are none.
Convictions = Annotated[list[Conviction], msgspec.Meta(max_length=MAX_CONVICTED)] | msgspec.UnsetType


class Selection(WireMessage, frozen=True):
    """The parameters that train, by full name, and the optimizer's group of each, as the user's code sets them."""

    num_groups: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    groups: dict[str, Count]  # the group of each parameter that the optimizer holds
    frozen: list[str]  # parameters that require no gradient, in the model's order


class WrittenWeights(WireMessage, frozen=True):
    """Weights that user code wrote at the lead. Servers get them under a number, and use them from one step on."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    stages: Annotated[list[Count], msgspec.Meta(min_length=1, max_length=1 << 12)]


class StepChange(WireMessage, frozen=True):
    """Changes between the end of a step and the beginning of the next one."""

    selection: Selection | None = None  # None: the same parameters train
    written: WrittenWeights | None = None  # None: the weights are unchanged since the previous step

    @property
    def number(self) -> int:
        """The number of the written weights; 0: none were written."""
        return self.written.number if self.written is not None else 0

    def then(self, later: StepChange) -> StepChange:
        """Combine this change with a later change, whose written weights include the weights written earlier."""
        return StepChange(selection=later.selection or self.selection, written=later.written or self.written)


NO_CHANGE: Final = StepChange()


class StageManifest(WireMessage, frozen=True):
    """A stage of a run. Every peer must find it in its own copy of the model."""

    first_block: Count
    end_block: Count  # the block after the last; both are 0 for a stage without blocks
    parameters: list[tuple[str, list[int], str]]  # full name, shape, dtype
    roster: list[Member]
    on_trainers: bool = False  # only for the last stage: layers around the pipeline, or a model that is not cut
    statistics: Count | msgspec.UnsetType = msgspec.UNSET  # numbers in its batch norms' statistics; unset: none
    constants: dict[str, list[float]] | msgspec.UnsetType = msgspec.UNSET  # see `model.constants`; unset: none


def ranges_of(stages: Iterable[StageManifest]) -> list[range]:
    """Return the blocks of each stage that servers hold."""
    return [range(stage.first_block, stage.end_block) for stage in stages if not stage.on_trainers]


class Manifest(WireMessage, frozen=True):
    """The settings of a run, sent by the lead. A peer whose model or version differs refuses, and names the field."""

    protocol_version: int
    run_id: str
    generation: int
    seed: int
    lead: PeerId
    trainers: Trainers  # the trainers at the beginning
    coordinator: PeerId
    voters: list[Member]
    gradient_clip_norm: Positive | None
    gradient_clip_value: Positive | None
    total_steps: int | None  # needed by schedules that a server's `configure_optimizers` builds
    stages: list[StageManifest]
    settings: RunSettings
    first_step: int = 0  # where this generation begins; the initial weights have this version
    max_steps: int | None = None  # no step opens beyond it
    open_to_trainers: bool = False  # further trainers may join
    selection: Selection | None = None  # selection in the first step; None: the run only evaluates, without optimizer
    scaling: LossScaling | None = None  # scaling in the first step; None: unscaled, or scaled by a lone trainer
    # The optimizer's class and its settings; None: no peer has an optimizer, or the starter does not name it.
    optimizer: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    # Why machines of different kinds cannot compute bit-identical optimizer steps; unset: they can.
    unportable: ShortText | msgspec.UnsetType = msgspec.UNSET
    # Leads of older generations that fell silent, the newest last; unset: none.
    former_leads: Annotated[list[PeerId], msgspec.Meta(max_length=MAX_FORMER_LEADS)] | msgspec.UnsetType = msgspec.UNSET
    invitations: UsedInvitations = msgspec.UNSET  # used by the first members, and in older generations
    bans: Bans = msgspec.UNSET
    keepers: Keepers = msgspec.UNSET  # the starter, and first members with a keeper's certificate
    convicted: Convictions = msgspec.UNSET  # convictions in older generations

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut: each trainer computes the whole model itself, and its server holds the only stage."""
        return bool(self.stages) and all(stage.on_trainers for stage in self.stages)


Sha256 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class HeldSnapshot(WireMessage, frozen=True):
    """A copy of one stage at one version that a server keeps."""

    stage_index: Count
    version: Count
    digest: Sha256  # digest of the `Snapshot` and its tensors


MAX_SNAPSHOTS: Final = 4096  # most snapshots of one server, or in a record


SomeSnapshots = Annotated[list[HeldSnapshot], msgspec.Meta(max_length=MAX_SNAPSHOTS)]


class SeatedMembers(WireMessage, frozen=True):
    """The members of a run at a version, and its loss scale, for a peer that has not seen all records until then."""

    rosters: list[list[Member]]
    voters: list[Member]
    trainers: Trainers
    scaling: LossScaling | None = None  # scaling in the step at that version
    invitations: UsedInvitations = msgspec.UNSET
    bans: Bans = msgspec.UNSET
    snapshots: SomeSnapshots | msgspec.UnsetType = msgspec.UNSET  # snapshots of the kept versions, see `Record`
    keepers: Keepers = msgspec.UNSET
    convicted: Convictions = msgspec.UNSET
    guests: list[PeerId] | msgspec.UnsetType = msgspec.UNSET  # see `protocol.guests`; unset: none


class RunView(WireMessage, frozen=True):
    """A run at a version, as a server shows it to other peers: the manifest and the changes since."""

    manifest: Manifest
    version: Count  # all records before it are applied; also the number of the open step
    seats: SeatedMembers
    term: Term  # the coordinator's term
    position: BatchNumber | None = None  # the first batch of that step, as in `Record`; None at the first step


class RunAborted(WireMessage, frozen=True):
    """The coordinator notifies a server that the run ends, because its lead disappeared without ending it."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]


class ReleaseRequest(WireMessage, frozen=True):
    """The lead orders a server to leave the run, which rolls back, and wait for its next generation."""

    generation: Count  # the generation that ends
    first_step: Count = 0  # first step of the next generation, from which trainers continue


class InheritRequest(WireMessage, frozen=True):
    """The coordinator notifies a server that the lead is gone, and that another peer leads the run after a rollback."""

    generation: Count  # the generation that ends
    new_lead: PeerId
    first_step: Count  # first step of the next generation, for which the new lead has the loop's state


class LeadsRequest(WireMessage, frozen=True):
    """A server asks the lead whether its process leads this generation of the run; an error means no."""

    generation: Count


class LoopRequest(WireMessage, frozen=True):
    """The lead asks a trainer at which of these versions its loop could continue."""

    versions: Annotated[list[Count], msgspec.Meta(max_length=64)]


class LoopReply(WireMessage, frozen=True):
    """A trainer reports to the lead at which of the versions its loop could continue."""

    versions: list[Count]
    waits: bool  # the trainer already waits for the next generation


class RestartRequest(WireMessage, frozen=True):
    """The lead orders a server to roll back: its stages wait for the weights of `first_step`."""

    generation: Count  # the next generation
    first_step: Count
    seats: SeatedMembers  # all members: records list only changes, and a server may have missed the newest record
    selection: Selection | None  # selection in the first step, as in the manifest


class CoordinatorTerm(WireMessage, frozen=True):
    """A new coordinator announces its term, or a leaving one requests a takeover; the server answers its own term."""

    # The message carries no voters' promises, because promises are not signed. The server asks the voters instead.

    term: Term
    generation: Count
    version: Count  # the sender's version


class WatchRequest(WireMessage, frozen=True):
    """A server watches the coordinator, which delays its answer by up to `hold_s` while it coordinates in this term."""

    term: Term
    # If a later version is known, the answer comes at once. A record that is decided during the wait does not end it,
    # because the watching server nearly always receives the record, too.
    version: Count
    hold_s: Seconds


class WatchReply(WireMessage, frozen=True):
    """A server's answer to `WatchRequest`: its version, and the term that it follows."""

    term: Term
    version: Count
    coordinates: bool  # the answering server is the coordinator of this term
    promised: Term  # the highest term that it follows, or promised as a voter
    successor: PeerId | None = None  # the server that it asks to coordinate in its place


class StepRequest(WireMessage, frozen=True):
    """Asks another peer about a step: its record, the record's digest, or the results received in it."""

    generation: Count
    step: Count


class RecordDigestReply(WireMessage, frozen=True):
    """The coordinator's digest of a record, by which a joining server checks the record that its donor sent."""

    digest: Sha256  # digest of the record's encoding


def check_selection(selection: Selection, stages: Sequence[StageManifest]) -> None:
    """Refuse a selection of unknown parameters, or of trained parameters whose gradients cannot be summed."""
    dtypes = {name: dtype for stage in stages for name, _, dtype in stage.parameters}
    unknown = sorted((selection.groups.keys() | set(selection.frozen)) - dtypes.keys())
    if unknown:
        raise ProtocolError(f"a selection must name only the run's parameters, got {unknown[:5]}")
    beyond = sorted(name for name, index in selection.groups.items() if index >= selection.num_groups)
    if beyond:
        raise ProtocolError(
            f"a parameter's group must be one of the optimizer's {selection.num_groups}, got others for {beyond[:5]}"
        )
    frozen = set(selection.frozen)
    # Gradients of complex parameters cannot be summed, so such parameters may be in no group of the optimizer.
    wrong = [
        name
        for name, dtype in dtypes.items()
        if name not in frozen and "float" not in dtype and (name in selection.groups or "complex" not in dtype)
    ]
    if wrong:
        raise ProtocolError(f"trained parameters must be real floating point numbers, {wrong[:5]} are not")


def check_change(change: StepChange, stages: Sequence[StageManifest]) -> None:
    """Refuse a change with an invalid selection, see `check_selection`, or with weights of unknown stages."""
    if change.selection is not None:
        check_selection(change.selection, stages)
    if change.written is not None and max(change.written.stages) >= len(stages):
        raise ProtocolError(f"there are {len(stages)} stages, got weights written in {change.written.stages[:5]}")


def trained_names(selection: Selection) -> set[str]:
    """Return the parameters that the optimizer steps, which are in one of its groups and not frozen."""
    return selection.groups.keys() - set(selection.frozen)


def first_trained(selection: Selection | None, stages: Sequence[StageManifest]) -> int:
    """Return the first stage that trains a parameter, has batch norms, or is on trainers; if none, `len(stages)`."""
    # Earlier stages need no gradient unless the pipeline's own input does, and hold no receipts.
    trained = trained_names(selection) if selection is not None else set()
    for index, stage in enumerate(stages):
        has_statistics = bool(stage.statistics) and selection is not None
        if stage.on_trainers or has_statistics or any(name in trained for name, _, _ in stage.parameters):
            return index
    return len(stages)
