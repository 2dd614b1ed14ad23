"""Grants places in the open step to trainers' batches, and reserves places in the next step for waiting trainers."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.step.assignment import (
    BatchTimes,
    Lane,
    WaitingTrainer,
    choose_additional,
    leave_to_others,
)
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant, GrantReply, GrantRequest, WaitForRecord
from lightning_swarm.protocol.messages.run import BatchNumber, Term
from lightning_swarm.protocol.run_state import RunState, lanes_of, owner_of

_log = logging.getLogger(__name__)

_LEAST_PATIENCE_S: Final = 0.5  # shortest time for which a waiting trainer leaves batches to other trainers
_MANY_LEFT: Final = 10  # batches in a row that a trainer left to other trainers, before a warning
_FIRST_PATIENCE_S: Final = 5.0  # before a trainer's first batch is complete: compilers and caches are cold


def first_lease(term: Term) -> int:
    """Return the first lease number of a coordinator's term; no two coordinators share a number."""
    return ((term[0] - 1) << 32) + 1


class LeaseTable:
    """Grants places in the open step, and keeps the requests of trainers that wait for one."""

    def __init__(
        self,
        run: RunState,
        leases: Iterator[int],
        on_grant: Callable[[OpenStep, PeerId], None],
        gone: Collection[PeerId],
    ) -> None:
        self._run = run
        self._leases = leases  # numbers for new leases
        self._on_grant = on_grant  # called with a step and the trainer that has got a place in it
        self._gone = gone  # trainers that do not answer
        self._requests: dict[PeerId, GrantRequest] = {}  # requests that found the step full, in order of arrival
        self._reserved: dict[PeerId, tuple[GrantRequest, Grant]] = {}  # requests that got a place as the step opened
        self._waiting: dict[PeerId, WaitingTrainer] = {}  # trainers that wait with a numbered batch
        self._times: defaultdict[PeerId, BatchTimes] = defaultdict(BatchTimes)
        self._warned_large = False
        self._warned_slow: set[PeerId] = set()

    def grant(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> GrantReply:
        """Grant a place in the open step, or return the record to wait for; refuse a request that does not fit."""
        if self._is_beyond(step):
            return GrantReply(over=True)
        if request.step < step.step:  # the trainer needs the former step's record before it may use a reserved place
            return GrantReply(wait=WaitForRecord(step=step.step - 1))
        scale = self._run.loss_scale
        # While a record is applied, this peer may already have the next step's loss scale. The trainer then waits.
        may_change = self._run.scaling is not None and step.closing
        if scale not in (None, request.gradient_scale) and not may_change:
            raise ProtocolError(
                f"all trainers of a run must scale their losses alike, by {scale:g} in step {step.step}; got "
                f"{request.gradient_scale:g}"
            )
        if (request.batch is None) != (step.window is None):
            raise ProtocolError(
                f"either all batches of step {step.step} have an epoch and an index, or none has; got {request.batch}"
            )
        if request.batch is not None:
            return self._answer(step, trainer, request, request.batch)
        waiting_request, grant = self._reserved.get(trainer, (None, None))
        # The trainer repeats, for the new step, the request that waited in the former step.
        if grant is not None and waiting_request == replaced(request, step=step.step - 1):
            del self._reserved[trainer]
            return GrantReply(grant=grant)
        grant = self._grant(step, trainer, request)
        if grant is None:
            self._requests[trainer] = request
            return GrantReply(wait=WaitForRecord(step=step.step))
        self._requests.pop(trainer, None)
        self._warn_of_large(request)
        return GrantReply(grant=grant)

    def grant_ahead(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> Grant | None:
        """Grant a place for a batch that its trainer has not begun, if one is free now."""
        # A late, repeated request for an abandoned batch would get a place that its trainer never uses.
        if self._is_beyond(step) or (trainer, request.number) in step.struck_serials:
            return None
        with contextlib.suppress(ProtocolError):  # raised once more when the trainer has begun the batch
            grant = self._grant(step, trainer, request)
            if grant is not None:
                self._warn_of_large(request)
            return grant
        return None

    def opened(self, step: OpenStep) -> OpenStep:
        """Grant places in a new step to waiting trainers, and return the step."""
        self._waiting = {}
        lead = self._run.manifest.lead
        # The lead comes first, so that it waits for one record only. But if one batch fills a step, trainers take
        # turns, or the lead would always get the only place.
        requests = sorted(self._requests.items(), key=lambda item: item[0] != lead or self._fills(item[1]))
        self._requests, self._reserved = {}, {}
        for trainer, request in () if self._is_beyond(step) else requests:
            with contextlib.suppress(ProtocolError):  # raised once more when the trainer asks again
                grant = self._grant(step, trainer, request)
                if grant is None:
                    self._requests[trainer] = replaced(request, step=step.step)
                else:
                    self._reserved[trainer] = (request, grant)
        return step

    # ------------------------------------------------------------------ numbered batches

    # The data order decides which batches a step takes, and a trainer asks with the number of the batch that it has
    # read. A lane is every n-th batch of an epoch, and each of the n trainers has one (`lanes_of`). A waiting trainer
    # also brings batches from the lanes of trainers that are gone or late.

    def batch_ended(self, trainer: PeerId) -> None:
        """Record the duration of a trainer's batch, which is complete or withdrawn."""
        self._times[trainer].ended(now_s())

    def would_answer(self, step: OpenStep, trainer: PeerId) -> bool:
        """Return whether a waiting trainer that asks again now would get another answer than to wait."""
        waiting = self._waiting.get(trainer)
        if trainer in step.without_server:
            return False
        if waiting is None:
            return not step.closing
        if step.window is None:
            return False
        return self._chosen(step, waiting) is not None or self._passed(step, waiting.batch)

    def patience_s(self, trainer: PeerId) -> float | None:
        """Return the seconds for which a trainer still leaves batches to other trainers; None if it does not wait."""
        waiting = self._waiting.get(trainer)
        return None if waiting is None else max(0.0, waiting.until_s - now_s())

    def leaves_own(self, trainer: PeerId) -> bool:
        """Return whether a trainer waits because other trainers would complete its batch sooner."""
        waiting = self._waiting.get(trainer)
        return waiting is not None and waiting.leaves_own

    def owed_by(self, step: OpenStep) -> set[PeerId]:
        """Return the trainers whose lanes have ungranted batches of the step."""
        return {self._owner(step, number) for number in step.free}

    def owes(self, step: OpenStep, trainer: PeerId) -> bool:
        """Return whether other trainers wait for a batch in this trainer's lane."""
        return any(peer != trainer for peer in self._waiting) and trainer in self.owed_by(step)

    def _answer(self, step: OpenStep, trainer: PeerId, request: GrantRequest, batch: BatchNumber) -> GrantReply:
        """Grant this batch or an additional batch of another lane, or answer that the batch is passed or must wait."""
        granted = step.granted(trainer, request.number)
        if granted is not None:
            return GrantReply(grant=step.as_grant(granted, self._run.manifest.generation))
        if self._passed(step, batch):
            self._waiting.pop(trainer, None)
            return GrantReply(passed=True)
        chosen = self._chosen(step, self._wait_with(step, trainer, batch))
        if chosen is None:
            return GrantReply(wait=WaitForRecord(step=step.step))
        self._waiting.pop(trainer, None)
        lease = next(self._leases)
        step.hand_out(lease, trainer, chosen, request.gradient_scale, request.number)
        self._times[trainer].granted(now_s())
        self._on_grant(step, trainer)
        return GrantReply(grant=step.as_grant(lease, self._run.manifest.generation))

    def _passed(self, step: OpenStep, batch: BatchNumber) -> bool:
        """Return whether a batch needs no trainer any more. The index after the last batch stands for the epoch."""
        window = step.window
        assert window is not None
        plan = window.order.plan(batch[0])
        if plan is None:
            return batch < window.begin
        if batch[1] > plan.num_batches:
            raise ProtocolError(f"epoch {plan.epoch} has {plan.num_batches} batches, got number {batch[1]}")
        if batch[1] == plan.num_batches:
            # Wait for a closing step, so that a checkpoint at the epoch's end includes all of the epoch's steps.
            return batch <= window.begin or (not step.closing and window.is_passed(batch, step.complete_batches))
        is_over = batch < window.begin or batch in window.dropped or window.order.skips(batch)
        return is_over or (batch in window.numbers and batch not in step.free)

    def _wait_with(self, step: OpenStep, trainer: PeerId, batch: BatchNumber) -> WaitingTrainer:
        """Record that a trainer waits with a batch, and how long it leaves batches to other trainers."""
        waiting = self._waiting.get(trainer)
        is_free = batch in step.free
        if waiting is not None and waiting.batch == batch and (waiting.leaves_own or not is_free):
            return waiting
        times = self._times[trainer]
        if is_free:
            leaves_s = leave_to_others(len(step.free), times.least_s, self._others(step, trainer), now_s=now_s())
            waiting = WaitingTrainer(batch, now_s(), leaves_s or 0.0, times.took_s, leaves_own=leaves_s is not None)
            if leaves_s is not None:
                times.num_left += 1
                self._warn_of_slow(trainer, times)
        else:
            patience_s = max(_LEAST_PATIENCE_S, _FIRST_PATIENCE_S if times.took_s is None else times.took_s)
            waiting = WaitingTrainer(batch, now_s(), patience_s, times.took_s)
        self._waiting[trainer] = waiting
        times.has_waited = True
        return waiting

    def _lacks_model(self, step: OpenStep, trainer: PeerId) -> bool:
        """Return whether a trainer cannot compute, because its own server, which it needs, is excluded."""
        return trainer in step.without_server or self._run.lacks_model(trainer)

    def _others(self, step: OpenStep, trainer: PeerId) -> Iterator[tuple[float, float]]:
        """Yield, for each other working trainer, the time when it begins its next batch and the seconds per batch."""
        for peer in self._run.trainers:
            if peer == trainer or peer in self._gone or self._lacks_model(step, peer) or self.leaves_own(peer):
                continue
            times = self._times[peer]
            free_s = now_s() if peer in self._waiting else times.free_s(now_s())
            if free_s is not None and times.newest_s:
                yield free_s, max(times.newest_s)

    def _chosen(self, step: OpenStep, waiting: WaitingTrainer) -> BatchNumber | None:
        """Return the batch that a waiting trainer brings, if any: its own if the step has it, else another lane's."""
        free = step.free
        if waiting.leaves_own and now_s() < waiting.until_s:
            return None
        if waiting.batch in free:  # perhaps only since another batch was dropped
            return waiting.batch
        unattended = {number for number in free if self._is_unattended(step, number)}
        return choose_additional(waiting, free, unattended, self._lanes(step, free), now_s=now_s())

    def _lanes(self, step: OpenStep, free: Sequence[BatchNumber]) -> Iterator[Lane]:
        """Yield the rest of each lane whose trainer is computing a batch and has completed one before."""
        free_by_trainer: dict[PeerId, list[BatchNumber]] = {}
        for number in free:
            free_by_trainer.setdefault(self._owner(step, number), []).append(number)
        for trainer, numbers in free_by_trainer.items():
            times = self._times[trainer]
            free_s = times.free_s(now_s())
            if times.granted_s is not None and times.took_s is not None and free_s is not None:
                yield Lane(numbers[-1], free_s + len(numbers) * times.took_s)

    def _is_unattended(self, step: OpenStep, number: BatchNumber) -> bool:
        """Return whether the trainer in whose lane a batch is will not bring it."""
        owner = self._owner(step, number)
        waiting = self._waiting.get(owner)
        leaves_batch = waiting is not None and (number < waiting.batch or waiting.leaves_own)
        return leaves_batch or owner in self._gone or self._lacks_model(step, owner)

    def _owner(self, step: OpenStep, number: BatchNumber) -> PeerId:
        """Return the trainer whose lane has a batch, as far as the epoch's order is known here."""
        assert step.window is not None
        plan = step.window.order.plan(number[0])
        lanes = lanes_of(self._run.trainers, self._run.manifest.lead)
        return owner_of(0 if plan is None else plan.begin, number[1], lanes)

    # ------------------------------------------------------------------ batches without numbers

    def _grant(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> Grant | None:
        """Grant a place, the same one to a repeated request; None if the step is full."""
        lease = step.granted(trainer, request.number)
        if lease is None:
            lease = next(self._leases)
            if not step.grant(lease, trainer, request.num_samples, request.gradient_scale, request.number):
                return None
        self._on_grant(step, trainer)
        return step.as_grant(lease, self._run.manifest.generation)

    def _fills(self, request: GrantRequest) -> bool:
        """Return whether a batch alone fills a step."""
        target = self._run.manifest.settings.target_batch_size
        return target is not None and request.num_samples >= target

    def _is_beyond(self, step: OpenStep) -> bool:
        """Return whether the run ends before this step."""
        max_steps = self._run.manifest.max_steps
        return max_steps is not None and step.step >= max_steps

    def _warn_of_slow(self, trainer: PeerId, times: BatchTimes) -> None:
        if times.num_left >= _MANY_LEFT and trainer not in self._warned_slow:
            self._warned_slow.add(trainer)
            _log.warning(
                "Trainer %s gets few batches: its newest one took %.2g s, and other trainers complete a step sooner "
                "without it. Raise `target_batch_size`, or lower the batch size of all trainers.",
                trainer,
                times.took_s,
            )

    def _warn_of_large(self, request: GrantRequest) -> None:
        target = self._run.manifest.settings.target_batch_size
        if target is not None and request.num_samples > target and not self._warned_large:
            self._warned_large = True
            _log.warning("A batch of %d samples fills a step: `target_batch_size` is %d.", request.num_samples, target)
