"""`RunState`: the state of a run at one version, from its manifest and the records applied since then."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from msgspec import UNSET, UnsetType, structs

from lightning_swarm.core.errors import (
    ConfigError,
    LeaseRevoked,
    NotCoordinator,
    NotEnlisted,
    NotMember,
    ProtocolError,
    Replaced,
    StepError,
    SwarmError,
)
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.bans import bans_after
from lightning_swarm.protocol.guests import DifferingServers, guests_after
from lightning_swarm.protocol.invitations import check_invited, check_used, used_after
from lightning_swarm.protocol.keepers import Electorate, check_no_convicted, convictions
from lightning_swarm.protocol.messages.calls import to_ranges
from lightning_swarm.protocol.messages.run import (
    MAX_FORMER_LEADS,
    BatchNumber,
    HeldSnapshot,
    Manifest,
    Member,
    RestartRequest,
    RunView,
    SeatedMembers,
    Term,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, encode
from lightning_swarm.protocol.tied_tensors import TiedTensors


def check_open(manifest: Manifest) -> None:
    """Raise `ConfigError` if a run admits no further trainers."""
    if not manifest.open_to_trainers:
        raise ConfigError(
            f"further trainers may join a run only if its starter has `role='both'` and `target_batch_size`, and "
            "has no `delay_optimizer_step`, no callback that changes weights, and no layers around the `pipeline`. Run "
            f"{manifest.run_id!r} admits none. Join it with `role='server'`, or restart it with these settings."
        )


def check_protocol_version(
    version: int, *, place: str = "at the caller", own_place: str = "in the run", refuse: type[SwarmError] = ConfigError
) -> None:
    """Refuse another peer's protocol version if it differs from this process's; the places are for the error's text."""
    if version != PROTOCOL_VERSION:
        raise refuse(
            f"`protocol_version` must be equal on all peers, and is {version} {place} and {PROTOCOL_VERSION} "
            f"{own_place}. Install the same version of lightning_swarm everywhere."
        )


def lanes_of(trainers: Sequence[PeerId], lead: PeerId) -> Sequence[PeerId]:
    """Return the trainers in the order of their lanes; a trainer reads every n-th batch of an epoch, its lane."""
    # Lanes are only a hint: a trainer may request a batch of another lane if that lane's trainer has not yet.
    return [lead, *(peer for peer in trainers if peer != lead)]


def next_in_lane(begin: int, index: int, lanes: Sequence[PeerId], own: PeerId) -> int:
    """Return the first batch of a trainer's lane at or after `index`; lanes are counted from batch `begin`."""
    rank = lanes.index(own) if own in lanes else len(lanes) - 1  # until a newcomer is enlisted, the last lane
    return index + (rank - (index - begin)) % len(lanes)


def owner_of(begin: int, index: int, lanes: Sequence[PeerId]) -> PeerId:
    """Return the trainer whose lane contains a batch."""
    return lanes[(index - begin) % len(lanes)]


_T = TypeVar("_T")
_MAX_REMEMBERED = 1024  # most steps whose counted batches, digests and positions are kept
_MAX_NAMED = 10  # most peers named in an error


class RunState:
    """The members of a run and its other state at one version. Records change it; terms change the coordinator."""

    # The server and the trainer of a process have separate states, because one may have applied a record earlier.
    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.is_rolling_back = False  # a new lead is about to roll the run back, so the open step will not count
        self.ties = TiedTensors(manifest.stages)  # parameters that several stages hold
        self.version = manifest.first_step  # also the number of the open step
        self.rosters = [list(stage.roster) for stage in manifest.stages]
        self.voters = list(manifest.voters)
        # The lead, then all other trainers as they joined. They may request leases, computations and state.
        self.trainers = list(manifest.trainers)
        self.scaling = manifest.scaling  # the loss scaling of the open step
        self.invitations = manifest.invitations  # with all peers that ever used them
        self.bans = manifest.bans
        self.electorate = Electorate.of(manifest)
        self._apply_ban: Callable[[bytes], None] = lambda _: None  # called with each ban; see `apply_bans_by`
        self.guests: list[PeerId] = []  # members whose weights no closing has compared yet
        self.differing = DifferingServers()
        self.snapshots: list[HeldSnapshot] = []  # the recorded snapshots of the kept versions
        # The newest snapshot that a record ordered: its version and the rosters that take it; None: not known here.
        self.ordered_snapshot: tuple[int, list[list[Member]]] | None = None
        self.seats_before = self.seats  # the members before the newest record
        # The highest term of which this peer knows the coordinator.
        self.term: Term = (1, manifest.coordinator, next(iter(boot_ids(manifest, manifest.coordinator)), 0))
        self._counted: dict[int, tuple[range, ...]] = {}  # step -> places of its counted batches
        self._digests: dict[int, bytes] = {}  # step -> digest of its record, if servers are strangers
        self.newest: Record | None = None  # the newest record that was applied
        self.sound_version: int | None = None  # see `sound_version_after`; None: no false work counted
        self._positions: dict[int, BatchNumber | None] = {}  # version -> first batch of the open step
        # The parameters that train. After `from_view`: as in the generation's first step, until a record changes them.
        self.selection = manifest.selection

    @classmethod
    def from_view(cls, view: RunView, version: int) -> RunState:
        """Return the state of a run from another peer's view, taken as the state at `version`."""
        run = cls(view.manifest)
        run.version = version
        run.set_members(view.seats)
        run.term = view.term
        run._positions[version] = view.position
        return run

    @property
    def is_shared(self) -> bool:
        """Return whether several trainers may train, now or later; the rules for several then hold from the start."""
        return self.manifest.open_to_trainers or len(self.manifest.trainers) > 1

    @property
    def loss_scale(self) -> float | None:
        """The scale of all losses of the open step; None: the run's only trainer chooses it."""
        if self.scaling is not None:
            return self.scaling.scale
        return 1.0 if self.is_shared else None

    @property
    def position(self) -> BatchNumber | None:
        """The first batch of the open step, if a record names it."""
        return self.position_at(self.version)

    def position_at(self, version: int) -> BatchNumber | None:
        """Return the first batch of the step that was open at a version, if it is still known."""
        return self._positions.get(version)

    @property
    def seats(self) -> SeatedMembers:
        """The members of the run."""
        return SeatedMembers(
            rosters=self.rosters,
            voters=self.voters,
            trainers=self.trainers,
            scaling=self.scaling,
            invitations=self.invitations,
            bans=self.bans,
            snapshots=self.snapshots or UNSET,
            keepers=self.electorate.keepers,
            convicted=convictions(self.electorate.convicted),
            guests=self.guests or UNSET,
        )

    def seats_at(self, version: int) -> SeatedMembers:
        """Return the members of the run at the open step, or at the step before it."""
        return self.seats if version == self.version else self.seats_before

    def set_members(self, seats: SeatedMembers) -> None:
        """Set the members of the run directly, without the records that led to them."""
        self.rosters, self.voters, self.trainers = seats.rosters, seats.voters, seats.trainers
        self.scaling, self.invitations, self.snapshots = seats.scaling, seats.invitations, list(seats.snapshots or ())
        self.electorate, self.guests = Electorate.of(seats), list(seats.guests or ())
        if seats.bans != self.bans:
            self.bans = seats.bans
            self.apply_bans_by(self._apply_ban)

    def apply_bans_by(self, apply_ban: Callable[[bytes], None]) -> None:
        """Call `apply_ban` with each ban of the run now, and again whenever a record changes the bans."""
        self._apply_ban = apply_ban
        for signed in self.bans or ():
            apply_ban(signed)

    def members_after(self, record: Record) -> SeatedMembers:
        """Return the members of the run after a record of the open step."""
        voters = self.voters if record.next_voters is None else record.next_voters
        trainers = self.trainers
        if record.enlisted or record.retired:
            trainers = [*(peer for peer in trainers if peer not in record.retired), *record.enlisted]
        scaling = self.scaling
        if scaling is not None and record.closing.batches:
            scaling = scaling.after(skipped=record.outcome == "skip")
        invitations = self.invitations
        if not isinstance(invitations, UnsetType) and not isinstance(record.invited, UnsetType):
            invitations = used_after(invitations, record.invited)
        rosters, electorate = self._rosters_after(record), self.electorate.after(record)
        return SeatedMembers(
            rosters=rosters,
            voters=voters,
            trainers=trainers,
            scaling=scaling,
            invitations=invitations,
            bans=bans_after(self.bans, record.bans),
            snapshots=self._snapshots_after(record) or UNSET,
            keepers=electorate.keepers,
            convicted=convictions(electorate.convicted),
            guests=guests_after(self.guests, record, rosters) or UNSET,
        )

    def _snapshots_after(self, record: Record) -> list[HeldSnapshot]:
        # A joiner's view may already list the snapshots of a record that it has yet to apply.
        order, known = record.snapshot, list(dict.fromkeys([*self.snapshots, *(record.snapshots or ())]))
        return known if order is None else [snapshot for snapshot in known if snapshot.version == order.keep]

    def digest_of(self, stage_index: int, version: int) -> bytes | None:
        """Return the digest of a stage's snapshot, if a record lists it."""
        key = stage_index, version
        return next((held.digest for held in self.snapshots if (held.stage_index, held.version) == key), None)

    def takers_of(self, stage_index: int, version: int) -> list[PeerId]:
        """Return the servers that took a stage's snapshot of this version, if it is the newest ordered version."""
        if self.ordered_snapshot is None or self.ordered_snapshot[0] != version:
            return []
        return [member.peer_id for member in self.ordered_snapshot[1][stage_index]]

    def _rosters_after(self, record: Record) -> list[list[Member]]:
        if not record.left and not record.newcomers:
            return self.rosters
        left = {(vacancy.stage_index, vacancy.member) for vacancy in record.left}
        return [
            [
                *(member for member in roster if (index, member) not in left),
                *(newcomer.member for newcomer in record.newcomers if newcomer.stage_index == index),
            ]
            for index, roster in enumerate(self.rosters)
        ]

    def present(self, absent: Collection[PeerId]) -> list[list[Member]]:
        """Return for each stage the members that are not `absent`, which take part in a round."""
        return [[member for member in roster if member.peer_id not in absent] for roster in self.rosters]

    def apply(self, record: Record, seats: SeatedMembers | None = None) -> None:
        """Advance to the version after a record. With `seats`, the members at that version, records may be skipped."""
        self.seats_before = self.seats
        self.differing.follow(self.guests, record)
        self.set_members(seats or self.members_after(record))
        self.version = record.step + 1
        if record.snapshot is not None:
            self.ordered_snapshot = self.version, self.rosters
        _remember(self._counted, record.step, to_ranges(record.closing.batches))
        if self.electorate.has_strangers:
            _remember(self._digests, record.step, record_digest(record))
        _remember(self._positions, self.version, record.position)
        self.newest = record
        if record.goes_back:
            self.sound_version = self.sound_version_after(record.step)
        if record.change.selection is not None:
            self.selection = record.change.selection

    def weights_version(self, step: int) -> int:
        """Return the version of the weights with which the microbatches of a step are computed."""
        if not self.manifest.settings.delay_optimizer_step:
            return step
        return max(step - 1, self.manifest.first_step)

    def sound_version_after(self, step: int) -> int:
        """Return the newest version that presumably contains no false work of servers convicted in a step."""
        num_steps = self.manifest.settings.steps_to_conviction
        return self.manifest.first_step if num_steps is None else step + 1 - num_steps

    @property
    def open_steps(self) -> range:
        """Steps that take microbatches: the one whose record is next and, with delayed steps, the one after it."""
        return range(self.version, self.version + 1 + self.manifest.settings.delay_optimizer_step)

    @property
    def coordinator(self) -> PeerId:
        """The peer that grants leases, closes steps and proposes records."""
        return PeerId(self.term[1])

    def follow_term(self, term: Term) -> bool:
        """Follow a term if it is higher than the known one, and return whether it is."""
        if term <= self.term:
            return False
        self.term = term
        return True

    def decides(self, peer: PeerId) -> bool:
        """Return whether a peer may vote, coordinate and lead; see `Electorate`."""
        return self.electorate.decides(peer)

    @property
    def trusted(self) -> list[PeerId]:
        """If servers are strangers: peers whose reports about a stage need no confirmation, the most trusted first."""
        keepers = self.electorate.keepers
        return [] if isinstance(keepers, UnsetType) else list(dict.fromkeys([self.coordinator, *keepers]))

    def check_coordinator(self, caller: PeerId) -> None:
        """Raise `NotCoordinator` for a server that does not coordinate (any more), `ProtocolError` for other peers."""
        if caller == self.coordinator:
            return
        if caller in self.servers:
            raise NotCoordinator(f"the run is coordinated by {self.coordinator} ({self.term}), not by {caller}")
        raise ProtocolError(f"the run is coordinated by {self.coordinator}, not by {caller}")

    def enter_generation(self, request: RestartRequest) -> None:
        """Enter the next generation of the run, at its first step, with the members that the lead knows."""
        self.manifest = structs.replace(
            self.manifest, generation=request.generation, first_step=request.first_step, selection=request.selection
        )
        self.version = request.first_step
        self.set_members(request.seats)
        self.snapshots, self.ordered_snapshot = [], None  # both belonged to the previous generation
        self._counted.clear()
        self._digests.clear()
        self._positions.clear()
        self.newest, self.selection = None, request.selection

    def change_lead(self, new_lead: PeerId) -> None:
        """Replace the lead, which is gone, by another peer; batches of the former lead no longer count."""
        manifest = self.manifest
        former = [peer for peer in (*(manifest.former_leads or ()), manifest.lead) if peer != new_lead][
            -MAX_FORMER_LEADS:
        ]
        self.trainers = [new_lead, *(peer for peer in self.trainers if peer not in (new_lead, manifest.lead))]
        self.manifest = structs.replace(manifest, lead=new_lead, trainers=self.trainers, former_leads=former)
        self.is_rolling_back = True

    def check_generation(self, generation: int) -> None:
        """Refuse a call of another generation of the run."""
        if generation != self.manifest.generation:
            raise ProtocolError(f"the run generation is {self.manifest.generation}, got a call of {generation}")

    def check(self, record: Record, seats: SeatedMembers | None = None) -> None:
        """Refuse a record that empties a stage, changes an unknown stage, or admits a peer without invitation.

        `seats`: the members after the record, if this peer missed earlier records.
        """
        if seats is None:
            check_invited(self.invitations, record)
            self.electorate.check(record, self.manifest.settings)
        after = seats or self.members_after(record)
        self.check_seats(after, record.enlisted)
        changed = [left.stage_index for left in record.left] + [new.stage_index for new in record.newcomers]
        highest = max(changed, default=0)
        if highest >= len(self.rosters):
            raise ProtocolError(f"record {record.step} changes stage {highest}; there are {len(self.rosters)} stages")

    def check_seats(self, seats: SeatedMembers, enlisted: Collection[PeerId] = ()) -> None:
        """Refuse members without the lead, with duplicates, an empty stage, or a wrong number of stages.

        Also refuse overused invitations, malformed bans and convicted peers, even among the new trainers `enlisted`.
        """
        check_used(seats.invitations)
        bans_after(UNSET, seats.bans)  # raises for malformed bans
        check_no_convicted(seats, enlisted)
        if self.manifest.lead not in seats.trainers or len(set(seats.trainers)) != len(seats.trainers):
            raise ProtocolError(
                f"the trainers must contain the lead {self.manifest.lead}, and no peer twice; their list begins with "
                f"{seats.trainers[:_MAX_NAMED]}"
            )
        sizes = [len(set(roster)) for roster in seats.rosters]
        if len(sizes) != len(self.rosters) or not all(sizes) or sizes != list(map(len, seats.rosters)):
            raise ProtocolError(
                f"each of {len(self.rosters)} stages must have at least one server, and no server twice; the numbers "
                f"of distinct servers are {sizes[:100]}, of {[len(roster) for roster in seats.rosters[:100]]} in all"
            )

    def view(self) -> RunView:
        """Return the view of the run for other peers."""
        return RunView(
            manifest=self.manifest, version=self.version, seats=self.seats, term=self.term, position=self.position
        )

    @property
    def on_trainers(self) -> list[bool]:
        """For each stage, whether the trainers hold it."""
        return [stage.on_trainers for stage in self.manifest.stages]

    @property
    def num_pipeline_stages(self) -> int:
        """The number of stages in the pipeline: all except a last stage that trainers hold."""
        return self.on_trainers.count(False)

    def lacks_model(self, trainer: PeerId) -> bool:
        """Return whether the model is not cut, and a trainer has no copy of it, because its own server left the run."""
        return self.manifest.is_whole and trainer not in self.servers

    @property
    def servers(self) -> list[PeerId]:
        """All peers that hold a stage."""
        return sorted({member.peer_id for roster in self.rosters for member in roster})

    def check_counted(self, step: int, first: int) -> None:
        """Raise `LeaseRevoked` if a decided step does not count a batch, `StepError` if the step is forgotten here."""
        if step not in self._counted:
            raise StepError(
                f"a trainer may be away for at most {_MAX_REMEMBERED} steps: step {self.version} is open, and this "
                f"peer has forgotten which batches step {step} counted. Restart the trainer's program."
            )
        if not self.counts(step, [first]):
            raise LeaseRevoked(f"the batch was struck from step {step}, which is decided without it")

    def counts(self, step: int, firsts: Collection[int]) -> bool:
        """Return whether the record of a step was applied here, and counts the batches at these places."""
        runs = self._counted.get(step)
        return runs is not None and all(any(first in places for places in runs) for first in firsts)

    def decided_digest(self, step: int) -> bytes:
        """Return the digest of the record of a step; raise `ProtocolError` if it is not known (any more)."""
        if step not in self._digests:
            raise ProtocolError(
                f"this peer, which is at version {self.version}, does not have the record of step {step}"
            )
        return self._digests[step]

    def check_trainer(self, caller: PeerId) -> None:
        """Refuse a caller that does not train in this run; raise `Replaced` for a former lead."""
        if caller in (self.manifest.former_leads or ()) and caller not in self.trainers:
            raise Replaced(replaced_by(self.manifest))
        if caller not in self.trainers:
            raise NotEnlisted(
                f"{caller} is none of the {len(self.trainers)} trainers of run {self.manifest.run_id!r}, of which "
                f"the first are {self.trainers[:_MAX_NAMED]}"
            )

    def check_holds(self, member: Member, stage_index: int) -> None:
        """Refuse work for a stage on a peer that is not in the stage's roster (yet), because it would not count."""
        if member not in self.rosters[stage_index]:
            raise NotMember(f"peer {member.peer_id} is not in the roster of stage {stage_index} (yet)")


def _remember(table: dict[int, _T], key: int, value: _T) -> None:
    table[key] = value
    if len(table) > _MAX_REMEMBERED:
        del table[next(iter(table))]


def record_digest(record: Record) -> bytes:
    """Return the SHA-256 digest of a record."""
    return hashlib.sha256(encode(record)).digest()


def replaced_by(manifest: Manifest) -> str:
    """Return the error text for a former lead that was replaced."""
    return (
        f"peer {manifest.lead} leads run {manifest.run_id!r} by now, because this peer was silent for too long, and "
        "has rolled the run back: what was done here since then does not count. Start this program again with "
        "`initial_peers`, and it will help."
    )


def boot_ids(manifest: Manifest, peer: PeerId) -> set[int]:
    """Return the boot ids of a peer in the manifest's rosters; none if it holds no stage when the run begins."""
    return {member.boot_id for stage in manifest.stages for member in stage.roster if member.peer_id == peer}
