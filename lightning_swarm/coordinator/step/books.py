"""What who coordinates knows of the open step, and of the newest record for its lead."""

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
    """The newest record, and what came with it for the lead.

    Args:
        record: The newest one; None: the generation begins.
        logs: What other trainers logged of the batches that the record counts.
        metrics: Likewise, what they added to metrics, by the batches' first positions.
    """

    record: Record | None = None
    logs: list[LoggedValue] = field(default_factory=list)
    metrics: dict[int, Message] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The record's; -1: there is none."""
        return -1 if self.record is None else self.record.step


@dataclass
class StepState:
    """One coordinator's, as long as it is one.

    Args:
        open: The step that is open.
        begun: The lead asked for its first place.
        reselected: What the step trains, if it is not what trained in the step before.
        outcome: Of the newest step that is decided.
        due: Where steps are delayed: the step before the open one, while its record is still to come.
        finishing: A task of the coordinator decides the open step.
        closing_s: Since when its batches are waited for.
        order: Of the batches, where the lead has told it.
    """

    open: OpenStep
    begun: bool = False
    reselected: Selection | None = None
    outcome: StepOutcome = field(default_factory=StepOutcome)
    due: OpenStep | None = None
    finishing: bool = False
    closing_s: float | None = None
    order: DataOrder = field(default_factory=DataOrder)

    @classmethod
    def of(cls, manifest: Manifest) -> StepState:
        """Of a run that begins."""
        return cls(OpenStep(manifest.first_step, manifest.settings.target_batch_size))

    def selection(self, run: RunState) -> Selection | None:
        """What the open step trains."""
        return self.reselected or run.selection

    def go_back(self, manifest: Manifest) -> None:
        """The run entered its next generation."""
        self.close_step(StepOutcome())
        self.due, self.order = None, DataOrder()
        self.open = OpenStep(manifest.first_step, manifest.settings.target_batch_size)

    def plan(self, plan: EpochPlan, position: BatchNumber) -> None:
        """Know the order of an epoch. With the first one it is settled which batches the open step takes.

        Args:
            plan: Of the epoch.
            position: The first batch of the open step, if this is the first plan.

        Raises:
            ProtocolError: It has another order, or the run goes without.
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
        """The step after one that is over, or whose batches are all through."""
        opened = OpenStep(step.step + 1, step.target_batch_size)
        if step.window is not None:
            begin = step.window.end
            opened.plan(self.order, begin)
            self.order.forget_before(begin[0])
        return opened

    def find(self, step: int) -> OpenStep | None:
        """A step that is not decided yet."""
        return next((one for one in (self.due, self.open) if one is not None and one.step == step), None)

    def close_step(self, outcome: StepOutcome) -> None:
        """The open step is over; the next one is still to be opened."""
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
