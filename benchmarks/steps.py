"""What a step costs beyond computing: a swarm of four peers against `hivemind.Optimizer` on four peers.

Both train next to nothing, so a step is all overhead: from the first place that is granted until the record is applied
here, from the first sample that is reported until the averaged update there. The same number of parameters is averaged:
two stages of two servers and a trainer on one of them here, four replicas there, whose matchmaking has the same two
seconds that hivemind's examples give it at least.
"""

from __future__ import annotations

import argparse
import statistics
import time

import hivemind
import torch
import torch.multiprocessing

from benchmarks.runs import picture, table, train, write
from benchmarks.together import Together, run_together
from benchmarks.train import Blocks, Nop

NUM_PEERS = 4
NUM_BLOCKS = 4
BATCH_SIZE = 8


def swarm_ms(width: int, seconds: float) -> list[float]:
    """Milliseconds of each step."""
    steps = train(
        "--nop", "--devices", NUM_PEERS, "--num-stages", 2, "--width", width, "--num-blocks", NUM_BLOCKS,
        "--batch-size", BATCH_SIZE, seconds=seconds,
    )  # fmt: skip
    return [1e3 * (steps.at_s[i] - steps.at_s[i - 1]) for i in range(1, len(steps.at_s))]


def optimizer_ms(together: Together, width: int, num_steps: int) -> list[float]:
    """Likewise; what the first peer saw."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")  # as an import of hivemind alone would have it
    first = hivemind.DHT(start=True) if together.rank == 0 else None
    addresses = together.exchange([str(address) for address in first.get_visible_maddrs()] if first else [])[0]
    dht = first or hivemind.DHT(initial_peers=addresses, start=True)
    model = Blocks(width, NUM_BLOCKS, Nop)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="steps",
        batch_size_per_step=BATCH_SIZE // NUM_PEERS,
        target_batch_size=BATCH_SIZE,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        use_local_updates=False,
        matchmaking_time=2.0,
        averaging_timeout=30.0,
    )
    took: list[float] = []
    together.exchange()
    for _ in range(num_steps):
        epoch, began_s = optimizer.local_epoch, time.monotonic()
        while optimizer.local_epoch == epoch:
            hidden = torch.ones(1, 1, width)
            model.blocks(hidden).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        took.append(1e3 * (time.monotonic() - began_s))
    together.exchange()
    optimizer.shutdown()
    dht.shutdown()
    return took


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--steps", type=int, default=6, help="of hivemind's optimizer")
    arguments = parser.parse_args()
    rows: list[list[object]] = [["parameters", "swarm", "hivemind.Optimizer", "swarm / hivemind"]]
    found: dict[str, list[float]] = {}
    for width in (64, 250_000):
        name = f"{NUM_BLOCKS * width:,}"
        found[f"swarm, {name}"] = swarm_ms(width, arguments.seconds)
        found[f"hivemind, {name}"] = run_together(optimizer_ms, NUM_PEERS, width, arguments.steps)[0][1:]
        ours, theirs = (statistics.median(found[f"{way}, {name}"]) for way in ("swarm", "hivemind"))
        rows.append([name, f"{ours:.0f} ms", f"{theirs:.0f} ms", f"{ours / theirs:.2f}"])
    title = "One step of four peers that compute nothing"
    write("steps", table(f"{title}, medians", rows))
    picture("steps", f"{title}, by number of parameters", "ms", found)


if __name__ == "__main__":
    main()
