"""Messages about a stage's state: reads, writes, evaluation weights, and snapshots that outlive the stage's servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Selection, Sha256, SomeSnapshots
from lightning_swarm.protocol.messages.wire import Challenge, Count, ShortText, WireMessage


@dataclass(frozen=True)
class OrderedSnapshots:
    """The snapshots that servers were ordered to keep."""

    version: int  # version of the newest snapshot
    keep: int | None  # version of the older snapshot, if there is one
    at_s: float  # time of the newest order, by `time.monotonic`


# The keys through nested mappings and lists that lead to a value.
Path = Annotated[list[str | int], msgspec.Meta(min_length=1, max_length=64)]


StateKind = Literal["weights", "optimizer"]  # weights with buffers; the optimizer's state
STATE_KINDS: Final[tuple[StateKind, ...]] = get_args(StateKind)


class WriteRequest(WireMessage, frozen=True):
    """The lead asks a server to write one stage's state at a version into a checkpoint's folder."""

    stage_index: Count
    version: int = msgspec.field(name="step")  # the version of the state
    generation: Count
    folder: str  # path on the lead's machine
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
    """A server reports to the lead which values it has written."""

    here: bool  # whether the server sees the folder; if not, it has written nothing
    written: list[WrittenValue]


class StateRequest(WireMessage, frozen=True):
    """A peer asks a server for one stage's state at a version."""

    stage_index: int
    version: int = msgspec.field(name="step")  # the version of the state
    optimizer: bool  # False: weights and buffers. True: the optimizer's state
    generation: Count

    @property
    def kind(self) -> StateKind:
        """The kind of state that is requested."""
        return "optimizer" if self.optimizer else "weights"


class StageState(WireMessage, frozen=True):
    """The head of a message with a stage's state, from the lead to a server, or in a server's answer to a request."""

    stage_index: int
    version: int = msgspec.field(name="step")  # the version of the state
    generation: Count
    optimizer: bool
    names: list[str]  # weights: state-dict names, one per tensor. optimizer: parameter names
    structure: Any  # optimizer: for each parameter, the tree of its state; weights: None


class ProofRequest(WireMessage, frozen=True):
    """A peer that got a stage's state from one server asks another server to prove which state it has itself."""

    stage_index: Count
    version: Count = msgspec.field(name="step")  # the version of the state
    generation: Count
    kind: StateKind
    challenge: Challenge


class ProofReply(WireMessage, frozen=True):
    """A server's proof of its own copy of a stage's state."""

    proof: Sha256  # digest of the whole state under the challenge


class EvaluationWeights(WireMessage, frozen=True):
    """A trainer sends a server weights that its evaluations use. The stage's own weights stay as they are."""

    stage_index: Count
    generation: Count
    number: Annotated[int, msgspec.Meta(ge=1)]  # number by which the evaluation's calls refer to these weights
    names: list[str]  # names of all the stage's tensors, which come with the message; empty drops the weights


class Snapshot(WireMessage, frozen=True):
    """The head of a message with all tensors of a stage at one version: the weights, then the optimizer's state."""

    generation: Count
    stage_index: Count
    version: Count
    version_hash: int
    weights: list[str]  # names, one per tensor
    optimizer: list[str]  # names of parameters
    structure: Any  # the tree of each parameter's optimizer state
    selection: Selection | None  # the parameters that train in the open step


class SnapshotOrder(WireMessage, frozen=True):
    """A record orders every server to keep a copy of its stages, as they are after the record."""

    # The one older version to keep until all stages of the new version are safe. None: keep no older version.
    keep: Count | None
    # For each stage, the server that keeps a copy besides the stage's own servers; None: no such server. Despite its
    # name on the wire, such a server need not be a keeper that decides.
    backups: list[PeerId | None] = msgspec.field(name="keepers")


class HeldSnapshots(WireMessage, frozen=True):
    """A server reports which snapshots it keeps."""

    host: ShortText  # the server's machine, if known; servers of one machine may die together
    snapshots: SomeSnapshots
    # Versions of the lead's loop state that it keeps; unset: none.
    loops: Annotated[list[Count], msgspec.Meta(max_length=16)] | msgspec.UnsetType = msgspec.UNSET


class KeptLoop(WireMessage, frozen=True):
    """The lead sends a server its loop's state to keep, without the servers' parts: see `protocol.plain_values`."""

    generation: Count
    version: Count


class SnapshotRequest(WireMessage, frozen=True):
    """The lead asks a server for one of its snapshots."""

    stage_index: Count
    version: Count
