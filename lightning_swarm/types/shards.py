"""What the servers of a run write into one folder, each of its own stages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_swarm.types.wire import Count, Wire

Path = Annotated[list[str | int], msgspec.Meta(min_length=1, max_length=64)]
"""The keys through nested mappings and lists that lead to a value."""


class WriteRequest(Wire, frozen=True):
    """Write one stage's state at a version."""

    stage_index: Count
    step: int
    generation: Count
    folder: str  # where the lead has it
    optimizer: bool  # its state, too
    without: list[str]  # parameters and buffers that another stage writes


class Written(Wire, frozen=True):
    """Where a value is in a folder."""

    path: Path
    file: Annotated[str, msgspec.Meta(max_length=100)]
    offset: Count
    num_bytes: Count
    dtype: str | None  # None: it is no tensor
    shape: list[Count]


class WriteReply(Wire, frozen=True):
    """What has been written."""

    here: bool  # False: the folder is not to be seen from here, and nothing was
    written: list[Written]
