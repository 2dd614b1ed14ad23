"""Takes a server into a run and out of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    AccessDenied,
    Busy,
    NotEnlisted,
    ProtocolError,
    Replaced,
    RunOver,
    StepError,
    SwarmError,
)
from lightning_swarm.core.readable import printable_lines
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.protocol.messages.run import InheritRequest, LeadsRequest, Manifest, RunAborted, RunView
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.rpc import ADMIT, BREAK_OFF, INHERIT, LEADS, LEAVE, VIEW
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.election import Election
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.step_handlers import StepHandlers

_log = logging.getLogger(__name__)


class Admission:
    """Takes a server into a run and out of it, and reports to its peer how the run ended."""

    def __init__(self, context: ServerContext, model: PeerModel, steps: StepHandlers) -> None:
        self._transport, self._silence_s = context.transport, context.limits.silence_timeout
        self._connect = context.connect
        self._compute = context.compute
        self.membership = context.membership
        self.model = model  # builds the stages; may be replaced while there is no run
        self._steps = steps
        self.transition = asyncio.Lock()  # one transition at a time: into a run, into its next generation, or out of it
        self.moves = asyncio.Event()  # set if the newest record released this server, to join another stage
        self.target: int | None = None  # the stage to which this server moves
        self.left = asyncio.Event()  # set if the run is over for this peer
        self.failure: StepError | None = None  # set if this server's stages have become unusable
        self._broken_off = ""  # the reason, if the run was broken off instead of ended by its lead
        self.released = asyncio.Event()  # set until this peer's trainer has seen that it must roll back
        self.continues_at = 0  # the step from which the next run continues
        self.inherits = asyncio.Event()  # set if this peer must roll the run back in place of its lead
        self.inherits_at = 0  # the step to which it rolls back
        self.can_inherit: Callable[[int], bool] = lambda _: False  # whether the lead's loop at a step is kept here
        self.election = Election(context, steps, self.left)
        self.ready = asyncio.Event()  # set once all servers are in the run and this server's stages have weights
        ADMIT.serve(context.transport, self._handle_admit)
        LEAVE.serve(context.transport, self._handle_leave, admit=self.membership.check_ended_by)
        BREAK_OFF.serve(context.transport, self._handle_break_off)
        VIEW.serve(context.transport, self._handle_view)
        INHERIT.serve(context.transport, self._handle_inherit)

    @property
    def ending_error(self) -> RunOver | StepError:
        """The error with which a trainer's loop ends once `left` is set: the run ended, or was broken off."""
        if self._broken_off:
            return StepError(f"the run is over: {self._broken_off}")
        return RunOver("the lead has ended the run")

    @property
    def trainers_error(self) -> RunOver | StepError:
        """The `ending_error` for this peer's trainer, which may have led the run before another peer rolled it back."""
        try:
            if self.membership.has_run:
                self.membership.run.check_trainer(self.membership.me.peer_id)
        except Replaced as error:
            return error
        except NotEnlisted:
            pass
        return self.ending_error

    @contextlib.asynccontextmanager
    async def joining_run(self, coordinator: PeerId) -> AsyncIterator[bool]:
        """Prevent admission to other runs while joining a run; yield False if this peer is in a run already."""
        async with self.transition:  # waits for an admission in progress
            is_free = not self.membership.has_run
            if is_free:
                self.membership.joining = coordinator
        try:
            yield is_free
        finally:
            if not self.membership.has_run:
                self.membership.joining = None

    async def follow(self, run: RunState, stage: Stage) -> None:
        """Follow a run's records with a stage, as a joiner, until a record admits this server."""
        self.membership.enter_run(run, {stage.index})
        self._steps.enter_run({stage.index: stage})
        await self.election.follow(run)
        self.ready.set()

    async def step_out(self) -> None:
        """Leave the run, and return to the state before the first run."""
        self.membership.leave_run()
        self.target = None
        self.moves.clear()
        self.ready.clear()
        await self.election.step_out()

    async def _handle_admit(self, caller: PeerId, manifest: Manifest) -> None:
        """Enter a run at its beginning, with the stages that its manifest assigns to this server."""
        async with self.transition:  # a second call waits, and then finds this peer in the run
            self.membership.check_admits(caller, manifest)
            served = [index for index, stage in enumerate(manifest.stages) if self.membership.me in stage.roster]
            stages = await self._compute(lambda: self.model.build(manifest, served))
            await self._connect()
            self.membership.enter_run(RunState(manifest))
            self._steps.enter_run(stages)
            await self.election.enter_run(self.membership.run)

    def on_record(self, record: Record) -> None:
        """Update `moves` and `target` from an applied record."""
        # A joiner may apply again the record that released it from its former stage, so its admission resets both.
        if any(newcomer.member == self.membership.me for newcomer in record.newcomers):
            self.target = None
            self.moves.clear()
        for departure in record.departures:
            if departure.member == self.membership.me:
                self.target = departure.stage_index
                self.moves.set()

    def note_loaded(self, stage_index: int) -> None:
        """Record that a stage has its initial weights."""
        self.membership.loaded.add(stage_index)
        if self.membership.loaded.issuperset(self._steps.stages):
            self.ready.set()

    async def _handle_inherit(self, caller: PeerId, request: InheritRequest) -> None:
        """Accept the new lead that the coordinator names because the former lead is gone."""
        self.membership.check_inherits(caller, request)
        if request.new_lead == self.membership.run.manifest.lead:
            return  # a repeated call
        await self._check_lead_missed(self.membership.run)
        self.membership.check_inherits(caller, request)  # the run may have changed meanwhile
        if request.new_lead == self.membership.run.manifest.lead:
            return
        is_me = request.new_lead == self.membership.me.peer_id
        if is_me and not self.can_inherit(request.first_step):
            raise ProtocolError(f"a new lead must have the loop's state at step {request.first_step}")
        self.membership.run.change_lead(request.new_lead)
        if is_me:
            self.inherits_at = self.continues_at = request.first_step
            self.inherits.set()
            self.released.set()

    async def _check_lead_missed(self, run: RunState) -> None:
        """Raise `Busy` while the lead answers here: the coordinator alone must not replace it, or end the run."""
        lead, timeout = run.manifest.lead, self._silence_s / 4  # short, because the coordinator has already waited long
        if not await alive_among(self._transport, [lead], timeout=timeout):
            return
        try:
            await LEADS.ask(self._transport, lead, LeadsRequest(generation=run.manifest.generation), timeout=timeout)
        except SwarmError as error:
            if isinstance(error, ProtocolError) and not isinstance(error, AccessDenied):
                return  # the lead's process was restarted, and is in no run or in another run
            _log.info("The lead answers pings, but not calls: %s", error)
        raise Busy(f"only a silent lead may be replaced or have its run ended, and the lead {lead} answers this server")

    async def _handle_leave(self, caller: PeerId, _: None) -> None:
        """End the run here. If the coordinator asks for it instead of the lead, wait until the lead does not answer."""
        if (run := self.membership.protected_run(caller)) is not None:
            await self._await_lead_missed(run)
        self.left.set()

    async def _await_lead_missed(self, run: RunState) -> None:
        """Wait a while until the lead is gone: it may be ending, and its own call may be lost."""
        deadline_s = now_s() + self._silence_s / 2
        while not self.left.is_set():
            try:
                await self._check_lead_missed(run)
            except Busy:
                if now_s() >= deadline_s:
                    raise
                await asyncio.sleep(self._silence_s / 8)
            else:
                return

    async def _handle_break_off(self, caller: PeerId, broken_off: RunAborted) -> None:
        """Break off the run, because the coordinator reports that the lead is gone."""
        if not self.membership.coordinated_by(caller):
            raise ProtocolError(f"only the coordinator of a run may break it off, got a call of {caller}")
        if not self.left.is_set() and (run := self.membership.protected_run(caller)) is not None:
            await self._check_lead_missed(run)
        if not self.left.is_set():  # the first ending counts
            self._broken_off = printable_lines(broken_off.reason)
            self.left.set()

    async def _handle_view(self, caller: PeerId, _: None) -> RunView:
        """Return the run and its members to any peer that asks, to join the run or to show it."""
        if not (self.membership.has_run and self.ready.is_set()):  # the caller may wait for the same admission
            raise Busy("this peer was not admitted to a run yet")
        return self.membership.run.view()
