"""Which peer of a stage gets the next microbatch: interleaved weighted round-robin. Pure.

The peer whose assigned busy time is smallest is taken, and the time that the microbatch is expected to take is added
to it. When its forward is done the expectation follows that, and when all is done it is replaced by what was measured.
A peer that failed is banned for a while, longer each time until it finishes something; nobody is banned where all are.
Accounts are kept sorted, so that none of this walks over all peers: a stage may have thousands, and each microbatch
asks.

Source: SWARM, arXiv:2301.11913, appendix C.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from heapq import heappop, heappush
from typing import Final, TypeAlias

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

_SHORTEST_S: Final = 1e-9
_LONGEST_S: Final = 1e9
"""What is said to take less or more is no time."""

_FORWARD_SHARE: Final = 1 / 3
"""Of a microbatch's time, until it was measured: a backward is two products of matrices for each one of a forward."""

_LEAST_SHARE: Final = 0.05

_Accounts: TypeAlias = list[tuple[float, PeerId]]
"""Assigned times and whose they are, the smallest first."""


@dataclass
class PeerLoad:
    """What a router knows of one peer of one stage. The router alone changes it."""

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
    """A microbatch on a peer's account.

    Args:
        peer: Which one.
        num_samples: Of the microbatch.
        expected_s: On the account for it: forward and backward.
        forward_s: What its forward took, once that is known.
    """

    peer: PeerId
    num_samples: int
    expected_s: float
    forward_s: float | None = None


class StageRouter:
    """The peers of one stage and their accounts.

    Args:
        rng: Breaks ties, so that pipelines are wired at random.
    """

    def __init__(self, rng: random.Random) -> None:
        self.peers: dict[PeerId, PeerLoad] = {}
        self._rng = rng
        self._free: _Accounts = []
        self._banned: _Accounts = []
        self._ends: list[tuple[float, PeerId]] = []  # a heap of when bans end; those of who was forgiven count no more
        # Of all who were measured. Exact: a sum of floats would keep what rounding has left of a large rate.
        self._sum_of_rates = Fraction()
        self._num_measured = 0
        self._forward_share = MovingAverage(SMOOTHING)  # of a microbatch's time

    def set_peers(self, peers: Iterable[PeerId]) -> None:
        """The stage's roster. A newcomer enters at the smallest account, so it is tried next. Walks over all peers."""
        lowest_s = next((assigned_s for assigned_s, _ in (*self._free[:1], *self._banned[:1])), 0.0)
        before = self.peers
        self.peers = {peer: before.get(peer) or PeerLoad(assigned_s=lowest_s) for peer in peers}
        for peer in before.keys() - self.peers.keys():
            self._count(before[peer], -1)
        self._free, self._banned = [], []
        for peer, load in self.peers.items():
            self._accounts(load.banned_until_s).append((load.assigned_s, peer))
        self._free.sort()
        self._banned.sort()

    def choose(self, num_samples: int, *, now_s: float, avoid: frozenset[PeerId] = frozenset()) -> Charge:
        """Take the peer with the smallest account and charge it.

        Args:
            num_samples: Of the microbatch.
            now_s: On the caller's clock.
            avoid: Peers that were just found busy, or that cannot reach another of the route; ignored when there is
                no other.
        """
        self._readmit(now_s)
        for avoided in (avoid, frozenset[PeerId]()):
            for accounts in (self._free, self._banned):
                if places := _lowest(accounts, avoided):
                    return self.charge(accounts[self._rng.choice(places)][1], num_samples)
        raise LookupError("a stage's roster names at least one peer, got none")

    def refund(self, charge: Charge) -> None:
        """The peer was busy: as if it had not been chosen."""
        load = self.peers.get(charge.peer)
        if load is not None:
            load.num_microbatches -= 1
            self.assign(charge.peer, load.assigned_s - charge.expected_s)

    def note_forward(self, charge: Charge, *, busy_s: float) -> Charge:
        """A forward is done, whose backward may come long after: expect of that as much as it takes in proportion.

        Returns what is on the account for the microbatch from now on.
        """
        load = self.peers.get(charge.peer)
        if load is None or not _SHORTEST_S <= busy_s <= _LONGEST_S:
            return charge
        expected_s = busy_s / (self._forward_share.value or _FORWARD_SHARE)
        self._measure(load, charge.num_samples / expected_s)
        self.assign(charge.peer, load.assigned_s + (expected_s - charge.expected_s))
        return replace(charge, expected_s=expected_s, forward_s=busy_s)

    def settle(self, charge: Charge, *, busy_s: float, queued: int) -> None:
        """The microbatch is done: the account holds the measured time instead of the expected one."""
        load = self.peers.get(charge.peer)
        # The time is the peer's own word: what is no time must not reach the accounts.
        if load is None or not _SHORTEST_S <= busy_s <= _LONGEST_S:
            return
        load.num_failures, load.queued = 0, queued
        self._measure(load, charge.num_samples / busy_s)
        if charge.forward_s is not None:
            self._forward_share.measure(min(max(charge.forward_s / busy_s, _LEAST_SHARE), 1.0))
        self._place(charge.peer, load.assigned_s + (busy_s - charge.expected_s), None)

    def _measure(self, load: PeerLoad, samples_per_s: float) -> None:
        self._count(load, -1)
        load.rate.measure(samples_per_s)
        self._count(load, 1)

    def charge(self, peer: PeerId, num_samples: int) -> Charge:
        """Charge a peer that was chosen by others; one that left has no account."""
        load = self.peers.get(peer)
        if load is None:
            return Charge(peer, num_samples, 0.0)
        charge = Charge(peer, num_samples, num_samples / (load.samples_per_s or self._mean_rate()))
        load.num_microbatches += 1
        self.assign(peer, load.assigned_s + charge.expected_s)
        return charge

    def assign(self, peer: PeerId, assigned_s: float) -> None:
        """Have the account of a peer of the stage be so much."""
        self._place(peer, assigned_s, self.peers[peer].banned_until_s)

    def ban(self, peer: PeerId, *, now_s: float) -> bool:
        """Avoid a peer that failed. False: it is banned already, perhaps for the same failure, or has left."""
        load = self.peers.get(peer)
        if load is None or self.is_banned(peer, now_s=now_s):
            return False
        load.num_failures += 1
        until_s = now_s + min(FIRST_BAN_S * 2 ** min(load.num_failures - 1, 30), LONGEST_BAN_S)
        heappush(self._ends, (until_s, peer))
        self._place(peer, load.assigned_s, until_s)
        return True

    def is_banned(self, peer: PeerId, *, now_s: float) -> bool:
        """Whether a peer's ban lasts still."""
        load = self.peers.get(peer)
        return load is not None and load.banned_until_s is not None and now_s < load.banned_until_s

    def others(self, peer: PeerId, *, now_s: float) -> bool:
        """Whether another peer of the stage may be chosen in place of `peer`."""
        self._readmit(now_s)
        is_free = peer in self.peers and self.peers[peer].banned_until_s is None
        return len(self._free) > is_free

    def _readmit(self, now_s: float) -> None:
        """Whose ban is over enters at the smallest account of those who are free: tried next, and not flooded."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, peer = heappop(self._ends)
            load = self.peers.get(peer)
            if load is not None and load.banned_until_s == until_s:
                self._place(peer, self._free[0][0] if self._free else load.assigned_s, None)

    def _place(self, peer: PeerId, assigned_s: float, banned_until_s: float | None) -> None:
        """Change a peer's account or ban, and with them its place in the order."""
        load = self.peers[peer]
        before = self._accounts(load.banned_until_s)
        del before[bisect_left(before, (load.assigned_s, peer))]
        load.assigned_s, load.banned_until_s = assigned_s, banned_until_s
        insort(self._accounts(banned_until_s), (assigned_s, peer))

    def _accounts(self, banned_until_s: float | None) -> _Accounts:
        return self._free if banned_until_s is None else self._banned

    def _count(self, load: PeerLoad, sign: int) -> None:
        if load.samples_per_s is not None:
            self._sum_of_rates += sign * Fraction(load.samples_per_s)
            self._num_measured += sign

    def _mean_rate(self) -> float:
        """In samples/s: an unmeasured peer is taken for an average one."""
        return float(self._sum_of_rates / self._num_measured) if self._num_measured else 1.0


def _lowest(accounts: _Accounts, avoid: frozenset[PeerId]) -> Sequence[int]:
    """Where those with the smallest account are, of those that need not be avoided."""
    lowest_s = next((assigned_s for assigned_s, peer in accounts if peer not in avoid), None)
    if lowest_s is None:
        return ()
    places = range(bisect_left(accounts, (lowest_s,)), bisect_left(accounts, (math.nextafter(lowest_s, math.inf),)))
    return [place for place in places if accounts[place][1] not in avoid] if avoid else places


def deadline_s(expected_s: float, num_ahead: int, *, longest_s: float) -> float:
    """How long to wait for a microbatch before its peer counts as late.

    Args:
        expected_s: What it takes by what was measured.
        num_ahead: Others that may come before it.
        longest_s: Never longer.
    """
    return min(max(SHORTEST_DEADLINE_S, LATE_FACTOR * expected_s * (1 + num_ahead)), longest_s)
