"""A run as it stands: the manifest, and what the records since then changed of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import structs

from lightning_swarm.core.errors import (
    ConfigError,
    LeaseRevoked,
    NotCoordinator,
    NotEnlisted,
    NotMember,
    ProtocolError,
    Replaced,
    StepError,
)
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import to_ranges
from lightning_swarm.protocol.messages.run import (
    MAX_FORMER_LEADS,
    BatchNumber,
    Manifest,
    Member,
    RestartRequest,
    RunView,
    SeatedMembers,
    Term,
    TiedTensors,
)
from lightning_swarm.protocol.messages.step import Record


def check_open(manifest: Manifest) -> None:
    """Refuse to train in a run that its starter trains alone.

    Raises:
        ConfigError: With the remedy.
    """
    if not manifest.open_to_trainers:
        raise ConfigError(
            f"run {manifest.run_id!r} takes no trainers beside those that it began with: its starter must have "
            "`role='both'` and `target_batch_size`, no `delay_optimizer_step`, no `precision='16-mixed'`, no callback "
            "that changes weights, and the whole model in `pipeline`. Serve it, with `role='server'`, or start it so."
        )


def lanes_of(trainers: Sequence[PeerId], lead: PeerId) -> Sequence[PeerId]:
    """Who reads which part of an epoch ahead: each the batch after that of the one before it, and the lead the first.

    A hint: whoever has read a batch first may bring it.
    """
    return [lead, *(peer for peer in trainers if peer != lead)]


def next_in_lane(begin: int, index: int, lanes: Sequence[PeerId], own: PeerId) -> int:
    """The first batch of a trainer's lane from `index` on, in an epoch that is read from `begin` on."""
    rank = lanes.index(own) if own in lanes else len(lanes) - 1
    return index + (rank - (index - begin)) % len(lanes)


def owner_of(begin: int, index: int, lanes: Sequence[PeerId]) -> PeerId:
    """In whose lane a batch is."""
    return lanes[(index - begin) % len(lanes)]


_MAX_REMEMBERED = 1024
_MAX_NAMED = 10


class RunState:
    """Who is in a run at one version of its weights. Changed by applying records; who coordinates, by terms.

    A process has one for each part that it plays: its server's and its trainer's may be a record apart.

    Args:
        manifest: Record 0.

    Attributes:
        trainers: Who may ask for places, computations and state: the lead, then the others in the order they came in.
        term: The highest by which somebody has come to coordinate, as far as it is known here.
        ties: Which parameters several stages hold.
        seats_before: Who was in the run before the newest record.
        newest: The record that was applied last, if one was.
        selection: What trains since then; of a run that was only `seen`, what trained at its beginning.
        goes_back: Another peer leads it, and is about to send it back: nothing of its open step will count.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.goes_back = False
        self.ties = TiedTensors(manifest.stages)
        self.version = manifest.first_step
        self.rosters = [list(stage.roster) for stage in manifest.stages]
        self.voters = list(manifest.voters)
        self.trainers = list(manifest.trainers)
        self.seats_before = self.seats
        self.term: Term = (1, manifest.coordinator, next(iter(boot_ids(manifest, manifest.coordinator)), 0))
        self._counted: dict[int, tuple[range, ...]] = {}  # the places of the batches that the last records count
        self.newest: Record | None = None
        self._positions: dict[int, BatchNumber | None] = {}  # by version
        self.selection = manifest.selection

    @classmethod
    def seen(cls, view: RunView, version: int) -> RunState:
        """What another peer said of the run, taken for what holds at `version`."""
        run = cls(view.manifest)
        run.version = version
        run.sit(view.seats)
        run.term = view.term
        run._positions[version] = view.position
        return run

    @property
    def is_shared(self) -> bool:
        """Whether several may train in it, now or later: what must hold for that holds from the beginning."""
        return self.manifest.open_to_trainers or len(self.manifest.trainers) > 1

    @property
    def position(self) -> BatchNumber | None:
        """The first batch of the open step, where a record says it."""
        return self.position_at(self.version)

    def position_at(self, version: int) -> BatchNumber | None:
        """Likewise, of an older one that is not forgotten."""
        return self._positions.get(version)

    @property
    def seats(self) -> SeatedMembers:
        """Who is in the run."""
        return SeatedMembers(rosters=self.rosters, voters=self.voters, trainers=self.trainers)

    def seats_at(self, version: int) -> SeatedMembers:
        """Who is in the run at the open step, or at the one before it."""
        return self.seats if version == self.version else self.seats_before

    def sit(self, seats: SeatedMembers) -> None:
        """Know who is in the run, without the records that made it so."""
        self.rosters, self.voters, self.trainers = seats.rosters, seats.voters, seats.trainers

    def after(self, record: Record) -> SeatedMembers:
        """Who is in the run after a record of the open step."""
        voters = self.voters if record.next_voters is None else record.next_voters
        trainers = self.trainers
        if record.enlisted or record.retired:
            trainers = [*(one for one in trainers if one not in record.retired), *record.enlisted]
        if not record.left and not record.newcomers:
            return SeatedMembers(rosters=self.rosters, voters=voters, trainers=trainers)
        left = {(one.stage_index, one.member) for one in record.left}
        rosters = [
            [
                *(member for member in roster if (index, member) not in left),
                *(one.member for one in record.newcomers if one.stage_index == index),
            ]
            for index, roster in enumerate(self.rosters)
        ]
        return SeatedMembers(rosters=rosters, voters=voters, trainers=trainers)

    def present(self, absent: Collection[PeerId]) -> list[list[Member]]:
        """For each stage, the members that take part in a round."""
        return [[member for member in roster if member.peer_id not in absent] for roster in self.rosters]

    def apply(self, record: Record, seats: SeatedMembers | None = None) -> None:
        """Go on to the version after `record`.

        Args:
            record: Of the open step; with `seats` it may be a later one, for a trainer may pass over some.
            seats: After it.
        """
        self.seats_before = self.seats
        self.sit(seats or self.after(record))
        self.version = record.step + 1
        self._counted[record.step] = to_ranges(record.closing.batches)
        if len(self._counted) > _MAX_REMEMBERED:
            del self._counted[next(iter(self._counted))]
        self._positions[self.version] = record.position
        if len(self._positions) > _MAX_REMEMBERED:
            del self._positions[next(iter(self._positions))]
        self.newest = record
        if record.selection is not None:
            self.selection = record.selection

    def computes_on(self, step: int) -> int:
        """The version of the weights that the microbatches of a step are computed with."""
        if not self.manifest.settings.delay_optimizer_step:
            return step
        return max(step - 1, self.manifest.first_step)

    @property
    def open_steps(self) -> range:
        """That microbatches may be of: the one whose record is next; where steps are delayed, the one after it, too."""
        return range(self.version, self.version + 1 + self.manifest.settings.delay_optimizer_step)

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
        """Enter the next generation of the run, at its first step. Who the lead knows to be in the run stays in it."""
        self.manifest = structs.replace(
            self.manifest,
            generation=request.generation,
            first_step=request.first_step,
            selection=request.selection,
        )
        self.version = request.first_step
        self.sit(request.seats)
        self._counted.clear()
        self._positions.clear()
        self.newest, self.selection = None, request.selection

    def inherit(self, heir: PeerId) -> None:
        """Its lead is gone, and another peer goes back with it. Nothing of the former lead's counts any more."""
        manifest = self.manifest
        former = [one for one in (*(manifest.former_leads or ()), manifest.lead) if one != heir][-MAX_FORMER_LEADS:]
        self.trainers = [heir, *(one for one in self.trainers if one not in (heir, manifest.lead))]
        self.manifest = structs.replace(manifest, lead=heir, trainers=self.trainers, former_leads=former)
        self.goes_back = True

    def check_generation(self, generation: int) -> None:
        """Refuse what belongs to another generation of the run.

        Raises:
            ProtocolError: Says both.
        """
        if generation != self.manifest.generation:
            raise ProtocolError(f"the run generation is {self.manifest.generation}, got a call of {generation}")

    def check(self, record: Record, seats: SeatedMembers | None = None) -> None:
        """Refuse a record that would empty a stage, or is of a run with another number of them.

        Args:
            record: As in `apply`.
            seats: Likewise.

        Raises:
            ProtocolError: It can be no record of this run.
        """
        self.check_seats(seats or self.after(record))
        changed = [one.stage_index for one in record.left] + [one.stage_index for one in record.newcomers]
        highest = max(changed, default=0)
        if highest >= len(self.rosters):
            raise ProtocolError(f"record {record.step} changes stage {highest}; there are {len(self.rosters)} stages")

    def check_seats(self, seats: SeatedMembers) -> None:
        """Refuse rosters of another number of stages than the run has, or with an empty one, or with somebody twice.

        Raises:
            ProtocolError: Says how many are in each; or that the lead is not among the trainers.
        """
        if self.manifest.lead not in seats.trainers or len(set(seats.trainers)) != len(seats.trainers):
            raise ProtocolError(
                f"the lead {self.manifest.lead} must be among the trainers, and nobody twice; they begin with "
                f"{seats.trainers[:_MAX_NAMED]}"
            )
        sizes = [len(set(roster)) for roster in seats.rosters]
        if len(sizes) != len(self.rosters) or not all(sizes) or sizes != list(map(len, seats.rosters)):
            raise ProtocolError(
                f"each of {len(self.rosters)} stages must have at least one server, and none twice; there are "
                f"{sizes[:100]} different ones"
            )

    def view(self) -> RunView:
        """For a peer that asks."""
        return RunView(
            manifest=self.manifest,
            version=self.version,
            seats=self.seats,
            term=self.term,
            position=self.position,
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
        if not self.counts(step, [first]):
            raise LeaseRevoked(f"the batch was struck from step {step}, which is decided")

    def counts(self, step: int, firsts: Collection[int]) -> bool:
        """Whether the record of a step was applied here, and counts the batches at these places."""
        runs = self._counted.get(step)
        return runs is not None and all(any(first in places for places in runs) for first in firsts)

    def check_trainer(self, caller: PeerId) -> None:
        """Refuse a caller that does not train in this run.

        Raises:
            NotEnlisted: It may not ask for places, computations or state.
            Replaced: It led the run once.
        """
        if caller in (self.manifest.former_leads or ()) and caller not in self.trainers:
            raise Replaced(replaced_by(self.manifest))
        if caller not in self.trainers:
            raise NotEnlisted(
                f"{caller} is none of the {len(self.trainers)} trainers of run {self.manifest.run_id!r}, of which "
                f"the first are {self.trainers[:_MAX_NAMED]}"
            )

    def check_holds(self, member: Member, stage_index: int) -> None:
        """Refuse work for a stage on a peer that is not in its roster (yet).

        Raises:
            NotMember: Nothing that it computes would count.
        """
        if member not in self.rosters[stage_index]:
            raise NotMember(f"peer {member.peer_id} is not in the roster of stage {stage_index} (yet)")


def replaced_by(manifest: Manifest) -> str:
    """What a former lead is told."""
    return (
        f"peer {manifest.lead} leads run {manifest.run_id!r} by now, for this one was not heard of, and went back with "
        "it: what was done here since then counts nowhere. Start this program again with `initial_peers`, and it helps."
    )


def boot_ids(manifest: Manifest, peer: PeerId) -> set[int]:
    """Of a peer that holds a stage when the run begins; none, if it holds none."""
    return {member.boot_id for stage in manifest.stages for member in stage.roster if member.peer_id == peer}
