"""Decides which batches a step takes: the batches of all epochs in order, up to its number of samples. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.protocol.messages.run import MAX_PLANS, BatchNumber, EpochPlan


class DataOrder:
    """The order of batches in all known epochs."""

    def __init__(self) -> None:
        self._plans: dict[int, EpochPlan] = {}
        self._skipped: dict[int, frozenset[int]] = {}  # epoch -> batches that no step contains
        self._ends: dict[int, list[int]] = {}  # epoch -> number of batches up to the end of each series of equal sizes

    @property
    def plans(self) -> list[EpochPlan]:
        """The orders of the known epochs, the first epoch first."""
        return [self._plans[epoch] for epoch in sorted(self._plans)]

    def plan(self, epoch: int) -> EpochPlan | None:
        """Return the order of an epoch, if it is known."""
        return self._plans.get(epoch)

    def add(self, plan: EpochPlan) -> None:
        """Add an epoch's order; raise ProtocolError if the epoch has another order, or too many epochs have one."""
        known = self._plans.get(plan.epoch)
        if known is not None and (known.digest, known.sizes) != (plan.digest, plan.sizes):
            raise ProtocolError(f"epoch {plan.epoch} already has an order, got a different one")
        if known is None and len(self._plans) >= MAX_PLANS:
            raise ProtocolError(
                f"a step may extend over {MAX_PLANS} epochs, got one more: {plan.epoch}. Lower `target_batch_size`."
            )
        if plan.begin > plan.num_batches:
            raise ProtocolError(f"epoch {plan.epoch} has {plan.num_batches} batches, so cannot begin at {plan.begin}")
        if plan.skipped and max(plan.skipped) >= plan.num_batches:
            raise ProtocolError(
                f"epoch {plan.epoch} has {plan.num_batches} batches, so cannot skip {max(plan.skipped)}"
            )
        self._plans[plan.epoch] = plan
        self._skipped[plan.epoch] = frozenset(plan.skipped)
        self._ends[plan.epoch] = list(accumulate(count for _, count in plan.sizes))

    def forget_before(self, epoch: int) -> None:
        """Forget the epochs before this one, which no step needs any more."""
        self._plans = {known: plan for known, plan in self._plans.items() if known >= epoch}
        self._ends = {known: ends for known, ends in self._ends.items() if known >= epoch}
        self._skipped = {known: skipped for known, skipped in self._skipped.items() if known >= epoch}

    def size(self, number: BatchNumber) -> int:
        """Return the number of a batch's samples; raise ProtocolError if there is no such batch."""
        epoch, index = number
        plan = self._plans.get(epoch)
        if plan is None or not self.has(number):
            raise ProtocolError(f"epoch {epoch} has no batch {index} in its known order")
        return plan.sizes[bisect_right(self._ends[epoch], index)][0]

    def normalized(self, number: BatchNumber) -> BatchNumber:
        """Pass over skipped batches, and from an epoch's end to the next epoch, if that is known."""
        epoch, index = number
        while True:
            if self.skips((epoch, index)):
                index += 1
            elif epoch + 1 in self._plans and self._is_beyond((epoch, index)):
                epoch, index = epoch + 1, 0
            else:
                return epoch, index

    def skips(self, number: BatchNumber) -> bool:
        """Return whether no step contains this batch."""
        return number[1] in self._skipped.get(number[0], ())

    def has(self, number: BatchNumber) -> bool:
        """Return whether the known order has this batch."""
        return number[0] in self._plans and not self._is_beyond(number)

    def ends_at(self, number: BatchNumber) -> bool:
        """Return whether the run's last epoch has ended before this number, so that no batch follows."""
        return self._is_beyond(number) and self._plans[number[0]].last

    def _is_beyond(self, number: BatchNumber) -> bool:
        """Return whether the number's epoch is known, and has no batch with this index."""
        ends = self._ends.get(number[0])
        return ends is not None and number[1] >= (ends[-1] if ends else 0)


@dataclass
class StepWindow:
    """The batches of one step: from `begin` on, until they have `target_batch_size` samples."""

    order: DataOrder
    begin: BatchNumber
    target_batch_size: int
    # Batches that their own `training_step` withdrew. They count in no step, and later batches replace them.
    dropped: set[BatchNumber] = field(default_factory=set)
    _places: dict[BatchNumber, int] = field(default_factory=dict)  # batch -> place of its first sample
    _num_samples: int = 0  # samples of all batches in `_places`
    _num_dropped: int = 0  # samples of dropped batches in `_places`

    def _extend(self) -> None:
        """Add batches until the step has its samples, not counting dropped batches, or no further batch is known."""
        self._num_dropped = sum(self.order.size(number) for number in self.dropped if number in self._places)
        while self._num_samples - self._num_dropped < self.target_batch_size and self.order.has(self._next):
            number = self._next
            self._places[number] = self._num_samples
            self._num_samples += self.order.size(number)
            self._num_dropped += self.order.size(number) if number in self.dropped else 0

    @property
    def _next(self) -> BatchNumber:
        """The batch after those in `_places`."""
        if not self._places:
            return self.order.normalized(self.begin)
        epoch, index = next(reversed(self._places))
        return self.order.normalized((epoch, index + 1))

    @property
    def end(self) -> BatchNumber:
        """The first batch of the next step, if this step is whole."""
        self._extend()
        return self._next

    @property
    def whole(self) -> bool:
        """Return whether all batches of the step are known."""
        self._extend()
        reached = self._num_samples - self._num_dropped >= self.target_batch_size
        return reached or self.order.ends_at(self._next)

    @property
    def numbers(self) -> Sequence[BatchNumber]:
        """Numbers of the step's batches that count, as far as they are known, in order."""
        self._extend()
        return [number for number in self._places if number not in self.dropped]

    def place(self, number: BatchNumber) -> int:
        """Return the place of a batch's first sample in the step."""
        self._extend()
        return self._places[number]

    def is_passed(self, number: BatchNumber, complete: Collection[BatchNumber]) -> bool:
        """Return whether all of the step's batches before `number`, the end of an epoch, are `complete`."""
        self._extend()
        return self._next >= self.order.normalized(number) and all(
            batch in complete or batch >= number for batch in self.numbers
        )
