"""Places in the open step: who is granted one, who waits for one in the step after, and who has it already."""

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
    choose_besides,
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

_LEAST_PATIENCE_S: Final = 0.5
_MANY_LEFT: Final = 10  # batches in a row that a trainer left to others: its user should know
_FIRST_PATIENCE_S: Final = 5.0  # with a trainer of which no batch was seen yet: compilers and caches are cold


def first_lease(term: Term) -> int:
    """First lease of a coordinator: none of another coordinator's is taken for one of its own."""
    return ((term[0] - 1) << 32) + 1


class LeaseTable:
    """Grants places in the open step, and remembers who waits for one."""

    def __init__(
        self,
        run: RunState,
        leases: Iterator[int],
        on_grant: Callable[[OpenStep, PeerId], None],
        gone: Collection[PeerId],
    ) -> None:
        self._run = run
        self._leases = leases  # their numbers
        self._on_grant = on_grant  # called with a step and the trainer that has a place in it from now on
        self._gone = gone  # trainers that do not answer
        self._waiting: dict[PeerId, GrantRequest] = {}  # who found the step full, first come first
        self._reserved: dict[PeerId, tuple[GrantRequest, Grant]] = {}  # their places in the step after
        self._idle: dict[PeerId, WaitingTrainer] = {}  # who was told to wait with a batch of another step
        self._times: defaultdict[PeerId, BatchTimes] = defaultdict(BatchTimes)
        self._warned_large = False
        self._warned_slow: set[PeerId] = set()

    def grant(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> GrantReply:
        """Grant a trainer a place in the open step, or say what to wait for; raise ProtocolError if no step has one."""
        if self._is_beyond(step):
            return GrantReply(over=True)
        if request.step < step.step:  # a place may be kept for it, and it must know the record before that step first
            return GrantReply(wait=WaitForRecord(step=step.step - 1))
        scale = self._run.loss_scale
        # While the step's record is applied, this peer has the next step's scale already: who asks now has to wait.
        may_change = self._run.scaling is not None and step.closing
        if scale not in (None, request.gradient_scale) and not may_change:
            raise ProtocolError(
                f"all trainers of a run scale their losses alike, by {scale:g} in step {step.step}; got "
                f"{request.gradient_scale:g}"
            )
        if (request.batch is None) != (step.window is None):
            raise ProtocolError(
                f"all batches of step {step.step} are named by epoch and index, or none is; got {request.batch}"
            )
        if request.batch is not None:
            return self._ask_for(step, trainer, request, request.batch)
        asked, grant = self._reserved.get(trainer, (None, None))
        if grant is not None and asked == replaced(request, step=step.step - 1):
            del self._reserved[trainer]
            return GrantReply(grant=grant)
        grant = self._grant(step, trainer, request)
        if grant is None:
            self._waiting[trainer] = request
            return GrantReply(wait=WaitForRecord(step=step.step))
        self._waiting.pop(trainer, None)
        self._warn_of_large(request)
        return GrantReply(grant=grant)

    def ahead(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> Grant | None:
        """Grant a place for a batch that its trainer has not begun, if there is one now."""
        # It may be asked for a second time when the batch has long been given up: nobody would ever take that place.
        if self._is_beyond(step) or (trainer, request.number) in step.given_up:
            return None
        with contextlib.suppress(ProtocolError):  # which it will get when it asks for one again
            grant = self._grant(step, trainer, request)
            if grant is not None:
                self._warn_of_large(request)
            return grant
        return None

    def opened(self, step: OpenStep) -> OpenStep:
        """Grant places in a new step to those who wait."""
        self._idle = {}
        lead = self._run.manifest.lead
        # The lead comes first, so that it waits for one record only; but where a batch is a step, nobody else would
        # ever have a place: there they take turns.
        waiting = sorted(self._waiting.items(), key=lambda item: item[0] != lead or self._fills(item[1]))
        self._waiting, self._reserved = {}, {}
        for trainer, request in () if self._is_beyond(step) else waiting:
            with contextlib.suppress(ProtocolError):  # which it will get when it asks again
                grant = self._grant(step, trainer, request)
                if grant is None:
                    self._waiting[trainer] = replaced(request, step=step.step)
                else:
                    self._reserved[trainer] = (request, grant)
        return step

    # ------------------------------------------------------------------ where batches have numbers

    # A step takes certain batches, and a trainer asks with the number of the one that it has read. Who has to wait
    # brings besides what was in the lane of a trainer that is gone, or that has not come to it after a while.

    def batch_ended(self, trainer: PeerId) -> None:
        """Enter that a trainer's batch is through, or withdrawn, and how long that took."""
        self._times[trainer].ended(now_s())

    def would_answer(self, step: OpenStep, trainer: PeerId) -> bool:
        """Return whether a trainer that waits would hear something else by now."""
        waiting = self._idle.get(trainer)
        if trainer in step.without:
            return False
        if waiting is None:
            return not step.closing
        if step.window is None:
            return False
        return self._chosen(step, waiting) is not None or self._passed(step, waiting.batch)

    def patience_s(self, trainer: PeerId) -> float | None:
        """Seconds for which a trainer still leaves others' batches to them, or its own to others."""
        waiting = self._idle.get(trainer)
        return None if waiting is None else max(0.0, waiting.until_s - now_s())

    def leaves_own(self, trainer: PeerId) -> bool:
        """Return whether a trainer waits because others are through sooner with its batch."""
        waiting = self._idle.get(trainer)
        return waiting is not None and waiting.leaves_own

    def owed_by(self, step: OpenStep) -> set[PeerId]:
        """The trainers in whose lanes are batches of the step that nobody has."""
        return {self._owner(step, number) for number in step.free}

    def owes(self, step: OpenStep, trainer: PeerId) -> bool:
        """Return whether others wait for a batch that it would bring."""
        return any(peer != trainer for peer in self._idle) and trainer in self.owed_by(step)

    def _ask_for(self, step: OpenStep, trainer: PeerId, request: GrantRequest, batch: BatchNumber) -> GrantReply:
        before = step.granted(trainer, request.number)
        if before is not None:
            return GrantReply(grant=self._as_grant(step, before))
        if self._passed(step, batch):
            self._idle.pop(trainer, None)
            return GrantReply(passed=True)
        chosen = self._chosen(step, self._wait_with(step, trainer, batch))
        if chosen is None:
            return GrantReply(wait=WaitForRecord(step=step.step))
        self._idle.pop(trainer, None)
        lease = next(self._leases)
        step.hand_out(lease, trainer, chosen, request.gradient_scale, request.number)
        self._times[trainer].granted(now_s())
        self._on_grant(step, trainer)
        return GrantReply(grant=self._as_grant(step, lease))

    def _passed(self, step: OpenStep, batch: BatchNumber) -> bool:
        """Return whether nothing is to be done for a batch; or for any of an epoch, if that is its end."""
        window = step.window
        assert window is not None
        plan = window.order.plan(batch[0])
        if plan is None:
            return batch < window.begin
        if batch[1] > plan.num_batches:
            raise ProtocolError(f"epoch {plan.epoch} has {plan.num_batches} batches, got number {batch[1]}")
        if batch[1] == plan.num_batches:
            # A step that closes is waited for: what follows an epoch's end, a checkpoint say, shall miss no step of it.
            return batch <= window.begin or (not step.closing and window.is_passed(batch, step.batches_through))
        before = batch < window.begin or batch in window.dropped
        return before or (batch in window.numbers and batch not in step.free)

    def _wait_with(self, step: OpenStep, trainer: PeerId, batch: BatchNumber) -> WaitingTrainer:
        """Enter that a trainer has a batch in hand, and how long it leaves others' batches to them, or its own."""
        waiting = self._idle.get(trainer)
        own = batch in step.free
        if waiting is not None and waiting.batch == batch and (waiting.leaves_own or not own):
            return waiting
        times = self._times[trainer]
        if own:
            leaves_s = leave_to_others(len(step.free), times.believed_s, self._others(step, trainer), now_s=now_s())
            waiting = WaitingTrainer(batch, now_s(), leaves_s or 0.0, times.took_s, leaves_own=leaves_s is not None)
            if leaves_s is not None:
                times.num_left += 1
                self._warn_of_slow(trainer, times)
        else:
            patience_s = max(_LEAST_PATIENCE_S, _FIRST_PATIENCE_S if times.took_s is None else times.took_s)
            waiting = WaitingTrainer(batch, now_s(), patience_s, times.took_s)
        self._idle[trainer] = waiting
        times.has_waited = True
        return waiting

    def lacks_model(self, step: OpenStep, trainer: PeerId) -> bool:
        """Return whether a trainer's batches need its own server, which takes no part in the step or in the run."""
        return trainer in step.without or self._run.lacks_model(trainer)

    def _others(self, step: OpenStep, trainer: PeerId) -> Iterator[tuple[float, float]]:
        """When each other trainer that is at work begins another batch, and how long that takes it."""
        for peer in self._run.trainers:
            if peer == trainer or peer in self._gone or self.lacks_model(step, peer) or self.leaves_own(peer):
                continue
            times = self._times[peer]
            free_s = now_s() if peer in self._idle else times.free_s(now_s())
            if free_s is not None and times.newest_s:
                yield free_s, max(times.newest_s)

    def _chosen(self, step: OpenStep, waiting: WaitingTrainer) -> BatchNumber | None:
        """The batch that a waiting trainer brings, if any: its own where it is in the step, else one of others."""
        free = step.free
        if waiting.leaves_own and now_s() < waiting.until_s:
            return None
        if waiting.batch in free:  # since another one was dropped, perhaps
            return waiting.batch
        unattended = {number for number in free if self._is_unattended(step, number)}
        return choose_besides(waiting, free, unattended, self._lanes(step, free), now_s=now_s())

    def _lanes(self, step: OpenStep, free: Sequence[BatchNumber]) -> Iterator[Lane]:
        """List the batches still to come of each trainer that computes one now, and did so before."""
        left: dict[PeerId, list[BatchNumber]] = {}
        for number in free:
            left.setdefault(self._owner(step, number), []).append(number)
        for trainer, numbers in left.items():
            times = self._times[trainer]
            free_s = times.free_s(now_s())
            if times.granted_s is not None and times.took_s is not None and free_s is not None:
                yield Lane(numbers[-1], free_s + len(numbers) * times.took_s)

    def _is_unattended(self, step: OpenStep, number: BatchNumber) -> bool:
        owner = self._owner(step, number)
        idle = self._idle.get(owner)
        is_left = idle is not None and (number < idle.batch or idle.leaves_own)
        return is_left or owner in self._gone or self.lacks_model(step, owner)

    def _owner(self, step: OpenStep, number: BatchNumber) -> PeerId:
        """The trainer in whose lane a batch is, as far as that is known here."""
        assert step.window is not None
        plan = step.window.order.plan(number[0])
        lanes = lanes_of(self._run.trainers, self._run.manifest.lead)
        return owner_of(0 if plan is None else plan.begin, number[1], lanes)

    # ------------------------------------------------------------------ where they have none

    def _grant(self, step: OpenStep, trainer: PeerId, request: GrantRequest) -> Grant | None:
        lease = step.granted(trainer, request.number)
        if lease is None:
            lease = next(self._leases)
            if not step.grant(lease, trainer, request.num_samples, request.gradient_scale, request.number):
                return None
        self._on_grant(step, trainer)
        return self._as_grant(step, lease)

    def _as_grant(self, step: OpenStep, lease: int) -> Grant:
        generation = self._run.manifest.generation
        first, weight, batch, num_samples = step.place_of(lease)
        return Grant(
            lease=lease,
            generation=generation,
            step=step.step,
            first=first,
            weight=weight,
            batch=batch,
            samples=num_samples,
        )

    def _fills(self, request: GrantRequest) -> bool:
        target = self._run.manifest.settings.target_batch_size
        return target is not None and request.num_samples >= target

    def _is_beyond(self, step: OpenStep) -> bool:
        max_steps = self._run.manifest.max_steps
        return max_steps is not None and step.step >= max_steps

    def _warn_of_slow(self, trainer: PeerId, times: BatchTimes) -> None:
        if times.num_left >= _MANY_LEFT and trainer not in self._warned_slow:
            self._warned_slow.add(trainer)
            _log.warning(
                "Trainer %s brings few batches: its newest one took %.2g s, and the others end a step sooner without "
                "it. Raise `target_batch_size`, or lower the batch size of all trainers.",
                trainer,
                times.took_s,
            )

    def _warn_of_large(self, request: GrantRequest) -> None:
        target = self._run.manifest.settings.target_batch_size
        if target is not None and request.num_samples > target and not self._warned_large:
            self._warned_large = True
            _log.warning("A batch of %d samples is a step: `target_batch_size` is %d.", request.num_samples, target)
