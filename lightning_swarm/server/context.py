"""State that all parts of one server share: its resources, and the run that it is in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Container
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

from msgspec import UNSET

from lightning_swarm.core.errors import NotMember, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.bans import apply_received_ban, bans_after
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.invitations import check_used
from lightning_swarm.protocol.keepers import check_begun_by_keepers, check_no_convicted
from lightning_swarm.protocol.messages.run import InheritRequest, Manifest, Member, RestartRequest, check_selection
from lightning_swarm.protocol.run_state import RunState, check_protocol_version
from lightning_swarm.protocol.settings import RunSettings
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.oversight import NO_OVERSIGHT, Overseer, Oversight

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class ServerContext:
    """The network, the compute thread, the limits, the log and the run that all parts of one server share."""

    transport: Transport
    tickets: TicketStore  # where results wait to be fetched
    executor: Executor
    boot_id: int  # distinguishes this process from the processes that had this peer's id before
    limits: Limits
    events: EventLog
    connect: Callable[[], Awaitable[None]]  # makes the run's other servers reachable
    announce: Callable[[PeerId], Awaitable[None]]  # announces the run's coordinator to later joiners
    overseer: Overseer
    hosts: Collection[PeerId] = ()  # peers named at the start, which may end this peer while it is in no run
    tasks: TaskOwner = field(default_factory=TaskOwner)

    @property
    def me(self) -> Member:
        """This server, with the boot id of this process."""
        return Member(peer_id=self.transport.peer_id, boot_id=self.boot_id)

    @cached_property
    def membership(self) -> RunMembership:
        """The run that this server is in."""
        return RunMembership(self.me, self.hosts, apply_ban=partial(apply_received_ban, self.transport))

    async def compute(self, run: Callable[[], _T]) -> _T:
        """Run a job on the compute thread, before all waiting microbatches."""
        return (await self.executor.submit(FIRST, run))[0]


class RunMembership:
    """The run that a server is in, or follows in order to join it; refuses calls that do not belong there."""

    def __init__(
        self, me: Member, hosts: Collection[PeerId] = (), *, apply_ban: Callable[[bytes], None] = lambda _: None
    ) -> None:
        self.me = me
        self._apply_ban = apply_ban  # applies a signed ban to the transport
        self._hosts = hosts  # peers named at the start, which may end this peer while it is in no run
        # The server may leave the run while a job is on the compute thread, so such a job reads this field once.
        self.run_or_none: RunState | None = None
        self.joining: PeerId | None = None  # the coordinator of the run that this server is joining, or has joined
        self._former_lead: PeerId | None = None  # the lead of the former run, which may still end this peer
        self.trains_in: RunState | None = None  # the run that this peer joined as a trainer; its server may be out
        self.loaded: set[int] = set()  # stages that have their initial weights in this generation
        self.oversee: Callable[[RunSettings], Oversight] = lambda _: NO_OVERSIGHT  # chooses the hooks of a run
        self.oversight = NO_OVERSIGHT  # the hooks of the run that this server is in, or was in last
        self.introduced: Container[PeerId] = ()  # peers that the coordinator introduced as joiners

    @property
    def run(self) -> RunState:
        """The run; without a run, raise `NotMember`, so that the caller tries another server."""
        if self.run_or_none is None:
            raise NotMember("this peer was not admitted to a run yet")
        return self.run_or_none

    @property
    def running(self) -> RunState:
        """The run; without a run, raise `ProtocolError`, for calls that only members receive."""
        if self.run_or_none is None:
            raise ProtocolError("this peer is not in a run yet, or has left its run")
        return self.run_or_none

    @property
    def has_run(self) -> bool:
        """True if there is a run."""
        return self.run_or_none is not None

    @property
    def is_member(self) -> bool:
        """True if this server is in a roster of its run."""
        return self.has_run and any(self.me in roster for roster in self.run.rosters)

    @property
    def lead(self) -> PeerId | None:
        """The lead of the run that this server is in, or was in last."""
        return self.run_or_none.manifest.lead if self.run_or_none is not None else self._former_lead

    def coordinated_by(self, peer: PeerId) -> bool:
        """Return whether `peer` coordinates the run that this server is in, or wants to join."""
        if self.trains_in is not None and peer == self.trains_in.coordinator:
            return True
        return peer == (self.run_or_none.coordinator if self.run_or_none is not None else self.joining)

    def serves_with(self, peer: PeerId) -> bool:
        """Return whether `peer` is a server of this server's run."""
        return self.run_or_none is not None and peer in self.run_or_none.servers

    def may_coordinate(self, peer: PeerId) -> bool:
        """Return whether `peer` is a server of the run, and may decide in it."""
        return self.serves_with(peer) and self.run.decides(peer)

    def knows_server(self, peer: PeerId) -> bool:
        """Return whether `peer` is a server of the run, or joins it: the record that admits it may arrive late."""
        return self.serves_with(peer) or peer in self.introduced

    # ------------------------------------------------------------------ in and out

    def enter_run(self, run: RunState, loaded: Collection[int] = ()) -> None:
        """Enter a run, or follow it in order to join. The stages in `loaded` have their weights."""
        self.oversight = self.oversee(run.manifest.settings)
        self.run_or_none, self.loaded = run, set(loaded)
        run.apply_bans_by(self._apply_ban)

    def leave_run(self) -> None:
        """Leave the run, and refuse its calls from now on."""
        self._former_lead = self.lead
        self.run_or_none, self.joining, self.loaded = None, None, set()

    def enter_generation(self, caller: PeerId, request: RestartRequest) -> None:
        """Enter the run's next generation: refuse calls of the old generation from now on, and wait for weights."""
        run = self.run
        manifest = run.manifest
        self.check_lead(caller, "rolls a run back")
        if request.generation != manifest.generation + 1:
            raise ProtocolError(f"the run's next generation is {manifest.generation + 1}, got {request.generation}")
        run.check_seats(request.seats)
        if not any(self.me in roster for roster in request.seats.rosters):
            raise ProtocolError(
                f"peer {self.me.peer_id} with boot id {self.me.boot_id} is in no roster of the next generation"
            )
        if (request.selection is None) != (manifest.selection is None):
            raise ProtocolError("a run trains in all of its generations, or in none")
        if request.selection is not None:
            check_selection(request.selection, manifest.stages)
        run.enter_generation(request)
        self.loaded = set()

    # ------------------------------------------------------------------ checks

    def check_admits(self, caller: PeerId, manifest: Manifest) -> None:
        """Refuse admission by a peer other than the lead, or of an earlier process of this peer."""
        check_protocol_version(manifest.protocol_version, own_place="here", refuse=ProtocolError)
        if self.run_or_none is not None:
            raise ProtocolError(f"this peer is in run {self.run_or_none.manifest.run_id!r} already")
        if self.joining is not None:
            raise ProtocolError(f"this peer is joining the run of {self.joining} already")
        check_used(manifest.invitations)
        bans_after(UNSET, manifest.bans)
        check_no_convicted(RunState(manifest).seats)
        check_begun_by_keepers(manifest)
        if caller != manifest.lead:
            raise ProtocolError(f"a manifest comes from its lead {manifest.lead}, not from {caller}")
        me = self.me
        named = {member for stage in manifest.stages for member in stage.roster if member.peer_id == me.peer_id}
        if named - {me}:
            raise ProtocolError(f"peer {me.peer_id} was restarted, and its boot id is now {me.boot_id}")

    def check_inherits(self, caller: PeerId, request: InheritRequest) -> None:
        """Refuse a new lead unless the coordinator names it, and it is another server, which may lead."""
        run = self.run
        run.check_coordinator(caller)
        run.check_generation(request.generation)
        # During a rollback, an earlier call has already named this lead.
        leads_already = request.new_lead == run.manifest.lead and not run.is_rolling_back
        if request.new_lead not in run.servers or leads_already:
            raise ProtocolError(f"a new lead must be another server of the run, got {request.new_lead}")
        run.electorate.check_decides(request.new_lead, "lead")

    def check_lead(self, caller: PeerId, does: str) -> None:
        """Refuse any caller but the lead; `does` is the request as a verb, for the error."""
        if caller != self.run.manifest.lead:
            raise ProtocolError(f"the lead {self.run.manifest.lead} {does}, not {caller}")

    def check_trainer(self, caller: PeerId) -> None:
        """Refuse a caller that does not train in the run."""
        self.run.check_trainer(caller)

    def check_server(self, caller: PeerId) -> None:
        """Refuse a caller that neither holds a stage of the run nor joins it."""
        if not self.knows_server(caller):
            raise ProtocolError(f"the caller must be a server of this peer's run, got {caller}")

    def check_released_by(self, caller: PeerId) -> None:
        """Refuse a repeated release, after the run was left, by any peer but its former lead."""
        if self._former_lead != caller:  # None in a process that was in no run since its start
            raise ProtocolError(f"this peer was released by {self._former_lead}, not by {caller}")

    def check_ended_by(self, caller: PeerId) -> None:
        """Refuse to end the run for a peer that neither leads nor coordinates a run of this peer; see `_hosts`."""
        enders = {self._former_lead, *(self._hosts if self.joining is None else (self.joining,))}
        if self.run_or_none is not None:
            enders = {self.run_or_none.manifest.lead, self.run_or_none.coordinator}
        if self.trains_in is not None:
            enders |= {self.trains_in.manifest.lead, self.trains_in.coordinator}
        if caller not in enders:
            known = sorted(peer for peer in enders if peer is not None)
            raise ProtocolError(f"the run of this peer may be ended by one of {known}, not by {caller}")

    def protected_run(self, caller: PeerId) -> RunState | None:
        """Return a run that `caller`, its coordinator, may end here only once the lead is gone; None: end it."""
        # A peer that waits to join depends on the coordinator anyway, and may be unknown to the lead.
        trains = self.trains_in is not None and self.me.peer_id in self.trains_in.trainers
        run = self.run_or_none if self.is_member else self.trains_in if trains else None
        return None if run is None or caller == run.manifest.lead else run
