"""Which peer of a stage gets the next microbatch: interleaved weighted round-robin. Pure.

The peer whose assigned busy time is smallest is taken, and the time that the microbatch is expected to take is added
to it; when the microbatch is done, the expectation is replaced by what was measured.

Source: SWARM, arXiv:2301.11913, appendix C.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_swarm.network import PeerId

SMOOTHING = 0.2
"""Weight of a new measurement in the moving average of a peer's rate."""


@dataclass
class PeerLoad:
    """What a router knows of one peer of one stage."""

    assigned_s: float = 0.0
    num_microbatches: int = 0
    queued: int = 0
    _average: float = 0.0
    _weight: float = 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Exponential moving average of the measured rate, corrected for its empty start; None before the first."""
        return self._average / self._weight if self._weight else None

    def measure(self, samples_per_s: float) -> None:
        """Take in one measurement."""
        self._average += SMOOTHING * (samples_per_s - self._average)
        self._weight += SMOOTHING * (1.0 - self._weight)


@dataclass(frozen=True)
class Charge:
    """A microbatch on a peer's account."""

    peer: PeerId
    num_samples: int
    expected_s: float


@dataclass
class StageRouter:
    """The peers of one stage and their accounts.

    Args:
        rng: Breaks ties, so that pipelines are wired at random.
    """

    rng: random.Random
    peers: dict[PeerId, PeerLoad] = field(default_factory=dict)

    def set_peers(self, peers: Iterable[PeerId]) -> None:
        """The stage's roster. A newcomer enters at the smallest account, so it is tried next."""
        lowest_s = min((load.assigned_s for load in self.peers.values()), default=0.0)
        self.peers = {peer: self.peers.get(peer, PeerLoad(assigned_s=lowest_s)) for peer in peers}

    def choose(self, num_samples: int, *, avoid: frozenset[PeerId] = frozenset()) -> Charge:
        """Take the peer with the smallest account and charge it.

        Args:
            num_samples: Of the microbatch.
            avoid: Peers that were just found busy; ignored when there is no other.
        """
        allowed = [peer for peer in self.peers if peer not in avoid] or list(self.peers)
        lowest_s = min(self.peers[peer].assigned_s for peer in allowed)
        peer = self.rng.choice([peer for peer in allowed if self.peers[peer].assigned_s == lowest_s])
        charge = Charge(peer, num_samples, num_samples / self._rate(peer))
        self.peers[peer].assigned_s += charge.expected_s
        self.peers[peer].num_microbatches += 1
        return charge

    def refund(self, charge: Charge) -> None:
        """The peer was busy: as if it had not been chosen."""
        if charge.peer in self.peers:
            self.peers[charge.peer].assigned_s -= charge.expected_s
            self.peers[charge.peer].num_microbatches -= 1

    def settle(self, charge: Charge, *, busy_s: float, queued: int) -> None:
        """The microbatch is done: the account holds the measured time instead of the expected one."""
        load = self.peers.get(charge.peer)
        # The time is the peer's own word: what is no time must not reach the accounts.
        if load is None or not busy_s > 0.0 or not math.isfinite(busy_s + charge.num_samples / busy_s):
            return
        load.assigned_s += busy_s - charge.expected_s
        load.queued = queued
        load.measure(charge.num_samples / busy_s)

    def _rate(self, peer: PeerId) -> float:
        """The peer's rate in samples/s; an unmeasured one is taken for an average peer."""
        rates = [load.samples_per_s for load in self.peers.values() if load.samples_per_s is not None]
        own = self.peers[peer].samples_per_s
        if own is not None:
            return own
        return sum(rates) / len(rates) if rates else 1.0
