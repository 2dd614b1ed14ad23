"""The lead: begins a run, rolls it back, ends it, and begins its next generation with the remaining peers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any, Final

from msgspec import UNSET, structs
from torch import Tensor

from lightning_swarm.client.model_state import ModelState, gather_snapshots, scatter_weights
from lightning_swarm.client.run_session import Session
from lightning_swarm.coordinator import server_calls
from lightning_swarm.coordinator.takeover import has_majority
from lightning_swarm.core.errors import ConfigError, SwarmError, Unreachable
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.readable import shorten
from lightning_swarm.core.tasks import first_result, gather
from lightning_swarm.model.partition import StageModule
from lightning_swarm.monitor import survey
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.peer import discovery, failover
from lightning_swarm.peer.arrivals import Arrivals, known_peers
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.peer.failover import PackLoop, StandbySender
from lightning_swarm.peer.manifest import RunSpec, continued, make_manifest
from lightning_swarm.protocol.bans import apply_received_ban
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.keepers import convictions
from lightning_swarm.protocol.messages.run import Keepers, Manifest, Member, RestartRequest
from lightning_swarm.protocol.queries import ask_held, newest_complete, only_recorded, only_versions
from lightning_swarm.protocol.rpc import VIEW
from lightning_swarm.protocol.run_state import RunState, replaced_by
from lightning_swarm.server.stage_builder import PeerModel

_log = logging.getLogger(__name__)

_CHECK_S: Final = 1.0  # interval of checks for dead processes of this machine


async def check_run_id(transport: Transport, config: SwarmConfig) -> None:
    """Raise a ConfigError if all `initial_peers` that report their run's id belong to other runs.

    If none reports one, raise the first peer's error, such as `AccessDenied`.
    """

    async def ask(peer: PeerId) -> str | SwarmError | None:
        try:
            return await survey.run_id_of(transport, peer, timeout=config.limits.leave_timeout)
        except SwarmError as error:
            return error

    answers = await gather(ask(peer) for peer in sorted({address.peer_id for address in config.initial_peers}))
    run_ids = sorted({answer for answer in answers if isinstance(answer, str)})
    for error in (answer for answer in answers if isinstance(answer, SwarmError)):
        if not run_ids:
            raise error
        _log.warning("One of the `initial_peers` cannot be used: %s", shorten(str(error)))
    if run_ids and config.run_id not in run_ids:
        raise ConfigError(
            f"`run_id` must be that of the run to join: {config.run_id!r} here, and {', '.join(map(repr, run_ids))} at "
            f"{', '.join(map(str, config.initial_peers))}. Set `run_id={run_ids[0]!r}`, or name a peer of run "
            f"{config.run_id!r}."
        )


@dataclass(eq=False)
class Lead:
    """A peer's part in runs that it leads: begins them, rolls them back, and ends them."""

    # There are two kinds of rollback. `roll_back` keeps all members, and sends them weights that the trainer loaded.
    # After a loss of peers, `end_generation` keeps the servers that answer. Then `find_servers` and `begin_run` begin
    # the next generation with these servers, from a snapshot.

    _runtime: Runtime
    _directory: RunDirectory
    _config: SwarmConfig
    _events: EventLog
    _is_over: Callable[[], bool]  # whether this peer's server knows that the run is over
    keepers: InitVar[Collection[PeerId]] = ()  # see `Arrivals.named_keepers`

    def __post_init__(self, keepers: Collection[PeerId]) -> None:
        self._transport = self._directory.transport
        self.run: RunState | None = None  # the run that this peer leads, as its trainer knows it
        self.stages: tuple[StageModule, ...] = ()  # stages of this peer's copy of the model
        self._initial_weights: Callable[[StageModule], Mapping[str, Tensor]] = StageModule.named_stage_tensors
        # Returns the versions at which the trainer's loop could resume; set by the loop.
        self.versions_kept: Callable[[], Collection[int]] = lambda: ()
        # Returns how many processes of this machine's peers have ended; set by a launcher of several peers.
        self.num_known_dead: Callable[[], int] = lambda: 0
        self._took_over = False  # this peer took over a run that is to roll back
        # From the previous generation, for the next:
        self._former: Manifest | None = None
        self._survivors: Collection[PeerId] | None = None  # servers; None: there was no generation before
        self._other_trainers: Collection[PeerId] = ()  # survivors that train, without this peer
        self._released: set[PeerId] = set()  # servers of former generations; the run's end is announced to them, too
        self.addresses: dict[PeerId, Sequence[str]] = {}  # addresses that servers announced when the generation began
        self._arrivals = Arrivals(self._transport, keepers)
        self._standbys = StandbySender(self._transport, self._directory.known_standbys, self._config.limits)

    # ------------------------------------------------------------------ beginning a run

    def check_first(self) -> None:
        """Raise a ConfigError if a run of this id is in progress; called before this peer announces itself."""
        if not self._config.initial_peers or self._survivors is not None:
            return
        timeout = self._config.limits.leave_timeout

        async def ask(coordinator: PeerId) -> PeerId | None:
            try:
                # The answer is not decoded: the run is in progress even if it uses another version of the protocol.
                await self._transport.call(coordinator, VIEW.name, b"", timeout=timeout)
            except SwarmError:
                return None  # an announcement that an earlier run left behind
            return coordinator

        async def is_in_progress() -> bool:
            return await first_result(map(ask, await self._directory.find_runs())) is not None

        if self._runtime.run(is_in_progress()):
            raise ConfigError(  # two runs of one id would take each other's servers
                f"a run has one starter, and run {self._config.run_id!r} is already in progress. Serve that run with "
                "`role='server'`, or start another run with another `run_id`."
            )

    def known_peers(self) -> dict[str, Any] | None:
        """Return the run's peers that a checkpoint must remember, in plain values; None if there are none."""
        # The transport may know bans that no record carries yet.
        return None if self.run is None else known_peers(self.run, self._transport.bans)

    def restore_peers(self, known: Any) -> None:
        """Continue with the peers that a checkpoint remembers; called before the run begins."""
        self._arrivals.restore(known)

    def announce_event(self, launch_id: str, event: str, value: bytes = b"yes") -> None:
        """Announce an event to the other trainers of this launch, such as that the data is prepared."""
        timeout = self._config.limits.start_timeout
        self._runtime.run(self._directory.announce_event(launch_id, event, value, timeout=timeout))

    def find_servers(self, spec: RunSpec, check: Callable[[], None]) -> list[Member]:
        """Wait for enough servers to begin a run or, after a rollback, for the remaining servers."""
        timeout = self._config.limits.start_timeout
        wanted = discovery.WantedServers(num_servers=spec.num_servers, num_trainers=spec.num_trainers)
        if self._survivors is not None:
            wanted = discovery.WantedServers(
                num_servers=len(self._survivors),
                num_trainers=min(spec.num_trainers, 1 + len(self._other_trainers)),
                among=self._survivors,
            )
            others = self._other_trainers
            self._runtime.run(failover.await_loops(self._transport, others, timeout=timeout, check=check))
        finding = self._directory.find_servers(wanted, timeout=timeout, check=check, invited=self._arrivals.invited)
        return self._runtime.run(finding)

    def begin_run(
        self, spec: RunSpec, model: PeerModel, me: Member, stages: tuple[StageModule, ...], servers: Sequence[Member]
    ) -> RunState:
        """Begin a run with these servers, and with the weights of the lead's copy of the model, cut into `stages`."""
        if self._former is not None:
            spec = continued(spec, self._former)
        self.stages, self._initial_weights = stages, model.initial_weights
        run = self._runtime.run(self._admit(spec, model, me, servers))
        self._send_weights(run, timeout=self._config.limits.start_timeout)
        self._runtime.run(self._directory.announce_run(run.manifest.coordinator))
        return run

    def _send_weights(self, run: RunState, *, timeout: float) -> None:
        """Send the servers their weights; create weights of meta modules here, one stage at a time to save memory."""
        tensors = [tensor for stage in self.stages for tensor in stage.named_stage_tensors().values()]
        if not any(tensor.is_meta for tensor in tensors):
            sending = scatter_weights(self._transport, run, self.stages, self._initial_weights, timeout=timeout)
            self._runtime.run(sending)
            return
        for stage in self.stages:
            weights = self._initial_weights(stage)  # takes long, so not on the event loop, which must answer calls
            sending = scatter_weights(self._transport, run, [stage], {stage: weights}.__getitem__, timeout=timeout)
            self._runtime.run(sending)
            del weights, sending  # freed before the next stage's are created

    async def _admit(self, spec: RunSpec, model: PeerModel, me: Member, servers: Sequence[Member]) -> RunState:
        announced = await self._directory.announced()
        self.addresses = {peer: server.addresses for peer, server in announced.items()}
        trainers = [server for server in servers if server.peer_id in announced and announced[server.peer_id].trains]
        keepers: Keepers = UNSET
        if self._config.settings.has_strangers:
            keepers = self._arrivals.keepers_among(me.peer_id, [server.peer_id for server in servers])
        manifest = make_manifest(spec, self._config, model, me, servers, trainers, announced, keepers)
        invitations = await self._arrivals.count([*(server.peer_id for server in servers), *manifest.trainers])
        bans = self._transport.bans or UNSET
        convicted = convictions(self._arrivals.convicted)
        manifest = structs.replace(manifest, invitations=invitations, bans=bans, convicted=convicted)
        run = self.run = RunState(manifest)  # servers may be in the run from now on, and must be notified of its end
        run.apply_bans_by(partial(apply_received_ban, self._transport))
        await discovery.admit(self._transport, manifest, (), timeout=self._config.limits.start_timeout)
        return run

    def roll_back(self, session: Session, step: int, load: Callable[[], None]) -> None:
        """Roll the run back to `step`, as its next generation, with weights that `load` sets and no optimizer state."""
        run = self._current
        timeout = self._config.limits.call_timeout
        seats = structs.replace(run.seats, bans=self._transport.bans or UNSET)
        request = RestartRequest(
            generation=run.manifest.generation + 1, first_step=step, seats=seats, selection=session.selection
        )
        self._runtime.run(discovery.restart(self._transport, run, request, timeout=timeout))
        session.enter_generation(request)
        load()  # after the restart, when no server computes with this module any more
        self._send_weights(run, timeout=timeout)

    # ------------------------------------------------------------------ rollback to a snapshot, with remaining peers

    def why_cannot_continue(self, *, wait: bool) -> str:
        """Return why the run cannot continue; empty if it can. With `wait`, missing peers get time to come back."""
        return self._runtime.run(self._why_cannot_continue(self._config.limits.revive_timeout if wait else 0.0))

    async def _why_cannot_continue(self, timeout: float) -> str:
        if self._is_over():  # the other peers were dismissed, so none of them is missing
            return ""
        run, silence_s = self._current, self._config.limits.silence_timeout
        known_dead = self.num_known_dead
        return await failover.why_cannot_continue(
            self._transport, run, known_dead, timeout=timeout, silence_s=silence_s
        )

    async def wait_until_lost(self) -> str:
        """Wait until the run cannot continue, but could roll back to a complete snapshot; return the reason."""
        limits = self._config.limits
        num_dead = 0
        while True:
            # Dead processes of this machine are known at once; remote peers must first be silent for a while.
            for _ in range(max(1, round(limits.silence_timeout / _CHECK_S))):
                await asyncio.sleep(_CHECK_S)
                if self.num_known_dead() > num_dead:
                    break
            num_dead = self.num_known_dead()
            if self.run is None or not self.versions_kept():
                continue
            lost = await self._why_cannot_continue(limits.revive_timeout)
            if not lost:
                continue
            snapshots = await ask_held(self._transport, self.run.servers, timeout=limits.silence_timeout)
            if newest_complete(snapshots, len(self.run.rosters)) is not None:
                return lost

    async def has_snapshot(self) -> bool:
        """Return whether the trainer's loop can continue from a complete snapshot; runs on the event loop."""
        if self.run is None or not self.versions_kept():
            return False
        snapshots = await ask_held(self._transport, self.run.servers, timeout=self._config.limits.silence_timeout)
        if self.run.electorate.has_strangers:
            snapshots = only_recorded(snapshots, self.run.snapshots)  # a server may claim one that was never taken
        return newest_complete(only_versions(snapshots, self.versions_kept()), len(self.run.rosters)) is not None

    def gather_snapshots(self, versions: Collection[int], sound: int | None = None) -> ModelState | None:
        """Return the state at the newest of these versions that servers keep completely; None if they keep none."""
        # Versions after `sound` may contain false work of a convicted server, so they are used last.
        limits = self._config.limits
        return self._runtime.run(
            gather_snapshots(
                self._transport,
                self._current,
                versions,
                timeout=limits.join_timeout,
                max_bytes=limits.max_message_bytes,
                events=self._events,
                sound=sound,
            )
        )

    def versions_of_all(self, versions: Collection[int]) -> Collection[int]:
        """Return the versions, among these, at which all other trainers that answer could resume."""
        if self.run is None:
            others = self._other_trainers
        else:
            own = self._transport.peer_id
            others = [peer for peer in self.run.trainers if peer != own and peer in self.run.servers]
        timeout = self._config.limits.silence_timeout
        return self._runtime.run(failover.resumable_versions(self._transport, others, versions, timeout=timeout))

    def end_generation(self, first_step: int, *, serves: bool) -> None:
        """End the run, but keep servers that answer, and this peer if it `serves`, for the next run at `first_step`."""
        timeout = self._config.limits.call_timeout
        servers, trainers = self._survivors, self._other_trainers
        if self.run is not None:
            self._former = self.run.manifest
            self._arrivals.note_end(self.run)
            self._released.update(self.run.servers)
            servers = self._runtime.run(failover.release(self._transport, self.run, first_step, timeout=timeout))
            if self._took_over and not has_majority(self.run, servers):
                raise Unreachable(
                    f"no majority of the run's {len(self.run.voters)} voters answers, so they may continue it with "
                    "its former lead, out of this peer's reach. Start the run again with `ckpt_path`."
                )
            self._took_over = False
            trainers = self.run.trainers
            self.run = None
        alive = self._runtime.run(alive_among(self._transport, servers or (), timeout=timeout))
        self._other_trainers = [peer for peer in trainers if peer in alive and peer != self._transport.peer_id]
        self._survivors = {peer for peer in alive if serves or peer != self._transport.peer_id}

    # ------------------------------------------------------------------ failover

    async def keep_loop(self, version: int, pack: PackLoop) -> None:
        """Send the state of the training loop at this version to the standbys; runs on the event loop."""
        if self.run is not None:
            await self._standbys.send(self.run, version, pack)

    def take_over(self, run: RunState) -> None:
        """Take over a run from its former lead, to roll it back. Its servers already know this peer as the lead."""
        self.run, self._took_over = run, True
        own, settings = self._config.settings, run.manifest.settings
        differing = [name for name in settings.__struct_fields__ if getattr(own, name) != getattr(settings, name)]
        if differing:
            _log.warning(
                "The run keeps the settings of its starter, from which this program's differ: %s.",
                ", ".join(f"`{name}` is {getattr(settings, name)}, not {getattr(own, name)}" for name in differing),
            )
        self._config = replace(self._config, settings=settings)

    def give_up(self) -> None:
        """Stop leading a run that has not rolled back, so that its servers do not end with this peer."""
        self.run, self._took_over = None, False

    def why_replaced(self) -> str:
        """Return why another peer leads the run by now, or may do so out of reach; empty if neither is the case."""
        run, timeout, standbys = self.run, self._config.limits.silence_timeout, set(self._standbys.holding)
        if run is None or not standbys:
            return ""
        newer = self._runtime.run(failover.newer_run(self._transport, run, timeout=timeout))
        if newer is not None:
            return replaced_by(newer)
        alive = list(self._runtime.run(ask_held(self._transport, run.servers, timeout=timeout)))
        if standbys <= set(alive) or has_majority(run, alive):
            return ""
        return (
            f"neither most of the voters nor {sorted(standbys - set(alive))}, which could take the run over, answer. "
            "Start this program again with their addresses as `initial_peers`; or, if they are dead, with `ckpt_path`."
        )

    def dismiss_others(self) -> None:
        """Notify the other peers that the run is over."""
        peers = {*self._released} if self.run is None else {*self._released, *self.run.servers, *self.run.trainers}
        timeout = self._config.limits.leave_timeout
        self._runtime.run(server_calls.dismiss(self._transport, peers - {self._transport.peer_id}, timeout=timeout))

    @property
    def _current(self) -> RunState:
        assert self.run is not None
        return self.run
