"""The coordinator, which answers trainers and closes the open step when all its batches are through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from lightning_swarm.coordinator.commit import StepCommit
from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.membership.moves import PlannedMoves, balance_of
from lightning_swarm.coordinator.membership.servers import ServerMembership
from lightning_swarm.coordinator.server_calls import ServerCalls, dismiss
from lightning_swarm.coordinator.snapshot_schedule import SnapshotSchedule
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.step_state import StepOutcome
from lightning_swarm.coordinator.takeover import appoint
from lightning_swarm.coordinator.trainer_handlers import TrainerHandlers
from lightning_swarm.coordinator.trainer_leases import LeaseExpiry
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import NotCoordinator, StageLost, StepError, SwarmError
from lightning_swarm.protocol.messages.step import Record

_log = logging.getLogger(__name__)


class Coordinator:
    """A role of one peer, which answers trainers and has the open step closed.

    `on_deposed` is called when another peer coordinates, `step_aside` when another one should, for this one is to move.
    """

    def __init__(
        self, context: CoordinatorContext, *, on_deposed: Callable[[], None], step_aside: Callable[[], None]
    ) -> None:
        run = context.run
        self.context = context
        self._limits = context.limits
        self._transport = context.transport
        self._run = run
        self._events = context.events
        self._spawn = context.spawn
        self._on_deposed = on_deposed
        self._members = {*run.servers, *run.trainers}  # since the newest record
        self.deposed = False  # another peer coordinates by now; this role is to be retired
        self.step_state = context.step_state
        balance = balance_of(run.manifest, now_s=now_s())
        self.server_membership = ServerMembership(context, balance)
        self.server_membership.on_restarted_lead = self._note_restarted_lead
        self._servers = ServerCalls(context)
        self._snapshots = SnapshotSchedule(context)
        self._lease_expiry = LeaseExpiry(
            context,
            on_change=self._on_change,
            owes=lambda trainer: self.trainers.leases.owes(self.step_state.open, trainer),
        )
        self.trainers = TrainerHandlers(context, self._servers, self._lease_expiry, on_change=self._on_change)
        moves = PlannedMoves(context, self.server_membership, balance, step_aside=step_aside)
        self._step_commit = StepCommit(
            context,
            self._servers,
            self.server_membership,
            self._snapshots,
            moves,
            self.trainers,
            fence=self._lease_expiry.fence,
        )

    def _note_restarted_lead(self) -> None:
        self.trainers.lead.note_restart()

    async def start(self) -> None:
        """Begin to answer."""
        await self.context.tasks.start()
        self.trainers.answer()
        step, due = self.step_state.open, self.step_state.due
        if step.closing:
            self.step_state.closing_s = now_s()
        for trainer in step.missing():
            self._lease_expiry.watch(trainer)
        if due is not None:
            self._spawn(self._guarded(self._decide_due(due)))
        self._finish_if_ready(step)
        self._look_after()

    def _look_after(self) -> None:
        self._spawn(self._end_without_lead())
        self._spawn(self.trainers.membership.look_after())

    async def retire(self) -> None:
        """Stop because another peer coordinates; callers are told to ask that one. Raises what a task raised."""
        await self.trainers.changes.shut_down(self.context.not_any_more())
        await self.context.tasks.close()

    async def close(self, *, over: bool) -> None:
        """Stop. Raises what a task raised.

        With `over` the lead has ended the run; trainers that hold no stage are told so here, for it may not reach them.
        """
        only_train = {*self._run.trainers, *self.trainers.membership.waiting} - {*self._run.servers}
        only_train -= {self._run.manifest.lead, self._transport.peer_id}
        try:
            await self.server_membership.close()
            await dismiss(self._transport, only_train if over else (), timeout=self._limits.leave_timeout)
        finally:
            await self.context.tasks.close()

    async def enter_generation(self) -> None:
        """Begin with the next run generation: a step that closes is given up, and its callers are told."""
        await self.context.restart_tasks()
        self.step_state.enter_generation(self._run.manifest)
        self._servers.enter_generation()
        self.server_membership.enter_generation()
        self._snapshots.enter_generation()
        self._step_commit.enter_generation()
        self._lease_expiry.enter_generation()
        await self.trainers.enter_generation()
        self._look_after()

    async def _end_without_lead(self) -> None:
        """Have another peer lead if the lead is gone, or else end the run for all.

        Peers that are not told here are told by the next coordinator.
        """
        own = self._transport.peer_id
        if self._run.manifest.lead == own:
            return
        silence_s, timeout = self._limits.silence_timeout, self._limits.leave_timeout
        reason = ""
        while not reason:
            reason = await self.trainers.lead.until_gone(
                self._transport,
                silence_s=silence_s,
                appoint=partial(appoint, self._transport, self._run, timeout=silence_s),
                appoint_after_s=self._limits.revive_timeout,
            )
            if self._run.manifest.lead == own:  # it takes the run over itself
                return
        await self.trainers.fail(reason)
        others = {
            *self._run.servers,
            *self._run.trainers,
            *self.server_membership.waiting,
            *self.trainers.membership.waiting,
        }
        others.discard(own)
        await dismiss(self._transport, others, broken_off=reason, timeout=timeout)
        await dismiss(self._transport, [own], broken_off=reason, timeout=timeout)  # last: with it ends this role

    # ------------------------------------------------------------------ the step's end

    async def _on_change(self, step: OpenStep) -> None:
        """End the step if it waited only for a batch that is through now, or will not come."""
        if step is self.step_state.open:
            self._finish_if_ready(step)
        if not step.closing:
            await self.trainers.changes.notify()  # who waits for the record may have a place again

    def _finish_if_ready(self, step: OpenStep) -> None:
        """Have the open step decided, and the next one opened; at once where its record may be late."""
        books = self.step_state
        if not step.ready or books.finishing or books.due is not None:
            return
        if self._may_be_late(step):
            self._spawn(
                self._guarded(self._decide_due(books.postpone(self.trainers.leases.opened(books.following(step)))))
            )
        else:
            books.finishing = True
            self._spawn(self._guarded(self._finish(step)))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except NotCoordinator as error:
            _log.info("Step %d is another's to close: %s", self._run.version, error)
            self.deposed = True
            self._on_deposed()
            await self.trainers.changes.shut_down(error)
        except SwarmError as error:
            await self.trainers.fail(str(error), StageLost if isinstance(error, StageLost) else StepError)
        except Exception as error:
            # A bug: it ends this server, and whoever waits shall not wait for ever.
            await self.trainers.fail(f"internal error: {type(error).__name__}: {error}")
            raise

    async def _finish(self, step: OpenStep) -> None:
        """Decide the open step, and open the next."""
        books = self.step_state
        record: Record | None = None
        while record is None and step.ready:
            record = await self._step_commit.finish(step, books.selection(self._run), books.reselected)
        if record is None:
            books.finishing = False  # it takes batches again
        else:
            books.close_step(self._outcome(step, record))
            books.open = self.trainers.leases.opened(books.following(step))
        await self.trainers.changes.notify()  # who waits for the record, or has a place again

    async def _decide_due(self, step: OpenStep) -> None:
        """Decide a step while the one after it takes batches."""
        await self.trainers.changes.notify()
        record = await self._step_commit.finish(step, self._run.selection, None, late=True)
        assert record is not None, "a step that is late takes no batches in place of those that were struck"
        self.step_state.outcome, self.step_state.due = self._outcome(step, record), None
        self._finish_if_ready(self.step_state.open)
        await self.trainers.changes.notify()

    def _may_be_late(self, step: OpenStep) -> bool:
        """Return whether the record may come while the next step takes batches.

        It changes nothing of who is in the run then: what that step's sums hold is theirs who are.
        """
        manifest = self._run.manifest
        is_last = manifest.max_steps is not None and step.step + 1 >= manifest.max_steps
        if not manifest.settings.delay_optimizer_step or is_last or self.step_state.reselected is not None:
            return False
        return not self._step_commit.wants_changes()

    def _outcome(self, step: OpenStep, record: Record) -> StepOutcome:
        lead = self._run.manifest.lead
        self.trainers.lead.decided(step.step)
        # Who has just gone is kept for one step more, until the lead has this record.
        before, self._members = self._members, {*self._run.servers, *self._run.trainers}
        self._events.keep_only(before | self._members)
        return StepOutcome(record, step.logs_for(lead), step.metrics_for(lead))
