"""Which peer of a stage gets the next microbatch: the one where it would be through first. Pure.

That is told by what this trainer itself has under way there (the sum of the times that its microbatches are expected
to take still), by how many of other trainers' wait there as a rule, and by the new one's own time. So who is slow gets
what it can chew before the step ends. When a forward is done the expectation follows that, and its part leaves the
account; the rest does with the backward. Whoever got nothing for long is tried again, for it may have become faster.

Nothing is known of newcomers: each gets a microbatch before all others, and no more until its forward has told. Where
nothing is known of anybody all get a few at a time, until it shows who is fast.

A peer that failed is banned for a while, longer each time until it finishes something; nobody is banned where all are.
Peers are kept in order, so that none of this walks over all of them: a stage may have thousands, and each microbatch
asks.

SWARM (arXiv:2301.11913, appendix C) takes the peer with the least assigned time of all the run, which is fair over many
steps; but a step ends with its last microbatch. `benchmarks/routing.py` compares this and other ways.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from typing import Final

from lightning_swarm.core.moving_average import MovingAverage
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
class PeerCharge:
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


class PeerHeap:
    """Places and whose they are, the smallest first. Several may have the same place."""

    def __init__(self) -> None:
        self._places: list[tuple[float, PeerId]] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def first(self) -> tuple[float, PeerId] | None:
        """The smallest place, and who has it; None: nobody is in the order."""
        return self._places[0] if self._places else None

    def sort(self, places: Iterable[tuple[float, PeerId]]) -> None:
        """Begin anew with these."""
        self._places = sorted(places)

    def put(self, place: float, peer: PeerId) -> None:
        """Give a peer that is not in it a place."""
        insort(self._places, (place, peer))

    def remove(self, place: float, peer: PeerId) -> None:
        """Take a peer out. It has that place."""
        del self._places[bisect_left(self._places, (place, peer))]

    def draw(self, rng: random.Random, avoid: frozenset[PeerId]) -> PeerId | None:
        """One of those with the smallest place, by chance, of those that need not be avoided; None: all must be."""
        smallest = next((place for place, peer in self._places if peer not in avoid), None)
        if smallest is None:
            return None
        end = bisect_left(self._places, (math.nextafter(smallest, math.inf),))
        found: Sequence[int] = range(bisect_left(self._places, (smallest,)), end)
        if avoid:
            found = [index for index in found if self._places[index][1] not in avoid]
        return self._places[rng.choice(found)][1]


FIRST_BAN_S = 5.0
LONGEST_BAN_S = 300.0

LATE_FACTOR = 8.0
"""A peer is late when it takes so many times as long as measured."""

SHORTEST_DEADLINE_S = 30.0
"""Nobody is late earlier: what is compiled or loaded for the first time takes its time."""

FIRST_FORWARDS: Final = 2
"""What each peer gets at a time where nothing is known of anybody: one to work on, and one that waits."""

FIRST_MEASURED: Final = 2
"""So many microbatches each peer gets, one in a step at least: the first one may have taken long for a reason that is
gone (something was compiled, or read from disk)."""

TRIED_AGAIN: Final = 32.0
"""Who got nothing is tried again after so many times what a microbatch takes there: that costs 3 % at most."""

_KNOWN_AFTER: Final = 2 * FIRST_FORWARDS
"""Who has done no forward when another peer has done so many is slow."""

_MOST_WAITING: Final = 1024
"""More is not believed: a neighbour may have said it."""

_SHORTEST_S: Final = 1e-9
_LONGEST_S: Final = 1e9
"""What is said to take less or more is no time."""

_FORWARD_SHARE: Final = 1 / 3
"""Of a microbatch's time, until it was measured: a backward is two products of matrices for each one of a forward."""

_LEAST_SHARE: Final = 0.05


class StageRouter:
    """The peers of one stage and their accounts.

    Args:
        rng: Breaks ties, so that pipelines are wired at random.
    """

    def __init__(self, rng: random.Random) -> None:
        self.peers: dict[PeerId, PeerLoad] = {}
        self._rng = rng
        self._roster = 0
        # Each peer is in one of three orders.
        self._measured = PeerHeap()  # by when a microbatch would be through
        self._unmeasured = PeerHeap()  # by their forwards under way
        self._banned = PeerHeap()  # by what they have to do
        self._again = PeerHeap()  # those measured, by when they are tried again
        self._given_s = 0.0  # to each peer on average: a clock that stands still while nothing is trained
        self._ends: list[tuple[float, PeerId]] = []  # a heap of when bans end; those of who was forgiven count no more
        self._num_samples = 0  # of the microbatches for which `_measured` is in order
        self._asked = 0  # of the one that was routed last
        self._is_known = False  # who is slow
        # Of all who were measured. Exact: a sum of floats would keep what rounding has left of a large rate.
        self._sum_of_rates = Fraction()
        self._num_measured = 0
        self._forward_share = MovingAverage(SMOOTHING)  # of a microbatch's time

    def set_peers(self, peers: Iterable[PeerId]) -> None:
        """The stage's roster as a step begins: nothing is under way. Walks over all peers."""
        before = self.peers
        self.peers = {peer: before.get(peer) or PeerLoad() for peer in peers}
        for peer in before.keys() - self.peers.keys():
            self._count(before[peer], -1)
        self._roster += 1
        for load in self.peers.values():
            load.left_s, load.num_under_way, load.num_forwards = 0.0, 0, 0
        self._sort()

    # ------------------------------------------------------------------ choosing

    def choose(self, num_samples: int, *, now_s: float, avoid: frozenset[PeerId] = frozenset()) -> PeerCharge:
        """Take the peer where a microbatch would be through first, and charge it.

        Args:
            num_samples: Of the microbatch.
            now_s: On the caller's clock.
            avoid: Peers that were just found busy, or that cannot reach another of the route; ignored when there is
                no other.
        """
        self._readmit(now_s)
        # For a batch's last microbatch, which may be smaller, the order is as good.
        if num_samples != self._num_samples and self._asked in (0, num_samples):
            self._num_samples = num_samples
            self._sort()
        self._asked = num_samples
        for avoided in (avoid, frozenset[PeerId]()):
            peer = self._first(avoided)
            if peer is not None:
                return self.charge(peer, num_samples)
        raise LookupError("a stage's roster names at least one peer, got none")

    @property
    def is_full(self) -> bool:
        """Whether nobody should get more until it shows who is slow. Then some forward is under way."""
        first = self._unmeasured.first
        return not self._is_known and len(self._unmeasured) > 1 and first is not None and first[0] >= FIRST_FORWARDS

    def charge(self, peer: PeerId, num_samples: int) -> PeerCharge:
        """Charge a peer that was chosen by others; one that left has no account."""
        if peer not in self.peers:
            return PeerCharge(peer, num_samples, 0.0)
        with self._changing(peer) as load:
            expected_s = num_samples / (load.samples_per_s or self._mean_rate())
            self._given_s += expected_s / len(self.peers)
            load.again_s = self._given_s + TRIED_AGAIN * expected_s
            load.num_microbatches += 1
            load.num_under_way += 1
            load.num_forwards += 1
            load.left_s += expected_s
        return PeerCharge(peer, num_samples, expected_s, self._roster, left_s=expected_s, is_forward=True)

    def _first(self, avoid: frozenset[PeerId]) -> PeerId | None:
        again = self._again.first
        if again is not None and again[0] <= self._given_s and again[1] not in avoid:
            return again[1]
        unmeasured = self._unmeasured.draw(self._rng, avoid)
        if unmeasured is not None and not self.peers[unmeasured].num_forwards:
            return unmeasured
        return self._measured.draw(self._rng, avoid) or unmeasured or self._banned.draw(self._rng, avoid)

    # ------------------------------------------------------------------ what becomes of a charge

    def refund(self, charge: PeerCharge) -> None:
        """The peer was busy: as if it had not been chosen."""
        load = self.peers.get(charge.peer)
        if load is not None and charge.left_s is not None:
            load.num_microbatches -= 1
        self.release(charge)

    def release(self, charge: PeerCharge) -> None:
        """The microbatch is on its peer's account no more, whatever became of it. Twice is once."""
        load = self.peers.get(charge.peer)
        if load is not None and charge.left_s is not None and charge.roster == self._roster:
            with self._changing(charge.peer):
                load.num_under_way -= 1
                load.num_forwards -= charge.is_forward
                # What rounding leaves would break ties always alike.
                load.left_s = load.left_s - charge.left_s if load.num_under_way else 0.0
        charge.left_s, charge.is_forward = None, False

    def note_forward(self, charge: PeerCharge, *, busy_s: float | None) -> None:
        """A forward is done, whose backward may come long after: expect of that as much as it takes in proportion.

        Args:
            charge: For the microbatch.
            busy_s: What it took; None: nobody knows.
        """
        load = self.peers.get(charge.peer)
        if load is None:
            return
        with self._changing(charge.peer):
            if charge.roster == self._roster:
                load.num_forwards -= charge.is_forward
            charge.is_forward = False
            if busy_s is not None and _SHORTEST_S <= busy_s <= _LONGEST_S:
                self._expect(load, charge, busy_s)
        self._learn(load)

    def _expect(self, load: PeerLoad, charge: PeerCharge, forward_s: float) -> None:
        load.num_done += 1
        charge.forward_s, charge.expected_s = forward_s, forward_s / (self._forward_share.value or _FORWARD_SHARE)
        self._measure(load, charge.num_samples / charge.expected_s)
        if charge.left_s is not None:
            before_s, charge.left_s = charge.left_s, charge.expected_s - forward_s
            if charge.roster == self._roster:
                load.left_s += charge.left_s - before_s

    def settle(self, charge: PeerCharge, *, busy_s: float, queued: int) -> None:
        """The microbatch is done: it leaves the account, and the peer's rate follows."""
        load = self.peers.get(charge.peer)
        self.release(charge)
        # The time is the peer's own word: what is no time must not reach the rates.
        if load is None or not _SHORTEST_S <= busy_s <= _LONGEST_S:
            return
        with self._changing(charge.peer):
            load.num_failures, load.queued, load.banned_until_s = 0, queued, None
            load.waiting.measure(min(max(queued - load.num_under_way, 0), _MOST_WAITING))
            load.num_done += charge.forward_s is None
            self._measure(load, charge.num_samples / busy_s)
        if charge.forward_s is not None:
            self._forward_share.measure(min(max(charge.forward_s / busy_s, _LEAST_SHARE), 1.0))
        self._learn(load)

    def _learn(self, load: PeerLoad) -> None:
        if not self._is_known and (load.num_done >= _KNOWN_AFTER or self._num_measured == len(self.peers)):
            self._is_known = True
            self._sort()

    def _measure(self, load: PeerLoad, samples_per_s: float) -> None:
        self._count(load, -1)
        load.rate.measure(samples_per_s)
        self._count(load, 1)

    # ------------------------------------------------------------------ bans

    def ban(self, peer: PeerId, *, now_s: float) -> bool:
        """Avoid a peer that failed. False: it is banned already, perhaps for the same failure, or has left."""
        if peer not in self.peers or self.is_banned(peer, now_s=now_s):
            return False
        with self._changing(peer) as load:
            load.num_failures += 1
            load.banned_until_s = now_s + min(FIRST_BAN_S * 2 ** min(load.num_failures - 1, 30), LONGEST_BAN_S)
            heappush(self._ends, (load.banned_until_s, peer))
        return True

    def is_banned(self, peer: PeerId, *, now_s: float) -> bool:
        """Whether a peer's ban lasts still."""
        load = self.peers.get(peer)
        return load is not None and load.banned_until_s is not None and now_s < load.banned_until_s

    def others(self, peer: PeerId, *, now_s: float) -> bool:
        """Whether another peer of the stage may be chosen in place of `peer`."""
        self._readmit(now_s)
        is_free = peer in self.peers and self.peers[peer].banned_until_s is None
        return len(self._measured) + len(self._unmeasured) > is_free

    def _readmit(self, now_s: float) -> None:
        """Whose ban is over is tried next, and not flooded."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, peer = heappop(self._ends)
            load = self.peers.get(peer)
            if load is not None and load.banned_until_s == until_s:
                with self._changing(peer):
                    load.banned_until_s, load.again_s = None, self._given_s

    # ------------------------------------------------------------------ orders

    @contextmanager
    def _changing(self, peer: PeerId) -> Iterator[PeerLoad]:
        """While what is known of a peer changes it is in no order; then it has its place by that."""
        load = self.peers[peer]
        order = self._order(load)
        order.remove(load.place, peer)
        if order is self._measured:
            self._again.remove(_again_s(load), peer)
        yield load
        order, load.place = self._order(load), self._place(load)
        order.put(load.place, peer)
        if order is self._measured:
            self._again.put(_again_s(load), peer)

    def _sort(self) -> None:
        """Put all in order."""
        for load in self.peers.values():
            load.place = self._place(load)
        for order in (self._measured, self._unmeasured, self._banned):
            order.sort((load.place, peer) for peer, load in self.peers.items() if self._order(load) is order)
        self._again.sort(
            (_again_s(load), peer) for peer, load in self.peers.items() if self._order(load) is self._measured
        )

    def _place(self, load: PeerLoad) -> float:
        order = self._order(load)
        if order is not self._measured:
            return float(load.num_forwards) if order is self._unmeasured else load.left_s
        own_s = self._num_samples / (load.samples_per_s or self._mean_rate())
        return load.left_s + (1.0 + (load.waiting.value or 0.0)) * own_s

    def _order(self, load: PeerLoad) -> PeerHeap:
        if load.banned_until_s is not None:
            return self._banned
        return self._measured if self._is_known and load.samples_per_s is not None else self._unmeasured

    def _count(self, load: PeerLoad, sign: int) -> None:
        if load.samples_per_s is not None:
            self._sum_of_rates += sign * Fraction(load.samples_per_s)
            self._num_measured += sign

    def _mean_rate(self) -> float:
        """In samples/s: an unmeasured peer is taken for an average one."""
        return float(self._sum_of_rates / self._num_measured) if self._num_measured else 1.0


def _again_s(load: PeerLoad) -> float:
    """When a measured peer is tried although others would be through before it, on the router's clock."""
    if load.num_done >= FIRST_MEASURED:
        return load.again_s
    return math.inf if load.num_under_way else -math.inf


def deadline_s(expected_s: float, num_ahead: int, *, longest_s: float) -> float:
    """How long to wait for a microbatch before its peer counts as late.

    Args:
        expected_s: What it takes by what was measured.
        num_ahead: Others that may come before it.
        longest_s: Never longer.
    """
    return min(max(SHORTEST_DEADLINE_S, LATE_FACTOR * expected_s * (1 + num_ahead)), longest_s)
