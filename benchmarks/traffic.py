"""What a step costs beside tensors, as the swarm grows: bytes and calls at who coordinates, at servers, at trainers.

What is counted is the protocol of the steps and signs of life; tensors and the calls that go with them depend on the
model, and are left out. `crowd.py` has the swarms; of those with many servers most only say what real ones would
(`standins.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from benchmarks.crowd import NUM_STEPS, Swarm
from benchmarks.report import table, write
from benchmarks.standins import Crowd
from lightning_swarm.network.access import PING
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import APPLY, AVERAGE, FREEZE, PROPOSE, RECORD

BESIDE: Final = ((8, 10), (8, 30), (8, 100), (8, 300), (8, 1000), (32, 10), (128, 10), (30, 30), (100, 100))
"""Servers and trainers of swarms that take their steps."""
ALIKE: Final = ((100, 4), (300, 4), (1000, 1), (1000, 4), (1000, 16))
"""As many servers as trainers, and microbatches of a batch; the servers are stand-ins."""
METHODS: Final = (RECORD.name, APPLY.name, AVERAGE.name, FREEZE.name, PROPOSE.name, PING)
"""Those that most bytes are of."""


def kb(num_bytes: float) -> str:
    """In thousands."""
    return f"{num_bytes / 1e3:,.1f}" if num_bytes < 1e5 else f"{num_bytes / 1e3:,.0f}"


def take_steps(swarm: Swarm) -> None:
    """Those that are counted."""
    swarm.clear()
    for _ in range(NUM_STEPS):
        swarm.loop.run_until_complete(swarm.step())


def size_of_record(swarm: Swarm) -> int:
    """Of the newest step, in bytes."""
    record = swarm.newest
    assert sum(number for _, _, number in record.closing.batches) == len(swarm.trainers)
    return len(encode(record))


def end(swarm: Swarm) -> None:
    """Close it all."""
    swarm.loop.run_until_complete(swarm.close())
    swarm.loop.close()


def measure(num_servers: int, num_trainers: int) -> tuple[list[object], list[object], list[object]]:
    """Rows of the tables: of a step, of the coordinator's part of it, of the directory."""
    swarm = Swarm(num_servers, num_trainers)
    swarm.loop.run_until_complete(swarm.begin())
    found = swarm.directory.copy()
    directory = [num_servers, found["records"], kb(found["record bytes"]), found["reads"], kb(found["read bytes"])]
    take_steps(swarm)
    assert swarm.directory == found, "steps need no directory"
    names = [transport.peer_id for transport in swarm.transports]
    coordinator, servers, trainers = names[:1], names[1:num_servers], names[num_servers + 1 :]
    row: list[object] = [num_servers, num_trainers, kb(size_of_record(swarm))]
    for peers in (coordinator, servers, trainers):
        row += [kb(swarm.by_method(peers).total()), f"{swarm.num_calls(peers):.0f}"]
    methods = swarm.by_method(coordinator)
    parts: list[object] = [num_servers, num_trainers, *(kb(methods[method]) for method in METHODS)]
    end(swarm)
    return row, parts, directory


def measure_alike(number: int, num_microbatches: int) -> list[object]:
    """A row: what a step costs who coordinates as many servers as trainers, and the largest body of a call in it."""
    crowd = Crowd(number, number, num_microbatches)
    crowd.loop.run_until_complete(crowd.begin())
    take_steps(crowd)
    coordinator = [crowd.transports[0].peer_id]
    method, num_bytes = crowd.calls.largest.most_common(1)[0]
    total = crowd.by_method(coordinator).total()
    row: list[object] = [number, num_microbatches, kb(size_of_record(crowd)), kb(total), kb(total / (2 * number))]
    end(crowd)
    return [*row, kb(num_bytes), method]


def tables_of_swarms(sizes: Sequence[tuple[int, int]]) -> list[str]:
    """Of those that are real."""
    head = ["servers", "trainers"]
    steps: list[list[object]] = [
        [*head, "its record", "coordinator", "calls", "a server", "calls", "a trainer", "calls"]
    ]
    parts: list[list[object]] = [[*head, *METHODS]]
    directory: list[list[object]] = [["servers", "records", "kB", "reads", "kB read"]]
    for size in sizes:
        row, of_coordinator, of_directory = measure(*size)
        steps.append(row)
        parts.append(of_coordinator)
        directory += [of_directory] if of_directory not in directory else []
    return [
        table("A step, in kB: sent and taken, and calls made and answered", steps),
        table("The coordinator's part by method, in kB", parts),
        table("The directory, until a run has begun", directory),
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=1000, help="leave out what has more trainers or servers")
    most = parser.parse_args(words).most
    tables = tables_of_swarms([size for size in BESIDE if max(size) <= most])
    alike: list[list[object]] = [
        ["servers and trainers", "microbatches of a batch", "its record", "coordinator", "a peer", "largest call", "is"]
    ]
    alike += [measure_alike(*size) for size in ALIKE if size[0] <= most]
    write("traffic", "\n\n".join([*tables, table("As many servers as trainers, in kB of a step", alike)]))


if __name__ == "__main__":
    main()
