"""Messages by which a round's means are checked against the sums that the servers committed to."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import msgspec

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.audits import Sketch, SumDigest
from lightning_swarm.protocol.messages.step import Closing, PartDigests
from lightning_swarm.protocol.messages.wire import Challenge, Count, WireMessage

_Numbers = Annotated[list[float], msgspec.Meta(max_length=1 << 16)]


def part_bounds(length: int, num_members: int) -> list[slice]:
    """Return the bounds of a vector's parts, one of which each member of a round reduces."""
    places = [length * i // num_members for i in range(num_members + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(places)]


class ProjectRequest(WireMessage, frozen=True):
    """The coordinator asks a server for random projections of the sums and the means of a round.

    The seed is drawn once all servers hold their means, so that no vector is chosen by what its projection hides.
    """

    closing: Closing
    seed: Challenge


class PartProjections(WireMessage, frozen=True):
    """A server's projections of one stage's frozen sum and mean, part by part in the roster's order."""

    stage_index: Count
    sums: _Numbers  # of its own sum, some numbers for each part: one for each bucket
    norms: _Numbers  # of the elements of the sum in each bucket
    means: _Numbers  # of the mean that the server holds
    parts: PartDigests  # BLAKE3 of each part of that mean
    given: PartDigests  # BLAKE3 of what each member gave of the part that this server reduced
    squared_norm: float  # of the mean


class ProjectReply(WireMessage, frozen=True):
    """A server answers with the projections of all its stages."""

    stages: Annotated[list[PartProjections], msgspec.Meta(max_length=1 << 12)]


class VectorRequest(WireMessage, frozen=True):
    """The coordinator asks a server for the frozen sum of one stage, or for the mean that it holds."""

    closing: Closing
    stage_index: Count
    of: Literal["sum", "mean"]


class MeanReplacement(WireMessage, frozen=True):
    """The coordinator has a server hold another mean of a round; the mean travels with the message."""

    closing: Closing
    stage_index: Count


class ToldSketch(WireMessage, frozen=True):
    """A sketch that a server gave of its frozen sum, before it was averaged."""

    seed: Challenge
    values: Sketch


class ExamineRequest(WireMessage, frozen=True):
    """The coordinator asks its own server to compare what members answered of a stage with what they committed to."""

    closing: Closing
    seed: Challenge
    stage_index: Count
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]  # elements of the mean
    dtype: Literal["float32", "float64"]  # of the mean
    answers: dict[PeerId, PartProjections]  # of all members
    commitments: dict[PeerId, SumDigest]  # BLAKE3 of their frozen sums
    drawn: list[PeerId] | None  # only the sums of these are compared; None: all are, and the mean is made of them
    # What members said of their sums when these were audited.
    told: dict[PeerId, list[ToldSketch]] = msgspec.field(default_factory=dict)


class Contradiction(WireMessage, frozen=True):
    """Two members say different things of what one gave the other, and nobody can prove which one is wrong."""

    reducer: PeerId
    other: PeerId
    reason: str


class ExamineReply(WireMessage, frozen=True):
    """A server tells its coordinator who answered wrongly.

    Where nobody did, and members contradict each other, all members hold the mean that this server made of the sums.
    """

    lies: dict[PeerId, str]  # reasons
    contradictions: list[Contradiction]
    unreached: dict[PeerId, str]  # reasons; if there are any, nothing else was found out
    squared_norm: float | None  # of the mean; None: it was not made
