"""Compares the sums and means of a stage's members with their answers and with their commitments.

A member's report never convicts another member. A member is convicted only if it contradicts itself or its commitment,
or if its own part of the mean is not the mean of the sums that it reports to have received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.tensors import DTYPES
from lightning_swarm.protocol.mean_projections import StageScale, check_shape, num_buckets, same_numbers
from lightning_swarm.protocol.messages.parts import Contradiction, ExamineReply, ExamineRequest, ReportedSketch
from lightning_swarm.server.audit.kept_work import sketch_of, sum_digest
from lightning_swarm.server.audit.projection import (
    bucket_norms,
    part_digest,
    part_digests,
    parts_of,
    project_parts,
    sum_parts,
)
from lightning_swarm.server.averaging import deterministic
from lightning_swarm.server.averaging.all_reduce import squared_norm

_SAME: Final = 1e-9  # largest relative distance of two machines' float64 sketches of one vector


@dataclass(frozen=True)
class _MeanNumbers:
    """Numbers computed from one mean."""

    means: Sequence[float]  # projections of the mean
    norms: Sequence[float]  # norms of the elements in each projection
    squared_norm: float
    wrong: Sequence[bool]  # whether each part differs from the true mean by more than rounding


class Examination:
    """Examines the vectors of one stage in one round, which arrive one after another, in the roster's order.

    Call `examine_sum` for each member, then `reduce`, then `examine_mean` for each different mean, then `decide`.
    """

    def __init__(self, request: ExamineRequest, members: Sequence[PeerId], *, exact: bool) -> None:
        if {*members} != request.answers.keys():
            raise ProtocolError(f"answers must come from the members {members}, got {sorted(request.answers)}")
        for answer in request.answers.values():
            check_shape(answer, len(members))
        closing = request.closing
        self.members = members
        self.lies: dict[PeerId, str] = {}  # member -> the false report
        self.contradictions: list[Contradiction] = []
        self._weight, self._gradient_scale, self._exact = closing.total_weight, closing.gradient_scale, exact
        self._scale = StageScale(request.length, request.dtype, self._weight * self._gradient_scale)
        self._seed, self._answers, self._commitments = request.seed, request.answers, request.commitments
        self._reported = request.told
        self._dtype = DTYPES[request.dtype]
        self._bounds, self._num_buckets = self._scale.bounds(len(members)), num_buckets(len(members))
        self._part_digests: dict[PeerId, list[bytes]] = {}  # member -> digests of the parts of its sum
        self._total: Tensor | None = None
        self._absolute_sum: Tensor | None = None  # sum of the members' absolute values
        self._numbers_of_means: dict[tuple[bytes, ...], _MeanNumbers] = {}  # digests of a mean's parts -> its numbers
        self.mean: Tensor = torch.empty(0)  # the true mean, after `reduce`

    def expected_vector(self, of: Literal["sum", "mean"]) -> Tensor:
        """Return a vector without values, with the shape and dtype of the members' vectors."""
        length = self._scale.length
        if of == "sum" and self._exact:
            return torch.empty(2, length + 1, dtype=torch.int64, device="meta")
        return torch.empty(length, dtype=self._dtype, device="meta")

    # ------------------------------------------------------------------ sums

    def examine_sum(self, peer: PeerId, values: Tensor | None) -> None:
        """Compare a member's sum with its commitment and projections; None: it sent no vector of the expected form."""
        if values is None or sum_digest(values) != self._commitments.get(peer):
            self.lies[peer] = f"{peer} sent a sum of gradients that differs from its commitment"
            return
        answer, parts = self._answers[peer], sum_parts(values, len(self.members))
        sums = project_parts(parts, self._seed, num_buckets=self._num_buckets)
        norms = bucket_norms(parts, num_buckets=self._num_buckets)
        if not (same_numbers(answer.sums, sums, norms) and same_numbers(answer.norms, norms)):
            self.lies[peer] = f"{peer} reported false projections of its sum of gradients"
            return
        if not all(self._is_sketch(reported, values) for reported in self._reported.get(peer, ())):
            self.lies[peer] = f"{peer} reported false sketches of its sum in an audit"
            return
        self._part_digests[peer] = [part_digest(self._part(values, bounds)) for bounds in self._bounds]
        if self._total is None or self._absolute_sum is None:
            self._total = values.clone()
            self._absolute_sum = torch.zeros(0) if self._exact else values.abs()
            return
        self._total += values
        if not self._exact:
            self._absolute_sum += values.abs()

    def _is_sketch(self, reported: ReportedSketch, values: Tensor) -> bool:
        sketch = sketch_of(0, values, reported.seed, exact=self._exact)
        if not all(map(math.isfinite, sketch.values)):
            return not all(map(math.isfinite, reported.values))
        return math.dist(reported.values, sketch.values) <= _SAME * math.hypot(*sketch.values)

    def _part(self, values: Tensor, bounds: slice) -> list[Tensor]:
        """Return a part of a sum as the tensors that members send."""
        return [values[0, bounds], values[1, bounds], values[:, -1]] if self._exact else [values[bounds]]

    # ------------------------------------------------------------------ means

    def reduce(self) -> None:
        """Compute the mean of all sums, with the bits that a member on a CPU computes."""
        assert self._total is not None
        if not self._exact:
            self.mean = torch.div(self._total, self._weight)
        elif deterministic.is_whole(self._total[:, -1]):
            self.mean = deterministic.quotient(self._total[:, :-1], self._weight).to(self._dtype)
        else:
            self.mean = torch.full((self._scale.length,), math.nan, dtype=self._dtype)
        if self._gradient_scale != 1.0:
            self.mean = self.mean / self._gradient_scale
        self._record_mean(self.mean)

    def needs_mean(self, peer: PeerId) -> bool:
        """Return whether a member holds a mean that has not been examined yet."""
        return tuple(self._answers[peer].parts) not in self._numbers_of_means

    def examine_mean(self, peer: PeerId, mean: Tensor | None) -> None:
        """Compare a member's mean with its digests; None: it sent no vector of the expected form."""
        if mean is None or self._record_mean(mean) != tuple(self._answers[peer].parts):
            self.lies[peer] = f"{peer} sent a mean that differs from its digests"

    def _record_mean(self, mean: Tensor) -> tuple[bytes, ...]:
        """Store the numbers of a mean for `decide`; return the digests of its parts."""
        parts, digests = parts_of(mean, len(self.members)), tuple(part_digests(mean, len(self.members)))
        self._numbers_of_means[digests] = _MeanNumbers(
            project_parts(parts, self._seed, num_buckets=self._num_buckets),
            bucket_norms(parts, num_buckets=self._num_buckets),
            squared_norm(mean),
            [self._is_wrong(part, bounds) for part, bounds in zip(parts, self._bounds, strict=True)],
        )
        return digests

    def _is_wrong(self, part: Tensor, bounds: slice) -> bool:
        """Return whether a part of a mean differs from the true mean by more than rounding."""
        true = self.mean[bounds]
        equal = (part == true) | (part.isnan() & true.isnan())
        if self._exact:  # sums in fixed point have the same bits on any device
            return not bool(equal.all())
        assert self._absolute_sum is not None
        rounding = self._scale.rounding(len(self.members)) / self._scale.divisor
        allowed = self._absolute_sum[bounds].to(torch.float64).mul_(rounding).add_(self._scale.smallest)
        return not bool((equal | ((part.to(torch.float64) - true).abs() <= allowed)).all())

    # ------------------------------------------------------------------ verdict

    def decide(self) -> None:
        """Find members that contradict themselves or each other, once all sums and means have come."""
        for peer in self.members:
            answer, numbers = self._answers[peer], self._mean_of(peer)
            if numbers is None:  # already convicted
                continue
            is_true = same_numbers(answer.means, numbers.means, numbers.norms)
            if not is_true or not same_numbers([answer.squared_norm], [numbers.squared_norm]):
                self.lies[peer] = f"{peer} reported false projections, or a false norm, of its mean"
        for rank, reducer in enumerate(self.members):
            if reducer not in self.lies:
                self._check_reducer(rank, reducer)

    def _mean_of(self, peer: PeerId) -> _MeanNumbers | None:
        """Return the numbers of a member's mean; None if the member is convicted."""
        return self._numbers_of_means.get(tuple(self._answers[peer].parts)) if peer not in self.lies else None

    def _check_reducer(self, rank: int, reducer: PeerId) -> None:
        """Compare the part of the mean that a member computed with its inputs, and with the other members' copies."""
        numbers, answer = self._mean_of(reducer), self._answers[reducer]
        if numbers is not None and numbers.wrong[rank]:
            received = dict(zip(self.members, answer.given, strict=True))
            disputed = [peer for peer, digest in received.items() if digest != self._part_digests[peer][rank]]
            if not disputed or reducer in disputed:
                self.lies[reducer] = f"{reducer} computed a mean that is not the mean of the sums that it received"
                return
            for peer in disputed:
                reason = f"{reducer} reports a part {rank} of the sum of {peer} that differs from its commitment"
                self._add_contradiction(reducer, peer, reason)
        for peer in self.members:
            if peer not in self.lies and self._answers[peer].parts[rank] != answer.parts[rank]:
                reason = f"{peer} holds a part {rank} of the mean that differs from the part that {reducer} computed"
                self._add_contradiction(reducer, peer, reason)

    def _add_contradiction(self, reducer: PeerId, other: PeerId, reason: str) -> None:
        self.contradictions.append(Contradiction(reducer=reducer, other=other, reason=reason))

    def reply(self) -> ExamineReply:
        """Return the findings."""
        norm = None
        if self._numbers_of_means and not self.lies:
            # If members contradict each other, all receive the mean computed here, whose numbers were stored first.
            computed_here = next(iter(self._numbers_of_means.values()))
            numbers = computed_here if self.contradictions else self._mean_of(self.members[0])
            norm = numbers.squared_norm if numbers is not None else None
        return ExamineReply(lies=self.lies, contradictions=self.contradictions, unreached={}, squared_norm=norm)
