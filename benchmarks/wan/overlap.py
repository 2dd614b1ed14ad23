"""What averaging and stepping cost of a step's time: where steps wait for them, and with `delay_optimizer_step`.

The swarm of `benchmarks.wan.throughput`, of equal peers; a step is a window of two batches. The first batch of a window
of steps that wait has neither averaging nor stepping in it: what a step takes beyond two of those is lost. Both swarms
are started, and take turns while the links change; each one's first step by a link is not counted, for its connections
learn what that carries. Needs Linux, root, iproute2 and TAP devices.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from benchmarks.hosts import Hosts
from benchmarks.report import picture, table, write
from benchmarks.runs import Stepped
from benchmarks.wan import swarm
from benchmarks.wan.throughput import BOUNDARY_BYTES, LAYER_BYTES, LAYER_S

MBITS: Final = (200.0, 500.0)
ROUND_TRIPS_S: Final = (0.1, 0.05, 0.0)
NUM_MICROBATCHES: Final = 64
WINDOW: Final = 2
NUM_PEERS: Final = 4


def _windows(trainer: Stepped, number: int) -> Sequence[Sequence[float]]:
    """The seconds that each batch of some steps took, after one that does not count."""
    return [[trainer.take("straight") for _ in range(WINDOW)] for _ in range(1 + number)][1:]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of each swarm and link")
    arguments = parser.parse_args(words)
    if Hosts.missing(delayed=True):
        parser.error(f"it needs Linux, root, iproute2 and TAP devices; not found: {Hosts.missing(delayed=True)}")
    stages = [[2 * LAYER_S] * (NUM_PEERS // 2) for _ in range(2)]
    rows: list[list[object]] = [["Mb/s", "round trip", "two batches", "steps wait: lost", "delayed: lost"]]
    drawn: dict[str, list[float]] = {}
    links = [(max(MBITS), max(ROUND_TRIPS_S) / 4)] * (NUM_PEERS + 1)
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts([mbit for mbit, _ in links], [way_s for _, way_s in links]))
        waiting, delayed = (
            stack.enter_context(
                swarm.training(
                    hosts,
                    swarm.Swarm(
                        stages=stages,
                        num_microbatches=NUM_MICROBATCHES,
                        boundary_bytes=BOUNDARY_BYTES,
                        stage_bytes=2 * LAYER_BYTES,
                        window=WINDOW,
                        delays=delays,
                    ),
                )
            )
            for delays in (False, True)
        )
        for trainer in (waiting, delayed):
            trainer.take("straight")  # the first step's second batch
        for round_trip_s in ROUND_TRIPS_S:
            for mbit in MBITS:
                hosts.change([mbit] * len(links), [round_trip_s / 4] * len(links))
                found = [_windows(trainer, arguments.steps) for trainer in (waiting, delayed)]
                alone_s = WINDOW * statistics.median(first for first, _ in found[0])
                lost = [1.0 - alone_s / statistics.median(map(sum, steps)) for steps in found]
                rows.append([f"{mbit:g}", f"{round_trip_s * 1e3:.0f} ms", f"{alone_s:.2f} s"])
                rows[-1] += [f"{share:.1%}" for share in lost]
                link = f"{mbit:g} Mb/s, {round_trip_s * 1e3:.0f} ms"
                drawn |= {f"{link}, {way}": [100 * share] for way, share in zip(("wait", "late"), lost, strict=True)}
                print(*rows[-1], flush=True)
    title = "Time lost to averaging and stepping, of a step"
    write("overlap", table(title, rows))
    picture("overlap", title, "percent", drawn)


if __name__ == "__main__":
    main()
