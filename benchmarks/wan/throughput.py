"""Samples/s over links of limited bandwidth and some latency, of a swarm and of what else there is for such hosts.

Four layers whose computing takes a given time, on four hosts, equal ones or not, each with a link of its own. The swarm
has two stages of two peers; with `relay` the same swarm's tensors all go through its trainer, as in the published
SWARM. torch's pipelines have a layer on each host; DDP and `hivemind.Optimizer` have all layers on each. All are
started and warm, and take turns while the links change. Needs Linux, root, iproute2 and TAP devices.
Takes about half an hour.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Final

from benchmarks.hosts import Hosts
from benchmarks.report import table, write
from benchmarks.runs import Stepped
from benchmarks.wan import peers, swarm
from benchmarks.wan.picture import draw

MBITS: Final = (100.0, 200.0, 500.0)
ROUND_TRIPS_S: Final = (0.1, 0.05, 0.0)
"""From the longest on: TCP's congestion control takes ten seconds to believe that a way is longer than it was."""

LAYER_S: Final = 0.032
"""Of a microbatch. A transformer's layer of d_model 256 on 512 tokens computes 3.2 Gflop: this is at 100 Gflop/s."""
BOUNDARY_BYTES: Final = 512 * 256 * 4
LAYER_BYTES: Final = 12 * 256 * 256 * 4
NUM_MICROBATCHES: Final = 64

SPEEDS: Final[Mapping[str, Sequence[float]]] = {"equal": (1.0, 1.0, 1.0, 1.0), "unequal": (1.5, 0.5, 1.5, 0.5)}
"""Of the peers, in layers."""

WAYS: Final = ("swarm", "relay", *peers.WAYS)


@contextmanager
def _everyone(hosts: Hosts, speeds: Sequence[float]) -> Iterator[Mapping[str, tuple[Stepped, str]]]:
    """By way, who takes its steps, and what it is told."""
    layers_s = [LAYER_S / speed for speed in speeds]
    half = len(layers_s) // 2
    stages = [[half * seconds for seconds in layers_s[begin : begin + half]] for begin in (0, half)]
    ours = swarm.Swarm(
        stages=stages,
        num_microbatches=NUM_MICROBATCHES,
        boundary_bytes=BOUNDARY_BYTES,
        stage_bytes=half * LAYER_BYTES,
    )
    theirs = partial(
        peers.training, num_microbatches=NUM_MICROBATCHES, boundary_bytes=BOUNDARY_BYTES, layer_bytes=LAYER_BYTES
    )
    with swarm.training(hosts, ours) as trainer, theirs(hosts, layers_s) as first:
        yield {
            "swarm": (trainer, "straight"),
            "relay": (trainer, "relay"),
            **{way: (first, way) for way in peers.WAYS},
        }


def measure(
    speeds: Sequence[float], num_steps: int, round_trips_s: Sequence[float] = ROUND_TRIPS_S
) -> Mapping[tuple[float, float], Mapping[str, float]]:
    """Samples/s by link and way, of the fastest of some steps: whatever else goes on makes them slower.

    Args:
        speeds: Of the peers.
        num_steps: Of each way and link.
        round_trips_s: Of the links.
    """
    found: dict[tuple[float, float], Mapping[str, float]] = {}
    num_hosts = len(speeds) + 1
    with (
        Hosts([max(MBITS)] * num_hosts, [max(ROUND_TRIPS_S) / 4] * num_hosts) as hosts,
        _everyone(hosts, speeds) as ways,
    ):
        for round_trip_s, mbit in product(round_trips_s, MBITS):
            hosts.change([mbit] * num_hosts, [round_trip_s / 4] * num_hosts)
            # One way after the other: connections that were idle begin slowly, which no training's are.
            took_s = {way: [who.take(told) for _ in range(num_steps)] for way, (who, told) in ways.items()}
            found[mbit, round_trip_s] = {way: NUM_MICROBATCHES / _fastest(took) for way, took in took_s.items()}
            print(
                mbit, round_trip_s, {way: [round(one, 2) for one in took] for way, took in took_s.items()}, flush=True
            )
    return found


def _fastest(took_s: Sequence[float]) -> float:
    """Of those that all peers took together."""
    return min((one for one in took_s if not math.isnan(one)), default=math.inf)


def main(words: Sequence[str] | None = None) -> None:
    """Measure equal and unequal peers, print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="of each cell and way")
    parser.add_argument("--only", choices=sorted(SPEEDS), default=None)
    parser.add_argument("--round-trip", type=float, choices=ROUND_TRIPS_S, help="seconds; all of them by default")
    arguments = parser.parse_args(words)
    round_trips_s = ROUND_TRIPS_S if arguments.round_trip is None else (arguments.round_trip,)
    if Hosts.missing(delayed=True):
        parser.error(f"it needs Linux, root, iproute2 and TAP devices; not found: {Hosts.missing(delayed=True)}")
    rows: list[list[object]] = [["peers", "Mb/s", "round trip", *WAYS, "/ relay", "/ GPipe"]]
    drawn: dict[str, Mapping[tuple[float, float], Mapping[str, float]]] = {}
    for name in [arguments.only] if arguments.only else list(SPEEDS):
        drawn[name] = measure(SPEEDS[name], arguments.steps, round_trips_s)
        for (mbit, round_trip_s), rates in sorted(drawn[name].items()):
            shown = [f"{rates[way]:.1f}" if rates[way] else "-" for way in WAYS]
            ratios = [f"{rates['swarm'] / rates[way]:.2f}" for way in ("relay", "gpipe")]
            rows.append([name, f"{mbit:g}", f"{round_trip_s * 1e3:.0f} ms", *shown, *ratios])
    write("wan", table("Samples/s over links of limited bandwidth and some latency", rows))
    draw("wan", drawn)


if __name__ == "__main__":
    main()
