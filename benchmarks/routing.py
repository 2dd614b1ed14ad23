"""Other ways to choose a microbatch's peer, against the one in use: a study, simulated. None of them is in the package.

Trainers that know nothing of each other send microbatches to the servers of one stage, step by step; a step ends when
all are through. Each figure is a share of what the servers could do together. A server works off its queue in order,
and reports with each answer how much waits there, which is old when it comes.

In use is to go where a microbatch would be through first, by the trainer's own calls under way and by how many of
others wait there on average. By the newest report in place of the average all trainers go to the same servers at
once; by their own calls alone they all go to the fastest ones. Accounts of all assigned time are fair over many
steps, and who waits for a step waits for its last microbatch. To draw two servers, or those that were idle, is worse
in nearly all cases.

Sources: accounts, SWARM, arXiv:2301.11913, appendix C; power of two choices, Mitzenmacher, IEEE TPDS 12(10), 2001;
join-idle-queue, Lu et al., Performance Evaluation 68(11), 2011.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from benchmarks.report import picture, table, write
from lightning_swarm.client.pipeline.router import SMOOTHING, PeerCharge, StageRouter
from lightning_swarm.core.moving_average import MovingAverage
from lightning_swarm.network import PeerId

NUM_SERVERS: Final = 32
NUM_TRAINERS: Final = (1, 4, 32)
PER_SERVER: Final = (4, 16)  # microbatches of all trainers in a step
MAX_IN_FLIGHT: Final = 64
NUM_STEPS: Final = 60
NUM_SEEDS: Final = 3
LEARNING: Final = 30  # steps that do not count
LATENCY_S: Final = 0.02  # one way; a server of rate 1 takes 1 s
SCATTER: Final = 0.05  # of the time that a microbatch takes
NUM_SLOWED: Final = 3  # servers, others in each step, that others use, too
SLOWED: Final = 0.2


class Router(Protocol):
    """What chooses for one trainer."""

    def choose(self, num_samples: int, *, now_s: float) -> PeerCharge: ...  # noqa: D102
    def settle(self, charge: PeerCharge, *, busy_s: float, queued: int) -> None: ...  # noqa: D102


@dataclass
class _Seen:
    queued: int = 0  # at the newest answer, and what was sent there since
    rate: MovingAverage = field(default_factory=lambda: MovingAverage(SMOOTHING))

    def wait_s(self) -> float:
        """Until one more would be through."""
        return (self.queued + 1) / (self.rate.value or 1.0)


class Accounts:
    """The server with the least assigned time of all the run: interleaved weighted round-robin."""

    def __init__(self, rng: random.Random, peers: Sequence[PeerId]) -> None:
        self._rng = rng
        self._seen = {peer: _Seen() for peer in peers}
        self._assigned_s = dict.fromkeys(peers, 0.0)

    def choose(self, num_samples: int, *, now_s: float) -> PeerCharge:
        """See `StageRouter`."""
        peer = min(self._assigned_s, key=lambda one: (self._assigned_s[one], self._rng.random()))
        charge = PeerCharge(peer, num_samples, self._seen[peer].wait_s())
        self._assigned_s[peer] += charge.expected_s
        return charge

    def settle(self, charge: PeerCharge, *, busy_s: float, queued: int) -> None:
        """See `StageRouter`."""
        self._assigned_s[charge.peer] += busy_s - charge.expected_s
        self._seen[charge.peer].rate.measure(charge.num_samples / busy_s)


class TwoChoices:
    """Of two servers drawn at random the one where a microbatch would be through first, by what was reported last."""

    def __init__(self, rng: random.Random, peers: Sequence[PeerId]) -> None:
        self._rng = rng
        self._peers = list(peers)
        self._seen = {peer: _Seen() for peer in peers}

    def choose(self, num_samples: int, *, now_s: float) -> PeerCharge:
        """See `StageRouter`."""
        peer = min(self._rng.sample(self._peers, 2), key=lambda one: self._seen[one].wait_s())
        self._seen[peer].queued += 1
        return PeerCharge(peer, num_samples, self._seen[peer].wait_s())

    def settle(self, charge: PeerCharge, *, busy_s: float, queued: int) -> None:
        """See `StageRouter`."""
        self._seen[charge.peer].queued = queued
        self._seen[charge.peer].rate.measure(charge.num_samples / busy_s)


class LeastWait(TwoChoices):
    """Of all servers the one where a microbatch would be through first, likewise: what reports can do at the most."""

    def choose(self, num_samples: int, *, now_s: float) -> PeerCharge:
        """See `StageRouter`."""
        peer = min(self._peers, key=lambda one: (self._seen[one].wait_s(), self._rng.random()))
        self._seen[peer].queued += 1
        return PeerCharge(peer, num_samples, self._seen[peer].wait_s())


class OwnWait(LeastWait):
    """Likewise by what this trainer has under way there itself: nothing needs to be reported."""

    def settle(self, charge: PeerCharge, *, busy_s: float, queued: int) -> None:
        """See `StageRouter`."""
        super().settle(charge, busy_s=busy_s, queued=self._seen[charge.peer].queued - 1)


class JoinIdle:
    """A server that reported that nothing waits there, in turn; one at random where none did."""

    def __init__(self, rng: random.Random, peers: Sequence[PeerId]) -> None:
        self._rng = rng
        self._peers = list(peers)
        self._idle = dict.fromkeys(rng.sample(self._peers, len(peers)))

    def choose(self, num_samples: int, *, now_s: float) -> PeerCharge:
        """See `StageRouter`."""
        peer = next(iter(self._idle), None) or self._rng.choice(self._peers)
        self._idle.pop(peer, None)
        return PeerCharge(peer, num_samples, 1.0)

    def settle(self, charge: PeerCharge, *, busy_s: float, queued: int) -> None:
        """See `StageRouter`."""
        if queued == 0:
            self._idle[charge.peer] = None


def in_use(rng: random.Random, peers: Sequence[PeerId]) -> StageRouter:
    """The package's own."""
    router = StageRouter(rng)
    router.set_peers(peers)
    return router


ROUTERS: Final[dict[str, Callable[[random.Random, Sequence[PeerId]], Router]]] = {
    "in use": in_use,
    "accounts": Accounts,
    "two choices": TwoChoices,
    "join idle": JoinIdle,
    "least wait": LeastWait,
    "least own wait": OwnWait,
}
RATES: Final[dict[str, Callable[[random.Random], float]]] = {
    "equal": lambda rng: 1.0,
    "1 to 10": lambda rng: 10.0 ** rng.random(),
    "slowed": lambda rng: 1.0,
}


class Stage:
    """Servers, and the events of a simulation."""

    def __init__(self, rates: dict[PeerId, float], rng: random.Random) -> None:
        self.rates = rates
        self._rng = rng
        self._free_s = dict.fromkeys(rates, 0.0)
        self._held = dict.fromkeys(rates, 0)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self.now_s = 0.0

    def at(self, at_s: float, do: Callable[..., None], *what: Any) -> None:
        """Have something done."""
        heapq.heappush(self._events, (at_s, next(self._numbers), do, what))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events:
            self.now_s, _, do, what = heapq.heappop(self._events)
            do(*what)

    def send(self, charge: PeerCharge, answered: Callable[[PeerCharge, float, int], None]) -> None:
        """A microbatch to a server. `answered` is called with the time that it took, and what waits there."""
        self.at(self.now_s + LATENCY_S, self._arrive, charge, answered)

    def _arrive(self, charge: PeerCharge, answered: Callable[[PeerCharge, float, int], None]) -> None:
        peer = charge.peer
        busy_s = max(0.2, self._rng.gauss(1.0, SCATTER)) * charge.num_samples / self.rates[peer]
        self._free_s[peer] = max(self._free_s[peer], self.now_s) + busy_s
        self._held[peer] += 1
        self.at(self._free_s[peer], self._finish, charge, answered, busy_s)

    def _finish(self, charge: PeerCharge, answered: Callable[[PeerCharge, float, int], None], busy_s: float) -> None:
        self._held[charge.peer] -= 1
        self.at(self.now_s + LATENCY_S, answered, charge, busy_s, self._held[charge.peer])


def step(stage: Stage, routers: Sequence[Router], num_each: int) -> float:
    """Seconds until all microbatches of all trainers are through."""
    began_s = stage.now_s

    def train(router: Router) -> None:
        left = iter(range(num_each))

        def send() -> None:
            if next(left, None) is not None:
                stage.send(router.choose(1, now_s=stage.now_s), answered)

        def answered(charge: PeerCharge, busy_s: float, queued: int) -> None:
            router.settle(charge, busy_s=busy_s, queued=queued)
            send()

        for _ in range(MAX_IN_FLIGHT):
            send()

    for router in routers:
        train(router)
    stage.run()
    return stage.now_s - began_s


def share(name: str, rates: str, num_trainers: int, per_server: int, seed: int) -> float:
    """Percent of what the servers could do, over the steps that count."""
    rng = random.Random(seed)
    peers = [PeerId(f"peer-{number}") for number in range(NUM_SERVERS)]
    own = {peer: RATES[rates](rng) for peer in peers}
    stage = Stage(dict(own), rng)
    routers = [ROUTERS[name](rng, peers) for _ in range(num_trainers)]
    num_each = max(1, per_server * NUM_SERVERS // num_trainers)
    took_s = ideal_s = 0.0
    for number in range(NUM_STEPS):
        if rates == "slowed":
            stage.rates = own | {peer: SLOWED * own[peer] for peer in rng.sample(peers, NUM_SLOWED)}
        step_s = step(stage, routers, num_each)
        if number >= LEARNING:
            took_s += step_s
            ideal_s += num_each * num_trainers / sum(stage.rates.values())
    return 100.0 * ideal_s / took_s


def main(words: Sequence[str] | None = None) -> None:
    """Simulate, and print the table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(words)
    rows: list[list[object]] = [["servers", "trainers", "microbatches a server", *ROUTERS]]
    drawn: dict[str, list[float]] = {name: [] for name in ROUTERS}
    for rates, num_trainers, per_server in itertools.product(RATES, NUM_TRAINERS, PER_SERVER):
        found = [
            statistics.fmean(share(name, rates, num_trainers, per_server, seed) for seed in range(NUM_SEEDS))
            for name in ROUTERS
        ]
        rows.append([rates, num_trainers, per_server, *(f"{percent:.0f}" for percent in found)])
        for name, percent in zip(ROUTERS, found, strict=True):
            drawn[name].append(percent)
    title = f"Percent of what {NUM_SERVERS} servers of a stage could do"
    write("routing", table(title, rows))
    picture("routing", title, "percent; a dot for each row", drawn)


if __name__ == "__main__":
    main()
