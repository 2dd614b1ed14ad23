"""A peer's server: started when there is something to serve, at home in one run after the other, there to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from lightning_swarm import membership
from lightning_swarm.config import SwarmConfig
from lightning_swarm.events import EventLog
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.partition import StageModule
from lightning_swarm.pipeline.around import Around
from lightning_swarm.run_state import RunState
from lightning_swarm.runtime import Runtime, UntilOver
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import Executor
from lightning_swarm.server.model import Model
from lightning_swarm.server.server import Server
from lightning_swarm.server.staying import Stay
from lightning_swarm.tasks import TaskOwner
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.runs import Manifest, Member


class Host:
    """Of one peer. Its coroutines run on the loop.

    Args:
        transport: The peer's network.
        directory: Where peers find each other.
        tickets: What the peer holds for others, and asks of them.
        executor: Makes the thing that computes; called on the loop.
        config: The user's settings.
        events: Of the peer.
        boot_id: Tells this life of the peer from others.

    Attributes:
        server: None: it holds no stage.
        announced: Whether it may be found.
        could_lead: Whether this peer could, in the place of the lead.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        tickets: TicketStore,
        *,
        executor: Callable[[], Executor],
        config: SwarmConfig,
        events: EventLog,
        boot_id: int,
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._tickets = tickets
        self._executor = executor
        self._config = config
        self._events = events
        self.me = Member(peer_id=transport.peer_id, boot_id=boot_id)
        self.server: Server | None = None
        self.announced = self.could_lead = False
        self._stay: Stay | None = None
        self._tasks = TaskOwner()
        self._remaining: asyncio.Task[None] | None = None  # it comes back whenever a record leaves it out

    @property
    def admission(self) -> Admission:
        """Of the server that was started."""
        assert self.server is not None
        return self.server.admission

    async def serve(self, model: Model, *, trains: bool = False, inherits: bool = False) -> None:
        """Hold stages from now on, as soon as a run wants this peer.

        Args:
            model: This peer's copy.
            trains: It has data for the run, too.
            inherits: It has data, and leads the run when its lead is gone.
        """
        await self.start(model)
        self.announced, self.could_lead = True, inherits
        await membership.announce(
            self._directory,
            self._transport,
            self._config.run_id,
            self.me.boot_id,
            trains=trains,
            inherits=inherits,
            timeout=self._config.limits.start_timeout,
        )

    async def start(self, model: Model) -> None:
        """Unannounced."""
        if self.server is not None:  # the run went back, and this peer begins another one, or comes to it
            if not self.admission.has_run:
                self.server.serve_with(model)
            return
        self.server = Server(
            self._transport,
            self._tickets,
            self._executor(),
            model,
            boot_id=self.me.boot_id,
            limits=self._config.limits,
            events=self._events,
            connect=self.connect,
            announce=partial(membership.announce_run, self._directory, self._config.run_id),
            hosts={address.peer_id for address in self._config.initial_peers},
        )
        self.server.snapshots.loops.unfit = self._unfit
        await self.server.start()
        self._stay = Stay(
            self._transport,
            self.server,
            partial(membership.find_runs, self._directory, self._transport, self._config.run_id),
            run_id=self._config.run_id,
            limits=self._config.limits,
            events=self._events,
            hosts={address.peer_id for address in self._config.initial_peers},
            known=self._known,
        )

    async def connect(self) -> None:
        """Make the run's servers reachable."""
        await membership.connect_all(self._directory, self._transport, self._config.run_id)

    async def _known(self) -> Collection[PeerId]:
        await self.connect()
        return (await membership.known_servers(self._directory, self._config.run_id)).keys()

    def _unfit(self, manifest: Manifest) -> str:
        """Why this peer could not lead a run; nothing, if it could."""
        if not self.could_lead:
            return "it was not started with data and the whole model"
        settings = ("target_batch_size", "delay_optimizer_step", "deterministic")
        other = next((name for name in settings if getattr(self._config, name) != getattr(manifest, name)), "")
        return f"its program has another `{other}`" if other else ""

    async def stay(self, say: Callable[[str], None]) -> None:
        """Enter a run, and return when it is over, or when it has let this peer go. See `Stay.last`."""
        assert self._stay is not None
        await self._stay.last(say)

    def leave(self) -> None:
        """Have `stay` ask the run to let this peer go."""
        if self._stay is not None:
            self._stay.leave()

    async def close(self) -> None:
        """End it. Raises what a task raised."""
        try:
            await self._tasks.close()
        finally:
            server, self.server = self.server, None
            if server is not None:
                await server.close()

    # ------------------------------------------------------------------ beside a trainer of the same peer

    async def remain(self, run: RunState) -> None:
        """While this peer trains, have its server join again when it was left out; not with layers on the trainers."""
        serves = self._stay is not None and self.announced and run.manifest.selection is not None
        if not serves or run.manifest.stages[-1].on_trainers:
            return
        if self._remaining is not None and not self._remaining.done():  # the run went back, and it is there still
            return
        assert self._stay is not None
        await self._tasks.start()
        self._remaining = self._tasks.spawn(self._stay.remain())

    async def until_let_go(self) -> None:
        """For as long as the run may take to let it go, if it is in one."""
        if self._remaining is not None:
            await asyncio.wait({self._remaining}, timeout=self._config.limits.drain_timeout)

    async def until_dismissed(self) -> None:
        """Until the run is over. A server that would join again notices, too, if nobody says so."""
        if self._remaining is None:
            await self.admission.left.wait()
        else:
            await asyncio.wait({self._remaining})

    def until_over(self, runtime: Runtime, back: asyncio.Event | None = None, *, grace_s: float = 0.0) -> UntilOver:
        """The way to the loop until the run is over, as this server is told.

        Args:
            runtime: That way.
            back: Set when the run goes back. None: at the lead, which is told that by nobody, but may be told that it
                came too late.
            grace_s: As in `UntilOver`.
        """
        admission = self.admission
        return UntilOver(
            runtime,
            admission.left,
            back or asyncio.Event(),
            end=lambda: admission.end,
            deaf=lambda: self._transport.closed,
            grace_s=grace_s,
        )

    def around(self, last: StageModule, run: RunState, runtime: Runtime) -> Around | None:
        """What the trainer computes itself, if there is anything outside of the pipeline."""
        if not last.spec.on_trainers:
            return None
        assert self.server is not None
        index = last.spec.index
        return Around(last, self.server.stepping, runtime, lambda: self.me in run.rosters[index])
