"""Copies of stages that are kept against the death of all their servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.protocol.messages.wire import Count, ShortText, WireMessage


@dataclass(frozen=True)
class OrderedSnapshots:
    """Which snapshots there are to be.

    Args:
        version: The newest one's.
        keep: The older one's, if there is one.
        at_s: When the newest was ordered; `time.monotonic`.
    """

    version: int
    keep: int | None
    at_s: float


Path = Annotated[list[str | int], msgspec.Meta(min_length=1, max_length=64)]
"""The keys through nested mappings and lists that lead to a value."""


class WriteRequest(WireMessage, frozen=True):
    """Write one stage's state at a version."""

    stage_index: Count
    step: int
    generation: Count
    folder: str  # where the lead has it
    optimizer: bool  # its state, too
    without: list[str]  # parameters and buffers that another stage writes


class WrittenValue(WireMessage, frozen=True):
    """Where a value is in a folder."""

    path: Path
    file: Annotated[str, msgspec.Meta(max_length=100)]
    offset: Count
    num_bytes: Count
    dtype: str | None  # None: it is no tensor
    shape: list[Count]


class WriteReply(WireMessage, frozen=True):
    """What has been written."""

    here: bool  # False: the folder is not to be seen from here, and nothing was
    written: list[WrittenValue]


class StateRequest(WireMessage, frozen=True):
    """Read one stage's state at a version."""

    stage_index: int
    step: int
    optimizer: bool  # False: weights and buffers. True: the optimizer's state
    generation: Count


class StageState(WireMessage, frozen=True):
    """Goes with the tensors of a stage's state."""

    stage_index: int
    step: int
    generation: Count
    optimizer: bool
    names: list[str]  # weights: state-dict names, one a tensor. optimizer: parameter names
    structure: Any  # optimizer: for each parameter, the tree of its state; weights: None


class LentWeights(WireMessage, frozen=True):
    """Goes with weights that evaluations may mean in place of a stage's own, which stay as they are."""

    stage_index: Count
    generation: Count
    number: Annotated[int, msgspec.Meta(ge=1)]  # by which calls mean them
    names: list[str]  # one a tensor, all of the stage; none: they are given back


class Snapshot(WireMessage, frozen=True):
    """Goes with all tensors of a stage at one version: the weights, then the optimizer's state."""

    generation: Count
    stage_index: Count
    version: Count
    version_hash: int
    weights: list[str]  # names, one a tensor
    optimizer: list[str]  # names of parameters
    structure: Any  # for each of them, the tree of its state
    selection: Selection | None  # what trains in the open step


class SnapshotOrder(WireMessage, frozen=True):
    """In a record: every server keeps a copy of its stages as they are after it."""

    keep: Count | None  # the version that is kept until this one is through; all others are dropped
    keepers: list[PeerId | None]  # for each stage, who keeps it besides its own servers


class HeldSnapshot(WireMessage, frozen=True):
    """One stage at one version."""

    stage_index: Count
    version: Count
    version_hash: int


class HeldSnapshots(WireMessage, frozen=True):
    """All that a server keeps."""

    host: ShortText  # the machine, as far as it is known; servers of one machine may die together
    snapshots: Annotated[list[HeldSnapshot], msgspec.Meta(max_length=4096)]
    # Versions of the lead's loop; unset: none.
    loops: Annotated[list[Count], msgspec.Meta(max_length=16)] | msgspec.UnsetType = msgspec.UNSET


class KeptLoop(WireMessage, frozen=True):
    """Goes with the lead's loop as it was at one version, but for what the servers have: see `plain_values`."""

    generation: Count
    version: Count


class SnapshotRequest(WireMessage, frozen=True):
    """Read one of them."""

    stage_index: Count
    version: Count
