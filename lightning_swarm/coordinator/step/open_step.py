"""The state of the open step: its granted and completed batches, and whether it can close. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_swarm.coordinator.step.data_order import DataOrder, StepWindow
from lightning_swarm.core.errors import LeaseRevoked, ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.batches import MAX_LOGS, Grant, Lease, LoggedValue, fold
from lightning_swarm.protocol.messages.calls import PLACES, Origin, Receipt
from lightning_swarm.protocol.messages.run import BatchNumber

_MAX_AGAIN = 48  # restarts of a step's places; afterwards, places follow the struck batches

CLIP_EPSILON = 1e-6  # added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does


@dataclass
class _LeasedBatch:
    """A batch that has a place in the step."""

    trainer: PeerId
    first: int  # its place: the position of its first sample
    num_samples: int
    weight: float
    serial: int = 0  # its trainer's count of its own batches; 0: not reported
    completed: tuple[Receipt, ...] | None = None  # None: still under way
    logs: tuple[LoggedValue, ...] = ()
    metrics: Message | None = None
    armed: tuple[Receipt, ...] | None = None  # its receipts, once servers can complete it without its trainer
    batch: BatchNumber | None = None  # its number in the data, if trainers share an epoch's order


@dataclass
class OpenStep:
    """Grants and completions of one step."""

    step: int
    # Samples that fill the step; all samples have equal weights. None: the lead closes the step when Lightning's
    # accumulation window ends, and all batches have equal weights.
    target_batch_size: int | None
    window: StepWindow | None = None  # the batches that it takes; None: any batch, in the order of requests
    _batches: dict[int, _LeasedBatch] = field(default_factory=dict)  # lease -> batch that is not struck
    _withdrawn: dict[tuple[int, PeerId], int] = field(default_factory=dict)  # lease and trainer -> place
    first_lease: int = 0  # earlier leases are a former coordinator's, and count only if restored
    _next_first: int = 0  # the first place that is not granted yet
    close_asked: bool = False  # the lead has asked to close the step
    gradient_scale: float | None = None  # None until the first batch sets it
    sealed: bool = False  # the next step is open: this one takes no batches, even if it loses some
    _asked_weight: float | None = None  # total weight with which the lead asked to close; None: the sum of all batches
    _struck: set[int] = field(default_factory=set)  # leases of struck batches
    struck_serials: set[tuple[PeerId, int]] = field(default_factory=set)  # (trainer, serial of its struck batch)
    without_server: set[PeerId] = field(default_factory=set)  # trainers whose own server, which they need, is excluded
    _num_again: int = 0  # batches that were granted again
    # Numbers of batches that were granted before, and of batches that their trainers dropped.
    _tried: set[BatchNumber] = field(default_factory=set)
    _dropped: set[BatchNumber] = field(default_factory=set)

    def check_numbered(self) -> None:
        """Raise ProtocolError if the step takes batches in the order of requests, and so needs no data order."""
        if self.target_batch_size is None or any(leased.batch is None for leased in self._batches.values()):
            raise ProtocolError(f"step {self.step} takes batches in the order of requests, got a data order")

    def plan(self, order: DataOrder, begin: BatchNumber) -> None:
        """Take the batches of a data order from `begin` on; raise ProtocolError if the step can have no data order."""
        self.check_numbered()
        assert self.target_batch_size is not None
        self.window = StepWindow(order, begin, self.target_batch_size, self._dropped)

    @property
    def num_granted(self) -> int:
        """Number of granted samples, without withdrawn and struck batches."""
        return sum(batch.num_samples for batch in self._batches.values())

    @property
    def begun(self) -> bool:
        """Return whether a batch is granted, or the step is closing."""
        return bool(self._batches) or self.closing

    @property
    def closing(self) -> bool:
        """True if nothing more is granted. The message `Closing` has the contents of the closed step."""
        return self._is_full() or self.close_asked or self.sealed

    def _is_full(self, without: Collection[int] = ()) -> bool:
        """Return whether the step has all its samples, even without the batches at these places."""
        if self.window is not None:
            return bool(self._batches) and self.window.whole and not self.free and not without
        left = sum(batch.num_samples for batch in self._batches.values() if batch.first not in without)
        return self.target_batch_size is not None and left >= self.target_batch_size

    @property
    def free(self) -> list[BatchNumber]:
        """The step's ungranted batches, in order."""
        granted = {leased.batch for leased in self._batches.values()}
        return [] if self.window is None else [number for number in self.window.numbers if number not in granted]

    @property
    def complete_batches(self) -> set[BatchNumber]:
        """The numbers of the step's complete batches."""
        complete = (leased.batch for leased in self._batches.values() if leased.completed is not None)
        return {number for number in complete if number is not None}

    @property
    def ready(self) -> bool:
        """Return whether all granted batches are complete, and no more will be granted."""
        return self.closing and all(batch.completed is not None for batch in self._batches.values())

    def grant(
        self, lease: int, trainer: PeerId, num_samples: int, gradient_scale: float = 1.0, serial: int = 0
    ) -> tuple[int, float] | None:
        """Grant a batch; return its first sample's position and its weight, or None if the step is full."""
        if num_samples < 1:
            raise ProtocolError(f"a batch must have at least one sample, got {num_samples}")
        if self.closing:
            return None
        self._settle_scale(gradient_scale)
        first, weight = self._next_first, self._weight(num_samples)
        self._next_first += num_samples
        self._batches[lease] = _LeasedBatch(trainer, first, num_samples, weight, serial)
        return first, weight

    def _weight(self, num_samples: int) -> float:
        """Return the weight of a batch, as `target_batch_size` explains it."""
        return 1.0 if self.target_batch_size is None else float(num_samples)

    def hand_out(self, lease: int, trainer: PeerId, batch: BatchNumber, gradient_scale: float, serial: int) -> None:
        """Grant a free batch of the window, at a place that does not depend on the trainer."""
        assert self.window is not None
        self._settle_scale(gradient_scale)
        size, first = self.window.order.size(batch), self.window.place(batch)
        if batch in self._tried or self._next_first > 0:  # the place may have been granted before
            first += self._next_offset()
        self._tried.add(batch)
        self._batches[lease] = _LeasedBatch(trainer, first, size, self._weight(size), serial, batch=batch)

    def _next_offset(self) -> int:
        """Return an unused offset, for a place that may have been granted before."""
        # Servers may drop all gradients of the former place. Random draws do not depend on the offset. A new
        # coordinator's offsets begin above all former coordinators' offsets.
        self._num_again += 1
        return ((self.first_lease >> 32 << 6) + self._num_again) * PLACES

    def _settle_scale(self, gradient_scale: float) -> None:
        """Refuse a scale that differs from the step's; if the run has none, the first batch sets it."""
        if self.gradient_scale not in (None, gradient_scale):
            raise ProtocolError(
                f"all gradients of step {self.step} must have the scale {self.gradient_scale:g}, got a batch with "
                f"{gradient_scale:g}"
            )
        self.gradient_scale = gradient_scale

    def granted(self, trainer: PeerId, serial: int) -> int | None:
        """Return the lease of a trainer's batch, if the batch has one already."""
        for lease, batch in self._batches.items():
            if serial and (batch.trainer, batch.serial) == (trainer, serial):
                return lease
        return None

    def as_grant(self, lease: int, generation: int) -> Grant:
        """Return a batch's place as its trainer receives it, in this generation of the run."""
        batch = self._batches[lease]
        return Grant(
            lease=lease,
            generation=generation,
            step=self.step,
            first=batch.first,
            weight=batch.weight,
            batch=batch.batch,
            samples=batch.num_samples if batch.batch is not None else 0,
        )

    def restore(self, trainer: PeerId, lease: Lease, metrics: Message | None) -> None:
        """Restore a batch that a trainer reports to a new coordinator, if its place is free and was once granted."""
        grant, request = lease.grant, lease.request
        end = grant.first + request.num_samples
        # Former coordinators grant no places beyond this limit. If reports are missing, this coordinator's begin there.
        if end > ((self.first_lease >> 32) + 1) << 32:
            return
        if grant.weight != self._weight(request.num_samples) or self._has_other_size(grant.batch, request.num_samples):
            return
        if grant.batch is None:
            self.skip_to(end)
        else:
            self._tried.add(grant.batch)
            if any(leased.batch == grant.batch for leased in self._batches.values()):
                return
            if lease.dropped:
                self._dropped.add(grant.batch)
        if lease.withdrawn:
            self.struck_serials.add((trainer, request.number))
        if lease.withdrawn or grant.lease in self._batches or grant.lease in self._struck:
            return
        leased_places = ((leased.first, leased.first + leased.num_samples) for leased in self._batches.values())
        if any(grant.first < leased_end and first < end for first, leased_end in leased_places):
            return
        if self.gradient_scale not in (None, request.gradient_scale):
            return
        self.gradient_scale = request.gradient_scale
        batch = _LeasedBatch(trainer, grant.first, request.num_samples, grant.weight, request.number, metrics=metrics)
        batch.batch = grant.batch
        batch.logs = tuple(lease.logs)
        if lease.completed is not None:
            batch.completed = tuple(lease.completed)
        if lease.armed is not None:
            batch.armed = tuple(lease.armed)
        self._batches[grant.lease] = batch

    def _has_other_size(self, batch: BatchNumber | None, num_samples: int) -> bool:
        """Return whether the epoch's order, as far as it is known, has a batch of another size at this number."""
        order = None if batch is None or self.window is None else self.window.order
        return order is not None and batch is not None and order.has(batch) and order.size(batch) != num_samples

    def skip_to(self, first: int) -> None:
        """Grant no place before this one."""
        self._next_first = max(self._next_first, first)

    def complete(
        self, lease: int, trainer: PeerId, completed: Sequence[Receipt], logs: Sequence[LoggedValue] = ()
    ) -> None:
        """Record that a batch is complete: its trainer has a receipt for each microbatch from every stage."""
        batch = self._reported(lease, trainer, completed, logs)
        if batch is not None:
            batch.completed, batch.logs = tuple(completed), tuple(logs)

    def _reported(
        self, lease: int, trainer: PeerId, receipts: Sequence[Receipt], logs: Sequence[LoggedValue]
    ) -> _LeasedBatch | None:
        """Return the batch that a trainer reports on, if the report is new."""
        batch = self._batches.get(lease)
        completed = batch.completed if batch is not None and batch.trainer == trainer else None
        if completed is not None and set(completed) == set(receipts):
            return None  # the first answer was lost, or servers completed the batch without its trainer
        batch = self._leased(lease, trainer)
        known_logs = (leased.logs for leased in self._batches.values() if leased.trainer == trainer)
        names = {value.name for values in [*known_logs, logs] for value in values}
        if len(names) > MAX_LOGS:
            raise ProtocolError(f"a trainer's batches of a step may log {MAX_LOGS} names, got {len(names)}")
        if any(first != batch.first for first, _, _ in receipts) or len(set(receipts)) != len(receipts):
            raise ProtocolError(f"lease {lease} has place {batch.first}; got receipts of other places, or one twice")
        return batch

    def keep_metrics(self, lease: int, trainer: PeerId, metrics: Message, *, max_bytes: int, num_senders: int) -> None:
        """Keep a batch's `BatchMetrics` until the step's record is decided."""
        batch = self._leased(lease, trainer)
        num_bytes = trainer_bytes = _num_bytes(metrics)
        for other in self._batches.values():
            if other is not batch and other.metrics is not None:
                num_bytes += _num_bytes(other.metrics)
                trainer_bytes += _num_bytes(other.metrics) if other.trainer == trainer else 0
        # Each trainer may use its share, even if the limit is reached, so the total is at most twice the limit.
        share = max_bytes // max(1, num_senders)
        if num_bytes > max_bytes and trainer_bytes > share:
            raise ProtocolError(
                f"the metrics of a step's batches must have at most `Limits.max_metric_bytes` = {max_bytes} bytes, got "
                f"{num_bytes}, of which {trainer_bytes} come from {trainer}, more than its share of {share}. Raise the "
                "limit, or log less with `sync_dist=True`."
            )
        batch.metrics = metrics

    def withdraw(self, lease: int, trainer: PeerId, *, dropped: bool = False) -> int:
        """Withdraw a batch, and return its place; if it is `dropped`, no trainer brings it again."""
        if (lease, trainer) not in self._withdrawn:  # the report is not a repeated one
            batch = self._leased(lease, trainer)
            if dropped and batch.batch is not None:
                self._dropped.add(batch.batch)
            self.strike([batch.first])
            self._withdrawn[lease, trainer] = batch.first
        return self._withdrawn[lease, trainer]

    def arm(self, lease: int, trainer: PeerId, receipts: Sequence[Receipt], logs: Sequence[LoggedValue]) -> None:
        """Record that servers can complete a batch alone: if its trainer dies, it counts once it has all receipts."""
        batch = self._reported(lease, trainer, receipts, logs)
        if batch is not None:
            batch.armed, batch.logs = tuple(receipts), tuple(logs)

    def under_way(self, trainer: PeerId) -> dict[int, tuple[Receipt, ...] | None]:
        """Return a trainer's incomplete batches: place -> receipts if the batch is armed, else None."""
        incomplete = (batch for batch in self._batches.values() if batch.completed is None)
        return {batch.first: batch.armed for batch in incomplete if batch.trainer == trainer}

    def complete_armed(self, first: int) -> bool:
        """Record that servers completed an armed batch without its trainer; return False if it was not under way."""
        for batch in self._batches.values():
            if batch.first == first and batch.completed is None and batch.armed is not None:
                batch.completed = batch.armed
                return True
        return False

    def strike(self, firsts: Collection[int]) -> dict[int, PeerId]:
        """Strike the batches at these places, so that they do not count; return their places and trainers."""
        # Their samples may be granted again. No closing names their gradients, so servers discard them.
        struck = {lease: batch for lease, batch in self._batches.items() if batch.first in firsts}
        self._struck |= struck.keys()
        self.struck_serials |= {(batch.trainer, batch.serial) for batch in struck.values()}
        self._batches = {lease: batch for lease, batch in self._batches.items() if lease not in struck}
        return {batch.first: batch.trainer for batch in struck.values()}

    def has_struck(self, leases: Iterable[int]) -> bool:
        """Return whether a batch of one of these leases was struck."""
        return not self._struck.isdisjoint(leases)

    def restart_places(self) -> None:
        """Restart the places of an unordered step without batches, so that new batches repeat the random draws."""
        if not self._batches and self.window is None and self._num_again < _MAX_AGAIN:
            self.skip_to(self._next_offset())

    def strike_others(self) -> None:
        """Strike batches that replaced a dropped batch, if no trainer reports the drop any more."""
        # They belong to the next step's window, and would count twice.
        if self.window is not None and self.window.whole:
            numbers = set(self.window.numbers)
            self.strike([leased.first for leased in self._batches.values() if leased.batch not in numbers])

    def closes_without(self, firsts: Collection[int], lead: PeerId) -> bool:
        """Return whether the step would stay closed if the batches at these places were struck."""
        # Only the lead asks to close. If it lost batches, keep the step open until it has resent them.
        full = self._is_full(without=firsts)
        return full or self.sealed or (self.close_asked and all(self.trainer_of(first) != lead for first in firsts))

    def reopen(self) -> None:
        """Grant places again. The lead learns this while it waits for the record, and may ask to close again."""
        self.close_asked, self._asked_weight = False, None

    def settle(self) -> None:
        """Stop waiting for batches: count armed batches, and strike all other incomplete batches."""
        incomplete = (batch for batch in self._batches.values() if batch.completed is None)
        self.strike([batch.first for batch in incomplete if batch.armed is None])
        for batch in self._batches.values():
            batch.completed = batch.completed if batch.completed is not None else batch.armed

    def trainer_of(self, first: int) -> PeerId:
        """Return the trainer whose batch begins at this place."""
        return next(batch.trainer for batch in self._batches.values() if batch.first == first)

    def ask_to_close(self, total_weight: float | None) -> None:
        """Grant no more places. `total_weight` is the weight of Lightning's full accumulation window, if known."""
        self.close_asked = True
        self._asked_weight = total_weight

    @property
    def counted(self) -> list[Receipt]:
        """All microbatches that the step counts, in order."""
        return sorted(receipt for batch in self._batches.values() for receipt in batch.completed or ())

    @property
    def batches(self) -> list[Receipt]:
        """A receipt for each batch that the step counts, in order. Such a batch may have no microbatch at all."""
        return sorted((batch.first, 0, 0) for batch in self._batches.values() if batch.completed is not None)

    @property
    def origins(self) -> dict[int, Origin]:
        """The granted weight and the trainer of each batch, by its place."""
        return {batch.first: Origin(batch.weight, batch.trainer) for batch in self._batches.values()}

    @property
    def total_weight(self) -> float:
        """The weight by which the sum is divided."""
        if self._asked_weight is not None:
            return self._asked_weight
        return math.fsum(batch.weight for batch in self._batches.values()) or 1.0

    def missing(self) -> list[PeerId]:
        """Return the trainers with incomplete batches."""
        return sorted({batch.trainer for batch in self._batches.values() if batch.completed is None})

    def logs_for(self, lead: PeerId) -> list[LoggedValue]:
        """Return the values that trainers other than the lead logged for their batches."""
        return logs_of_others([(batch.trainer, batch.logs) for batch in self._batches.values()], lead)

    def metrics_for(self, lead: PeerId) -> dict[int, Message]:
        """Return the metrics of batches from trainers other than the lead, by the batches' places."""
        others = (batch for batch in self._batches.values() if batch.trainer != lead)
        return {batch.first: batch.metrics for batch in others if batch.metrics is not None}

    def _leased(self, lease: int, trainer: PeerId) -> _LeasedBatch:
        """Return a trainer's batch that is under way; raise an error if the lease has none."""
        batch = self._batches.get(lease)
        if lease in self._struck or (batch is None and lease < self.first_lease):
            raise LeaseRevoked(f"the batch was struck from step {self.step}")
        if batch is None or batch.trainer != trainer or batch.completed is not None:
            raise ProtocolError(f"step {self.step} has no open lease {lease} of {trainer}")
        return batch


def logs_of_others(batches: Collection[tuple[PeerId, Sequence[LoggedValue]]], lead: PeerId) -> list[LoggedValue]:
    """Combine the values that trainers other than the lead logged in a step, for at most `MAX_LOGS` names."""
    loggers: dict[str, set[PeerId]] = {}
    for trainer, logs in batches:
        for value in logs:
            loggers.setdefault(value.name, set()).add(trainer)
    # The lead's names come first, then the most common names. Trainers of one script log the same names.
    ranked = sorted(loggers, key=lambda name: (lead in loggers[name], len(loggers[name])), reverse=True)
    chosen = set(ranked[:MAX_LOGS])
    others = (value for trainer, logs in batches if trainer != lead for value in logs)
    return fold(value for value in others if value.name in chosen)


def _num_bytes(message: Message) -> int:
    return len(message.body) + sum(tensor.nbytes for tensor in message.tensors)


def add_up(squared_norms: Iterable[float]) -> float:
    """Return the sum of squared norms, which is not finite if any of them is not."""
    try:
        return math.fsum(squared_norms)
    except OverflowError:
        return math.inf


def clip_factor(squared_norm: float, max_norm: float | None) -> float:
    """Return the factor that clips the mean gradient, from its squared norm over all stages."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (math.sqrt(squared_norm) + CLIP_EPSILON))
