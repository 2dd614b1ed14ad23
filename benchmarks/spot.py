"""Real preemption traces, as what happens to a simulated swarm. `traces/README.md` says where they are from."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final

from lightning_swarm.network import PeerId
from lightning_swarm.simulator.fluid import Change

_FOLDER: Final = Path(__file__).with_name("traces")


def g4dn(seed: int) -> list[Change]:
    """Instances of AWS with a T4 each, by name; a seed changes nothing."""
    with (_FOLDER / "aws-g4dn.csv").open() as file:
        rows = [(float(ms) / 1e3, what, name) for ms, what, name in csv.reader(file)]
    return [Change(at_s, PeerId(name), 1.0 if what == "add" else 0.0) for at_s, what, name in rows]


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


TRACES: Final[Mapping[str, Callable[[int], list[Change]]]] = {"g4dn": g4dn, "a100": a100}
