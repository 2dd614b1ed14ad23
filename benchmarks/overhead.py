"""What it costs that any peer may die, in a swarm in which none does.

The same training in turns: in the way of `benchmarks.bare`, without copies of microbatches, pings, votes and snapshots;
as it is; and with a snapshot every `OFTEN_S` seconds in place of the default's five minutes. A trainer that holds no
stage, and two stages of two servers, so that three of them vote.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.runs import Steps, table, train, write

OFTEN_S = 5.0
WAYS = {
    "bare": ("benchmarks.bare", ["--snapshot-interval", 0.0]),
    "safe": ("benchmarks.train", []),
    "often": ("benchmarks.train", ["--snapshot-interval", OFTEN_S]),
}


def row(name: object, ratios: list[float], more: list[float]) -> list[object]:
    """Of the table."""
    return [name, *(f"{one:.3f}" for one in ratios), *(f"{one / 1e6:+.0f} MB" for one in more)]


def main() -> None:
    """Run all as often as asked, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()

    def run(way: str) -> Steps:
        module, options = WAYS[way]
        return train(
            "--role", "trainer", "--devices", 5, "--num-stages", 2, *options, seconds=arguments.seconds, module=module
        )  # fmt: skip

    head = ["round", "safe / bare", "often / bare", "memory: trainer", "largest server"]
    rows: list[list[object]] = [list(head)]
    ratios, more = [], []
    for number in range(1, arguments.repeats + 1):
        found = {way: run(way) for way in (list(WAYS) if number % 2 else reversed(WAYS))}
        rates = {way: steps.rate(0.0, steps.at_s[-1]) for way, steps in found.items()}
        bare, often = found["bare"], found["often"]
        ratios.append([rates[way] / rates["bare"] for way in ("safe", "often")])
        more.append([often.trainer_bytes - bare.trainer_bytes, often.server_bytes - bare.server_bytes])
        rows.append(row(number, ratios[-1], more[-1]))
    medians = [[statistics.median(column) for column in zip(*of, strict=True)] for of in (ratios, more)]
    rows.append(row("median", *medians))
    title = f"What it costs that any peer may die, when none does: samples/s; memory with snapshots every {OFTEN_S:g} s"
    write("overhead", table(title, rows))


if __name__ == "__main__":
    main()
