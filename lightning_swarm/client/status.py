"""The status of the swarm, as one trainer sees it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_swarm.client.pipeline.router import PeerLoad
from lightning_swarm.client.run_session import Session
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import Event


@dataclass(frozen=True)
class PeerStatus:
    """One peer of one stage, as this trainer's router sees it."""

    peer_id: PeerId
    num_microbatches: int = 0  # microbatches that this trainer has routed to the peer
    samples_per_s: float = 0.0  # moving average; 0 before the first measurement
    queued: int = 0  # jobs in the peer's queue, in its newest report
    num_failures: int = 0  # consecutive failures


@dataclass(frozen=True)
class StageStatus:
    """The peers of one stage."""

    index: int
    peers: tuple[PeerStatus, ...]


@dataclass(frozen=True)
class SwarmStatus:
    """The stages and their peers, the open step, the trainers and the latest events."""

    step: int
    stages: tuple[StageStatus, ...]
    run_id: str
    peer_id: PeerId  # this trainer's peer
    coordinator: PeerId
    trainers: tuple[PeerId, ...]
    num_samples: int  # samples of the newest decided step, from all trainers; 0 before the first
    events: tuple[Event, ...]  # oldest first, a few hundred at most
    is_whole: bool = False  # the model is not cut: the only stage is the whole model, and nothing is routed
    num_servers: int = 0  # peers that hold a stage
    total_samples: int = 0  # samples of all decided steps since this trainer joined, from all trainers
    waited_s: float = 0.0  # seconds that this trainer has waited for places and for the ends of steps
    sent_bytes: int = 0  # sent by this trainer's peer since its start, framing included
    received_bytes: int = 0  # received by this trainer's peer, framing included


def status_of(session: Session) -> SwarmStatus:
    """Return the trainer's view at this moment. Any thread may call it."""
    run, context, newest = session.run, session.pipeline.context, session.newest_record
    sent_bytes, received_bytes = context.transport.traffic.totals()
    if run.manifest.is_whole:  # nothing is routed
        stages = [[PeerStatus(member.peer_id) for member in roster] for roster in run.rosters]
    else:
        stages = [[_routed(peer, load) for peer, load in list(router.peers.items())] for router in context.routers]
    return SwarmStatus(
        step=session.version,
        stages=tuple(StageStatus(index, tuple(peers)) for index, peers in enumerate(stages)),
        run_id=run.manifest.run_id,
        peer_id=context.transport.peer_id,
        coordinator=run.coordinator,
        trainers=tuple(run.trainers),
        num_samples=newest.closing.num_samples if newest is not None else 0,
        events=context.events.newest,
        is_whole=run.manifest.is_whole,
        num_servers=session.num_servers,
        total_samples=session.num_samples,
        waited_s=session.waited_s,
        sent_bytes=sent_bytes,
        received_bytes=received_bytes,
    )


def _routed(peer: PeerId, load: PeerLoad) -> PeerStatus:
    return PeerStatus(peer, load.num_microbatches, load.samples_per_s or 0.0, load.queued, load.num_failures)
