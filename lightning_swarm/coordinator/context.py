"""State that the parts of one coordinator share in one run generation: its steps, services, and held calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from lightning_swarm.coordinator.consensus import Proposer
from lightning_swarm.coordinator.membership.invitations import InvitationUses
from lightning_swarm.coordinator.step.data_order import DataOrder
from lightning_swarm.coordinator.step.leases import first_lease
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.oversight import RunOversight
from lightning_swarm.core.errors import Busy, ConfigError, NotCoordinator, ProtocolError, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol.events import EventLog, OutageWait
from lightning_swarm.protocol.messages.batches import LoggedValue
from lightning_swarm.protocol.messages.run import NO_CHANGE, BatchNumber, EpochPlan, Selection, StepChange
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState

_MAX_FALSE_BATCHES: Final = 3  # struck batches of a trainer, before it is excluded


@dataclass(eq=False)
class StepOutcome:
    """The newest record, with other trainers' logs and metrics for the lead."""

    record: Record | None = None  # None: the generation begins
    logs: list[LoggedValue] = field(default_factory=list)  # other trainers' values for the counted batches
    metrics: dict[int, Message] = field(default_factory=dict)  # place of such a batch -> its metrics

    @property
    def step(self) -> int:
        """Step of the record; -1: there is none."""
        return -1 if self.record is None else self.record.step


@dataclass(eq=False)
class StepState:
    """One coordinator's state of the steps that are not decided yet."""

    open: OpenStep
    begun: bool = False  # the lead asked for its first place, in this generation or before
    change: StepChange = NO_CHANGE  # the change with which the open step began
    outcome: StepOutcome = field(default_factory=StepOutcome)  # outcome of the newest decided step
    late_step: OpenStep | None = None  # only with delayed steps: the step before the open one, until its record comes
    finishing: bool = False  # a task of the coordinator decides the open step
    closing_s: float | None = None  # beginning of the wait for the open step's last batches
    order: DataOrder = field(default_factory=DataOrder)  # order of the batches, as far as the lead has sent it

    @classmethod
    def of(cls, run: RunState, *, begun: bool = False) -> StepState:
        """Make the state of a new run generation."""
        target_batch_size = run.manifest.settings.target_batch_size
        return cls(OpenStep(run.manifest.first_step, target_batch_size, gradient_scale=run.loss_scale), begun)

    def selection(self, run: RunState) -> Selection | None:
        """Return the selection that the open step trains."""
        return self.change.selection or run.selection

    def plan(self, plan: EpochPlan, position: BatchNumber) -> None:
        """Add the order of an epoch. The first order fixes the open step's batches, from `position` on."""
        is_first = self.open.window is None
        if is_first:
            self.open.check_numbered()
            if position > (plan.epoch, plan.num_batches) and position[0] == plan.epoch:
                raise ProtocolError(
                    f"epoch {plan.epoch} has {plan.num_batches} batches, so no step begins at batch {position[1]}"
                )
        self.order.add(plan)
        if is_first:
            self.open.plan(self.order, position)

    def following(self, step: OpenStep, run: RunState) -> OpenStep:
        """Make the step after a step that is decided, or whose batches are all complete."""
        opened = OpenStep(step.step + 1, step.target_batch_size, gradient_scale=run.loss_scale)
        if step.window is not None:
            begin = step.window.end
            opened.plan(self.order, begin)
            self.order.forget_before(begin[0])
        return opened

    def find(self, step: int) -> OpenStep | None:
        """Return a step by its number, if it is not decided yet."""
        steps = (self.late_step, self.open)
        return next((known for known in steps if known is not None and known.step == step), None)


class ChangeNotifier:
    """Holds calls until the state changes, or the coordinator stops; callers wait for `timeout` seconds."""

    def __init__(self, timeout: float) -> None:
        self._hold_s = timeout / 2  # shorter than the caller waits
        self._condition = asyncio.Condition()
        self._is_over = False
        self._failure: SwarmError | None = None  # error for all callers, once the coordinator has stopped

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self._failure is not None:
            raise self._failure

    async def fail(self, error: SwarmError) -> None:
        """Fail calls with an error from now on; the first error stays."""
        self._failure = self._failure or error
        await self.notify()

    async def shut_down(self, error: SwarmError) -> None:
        """Fail calls with an error from now on, in place of any earlier error."""
        self._failure = error
        await self.notify()

    async def end_generation(self) -> None:
        """Release all calls, because the run is in its next generation; callers learn this when they ask again."""
        self._is_over, self._failure = True, None  # errors of this generation do not concern the next one
        await self.notify()

    async def notify(self) -> None:
        """Have all held calls check their conditions."""
        async with self._condition:
            self._condition.notify_all()

    async def until(self, reached: Callable[[], bool], *, recheck_s: float | None = None) -> bool:
        """Wait until `reached`; return False if the generation or the time of a held call ended. Raises the failure."""
        # `reached` is checked at each change, and once more after `recheck_s` seconds.
        try:
            async with asyncio.timeout(self._hold_s):
                if recheck_s is not None and recheck_s < self._hold_s:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(recheck_s):
                            await self._until(reached)
                await self._until(reached)
        except TimeoutError:
            return False
        self.check()
        return not self._is_over

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with self._condition:
            await self._condition.wait_for(lambda: reached() or self._is_over or self._failure is not None)

    async def next(self, *, until_s: float) -> None:
        """Wait for the next change, or that time on the loop's clock."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s), self._condition:
                await self._condition.wait()


@dataclass(eq=False)
class CoordinatorContext:
    """The run, the network, the limits, and one coordinator's state of one run generation."""

    # A rollback replaces the whole object, and all parts that hold it. A call of the old generation that is still under
    # way continues with the old objects, and begins nothing in the new generation.
    transport: Transport
    run: RunState  # state of the coordinator's own server, which applies the records
    proposer: Proposer
    step_state: StepState
    limits: Limits
    events: EventLog
    step_aside: Callable[[], asyncio.Task[None]]  # hands the role over to another server
    oversight: RunOversight
    # Server -> kind of its machine, see `FreezeReply.arithmetic`.
    machine_kinds: dict[PeerId, str] = field(default_factory=dict)
    # Requests carry this number, not the number in `run`: a call that is under way during a rollback must not be taken
    # for a call of the next generation.
    generation: int = field(init=False)
    tasks: TaskOwner = field(init=False, default_factory=TaskOwner)
    changes: ChangeNotifier = field(init=False)
    outage: OutageWait = field(init=False)
    leases: Iterator[int] = field(init=False)  # numbers of the leases that this coordinator grants
    invitations: InvitationUses = field(init=False)
    # Trainer -> number of its struck batches with a wrong weight, or with false receipts.
    false_batches: Counter[PeerId] = field(init=False, default_factory=Counter)
    members: set[PeerId] = field(init=False)  # servers and trainers after the newest record

    def __post_init__(self) -> None:
        self.generation = self.run.manifest.generation
        self.changes = ChangeNotifier(self.limits.call_timeout)
        self.outage = OutageWait(self.events, stage_timeout=self.limits.stage_timeout)
        self.leases = itertools.count(first_lease(self.proposer.term))
        self.invitations = InvitationUses(self.transport, self.run)
        self.members = {*self.run.servers, *self.run.trainers}
        self.oversight.begin(self.run)

    def next_generation(self) -> CoordinatorContext:
        """Make the context of the generation that the run has entered."""
        # `begun` is kept, so that trainers do not wait for the lead to begin again.
        state = StepState.of(self.run, begun=self.step_state.begun)
        after = replace(self, step_state=state, oversight=self.oversight.following())
        # Lease numbers are not reused, because trainers keep logged values by lease in the state of their loop.
        after.leases, after.members, after.false_batches = self.leases, self.members, self.false_batches
        return after

    def is_excluded(self, trainer: PeerId) -> bool:
        """Return whether a trainer is excluded, because its batches were false too often."""
        return self.false_batches[trainer] >= _MAX_FALSE_BATCHES

    def check_honest(self, trainer: PeerId) -> None:
        """Refuse a trainer whose batches were false too often."""
        if self.is_excluded(trainer):
            raise ConfigError(
                "a batch's gradients must have the weight of its lease, and be in the sums when it is reported done: "
                f"{self.false_batches[trainer]} batches of {trainer} were struck, because they had another weight or "
                "were in no sum. Train with an unchanged lightning_swarm there."
            )

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in a task that ends with this run generation or the role; raise an error if either has ended."""
        if not self.tasks.is_running:
            work.close()
            if self.run.manifest.generation != self.generation:
                raise Busy("the run was rolled back meanwhile")  # so a retiring trainer, for example, asks again
            raise self.not_coordinator_error()
        return self.tasks.spawn(work)

    def not_coordinator_error(self) -> NotCoordinator:
        """Return the error for held callers when the role ends."""
        return NotCoordinator(f"{self.transport.peer_id} is no longer the coordinator")

    async def end_generation(self) -> None:
        """End the tasks of a run generation that is over, and release its held calls."""
        await self.tasks.close()
        self.outage.stage_found(step=self.run.manifest.first_step)
        await self.changes.end_generation()
