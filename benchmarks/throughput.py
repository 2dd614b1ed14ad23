"""Samples/s of one model on two cores: a swarm of two stages, the plain Trainer, `torch.distributed.pipelining`.

The plain Trainer has both cores to itself, as threads; the others have two processes of one thread. All have the same
batches, and those that have microbatches the same. They take turns, some seconds each, and the ratios are those of
each round.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.runs import picture, table, train, write

MODEL = ("--width", 512, "--num-blocks", 8)


def main() -> None:
    """Run the rounds, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--microbatches", type=int, default=32)
    arguments = parser.parse_args()
    batch = (*MODEL, "--batch-size", arguments.microbatches)
    ways = {
        "plain Trainer": ("benchmarks.train", ("--plain", "--num-threads", 2)),
        "GPipe, gloo": ("benchmarks.gpipe", ("--schedule", "gpipe")),
        "1F1B, gloo": ("benchmarks.gpipe", ("--schedule", "1f1b")),
        "swarm": ("benchmarks.train", ("--devices", 2, "--num-stages", 2)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, (module, options) in ways.items():
            rates[name].append(train(*batch, *options, seconds=arguments.seconds, module=module).median_rate())
    rows: list[list[object]] = [["way", "samples/s", "swarm / this", "rounds"]]
    for name, found in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(rates["swarm"], found, strict=True)]
        each = " ".join(f"{ratio:.3f}" for ratio in ratios)
        rows.append([name, f"{statistics.median(found):.2f}", f"{statistics.median(ratios):.3f}", each])
    title = f"One model on two cores: d_model 512, {arguments.microbatches} microbatches a step"
    write("throughput", table(title, rows))
    picture("throughput", title, "samples/s", rates)


if __name__ == "__main__":
    main()
