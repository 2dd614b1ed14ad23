"""A peer's part as a trainer: opens sessions in one run after another, with shared handlers and a shared cache."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from lightning_swarm.client.coordinator_client import CoordinatorTimeouts
from lightning_swarm.client.pipeline.call_factory import PipelineConfig
from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.local_layers import LocalLayers
from lightning_swarm.client.pipeline.pipeline import Pipeline
from lightning_swarm.client.pipeline.replay_buffer import ReplayBuffer
from lightning_swarm.client.pipeline.replayer import Replayer, avoid_when_asked
from lightning_swarm.client.pipeline.router import StageRouter
from lightning_swarm.client.run_session import Session
from lightning_swarm.client.step_client import StepClient
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.model.partition import StageModule
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.task_transport import TaskTransport
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.oversight import oversee_results
from lightning_swarm.protocol.compression import Codecs
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.protocol.tickets import TicketStore

# Used if no microbatch size is set. A pipeline of S stages with M microbatches is busy for M / (M + S - 1) of the time.
_MICROBATCHES_PER_STAGE: Final = 4
# Bits of a random first serial number of batches. The coordinator finds a batch's place in a step by trainer and
# serial, so a restarted trainer with its former id must not repeat serials.
_SERIAL_BITS: Final = 40


@dataclass(eq=False)
class TrainerRole:
    """Opens this peer's sessions as a trainer, and holds the resources that they share."""

    _transport: Transport
    _tickets: TicketStore
    _config: SwarmConfig
    _events: EventLog
    _rng: random.Random  # breaks routing ties
    _connect: Callable[[], Awaitable[None]]  # makes the run's servers reachable

    def __post_init__(self) -> None:
        self._copies = ReplayBuffer(self._config.limits.cache_bytes)
        # Refuses late calls of a former run.
        self._run_transport = TaskTransport(self._transport, (), {}, idle="trains in no run")

    def open(
        self,
        run: RunState,
        stages: Sequence[StageModule],
        local_layers: LocalLayers | None,
        *,
        device: torch.device,
        runtime: Runtime,  # runs calls on the swarm's event loop until the run ends
    ) -> Session:
        """Open a session in a run that has begun, with the stages of this trainer's copy of the model."""
        context = self._context(run)
        config = PipelineConfig(
            stages=[stage for stage in stages if not stage.spec.on_trainers],
            shared=self._config.shared,
            microbatch_size=run.manifest.settings.microbatch_size,
            wanted_microbatches=partial(_wanted_microbatches, context.routers, self._transport.peer_id),
            max_in_flight=self._config.limits.max_in_flight,
            device=device,
            codecs=Codecs.of(run.manifest.settings.compression),
        )
        pipeline = Pipeline(context, runtime, config)
        steps = self._step_client(run, context)
        context.ensure_enlisted = steps.renew
        is_lead = self._transport.peer_id == run.manifest.lead
        return Session(runtime, pipeline, steps, run.manifest, local_layers=local_layers, is_lead=is_lead)

    def _step_client(self, run: RunState, context: PipelineContext) -> StepClient:
        """Return the client by which this trainer asks the coordinator for leases and records."""
        # A trainer that came later may leave and come back while the run continues, so its serials begin at random.
        limits = self._config.limits
        is_lead = self._transport.peer_id == run.manifest.lead
        came_later = self._transport.peer_id not in run.manifest.trainers

        async def follow(record: Record, members: Sequence[Sequence[Member]]) -> None:
            """Connect to newcomers: a trainer that holds no stage may skip the records with their addresses."""
            if {member.peer_id for roster in members for member in roster} - {*run.servers}:
                await self._connect()
            await context.follow(record, members)

        return StepClient(
            self._run_transport,
            run,
            timeouts=CoordinatorTimeouts(
                answer_s=limits.call_timeout,
                successor_s=limits.stage_timeout,
                # Seconds without an answer from any other peer; see `CoordinatorTimeouts`.
                alone_s=limits.lead_timeout if is_lead or came_later else None,
            ),
            on_record=follow if came_later else context.follow,
            events=self._events,
            first_serial=1 + (self._rng.getrandbits(_SERIAL_BITS) if came_later else 0),
        )

    def _context(self, run: RunState) -> PipelineContext:
        """Return the context of the run's pipeline, with a router for each stage that servers compute."""
        limits = self._config.limits
        routers = []
        for roster, stage in zip(run.rosters, run.manifest.stages, strict=True):
            if not stage.on_trainers:
                router = StageRouter(self._rng)
                router.set_peers(member.peer_id for member in roster)
                routers.append(router)
        context = PipelineContext(
            self._run_transport,
            self._tickets,
            routers,
            limits.call_timeout,
            self._events,
            self._copies,
            limits.stage_timeout,
        )
        # These register handlers with the transport, which keeps them alive.
        avoid_when_asked(context, run)
        Replayer(context, run, max_in_flight=limits.max_in_flight)
        oversee_results(context, run, max_in_flight=limits.max_in_flight)
        return context

    async def leave_run(self) -> None:
        """Leave a run that has ended or rolled back: refuse its calls, and drop the copies of its microbatches."""
        self._run_transport.retire()
        await self._copies.clear()

    def close(self) -> None:
        """Free the resources that sessions share; no session may be opened afterwards."""
        self._copies.close()


def _wanted_microbatches(routers: Sequence[StageRouter], own: PeerId) -> int:
    """Return how many microbatches keep all servers busy; one if a single server, or this peer, computes all stages."""
    widest = max(len(router.peers) for router in routers)
    is_single = widest == 1 and (len(routers) == 1 or all(own in router.peers for router in routers))
    return 1 if is_single else _MICROBATCHES_PER_STAGE * max(len(routers), widest)
