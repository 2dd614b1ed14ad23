"""The interface through which the coordinator has servers' work examined. The implementation here accepts all work.

Runs with strangers override it (`audit/`). `SumReconciliation` and `StepCommit` call it and apply the results.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_swarm.coordinator.step.open_step import OpenStep, add_up
from lightning_swarm.coordinator.step.replay_plan import Ledgers, ReplayPlan, ServerLedger
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Selection, StageManifest, StepChange
from lightning_swarm.protocol.messages.step import AverageReply, Closing, Record
from lightning_swarm.protocol.run_state import RunState

if TYPE_CHECKING:  # both modules need the interface
    from lightning_swarm.coordinator.context import CoordinatorContext
    from lightning_swarm.coordinator.server_calls import ServerCalls


@dataclass
class Verdict:
    """The result of examining a step's sums."""

    convicted: dict[PeerId, str] = field(default_factory=dict)  # server that the run expels -> reason
    failed: dict[PeerId, SwarmError] = field(default_factory=dict)  # server that is excluded from this step -> reason
    tainted: set[int] = field(default_factory=set)  # places of batches to strike: they may include false outputs
    avoided: set[PeerId] = field(default_factory=set)  # servers that trainers avoid when they send struck batches again

    @property
    def is_clean(self) -> bool:
        """True if all sums may be averaged."""
        return not (self.convicted or self.tainted or self.failed)


@dataclass(eq=False)
class CheckedMeans:
    """The result of checking a round, which counts if no server failed and none is convicted."""

    failed: dict[PeerId, SwarmError] = field(default_factory=dict)  # server without a usable answer -> error
    convicted: dict[PeerId, str] = field(default_factory=dict)  # server that the run expels -> reason
    # Server that most of its stage contradict -> reason. It is excluded from the step, unless it is alone in its stage.
    accused: dict[PeerId, str] = field(default_factory=dict)
    squared_norms: list[float] = field(default_factory=list)  # add up to the squared norm of the mean of all stages
    # For each checked stage, the digests of its mean's parts; empty if an examination has replaced the mean.
    parts: list[Sequence[bytes]] = field(default_factory=list)

    @property
    def counts(self) -> bool:
        """Return whether a record may count the round."""
        return not self.failed and not self.convicted

    @property
    def squared_norm(self) -> float:
        """The squared norm of the mean gradient over all stages."""
        return add_up(self.squared_norms)


class StepOversight:
    """Examines the servers' work in one step. This class accepts all work."""

    examines = False  # sums are averaged only after their examination, and trainers keep batches to send them again
    is_snapshot_due = False  # the step's record may order a snapshot, which would keep any false work

    def check_ledger(self, peer: PeerId, stage_index: int, ledger: ServerLedger) -> None:
        """Raise ProtocolError if a server's ledger does not commit to its sum, or cannot be true."""

    def expect(self, plan: ReplayPlan, servers: Collection[PeerId]) -> None:
        """Record that these servers were ordered to change their sums as planned."""

    def reopen(self) -> None:
        """Accept any sums at the next freeze: servers took new batches, or may have followed unconfirmed requests."""

    async def examine(self, ledgers: Ledgers, machine_kinds: Mapping[PeerId, str], round_: int) -> Verdict:
        """Examine sums that are new or have changed. `machine_kinds` has the kind of each server's machine."""
        return Verdict()

    async def check_means(
        self, closing: Closing, selection: Selection | None, replies: Mapping[PeerId, AverageReply]
    ) -> CheckedMeans:
        """Check a round whose means all servers hold; `replies` are their reports of it."""
        # Sorted, so that a repeated round gives the same record.
        parts = sorted(
            (part.stage_index, peer, part.squared_norm) for peer, reply in replies.items() for part in reply.parts
        )
        return CheckedMeans(squared_norms=[squared_norm for _, _, squared_norm in parts])

    def watch_fellows(self, convicted: PeerId) -> None:
        """From now on, examine more work of servers that may be a convicted server's accomplices."""


class RunOversight:
    """Oversees the servers of one run, and remembers the findings of earlier steps. This class examines nothing."""

    def __init__(self) -> None:
        self.convicted: dict[PeerId, str] = {}  # server -> reason, until a record excludes it

    def following(self) -> RunOversight:
        """Return the oversight with which this peer continues after a rollback, or coordinates once more."""
        return RunOversight()

    def begin(self, run: RunState) -> None:
        """Begin to oversee a run, perhaps after another coordinator."""

    def of_step(
        self, context: CoordinatorContext, servers: ServerCalls, step: OpenStep, trained: Collection[str]
    ) -> StepOversight:
        """Return the oversight of one step. `trained` are the names of the parameters that it trains."""
        return StepOversight()

    def allow_change(self, change: StepChange, stages: Sequence[StageManifest]) -> None:
        """Raise ConfigError if the servers' work could not be examined after this change."""

    def note_silence(self, peer: PeerId, step: int) -> None:
        """Record that a stranger answered pings, but not the coordinator's call as a step closed."""

    def wait_s(self, peer: PeerId) -> float:
        """Return the seconds until a server may join after its silence; not positive: it may now."""
        return 0.0

    def goes_back(self, run: RunState, step: int, convicted: Collection[PeerId]) -> bool:
        """Return whether the run must roll back, because work of convicted servers counted in earlier steps."""
        return False

    def note_committed(self, record: Record) -> None:
        """Record that a step is decided."""
