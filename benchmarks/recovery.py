"""How fast a swarm is itself again when one of two replicas of a stage is killed.

A trainer that holds no stage, and two stages of two servers. After some time one server gets `kill -9`. What the
survivors can do is what they do in the last third of the run. The figure is the time from the kill until the samples/s
over the next `WINDOW_S` seconds are at 0.9 of that.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.overhead import SWARM
from benchmarks.report import OUT, table, write
from benchmarks.runs import Steps, train

WINDOW_S = 2.0


def recovery_s(steps: Steps, *, share: float = 0.9) -> float:
    """Seconds from the kill until the survivors' rate is reached again."""
    assert steps.killed_s is not None
    end_s = steps.at_s[-1]
    able = steps.median_rate(steps.killed_s + (end_s - steps.killed_s) * 2 / 3, end_s)
    for at_s in steps.at_s:
        if at_s >= steps.killed_s and steps.rate(at_s, at_s + WINDOW_S) >= share * able:
            return at_s - steps.killed_s
    return float("inf")


def picture(runs: list[Steps]) -> None:
    """Samples/s over time, the kill at 0."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 4))
    for steps in runs:
        assert steps.killed_s is not None
        rates = [steps.samples[i] / (steps.at_s[i] - steps.at_s[i - 1]) for i in range(1, len(steps.at_s))]
        axes.step([at_s - steps.killed_s for at_s in steps.at_s[1:]], rates, where="pre")
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel="seconds after the kill", ylabel="samples/s of each step", title="One of two replicas is killed")
    axes.set_ylim(bottom=0.0)
    figure.savefig(OUT / "recovery.png", dpi=120, bbox_inches="tight")


def main(words: Sequence[str] | None = None) -> None:
    """Run it as often as asked, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=24.0)
    arguments = parser.parse_args(words)
    runs = [
        train(*SWARM, "--kill-after-s", arguments.seconds / 3, seconds=arguments.seconds)
        for _ in range(arguments.repeats)
    ]
    rows: list[list[object]] = [["run", "before", "survivors", "ratio", "back at 0.9 after"]]
    for number, steps in enumerate(runs, start=1):
        assert steps.killed_s is not None
        before = steps.median_rate(0.0, steps.killed_s)
        after = steps.median_rate(steps.killed_s + (steps.at_s[-1] - steps.killed_s) * 2 / 3)
        rows.append(
            [number, f"{before:.1f}/s", f"{after:.1f}/s", f"{after / before:.2f}", f"{recovery_s(steps):.1f} s"]
        )
    write("recovery", table("One of two replicas of a stage is killed: samples/s, and the time to recover", rows))
    picture(runs)


if __name__ == "__main__":
    main()
