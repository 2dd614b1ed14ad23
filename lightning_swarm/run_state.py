"""A run as it stands: the manifest, and what the records since then changed of it."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import structs

from lightning_swarm.errors import LeaseRevoked, NotCoordinator, NotMember, ProtocolError, StepError
from lightning_swarm.network import PeerId
from lightning_swarm.types.runs import Manifest, Member, RestartRequest, RunView, Term
from lightning_swarm.types.steps import Record

_MAX_REMEMBERED = 1024


class RunState:
    """Who is in a run at one version of its weights. Changed by applying records; who coordinates, by terms.

    A process has one for each part that it plays: its server's and its trainer's may be a record apart.

    Args:
        manifest: Record 0.

    Attributes:
        term: The highest by which somebody has come to coordinate, as far as it is known here.
        newest: The record that was applied last, if one was.
        selection: What trains since then; of a run that was only `seen`, what trained at its beginning.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.version = manifest.first_step
        self.rosters = [list(stage.roster) for stage in manifest.stages]
        self.voters = list(manifest.voters)
        self.trainers = list(manifest.trainers)
        self.term: Term = (1, manifest.coordinator, _boot_id(manifest))
        self._counted: dict[int, frozenset[int]] = {}  # the places of the batches that each of the last records counts
        self.newest: Record | None = None
        self.selection = manifest.selection

    @classmethod
    def seen(cls, view: RunView, version: int) -> RunState:
        """What another peer said of the run, taken for what holds at `version`."""
        run = cls(view.manifest)
        run.version = version
        run.rosters, run.voters, run.trainers = view.rosters, view.voters, view.trainers
        run.term = view.term
        return run

    def apply(self, record: Record) -> None:
        """Go on to the version after `record`. A trainer may pass over some: each names all who are in the run."""
        self.version = record.step + 1
        self.rosters = [list(roster) for roster in record.next_roster]
        self.voters = list(record.next_voters)
        self.trainers = list(record.next_trainers)
        self._counted[record.step] = frozenset(first for first, _, _ in record.closing.batches)
        if len(self._counted) > _MAX_REMEMBERED:
            del self._counted[next(iter(self._counted))]
        self.newest = record
        if record.selection is not None:
            self.selection = record.selection

    @property
    def coordinator(self) -> PeerId:
        """Who grants, closes and proposes."""
        return PeerId(self.term[1])

    def follow(self, term: Term) -> bool:
        """Know of a term; whether it is higher than what was known."""
        if term <= self.term:
            return False
        self.term = term
        return True

    def check_coordinator(self, caller: PeerId) -> None:
        """Refuse who does not coordinate.

        Raises:
            NotCoordinator: Says who does, and by which term.
        """
        if caller == self.coordinator:
            return
        if caller in self.servers:
            raise NotCoordinator(f"steps are led by the coordinator {self.coordinator} ({self.term}), not by {caller}")
        raise ProtocolError(f"steps are led by the coordinator {self.coordinator}, not by {caller}")

    def go_back(self, request: RestartRequest) -> None:
        """Enter the next generation of the run, at its first step. Who is in the run stays in it."""
        self.manifest = structs.replace(
            self.manifest,
            generation=request.generation,
            first_step=request.first_step,
            selection=request.selection,
        )
        self.version = request.first_step
        self._counted.clear()
        self.newest, self.selection = None, request.selection

    def check_generation(self, generation: int) -> None:
        """Refuse what belongs to another generation of the run.

        Raises:
            ProtocolError: Says both.
        """
        if generation != self.manifest.generation:
            raise ProtocolError(f"the run generation is {self.manifest.generation}, got a call of {generation}")

    def check(self, record: Record) -> None:
        """Refuse a record that would empty a stage, or is of a run with another number of them.

        Raises:
            ProtocolError: It can be no record of this run.
        """
        if len(record.next_roster) != len(self.rosters) or not all(record.next_roster):
            raise ProtocolError(
                f"record {record.step} must name at least one server for each of {len(self.rosters)} stages, got "
                f"{[len(roster) for roster in record.next_roster][:100]}"
            )

    def view(self) -> RunView:
        """For a peer that asks."""
        return RunView(
            manifest=self.manifest,
            version=self.version,
            rosters=self.rosters,
            voters=self.voters,
            trainers=self.trainers,
            term=self.term,
        )

    @property
    def num_pipeline_stages(self) -> int:
        """Through which microbatches go: all but the one on trainers, which is the last one if it is there."""
        return sum(not stage.on_trainers for stage in self.manifest.stages)

    @property
    def servers(self) -> list[PeerId]:
        """All that hold a stage."""
        return sorted({member.peer_id for roster in self.rosters for member in roster})

    def check_counted(self, step: int, first: int) -> None:
        """For the trainer of a batch of a decided step, that was not heard of meanwhile.

        Raises:
            LeaseRevoked: The batch counts nowhere.
            StepError: Nobody knows any more.
        """
        if step not in self._counted:
            raise StepError(
                f"step {self.version} is open, and which batches step {step} counted is not known any more: a trainer "
                "that was away for so long cannot go on. Start it again."
            )
        if first not in self._counted[step]:
            raise LeaseRevoked(f"the batch was struck from step {step}, which is decided")

    def counts(self, step: int, firsts: Collection[int]) -> bool:
        """Whether the record of a step was applied here, and counts the batches at these places."""
        return step in self._counted and self._counted[step].issuperset(firsts)

    def check_trainer(self, caller: PeerId) -> None:
        """Refuse a caller that does not train in this run.

        Raises:
            ProtocolError: It may not ask for places, computations or state.
        """
        if caller not in self.trainers:
            raise ProtocolError(
                f"{caller} is no trainer of run {self.manifest.run_id!r}; its trainers are {self.trainers}"
            )

    def check_holds(self, member: Member, stage_index: int) -> None:
        """Refuse work for a stage on a peer that is not in its roster (yet).

        Raises:
            NotMember: Nothing that it computes would count.
        """
        if member not in self.rosters[stage_index]:
            raise NotMember(f"peer {member.peer_id} is not in the roster of stage {stage_index} (yet)")


def _boot_id(manifest: Manifest) -> int:
    """Of the run's first coordinator, which holds a stage."""
    members = [member for stage in manifest.stages for member in stage.roster]
    return next((one.boot_id for one in members if one.peer_id == manifest.coordinator), 0)
