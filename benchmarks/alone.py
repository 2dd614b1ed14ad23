"""What a swarm of one process costs: the start of `fit`, and the time of a step, beside the plain Trainer.

`SwarmStrategy()` alone is no swarm: with one device and no argument that concerns others, Lightning's own loop trains.

The model is tiny, so that next to all of the time is the swarm's own. The ways take turns.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.report import median, table, write
from lightning_swarm import SwarmStrategy

NUM_STAGES = (1, 2, 4)
_WIDTH = 32
_BATCH = 8


class _Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(8)))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-3)


def fit(strategy: SwarmStrategy | str, num_steps: int) -> float:
    """Train for some steps, and return the seconds."""
    data = DataLoader(TensorDataset(torch.randn(num_steps * _BATCH, _WIDTH)), batch_size=_BATCH)
    trainer = L.Trainer(
        max_steps=num_steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=strategy,
    )
    start_s = time.perf_counter()
    trainer.fit(_Small(), data)
    return time.perf_counter() - start_s


def main(words: Sequence[str] | None = None) -> None:
    """Measure in turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args(words)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def stages(number: int) -> SwarmStrategy:
        return SwarmStrategy(num_stages=number, microbatch_size=_BATCH)

    ways: dict[str, Callable[[], SwarmStrategy | str]] = {
        "plain Trainer": lambda: "auto",
        "SwarmStrategy()": SwarmStrategy,
        "a swarm without a cut": lambda: SwarmStrategy(num_stages=1, run_id="alone"),
        **{f"{number} stage{'s' * (number > 1)}": partial(stages, number) for number in NUM_STAGES},
    }
    starts, steps = defaultdict(list), defaultdict(list)
    for make in ways.values():
        fit(make(), 2)  # imports
    for _ in range(arguments.repeats):
        for way, make in ways.items():
            starts[way].append(fit(make(), 2))
            steps[way].append((fit(make(), arguments.steps) - starts[way][-1]) / (arguments.steps - 2))
    rows: list[list[object]] = [["way", "a fit of two steps, s", "a further step, ms", "times the plain Trainer's"]]
    for way in ways:
        ratio = median([own / plain for own, plain in zip(steps[way], steps["plain Trainer"], strict=True)])
        rows.append([way, f"{median(starts[way]):.2f}", f"{1e3 * median(steps[way]):.1f}", f"{ratio:.1f}"])
    write("alone", table("A swarm of one process, with a tiny model", rows))


if __name__ == "__main__":
    main()
