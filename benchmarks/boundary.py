"""How the byte GPT begins to learn with boundary layers, by how these are initialised.

The plain model on one thread, with a layer after each of its first three blocks. `scale` is that of both matrices; it
compares the package's own way with smaller and larger ones, and with what torch draws for a `Linear`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence

import torch
from torch import nn

from benchmarks.report import picture, table, write
from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT
from lightning_swarm.model.boundary_layers import (
    SCALE,
    Bottleneck,
    Boundary,
    BoundaryLayer,
    Maxout,
    boundary_layers,
    insert_boundary,
)

AFTER = ("net.1", "net.2", "net.3")
BATCH = 16
LAST = 10
"""Steps whose mean loss counts as the loss at their end."""


def rescale(layer: BoundaryLayer, scale: float | None) -> None:
    """Initialise a new layer otherwise; None: as torch does."""
    matrices = [inner for inner in layer.modules() if isinstance(inner, nn.Linear)]
    for matrix in matrices:
        if scale is None:
            matrix.reset_parameters()
        else:
            matrix.weight.data *= scale / SCALE


def losses(boundary: Boundary | None, scale: float | None, arguments: argparse.Namespace) -> list[float]:
    """Of each step."""
    torch.manual_seed(arguments.seed)
    model = ByteGPT()
    if boundary is not None:
        insert_boundary(model, boundary, AFTER)
    for layer in boundary_layers(model).values():
        rescale(layer, scale)
    length = max(1_000_000, (arguments.steps + 1) * BATCH * model.context)
    data = PythonSource(batch_size=BATCH, max_bytes=length, seed=arguments.seed)
    data.setup("fit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95))
    found = []
    for step, (tokens, targets) in enumerate(itertools.islice(data.train_dataloader(), arguments.steps)):
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * min(1.0, (step + 1) / 10)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Train with each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--scales", nargs="+", default=["1", "4", "8", "torch"])
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    rows: list[list[object]] = [["layers", "scale", "first loss", "half-way", f"after {arguments.steps} steps"]]
    drawn: dict[str, list[float]] = {}
    kinds = [kind(ratio=ratio) for ratio in arguments.ratios for kind in (Bottleneck, Maxout)]
    for boundary, scale in [(None, "-"), *itertools.product(kinds, arguments.scales)]:
        found = losses(boundary, None if scale in ("-", "torch") else float(scale), arguments)
        middle = len(found) // 2
        means = [statistics.mean(found[end - min(LAST, end) : end]) for end in (middle, len(found))]
        rows.append([boundary or "none", scale, *(f"{number:.3f}" for number in (found[0], *means))])
        drawn[f"{boundary or 'none'}, {scale}"] = means[-1:]
        write("boundary", table("Loss of the byte GPT, nats per byte", rows))
    picture("boundary", f"Loss of the byte GPT after {arguments.steps} steps, by layers", "nats a byte", drawn)


if __name__ == "__main__":
    main()
