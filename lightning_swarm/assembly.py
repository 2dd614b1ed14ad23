"""The one place that picks concrete parts and wires them into a peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch

from lightning_swarm import entering, hello, membership, preemption, starting, survey, survivors
from lightning_swarm.config import Preemption, SwarmConfig
from lightning_swarm.environment import talks_to_neighbours
from lightning_swarm.errors import DeadlineExceeded, RunOver, SwarmError
from lightning_swarm.events import EventLog
from lightning_swarm.heirs import PackLoop
from lightning_swarm.lead import Lead
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.network.addresses import Address, widest
from lightning_swarm.network.links import Carried, Link
from lightning_swarm.partition import StageModule
from lightning_swarm.pipeline.around import Around
from lightning_swarm.run_state import RunState
from lightning_swarm.runtime import Runtime, ThreadRuntime, UntilLost, UntilOver
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import Executor, ThreadExecutor
from lightning_swarm.server.model import Model
from lightning_swarm.server.server import Server
from lightning_swarm.server.snapshots import Ordered
from lightning_swarm.server.staying import Stay
from lightning_swarm.session import Session
from lightning_swarm.starting import RunSpec
from lightning_swarm.steps import enlisting
from lightning_swarm.tasks import TaskOwner
from lightning_swarm.tickets import TicketStore
from lightning_swarm.training import Training
from lightning_swarm.types.reports import CarriedReport, LinkReport, PeerReport
from lightning_swarm.types.runs import Manifest, Member, RunView, ranges_of

_log = logging.getLogger(__name__)


class Peer:
    """One peer: its network, and its server if it holds stages.

    Args:
        runtime: The way to its loop.
        transport: Its network.
        directory: Where peers find each other.
        executor: Makes the thing that computes; called on the loop.
        config: The user's settings.
        rng: Wires pipelines, and tells this life of the peer from others: it gives no other peer the same numbers.

    Attributes:
        lead: What it does where runs are begun by it.
        server: None: it holds no stage.
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
        hello.answer(transport)
        survey.answer(transport, self._report, lambda: membership.known_servers(self._directory, self._config.run_id))
        self._tickets = TicketStore(transport, max_bytes=config.limits.max_message_bytes)
        self.server: Server | None = None
        self._stay: Stay | None = None
        self._keeping: asyncio.Task[None] | None = None  # its loop's state is being sent to others
        self._remaining: asyncio.Task[None] | None = None  # its server comes back whenever a record leaves it out
        self._tasks = TaskOwner()
        self.lead = Lead(runtime, transport, directory, config, is_over=self._is_over)
        self._training = Training(
            transport,
            self._tickets,
            config,
            self.events,
            rng,
            connect=lambda: membership.connect_all(self._directory, self.transport, self._config.run_id),
        )
        self._beside: survivors.Beside | None = None  # another trainer leads
        self._could_lead = False  # in its place
        self._announced = False  # its server, so that it may be found
        self._closed = False

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

    def serve(self, model: Model, *, trains: bool = False, inherits: bool = False) -> None:
        """Hold stages from now on, as soon as a run wants this peer.

        Args:
            model: This peer's copy.
            trains: It has data for the run, too.
            inherits: It has data, and leads the run when its lead is gone.
        """
        self.runtime.run(self.begin_to_serve(model, trains=trains, inherits=inherits))

    async def begin_to_serve(self, model: Model, *, trains: bool = False, inherits: bool = False) -> None:
        """As `serve`, on the loop."""
        await self._start_server(model)
        self._announced, self._could_lead = True, inherits
        await membership.announce(
            self._directory,
            self.transport,
            self._config.run_id,
            self.boot_id,
            trains=trains,
            inherits=inherits,
            timeout=self._config.limits.start_timeout,
        )

    async def _start_server(self, model: Model) -> None:
        if self.server is not None:  # the run went back, and this peer begins another one, or comes to it
            if not self.server.admission.has_run:
                self.server.serve_with(model)
            return
        self.server = Server(
            self.transport,
            self._tickets,
            self._executor(),
            model,
            boot_id=self.boot_id,
            limits=self._config.limits,
            events=self.events,
            connect=lambda: membership.connect_all(self._directory, self.transport, self._config.run_id),
            announce=partial(membership.announce_run, self._directory, self._config.run_id),
            hosts={address.peer_id for address in self._config.initial_peers},
        )
        self.server.snapshots.loops.unfit = self._unfit
        await self.server.start()
        self._stay = Stay(
            self.transport,
            self.server,
            partial(membership.find_runs, self._directory, self.transport, self._config.run_id),
            run_id=self._config.run_id,
            limits=self._config.limits,
            events=self.events,
            hosts={address.peer_id for address in self._config.initial_peers},
            known=self._known,
        )

    def _unfit(self, manifest: Manifest) -> str:
        """Why this peer could not lead a run; nothing, if it could."""
        if not self._could_lead:
            return "it was not started with data and the whole model"
        settings = ("target_batch_size", "delay_optimizer_step", "deterministic")
        other = next((name for name in settings if getattr(self._config, name) != getattr(manifest, name)), "")
        return f"its program has another `{other}`" if other else ""

    async def _known(self) -> Collection[PeerId]:
        await membership.connect_all(self._directory, self.transport, self._config.run_id)
        return (await membership.known_servers(self._directory, self._config.run_id)).keys()

    @property
    def address(self) -> str:
        """Where others reach this peer, as `lightning-swarm join` takes it."""
        return str(widest([Address.parse(text) for text in self.runtime.run(self.transport.addresses())]))

    def check_run_id(self) -> None:
        """Ask the peers that this one was told of whether they are for its run.

        Raises:
            ConfigError: They are for others.
        """
        self.runtime.run(starting.check_run_id(self.transport, self._config))

    def serve_to_the_end(self, say: Callable[[str], None]) -> None:
        """Be in a run that begins, or join one that is under way, and serve until it is over. See `stay`."""
        self.runtime.run(self.stay(say))

    async def stay(self, say: Callable[[str], None] = _log.info) -> None:
        """On the loop: enter a run, and return when it is over, or when it has let this peer go. See `Stay.last`."""
        assert self._stay is not None
        await self._stay.last(say)

    def leave(self) -> None:
        """Have `stay` ask the run to let this peer go. Returns at once; from any thread, or a signal's handler."""
        if self._stay is not None:
            self.runtime.post(self._stay.leave)

    def watch_for_notice(self, cloud: Preemption, on_notice: Callable[[str], None]) -> None:
        """Ask a cloud whether this machine is to go, from now on. `on_notice` is called once, on the loop."""
        self.runtime.run(self._watch_for_notice(cloud, on_notice))

    async def _watch_for_notice(self, cloud: Preemption, on_notice: Callable[[str], None]) -> None:
        await self._tasks.start()
        self._tasks.spawn(preemption.watch(cloud, on_notice))

    # ------------------------------------------------------------------ a trainer that comes to a run under way

    def find_run(self) -> RunView | None:
        """The run to train in; None: this peer begins it. Others may want to begin it, too: exactly one does.

        Raises:
            ConfigError: The run's settings are others than this peer's.
            DeadlineExceeded: Another one was to begin it, and did not.
        """
        view = self.runtime.run(entering.Claim(self.transport, self._directory, self._config).settle())
        if view is not None:
            entering.check(view, self._config)
        return view

    def find_run_again(self) -> RunView | None:
        """The run that has gone back without this peer, which trains in it; None: nobody shows it."""
        return self.runtime.run(entering.find_run(self._directory, self.transport, self._config))

    def train_in(
        self, seen: RunView, model: Model, server: Model | None, device: torch.device, *, inherits: bool
    ) -> tuple[Session, int]:
        """Open a trainer's session in a run under way, from one of its next steps on.

        Args:
            seen: The run.
            model: This peer's copy.
            server: What its server computes with, which joins a stage meanwhile; None: it holds none.
            device: Where the trainer's tensors live.
            inherits: It leads the run when its lead is gone.

        Returns:
            The session, and the epoch of the lead's loop.

        Raises:
            ConfigError: This peer's model is not the run's, or the run takes no trainers.
            RunOver: It ended before it let this one in.
        """
        model.check(seen.manifest)
        if server is not None:
            self.serve(server, trains=True, inherits=inherits)
        else:
            self.runtime.run(self._start_server(model))  # unannounced: it hears of the run's end, and holds no stage
        assert self.server is not None
        admission, limits = self.server.admission, self._config.limits
        run = admission.trains_in = RunState.seen(seen, seen.version)
        beside = self._beside = self._beside or survivors.Beside(self.transport, admission, limits=limits)
        beside.come()
        runtime = self._until_over(admission, admission.released, grace_s=limits.leave_timeout)
        if server is not None:
            self.runtime.run(self._remain(run))
        view, epoch = runtime.run(
            enlisting.enter(
                self.transport,
                run,
                timeout=limits.call_timeout,
                patience_s=limits.stage_timeout,
                alone_s=limits.lead_timeout,
            )
        )
        run = admission.trains_in = RunState.seen(view, view.version)
        beside.begin(run)
        return self._open_beside(run, model, device, runtime), epoch

    def _open_beside(self, run: RunState, model: Model, device: torch.device, runtime: Runtime) -> Session:
        stages = model.cut(ranges_of(run.manifest.stages))
        return self._training.open(
            run, stages, model.blocks, self._around(stages[-1], run), device=device, runtime=runtime
        )

    def leave_in_order(self) -> None:
        """Have the run let this peer's server go, if it is in one; for as long as that may take."""
        self.leave()
        with contextlib.suppress(RunOver, SwarmError):
            self.runtime.run(self._until_let_go())

    async def _until_let_go(self) -> None:
        if self._remaining is not None:
            await asyncio.wait({self._remaining}, timeout=self._config.limits.drain_timeout)

    # ------------------------------------------------------------------ another trainer than the starter

    def await_prepared(self, launch_id: str) -> None:
        """Wait until the starter, of the same launch, has prepared the data."""
        timeout = self._config.limits.lead_timeout
        self.runtime.run(membership.await_prepared(self._directory, self._config.run_id, launch_id, timeout=timeout))

    def join_run(self, model: Model, server: Model, device: torch.device) -> Session:
        """Serve, and open a trainer's session in the run as soon as the starter has begun it.

        Args:
            model: This peer's copy.
            server: What its server computes with.
            device: Where the trainer's tensors live.

        Raises:
            DeadlineExceeded: The starter did not begin.
            RunOver: It ended before it began.
        """
        self.serve(server, trains=True, inherits=self._could_lead)
        assert self.server is not None
        admission, limits = self.server.admission, self._config.limits
        beside = self._beside = self._beside or survivors.Beside(self.transport, admission, limits=limits)
        runtime = self._until_over(admission, admission.released, grace_s=limits.leave_timeout)
        run = runtime.run(self._begun(beside, admission, timeout=limits.lead_timeout))
        self.runtime.run(self._remain(run))
        return self._open_beside(run, model, device, runtime)

    async def _begun(self, beside: survivors.Beside, admission: Admission, *, timeout: float) -> RunState:
        """The run, once it has begun."""
        beside.waits = True
        try:
            async with asyncio.timeout(timeout):
                await admission.ready.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the run's starter did not begin within {timeout:g} s. Look for its error, or raise "
                "`Limits.lead_timeout`."
            ) from None
        finally:
            beside.waits = False
        run = admission.trains_in = RunState(admission.run.manifest)
        beside.begin(run)
        return run

    def wait_until_dismissed(self) -> None:
        """Serve until the run is over. A peer whose server would join again notices, too, if nobody says so.

        Raises:
            StepError: It broke off.
            WentBack: It goes on from an earlier step.
        """
        assert self.server is not None
        admission = self.server.admission
        runtime = self._until_over(admission, admission.released)
        with contextlib.suppress(RunOver):
            runtime.run(self._until_dismissed())

    def _until_over(
        self, admission: Admission, back: asyncio.Event | None = None, *, grace_s: float = 0.0
    ) -> UntilOver:
        """Without `back` at the lead, which is told by nobody to go back, but may be told that it came too late."""
        back = back or asyncio.Event()
        return UntilOver(
            self.runtime,
            admission.left,
            back,
            end=lambda: admission.end,
            deaf=lambda: self.transport.closed,
            grace_s=grace_s,
        )

    async def _until_dismissed(self) -> None:
        assert self.server is not None
        if self._remaining is None:
            await self.server.admission.left.wait()
        else:
            await asyncio.wait({self._remaining})

    # ------------------------------------------------------------------ as the lead

    def start_run(self, spec: RunSpec, model: Model, device: torch.device, check: Callable[[], None]) -> Session:
        """Begin a run with the servers that there are, and open a trainer's session in it.

        Args:
            spec: The run.
            model: The starter's copy: it initialises every stage.
            device: Where the trainer's tensors live.
            check: Called while waiting; raises when a server's process has died.
        """
        servers = self.lead.find_servers(spec, check)
        stages = model.cut(spec.ranges)
        if not self._announced and stages[-1].spec.on_trainers:
            self.runtime.run(self._start_server(model))  # unannounced: it holds that stage and no other
        run = self.lead.begin(spec, model, self._me, stages, servers)
        self.runtime.run(self._remain(run))
        above = self.runtime if self.server is None else self._until_over(self.server.admission)
        runtime = UntilLost(above, self.lead.lost_for_good)
        return self._training.open(
            run, stages, model.blocks, self._around(stages[-1], run), device=device, runtime=runtime
        )

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
        admission.trains_in = self._beside = None
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

    # ------------------------------------------------------------------ trainer and server of one peer

    async def _remain(self, run: RunState) -> None:
        """While this peer trains, have its server join again when it was left out; not with layers on the trainers."""
        serves = self._stay is not None and self._announced and run.manifest.selection is not None
        if not serves or run.manifest.stages[-1].on_trainers:
            return
        if self._remaining is not None and not self._remaining.done():  # the run went back, and it is there still
            return
        assert self._stay is not None
        await self._tasks.start()
        self._remaining = self._tasks.spawn(self._stay.remain())

    @property
    def _me(self) -> Member:
        return Member(peer_id=self.transport.peer_id, boot_id=self.boot_id)

    def _around(self, last: StageModule, run: RunState) -> Around | None:
        if not last.spec.on_trainers:
            return None
        assert self.server is not None
        index = last.spec.index
        return Around(last, self.server.stepping, self.runtime, lambda: self._me in run.rosters[index])

    def served_tensors(self, version: int, *, timeout: float) -> list[torch.Tensor]:
        """Parameters and buffers that this peer's own server computes with; see `Stepping.tensors_at`."""
        if self.server is None:
            return []
        return self.runtime.run(self.server.stepping.tensors_at(version, within_s=timeout))

    def told_to_go_back(self) -> int | None:
        """Not at the lead, after an error: the step from which the run goes on. None: as it is, or not at all."""
        return None if self._beside is None else self.runtime.run(self._beside.told_to_go_back())

    @property
    def is_told(self) -> bool:
        """Whether its server, which is in the run, was told that it goes back."""
        return self.server is not None and self.server.admission.released.is_set()

    @property
    def is_led_anew(self) -> bool:
        """Not at the lead, once the run was released: whether another peer leads it than this one knew."""
        return self._beside is not None and self._beside.is_led_anew

    def tell_loop(self, could_go_on: survivors.CouldGoOn) -> None:
        """Not at the lead: what says at which versions this trainer's loop could go on. See `survivors.Beside`."""
        assert self._beside is not None
        self._beside.could_go_on = could_go_on

    @property
    def ordered(self) -> Ordered | None:
        """The newest snapshot that this peer's server was told to take."""
        return self.server.snapshots.ordered if self.server is not None else None

    # ------------------------------------------------------------------ the end of a run

    def release(self, first_step: int) -> None:
        """End the run, but no server: those that answer are there for the next one, which begins at `first_step`."""
        self.runtime.run(self._training.end())
        if self._beside is None:
            self.lead.release(first_step, serves=self._announced)
        else:
            assert self.server is not None
            self.server.admission.released.clear()

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
            await self._tasks.close()
            if self.server is not None:
                server, self.server = self.server, None
                await server.close()
        finally:
            await self._directory.close()
            await self.transport.close()
            self._training.close()


def hivemind_peer(config: SwarmConfig) -> Peer:
    """A peer on a real network, with its loop and its compute in threads of their own."""
    from lightning_swarm.network import hivemind  # starts nothing, but costs a second that tests can do without

    runtime = ThreadRuntime()
    try:
        transport, directory = runtime.run(
            hivemind.start(
                host=config.listen.host,
                port=config.listen.port,
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


def _link(peer: str, link: Link) -> LinkReport:
    def said(one: Carried | None) -> CarriedReport | None:
        return CarriedReport(num_bytes=one.num_bytes, took_s=one.took_s) if one is not None else None

    return LinkReport(peer_id=peer, round_trip_s=link.round_trip_s, sent=said(link.sent), received=said(link.received))
