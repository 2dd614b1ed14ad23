"""What it costs that any peer may die, in a swarm in which none does.

A trainer that holds no stage, and two stages of two servers, so that three of them vote. `benchmarks.bare` has blocks
of steps as they are and blocks without safeguards take turns. Then the memory that snapshots take, with one a second.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from benchmarks.bare import BLOCK, is_bare
from benchmarks.report import picture, table, write
from benchmarks.runs import Steps, train

SWARM = ("--role", "trainer", "--devices", 5, "--num-stages", 2)


def ratios(steps: Steps) -> list[float]:
    """For each two blocks that follow each other, the time of a bare step over that of a safe one."""
    seconds: dict[int, list[float]] = {}
    for i in range(1, len(steps.at_s)):
        step = i + 1  # the first one began before the clock did
        if step % BLOCK:  # the turn changes in the first of a block
            seconds.setdefault(step // BLOCK, []).append(steps.at_s[i] - steps.at_s[i - 1])
    whole = [block for block, found in sorted(seconds.items()) if len(found) == BLOCK - 1]
    means = {block: statistics.mean(seconds[block]) for block in whole}
    pairs = [(block, block + 1) for block in whole if block + 1 in means]
    return [means[one] / means[other] if is_bare(one * BLOCK) else means[other] / means[one] for one, other in pairs]


def main(words: Sequence[str] | None = None) -> None:
    """Run it as often as asked, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args(words)
    rows: list[list[object]] = [["run", "pairs of blocks", "samples/s, safe / bare", "quartiles"]]
    found: list[float] = []
    for number in range(1, arguments.repeats + 1):
        steps = train(*SWARM, "--snapshot-interval", 0.0, seconds=arguments.seconds, module="benchmarks.bare")
        here = ratios(steps)
        found += here
        rows.append(row(number, here))
    rows.append(row("all", found))
    without, often = (train(*SWARM, "--snapshot-interval", each, seconds=10.0) for each in (0.0, 1.0))
    more = [(often.trainer_bytes - without.trainer_bytes) / 1e6, (often.server_bytes - without.server_bytes) / 1e6]
    text = table("What it costs that any peer may die, when none does", rows)
    write(
        "overhead",
        f"{text}\nsnapshots take {more[1]:.0f} MB of the largest server's memory, {more[0]:.0f} of the trainer's",
    )
    picture("overhead", "samples/s, safe / bare, of pairs of blocks", "ratio", {"swarm": found})


def row(name: object, found: list[float]) -> list[object]:
    """Of the table."""
    low, median, high = statistics.quantiles(found, n=4)
    return [name, len(found), f"{median:.3f}", f"{low:.3f} to {high:.3f}"]


if __name__ == "__main__":
    main()
