"""A peer's server, which is started on demand and stays for later runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.client.pipeline.local_layers import LocalLayers
from lightning_swarm.core.errors import Unreachable
from lightning_swarm.core.event_loop import Runtime, UntilRunEnds
from lightning_swarm.core.progress import Report
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.model.partition import StageModule
from lightning_swarm.network import PeerId
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.peer.lifecycle import MembershipLifecycle, RunContacts
from lightning_swarm.peer.oversight import overseer
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import Manifest, Member
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.settings import SET_BY_EACH_LEAD
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import Executor
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import PeerModel

_LOOK_S: Final = 0.1


@dataclass(eq=False)
class ServerHost:
    """Runs one peer's server in one run after another; its coroutines run on the loop."""

    _directory: RunDirectory
    _tickets: TicketStore
    _executor: Callable[[], Executor]  # makes the compute thread, on the loop
    _config: SwarmConfig
    _events: EventLog
    me: Member
    server: Server | None = field(default=None, init=False)  # None: this peer holds no stage
    announced: bool = field(default=False, init=False)  # runs can find the server
    _is_leaving: bool = field(default=False, init=False)  # `leave` was called
    may_take_over: bool = field(default=False, init=False)  # this peer could take over from a lead that is gone
    _lifecycle: MembershipLifecycle | None = field(default=None, init=False)
    _tasks: TaskOwner = field(default_factory=TaskOwner, init=False)
    # The task that keeps the server in the run while this peer trains.
    _serving: asyncio.Task[None] | None = field(default=None, init=False)

    @property
    def admission(self) -> Admission:
        """The admission of the server, which must have been started."""
        assert self.server is not None
        return self.server.admission

    async def announce(self, model: PeerModel, *, trains: bool = False, may_take_over: bool = False) -> None:
        """Start the server and announce it, so that a run can admit it; `serve_run` enters a run."""
        # With `trains` this peer also trains. With `may_take_over` it could take over if the lead dies.
        await self.start(model)
        self.announced, self.may_take_over = True, may_take_over
        timeout = self._config.limits.start_timeout
        await self._directory.announce(
            self.me.boot_id, trains=trains, inherits=may_take_over, arithmetic=model.arithmetic, timeout=timeout
        )

    async def start(self, model: PeerModel) -> None:
        """Start the server without announcing it; keep a server that is already there for the next generation."""
        if self.server is not None:  # the run rolled back, and this peer begins or joins its next generation
            if not self.server.membership.has_run:
                self.server.admission.model = model
            return
        hosts = {address.peer_id for address in self._config.initial_peers}
        context = ServerContext(
            self._directory.transport,
            self._tickets,
            self._executor(),
            boot_id=self.me.boot_id,
            limits=self._config.limits,
            events=self._events,
            connect=self._directory.connect_all,
            announce=self._directory.announce_run,
            overseer=overseer,
            hosts=hosts,
        )
        self.server = Server(context, model)
        self.server.snapshots.loops.unfit = self._why_unfit
        await self.server.start()
        contacts = RunContacts(
            run_id=self._config.run_id,
            find_runs=self._directory.find_runs,
            hosts=hosts,
            find_servers=self._find_servers,
        )
        self._lifecycle = MembershipLifecycle(
            self._directory.transport, self.server, contacts, self._config.limits, self._events
        )

    async def _find_servers(self) -> Collection[PeerId]:
        await self._directory.connect_all()
        return (await self._directory.known_servers()).keys()

    def _why_unfit(self, manifest: Manifest) -> str:
        """Return why this peer could not lead a run; empty if it could."""
        if not self.may_take_over:
            return "it was not started with data and the whole model"
        setting = self._config.settings.first_difference(manifest.settings, SET_BY_EACH_LEAD)
        return f"its program has another `{setting}`" if setting else ""

    async def serve_run(self, say: Report) -> None:
        """Enter a run; return when it is over or this peer has left it."""
        assert self._lifecycle is not None
        try:
            await self._lifecycle.serve_run(say)
        finally:
            if self._is_leaving:  # so that joiners do not try to reach this peer for up to an hour
                await self._directory.withdraw()

    def leave(self) -> None:
        """Make `serve_run` ask the run to let this peer leave."""
        self._is_leaving = True
        if self._lifecycle is not None:
            self._lifecycle.leave()

    async def close(self) -> None:
        """End the server; raise the error of a task that failed."""
        try:
            await self._tasks.close()
        finally:
            server, self.server = self.server, None
            if server is not None:
                await server.close()

    async def keep_joined(self, run: RunState) -> None:
        """Make this peer's server join again, while the peer trains, whenever a record has left it out."""
        # Without a selection the run only evaluates.
        if self._lifecycle is None or not self.announced or run.manifest.selection is None:
            return
        # No server can join again to hold the layers around a pipeline. After a rollback, `_serving` still runs.
        holds_local_layers = run.manifest.stages[-1].on_trainers and not run.manifest.is_whole
        if holds_local_layers or (self._serving is not None and not self._serving.done()):
            return
        await self._tasks.start()
        self._serving = self._tasks.spawn(self._lifecycle.serve_beside_trainer())

    def is_member(self, version: int) -> bool:
        """Return whether the server is in the run, and knows the run at this version or a later one."""
        membership = self.admission.membership
        return membership.is_member and self.admission.ready.is_set() and membership.run.version >= version

    async def until_member(self, version: int) -> None:
        """Wait until the run has admitted the server, at this version or later; raise if `_serving` ended before."""
        while not self.is_member(version):
            if self._serving is not None and self._serving.done():
                raise Unreachable(
                    "in a run of an uncut model each trainer's server must hold the model, but this server was not "
                    "admitted, for the reason in the log above. Start this peer again."
                )
            await asyncio.sleep(_LOOK_S)

    async def until_server_left(self) -> None:
        """Wait until the server has left the run, up to `Limits.drain_timeout`."""
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=self._config.limits.drain_timeout)

    async def until_dismissed(self) -> None:
        """Wait until the run is over."""
        if self._serving is None:
            await self.admission.left.wait()
        else:  # also notices a run that ended without dismissing this peer
            await asyncio.wait({self._serving})

    def runtime_until_over(
        self, runtime: Runtime, rolled_back: asyncio.Event | None = None, *, grace_s: float = 0.0
    ) -> UntilRunEnds:
        """Return a runtime whose calls end when this server is notified that the run is over, or that it rolls back."""
        admission = self.admission
        return UntilRunEnds(
            runtime,
            admission.left,
            rolled_back or asyncio.Event(),  # the lead passes None, because it rolls back itself
            ending_error=lambda: admission.trainers_error,
            is_cut_off=lambda: self._directory.transport.closed,
            grace_s=grace_s,
        )

    def local_layers(
        self, last: StageModule, run: RunState, runtime: Runtime, runtime_until_over: Runtime
    ) -> LocalLayers | None:
        """Return the layers outside the pipeline, which the trainer computes itself; None if there are none."""
        if not last.spec.on_trainers:
            return None
        assert self.server is not None
        index = last.spec.index
        layers = LocalLayers(last, self.server.steps, runtime, lambda: self.me in run.rosters[index])
        if run.manifest.is_whole and run.manifest.open_to_trainers:  # a server that was left out joins again
            layers.is_in_roster = lambda: self.is_member(run.version)
            layers.wait_until_in_roster = lambda: runtime_until_over.run(self.until_member(run.version))
        return layers
