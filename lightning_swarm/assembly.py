"""The one place that picks concrete parts and wires them into a peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from lightning_swarm import hello, membership, preemption, starting, survey, survivors
from lightning_swarm.checkpoint.snapshots import Whole, gather_snapshots
from lightning_swarm.config import Preemption, SwarmConfig
from lightning_swarm.errors import DeadlineExceeded, RunOver
from lightning_swarm.events import EventLog
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.network.addresses import Address, host_of, widest
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.partition import Blocks, StageModule
from lightning_swarm.pipeline.around import Around
from lightning_swarm.pipeline.copies import Copies
from lightning_swarm.pipeline.link import Link
from lightning_swarm.pipeline.pipeline import Pipeline, PipelineConfig
from lightning_swarm.pipeline.policy import StageRouter
from lightning_swarm.pipeline.replaying import Replayer
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
from lightning_swarm.steps.client import StepClient
from lightning_swarm.steps.role import Role
from lightning_swarm.steps.snapshot_orders import ask_held, newest_complete
from lightning_swarm.tasks import TaskOwner
from lightning_swarm.tickets import TicketStore
from lightning_swarm.types.reports import PeerReport
from lightning_swarm.types.runs import Member, RestartRequest

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
_MICROBATCHES_PER_STAGE = 4
"""Parts of a batch when no size is given: a pipeline of S stages is busy for M / (M + S - 1) of the time."""


class Peer:
    """One peer: its network, and its server if it holds stages.

    Args:
        runtime: The way to its loop.
        transport: Its network.
        directory: Where peers find each other.
        executor: Makes the thing that computes; called on the loop.
        config: The user's settings.
        rng: Wires pipelines, and tells this life of the peer from others: its seed is of this peer alone.
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
        self._rng = rng
        self.events = EventLog()
        self.boot_id = rng.getrandbits(62)
        self._began_s = time.monotonic()
        hello.answer(transport)
        survey.answer(transport, self._report, lambda: membership.known_servers(self._directory, self._config.run_id))
        self._tickets = TicketStore(transport, max_bytes=config.limits.max_message_bytes)
        self.server: Server | None = None
        self._stay: Stay | None = None
        self._remaining: asyncio.Task[None] | None = None  # its server comes back whenever a record leaves it out
        self._tasks = TaskOwner()
        self.run: RunState | None = None  # that this peer began, as its trainer knows it
        self.stages: tuple[StageModule, ...] = ()  # its own, of the run that it began
        self._copies = Copies(config.limits.cache_bytes)
        self._training = Role(
            transport, (), {}, idle="trains in no run"
        )  # as a trainer: its calls are those of one run
        self._generation = 0  # of the run that this peer begins next
        self._seed: int | None = None  # of the one before
        self._survivors: Collection[PeerId] | None = None  # of the one before, whose run was void in the end
        self._others: Collection[PeerId] = ()  # those of them that train, but for this peer
        self._beside: survivors.Beside | None = None  # another trainer leads
        self._announced = False  # its server, so that it may be found
        self.versions_kept: Callable[[], Collection[int]] = tuple  # of the states of this peer's loop, if it leads
        self.num_known_dead: Callable[[], int] = int  # processes of this machine's peers that have ended
        self._closed = False

    def _report(self) -> PeerReport:
        traffic = self.transport.traffic
        return PeerReport(
            run_id=self._config.run_id,
            age_s=time.monotonic() - self._began_s,
            sent_bytes=traffic.sent_bytes.total(),
            received_bytes=traffic.received_bytes.total(),
            server=self.server.report() if self.server is not None else None,
        )

    def serve(self, model: Model, *, trains: bool = False) -> None:
        """Hold stages from now on, as soon as a run wants this peer. `trains`: it has data for the run, too."""
        self.runtime.run(self._serve(model, trains=trains))

    async def _serve(self, model: Model, *, trains: bool) -> None:
        await self._start_server(model)
        self._announced = True
        await membership.announce(
            self._directory,
            self.transport,
            self._config.run_id,
            self.boot_id,
            trains=trains,
            timeout=self._config.limits.start_timeout,
        )

    async def _start_server(self, model: Model) -> None:
        if self.server is not None:  # the run went back, and this peer begins another one
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
        await self.server.start()
        self._stay = Stay(
            self.transport,
            self.server,
            partial(membership.find_runs, self._directory, self.transport, self._config.run_id),
            run_id=self._config.run_id,
            limits=self._config.limits,
            events=self.events,
        )

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
        """Enter a run, and return when it is over, or when it has let this peer go. See `Stay.last`."""
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
        self.serve(server, trains=True)
        assert self.server is not None
        admission, limits = self.server.admission, self._config.limits
        beside = self._beside = self._beside or survivors.Beside(self.transport, admission, limits=limits)
        runtime = self._until_over(admission, admission.released, grace_s=limits.leave_timeout)
        run = runtime.run(self._begun(beside, admission, timeout=limits.lead_timeout))
        self.runtime.run(self._remain(run))
        ranges = [range(one.first_block, one.end_block) for one in run.manifest.stages if not one.on_trainers]
        return self._session(run, model.cut(ranges), model.blocks, device, runtime)

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
        run = RunState(admission.run.manifest)
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

    # ------------------------------------------------------------------ the starter

    def check_first(self) -> None:
        """Ask whether the run may begin here, before anyone is told of this peer.

        Raises:
            ConfigError: It is under way.
        """
        if self._config.initial_peers:
            self.runtime.run(starting.check_first(self._directory, self.transport, self._config))

    def say_prepared(self, launch_id: str) -> None:
        """Tell the other trainers of this launch that the data is prepared."""
        timeout = self._config.limits.start_timeout
        self.runtime.run(membership.say_prepared(self._directory, self._config.run_id, launch_id, timeout=timeout))

    def start_run(self, spec: RunSpec, model: Model, device: torch.device, check: Callable[[], None]) -> Session:
        """Begin a run with the servers that there are, and open a trainer's session in it.

        Args:
            spec: The run.
            model: The starter's copy: it initialises every stage.
            device: Where the trainer's tensors live.
            check: Called while waiting; raises when a server's process has died.
        """
        limits = self._config.limits
        among = self._survivors
        if among is not None:
            spec = replace(spec, num_trainers=min(spec.num_trainers, 1 + len(self._others)))
            self.runtime.run(
                survivors.await_loops(self.transport, self._others, timeout=limits.start_timeout, check=check)
            )
        servers = self.runtime.run(
            membership.find_servers(
                self._directory,
                self.transport,
                self._config.run_id,
                spec.num_servers if among is None else len(among),
                num_trainers=spec.num_trainers,
                among=among,
                timeout=limits.start_timeout,
                check=check,
            )
        )
        trainers = self.runtime.run(membership.trainers_among(self._directory, self._config.run_id, servers))
        self.stages = stages = model.cut(spec.ranges)
        if not self._announced and stages[-1].spec.on_trainers:
            self.runtime.run(self._start_server(model))  # unannounced: it holds that stage and no other
        # What is computed again draws the same random numbers.
        spec = replace(spec, generation=self._generation, seed=spec.seed if self._seed is None else self._seed)
        announced = self.runtime.run(membership.known_servers(self._directory, self._config.run_id))
        hosts = {peer: host_of(addresses) for peer, addresses in announced.items() if addresses}
        manifest = starting.manifest(spec, self._config, model, self._me, servers, trainers, hosts)
        self.run = RunState(manifest)
        self.runtime.run(membership.admit(self.transport, manifest, stages, timeout=limits.start_timeout))
        self.runtime.run(membership.announce_run(self._directory, manifest.run_id, manifest.coordinator))
        self.runtime.run(self._remain(self.run))
        above = self.runtime if self.server is None else self._until_over(self.server.admission)
        runtime = UntilLost(above, self._lost_for_good)
        return self._session(self.run, stages, model.blocks, device, runtime)

    def _session(
        self, run: RunState, stages: Sequence[StageModule], blocks: Blocks, device: torch.device, runtime: Runtime
    ) -> Session:
        limits = self._config.limits
        around = self._around(stages[-1], run)
        rosters = [
            roster for roster, stage in zip(run.rosters, run.manifest.stages, strict=True) if not stage.on_trainers
        ]
        routers = [StageRouter(self._rng) for _ in rosters]
        for router, roster in zip(routers, rosters, strict=True):
            router.set_peers(member.peer_id for member in roster)
        link = Link(
            self._training, self._tickets, routers, limits.call_timeout, self.events, self._copies, limits.stage_timeout
        )
        Replayer(link, run, max_in_flight=limits.max_in_flight)
        widest = max(map(len, rosters))
        alone = widest == len(rosters) == 1
        pipeline = Pipeline(
            blocks.modules,
            link,
            runtime,
            PipelineConfig(
                keywords=[stage.keywords for stage in stages if not stage.spec.on_trainers],
                shared=self._config.shared,
                microbatch_size=self._config.microbatch_size,
                num_microbatches=1 if alone else _MICROBATCHES_PER_STAGE * max(len(rosters), widest),
                max_in_flight=limits.max_in_flight,
                device=device,
            ),
        )
        is_lead = self.transport.peer_id == run.manifest.lead
        steps = StepClient(
            self._training,
            run,
            timeout=limits.call_timeout,
            patience_s=limits.stage_timeout,
            on_record=link.follow,
            events=self.events,
            alone_s=limits.lead_timeout if is_lead else None,
        )
        link.check = steps.renew
        return Session(runtime, pipeline, steps, run.manifest, around=around, is_lead=is_lead)

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

    def go_back(self, session: Session, step: int, load: Callable[[], None]) -> None:
        """Send the run back to `step`, with other weights, in its next generation.

        Args:
            session: This trainer's.
            step: Where the run goes on.
            load: Puts the weights of that step into the model that the run was started with; called when no server
                computes with it any more. The optimizer's state starts empty.
        """
        assert self.run is not None
        timeout = self._config.limits.call_timeout
        generation = self.run.manifest.generation + 1
        request = RestartRequest(generation=generation, first_step=step, selection=session.selection)
        self.runtime.run(membership.restart(self.transport, self.run, request, timeout=timeout))
        session.go_back(request)
        load()
        self.runtime.run(membership.hand_out(self.transport, self.run, self.stages, timeout=timeout))

    # ------------------------------------------------------------------ going back further than servers can

    @property
    def has_survived(self) -> bool:
        """Whether a run was begun here that was void in the end: the next one goes on with what is left of it."""
        return self._survivors is not None

    def what_is_lost(self, *, wait: bool) -> str:
        """What the run cannot go on without, in words; with `wait` it is given time to come back."""
        return self.runtime.run(self._what_is_lost(self._config.limits.revive_timeout if wait else 0.0))

    async def _what_is_lost(self, timeout: float) -> str:
        assert self.run is not None
        if self.server is not None and self.server.admission.left.is_set():  # it is over, and the others are free
            return ""
        silence_s = self._config.limits.silence_timeout
        return await survivors.what_is_lost(
            self.transport, self.run, self.num_known_dead, timeout=timeout, silence_s=silence_s
        )

    async def _lost_for_good(self) -> str:
        """Returns when something is lost, and there is a snapshot to go back to."""
        limits = self._config.limits
        num_dead = 0
        while True:
            # Dead processes of this machine are looked at soon, others once they would have been found to be silent.
            for _ in range(max(1, round(limits.silence_timeout / _LOOK_S))):
                await asyncio.sleep(_LOOK_S)
                if self.num_known_dead() > num_dead:
                    break
            num_dead = self.num_known_dead()
            if self.run is None or not self.versions_kept():
                continue
            lost = await self._what_is_lost(limits.revive_timeout)
            held = await ask_held(self.transport, self.run.servers, timeout=limits.silence_timeout) if lost else {}
            if lost and newest_complete(held, len(self.run.rosters)) is not None:
                return lost

    def gather_snapshots(self, versions: Collection[int]) -> Whole | None:
        """The newest of these versions that the servers keep among them."""
        assert self.run is not None
        limits = self._config.limits
        return self.runtime.run(
            gather_snapshots(
                self.transport,
                self.run,
                versions,
                timeout=limits.join_timeout,
                max_bytes=limits.max_message_bytes,
            )
        )

    def versions_of_all(self, versions: Collection[int]) -> Collection[int]:
        """Those of `versions` at which the other trainers' loops could go on, too, of those that are there."""
        if self.run is None:
            others = self._others
        else:
            others = [one for one in self.run.trainers if one != self.transport.peer_id and one in self.run.servers]
        timeout = self._config.limits.silence_timeout
        return self.runtime.run(survivors.loops_at(self.transport, others, versions, timeout=timeout))

    def told_to_go_back(self) -> int | None:
        """Not at the lead, after an error: the step from which the run goes on. None: as it is, or not at all."""
        if self._beside is None or self._beside.run is None:
            return None
        return self.runtime.run(self._beside.told_to_go_back())

    def tell_loop(self, could_go_on: survivors.CouldGoOn) -> None:
        """Not at the lead: what says at which versions this trainer's loop could go on. See `survivors.Beside`."""
        assert self._beside is not None
        self._beside.could_go_on = could_go_on

    @property
    def ordered(self) -> Ordered | None:
        """The newest snapshot that this peer's server was told to take."""
        return self.server.snapshots.ordered if self.server is not None else None

    def release(self, first_step: int) -> None:
        """End the run, but no server: those that answer are there for the next one, which begins at `first_step`."""
        timeout = self._config.limits.call_timeout
        self._training.end()
        self.runtime.run(self._copies.clear())
        if self._beside is not None:
            assert self.server is not None
            self.server.admission.released.clear()
            return
        before, trainers = self._survivors, self._others
        if self.run is not None:
            self._generation, self._seed = self.run.manifest.generation + 1, self.run.manifest.seed
            before = self.runtime.run(survivors.release(self.transport, self.run, first_step, timeout=timeout))
            trainers = self.run.trainers
            self.run = None
        alive = self.runtime.run(alive_among(self.transport, before or (), timeout=timeout))
        self._others = [one for one in trainers if one in alive and one != self.transport.peer_id]
        self._survivors = {peer for peer in alive if peer != self.transport.peer_id or self._announced}

    # ------------------------------------------------------------------ the end

    def dismiss_others(self) -> None:
        """Tell the other servers that the run is over."""
        if self.run is not None:
            timeout = self._config.limits.leave_timeout
            self.runtime.run(membership.dismiss(self.transport, self.run, timeout=timeout))

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
            self._copies.close()


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
            )
        )
    except BaseException:
        runtime.close()
        raise
    return Peer(
        runtime, transport, directory, executor=ThreadExecutor, config=config, rng=random.Random(secrets.randbits(64))
    )
