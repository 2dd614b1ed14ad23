"""A peer, assembled from its parts; the only module that chooses their implementations."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

import torch
from msgspec import UNSET

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.event_loop import Runtime, UntilStageLost
from lightning_swarm.core.progress import Report
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.monitor import survey
from lightning_swarm.network import Directory, LinkEstimate, PeerId, TransferSample, Transport
from lightning_swarm.network.addresses import Address, most_reachable
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.peer import lead, preemption
from lightning_swarm.peer.config import Preemption, SwarmConfig
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.peer.entry import Entry, warn_before_end
from lightning_swarm.peer.failover import PackLoop
from lightning_swarm.peer.follower import Follower
from lightning_swarm.peer.lead import Lead
from lightning_swarm.peer.manifest import RunSpec
from lightning_swarm.peer.network import start_network
from lightning_swarm.peer.server_host import ServerHost
from lightning_swarm.peer.text_requests import TextRequests
from lightning_swarm.peer.trainer_role import TrainerRole
from lightning_swarm.protocol import bans, queries
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.reports import CarriedReport, LinkReport, LoggedNumber, PeerReport
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.state import OrderedSnapshots
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.executor import Executor, ThreadExecutor
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import PeerModel

_PING_TIMEOUT_S: Final = 2.0  # timeout of a ping to a server that is in no run


class Peer:
    """One peer: its network, its server if it holds stages, and its parts as lead and as follower of runs."""

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        directory: Directory,
        *,
        executor: Callable[[], Executor],  # makes the compute thread, on the loop
        config: SwarmConfig,
        may_lead: bool = True,  # may take over a run if its lead dies
        # Keepers of an audited run that this peer begins, if no certificates name the peers' roles.
        keepers: Collection[PeerId] = (),
        rng: random.Random,  # breaks routing ties, and draws the boot id, so each peer needs its own seed
    ) -> None:
        self.runtime = runtime
        self.transport = transport
        self._directory = RunDirectory(directory, transport, config.run_id, config.settings.has_strangers)
        self._executor = executor
        self._config = config
        self._may_lead = may_lead
        self.events = EventLog()
        # Events omit the refused peers' ids, because strangers could otherwise fill the list. The log has them.
        transport.on_refused = lambda times: self.events.note("refused", times=times)
        self.boot_id = rng.getrandbits(62)
        self._start_s = time.monotonic()
        self._permit = transport.permit_of(transport.peer_id)  # this peer's certificate; None in an open run
        queries.answer_greetings(transport)
        bans.answer_bans(transport, self._members, self._spawn)
        survey.answer(transport, self._report, self._known_servers)
        self.logged: Callable[[], list[LoggedNumber]] = list  # the numbers that this trainer logs as the lead
        self.text_requests = TextRequests(transport, runtime.post)
        self._tickets = TicketStore(transport, max_bytes=config.limits.max_message_bytes)
        self._host = ServerHost(
            self._directory,
            self._tickets,
            lambda: self._executor(),  # noqa: PLW0108 - looked up when the server starts, because tests replace it
            config,
            self.events,
            Member(peer_id=transport.peer_id, boot_id=self.boot_id),
        )
        connect = self._directory.connect_all
        self._training = TrainerRole(transport, self._tickets, config, self.events, rng, connect)
        self.lead = Lead(runtime, self._directory, config, self.events, self._is_over, keepers)
        self.follower = Follower(runtime, self._directory, config, self._host, self._training)
        self._tasks = TaskOwner()
        self._sending_loop: asyncio.Task[None] | None = None  # sends the loop's state to the standbys
        self._renewing: asyncio.Task[None] | None = None  # renews this peer's announcements
        self._closed = False

    @property
    def server(self) -> Server | None:
        """This peer's server; None if it holds no stage."""
        return self._host.server

    def _report(self) -> PeerReport:
        sent_bytes, received_bytes = self.transport.traffic.totals()
        return PeerReport(
            run_id=self._config.run_id,
            age_s=time.monotonic() - self._start_s,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            server=self.server.report() if self.server is not None else None,
            links=[_link(peer, link) for peer, link in self.transport.links.items()],
            role=UNSET if self._permit is None else self._permit.role,
            refused=self.transport.num_refused,
            logged=self.logged(),
        )

    async def _known_servers(self) -> dict[PeerId, list[str]]:
        """Return the run's servers, and announced servers outside the run if they answer."""
        known = await self._directory.known_servers()
        outside = known.keys() - {self.transport.peer_id, *self._members()}
        gone = outside - await alive_among(self.transport, outside, timeout=_PING_TIMEOUT_S)
        return {peer: addresses for peer, addresses in known.items() if peer not in gone}

    def _members(self) -> list[PeerId]:
        """Return all peers of the run that this peer is in; empty if it is in no run."""
        run = self.server.membership.run_or_none if self.server is not None else self.lead.run
        return [] if run is None else [*run.servers, *run.trainers]

    def serve(self, model: PeerModel, *, trains: bool = False, may_take_over: bool = False) -> None:
        """Start this peer's server and announce it, so that a run can admit it and assign stages to it."""
        # With `trains` this peer also trains. With `may_take_over` it could take over if the lead dies.
        self.runtime.run(self.start_server(model, trains=trains, may_take_over=may_take_over))

    async def start_server(self, model: PeerModel, *, trains: bool = False, may_take_over: bool = False) -> None:
        """Like `serve`, on the loop."""
        await self._host.announce(model, trains=trains, may_take_over=may_take_over and self._may_lead)
        await self._renew_announcements()

    @property
    def address(self) -> str:
        """The address of this peer, as `lightning-swarm join` takes it."""
        return str(most_reachable([Address.parse(text) for text in self.runtime.run(self.transport.addresses())]))

    def check_run_id(self) -> None:
        """Raise a ConfigError if the `initial_peers` belong to other runs; see `lead.check_run_id`."""
        self.runtime.run(lead.check_run_id(self.transport, self._config))

    async def serve_run(self, report: Report) -> None:
        """On the loop: enter a run; return when it is over or has released this peer."""
        await self._host.serve_run(report)

    def leave(self) -> None:
        """Make `serve_run` leave the run; returns at once, and may be called in any thread or signal handler."""
        self.runtime.post(self._host.leave)

    def watch_for_notice(self, cloud: Preemption, on_notice: Callable[[str], None]) -> None:
        """Watch for a cloud's notice that it will preempt this machine; call `on_notice` once, on the loop."""
        self.runtime.run(self._spawn(preemption.watch(cloud, on_notice)))

    async def _renew_announcements(self) -> None:
        if self._renewing is None:
            self._renewing = await self._spawn(self._directory.renew())
            if self._permit is not None:
                await self._spawn(warn_before_end(self._permit.expires_at_s))

    async def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        await self._tasks.start()
        return self._tasks.spawn(work)

    def start_run(self, spec: RunSpec, model: PeerModel, device: torch.device, check: Callable[[], None]) -> Session:
        """Begin a run with announced servers and the weights of `model`; return this trainer's session in the run."""
        servers = self.lead.find_servers(spec, check)
        stages = model.build_stages(spec.ranges)
        if not self._host.announced and stages[-1].spec.on_trainers:
            # Not announced, because it holds only the stage of the trainers.
            self.runtime.run(self._host.start(model.twin()))
        run = self.lead.begin_run(spec, model, self._host.me, stages, servers)
        self.runtime.run(self._renew_announcements())
        self.runtime.run(self._host.keep_joined(run))
        runtime_until_over = self.runtime if self.server is None else self._host.runtime_until_over(self.runtime)
        runtime = UntilStageLost(runtime_until_over, self.lead.wait_until_lost)
        local_layers = self._host.local_layers(stages[-1], run, self.runtime, runtime)
        return self._training.open(run, stages, local_layers, device=device, runtime=runtime)

    def _is_over(self) -> bool:
        """Return whether this peer's server was notified that the run is over."""
        return self.server is not None and self.server.admission.left.is_set()

    @property
    def must_take_over(self) -> bool:
        """True if this peer, a standby, must roll the run back and lead it from there."""
        return self.server is not None and self.server.admission.inherits.is_set()

    def take_over(self) -> tuple[int, Any]:
        """Take over the run to roll it back; return the step to roll back to and the state of the loop there."""
        assert self.server is not None
        admission = self.server.admission
        admission.inherits.clear()
        admission.released.clear()
        loop = self.server.snapshots.loops.get(admission.inherits_at)
        self.follower.stop_following()
        self.lead.take_over(admission.membership.run)
        return admission.inherits_at, loop

    def keep_loop(self, version: int, pack: PackLoop) -> None:
        """At the lead: begin to send the loop's state to standbys; return at once."""
        self.runtime.run(self._keep_loop(version, pack))

    async def _keep_loop(self, version: int, pack: PackLoop) -> None:
        if self._sending_loop is not None:
            self._sending_loop.cancel()
        self._sending_loop = await self._spawn(self.lead.keep_loop(version, pack))

    @property
    def ordered(self) -> OrderedSnapshots | None:
        """The snapshots that this peer's server was ordered to keep."""
        return self.server.snapshots.ordered if self.server is not None else None

    def release(self, first_step: int) -> None:
        """End this generation of the run; servers that answer stay for the next, which begins at `first_step`."""
        self.runtime.run(self._training.leave_run())
        if self.follower.follows:
            self._host.admission.released.clear()  # a set event would end calls in the next generation
        else:
            self.lead.end_generation(first_step, serves=self._host.announced)

    def close(self) -> None:
        """Leave the swarm. May be called twice."""
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
            await self._directory.directory.close()
            await self.transport.close()
            self._training.close()


def hivemind_peer(config: SwarmConfig, entry: Entry | None) -> Peer:
    """Start a peer on a real network, with one thread for its event loop and one for its compute."""
    assert (entry is not None) == config.is_invited
    runtime, transport, directory = start_network(config, entry)
    rng = random.Random(secrets.randbits(64))
    may_lead = entry is None or entry.may_lead
    return Peer(runtime, transport, directory, executor=ThreadExecutor, config=config, may_lead=may_lead, rng=rng)


def _link(peer: str, link: LinkEstimate) -> LinkReport:
    def report(sample: TransferSample | None) -> CarriedReport | None:
        return CarriedReport(num_bytes=sample.num_bytes, took_s=sample.took_s) if sample is not None else None

    sent, received = report(link.sent), report(link.received)
    return LinkReport(peer_id=peer, round_trip_s=link.round_trip_s, sent=sent, received=received)
