"""The state of a run at one moment, as the view shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from lightning_swarm.client.status import PeerStatus, SwarmStatus
from lightning_swarm.network import PeerId

State: TypeAlias = Literal["serving", "joining", "failing", "gone"]

NO_SWARM: Final = SwarmStatus(
    0, (), "", peer_id=PeerId(""), coordinator=PeerId(""), trainers=(), num_samples=0, events=()
)


@dataclass(frozen=True)
class PeerRow:
    """One peer of one stage, as the trainer's router knows the peer or, if it is gone, last knew it."""

    peer: PeerStatus
    state: State  # "joining": nothing has come through the peer yet; "failing": its latest request failed


@dataclass(frozen=True)
class Scene:
    """The state of a run at one moment: of its swarm, and of the Trainer. None means not known yet."""

    status: SwarmStatus = NO_SWARM
    stages: Sequence[Sequence[PeerRow]] = ()  # peers of each stage, gone peers included; empty: no swarm
    phase: str = "training"
    step: int = 0
    max_steps: int | None = None
    epoch: int = 0
    progress: float | None = None  # share of the run that is done, 0 to 1
    metrics: Mapping[str, float] = field(default_factory=dict)  # metrics of the progress bar
    losses: Sequence[float | None] = ()  # the first metric over time
    samples_per_s: float | None = None  # over the last seconds
    steps_per_s: float | None = None
    elapsed_s: float = 0.0
