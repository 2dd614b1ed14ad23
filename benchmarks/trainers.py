"""Two trainers without a cut against DDP and `hivemind.Optimizer`: samples/s of all of them together.

Each trainer is a process with one thread. All ways train the same model on batches of the same size, with steps of the
same number of samples. First a step is a batch of each trainer: there DDP is at its best. hivemind's optimizer does not
take part, for its peers look for a group for seconds. Then a step is sixteen batches, and at last the trainers only
wait, one three times as long for each batch as the other.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from typing import Any

import hivemind
import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.peers import hivemind_dht
from benchmarks.report import median, picture, table, write
from benchmarks.runs import lines_of
from benchmarks.together import Together, run_together
from lightning_swarm import SwarmStrategy

NUM_TRAINERS = 2
BATCH_SIZE = 128
WIDTH_IN = 64
SIZES = (("1M", 700, 2, 80, 10), ("30M", 2700, 4, 16, 4))
"""Of models: name, width, layers; and how many steps, of a batch of each trainer and of many."""
NUM_WARM = 5  # steps that do not count
MANY = 16  # batches of a long step
PAUSES_S = (0.05, 0.15)
TIMEOUT_S = 300.0


class Net(L.LightningModule):
    """Layers in a list, which nothing can cut.

    Args:
        width: Of the layers.
        num_layers: Of that width.
        pauses_s: What a batch takes beside, by trainer.
    """

    def __init__(self, width: int, num_layers: int, pauses_s: Sequence[float] = ()) -> None:
        super().__init__()
        self._pauses_s = pauses_s
        self.first = nn.Linear(WIDTH_IN, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.last = nn.Linear(width, 1)

    @override
    def forward(self, rows: Tensor) -> Tensor:
        """``[batch, 64]`` to ``[batch, 1]``."""
        hidden = torch.tanh(self.first(rows))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        found: Tensor = self.last(hidden)
        return found

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self._pauses_s:
            time.sleep(self._pauses_s[self.trainer.global_rank])
        return (self(batch[0]) - batch[1]).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(L.Callback):
    """Says how many samples/s all trainers brought, from the step on that begins after the warm ones.

    Args:
        num_samples: Of a step.
    """

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self._at_s: list[float] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > len(self._at_s) and trainer.global_rank == 0:
            self._at_s.append(time.monotonic())

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.global_rank == 0:
            steps = self._at_s[NUM_WARM:]
            rate = self._num_samples * (len(steps) - 1) / (steps[-1] - steps[0])
            print(json.dumps({"rate": rate}), flush=True)


def fit(arguments: argparse.Namespace) -> None:
    """Train by Lightning, in this process and those that its strategy starts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_samples = arguments.batches * BATCH_SIZE
    swarm = SwarmStrategy(num_stages=1, role="both", target_batch_size=num_samples)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_TRAINERS,
        strategy=swarm if arguments.way == "swarm" else "ddp",
        accumulate_grad_batches=1 if arguments.way == "swarm" else arguments.batches // NUM_TRAINERS,
        max_steps=arguments.steps + NUM_WARM,
        max_epochs=-1,
        callbacks=[Clock(num_samples)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(64 * num_samples, WIDTH_IN)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    trainer.fit(Net(arguments.width, arguments.layers, arguments.pauses_s), DataLoader(data, BATCH_SIZE))


def by_lightning(way: str, width: int, layers: int, batches: int, steps: int, pauses_s: Sequence[float] = ()) -> float:
    """Samples/s of a training in processes of its own."""
    options = ["--way", way, "--width", width, "--layers", layers, "--batches", batches, "--steps", steps]
    if pauses_s:
        options += ["--pauses-s", *pauses_s]
    lines = lines_of("-m", "benchmarks.trainers", *options, timeout=TIMEOUT_S)
    (said,) = (json.loads(line)["rate"] for line in lines if line.startswith('{"rate"'))
    return float(said)


def by_optimizer(together: Together, width: int, layers: int, batches: int, steps: int) -> float:
    """Samples/s by `hivemind.Optimizer`: of its epochs, as this peer sees them."""
    torch.set_num_threads(1)
    with hivemind_dht(together) as dht:
        torch.manual_seed(0)
        model = Net(width, layers)
        optimizer = hivemind.Optimizer(
            dht=dht,
            run_id="trainers",
            batch_size_per_step=BATCH_SIZE,
            target_batch_size=batches * BATCH_SIZE,
            optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
            use_local_updates=False,
            matchmaking_time=2.0,
            averaging_timeout=20.0,
        )
        rows = torch.randn(BATCH_SIZE, WIDTH_IN)
        at_s: list[float] = []
        together.exchange()
        begun_s = time.monotonic()
        # One whose peer has ended finds no group any more, and may look for one for ever.
        while len(at_s) <= steps and time.monotonic() < begun_s + TIMEOUT_S / 2:
            epoch = optimizer.local_epoch
            (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.local_epoch > epoch:
                at_s.append(time.monotonic())
        together.exchange()
        optimizer.shutdown()
    if len(at_s) < 2:
        raise RuntimeError(f"hivemind.Optimizer made {len(at_s)} steps in {TIMEOUT_S / 2:g} s")
    return batches * BATCH_SIZE * (len(at_s) - 1) / (at_s[-1] - at_s[0])


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """What to measure; or, of a process that this module starts, what to train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="30 million parameters, too")
    parser.add_argument("--way", choices=["swarm", "ddp"], help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=700, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--batches", type=int, default=2, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=60, help=argparse.SUPPRESS)
    parser.add_argument("--pauses-s", type=float, nargs="*", default=(), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    arguments = parse(words)
    if arguments.way:
        fit(arguments)
        return
    sizes = SIZES if arguments.large else SIZES[:1]
    found: dict[str, list[float]] = {}
    rows: list[list[object]] = [["a step", "swarm", "DDP", "hivemind.Optimizer", "swarm / DDP", "swarm / hivemind"]]

    def row(name: str, ways: Sequence[str]) -> None:
        rates = {way: median(found.get(f"{way}, {name}", [])) for way in ("swarm", "DDP", "hivemind")}
        shown = [f"{rates[way]:.0f}" if way in ways else "" for way in rates]
        shares = [f"{rates['swarm'] / rates[way]:.2f}" if way in ways else "" for way in ("DDP", "hivemind")]
        rows.append([name, *shown, *shares])

    for _ in range(arguments.repeats):
        for size, width, layers, steps, long_steps in sizes:
            for name, batches, num_steps in (
                (f"{size}, 2 batches", NUM_TRAINERS, steps),
                (f"{size}, {MANY} batches", MANY, long_steps),
            ):
                for way in ("swarm", "DDP"):
                    rate = by_lightning(way.lower(), width, layers, batches, num_steps)
                    found.setdefault(f"{way}, {name}", []).append(rate)
            rate = run_together(by_optimizer, NUM_TRAINERS, width, layers, MANY, long_steps // 2)[0]
            found.setdefault(f"hivemind, {size}, {MANY} batches", []).append(rate)
        for way in ("swarm", "DDP"):
            rate = by_lightning(way.lower(), 16, 1, MANY, 10, PAUSES_S)
            found.setdefault(f"{way}, speeds 1 : 3", []).append(rate)
    for size, *_ in sizes:
        row(f"{size}, 2 batches", ("swarm", "DDP"))
        row(f"{size}, {MANY} batches", ("swarm", "DDP", "hivemind"))
    row("speeds 1 : 3", ("swarm", "DDP"))
    title = "Two trainers without a cut, samples/s"
    write("trainers", table(f"{title}, medians", rows))
    picture("trainers", title, "samples/s", found)


if __name__ == "__main__":
    main()
