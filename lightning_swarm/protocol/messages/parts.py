"""Messages by which a round's means are checked against the sums that the servers committed to.

The coordinator requests projections from all servers by PROJECT, and has its own server compare them by EXAMINE. That
server fetches whole vectors by VECTOR if projections do not suffice, and replaces false means by REPLACE_MEAN.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Final, Literal

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.step import Closing, PartDigests, SumDigest
from lightning_swarm.protocol.messages.wire import Challenge, Count, WireMessage

SKETCH_LENGTH: Final = 64
Sketch = Annotated[list[float], msgspec.Meta(min_length=SKETCH_LENGTH, max_length=SKETCH_LENGTH)]
_Numbers = Annotated[list[float], msgspec.Meta(max_length=1 << 16)]


def part_bounds(length: int, num_members: int) -> list[slice]:
    """Return the bounds of a vector's parts; each member of a round reduces one part."""
    bounds = [length * i // num_members for i in range(num_members + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


class ProjectRequest(WireMessage, frozen=True):
    """The coordinator asks a server for random projections of the sums and the means of a round.

    The seed is drawn once all servers hold their means, so no vector can be chosen to have a harmless projection.
    """

    closing: Closing
    seed: Challenge


class PartProjections(WireMessage, frozen=True):
    """A server's projections of one stage's frozen sum and mean, part by part in the roster's order."""

    stage_index: Count
    sums: _Numbers  # projections of the server's own sum: one number per bucket of each part
    norms: _Numbers  # norms of the sum's elements in each bucket
    means: _Numbers  # projections of the mean that the server holds
    parts: PartDigests  # BLAKE3 of each part of that mean
    given: PartDigests  # BLAKE3 of each member's contribution to the part that this server reduced
    squared_norm: float  # squared norm of the mean


class ProjectReply(WireMessage, frozen=True):
    """A server answers with the projections of all its stages."""

    stages: Annotated[list[PartProjections], msgspec.Meta(max_length=1 << 12)]


class VectorRequest(WireMessage, frozen=True):
    """The coordinator asks a server for the frozen sum of one stage, or for the mean that it holds."""

    closing: Closing
    stage_index: Count
    of: Literal["sum", "mean"]


class MeanReplacement(WireMessage, frozen=True):
    """The coordinator replaces a server's mean of a round; the new mean comes with the message."""

    closing: Closing
    stage_index: Count


class ReportedSketch(WireMessage, frozen=True):
    """A sketch of a server's frozen sum, which the server reported before averaging."""

    seed: Challenge
    values: Sketch


class ExamineRequest(WireMessage, frozen=True):
    """The coordinator asks its own server to compare members' projections of a stage with their commitments."""

    closing: Closing
    seed: Challenge
    stage_index: Count
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]  # elements of the mean
    dtype: Literal["float32", "float64"]  # the mean's dtype
    answers: dict[PeerId, PartProjections]  # projections of all members
    commitments: dict[PeerId, SumDigest]  # BLAKE3 of the members' frozen sums
    drawn: list[PeerId] | None  # members whose sums are compared; None: all members, and the server computes the mean
    # Sketches that members reported when their sums were examined.
    told: dict[PeerId, list[ReportedSketch]] = msgspec.field(default_factory=dict)


class Contradiction(WireMessage, frozen=True):
    """Two members report different values for one transfer between them, and neither can be proven false."""

    reducer: PeerId
    other: PeerId
    reason: str


class ExamineReply(WireMessage, frozen=True):
    """A server reports to its coordinator which members answered falsely.

    If none did, but members contradict each other, all members hold the mean that this server computed from the sums.
    """

    lies: dict[PeerId, str]  # member -> reason
    contradictions: list[Contradiction]
    unreached: dict[PeerId, str]  # member -> reason; if there is any, the comparison is incomplete
    squared_norm: float | None  # squared norm of the computed mean; None: it was not computed
