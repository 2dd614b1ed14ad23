"""What a step costs beyond computing: a swarm of four peers against `hivemind.Optimizer` on four peers.

Both train next to nothing, so a step is all overhead: from the first place that is granted until the record is applied
here; there, how much longer than its samples an averaged update takes. For hivemind looks for a group while samples are
computed, so each peer takes its time for them; without that every peer goes on by itself. The same number of parameters
is averaged: two stages of two servers and a trainer on one of them here, four replicas there, whose matchmaking has the
two seconds that hivemind's examples give it at least. Updates that not all four took together, or that took ten seconds
to average, do not count. Both go through libp2p's daemons.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import hivemind
import torch

from benchmarks.peers import hivemind_dht
from benchmarks.report import median, picture, table, write
from benchmarks.runs import FAR_APART, train
from benchmarks.together import Together, run_together
from benchmarks.train import Blocks, Nop

NUM_PEERS = 4
NUM_BLOCKS = 4
WIDTHS = (64, 250_000)
BATCH_SIZE = 8
NUM_SAMPLES = 10
SAMPLE_S = 0.3
"""How long each of hivemind's peers takes for a sample: in all more than its matchmaking takes."""


def swarm_ms(width: int, seconds: float) -> list[float]:
    """Milliseconds of each step."""
    steps = train(
        "--nop", "--devices", NUM_PEERS, "--num-stages", 2, "--width", width, "--num-blocks", NUM_BLOCKS,
        "--batch-size", BATCH_SIZE, "--sequence", 1, seconds=seconds, environment=FAR_APART,
    )  # fmt: skip
    return [1e3 * (steps.at_s[i] - steps.at_s[i - 1]) for i in range(1, len(steps.at_s))]


def optimizer_ms(together: Together, width: int, num_steps: int) -> list[float]:
    """Likewise, beyond the time for samples; what this peer saw of those updates that all took together."""
    torch.set_num_threads(1)
    with hivemind_dht(together) as dht:
        model = Blocks(width, NUM_BLOCKS, Nop)
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="steps",
            batch_size_per_step=1,
            target_batch_size=NUM_PEERS * NUM_SAMPLES,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
            use_local_updates=False,
            matchmaking_time=2.0,
            averaging_timeout=10.0,
        )
        took: list[float] = []
        together.exchange()
        for _ in range(num_steps):
            epoch, began_s = optimizer.local_epoch, time.monotonic()
            while optimizer.local_epoch == epoch:
                model.blocks(torch.full((1, 1, width), 1.0 + together.rank)).sum().backward()
                time.sleep(SAMPLE_S)
                optimizer.step()
                optimizer.zero_grad()
            took_s = time.monotonic() - began_s - NUM_SAMPLES * SAMPLE_S
            weights = [float(parameter.sum()) for parameter in model.parameters()]
            if all(others == weights for others in together.exchange(weights)):  # every peer's gradients differ
                took.append(1e3 * took_s)
        optimizer.shutdown()
    return took


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=5, help="of hivemind's optimizer")
    arguments = parser.parse_args(words)
    rows: list[list[object]] = [["parameters", "swarm", "hivemind.Optimizer", "together", "swarm / hivemind"]]
    found: dict[str, list[float]] = {}
    for width in WIDTHS:
        name = f"{NUM_BLOCKS * width:,}"
        found[f"swarm, {name}"] = swarm_ms(width, arguments.seconds)
        found[f"hivemind, {name}"] = run_together(optimizer_ms, NUM_PEERS, width, arguments.steps)[0]
        ours, theirs = (median(found[f"{way}, {name}"]) for way in ("swarm", "hivemind"))
        together = f"{len(found[f'hivemind, {name}'])} of {arguments.steps}"
        rows.append([name, f"{ours:.0f} ms", f"{theirs:.0f} ms", together, f"{ours / theirs:.2f}"])
    title = "One step of four peers that compute nothing"
    write("steps", table(f"{title}, medians", rows))
    picture("steps", f"{title}, by number of parameters", "ms", found)


if __name__ == "__main__":
    main()
