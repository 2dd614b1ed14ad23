"""The coordinator's state of the open step, and of the newest record for the lead."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_swarm.coordinator.step.data_order import DataOrder
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message
from lightning_swarm.protocol.messages.batches import LoggedValue
from lightning_swarm.protocol.messages.run import BatchNumber, EpochPlan, Manifest, Selection
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState


@dataclass
class StepOutcome:
    """The newest record, and what came with it for the lead."""

    record: Record | None = None  # None: the generation begins
    logs: list[LoggedValue] = field(default_factory=list)  # by other trainers, of the batches that the record counts
    metrics: dict[int, Message] = field(default_factory=dict)  # likewise added to metrics, by the batches' places

    @property
    def step(self) -> int:
        """Step of the record; -1: there is none."""
        return -1 if self.record is None else self.record.step


@dataclass
class StepState:
    """One coordinator's state of the steps that are not decided yet."""

    open: OpenStep
    begun: bool = False  # the lead asked for its first place
    reselected: Selection | None = None  # what the step trains, if it is not what trained in the step before
    outcome: StepOutcome = field(default_factory=StepOutcome)  # of the newest step that is decided
    due: OpenStep | None = None  # where steps are delayed: the one before the open step, while its record is to come
    finishing: bool = False  # a task of the coordinator decides the open step
    closing_s: float | None = None  # since when the open step's batches are waited for
    order: DataOrder = field(default_factory=DataOrder)  # of the batches, where the lead has told it

    @classmethod
    def of(cls, manifest: Manifest) -> StepState:
        """Make the state of a run that begins."""
        return cls(OpenStep(manifest.first_step, manifest.settings.target_batch_size))

    def selection(self, run: RunState) -> Selection | None:
        """The selection that the open step trains."""
        return self.reselected or run.selection

    def enter_generation(self, manifest: Manifest) -> None:
        """Begin with the next run generation."""
        self.close_step(StepOutcome())
        self.due, self.order = None, DataOrder()
        self.open = OpenStep(manifest.first_step, manifest.settings.target_batch_size)

    def plan(self, plan: EpochPlan, position: BatchNumber) -> None:
        """Learn the order of an epoch. The first one settles which batches the open step takes, from `position` on.

        Raises ProtocolError if the epoch has another order, or the run goes without.
        """
        begins = self.open.window is None
        if begins:
            self.open.check_numbered()
            if position > (plan.epoch, plan.num_batches) and position[0] == plan.epoch:
                raise ProtocolError(
                    f"epoch {plan.epoch} has {plan.num_batches} batches, no step begins at {position[1]}"
                )
        self.order.add(plan)
        if begins:
            self.open.plan(self.order, position)

    def following(self, step: OpenStep) -> OpenStep:
        """Make the step after one that is over, or whose batches are all through."""
        opened = OpenStep(step.step + 1, step.target_batch_size)
        if step.window is not None:
            begin = step.window.end
            opened.plan(self.order, begin)
            self.order.forget_before(begin[0])
        return opened

    def find(self, step: int) -> OpenStep | None:
        """Return a step by its number, if it is not decided yet."""
        return next((one for one in (self.due, self.open) if one is not None and one.step == step), None)

    def close_step(self, outcome: StepOutcome) -> None:
        """Enter that the open step is over; the next one is still to be opened."""
        self.outcome = outcome
        self._end_open()

    def postpone(self, following: OpenStep) -> OpenStep:
        """Open the step after the open one, whose record comes later; returns that one."""
        due = self.due = self.open
        due.sealed = True
        self.open = following
        self._end_open()
        return due

    def _end_open(self) -> None:
        self.reselected = self.closing_s = None
        self.finishing = False
