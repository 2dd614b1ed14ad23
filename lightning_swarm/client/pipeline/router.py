"""Chooses the peer of a stage that would finish the next microbatch first. Pure."""

from __future__ import annotations

import math
import random
import statistics
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.network import PeerId

SMOOTHING: Final = 0.2  # weight of a new measurement in moving averages


@dataclass
class PeerLoad:
    """A peer's account in one stage: its work under way and its measured speed. Only the router changes it."""

    left_s: float = 0.0  # expected remaining seconds of this trainer's work at the peer
    num_under_way: int = 0
    num_forwards: int = 0  # forwards under way
    num_done: int = 0  # finished forwards
    num_microbatches: int = 0  # microbatches charged so far
    queued: int = 0  # length of the peer's queue, in its newest report
    num_failures: int = 0  # consecutive failures
    ejected_until_s: float | None = None
    rate: MovingAverage = field(default_factory=lambda: MovingAverage(SMOOTHING))  # measured samples/s
    waiting: MovingAverage = field(default_factory=lambda: MovingAverage(SMOOTHING))  # other trainers' microbatches
    shapes: set[int] = field(default_factory=set)  # hashes of the shapes that the peer has computed
    key: float = 0.0  # the peer's key in its `PeerOrder`
    again_s: float = 0.0  # time at which an idle peer is tried again, on the clock `StageRouter._clock_s`

    @property
    def samples_per_s(self) -> float | None:
        """The measured rate; None before the first measurement."""
        return self.rate.value


@dataclass(eq=False, slots=True)
class PeerCharge:
    """A microbatch's entry in a peer's account. Only the router changes it."""

    peer: PeerId
    num_samples: int
    expected_s: float  # seconds of its forward and backward at the peer
    roster: int = 0  # number of the roster in which it was charged
    left_s: float | None = None  # remaining part of `expected_s` on the account; None: released
    forward_s: float | None = None  # measured seconds of its forward, once known
    is_forward: bool = False  # its forward is under way


class PeerOrder:
    """Peers sorted by key, the smallest first. Several peers may have equal keys."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, PeerId]] = []

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def first(self) -> tuple[float, PeerId] | None:
        """The smallest key and its peer; None if there is no peer."""
        return self._sorted[0] if self._sorted else None

    def sort(self, keys: Iterable[tuple[float, PeerId]]) -> None:
        """Replace all keys."""
        self._sorted = sorted(keys)

    def put(self, key: float, peer: PeerId) -> None:
        """Add a peer."""
        insort(self._sorted, (key, peer))

    def remove(self, key: float, peer: PeerId) -> None:
        """Remove a peer with its key."""
        del self._sorted[bisect_left(self._sorted, (key, peer))]

    def draw(self, rng: random.Random, avoid: frozenset[PeerId]) -> PeerId | None:
        """Draw a peer at random from the peers outside of `avoid` with the smallest key; None if there is none."""
        smallest = next((key for key, peer in self._sorted if peer not in avoid), None)
        if smallest is None:
            return None
        end = bisect_left(self._sorted, (math.nextafter(smallest, math.inf),))
        indices: Sequence[int] = range(bisect_left(self._sorted, (smallest,)), end)
        if avoid:
            indices = [index for index in indices if self._sorted[index][1] not in avoid]
        return self._sorted[rng.choice(indices)][1]


FIRST_EJECTION_S = 5.0
LONGEST_EJECTION_S = 300.0

FIRST_FORWARDS: Final = 2  # forwards per peer while no peer is measured: one to compute, and one that waits
# Forwards that each peer gets, even if other peers would finish first. The first forward may have been slow for a
# temporary reason, such as compilation or reading from disk.
FIRST_MEASURED: Final = 2
# An idle peer may have become faster. It is tried again after this many microbatch times, which costs 3 %.
TRIED_AGAIN: Final = 32.0
_KNOWN_AFTER: Final = 2 * FIRST_FORWARDS  # once a peer has done this many forwards, any peer without one is slow
_MAX_WAITING: Final = 1024  # limit of a reported queue length, which may be false
_MAX_SHAPES: Final = 256  # hashes kept per peer; any further shape always counts as new to the peer
_PARTS: Final = 1 << 1074  # every float is an integer multiple of 1 / _PARTS
_SHORTEST_S: Final = 1e-9
_LONGEST_S: Final = 1e9  # reported times beyond these two bounds are ignored
# A forward's share of a microbatch's time, until measured. The backward has twice as many matrix products.
_FORWARD_SHARE: Final = 1 / 3
_LEAST_SHARE: Final = 0.05


# The estimated time at which a peer would finish a microbatch has three parts: the remaining time of this trainer's
# microbatches there, the usual queue of other trainers' microbatches, and the time of the microbatch itself. So a slow
# peer gets as much work as it can finish before the step ends. When a forward is done, its measured time corrects the
# estimate and is taken off the account; the rest is taken off when the backward is done.
#
# A newcomer has no rate. Its first microbatch comes before any measured peer's, unless a peer is due for a retry; it
# gets no second microbatch until its forward shows its speed. A peer that failed is ejected, each time for longer until
# it finishes a microbatch. If all peers are ejected, ejections are ignored. The peers are kept sorted, because there
# may be thousands, too many to compare for each microbatch.
#
# SWARM (arXiv:2301.11913, appendix C) takes the peer with the least time assigned over the whole run. That is fair over
# many steps, but a step ends with its last microbatch. `benchmarks/routing.py` compares this and other policies.
class StageRouter:
    """Routes microbatches to the peers of one stage, and keeps the peers' accounts; `rng` breaks ties."""

    def __init__(self, rng: random.Random) -> None:
        self.peers: dict[PeerId, PeerLoad] = {}
        self._rng = rng
        self._roster = 0
        # Each peer is in one of the first three orders; measured peers are in `_retries`, too.
        self._measured = PeerOrder()  # key: seconds until it would finish a microbatch
        self._unmeasured = PeerOrder()  # key: forwards under way
        self._ejected = PeerOrder()  # key: seconds of its remaining work
        self._retries = PeerOrder()  # key: time on the clock `_clock_s` at which the peer is tried again
        self._clock_s = 0.0  # mean seconds assigned to a peer: a clock that stops while nothing is trained
        self._ejections: list[tuple[float, PeerId]] = []  # heap of (end, peer); may contain ejections that ended early
        self._num_samples = 0  # microbatch size for which `_measured` is sorted
        self._newest_num_samples = 0  # size of the newest microbatch
        self._knows_slow_peers = False  # enough forwards are done to know which peers are slow
        # Sum over all measured peers, in units of the smallest float. Exact, because a sum of floats would keep the
        # rounding error of a large rate.
        self._sum_of_rates = 0
        self._num_measured = 0
        self._forward_share = MovingAverage(SMOOTHING)  # forward's share of a microbatch's time

    def set_peers(self, peers: Iterable[PeerId]) -> None:
        """Set the stage's roster of n peers at the beginning of a step, with no work under way, in O(n log n)."""
        former = self.peers
        self.peers = {peer: former.get(peer) or PeerLoad() for peer in peers}
        for peer in former.keys() - self.peers.keys():
            self._count(former[peer], -1)
        self._roster += 1
        for load in self.peers.values():
            load.left_s, load.num_under_way, load.num_forwards = 0.0, 0, 0
        self._sort()

    # ------------------------------------------------------------------ choosing

    def choose(self, num_samples: int, *, now_s: float, avoid: frozenset[PeerId] = frozenset()) -> PeerCharge:
        """Charge a microbatch to the peer that would finish it first; peers in `avoid` only if there are no others."""
        self._readmit(now_s)
        # Sort for a new size only if it comes twice in a row, or first: a batch's last microbatch may be smaller.
        if num_samples != self._num_samples and self._newest_num_samples in (0, num_samples):
            self._num_samples = num_samples
            self._sort()
        self._newest_num_samples = num_samples
        for avoided in (avoid, frozenset[PeerId]()):
            peer = self._first(avoided)
            if peer is not None:
                return self.charge(peer, num_samples)
        raise LookupError("a stage's roster names at least one peer, got none")

    @property
    def is_full(self) -> bool:
        """True if all peers have enough forwards and it is unknown which are slow: wait for a forward to end."""
        first = self._unmeasured.first
        is_learning = not self._knows_slow_peers and len(self._unmeasured) > 1
        return is_learning and first is not None and first[0] >= FIRST_FORWARDS

    def charge(self, peer: PeerId, num_samples: int) -> PeerCharge:
        """Charge a microbatch to a given peer. A peer that left the roster has no account."""
        if peer not in self.peers:
            return PeerCharge(peer, num_samples, 0.0)
        load = self._take_out(peer)
        expected_s = num_samples / (load.samples_per_s or self._mean_rate())
        self._clock_s += expected_s / len(self.peers)
        load.again_s = self._clock_s + TRIED_AGAIN * expected_s
        load.num_microbatches += 1
        load.num_under_way += 1
        load.num_forwards += 1
        load.left_s += expected_s
        self._put_back(peer, load)
        return PeerCharge(peer, num_samples, expected_s, self._roster, left_s=expected_s, is_forward=True)

    def _first(self, avoid: frozenset[PeerId]) -> PeerId | None:
        """Return the peer that gets the next microbatch; None if all peers are in `avoid`."""
        retry = self._retries.first
        if retry is not None and retry[0] <= self._clock_s and retry[1] not in avoid:
            return retry[1]
        unmeasured = self._unmeasured.draw(self._rng, avoid)
        if unmeasured is not None and not self.peers[unmeasured].num_forwards:
            return unmeasured
        return self._measured.draw(self._rng, avoid) or unmeasured or self._ejected.draw(self._rng, avoid)

    # ------------------------------------------------------------------ changes of a charge

    def refund(self, charge: PeerCharge) -> None:
        """Undo a choice, because the peer was busy."""
        load = self.peers.get(charge.peer)
        if load is not None and charge.left_s is not None:
            load.num_microbatches -= 1
        self.release(charge)

    def release(self, charge: PeerCharge) -> None:
        """Take a microbatch off its peer's account, finished or not. A second call does nothing."""
        load = self.peers.get(charge.peer)
        if load is None or charge.left_s is None:
            charge.left_s, charge.is_forward = None, False
            return
        self._take_out(charge.peer)
        self._discharge(load, charge)
        self._put_back(charge.peer, load)

    def _discharge(self, load: PeerLoad, charge: PeerCharge) -> None:
        if charge.left_s is not None and charge.roster == self._roster:
            load.num_under_way -= 1
            load.num_forwards -= charge.is_forward
            # Exactly 0 without work, because a rounding error would decide each tie between idle peers.
            load.left_s = load.left_s - charge.left_s if load.num_under_way else 0.0
        charge.left_s, charge.is_forward = None, False

    def note_forward(self, charge: PeerCharge, *, busy_s: float | None) -> None:
        """Record a finished forward, and its seconds if known, from which the time of the backward is estimated."""
        load = self.peers.get(charge.peer)
        if load is None:
            return
        self._take_out(charge.peer)
        if charge.roster == self._roster:
            load.num_forwards -= charge.is_forward
        charge.is_forward = False
        if busy_s is not None and _SHORTEST_S <= busy_s <= _LONGEST_S:
            self._expect(load, charge, busy_s)
        self._put_back(charge.peer, load)
        self._update_known(load)

    def _expect(self, load: PeerLoad, charge: PeerCharge, forward_s: float) -> None:
        """Correct a peer's rate, and its expected work, by the measured time of a forward."""
        load.num_done += 1
        charge.forward_s, charge.expected_s = forward_s, forward_s / (self._forward_share.value or _FORWARD_SHARE)
        self._update_rate(load, charge.num_samples / charge.expected_s)
        if charge.left_s is not None:
            former_s, charge.left_s = charge.left_s, charge.expected_s - forward_s
            if charge.roster == self._roster:
                load.left_s += charge.left_s - former_s

    def note_shapes(self, peer: PeerId, shapes: int) -> None:
        """Record that a peer has computed tensors of these shapes, given by a hash."""
        load = self.peers.get(peer)
        if load is not None and len(load.shapes) < _MAX_SHAPES:
            load.shapes.add(shapes)

    def settle(self, charge: PeerCharge, *, busy_s: float, queued: int) -> None:
        """Take a finished microbatch off its peer's account, and update the peer's rate."""
        load = self.peers.get(charge.peer)
        # The peer reports its own time, so impossible values are ignored.
        if load is None or not _SHORTEST_S <= busy_s <= _LONGEST_S:
            self.release(charge)
            return
        self._take_out(charge.peer)
        self._discharge(load, charge)
        load.num_failures, load.queued, load.ejected_until_s = 0, queued, None
        load.waiting.measure(min(max(queued - load.num_under_way, 0), _MAX_WAITING))
        load.num_done += charge.forward_s is None
        self._update_rate(load, charge.num_samples / busy_s)
        self._put_back(charge.peer, load)
        if charge.forward_s is not None:
            self._forward_share.measure(min(max(charge.forward_s / busy_s, _LEAST_SHARE), 1.0))
        self._update_known(load)

    def _update_known(self, load: PeerLoad) -> None:
        """After a peer's forward, update whether it is known which peers are slow."""
        if not self._knows_slow_peers and (load.num_done >= _KNOWN_AFTER or self._num_measured == len(self.peers)):
            self._knows_slow_peers = True
            self._sort()

    def _update_rate(self, load: PeerLoad, samples_per_s: float) -> None:
        self._count(load, -1)
        load.rate.measure(samples_per_s)
        self._count(load, 1)

    # ------------------------------------------------------------------ ejections

    def eject(self, peer: PeerId, *, now_s: float) -> bool:
        """Eject a peer that failed; False if it has left, or is ejected already, perhaps for the same failure."""
        if peer not in self.peers or self.is_ejected(peer, now_s=now_s):
            return False
        load = self._take_out(peer)
        load.num_failures += 1
        load.ejected_until_s = now_s + min(FIRST_EJECTION_S * 2 ** min(load.num_failures - 1, 30), LONGEST_EJECTION_S)
        heappush(self._ejections, (load.ejected_until_s, peer))
        self._put_back(peer, load)
        return True

    def is_ejected(self, peer: PeerId, *, now_s: float) -> bool:
        """Return whether a peer is currently ejected."""
        load = self.peers.get(peer)
        return load is not None and load.ejected_until_s is not None and now_s < load.ejected_until_s

    def has_other_peer(self, peer: PeerId, *, now_s: float) -> bool:
        """Return whether the stage has another peer that is not ejected and can replace `peer`."""
        self._readmit(now_s)
        is_usable = peer in self.peers and self.peers[peer].ejected_until_s is None
        return len(self._measured) + len(self._unmeasured) - is_usable > 0

    def _readmit(self, now_s: float) -> None:
        """End ejections whose time is over. Each such peer then gets a single microbatch as a trial."""
        while self._ejections and self._ejections[0][0] <= now_s:
            until_s, peer = heappop(self._ejections)
            load = self.peers.get(peer)
            if load is not None and load.ejected_until_s == until_s:
                self._take_out(peer)
                load.ejected_until_s, load.again_s = None, self._clock_s
                self._put_back(peer, load)

    # ------------------------------------------------------------------ the peers in order

    def _take_out(self, peer: PeerId) -> PeerLoad:
        """Take a peer out of its order, because its account changes; `_put_back` must follow."""
        load = self.peers[peer]
        order = self._order(load)
        order.remove(load.key, peer)
        if order is self._measured:
            self._retries.remove(_retry_s(load), peer)
        return load

    def _put_back(self, peer: PeerId, load: PeerLoad) -> None:
        order, load.key = self._order(load), self._key_of(load)
        order.put(load.key, peer)
        if order is self._measured:
            self._retries.put(_retry_s(load), peer)

    def _sort(self) -> None:
        for load in self.peers.values():
            load.key = self._key_of(load)
        for order in (self._measured, self._unmeasured, self._ejected):
            order.sort((load.key, peer) for peer, load in self.peers.items() if self._order(load) is order)
        self._retries.sort(
            (_retry_s(load), peer) for peer, load in self.peers.items() if self._order(load) is self._measured
        )

    def _key_of(self, load: PeerLoad) -> float:
        order = self._order(load)
        if order is not self._measured:
            return float(load.num_forwards) if order is self._unmeasured else load.left_s
        own_s = self._num_samples / (load.samples_per_s or self._mean_rate())
        return load.left_s + (1.0 + (load.waiting.value or 0.0)) * own_s

    def _order(self, load: PeerLoad) -> PeerOrder:
        if load.ejected_until_s is not None:
            return self._ejected
        return self._measured if self._knows_slow_peers and load.samples_per_s is not None else self._unmeasured

    def _count(self, load: PeerLoad, sign: int) -> None:
        """Add a peer's rate, if it is measured, to the sum of all rates, or take it out of the sum."""
        if load.samples_per_s is not None:
            numerator, denominator = load.samples_per_s.as_integer_ratio()  # the denominator is a power of two
            self._sum_of_rates += sign * numerator * (_PARTS // denominator)
            self._num_measured += sign

    def median_rate(self) -> float | None:
        """Return the median of the measured rates in samples/s. A few false reports cannot move it far."""
        rates = [load.samples_per_s for load in self.peers.values() if load.samples_per_s is not None]
        return statistics.median(rates) if rates else None

    def median_queued(self) -> float:
        """Return the median of the queue lengths that the peers report."""
        return statistics.median(load.queued for load in self.peers.values()) if self.peers else 0.0

    def _mean_rate(self) -> float:
        """Return the mean measured rate in samples/s, which is also assumed for unmeasured peers."""
        return self._sum_of_rates / (self._num_measured * _PARTS) if self._num_measured else 1.0


def _retry_s(load: PeerLoad) -> float:
    """Return the time on the router's clock at which a peer is tried even if other peers would finish first."""
    if load.num_done >= FIRST_MEASURED:
        return load.again_s
    return math.inf if load.num_under_way else -math.inf
