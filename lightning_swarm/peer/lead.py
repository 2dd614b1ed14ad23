"""What only the lead does to a run: begin it, send it back, end it, and begin the next one with who is left of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from msgspec import UNSET
from torch import Tensor

from lightning_swarm.client.model_state import ModelState, gather_snapshots
from lightning_swarm.client.session import Session
from lightning_swarm.coordinator.membership.rosters import choose_voters
from lightning_swarm.coordinator.takeover import has_majority
from lightning_swarm.core.errors import ConfigError, SwarmError, Unreachable
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.tasks import gather
from lightning_swarm.model.partition import StageModule, batch_norms
from lightning_swarm.monitor import survey
from lightning_swarm.network import Directory, PeerId, Transport
from lightning_swarm.network.addresses import host_of
from lightning_swarm.network.liveness import alive_among
from lightning_swarm.peer import discovery, failover
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.failover import PackLoop, StandbyLeads
from lightning_swarm.protocol.messages.run import Manifest, Member, RestartRequest, Selection
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION
from lightning_swarm.protocol.methods import VIEW
from lightning_swarm.protocol.queries import ask_held, newest_complete
from lightning_swarm.protocol.run_state import RunState, replaced_by
from lightning_swarm.server.stage_builder import PeerModel


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What the starter of a run decides.

    Args:
        ranges: The blocks of each stage.
        num_servers: How many servers to wait for.
        num_trainers: How many of them must read data, too.
        seed: Of all random draws in the stages.
        gradient_clip_norm: Over all stages; None does not clip.
        gradient_clip_value: Of each element of the mean gradient; None does not clip.
        first_step: Where the run begins, or goes on.
        selection: Which parameters train at first; None: it only evaluates.
        max_steps: No step opens beyond it; None: the trainer ends the run.
        total_steps: For schedules that servers build.
        open_to_trainers: Others may come to train, too.
        optimizer: Of which kind every peer must build it; see `server.model.kind_of`.
        generation: Later than all that the servers were in with the lead.
        former_leads: Of older generations of the run.
    """

    ranges: Sequence[range]
    num_servers: int
    num_trainers: int
    seed: int
    gradient_clip_norm: float | None
    gradient_clip_value: float | None
    first_step: int
    selection: Selection | None
    max_steps: int | None
    total_steps: int | None
    open_to_trainers: bool = False
    optimizer: str | None = None
    generation: int = 0
    former_leads: Sequence[PeerId] = ()


async def check_first(directory: Directory, transport: Transport, config: SwarmConfig) -> None:
    """One run at a time: two would take each other's servers.

    Raises:
        ConfigError: The run that would begin is under way.
    """
    for coordinator in await discovery.find_runs(directory, transport, config.run_id):
        try:
            await transport.call(coordinator, VIEW, b"", timeout=config.limits.leave_timeout)
        except SwarmError:
            continue  # what is left of an earlier one
        raise ConfigError(
            f"a run has one starter, and {config.run_id!r} is under way. Serve it with `role='server'`, or "
            "start another one with another `run_id`."
        )


async def check_run_id(transport: Transport, config: SwarmConfig) -> None:
    """Whoever is to serve a run was told of peers of that run. Those that do not answer say nothing against it.

    Raises:
        ConfigError: All that answer are for other runs.
    """
    peers = {address.peer_id for address in config.initial_peers}
    found = await gather(survey.run_id_of(transport, peer, timeout=config.limits.leave_timeout) for peer in peers)
    there = sorted({run_id for run_id in found if run_id is not None})
    if there and config.run_id not in there:
        raise ConfigError(
            f"`run_id` must be that of the run to serve: {config.run_id!r} here, and {', '.join(map(repr, there))} at "
            f"{', '.join(map(str, config.initial_peers))}. Set `run_id={there[0]!r}`, or name a peer of the other run."
        )


def make_manifest(
    spec: RunSpec,
    config: SwarmConfig,
    model: PeerModel,
    me: Member,
    servers: Sequence[Member],
    others: Sequence[Member],
    hosts: Mapping[PeerId, str],
) -> Manifest:
    """Record 0 of a run.

    Args:
        spec: The run.
        config: The starter's settings.
        model: Its copy.
        me: The starter, which leads.
        servers: Those that it begins with.
        others: Who trains beside it.
        hosts: On which machines the servers are, where that is known.
    """
    # The starter's own server coordinates: its trainer's control calls then cross no network.
    servers = sorted(servers, key=lambda member: member.peer_id != me.peer_id)
    trainers = [me, *(member for member in others if member != me)]
    rosters = discovery.assign(len(spec.ranges), servers)
    stages = model.describe(spec.ranges, [*rosters, trainers])
    return Manifest(
        protocol_version=PROTOCOL_VERSION,
        run_id=config.run_id,
        generation=spec.generation,
        seed=spec.seed,
        lead=me.peer_id,
        trainers=[member.peer_id for member in trainers],
        coordinator=servers[0].peer_id,
        voters=choose_voters(rosters, servers[:1], hosts),
        settings=config.settings,
        gradient_clip_norm=spec.gradient_clip_norm,
        gradient_clip_value=spec.gradient_clip_value,
        first_step=spec.first_step,
        selection=spec.selection,
        max_steps=spec.max_steps,
        total_steps=spec.total_steps,
        optimizer=spec.optimizer,
        stages=stages,
        # Layers on the trainers are held by those that the run began with.
        open_to_trainers=spec.open_to_trainers and not stages[-1].on_trainers,
        former_leads=list(spec.former_leads) or UNSET,
    )


_log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_MAX_NAMED: Final = 5


class Lead:
    """The starter of runs, one after the other.

    Args:
        runtime: The way to its loop.
        transport: Its network.
        directory: Where peers find each other.
        config: The user's settings.
        is_over: Whether its server was told that the run is over.

    Attributes:
        run: That it began, as its trainer knows it; None: there is none.
        stages: Its own, of that run.
        versions_kept: Of the states of its trainer's loop.
        num_known_dead: Processes of this machine's peers that have ended.
    """

    def __init__(
        self,
        runtime: Runtime,
        transport: Transport,
        directory: Directory,
        config: SwarmConfig,
        *,
        is_over: Callable[[], bool],
    ) -> None:
        self._runtime = runtime
        self._transport = transport
        self._directory = directory
        self._config = config
        self._is_over = is_over
        self.run: RunState | None = None
        self.stages: tuple[StageModule, ...] = ()
        self._origin: Callable[[StageModule], Mapping[str, Tensor]] = StageModule.named_stage_tensors
        self.versions_kept: Callable[[], Collection[int]] = tuple
        self.num_known_dead: Callable[[], int] = int
        self._inherited = False  # the run that is to go back, from another peer
        self._generation = 0  # of the run that is begun next
        self._seed: int | None = None  # of the one before
        self._former_leads: Sequence[PeerId] = ()  # of the ones before
        known = partial(discovery.known_heirs, directory, config.run_id)
        self._heirs = StandbyLeads(transport, known, limits=config.limits)
        self._survivors: Collection[PeerId] | None = None  # of the one before, which was void in the end
        self._others: Collection[PeerId] = ()  # those of them that train, but for this peer

    # ------------------------------------------------------------------ the beginning

    def check_first(self) -> None:
        """Ask whether the run may begin here, before anyone is told of this peer.

        Raises:
            ConfigError: It is under way.
        """
        if self._config.initial_peers and self._survivors is None:
            self._runtime.run(check_first(self._directory, self._transport, self._config))

    def say_prepared(self, launch_id: str) -> None:
        """Tell the other trainers of this launch that the data is prepared."""
        timeout = self._config.limits.start_timeout
        self._runtime.run(discovery.say_prepared(self._directory, self._config.run_id, launch_id, timeout=timeout))

    def find_servers(self, spec: RunSpec, check: Callable[[], None]) -> list[Member]:
        """The servers that there are for a run, when they are enough; after a void one, those that are left of it.

        Args:
            spec: The run.
            check: Called while waiting; raises when a server's process has died.

        Raises:
            PeerError: They do not come in time, or one that is left is gone.
        """
        timeout = self._config.limits.start_timeout
        num_servers, num_trainers = spec.num_servers, spec.num_trainers
        if self._survivors is not None:
            num_servers, num_trainers = len(self._survivors), min(num_trainers, 1 + len(self._others))
            self._runtime.run(failover.await_loops(self._transport, self._others, timeout=timeout, check=check))
        return self._runtime.run(
            discovery.find_servers(
                self._directory,
                self._transport,
                self._config.run_id,
                num_servers,
                num_trainers=num_trainers,
                among=self._survivors,
                timeout=timeout,
                check=check,
            )
        )

    def begin_run(
        self, spec: RunSpec, model: PeerModel, me: Member, stages: tuple[StageModule, ...], servers: Sequence[Member]
    ) -> RunState:
        """Begin a run.

        Args:
            spec: The run.
            model: The lead's copy: it initialises every stage.
            me: The lead.
            stages: Cut out of its copy.
            servers: Those to begin it with.

        Raises:
            ConfigError: Some server's model is not the lead's.
            PeerError: Some server left.
        """
        # What is computed again draws the same random numbers.
        seed = spec.seed if self._seed is None else self._seed
        spec = replace(spec, generation=self._generation, seed=seed, former_leads=self._former_leads)
        self.stages, self._origin = stages, model.origin
        if spec.selection is not None and self._generation == 0:
            self._warn_of_batch_norms(batch_norms(model.blocks))
        run = self._runtime.run(self._admit(spec, model, me, servers))
        self._hand_out(run, timeout=self._config.limits.start_timeout)
        self._runtime.run(discovery.announce_run(self._directory, self._config.run_id, run.manifest.coordinator))
        return run

    def _warn_of_batch_norms(self, names: Sequence[str]) -> None:
        if names:
            size = self._config.settings.microbatch_size
            _log.warning(
                "BatchNorm is in blocks of the pipeline, in %d places (%s%s). There it normalises each microbatch (%s) "
                "by the statistics of this microbatch, as in a plain loop over batches of that size, not by those of "
                "the whole batch; its running statistics count each microbatch once, in order. For statistics over "
                "more samples raise `microbatch_size`; GroupNorm and LayerNorm know no batch, and train as on one "
                "machine.",
                len(names),
                ", ".join(names[:_MAX_NAMED]),
                ", ..." if len(names) > _MAX_NAMED else "",
                f"of {size} samples" if size is not None else "a part of the batch, for `microbatch_size` is None",
            )

    def _hand_out(self, run: RunState, *, timeout: float) -> None:
        """Send the servers their weights: stage after stage, where only one at a time is in this process."""
        tensors = [tensor for stage in self.stages for tensor in stage.named_stage_tensors().values()]
        if not any(tensor.is_meta for tensor in tensors):
            self._runtime.run(discovery.hand_out(self._transport, run, self.stages, self._origin, timeout=timeout))
            return
        for stage in self.stages:
            weights = self._origin(stage)  # here, for it takes a while, and the loop has to answer
            sent = discovery.hand_out(self._transport, run, [stage], partial(_known, weights), timeout=timeout)
            self._runtime.run(sent)
            del weights, sent  # before the next one is made

    async def _admit(self, spec: RunSpec, model: PeerModel, me: Member, servers: Sequence[Member]) -> RunState:
        directory, run_id = self._directory, self._config.run_id
        announced = await discovery.announced(directory, run_id)
        trainers = [one for one in servers if one.peer_id in announced and announced[one.peer_id].trains]
        hosts = {peer: host_of(one.addresses) for peer, one in announced.items() if one.addresses}
        manifest = make_manifest(spec, self._config, model, me, servers, trainers, hosts)
        run = self.run = RunState(manifest)  # from here on some server may be in it, and has to be told of its end
        timeout = self._config.limits.start_timeout
        await discovery.admit(self._transport, manifest, (), timeout=timeout)
        return run

    # ------------------------------------------------------------------ back, with servers that hold what is needed

    def go_back(self, session: Session, step: int, load: Callable[[], None]) -> None:
        """Send the run back to `step`, with other weights, in its next generation.

        Args:
            session: This trainer's.
            step: Where the run goes on.
            load: Puts the weights of that step into the model that the run was started with; called when no server
                computes with it any more. The optimizer's state starts empty.
        """
        run = self._current
        timeout = self._config.limits.call_timeout
        request = RestartRequest(
            generation=run.manifest.generation + 1, first_step=step, seats=run.seats, selection=session.selection
        )
        self._runtime.run(discovery.restart(self._transport, run, request, timeout=timeout))
        session.go_back(request)
        load()
        self._hand_out(run, timeout=timeout)

    # ------------------------------------------------------------------ back further, in another run

    def what_is_lost(self, *, wait: bool) -> str:
        """What the run cannot go on without, in words; with `wait` it is given time to come back."""
        return self._runtime.run(self._what_is_lost(self._config.limits.revive_timeout if wait else 0.0))

    async def _what_is_lost(self, timeout: float) -> str:
        if self._is_over():  # and the others are free
            return ""
        silence_s = self._config.limits.silence_timeout
        return await failover.what_is_lost(
            self._transport, self._current, self.num_known_dead, timeout=timeout, silence_s=silence_s
        )

    async def lost_for_good(self) -> str:
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
            held = await ask_held(self._transport, self.run.servers, timeout=limits.silence_timeout) if lost else {}
            if lost and newest_complete(held, len(self.run.rosters)) is not None:
                return lost

    def gather_snapshots(self, versions: Collection[int]) -> ModelState | None:
        """The newest of these versions that the servers keep among them."""
        limits = self._config.limits
        return self._runtime.run(
            gather_snapshots(
                self._transport,
                self._current,
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
            others = [one for one in self.run.trainers if one != self._transport.peer_id and one in self.run.servers]
        timeout = self._config.limits.silence_timeout
        return self._runtime.run(failover.loops_at(self._transport, others, versions, timeout=timeout))

    def release(self, first_step: int, *, serves: bool) -> None:
        """End the run, but no server: those that answer are there for the next one, which begins at `first_step`.

        Args:
            first_step: Where.
            serves: Whether this peer is one of them.
        """
        timeout = self._config.limits.call_timeout
        before, trainers = self._survivors, self._others
        if self.run is not None:
            self._generation, self._seed = self.run.manifest.generation + 1, self.run.manifest.seed
            self._former_leads = self.run.manifest.former_leads or ()
            before = self._runtime.run(failover.release(self._transport, self.run, first_step, timeout=timeout))
            if self._inherited and not has_majority(self.run, before):
                raise Unreachable(
                    f"no majority of the run's {len(self.run.voters)} voters is left to go on with: its former lead "
                    "may live on the other side of a broken line. Start the run again with `ckpt_path`."
                )
            self._inherited = False
            trainers = self.run.trainers
            self.run = None
        alive = self._runtime.run(alive_among(self._transport, before or (), timeout=timeout))
        self._others = [one for one in trainers if one in alive and one != self._transport.peer_id]
        self._survivors = {peer for peer in alive if serves or peer != self._transport.peer_id}

    # ------------------------------------------------------------------ another peer in its place

    async def keep_loop(self, version: int, pack: PackLoop) -> None:
        """On the loop: have peers that could take the run over keep what its loop was at."""
        if self.run is not None:
            await self._heirs.send(self.run, version, pack)

    def inherit(self, run: RunState) -> None:
        """Lead a run that another peer led, and that is to go back. As its servers know it, this peer leads it."""
        self.run, self._inherited = run, True
        self._config = replace(self._config, settings=run.manifest.settings)  # its next generations have them, too

    def give_up(self) -> None:
        """Lead it no more, before it went back: its servers would take this peer's end for the run's."""
        self.run, self._inherited = None, False

    def replaced_by(self) -> str:
        """Who leads the run by now, if another peer does; or may come to, for most voters are with those who could."""
        return "" if self.run is None else self._runtime.run(self._replaced_by(self.run))

    async def _replaced_by(self, run: RunState) -> str:
        timeout, heirs = self._config.limits.silence_timeout, set(self._heirs.holding)
        if not heirs:
            return ""
        newer = await failover.newer_run(self._transport, run, timeout=timeout)
        if newer is not None:
            return replaced_by(newer)
        alive = list(await ask_held(self._transport, run.servers, timeout=timeout))
        if heirs <= set(alive) or has_majority(run, alive):
            return ""
        return (
            f"most of the voters do not answer, and {sorted(heirs - set(alive))} among those who do not could take the "
            "run over. Start this program again with their addresses as `initial_peers`; or, if they are dead, with "
            "`ckpt_path`."
        )

    # ------------------------------------------------------------------ the end

    def dismiss_others(self) -> None:
        """Tell the other servers that the run is over."""
        if self.run is not None:
            timeout = self._config.limits.leave_timeout
            self._runtime.run(discovery.dismiss(self._transport, self.run, timeout=timeout))

    @property
    def _current(self) -> RunState:
        assert self.run is not None
        return self.run


def _known(weights: Mapping[str, Tensor], stage: StageModule) -> Mapping[str, Tensor]:
    return weights
