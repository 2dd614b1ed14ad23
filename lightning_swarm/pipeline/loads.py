"""What a router knows of the peers of its stage, and what it has charged them with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.moving_average import MovingAverage
from lightning_swarm.network import PeerId

SMOOTHING: Final = 0.2
"""Weight of a new measurement in the moving averages of a peer's rate and of who waits there."""


@dataclass
class PeerLoad:
    """What a router knows of one peer of one stage. The router alone changes it."""

    left_s: float = 0.0  # of what this trainer has under way there
    num_under_way: int = 0
    num_forwards: int = 0  # under way
    num_done: int = 0  # forwards
    num_microbatches: int = 0
    queued: int = 0
    num_failures: int = 0  # since it last finished something
    banned_until_s: float | None = None
    rate: MovingAverage = field(default_factory=lambda: MovingAverage(SMOOTHING))  # in samples/s, as measured
    waiting: MovingAverage = field(default_factory=lambda: MovingAverage(SMOOTHING))  # microbatches of other trainers
    place: float = 0.0  # in its order
    again_s: float = 0.0  # when it is tried again if it gets nothing: see `StageRouter`

    @property
    def samples_per_s(self) -> float | None:
        """None before the first measurement."""
        return self.rate.value


@dataclass(eq=False, slots=True)
class Charge:
    """A microbatch on a peer's account. The router alone changes it.

    Args:
        peer: Which one.
        num_samples: Of the microbatch.
        expected_s: What it takes there: forward and backward.
        roster: Number of the roster on whose accounts it is.
        left_s: What of it is on the account still; None: it is there no more.
        forward_s: What its forward took, once that is known.
        is_forward: Its forward is under way.
    """

    peer: PeerId
    num_samples: int
    expected_s: float
    roster: int = 0
    left_s: float | None = None
    forward_s: float | None = None
    is_forward: bool = False
