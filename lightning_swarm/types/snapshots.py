"""Copies of stages that are kept against the death of all their servers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.types.runs import Selection
from lightning_swarm.types.wire import Count, ShortText, Wire


class Snapshot(Wire, frozen=True):
    """Goes with all tensors of a stage at one version: the weights, then the optimizer's state."""

    generation: Count
    stage_index: Count
    version: Count
    version_hash: int
    weights: list[str]  # names, one a tensor
    optimizer: list[str]  # names of parameters
    structure: Any  # for each of them, the tree of its state
    selection: Selection | None  # what trains in the open step


class SnapshotOrder(Wire, frozen=True):
    """In a record: every server keeps a copy of its stages as they are after it."""

    keep: Count | None  # the version that is kept until this one is through; all others are dropped
    keepers: list[PeerId | None]  # for each stage, who keeps it besides its own servers


class HeldSnapshot(Wire, frozen=True):
    """One stage at one version."""

    stage_index: Count
    version: Count
    version_hash: int


class HeldSnapshots(Wire, frozen=True):
    """All that a server keeps."""

    host: ShortText  # the machine, as far as it is known; servers of one machine may die together
    snapshots: Annotated[list[HeldSnapshot], msgspec.Meta(max_length=4096)]
    # Versions of the lead's loop; unset: none.
    loops: Annotated[list[Count], msgspec.Meta(max_length=16)] | msgspec.UnsetType = msgspec.UNSET


class KeptLoop(Wire, frozen=True):
    """Goes with the lead's loop as it was at one version, but for what the servers have: see `plain`."""

    generation: Count
    version: Count


class SnapshotRequest(Wire, frozen=True):
    """Read one of them."""

    stage_index: Count
    version: Count
