"""The share of the time that a stage computes while its tensors travel, beside the paper's first table.

Two stages on hosts with links of 500 Mb/s, and a trainer on a third. A stage takes the time that the paper's GPU took,
which its own figures give, and its tensors have the bytes that they give. Needs Linux, root, iproute2 and TAP devices.
Takes about fifteen minutes.

Source: arXiv:2301.11913, table 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.hosts import Hosts
from benchmarks.report import picture, table, write
from benchmarks.wan.swarm import Swarm, training

MBIT: Final = 500.0
ROUND_TRIPS_S: Final = (0.0, 0.01, 0.05, 0.1, 0.2)

PAPER: Final[Mapping[str, Sequence[float]]] = {
    "base": (18.0, 11.8, 4.88, 2.78, 1.53),
    "xxlarge": (32.1, 28.9, 20.1, 14.9, 10.1),
    "GPT-3": (82.1, 79.3, 70.3, 60.2, 48.5),
    "GPT-3, compressed": (89.5, 87.2, 79.5, 71.5, 59.2),
}
"""Percent, for each of the round trips."""


@dataclass(frozen=True)
class Layer:
    """What a row of the paper's says of itself.

    Args:
        compute_s: Of a microbatch, forward and backward.
        transfer_s: Of its activation and its gradient together, at `MBIT`.
    """

    compute_s: float
    transfer_s: float

    @property
    def num_bytes(self) -> int:
        """Of the activation, and as many of the gradient."""
        return round(self.transfer_s / 2 * MBIT * 1e6 / 8)


def derive(percents: Sequence[float]) -> Layer:
    """The layer that waits for its tensors and for a round trip: u = compute / (compute + transfer + round trip).

    So 1 / u is a line over the round trips: its slope is 1 / compute, and where it begins 1 + transfer / compute.
    """
    slope, begin = statistics.linear_regression(ROUND_TRIPS_S, [100.0 / percent for percent in percents])
    return Layer(1.0 / slope, (begin - 1.0) / slope)


def measure(layer: Layer, seconds: float, num_steps: int, send_bytes: int) -> list[float]:
    """Percent, for each of the round trips: of the median of some steps.

    Args:
        layer: Of both stages.
        seconds: How long a step would take if nothing travelled, about.
        num_steps: Of each.
        send_bytes: As `Hosts` has it.
    """
    num_microbatches = max(48, round(seconds / (layer.compute_s + layer.transfer_s)))
    swarm = Swarm(stages=[[layer.compute_s]] * 2, num_microbatches=num_microbatches, boundary_bytes=layer.num_bytes)
    found = []
    far = max(ROUND_TRIPS_S) / 4
    with Hosts([MBIT] * 3, [far] * 3, send_bytes=send_bytes) as hosts, training(hosts, swarm) as trainer:
        # From the longest on: TCP's congestion control takes ten seconds to believe that a way is longer than it was.
        for round_trip_s in sorted(ROUND_TRIPS_S, reverse=True):
            hosts.change([MBIT] * 3, [round_trip_s / 4] * 3)
            trainer.take()
            took_s = [trainer.take() for _ in range(num_steps)]
            found.append(100.0 * num_microbatches * layer.compute_s / statistics.median(took_s))
            print(f"{round_trip_s * 1e3:.0f} ms: {found[-1]:.1f} % {[f'{took:.2f}' for took in took_s]}", flush=True)
    return found[::-1]


def main(words: Sequence[str] | None = None) -> None:
    """Measure each row, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of a step, about")
    parser.add_argument("--steps", type=int, default=2, help="of each cell, after one more")
    parser.add_argument("--send-bytes", type=int, default=0, help="largest buffer of TCP, sending; 0: Linux's own")
    parser.add_argument("--only", default="", help="rows whose names have this in them")
    arguments = parser.parse_args(words)
    if Hosts.missing(delayed=True):
        parser.error(f"it needs Linux, root, iproute2 and TAP devices; not found: {Hosts.missing(delayed=True)}")
    trips = [f"{round_trip_s * 1e3:.0f} ms" for round_trip_s in ROUND_TRIPS_S]
    rows: list[list[object]] = [["layer", "compute", "tensor", "whose", *trips]]
    drawn: dict[str, list[float]] = {}
    for name, percents in PAPER.items():
        if arguments.only in name:
            layer = derive(percents)
            print(name, layer, flush=True)
            of = [name, f"{layer.compute_s * 1e3:.1f} ms", f"{layer.num_bytes / 1e6:.2f} MB"]
            rows.append([*of, "paper", *percents])
            ours = measure(layer, arguments.seconds, arguments.steps, arguments.send_bytes)
            rows.append(["", "", "", "swarm", *(f"{percent:.1f}" for percent in ours)])
            for trip, of_paper, of_swarm in zip(trips, percents, ours, strict=True):
                drawn |= {f"swarm, {name}, {trip}": [of_swarm], f"paper, {name}, {trip}": [of_paper]}
    title = f"Share of the time that a stage computes, percent, by round trip; {MBIT:g} Mb/s"
    write("utilisation", table(title, rows))
    picture("utilisation", title, "percent", drawn)


if __name__ == "__main__":
    main()
