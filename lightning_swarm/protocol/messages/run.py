"""Which batches there are in an epoch, and which of them is meant. No sample and no index travels."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Final

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.wire import Count, Positive, Seconds, ShortText, WireMessage
from lightning_swarm.protocol.settings import RunSettings


def check_selection(selection: Selection, stages: Sequence[StageManifest]) -> None:
    """Refuse a selection that is not of these stages' parameters.

    Raises:
        ProtocolError: It names something else, or wants to train what has no gradient that could be summed.
    """
    dtypes = {name: dtype for stage in stages for name, _, dtype in stage.parameters}
    unknown = sorted((selection.groups.keys() | set(selection.frozen)) - dtypes.keys())
    if unknown:
        raise ProtocolError(f"a selection must be of the run's parameters, got {unknown[:5]}")
    beyond = sorted(name for name, index in selection.groups.items() if index >= selection.num_groups)
    if beyond:
        raise ProtocolError(f"there are {selection.num_groups} parameter groups; {beyond[:5]} are in none of them")
    frozen = set(selection.frozen)
    # Of complex ones a gradient can be taken, but not summed.
    wrong = [
        name
        for name, dtype in dtypes.items()
        if name not in frozen and "float" not in dtype and (name in selection.groups or "complex" not in dtype)
    ]
    if wrong:
        raise ProtocolError(f"trained parameters must be real floating point numbers, {wrong[:5]} are not")


def trained_names(selection: Selection) -> set[str]:
    """Parameters that the optimizer steps: in one of its groups, and not frozen."""
    return selection.groups.keys() - set(selection.frozen)


def first_trained(selection: Selection | None, stages: Sequence[StageManifest]) -> int:
    """The first stage that trains a parameter, has batch norms, or is on the trainers; if there is none, how many are.

    The stages before it need no gradient unless the pipeline's own input does, and hold no receipts.
    """
    trained = trained_names(selection) if selection is not None else set()
    for index, stage in enumerate(stages):
        keeps = bool(stage.statistics) and selection is not None
        if stage.on_trainers or keeps or any(name in trained for name, _, _ in stage.parameters):
            return index
    return len(stages)


MAX_RUNS = 1 << 16
"""Changes of a batch's size within an epoch."""

MAX_PLANS = 64
"""Epochs that one step may reach over. All of their plans fit into one message."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]

BatchNumber = tuple[Epoch, Index]
"""``(epoch, index)`` of a batch. With as many as the epoch has, its end is meant."""

Sizes = Annotated[list[tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 30)], Index]], msgspec.Meta(max_length=MAX_RUNS)]
"""``(samples, batches)``: so many batches of so many samples, one after the other."""

Bits = Annotated[bytes, msgspec.Meta(max_length=1 << 13)]


class RandomNumbers(WireMessage, frozen=True):
    """Where the generators are that samplers draw from."""

    torch: Bits
    python: Bits
    python_gauss: float | None
    numpy: Bits
    numpy_place: Count
    numpy_gauss: float | None
    own: Annotated[list[Bits], msgspec.Meta(max_length=8)]  # of the loader and its samplers


class EpochPlan(WireMessage, frozen=True):
    """The order of an epoch: what to list it by, and what it must come to."""

    epoch: Epoch
    begin: Index  # the batch that this generation of the run begins with
    sizes: Sizes
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # of all indices
    random: RandomNumbers
    last: bool  # no epoch follows it

    @property
    def num_batches(self) -> int:
        """Of the epoch."""
        return sum(count for _, count in self.sizes)


class PlanRequest(WireMessage, frozen=True):
    """The lead has listed an epoch."""

    generation: Count
    plan: EpochPlan
    position: BatchNumber  # the first batch that no step before this generation counts


class TakePlanRequest(WireMessage, frozen=True):
    """Long poll for the plan of an epoch."""

    generation: Count
    epoch: Epoch


class TakePlanReply(WireMessage, frozen=True):
    """None: there is none yet; or its epoch is over."""

    plan: EpochPlan | None
    passed: bool = False


MAX_FORMER_LEADS: Final = 16
MAX_TRAINERS: Final = 1024
"""Of one run at a time: each asks the coordinator several times a step."""

_MAX_NUMBER = 1 << 30  # leases and places begin at a multiple of it

Term = tuple[Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUMBER)], ShortText, int]
"""``(number, peer id, boot id)`` of who coordinates by it, in one of its lives. Higher ones follow lower ones."""

NO_TERM: Final[Term] = (0, "", 0)
"""Lower than all."""


Trainers = Annotated[list[PeerId], msgspec.Meta(min_length=1, max_length=MAX_TRAINERS)]
"""The lead and others: who may ask for places, computations and state."""

SomeTrainers = Annotated[list[PeerId], msgspec.Meta(max_length=MAX_TRAINERS)]
"""Any of them."""


class Member(WireMessage, frozen=True):
    """A peer in one of its lives: a process that was restarted has a new boot id."""

    peer_id: PeerId
    boot_id: int


class Selection(WireMessage, frozen=True):
    """Which parameters train, and which group of the optimizer holds which: the user's word, by full names."""

    num_groups: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    groups: dict[str, Count]  # the group of each parameter that the optimizer holds
    frozen: list[str]  # parameters that require no gradient, in the model's order


class StageManifest(WireMessage, frozen=True):
    """A stage as every peer must find it in its own copy of the model."""

    first_block: Count  # without blocks: 0 to 0
    end_block: Count
    parameters: list[tuple[str, list[int], str]]  # full name, shape, dtype
    roster: list[Member]
    on_trainers: bool = False  # the last one may be: what stands around the pipeline. No microbatch goes there
    statistics: Count | msgspec.UnsetType = msgspec.UNSET  # numbers that its batch norms keep; unset: it has none


def ranges_of(stages: Iterable[StageManifest]) -> list[range]:
    """The blocks of each stage that servers hold."""
    return [range(stage.first_block, stage.end_block) for stage in stages if not stage.on_trainers]


class Manifest(WireMessage, frozen=True):
    """Record 0: what a run is. A peer whose own model or version differs refuses, naming the field."""

    protocol_version: int
    run_id: str
    generation: int
    seed: int
    lead: PeerId
    trainers: Trainers  # at first
    coordinator: PeerId
    voters: list[Member]
    gradient_clip_norm: Positive | None
    gradient_clip_value: Positive | None
    total_steps: int | None  # for schedules that a server's `configure_optimizers` builds
    stages: list[StageManifest]
    settings: RunSettings
    first_step: int = 0  # where the run begins, or goes on; the initial weights have this version
    max_steps: int | None = None  # no step opens beyond it
    open_to_trainers: bool = False  # others may come to train beside the lead
    selection: Selection | None = None  # of the first step; None: it only evaluates, and no server needs an optimizer
    # Its class, and what can be set of it; None: no peer has one, or the starter does not say.
    optimizer: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    # Of older generations, which were not heard of any more, the newest last; unset: none.
    former_leads: Annotated[list[PeerId], msgspec.Meta(max_length=MAX_FORMER_LEADS)] | msgspec.UnsetType = msgspec.UNSET


class SeatedMembers(WireMessage, frozen=True):
    """Who is in a run at a version: for those who have not followed all records until then."""

    rosters: list[list[Member]]
    voters: list[Member]
    trainers: Trainers


class RunView(WireMessage, frozen=True):
    """A run at a version, for whoever asks: record 0, and what changed since."""

    manifest: Manifest
    version: Count  # records before it are applied; the step that is open
    seats: SeatedMembers
    term: Term  # of who coordinates
    position: BatchNumber | None = None  # the first batch of that step, as in `Record`; of a first one it is not said


class RunAborted(WireMessage, frozen=True):
    """The run ends without its lead, which would have ended it in order, and without a word."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]


class ReleaseRequest(WireMessage, frozen=True):
    """The run goes back further than its servers can: a server is in no run any more, and waits for the next."""

    generation: Count  # which is void
    first_step: Count = 0  # where the next one begins: trainers go on from there


class InheritRequest(WireMessage, frozen=True):
    """The lead is gone: another peer goes back with the run, and leads it from there. Whoever coordinates says so."""

    generation: Count  # which is void
    heir: PeerId
    first_step: Count  # where it goes on: the heir has the loop's state there


class LoopRequest(WireMessage, frozen=True):
    """Asks a trainer whether its loop could go on at one of these versions."""

    versions: Annotated[list[Count], msgspec.Meta(max_length=64)]


class LoopReply(WireMessage, frozen=True):
    """Of those versions the ones at which it could; and whether it waits for the run that goes on."""

    versions: list[Count]
    waits: bool


class RestartRequest(WireMessage, frozen=True):
    """The run goes back: the running generation is void, and the stages wait for weights of `first_step`.

    Records say what changes of who is in, and some server may have missed the newest one, so it is said once more.
    """

    generation: Count  # the next one
    first_step: Count
    seats: SeatedMembers
    selection: Selection | None  # of the first step, as in the manifest


class CoordinatorTerm(WireMessage, frozen=True):
    """A majority of the voters promised: the caller coordinates from now on. Also what a server knows of that."""

    term: Term
    generation: Count
    version: Count  # that the one who says it is at


class WatchRequest(WireMessage, frozen=True):
    """Hold the answer while the one who is asked coordinates by this term, unless it knows a later version already.

    A record that comes meanwhile ends no wait: nearly always who asks is told of it, too.
    """

    term: Term
    version: Count
    hold_s: Seconds


class WatchReply(WireMessage, frozen=True):
    """How far a server is, and whom it follows."""

    term: Term
    version: Count
    coordinates: bool  # itself


class PullRequest(WireMessage, frozen=True):
    """Ask for the record of a step, which was decided."""

    generation: Count
    step: Count


# Several stages may hold one parameter, such as embeddings whose weight is also the head's. Each adds up its own part
# of the gradient; the parts together are the gradient that one machine would have. All of them take the same step with
# it, so the parameter stays the same in all.
class TiedTensors:
    """What the stages of a run have in common.

    Args:
        stages: Of its manifest.
    """

    def __init__(self, stages: Sequence[StageManifest]) -> None:
        self._sizes = [{name: math.prod(shape) for name, shape, _ in stage.parameters} for stage in stages]
        holders: dict[str, list[int]] = {}
        for index, sizes in enumerate(self._sizes):
            for name in sizes:
                holders.setdefault(name, []).append(index)
        self._holders = {name: indices for name, indices in holders.items() if len(indices) > 1}

    def __bool__(self) -> bool:
        return bool(self._holders)

    def of(self, index: int) -> list[str]:
        """Those of a stage."""
        return [name for name in self._sizes[index] if name in self._holders]

    def groups(self) -> list[Sequence[int]]:
        """Stages that have a parameter in common; each group once."""
        return [list(group) for group in sorted(set(map(tuple, self._holders.values())))]

    def partners(self, index: int, trained: Collection[str]) -> list[int]:
        """The other stages that have a parameter that trains in common with this one."""
        names = self._holders.keys() & self._sizes[index].keys() & set(trained)
        return sorted({holder for name in names for holder in self._holders[name]} - {index})

    def places(self, index: int, trained: Collection[str]) -> dict[str, slice]:
        """Where the tied ones are in the gradient of a stage, which is flat: what trains of it, in its order."""
        found, begin = {}, 0
        for name in self.trainable(index, trained):
            end = begin + self._sizes[index][name]
            if name in self._holders:
                found[name] = slice(begin, end)
            begin = end
        return found

    def counted(self, index: int, trained: Collection[str]) -> list[slice]:
        """The places of what counts in the norm of a stage's gradient: of what several hold, with the first of them."""
        foreign = [place for name, place in self.places(index, trained).items() if self._holders[name][0] != index]
        length = sum(self._sizes[index][name] for name in self.trainable(index, trained))
        bounds = [0, *(bound for place in foreign for bound in (place.start, place.stop)), length]
        return [slice(begin, end) for begin, end in zip(bounds[::2], bounds[1::2], strict=True) if begin < end]

    def trainable(self, index: int, trained: Collection[str]) -> list[str]:
        """What trains of a stage, in its order."""
        return [name for name in self._sizes[index] if name in trained]

    def touched(self, index: int, trained: Collection[str], flags: Mapping[int, Sequence[bool]]) -> list[bool]:
        """Which parameters got a gradient, in whatever stage.

        Args:
            index: Of the stage whose parameters are meant.
            trained: What trains.
            flags: For this stage and its partners, over what trains of each, which got one there.
        """
        got = {
            name
            for holder, own in flags.items()
            for name, flag in zip(self.trainable(holder, trained), own, strict=True)
            if flag
        }
        return [name in got for name in self.trainable(index, trained)]
