"""Samples/s of one model on two cores: a swarm of two stages, the plain Trainer, `torch.distributed.pipelining`.

With ``--gpu``: of a language model on one GPU, which all peers share, and the plain Trainer there.

The plain Trainer has both cores, as threads; the others have two processes of one thread. All have the same batches,
and those that have microbatches the same. All are started and take turns, step by step; the ratios are those of each
turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import torch

from benchmarks.report import picture, table, write
from benchmarks.runs import Turns, train

NUM_MICROBATCHES = 32
WIDTH = 512
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
SEQUENCE = 1024


def main(words: Sequence[str] | None = None) -> None:
    """Take the turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--num-blocks", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument(
        "--schedules", nargs="+", choices=list(SCHEDULES), default=["gpipe"], help="of torch's pipelines"
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--width", type=int, default=2048, help="with `--gpu`")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each way, with `--gpu`")
    arguments = parser.parse_args(words)
    if arguments.gpu:
        on_gpu(arguments)
        return
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


def on_gpu(arguments: argparse.Namespace) -> None:
    """Train by each way for some seconds, one after the other: each may need most of the card's memory."""
    model = ("--gpu", "--language", "--width", arguments.width, "--num-blocks", arguments.num_blocks)
    batch = ("--batch-size", 16, "--sequence", SEQUENCE, "--precision", "bf16-mixed", "--num-threads", 4)
    swarm = ("--num-stages", 2, "--microbatch-size", arguments.microbatch_size)
    ways: dict[str, tuple[object, ...]] = {
        "plain Trainer": ("--plain",),
        "swarm, 1 peer": (*swarm, "--devices", 1),
        "swarm, 2 peers": (*swarm, "--devices", 2),
        "swarm, 2 peers, bfloat16": (*swarm, "--devices", 2, "--compression", "bfloat16"),
        "swarm, 4 peers, bfloat16": (*swarm, "--devices", 4, "--compression", "bfloat16"),
    }
    rates = {}
    for name, way in ways.items():
        rates[name] = train(*model, *batch, *way, seconds=arguments.seconds).median_rate(2.0)
        print(f"{name}: {rates[name]:.2f} samples/s", flush=True)
    rows: list[list[object]] = [["way", "samples/s", "tokens/s", "this / plain Trainer"]]
    for name, rate in rates.items():
        rows.append([name, f"{rate:.1f}", f"{rate * SEQUENCE:.0f}", f"{rate / rates['plain Trainer']:.3f}"])
    title = (
        f"{torch.cuda.get_device_name()}: d_model {arguments.width}, {arguments.num_blocks} blocks, {SEQUENCE} tokens, "
        f"batches of 16, microbatches of {arguments.microbatch_size}, bf16-mixed"
    )
    write("throughput_gpu", table(title, rows))


if __name__ == "__main__":
    main()
