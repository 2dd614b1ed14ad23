"""The coordinator, which answers trainers and closes the open step when all its batches are complete."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from lightning_swarm.coordinator.commit import StepCommit
from lightning_swarm.coordinator.context import CoordinatorContext, StepOutcome
from lightning_swarm.coordinator.membership.moves import PlannedMoves, balancer_of
from lightning_swarm.coordinator.membership.servers import Joiners, ServerMembership
from lightning_swarm.coordinator.membership.trainers import LeaseExpiry
from lightning_swarm.coordinator.server_calls import ServerCalls, dismiss
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.trainer_handlers import TrainerHandlers
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import NotCoordinator, StageLost, StepError, SwarmError
from lightning_swarm.protocol.messages.run import NO_CHANGE
from lightning_swarm.protocol.messages.step import Record

_log = logging.getLogger(__name__)


class Coordinator:
    """One peer's role as coordinator, over all run generations."""

    def __init__(self, context: CoordinatorContext, *, on_deposed: Callable[[], None]) -> None:
        self.on_deposed = on_deposed  # called when another peer coordinates
        self.balancer = balancer_of(context.run.manifest, now_s=now_s())
        self.joiners = Joiners()
        self._is_over = False  # the role has ended
        self.deposed = False  # another peer coordinates by now; this role is to be retired
        self.generation = CoordinatorGeneration(context, self)

    async def retire(self) -> None:
        """Stop because another peer coordinates, and fail held calls with `NotCoordinator`. Raises a task's error."""
        self._is_over, context = True, self.generation.context
        await context.changes.shut_down(context.not_coordinator_error())
        await context.tasks.close()

    async def close(self, *, over: bool) -> None:
        """Stop, and notify peers that the lead may not reach. `over`: the run has ended. Raises a task's error."""
        self._is_over = True
        try:
            await self.generation.dismiss_others(over=over)
        finally:
            await self.generation.context.tasks.close()

    async def enter_generation(self) -> None:
        """Begin the next run generation: abandon a step that closes, and notify its callers."""
        before = self.generation.context
        self.joiners.refuse_all()
        self.generation = CoordinatorGeneration(before.next_generation(), self)
        await before.end_generation()
        if not self._is_over:  # another peer may coordinate by now
            await self.generation.start()


class CoordinatorGeneration:
    """The part of the role that lasts one run generation: answers trainers, and has the open step closed."""

    # A rollback replaces the whole object. Only the `role` outlives it, with the balancer and the joiners.
    def __init__(self, context: CoordinatorContext, role: Coordinator) -> None:
        self.context, self._role = context, role
        self.step_state = context.step_state
        self._run, self._transport = context.run, context.transport
        self._timeout = context.limits.leave_timeout
        self._spawn = context.spawn
        self.lease_expiry = LeaseExpiry(
            context,
            on_change=self._on_change,
            # Whether other trainers wait for this trainer's batch.
            owes=lambda trainer: self.trainers.leases.owes(self.step_state.open, trainer),
        )
        servers = ServerCalls(context)
        self.trainers = TrainerHandlers(context, servers, self.lease_expiry, on_change=self._on_change)
        self.server_membership = ServerMembership(
            context, role.balancer, role.joiners, on_restarted_lead=self.trainers.lead.note_restart
        )
        self._step_commit = StepCommit(
            context,
            servers,
            self.server_membership,
            PlannedMoves(context, self.server_membership, role.balancer),
            self.trainers,
            fence=self.lease_expiry.fence,  # makes servers abandon calls of struck batches
        )

    async def start(self) -> None:
        """Begin to answer, and continue the steps where another coordinator left them."""
        await self.context.tasks.start()
        self.server_membership.answer()
        self.trainers.answer()
        step, late_step = self.step_state.open, self.step_state.late_step
        if step.closing:
            self.step_state.closing_s = now_s()
        for trainer in step.missing():
            self.lease_expiry.watch(trainer)
        if late_step is not None:
            self._spawn(self._guarded(self._decide_late(late_step)))
        self._finish_if_ready(step)
        self._spawn(self._replace_lead_or_end())
        self._spawn(self.trainers.membership.check_liveness())

    async def dismiss_others(self, *, over: bool) -> None:
        """Notify joiners that the role ends, and, if the run is `over`, trainers that hold no stage."""
        only_train = {*self._run.trainers, *self.trainers.membership.waiting} - {*self._run.servers}
        only_train -= {self._run.manifest.lead, self._transport.peer_id}
        await dismiss(self._transport, self.server_membership.waiting, timeout=self._timeout)
        await dismiss(self._transport, only_train if over else (), timeout=self._timeout)

    async def _replace_lead_or_end(self) -> None:
        """Have another peer lead if the lead is gone, or else end the run for all."""
        me = self._transport.peer_id
        if self._run.manifest.lead == me:
            return
        reason = ""
        while not reason:
            reason = await self.trainers.lead.watch_and_replace()
            if self._run.manifest.lead == me:  # this peer was appointed
                return
        await self.trainers.fail(reason)
        waiting = {*self.server_membership.waiting, *self.trainers.membership.waiting}
        others = {*self._run.servers, *self._run.trainers, *waiting} - {me}
        # The next coordinator notifies peers that this one does not reach.
        await dismiss(self._transport, others, broken_off=reason, timeout=self._timeout)
        await dismiss(self._transport, [me], broken_off=reason, timeout=self._timeout)  # last: it ends this role

    # ------------------------------------------------------------------ the step's end

    async def _on_change(self, step: OpenStep) -> None:
        """End the step if it waited only for a batch that is complete now, or was struck."""
        if step is self.step_state.open:
            self._finish_if_ready(step)
        if not step.closing:
            await self.context.changes.notify()  # trainers that wait for the record may get a place again

    def _finish_if_ready(self, step: OpenStep) -> None:
        """Have the open step decided, and open the next one afterwards or, if the record may be late, at once."""
        state = self.step_state
        if not step.ready or state.finishing or state.late_step is not None:
            return
        if self._may_be_late(step):
            state.late_step, step.sealed = step, True  # sealed: it takes no more batches
            self._open_next(step)
            self._spawn(self._guarded(self._decide_late(step)))
        else:
            state.finishing = True
            self._spawn(self._guarded(self._finish(step)))

    def _open_next(self, step: OpenStep) -> None:
        state = self.step_state
        # Reset these before `opened` grants places: a grant may fill the step, and set `closing_s`.
        state.change, state.closing_s = NO_CHANGE, None
        state.open = self.trainers.leases.opened(state.following(step, self._run))
        state.finishing = False

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that decides a step. An error deposes this coordinator, or fails all calls that wait."""
        try:
            await work
        except NotCoordinator as error:
            _log.info("Another peer coordinates, so it closes step %d: %s", self._run.version, error)
            self._role.deposed = True
            self._role.on_deposed()
            await self.context.changes.shut_down(error)
        except SwarmError as error:
            await self.trainers.fail(str(error), StageLost if isinstance(error, StageLost) else StepError)
        except Exception as error:
            # This is a bug, and ends this server. Held calls must not wait forever.
            await self.trainers.fail(f"internal error: {type(error).__name__}: {error}")
            raise

    async def _finish(self, step: OpenStep) -> None:
        state = self.step_state
        record: Record | None = None
        while record is None and step.ready:  # no record: batches were struck; try again if others complete the step
            record = await self._step_commit.finish(step, state.selection(self._run), state.change)
        if record is None:
            state.finishing = False  # it takes batches again
        else:
            state.outcome = self._note_outcome(step, record)
            self._open_next(step)
        await self.context.changes.notify()  # trainers wait for the record, or may get a place again

    async def _decide_late(self, step: OpenStep) -> None:
        """Decide a step while the one after it takes batches."""
        await self.context.changes.notify()
        record = await self._step_commit.finish(step, self._run.selection, NO_CHANGE, late=True)
        assert record is not None, "a late step takes no new batches for struck ones, so it must be decided"
        self.step_state.outcome, self.step_state.late_step = self._note_outcome(step, record), None
        self._finish_if_ready(self.step_state.open)
        await self.context.changes.notify()

    def _may_be_late(self, step: OpenStep) -> bool:
        """Return whether the record may come while the next step takes batches."""
        manifest = self._run.manifest
        is_last = manifest.max_steps is not None and step.step + 1 >= manifest.max_steps
        if not manifest.settings.delay_optimizer_step or is_last or self.step_state.change != NO_CHANGE:
            return False
        # A late record must not change the membership, because the present members hold the next step's sums.
        return not self._step_commit.wants_changes()

    def _note_outcome(self, step: OpenStep, record: Record) -> StepOutcome:
        """Drop state of the lead and of events that an applied record outdates; return the step's outcome."""
        lead, context = self._run.manifest.lead, self.context
        self.trainers.lead.note_decided(step.step)
        # Events of a peer that has just left are kept for one more step, until the lead has this record.
        before, context.members = context.members, {*self._run.servers, *self._run.trainers}
        context.events.keep_only(before | context.members)
        return StepOutcome(record, step.logs_for(lead), step.metrics_for(lead))
