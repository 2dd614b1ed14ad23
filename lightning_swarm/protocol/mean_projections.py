"""Decides whether the mean of a round is that of its members' sums, by random projections of both.

Pure. A mean passes that differs from the true one by no more than rounding does. Of what does not pass nobody is
convicted by these numbers: then the coordinator's own server compares the sums and the means themselves.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.parts import Contradiction, PartProjections, part_bounds
from lightning_swarm.protocol.messages.run import StageManifest

_NUM_BUCKETS: Final = 1024  # of all parts together, so that many members do not send much more than few
_MIN_BUCKETS: Final = 16
_UNITS: Final = {"float32": 2.0**-24, "float64": 2.0**-53}  # most that rounding changes, relative
_SMALLEST: Final = {"float32": 2.0**-126, "float64": 2.0**-1022}  # what is below may be rounded to zero
_DOUBLE: Final = 2.0**-52  # rounding in projections, which are in float64
_DEVIATIONS: Final = 5.0
_SAME: Final = 1e-9  # numbers of one vector, added up in another order

DType = Literal["float32", "float64"]


def sum_dtype(stage: StageManifest, trained: Collection[str]) -> DType:
    """Return the dtype of a stage's gradient sums in floats, and of their mean."""
    return "float64" if any(dtype == "float64" for name, _, dtype in stage.parameters if name in trained) else "float32"


@dataclass(frozen=True)
class StageScale:
    """How a stage's mean follows from its members' sums."""

    length: int  # elements of the mean
    dtype: DType  # of the mean
    divisor: float  # of the sum of all sums

    def bounds(self, num_members: int) -> list[slice]:
        """The bounds of the parts, one of which each member reduces."""
        return part_bounds(self.length, num_members)

    def rounding(self, num_members: int) -> float:
        """Most that rounding changes an element of a mean of so many sums, relative to the sum of their sizes."""
        # Each addition, and up to three divisions by weight and scale, whose divisors are rounded as well.
        return (num_members + 5) * _UNITS[self.dtype]

    @property
    def smallest(self) -> float:
        """Most that an element of the mean may lose where numbers become too small for the dtype."""
        return _SMALLEST[self.dtype]


def num_buckets(num_members: int) -> int:
    """Return how many numbers each part is projected to; a power of two."""
    return max(_MIN_BUCKETS, _NUM_BUCKETS >> (num_members - 1).bit_length())


def check_shape(answer: PartProjections, num_members: int) -> None:
    """Refuse an answer that has not as many numbers as a roster of this size needs."""
    wanted = num_members * num_buckets(num_members)
    found = [len(answer.sums), len(answer.norms), len(answer.means), len(answer.parts), len(answer.given)]
    if found != [wanted] * 3 + [num_members] * 2:
        raise ProtocolError(
            f"a projection of {num_members} parts has {wanted} numbers of each kind and {num_members} digests, got "
            f"{found}"
        )
    if any(norm < 0.0 for norm in (*answer.norms, answer.squared_norm)):
        raise ProtocolError("norms are not negative")


def is_sound(answers: Sequence[PartProjections], scale: StageScale) -> bool:
    """Tell whether all members, in the roster's order, hold the same mean, and that is the mean of their sums.

    Numbers that are not finite show nothing, so they do not pass.
    """
    first = answers[0]
    if any(answer.parts != first.parts for answer in answers):
        return False
    numbers = [[*answer.sums, *answer.norms, *answer.means, answer.squared_norm] for answer in answers]
    if not all(map(math.isfinite, (number for one in numbers for number in one))):
        return False
    if not all(same_numbers([answer.squared_norm], [first.squared_norm]) for answer in answers):
        return False
    return all(_is_mean(answers, part, bounds, scale) for part, bounds in enumerate(scale.bounds(len(answers))))


def _is_mean(answers: Sequence[PartProjections], part: int, bounds: slice, scale: StageScale) -> bool:
    """Tell whether one part of the mean that each member holds is that of all members' sums.

    Signs are drawn after all of it is settled, so roundings ``e`` of a bucket's elements add up to no more than
    ``t * norm(e)`` but for one of ``exp(t*t/2)/2`` draws (Hoeffding), whatever they are.
    """
    count = len(answers)
    size = num_buckets(count)
    rows = math.ceil((bounds.stop - bounds.start) / size)
    # Of one element's `count - 1` additions and its divisions, each rounds by itself.
    relative = _UNITS[scale.dtype] * math.sqrt(count + 5) + _DOUBLE * math.sqrt(rows + 5)
    absolute = scale.smallest * scale.divisor * math.sqrt(rows)
    for place in range(part * size, (part + 1) * size):
        total = sum(answer.sums[place] for answer in answers)
        allowed = _DEVIATIONS * (relative * sum(answer.norms[place] for answer in answers) + absolute)
        # What overflows shows nothing, either.
        if not all(abs(answer.means[place] * scale.divisor - total) <= allowed < math.inf for answer in answers):
            return False
    return True


def agreed_norm(answers: Sequence[PartProjections]) -> float:
    """Return the squared norm of a mean that passed: the middle one of those that are told."""
    return sorted(answer.squared_norm for answer in answers)[len(answers) // 2]


def choose_accused(contradictions: Sequence[Contradiction], num_members: int) -> dict[PeerId, str]:
    """Choose the members whom most of a stage's members contradict, with the last of the reasons; none if it is all.

    That proves nothing, so they are not convicted. But the run goes on without them, for all are given another mean
    in each step in which members contradict each other.
    """
    against: dict[PeerId, set[PeerId]] = {}
    reasons: dict[PeerId, str] = {}
    for one in contradictions:
        for peer, other in ((one.reducer, one.other), (one.other, one.reducer)):
            against.setdefault(peer, set()).add(other)
            reasons[peer] = one.reason
    accused = {peer: reasons[peer] for peer, others in against.items() if 2 * len(others) > num_members}
    return accused if len(accused) < num_members else {}


def same_numbers(said: Sequence[float], found: Sequence[float], sizes: Sequence[float] | None = None) -> bool:
    """Tell whether numbers are those found of the same vectors, perhaps added up in another order.

    `sizes` are those of what is added up; None: of the numbers themselves, none of which is negative.
    """
    return all(
        abs(one - other) <= _SAME * size
        or one == other
        or not (math.isfinite(one) or math.isfinite(other))  # infinities of both signs may meet, or not
        for one, other, size in zip(said, found, found if sizes is None else sizes, strict=True)
    )
