"""What a trainer knows of its swarm, for people."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_swarm.network import PeerId
from lightning_swarm.session import Session


@dataclass(frozen=True)
class PeerStatus:
    """One peer of one stage, as this trainer's router sees it."""

    peer_id: PeerId
    num_microbatches: int  # routed to it by this trainer
    samples_per_s: float  # moving average; 0 before the first measurement
    queued: int  # jobs that waited there at its last answer


@dataclass(frozen=True)
class StageStatus:
    """One stage."""

    index: int
    peers: tuple[PeerStatus, ...]


@dataclass(frozen=True)
class SwarmStatus:
    """All stages, and the step that is open."""

    step: int
    stages: tuple[StageStatus, ...]


def status_of(session: Session) -> SwarmStatus:
    """The trainer's view at this moment."""
    return SwarmStatus(
        step=session.version,
        stages=tuple(
            StageStatus(
                index=index,
                peers=tuple(
                    PeerStatus(peer, load.num_microbatches, load.samples_per_s or 0.0, load.queued)
                    for peer, load in router.peers.items()
                ),
            )
            for index, router in enumerate(session.pipeline.link.routers)
        ),
    )
