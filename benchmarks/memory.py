"""The most memory that each peer holds, with what makes it less; and whether an 8-bit optimizer learns as well.

A trainer and two servers of a stage each train the same model, in processes of their own, once with each option. All is
on CPUs, where a process's memory is Python's and the libraries', too: the first row is a model without anything. The
losses are of a small GPT on bytes, from the same weights on the same batches, trained in one process: a swarm steps
each parameter as that does (`tests/features/test_optimization.py`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.report import picture, table, write
from benchmarks.runs import train
from benchmarks.together import mapped
from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT, warmup_cosine

WIDTH: Final = 768
NUM_BLOCKS: Final = 16
SEQUENCE: Final = 128
NUM_MICROBATCHES: Final = 6
MICROBATCH: Final = 2

_NO_SNAPSHOTS: Final = ("--snapshot-interval", 0)
OPTIONS: Final[Mapping[str, Sequence[object]]] = {
    "nothing of a model": ("--nop", *_NO_SNAPSHOTS),
    "nothing of a model, with bitsandbytes": ("--nop", "--eight-bits", *_NO_SNAPSHOTS),
    "by default: AdamW, graphs kept, snapshots": (),
    "no snapshots": _NO_SNAPSHOTS,
    "no snapshots, cache_bytes=0": (*_NO_SNAPSHOTS, "--cache-bytes", 0),
    "no snapshots, AdamW8bit": (*_NO_SNAPSHOTS, "--eight-bits"),
    "no snapshots, cache_bytes=0, AdamW8bit": (*_NO_SNAPSHOTS, "--cache-bytes", 0, "--eight-bits"),
}

CONTEXT: Final = 64
BATCH: Final = 16


def peaks(seconds: float) -> None:
    """For each option, the peers' memory."""
    rows: list[list[object]] = [["option", "trainer, MB", "server, MB", "server, MB"]]
    drawn: dict[str, list[float]] = {}
    for name, options in OPTIONS.items():
        found = train(
            *("--width", WIDTH, "--num-blocks", NUM_BLOCKS, "--sequence", SEQUENCE, "--role", "trainer"),
            *("--batch-size", NUM_MICROBATCHES * MICROBATCH, "--microbatch-size", MICROBATCH),
            *("--devices", 3, "--num-stages", 2),
            *options,
            seconds=seconds,
        )
        rows.append([name, *(f"{one / 1e6:.0f}" for one in found.peak_bytes)])
        drawn[name] = [one / 1e6 for one in found.peak_bytes[1:]]
        print(*rows[-1], flush=True)
    parameters = sum(one.numel() for one in _transformer().parameters()) / 1e6
    batch = f"{NUM_MICROBATCHES} microbatches of {MICROBATCH} by {SEQUENCE} by {WIDTH}"
    write("memory", table(f"Peak memory of each peer: {parameters:.0f}M parameters in two stages, {batch}", rows))
    picture("memory", "Peak memory of a server", "MB", drawn)


def _transformer() -> nn.Module:
    from benchmarks.train import Blocks

    with torch.device("meta"):
        return Blocks(WIDTH, NUM_BLOCKS)


def learn(job: tuple[str, int, int]) -> float:
    """The loss on files that training never sees, by an optimizer, a seed and a number of steps."""
    name, seed, num_steps = job
    from bitsandbytes.optim.adamw import AdamW8bit

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = PythonSource(context=CONTEXT, batch_size=BATCH, max_bytes=4_000_000, seed=seed)
    data.setup("fit")
    model = ByteGPT(d_model=64, num_blocks=3, num_heads=4, context=CONTEXT)
    kind: Any = {"AdamW": torch.optim.AdamW, "AdamW8bit": AdamW8bit}[name]
    optimizer = kind(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rate = partial(warmup_cosine, warmup_steps=100, num_steps=num_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _, batch in zip(range(num_steps), _batches(data), strict=False):
        _loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    kept = next(iter(DataLoader(data.val_windows, 256, shuffle=True, generator=torch.Generator().manual_seed(0))))
    with torch.no_grad():
        return _loss(model, kept).item()


def _loss(model: ByteGPT, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _batches(data: PythonSource) -> Iterator[Sequence[Tensor]]:
    while True:
        yield from data.train_dataloader()


def losses(num_seeds: int, num_steps: int, num_processes: int) -> None:
    """Of both optimizers, seed by seed."""
    names = ("AdamW", "AdamW8bit")
    jobs = [(name, seed, num_steps) for seed in range(num_seeds) for name in names]
    found = list(mapped(learn, jobs, num_processes))
    rows: list[list[object]] = [["seed", *names, "of AdamW"]]
    shares = []
    for seed in range(num_seeds):
        plain, eight = found[2 * seed : 2 * seed + 2]
        shares.append(100 * (eight / plain - 1))
        rows.append([seed, f"{plain:.4f}", f"{eight:.4f}", f"{shares[-1]:+.2f} %"])
    rows.append(["mean", *(f"{statistics.mean(found[i::2]):.4f}" for i in (0, 1)), f"{statistics.mean(shares):+.2f} %"])
    write("memory_losses", table(f"Loss on unseen files after {num_steps} steps, in nats a byte", rows))


def main(words: Sequence[str] | None = None) -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each training, after its first step")
    parser.add_argument("--steps", type=int, default=1000, help="of the small GPT; 0: leave it out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(words)
    peaks(arguments.seconds)
    if arguments.steps:
        losses(arguments.seeds, arguments.steps, arguments.processes)


if __name__ == "__main__":
    main()
