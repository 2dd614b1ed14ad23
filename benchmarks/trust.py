"""What it costs that only invited peers take part: the same swarm with `trust="invited"` and with `"open"`, in turns.

Once it computes (two blocks of d_model 512), once it does not, so that a step is all calls (as in
`benchmarks.hops`). Then the time from the command to the first batch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence

from benchmarks.report import picture, table, write
from benchmarks.runs import Turns

MODES = ("open", "invited")
COMPUTES = ("--devices", 2, "--num-stages", 2, "--width", 512, "--num-blocks", 2, "--batch-size", 64)
CALLS = ("--nop", "--role", "trainer", "--devices", 3, "--num-stages", 2, "--width", 64, "--num-blocks", 2)
NUM_MICROBATCHES = 64


def seconds(options: Sequence[object], num_turns: int, environment: dict[str, str]) -> dict[str, list[float]]:
    """The time of each step of both ways, in turns; the first ones do not count."""
    ways = {mode: ("benchmarks.train", ("--by-turns", *options, "--trust", mode)) for mode in MODES}
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    with Turns(ways, environment=environment) as turns:
        for turn in range(num_turns + 2):
            for mode in MODES if turn % 2 else reversed(MODES):
                took_s = turns.take(mode)
                if turn > 1:
                    found[mode].append(took_s)
    return found


def start_s(mode: str, environment: dict[str, str]) -> float:
    """Seconds from the command to the first batch of a swarm of two."""
    options = ("--devices", 2, "--num-stages", 2, "--width", 64, "--batch-size", 8, "--trust", mode)
    began_s = time.monotonic()
    with Turns({mode: ("benchmarks.train", ("--by-turns", *options))}, environment=environment) as turns:
        turns.take(mode)
        return time.monotonic() - began_s


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--starts", type=int, default=4)
    arguments = parser.parse_args()
    rows: list[list[object]] = [["what", "open", "invited", "invited / open", "quartiles"]]
    shown: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = {"XDG_CONFIG_HOME": folder}
        calls = (*CALLS, "--batch-size", NUM_MICROBATCHES)
        for name, options, num_turns in (
            ("a step that computes", COMPUTES, arguments.turns // 4),
            ("a step of calls alone", calls, arguments.turns),
        ):
            found = seconds(options, num_turns, environment)
            rows.append(row(name, found, "ms", 1e3))
            shown |= {f"{name}, {mode}": [1e3 * took_s for took_s in found[mode]] for mode in MODES}
        starts = [{mode: start_s(mode, environment) for mode in MODES} for _ in range(arguments.starts + 1)][1:]
        rows.append(row("the start", {mode: [one[mode] for one in starts] for mode in MODES}, "s", 1.0))
    title = "What it costs that only invited peers take part"
    write("trust", table(title, rows))
    picture("trust", title, "ms a step", shown)


def row(name: str, found: dict[str, list[float]], unit: str, factor: float) -> list[object]:
    """Of the table."""
    ratios = [invited / alone for alone, invited in zip(found["open"], found["invited"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    each = [f"{factor * statistics.median(found[mode]):.3g} {unit}" for mode in MODES]
    return [name, *each, f"{median:.3f}", f"{low:.3f} to {high:.3f}"]


if __name__ == "__main__":
    main()
