"""Checks by random projections that the mean of a round is the mean of its members' sums.

A projection gives each element of a vector a random sign, adds each element to one of few buckets, and returns the
buckets' totals. It is linear, so the projection of the mean, times the divisor, must be the total of the projections of
the sums. Each member answers with a `PartProjections`: `sums` projects its own sum, and `means` the mean that it holds;
`norms` are the norms of its sum's elements in each bucket. `parts` are digests of the mean's parts, and `given` are
digests of the members' contributions to the part that it reduced.

A mean passes if it differs from the true mean by no more than rounding (see `_is_mean`). A failed check is no proof
against any server: the coordinator's own server then compares the sums and the means themselves. Pure.
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

_NUM_BUCKETS: Final = 1024  # total over all parts, so that answers hardly grow with the number of members
_MIN_BUCKETS: Final = 16
_UNITS: Final = {"float32": 2.0**-24, "float64": 2.0**-53}  # unit roundoff
_MIN_NORMAL: Final = {"float32": 2.0**-126, "float64": 2.0**-1022}  # smaller numbers may be rounded to zero
_DOUBLE: Final = 2.0**-52  # rounding of the projections, which are computed in float64
_DEVIATIONS: Final = 5.0  # the factor `t` in `_is_mean`
_TOLERANCE: Final = 1e-9  # relative tolerance between sums of the same numbers in different orders

DType = Literal["float32", "float64"]


def sum_dtype(stage: StageManifest, trained: Collection[str]) -> DType:
    """Return the dtype of a stage's floating-point gradient sums, and of their mean."""
    return "float64" if any(dtype == "float64" for name, _, dtype in stage.parameters if name in trained) else "float32"


@dataclass(frozen=True)
class StageScale:
    """The length, dtype and divisor of a stage's mean."""

    length: int  # elements of the mean
    dtype: DType  # the mean's dtype
    divisor: float  # the mean is the sum of all sums divided by this

    def bounds(self, num_members: int) -> list[slice]:
        """Return the bounds of the mean's parts; each member reduces one part."""
        return part_bounds(self.length, num_members)

    def rounding(self, num_members: int) -> float:
        """Return the largest rounding error of one element of the mean, relative to its terms' total magnitude."""
        # Each addition rounds, and so do up to three divisions by weight and scale, and their divisors.
        return (num_members + 5) * _UNITS[self.dtype]

    @property
    def smallest(self) -> float:
        """The largest absolute error of one element of the mean that underflow causes."""
        return _MIN_NORMAL[self.dtype]


def num_buckets(num_members: int) -> int:
    """Return the number of buckets of each part, which is a power of two."""
    return max(_MIN_BUCKETS, _NUM_BUCKETS >> (num_members - 1).bit_length())


def check_shape(answer: PartProjections, num_members: int) -> None:
    """Refuse an answer with negative norms, or whose lengths do not match the number of members."""
    expected = num_members * num_buckets(num_members)
    lengths = [len(answer.sums), len(answer.norms), len(answer.means), len(answer.parts), len(answer.given)]
    if lengths != [expected] * 3 + [num_members] * 2:
        raise ProtocolError(
            f"a projection of {num_members} parts must have {expected} numbers of each kind and {num_members} digests, "
            f"got {lengths}"
        )
    negative = [norm for norm in (*answer.norms, answer.squared_norm) if norm < 0.0]
    if negative:
        raise ProtocolError(f"norms must not be negative, got {negative[0]}")


def is_sound(answers: Sequence[PartProjections], scale: StageScale) -> bool:
    """Return whether all members hold the same mean, and it is the mean of their sums; `answers`: in roster order."""
    # Numbers that are not finite prove nothing, so they do not pass.
    first = answers[0]
    if any(answer.parts != first.parts for answer in answers):
        return False
    numbers = [[*answer.sums, *answer.norms, *answer.means, answer.squared_norm] for answer in answers]
    if not all(map(math.isfinite, (number for row in numbers for number in row))):
        return False
    if not all(same_numbers([answer.squared_norm], [first.squared_norm]) for answer in answers):
        return False
    return all(_is_mean(answers, part, bounds, scale) for part, bounds in enumerate(scale.bounds(len(answers))))


def _is_mean(answers: Sequence[PartProjections], part: int, bounds: slice, scale: StageScale) -> bool:
    """Return whether each member's copy of one part is the mean of all members' sums."""
    # A copy passes if, in each bucket, with totals over all members,
    #     |mean * divisor - total(sums)| <= t * (relative * total(norms) + absolute).
    # The signs are drawn after all vectors are settled. So the rounding errors ``e`` in a bucket add up to more than
    # ``t * norm(e)`` with a probability of at most ``2 * exp(-t*t/2)``, for any ``e`` (Hoeffding).
    count = len(answers)
    size = num_buckets(count)
    rows = math.ceil((bounds.stop - bounds.start) / size)  # most elements in one bucket
    # `relative` is the rounding of the mean and of the projections; `absolute` is underflow. The `count - 1` additions
    # and the divisions of one element round independently, so their errors grow with the root of their number.
    relative = _UNITS[scale.dtype] * math.sqrt(count + 5) + _DOUBLE * math.sqrt(rows + 5)
    absolute = scale.smallest * scale.divisor * math.sqrt(rows)
    for index in range(part * size, (part + 1) * size):
        total = sum(answer.sums[index] for answer in answers)
        allowed = _DEVIATIONS * (relative * sum(answer.norms[index] for answer in answers) + absolute)
        # An overflow proves nothing, so it does not pass.
        if not all(abs(answer.means[index] * scale.divisor - total) <= allowed < math.inf for answer in answers):
            return False
    return True


def agreed_norm(answers: Sequence[PartProjections]) -> float:
    """Return the squared norm of a mean that passed: the median of the members' reports."""
    return sorted(answer.squared_norm for answer in answers)[len(answers) // 2]


def choose_accused(contradictions: Sequence[Contradiction], num_members: int) -> dict[PeerId, str]:
    """Choose the members that a majority of a stage's members contradict, with the last reason; none if that is all."""
    # Contradictions prove nothing, so these members are not convicted. But the run continues without them, because each
    # step with contradictions needs a replacement of the mean.
    against: dict[PeerId, set[PeerId]] = {}
    reasons: dict[PeerId, str] = {}
    for contradiction in contradictions:
        reducer, sender = contradiction.reducer, contradiction.other
        for peer, other in ((reducer, sender), (sender, reducer)):
            against.setdefault(peer, set()).add(other)
            reasons[peer] = contradiction.reason
    accused = {peer: reasons[peer] for peer, others in against.items() if 2 * len(others) > num_members}
    return accused if len(accused) < num_members else {}


def same_numbers(reported: Sequence[float], computed: Sequence[float], sizes: Sequence[float] | None = None) -> bool:
    """Return whether two lists of sums are equal, except for rounding in another order of summation.

    The tolerance is relative to `sizes`; if None, to `computed`, which must not be negative then.
    """
    return all(
        abs(left - right) <= _TOLERANCE * size
        or left == right
        # Infinities of both signs may cancel to NaN or not, depending on the order.
        or not (math.isfinite(left) or math.isfinite(right))
        for left, right, size in zip(reported, computed, computed if sizes is None else sizes, strict=True)
    )
