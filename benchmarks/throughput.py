"""Samples/s of one model on two cores: a swarm of two stages, the plain Trainer, `torch.distributed.pipelining`.

The plain Trainer has both cores, as threads; the others have two processes of one thread. All have the same batches,
and those that have microbatches the same. All are started and take turns, step by step; the ratios are those of each
turn.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.report import picture, table, write
from benchmarks.runs import Turns

NUM_MICROBATCHES = 32
WIDTH = 512
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}


def main() -> None:
    """Take the turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument(
        "--schedules", nargs="+", choices=list(SCHEDULES), default=["gpipe"], help="of torch's pipelines"
    )
    arguments = parser.parse_args()
    num_samples = NUM_MICROBATCHES * arguments.microbatch_size
    model = ("--width", WIDTH, "--num-blocks", arguments.num_blocks)
    batch = ("--batch-size", num_samples, "--microbatch-size", arguments.microbatch_size)
    by_turns = (*model, *batch, "--by-turns")
    ways: dict[str, tuple[str, tuple[object, ...]]] = {
        "swarm": ("benchmarks.train", (*by_turns, "--devices", 2, "--num-stages", 2)),
        "plain Trainer": ("benchmarks.train", (*by_turns, "--plain", "--num-threads", 2)),
    }
    for schedule in arguments.schedules:
        ways[f"{SCHEDULES[schedule]}, gloo"] = ("benchmarks.gpipe", (*model, *batch, "--schedule", schedule))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with Turns(ways) as turns:
        for _ in range(arguments.turns):
            for name in ways:
                rates[name].append(num_samples / turns.take(name))
    rows: list[list[object]] = [["way", "samples/s", "swarm / this", "turns"]]
    for name, found in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates["swarm"], found, strict=True)]
        each = " ".join(f"{ratio:.3f}" for ratio in ratios)
        rows.append([name, f"{statistics.median(found):.2f}", f"{statistics.median(ratios):.3f}", each])
    title = f"One model on two cores: d_model {WIDTH}, {NUM_MICROBATCHES} microbatches of {arguments.microbatch_size}"
    write("throughput", table(title, rows))
    picture("throughput", title, "samples/s", rates)


if __name__ == "__main__":
    main()
