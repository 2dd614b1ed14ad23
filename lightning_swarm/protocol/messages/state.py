"""Messages about a stage's state: reads and writes, evaluation weights, and snapshots, which outlive its servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Selection, Sha256, SomeSnapshots
from lightning_swarm.protocol.messages.wire import Challenge, Count, ShortText, WireMessage


@dataclass(frozen=True)
class OrderedSnapshots:
    """The snapshots that servers were told to keep."""

    version: int  # of the newest
    keep: int | None  # version of the older one, if there is one
    at_s: float  # when the newest was ordered, by `time.monotonic`


# The keys through nested mappings and lists that lead to a value.
Path = Annotated[list[str | int], msgspec.Meta(min_length=1, max_length=64)]


StateKind = Literal["weights", "optimizer"]  # weights with buffers; the optimizer's state
STATE_KINDS: Final[tuple[StateKind, ...]] = get_args(StateKind)


class WriteRequest(WireMessage, frozen=True):
    """The lead asks a server to write one stage's state at a version into a checkpoint's folder."""

    stage_index: Count
    step: int
    generation: Count
    folder: str  # as a path on the lead's machine
    optimizer: bool  # also write the optimizer's state
    without: list[str]  # parameters and buffers that another stage writes


class WrittenValue(WireMessage, frozen=True):
    """The place of one value in a checkpoint's folder."""

    path: Path
    file: Annotated[str, msgspec.Meta(max_length=100)]
    offset: Count  # bytes
    num_bytes: Count
    dtype: str | None  # None: the value is no tensor
    shape: list[Count]


class WriteReply(WireMessage, frozen=True):
    """A server tells the lead what it has written."""

    here: bool  # False: the server cannot see the folder, and has written nothing
    written: list[WrittenValue]


class StateRequest(WireMessage, frozen=True):
    """A trainer asks a server for one stage's state at a version."""

    stage_index: int
    step: int
    optimizer: bool  # False: weights and buffers. True: the optimizer's state
    generation: Count

    @property
    def kind(self) -> StateKind:
        """What is asked for."""
        return "optimizer" if self.optimizer else "weights"


class StageState(WireMessage, frozen=True):
    """The head of a message with the tensors of a stage's state, from the lead to a server or from it to a trainer."""

    stage_index: int
    step: int
    generation: Count
    optimizer: bool
    names: list[str]  # weights: state-dict names, one a tensor. optimizer: parameter names
    structure: Any  # optimizer: for each parameter, the tree of its state; weights: None


class ProofRequest(WireMessage, frozen=True):
    """A peer that another server sent a stage's state asks this one for a proof of what it has itself."""

    stage_index: Count
    step: Count  # the version of the state
    generation: Count
    kind: StateKind
    challenge: Challenge


class ProofReply(WireMessage, frozen=True):
    """A server proves what it has of a stage's state."""

    proof: Sha256  # of all that state, under the challenge


class EvaluationWeights(WireMessage, frozen=True):
    """A trainer sends a server weights that its evaluations use. The stage's own weights stay as they are."""

    stage_index: Count
    generation: Count
    number: Annotated[int, msgspec.Meta(ge=1)]  # by which the evaluation's calls refer to these weights
    names: list[str]  # of all the stage's tensors, which come with the message; empty drops them


class Snapshot(WireMessage, frozen=True):
    """The head of a message with all tensors of a stage at one version: the weights, then the optimizer's state."""

    generation: Count
    stage_index: Count
    version: Count
    version_hash: int
    weights: list[str]  # names, one a tensor
    optimizer: list[str]  # names of parameters
    structure: Any  # for each of these parameters, the tree of its optimizer state
    selection: Selection | None  # what trains in the open step


class SnapshotOrder(WireMessage, frozen=True):
    """A record orders every server to keep a copy of its stages, as they are after the record."""

    keep: Count | None  # the version to keep until every stage of this one is safe; all others are dropped
    keepers: list[PeerId | None]  # for each stage, the server that keeps it besides the stage's own servers


class HeldSnapshots(WireMessage, frozen=True):
    """A server tells a peer that asks which snapshots it keeps."""

    host: ShortText  # the server's machine, if known; servers of one machine may die together
    snapshots: SomeSnapshots
    # Versions of the lead's loop state that it keeps; unset: none.
    loops: Annotated[list[Count], msgspec.Meta(max_length=16)] | msgspec.UnsetType = msgspec.UNSET


class KeptLoop(WireMessage, frozen=True):
    """The lead sends a server its loop's state to keep, without the parts that servers have: see `plain_values`."""

    generation: Count
    version: Count


class SnapshotRequest(WireMessage, frozen=True):
    """The lead asks a server for one of its snapshots."""

    stage_index: Count
    version: Count
