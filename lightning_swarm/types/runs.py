"""What a run is, and who is in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from lightning_swarm.config import MAX_RANK, AveragingName, CodecName, Rebalancing
from lightning_swarm.network import PeerId
from lightning_swarm.types.data import BatchNumber
from lightning_swarm.types.wire import Count, NumSamples, Positive, Seconds, ShortText, Wire

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


class Member(Wire, frozen=True):
    """A peer in one of its lives: a process that was restarted has a new boot id."""

    peer_id: PeerId
    boot_id: int


class Selection(Wire, frozen=True):
    """Which parameters train, and which group of the optimizer holds which: the user's word, by full names."""

    num_groups: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    groups: dict[str, Count]  # the group of each parameter that the optimizer holds
    frozen: list[str]  # parameters that require no gradient, in the model's order


class StageManifest(Wire, frozen=True):
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


class Encoding(Wire, frozen=True):
    """By which codecs the tensors of a run travel; fields are those of `Compression`."""

    activations: CodecName
    gradients: CodecName
    averaging: AveragingName
    rank: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANK)]
    error_feedback: bool


NOT_ENCODED: Final = Encoding(activations="none", gradients="none", averaging="none", rank=1, error_feedback=False)
"""They travel as they are."""


class Manifest(Wire, frozen=True):
    """Record 0: what a run is. A peer whose own model or version differs refuses, naming the field."""

    protocol_version: int
    run_id: str
    generation: int
    seed: int
    lead: PeerId
    trainers: Trainers  # at first
    coordinator: PeerId
    voters: list[Member]
    target_batch_size: NumSamples | None
    gradient_clip_norm: Positive | None
    gradient_clip_value: Positive | None
    total_steps: int | None  # for schedules that a server's `configure_optimizers` builds
    stages: list[StageManifest]
    rebalancing: Rebalancing = "none"
    rebalance_interval: Positive = 300.0  # seconds between two decisions on who moves, at the latest
    encoding: Encoding = NOT_ENCODED
    delay_optimizer_step: bool = False  # each step but the first computes on the weights before the newest record's
    deterministic: bool = False  # what gradients add up to does not depend on who adds up which of them
    first_step: int = 0  # where the run begins, or goes on; the initial weights have this version
    max_steps: int | None = None  # no step opens beyond it
    microbatch_size: NumSamples | msgspec.UnsetType = msgspec.UNSET  # samples routed at once; unset: parts of a batch
    open_to_trainers: bool = False  # others may come to train beside the lead
    selection: Selection | None = None  # of the first step; None: it only evaluates, and no server needs an optimizer
    # Its class, and what can be set of it; None: no peer has one, or the starter does not say.
    optimizer: Annotated[str, msgspec.Meta(max_length=4096)] | None = None
    # Of older generations, which were not heard of any more, the newest last; unset: none.
    former_leads: Annotated[list[PeerId], msgspec.Meta(max_length=MAX_FORMER_LEADS)] | msgspec.UnsetType = msgspec.UNSET


class Seats(Wire, frozen=True):
    """Who is in a run at a version: for those who have not followed all records until then."""

    rosters: list[list[Member]]
    voters: list[Member]
    trainers: Trainers


class RunView(Wire, frozen=True):
    """A run at a version, for whoever asks: record 0, and what changed since."""

    manifest: Manifest
    version: Count  # records before it are applied; the step that is open
    seats: Seats
    term: Term  # of who coordinates
    position: BatchNumber | None = None  # the first batch of that step, as in `Record`; of a first one it is not said


class BrokenOff(Wire, frozen=True):
    """The run ends without its lead, which would have ended it in order, and without a word."""

    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=2000)]


class ReleaseRequest(Wire, frozen=True):
    """The run goes back further than its servers can: a server is in no run any more, and waits for the next."""

    generation: Count  # which is void
    first_step: Count = 0  # where the next one begins: trainers go on from there


class InheritRequest(Wire, frozen=True):
    """The lead is gone: another peer goes back with the run, and leads it from there. Whoever coordinates says so."""

    generation: Count  # which is void
    heir: PeerId
    first_step: Count  # where it goes on: the heir has the loop's state there


class LoopRequest(Wire, frozen=True):
    """Asks a trainer whether its loop could go on at one of these versions."""

    versions: Annotated[list[Count], msgspec.Meta(max_length=64)]


class LoopReply(Wire, frozen=True):
    """Of those versions the ones at which it could; and whether it waits for the run that goes on."""

    versions: list[Count]
    waits: bool


class RestartRequest(Wire, frozen=True):
    """The run goes back: the running generation is void, and the stages wait for weights of `first_step`.

    Records say what changes of who is in, and some server may have missed the newest one, so it is said once more.
    """

    generation: Count  # the next one
    first_step: Count
    seats: Seats
    selection: Selection | None  # of the first step, as in the manifest


class Leading(Wire, frozen=True):
    """A majority of the voters promised: the caller coordinates from now on. Also what a server knows of that."""

    term: Term
    generation: Count
    version: Count  # that the one who says it is at


class WatchRequest(Wire, frozen=True):
    """Hold the answer while the one who is asked coordinates by this term, unless it knows a later version already.

    A record that comes meanwhile ends no wait: nearly always who asks is told of it, too.
    """

    term: Term
    version: Count
    hold_s: Seconds


class WatchReply(Wire, frozen=True):
    """How far a server is, and whom it follows."""

    term: Term
    version: Count
    coordinates: bool  # itself


class PullRequest(Wire, frozen=True):
    """Ask for the record of a step, which was decided."""

    generation: Count
    step: Count
