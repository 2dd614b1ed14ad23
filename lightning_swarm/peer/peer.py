"""The one place that picks concrete parts and wires them into a peer."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_swarm.client.session import Session
from lightning_swarm.core.event_loop import Runtime, ThreadRuntime, UntilStageLost
from lightning_swarm.core.process import ProcessSettings
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.monitor import survey
from lightning_swarm.network import Directory, Transport
from lightning_swarm.network.addresses import Address, widest
from lightning_swarm.network.bandwidth import LinkEstimate, TransferSample
from lightning_swarm.peer import discovery, lead, preemption
from lightning_swarm.peer.config import Preemption, SwarmConfig
from lightning_swarm.peer.failover import PackLoop
from lightning_swarm.peer.follower import Follower
from lightning_swarm.peer.lead import Lead, RunSpec
from lightning_swarm.peer.process import talks_to_neighbours, tunes_malloc
from lightning_swarm.peer.server_host import ServerHost
from lightning_swarm.peer.trainer_role import TrainerRole
from lightning_swarm.protocol import handshake
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.reports import CarriedReport, LinkReport, PeerReport
from lightning_swarm.protocol.messages.state import OrderedSnapshots
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.executor import Executor, ThreadExecutor
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import PeerModel

_log = logging.getLogger(__name__)


class Peer:
    """One peer: its network, its server if it holds stages, and its parts in runs.

    Args:
        runtime: The way to its loop.
        transport: Its network.
        directory: Where peers find each other.
        executor: Makes the thing that computes; called on the loop.
        config: The user's settings.
        rng: Wires pipelines, and tells this life of the peer from others: it gives no other peer the same numbers.

    Attributes:
        lead: What it does where it begins runs.
        follower: What it does where another trainer leads.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        directory: Directory,
        *,
        executor: Callable[[], Executor],
        config: SwarmConfig,
        rng: random.Random,
    ) -> None:
        self.runtime = runtime
        self.transport = transport
        self._directory = directory
        self._executor = executor
        self._config = config
        self.events = EventLog()
        self.boot_id = rng.getrandbits(62)
        self._began_s = time.monotonic()
        handshake.answer(transport)
        survey.answer(transport, self._report, lambda: discovery.known_servers(self._directory, self._config.run_id))
        self._tickets = TicketStore(transport, max_bytes=config.limits.max_message_bytes)
        self._host = ServerHost(
            transport,
            directory,
            self._tickets,
            executor=lambda: self._executor(),  # noqa: PLW0108 - looked up when the server starts, as tests pace it
            config=config,
            events=self.events,
            boot_id=self.boot_id,
        )
        self._training = TrainerRole(transport, self._tickets, config, self.events, rng, connect=self._host.connect)
        self.lead = Lead(runtime, transport, directory, config, is_over=self._is_over)
        self.follower = Follower(runtime, transport, directory, config, self._host, self._training)
        self._tasks = TaskOwner()
        self._keeping: asyncio.Task[None] | None = None  # its loop's state is being sent to others
        self._closed = False

    @property
    def server(self) -> Server | None:
        """None: it holds no stage."""
        return self._host.server

    def _report(self) -> PeerReport:
        traffic = self.transport.traffic
        return PeerReport(
            run_id=self._config.run_id,
            age_s=time.monotonic() - self._began_s,
            sent_bytes=traffic.sent_bytes.total(),
            received_bytes=traffic.received_bytes.total(),
            server=self.server.report() if self.server is not None else None,
            links=[_link(peer, link) for peer, link in self.transport.links.items()],
        )

    def serve(self, model: PeerModel, *, trains: bool = False, inherits: bool = False) -> None:
        """Hold stages from now on, as soon as a run wants this peer.

        Args:
            model: This peer's copy.
            trains: It has data for the run, too.
            inherits: It has data, and leads the run when its lead is gone.
        """
        self.runtime.run(self.begin_to_serve(model, trains=trains, inherits=inherits))

    async def begin_to_serve(self, model: PeerModel, *, trains: bool = False, inherits: bool = False) -> None:
        """As `serve`, on the loop."""
        await self._host.serve(model, trains=trains, inherits=inherits)

    @property
    def address(self) -> str:
        """Where others reach this peer, as `lightning-swarm join` takes it."""
        return str(widest([Address.parse(text) for text in self.runtime.run(self.transport.addresses())]))

    def check_run_id(self) -> None:
        """Ask the peers that this one was told of whether they are for its run.

        Raises:
            ConfigError: They are for others.
        """
        self.runtime.run(lead.check_run_id(self.transport, self._config))

    def serve_to_the_end(self, say: Callable[[str], None]) -> None:
        """Be in a run that begins, or join one that is under way, and serve until it is over. See `serve_run`."""
        self.runtime.run(self.serve_run(say))

    async def serve_run(self, say: Callable[[str], None] = _log.info) -> None:
        """On the loop: enter a run, and return when it is over or has let this peer go."""
        await self._host.serve_run(say)

    def leave(self) -> None:
        """Have `serve_run` ask the run to let this peer go. Returns at once; from any thread, or a signal's handler."""
        self.runtime.post(self._host.leave)

    def watch_for_notice(self, cloud: Preemption, on_notice: Callable[[str], None]) -> None:
        """Ask a cloud whether this machine is to go, from now on. `on_notice` is called once, on the loop."""
        self.runtime.run(self._watch_for_notice(cloud, on_notice))

    async def _watch_for_notice(self, cloud: Preemption, on_notice: Callable[[str], None]) -> None:
        await self._tasks.start()
        self._tasks.spawn(preemption.watch(cloud, on_notice))

    # ------------------------------------------------------------------ as the lead

    def start_run(self, spec: RunSpec, model: PeerModel, device: torch.device, check: Callable[[], None]) -> Session:
        """Begin a run with the servers that there are, and open a trainer's session in it.

        Args:
            spec: The run.
            model: The starter's copy: it initialises every stage.
            device: Where the trainer's tensors live.
            check: Called while waiting; raises when a server's process has died.
        """
        servers = self.lead.find_servers(spec, check)
        stages = model.cut(spec.ranges)
        if not self._host.announced and stages[-1].spec.on_trainers:
            self.runtime.run(self._host.start(model))  # unannounced: it holds that stage and no other
        run = self.lead.begin_run(spec, model, self._host.me, stages, servers)
        self.runtime.run(self._host.keep_joined(run))
        above = self.runtime if self.server is None else self._host.until_over(self.runtime)
        runtime = UntilStageLost(above, self.lead.lost_for_good)
        around = self._host.around(stages[-1], run, self.runtime)
        return self._training.open(run, stages, model.blocks, around, device=device, runtime=runtime)

    def _is_over(self) -> bool:
        """Whether this peer's server was told that the run is, and the others are free."""
        return self.server is not None and self.server.admission.left.is_set()

    # ------------------------------------------------------------------ in the place of the lead

    @property
    def inherits(self) -> bool:
        """Whether this peer, which did not lead, is to go back with the run and lead it from there."""
        return self.server is not None and self.server.admission.inherits.is_set()

    def inherit(self) -> tuple[int, Any]:
        """Lead the run that is to go back. Returns the step it goes on from, and what the loop was at there."""
        assert self.server is not None
        admission = self.server.admission
        admission.inherits.clear()
        admission.released.clear()
        loop = self.server.snapshots.loops.get(admission.inherits_at)
        self.follower.lead_instead()
        self.lead.inherit(admission.run)
        return admission.inherits_at, loop

    def keep_loop(self, version: int, pack: PackLoop) -> None:
        """At the lead: have others keep what its loop is at; returns at once."""
        self.runtime.run(self._keep_loop(version, pack))

    async def _keep_loop(self, version: int, pack: PackLoop) -> None:
        await self._tasks.start()
        if self._keeping is not None:
            self._keeping.cancel()
        self._keeping = self._tasks.spawn(self.lead.keep_loop(version, pack))

    # ------------------------------------------------------------------ what its own server holds

    def served_tensors(self, version: int, *, timeout: float) -> list[torch.Tensor]:
        """Parameters and buffers that this peer's own server computes with; see `StepHandlers.tensors_at`."""
        if self.server is None:
            return []
        return self.runtime.run(self.server.stepping.tensors_at(version, within_s=timeout))

    @property
    def ordered(self) -> OrderedSnapshots | None:
        """The newest snapshot that this peer's server was told to take."""
        return self.server.snapshots.ordered if self.server is not None else None

    # ------------------------------------------------------------------ the end of a run

    def release(self, first_step: int) -> None:
        """End the run, but no server: those that answer are there for the next one, which begins at `first_step`."""
        self.runtime.run(self._training.leave_run())
        if self.follower.follows:
            self._host.admission.released.clear()
        else:
            self.lead.release(first_step, serves=self._host.announced)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Leave the swarm. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            self.runtime.run(self._close())
        finally:
            self.runtime.close()

    async def _close(self) -> None:
        try:
            try:
                await self._tasks.close()
            finally:
                await self._host.close()
        finally:
            await self._directory.close()
            await self.transport.close()
            self._training.close()


def hivemind_peer(config: SwarmConfig) -> Peer:
    """A peer on a real network, with its loop and its compute in threads of their own."""
    from lightning_swarm.network import hivemind  # starts nothing, but costs a second that tests can do without

    runtime = ThreadRuntime(settings=ProcessSettings(keeps_memory=not tunes_malloc()))
    try:
        transport, directory = runtime.run(
            hivemind.start(
                listen=config.listen,
                announce=[place.maddr for place in config.announce],
                identity_path=config.identity_path,
                initial_peers=[address.maddr for address in config.initial_peers],
                startup_timeout=config.limits.start_timeout,
                silence_timeout=config.limits.silence_timeout,
                neighbours=talks_to_neighbours(),
            )
        )
    except BaseException:
        runtime.close()
        raise
    return Peer(
        runtime, transport, directory, executor=ThreadExecutor, config=config, rng=random.Random(secrets.randbits(64))
    )


def _link(peer: str, link: LinkEstimate) -> LinkReport:
    def said(one: TransferSample | None) -> CarriedReport | None:
        return CarriedReport(num_bytes=one.num_bytes, took_s=one.took_s) if one is not None else None

    return LinkReport(peer_id=peer, round_trip_s=link.round_trip_s, sent=said(link.sent), received=said(link.received))
