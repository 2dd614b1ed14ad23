"""Preemptions, as what happens to a simulated swarm: real traces, and made-up ones of another kind.

`traces/README.md` says where the real ones are from.
"""

from __future__ import annotations

import csv
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from lightning_swarm.network import PeerId
from lightning_swarm.planner.simulator.fluid import Change

_FOLDER: Final = Path(__file__).with_name("traces")

_LONG_S: Final = 8 * 3600.0
"""Of those that are made up."""


def g4dn(seed: int) -> list[Change]:
    """Instances of AWS with a T4 each, by name; a seed says in which order those of the same minute come or go."""
    rng = random.Random(seed)
    with (_FOLDER / "aws-g4dn.csv").open() as file:
        rows = [(float(ms) / 1e3, what, name) for ms, what, name in csv.reader(file)]
    found: list[Change] = []
    for _, together in itertools.groupby(rows, key=lambda row: row[:2]):
        changes = [Change(at_s, PeerId(name), 1.0 if what == "add" else 0.0) for at_s, what, name in together]
        found += rng.sample(changes, len(changes))
    return found


def a100(seed: int) -> list[Change]:
    """Instances of GCP: only their number is known, so a seed says which of them went."""
    rng = random.Random(seed)
    with (_FOLDER / "gcp-a100-east1b.txt").open() as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    times = [datetime.fromisoformat(f"{day} {time}") for day, time, _ in rows]
    changes: list[Change] = []
    alive: list[PeerId] = []
    num_seen = 0
    for time, (_, _, number) in zip(times, rows, strict=True):
        at_s = (time - times[0]).total_seconds()
        while len(alive) > int(number):
            changes.append(Change(at_s, alive.pop(rng.randrange(len(alive))), 0.0))
        while len(alive) < int(number):
            alive.append(PeerId(f"instance-{num_seen}"))
            changes.append(Change(at_s, alive[-1], 1.0))
            num_seen += 1
    return changes


def times(changes: list[Change], number: int) -> list[Change]:
    """Each instance stands for several peers, which come and go together."""
    return [
        Change(one.at_s, PeerId(f"{one.peer}.{copy}"), one.samples_per_s) for one in changes for copy in range(number)
    ]


def bursts(seed: int) -> list[Change]:
    """Of 48 equal peers a tenth to a half goes within minutes, every 40 minutes, and comes back one by one."""
    rng = random.Random(seed)
    changes = [Change(0.0, PeerId(f"peer-{number}"), 1.0) for number in range(48)]
    alive, later = [one.peer for one in changes], list[float]()
    now_s = rng.expovariate(1 / 2400)
    while now_s < _LONG_S:
        for at_s in sorted(at_s for at_s in later if at_s < now_s):
            alive.append(PeerId(f"peer-{len(changes)}"))
            changes.append(Change(at_s, alive[-1], 1.0))
        later = [at_s for at_s in later if at_s >= now_s]
        for _ in range(int(len(alive) * rng.uniform(0.1, 0.5))):
            changes.append(Change(now_s, alive.pop(rng.randrange(len(alive))), 0.0))
            later.append(now_s + 60.0 + rng.expovariate(1 / 1200))
            now_s += rng.expovariate(1 / 5)
        now_s += rng.expovariate(1 / 2400)
    return sorted(changes, key=lambda one: one.at_s)


def growth(seed: int) -> list[Change]:
    """Equal peers, 20 at first and 120 in the end, each of which stays for four hours on the average."""
    rng = random.Random(seed)
    begins = [0.0] * 20 + [rng.uniform(0.0, _LONG_S) for _ in range(100)]
    return _in_places(rng, begins, stays_s=4 * 3600.0, rate=lambda: 1.0)


def unequal(seed: int) -> list[Change]:
    """Up to ten times as fast as each other; each of 48 stays for three hours, half as long at the same speed."""
    rng = random.Random(seed)
    changes = _in_places(rng, [0.0] * 48, stays_s=3 * 3600.0, rate=lambda: 10.0 ** rng.random())
    gone = {one.peer: one.at_s for one in changes if not one.samples_per_s}
    for one in [one for one in changes if one.samples_per_s]:
        at_s = one.at_s + rng.expovariate(1 / 5400.0)
        while at_s < gone.get(one.peer, _LONG_S):
            changes.append(Change(at_s, one.peer, one.samples_per_s * rng.choice([0.3, 0.6, 1.0])))
            at_s += rng.expovariate(1 / 5400.0)
    return sorted(changes, key=lambda one: one.at_s)


def _in_places(
    rng: random.Random, begins: Iterable[float], *, stays_s: float, rate: Callable[[], float]
) -> list[Change]:
    """One after the other in each place, ten minutes apart."""
    changes: list[Change] = []
    for begin_s in begins:
        comes_s = begin_s
        while comes_s < _LONG_S:
            peer, goes_s = PeerId(f"peer-{len(changes)}"), comes_s + rng.expovariate(1 / stays_s)
            changes += [Change(comes_s, peer, rate()), Change(goes_s, peer, 0.0)]
            comes_s = goes_s + rng.expovariate(1 / 600.0)
    return sorted((one for one in changes if one.at_s < _LONG_S), key=lambda one: one.at_s)


TRACES: Final[Mapping[str, Callable[[int], list[Change]]]] = {
    "g4dn": g4dn,
    "a100": a100,
    "bursts": bursts,
    "growth": growth,
    "unequal": unequal,
}
