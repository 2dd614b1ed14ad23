"""Hooks by which other peers can check a server's work, chosen when it enters a run (`ServerContext.overseer`).

The classes here are for runs that trust their servers, and check nothing. Audited runs use the subclasses in
`server.audit`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import UNSET, UnsetType
from torch import Tensor

from lightning_swarm.coordinator.step.oversight import RunOversight
from lightning_swarm.core.errors import NotMember, ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import CallKey, Receipt
from lightning_swarm.protocol.messages.run import SeatedMembers
from lightning_swarm.protocol.messages.state import StateKind
from lightning_swarm.protocol.messages.step import Closing, Record, StageLedger
from lightning_swarm.protocol.serialization import Tree
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.server.activation_cache import CachedForward
from lightning_swarm.server.averaging.all_reduce import AveragingState, Compute, Group
from lightning_swarm.server.compute import ForwardResult, SavedGraph
from lightning_swarm.server.gradient_buffer import ReceiptLedger
from lightning_swarm.server.stage import Stage, StateHash

if TYPE_CHECKING:  # both modules need the hooks
    from lightning_swarm.server.context import ServerContext
    from lightning_swarm.server.stage_builder import PeerModel
    from lightning_swarm.server.step_handlers import StepHandlers

KeepWork = Callable[[ReceiptLedger], None]
"""Called with the ledger of a step before a microbatch's receipt is added; keeps the microbatch's work for auditors."""


def keep_nothing(ledger: ReceiptLedger) -> None:
    """Keep no work."""


class WorkLog:
    """Records a server's work on microbatches, for auditors."""

    def note_output(self, kept: CachedForward, result: ForwardResult) -> None:
        """Record the output of a forward that is kept for its backward."""

    def graph_of(self, stage: Stage, kept: CachedForward, *, adds: bool) -> SavedGraph:
        """Return the graph for a backward, and drop it from the kept forward; `adds`: the gradients enter a sum."""
        return kept.take_graph() or stage.computation.graph(kept.call)

    def keep_function(
        self, stage: Stage, receipt: Receipt, kept: CachedForward, gradients: Tree, input_gradients: Tree
    ) -> KeepWork:
        """Return a function that keeps the work on a microbatch, to be called before its gradients are added."""
        return keep_nothing

    def commit(self, report: StageLedger, stage: Stage, ledger: ReceiptLedger, step: int) -> StageLedger:
        """Return the report of a frozen sum, with commitments to the sum and to the work on its microbatches."""
        return report

    def borrows(self, key: CallKey, stage_index: int) -> bool:
        """Return whether a call is computed here although this server does not hold its stage."""
        return False

    async def borrowed(self, stage_index: int, version: int) -> Stage:
        """Borrow a stage that this server does not hold, with the weights of a version."""
        raise NotMember(f"this peer does not hold stage {stage_index}, and borrows none")

    def state_hash(self, stage: Stage) -> StateHash:
        """Return the object that hashes a stage's state, so that replicas can be compared."""
        return StateHash(stage)

    def prover(self, challenge: int, kind: StateKind) -> Callable[[Stage], bytes]:
        """Return the function that proves a stage's state to a peer that received it from another server."""
        raise ProtocolError("servers prove each other's state only in runs with `trust='audited'`")


class RoundLog:
    """Records the vectors of averaging rounds."""

    async def digests(self, parts: Sequence[Sequence[Tensor]], compute: Compute | None) -> Sequence[bytes]:
        """Return digests of the parts that members sent to this server for its share of the mean."""
        return ()

    def offer(self, group: Group, mean: Tensor) -> None:
        """Offer the whole mean to joiners."""

    def withhold(self, group: Group, reason: str) -> None:
        """Fail requests for the whole mean, unless it is offered already."""

    async def collect(
        self,
        group: Group,
        closing: Closing,
        like: Tensor,
        fetch_parts: Callable[[], Awaitable[tuple[Tensor, AveragingState]]],
    ) -> tuple[Tensor, AveragingState]:
        """Fetch the mean of a round in which this joiner has no part, and the averaging state after it."""
        return await fetch_parts()


class JoinChecks:
    """Checks the state, records and members that a joiner receives from its donors; called by `Joiner`."""

    one_donor = False  # whether a single server must send the whole state of the stage

    def donors(self, servers: Sequence[PeerId], coordinator: PeerId) -> Sequence[PeerId]:
        """Return the servers to ask for the state, in order."""
        return servers

    def reject_donor(self, error: Exception, donor: PeerId | None, coordinator: PeerId, stage_index: int) -> None:
        """Raise `Unconfirmed` in place of an error that false state from the donor may have caused."""

    async def check_record(self, record: Record) -> None:
        """Raise `Unconfirmed` if a donor's record is not the decided record."""

    async def confirm_members(self, version: int, adopt: Callable[[SeatedMembers], object]) -> bool:
        """Pass the coordinator's list of members to `adopt`; return False if the coordinator is at another version."""
        return True

    async def mean_digests(self, closing: Closing, stage_index: int, num_parts: int) -> list[bytes] | UnsetType:
        """Return digests of the parts of a mean that this joiner holds, for the coordinator to compare."""
        return UNSET


@dataclass(frozen=True)
class Oversight:
    """All hooks of a server in a run. `RunOversight` is its counterpart at a coordinator."""

    work: WorkLog = field(default_factory=WorkLog)
    rounds: RoundLog = field(default_factory=RoundLog)
    joining: JoinChecks = field(default_factory=JoinChecks)
    # Called when this server becomes the coordinator, with its `RunOversight` of the last time, which may be empty.
    coordinating: Callable[[RunOversight], RunOversight] = lambda _: RunOversight()


NO_OVERSIGHT: Final = Oversight()

Overseer: TypeAlias = (
    "Callable[[ServerContext, StepHandlers, Callable[[], PeerModel]], Callable[[RunSettings], Oversight]]"
)
"""Called once for each server. The function that it returns chooses the server's hooks by a run's settings."""
