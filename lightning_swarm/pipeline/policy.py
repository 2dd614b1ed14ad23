"""Which peer of a stage gets the next microbatch: interleaved weighted round-robin. Pure.

The peer whose assigned busy time is smallest is taken, and the time that the microbatch is expected to take is added
to it; when the microbatch is done, the expectation is replaced by what was measured. A peer that failed is banned for a
while, longer each time until it finishes something; nobody is banned where all are.

Source: SWARM, arXiv:2301.11913, appendix C.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_swarm.moving_average import MovingAverage
from lightning_swarm.network import PeerId

SMOOTHING = 0.2
"""Weight of a new measurement in the moving average of a peer's rate."""

FIRST_BAN_S = 5.0
LONGEST_BAN_S = 300.0

LATE_FACTOR = 8.0
"""A peer is late when it takes so many times as long as measured."""

SHORTEST_DEADLINE_S = 30.0
"""Nobody is late earlier: what is compiled or loaded for the first time takes its time."""


@dataclass
class PeerLoad:
    """What a router knows of one peer of one stage."""

    assigned_s: float = 0.0
    num_microbatches: int = 0
    queued: int = 0
    num_failures: int = 0  # since it last finished something
    banned_until_s: float | None = None
    rate: MovingAverage = field(default_factory=lambda: MovingAverage(SMOOTHING))  # in samples/s, as measured

    @property
    def samples_per_s(self) -> float | None:
        """None before the first measurement."""
        return self.rate.value


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

    def choose(self, num_samples: int, *, now_s: float, avoid: frozenset[PeerId] = frozenset()) -> Charge:
        """Take the peer with the smallest account and charge it.

        Args:
            num_samples: Of the microbatch.
            now_s: On the caller's clock.
            avoid: Peers that were just found busy, or that cannot reach another of the route; ignored when there is
                no other.
        """
        self._readmit(now_s)
        free = [peer for peer in self.peers if not self.is_banned(peer, now_s=now_s)] or list(self.peers)
        allowed = [peer for peer in free if peer not in avoid]
        allowed = allowed or [peer for peer in self.peers if peer not in avoid] or free
        lowest_s = min(self.peers[peer].assigned_s for peer in allowed)
        peer = self.rng.choice([peer for peer in allowed if self.peers[peer].assigned_s == lowest_s])
        return self.charge(peer, num_samples)

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
        load.num_failures, load.banned_until_s = 0, None
        load.assigned_s += busy_s - charge.expected_s
        load.queued = queued
        load.rate.measure(charge.num_samples / busy_s)

    def charge(self, peer: PeerId, num_samples: int) -> Charge:
        """Charge a peer that was chosen by others; one that left has no account."""
        known = peer in self.peers
        charge = Charge(peer, num_samples, num_samples / self._rate(peer) if known else 0.0)
        if known:
            self.peers[peer].assigned_s += charge.expected_s
            self.peers[peer].num_microbatches += 1
        return charge

    def ban(self, peer: PeerId, *, now_s: float) -> bool:
        """Avoid a peer that failed. False: it is banned already, perhaps for the same failure, or has left."""
        load = self.peers.get(peer)
        if load is None or self.is_banned(peer, now_s=now_s):
            return False
        load.num_failures += 1
        load.banned_until_s = now_s + min(FIRST_BAN_S * 2 ** min(load.num_failures - 1, 30), LONGEST_BAN_S)
        return True

    def is_banned(self, peer: PeerId, *, now_s: float) -> bool:
        """Whether a peer's ban lasts still."""
        load = self.peers.get(peer)
        return load is not None and load.banned_until_s is not None and now_s < load.banned_until_s

    def others(self, peer: PeerId, *, now_s: float) -> bool:
        """Whether another peer of the stage may be chosen in place of `peer`."""
        return any(other != peer and not self.is_banned(other, now_s=now_s) for other in self.peers)

    def _readmit(self, now_s: float) -> None:
        """Whose ban is over enters at the smallest account of the others: tried next, and not flooded."""
        for peer, load in self.peers.items():
            if load.banned_until_s is not None and now_s >= load.banned_until_s:
                load.banned_until_s = None
                others = [one.assigned_s for other, one in self.peers.items() if other != peer]
                load.assigned_s = min(others, default=load.assigned_s)

    def _rate(self, peer: PeerId) -> float:
        """The peer's rate in samples/s; an unmeasured one is taken for an average peer."""
        rates = [load.samples_per_s for load in self.peers.values() if load.samples_per_s is not None]
        own = self.peers[peer].samples_per_s
        if own is not None:
            return own
        return sum(rates) / len(rates) if rates else 1.0


def deadline_s(expected_s: float, num_ahead: int, *, longest_s: float) -> float:
    """How long to wait for a microbatch before its peer counts as late.

    Args:
        expected_s: What it takes by what was measured.
        num_ahead: Others that may come before it.
        longest_s: Never longer.
    """
    return min(max(SHORTEST_DEADLINE_S, LATE_FACTOR * expected_s * (1 + num_ahead)), longest_s)
