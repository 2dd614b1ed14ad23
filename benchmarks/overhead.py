"""What it costs that any peer may die, in a swarm in which none does.

The same training in turns, as it is and in the way of `benchmarks.bare`: without copies of microbatches, pings, votes
and snapshots. A trainer that holds no stage, and two stages of two servers, so that three of them vote.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.runs import Steps, table, train, write


def main() -> None:
    """Run both as often as asked, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()

    def run(module: str, snapshot_interval: float) -> Steps:
        return train(
            "--role", "trainer", "--devices", 5, "--num-stages", 2, "--snapshot-interval", snapshot_interval,
            seconds=arguments.seconds, module=module,
        )  # fmt: skip

    rows: list[list[object]] = [["pair", "bare", "safe", "safe / bare"]]
    ratios = []
    for number in range(1, arguments.repeats + 1):
        order = ("benchmarks.bare", "benchmarks.train") if number % 2 else ("benchmarks.train", "benchmarks.bare")
        found = {module: run(module, 0.0 if module == "benchmarks.bare" else 10.0) for module in order}
        bare, safe = (
            steps.rate(0.0, steps.at_s[-1]) for steps in (found["benchmarks.bare"], found["benchmarks.train"])
        )
        ratios.append(safe / bare)
        rows.append([number, f"{bare:.1f}/s", f"{safe:.1f}/s", f"{ratios[-1]:.3f}"])
    rows.append(["median", "", "", f"{statistics.median(ratios):.3f}"])
    write("overhead", table("What it costs that any peer may die, when none does: samples/s", rows))


if __name__ == "__main__":
    main()
