"""From the worst assignment: seven peers of very different speed, three stages, and who moves where.

The peers are real processes and talk as those of a run do; only their computing is waiting, so that they do not share
cores. The best is the slowest stage's rate of the best of all assignments.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.report import OUT, table, write
from benchmarks.runs import Steps, train
from benchmarks.waiting import PACES

BEGIN = ((1.0, 1.0), (2.0, 3.0), (1.0, 8.0, 10.0))
"""Of each stage, what its peers do at first, relative to each other."""

MICROBATCH_S = 0.2
"""Of a peer of speed 1."""

NUM_MICROBATCHES = 256


def best_rate(speeds: Sequence[float], num_stages: int) -> float:
    """Of the best of all assignments."""
    return max(
        min(
            sum(speed for speed, place in zip(speeds, places, strict=True) if place == stage)
            for stage in range(num_stages)
        )
        for places in itertools.product(range(num_stages), repeat=len(speeds))
    )


def run(rebalancing: str, seconds: float, interval_s: float) -> Steps:
    """One training."""
    with tempfile.TemporaryDirectory() as folder:
        for stage, speeds in enumerate(BEGIN):
            for number, speed in enumerate(speeds):
                (Path(folder) / f"{stage}-{speed / MICROBATCH_S:09.4f}-{number}").touch()
        return train(
            "--devices", sum(map(len, BEGIN)), "--num-stages", len(BEGIN), "--num-microbatches", NUM_MICROBATCHES,
            "--rebalancing", rebalancing, "--rebalance-interval", interval_s,
            seconds=seconds, module="benchmarks.waiting", environment={PACES: folder},
        )  # fmt: skip


def picture(runs: dict[str, Steps], best: float, interval_s: float) -> None:
    """Samples/s over time, as shares of the best."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 4))
    for name, steps in runs.items():
        rates = [steps.samples[i] / (steps.at_s[i] - steps.at_s[i - 1]) / best for i in range(1, len(steps.at_s))]
        axes.step(steps.at_s[1:], rates, where="pre", label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="seconds", ylabel="samples/s of each step, best = 1", title="Seven peers, badly placed at first")
    axes.set_ylim(bottom=0.0)
    axes.legend()
    figure.savefig(OUT / "moving.png", dpi=120, bbox_inches="tight")


def main(words: Sequence[str] | None = None) -> None:
    """Train both ways, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--interval-s", type=float, default=4.0, help="between two decisions, at the latest")
    arguments = parser.parse_args(words)
    best = best_rate([speed for speeds in BEGIN for speed in speeds], len(BEGIN)) / MICROBATCH_S
    begun = min(map(sum, BEGIN)) / MICROBATCH_S
    runs = {name: run(name, arguments.seconds, arguments.interval_s) for name in ("none", "gain")}
    rows: list[list[object]] = [
        ["rebalancing", "at first / best", "last third / best", "moves", "intervals since the last"]
    ]
    for name, steps in runs.items():
        third = steps.rate(steps.at_s[-1] * 2 / 3, steps.at_s[-1])
        changes = [i for i in range(1, len(steps.held)) if steps.held[i] != steps.held[i - 1]]
        moved = {peer for i in changes for stage, held in enumerate(steps.held[i]) for peer in held
                 if peer not in steps.held[i - 1][stage]}  # fmt: skip
        last_s = steps.at_s[min(changes[-1], len(steps.at_s) - 1)] if changes else 0.0
        quiet = (steps.at_s[-1] - last_s) / arguments.interval_s
        rows.append([name, f"{begun / best:.2f}", f"{third / best:.2f}", len(moved), f"{quiet:.0f}"])
    write("moving", table("Seven peers of speeds 1 to 10 in three stages, from the worst assignment", rows))
    picture(runs, best, arguments.interval_s)


if __name__ == "__main__":
    main()
