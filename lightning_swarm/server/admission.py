"""How a server enters a run and leaves it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

from lightning_swarm.coordinator.coordinator import Coordinator
from lightning_swarm.core.errors import Busy, NotMember, ProtocolError, RunOver, StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import (
    InheritRequest,
    Manifest,
    Member,
    ReleaseRequest,
    RestartRequest,
    RunAborted,
    check_selection,
)
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, decode, encode
from lightning_swarm.protocol.methods import ADMIT, BREAK_OFF, INHERIT, LEAVE, VIEW
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.election import Leadership
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.step_handlers import StepHandlers


class Admission:
    """A server's place in the run.

    Args:
        transport: Its network.
        executor: Computes.
        model: Its copy of the model.
        stepping: Gets the stages.
        boot_id: Of this process's life.
        limits: Bounds.
        events: Of this peer.
        connect: Makes the run's other servers reachable.
        announce: Tells those who come later who coordinates the run.
        hosts: Whom this peer was told to join. They may end it while no run has it.
    """

    def __init__(
        self,
        transport: Transport,
        executor: Executor,
        model: PeerModel,
        stepping: StepHandlers,
        *,
        boot_id: int,
        limits: Limits,
        events: EventLog,
        connect: Callable[[], Awaitable[None]],
        announce: Callable[[PeerId], Awaitable[None]],
        hosts: Collection[PeerId],
    ) -> None:
        self._transport = transport
        self._executor = executor
        self.model = model
        self._stepping = stepping
        self._boot_id = boot_id
        self._limits = limits
        self._events = events
        self._connect = connect
        self._hosts = hosts
        self._one_by_one = asyncio.Lock()
        self._run: RunState | None = None
        self._asked: PeerId | None = None  # the coordinator of a run that this server wants to join
        self._former: tuple[PeerId, ...] = ()  # leads of runs that it was in before: they end it, too
        self.trains_in: RunState | None = None  # that this peer came to as a trainer; its server may not be in it
        self.loaded: set[int] = set()  # stages that have their initial weights
        self.moves = asyncio.Event()  # the newest record let it go, to join
        self.target: int | None = None  # this stage
        self.left = asyncio.Event()
        self._broken_off = ""  # why it is over, where its lead did not say so
        self.released = asyncio.Event()  # this peer's trainer is to go back; set until it has seen it
        self.goes_on_at = 0  # likewise: the step from which the next run goes on
        self.inherits = asyncio.Event()  # this peer is to go back with the run in the place of its lead
        self.inherits_at = 0  # to this step
        self.can_inherit: Callable[[int], bool] = lambda _: False  # from a step: it has what the lead's loop was at
        self.leadership = Leadership(
            transport, stepping, self.me, self.left, limits=limits, events=events, announce=announce
        )
        self.ready = asyncio.Event()  # all servers are in the run, and the stages of this one have weights
        transport.handle_call(ADMIT, self._handle_admit)
        transport.handle_call(LEAVE, self._handle_leave)
        transport.handle_call(BREAK_OFF, self._handle_break_off)
        transport.handle_call(VIEW, self._handle_view)
        transport.handle_call(INHERIT, self._handle_inherit)

    @property
    def run(self) -> RunState:
        """The run that this server is in, or follows in order to join it."""
        if self._run is None:
            raise NotMember("this peer was not admitted to a run yet")
        return self._run

    @property
    def me(self) -> Member:
        """This server in this life."""
        return Member(peer_id=self._transport.peer_id, boot_id=self._boot_id)

    @property
    def coordinator(self) -> Coordinator | None:
        """The role, while this server plays it."""
        return self.leadership.coordinator

    @property
    def is_member(self) -> bool:
        """Whether this server is in a roster of its run."""
        return self._run is not None and any(self.me in roster for roster in self._run.rosters)

    @property
    def has_run(self) -> bool:
        """Whether there is a `run`."""
        return self._run is not None

    @property
    def asked(self) -> PeerId | None:
        """The coordinator of the run that this server is joining, or has joined."""
        return self._asked

    @property
    def lead(self) -> PeerId | None:
        """Of the run that this server is in, or was in last."""
        if self._run is not None:
            return self._run.manifest.lead
        return self._former[-1] if self._former else None

    @property
    def ending_error(self) -> RunOver | StepError:
        """What a loop ends with, once this peer has `left`: the run came to its end, or broke off."""
        if self._broken_off:
            return StepError(f"the run is over: {self._broken_off}")
        return RunOver("the lead has ended the run")

    def led_by(self, peer: PeerId) -> bool:
        """Whether `peer` coordinates the run that this server is in, or wants to join."""
        if self.trains_in is not None and peer == self.trains_in.coordinator:
            return True
        return peer == (self._run.coordinator if self._run is not None else self._asked)

    def serves_with(self, peer: PeerId) -> bool:
        """Whether `peer` is a server of the run that this one is in."""
        return self._run is not None and peer in self._run.servers

    @contextlib.asynccontextmanager
    async def asking(self, coordinator: PeerId) -> AsyncIterator[bool]:
        """Be admitted by nobody else while a run is being joined. False: that has happened already."""
        async with self._one_by_one:  # not while the run that this server is being admitted to is built
            free = self._run is None
            if free:
                self._asked = coordinator
        try:
            yield free
        finally:
            if self._run is None:
                self._asked = None

    def ask(self, coordinator: PeerId) -> None:
        """It is another one than `asking` was told that coordinates the run which is being joined."""
        if self._run is None:
            self._asked = coordinator

    async def follow(self, run: RunState, stage: Stage) -> None:
        """Go along with a run's records, as a member of it or not yet."""
        self._run = run
        self.loaded = {stage.index}
        self._stepping.enter_run(run, {stage.index: stage})
        await self.leadership.follow(run)
        self.ready.set()

    async def step_out(self) -> None:
        """Be in no run, as before the first."""
        if self._run is not None:
            self._former = (self._run.manifest.lead,)
        self._run = self._asked = self.target = None
        self.moves.clear()
        await self.leadership.step_out()
        self.loaded.clear()
        self.ready.clear()

    async def close(self) -> None:
        """Stop coordinating, if this server does. Raises what a task of it raised."""
        await self.leadership.close()

    async def _handle_admit(self, caller: PeerId, body: bytes) -> bytes:
        manifest = decode(body, Manifest)
        async with self._one_by_one:  # one after the other: the second finds this peer in the run
            await self._admit(caller, manifest)
        return b""

    async def _admit(self, caller: PeerId, manifest: Manifest) -> None:
        if manifest.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"`protocol_version` is {manifest.protocol_version} there and {PROTOCOL_VERSION} here. "
                "Install the same version of lightning_swarm on all peers."
            )
        if self._run is not None:
            raise ProtocolError(f"this peer is in run {self._run.manifest.run_id!r} already")
        if self._asked is not None:
            raise ProtocolError(f"this peer is joining the run of {self._asked} already")
        if caller != manifest.lead:
            raise ProtocolError(f"a manifest comes from its lead {manifest.lead}, not from {caller}")
        me = self.me
        named = {member for stage in manifest.stages for member in stage.roster if member.peer_id == me.peer_id}
        if named - {me}:
            raise ProtocolError(f"peer {me.peer_id} was restarted: its boot id is {me.boot_id}")
        served = [index for index, stage in enumerate(manifest.stages) if me in stage.roster]
        stages, _ = await self._executor.submit(FIRST, lambda: self.model.build(manifest, served))
        await self._connect()
        self._run = RunState(manifest)
        self._stepping.enter_run(self._run, stages)
        await self.leadership.enter_run(self._run)

    def on_record(self, record: Record) -> None:
        """A record was applied; by who joins also one from before it was let go."""
        if any(newcomer.member == self.me for newcomer in record.newcomers):
            self.target = None
            self.moves.clear()
        for departure in record.departures:
            if departure.member == self.me:
                self.target = departure.stage_index
                self.moves.set()

    def go_back(self, caller: PeerId, request: RestartRequest) -> None:
        """Enter the run's next generation: calls of the old one are refused from now on, and weights are awaited."""
        manifest = self.run.manifest
        if caller != manifest.lead:
            raise ProtocolError(f"the lead {manifest.lead} sends a run back, not {caller}")
        if request.generation != manifest.generation + 1:
            raise ProtocolError(f"the run generation is {manifest.generation}; {request.generation} is not the next")
        self.run.check_seats(request.seats)
        if not any(self.me in roster for roster in request.seats.rosters):
            raise ProtocolError(
                f"peer {self.me.peer_id} with boot id {self.me.boot_id} is not among those that go back"
            )
        if (request.selection is None) != (manifest.selection is None):
            raise ProtocolError("a run trains in all of its generations, or in none")
        if request.selection is not None:
            check_selection(request.selection, manifest.stages)
        self.run.go_back(request)
        self.loaded.clear()

    def note_loaded(self, stage_index: int) -> None:
        """A stage has its initial weights."""
        self.loaded.add(stage_index)
        if self.loaded.issuperset(self._stepping.stages):
            self.ready.set()

    async def _handle_inherit(self, caller: PeerId, body: bytes) -> bytes:
        """The lead is gone, as who coordinates says: another peer goes back with the run."""
        request = decode(body, InheritRequest)
        run = self.run
        run.check_coordinator(caller)
        run.check_generation(request.generation)
        if request.heir not in run.servers or request.heir == run.manifest.lead:
            raise ProtocolError(f"a run is inherited by a server that does not lead it yet, got {request.heir}")
        is_me = request.heir == self.me.peer_id
        if is_me and not self.can_inherit(request.first_step):
            raise ProtocolError(f"this peer does not have what the loop was at step {request.first_step}")
        run.inherit(request.heir)
        if is_me:
            self.inherits_at = self.goes_on_at = request.first_step
            self.inherits.set()
            self.released.set()
        return b""

    def check_release(self, caller: PeerId, request: ReleaseRequest) -> None:
        """Refuse to leave a run on anybody's word but its lead's, which is not the run's end."""
        if caller != self.run.manifest.lead:
            raise ProtocolError(f"the lead {self.run.manifest.lead} releases its servers, not {caller}")
        self.run.check_generation(request.generation)

    def check_released_by(self, caller: PeerId) -> None:
        """Of a run that was left already: refuse whoever did not lead it then."""
        if self._former and caller not in self._former:
            raise ProtocolError(f"this peer was released by {self._former[-1]}, not by {caller}")

    def note_release(self, request: ReleaseRequest) -> None:
        """Let this peer's trainer know."""
        self.goes_on_at = request.first_step
        self.released.set()

    async def _handle_leave(self, caller: PeerId, body: bytes) -> bytes:
        if self._run is not None:
            enders: Collection[PeerId] = (self._run.manifest.lead, self._run.coordinator)
        else:
            enders = {*self._former, *(self._hosts if self._asked is None else (self._asked,))}
        if self.trains_in is not None:
            enders = {*enders, self.trains_in.manifest.lead, self.trains_in.coordinator}
        if caller not in enders:
            raise ProtocolError(f"this peer is ended by one of {sorted(set(enders))}, not by {caller}")
        if body:
            raise ProtocolError(f"{LEAVE} takes no arguments, got {len(body)} bytes")
        self.left.set()
        return b""

    async def _handle_break_off(self, caller: PeerId, body: bytes) -> bytes:
        """The lead is gone, as who coordinates says."""
        broken_off = decode(body, RunAborted)
        if not self.led_by(caller):
            raise ProtocolError(f"{caller} does not coordinate the run of this peer, and does not break it off")
        if not self.left.is_set():  # what was said first holds
            self._broken_off = broken_off.reason
            self.left.set()
        return b""

    async def _handle_view(self, caller: PeerId, body: bytes) -> bytes:
        """What run this is and who is in it, for whoever asks: to join it, or to show it."""
        if body:
            raise ProtocolError(f"{VIEW} takes no arguments, got {len(body)} bytes")
        if self._run is None or not self.ready.is_set():  # whoever asks could be one that is being admitted himself
            raise Busy("this peer was not admitted to a run yet")
        return encode(self._run.view())
