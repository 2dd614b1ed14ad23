"""What compression does to the loss: a small GPT on bytes, cut into three stages of two servers each.

Each way is trained on the same batches from the same weights, three times. One process computes what the swarm would:
every microbatch's hidden states and their gradients pass the cuts as the codec writes them, and so do the sums that the
two servers of a stage exchange. `tests/parity/test_compression.py` and `tests/faults/test_compression.py` show that a
swarm does just that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.report import OUT, table, write
from benchmarks.together import mapped
from examples.bytes.data import PythonSource
from examples.bytes.model import ByteGPT, warmup_cosine
from lightning_swarm.model.boundary_layers import Bottleneck, Boundary, Maxout, boundary_layers, insert_boundary
from lightning_swarm.protocol.compression import Codec, Codecs, decoded, encoded
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.server.averaging.powersgd import LowRank

CONTEXT: Final = 64
D_MODEL: Final = 64
BATCH: Final = 16
NUM_SERVERS: Final = 2
"""Of a stage; each computes one microbatch of a batch."""
CUTS: Final = ("net.1", "net.2")
"""After the first and the second of three blocks."""
EVERY: Final = 100
"""Steps between two points of a curve."""

PANELS: Final[Mapping[str, Sequence[str]]] = {
    "Fewer bits of each number": ("8bit", "6bit", "8bit, gradients 4bit", "8bit, activations 4bit", "4bit"),
    "Fewer features between stages": ("maxout, 2", "bottleneck, 2", "maxout, 4", "bottleneck, 4"),
    "Fewer bits in averaging": ("8bit, averaging 4bit", "powersgd, 4", "powersgd, 1"),
}
"""Of the picture."""


@dataclass(frozen=True)
class Rate:
    """The learning rate: up to its highest in a line, then down to a tenth of it along a cosine.

    Args:
        highest: It.
        warmup_steps: Until it is reached.
    """

    highest: float = 2e-3
    warmup_steps: int = 100


@dataclass(frozen=True)
class Way:
    """How tensors travel.

    Args:
        compression: The codecs.
        boundary: Layers at the cuts.
        delays: Each gradient but the first is of the weights one step before those that it is applied to.
    """

    compression: Compression
    boundary: Boundary | None = None
    delays: bool = False


WAYS: Final[Mapping[str, Way]] = {
    "none": Way(Compression()),
    "8bit": Way(Compression.parse("8bit")),
    "6bit": Way(Compression.parse("6bit")),
    "4bit": Way(Compression.parse("4bit")),
    "4bit, error feedback": Way(
        Compression(activations="4bit", gradients="4bit", averaging="4bit", error_feedback=True)
    ),
    "6bit, averaging 4bit": Way(Compression(activations="6bit", gradients="6bit", averaging="4bit")),
    "8bit, activations 4bit": Way(Compression(activations="4bit", gradients="8bit", averaging="8bit")),
    "8bit, gradients 4bit": Way(Compression(activations="8bit", gradients="4bit", averaging="8bit")),
    "8bit, averaging 4bit": Way(Compression(activations="8bit", gradients="8bit", averaging="4bit")),
    "powersgd, 1": Way(Compression(averaging="powersgd", rank=1)),
    "powersgd, 4": Way(Compression(averaging="powersgd", rank=4)),
    "bottleneck, 2": Way(Compression(), Bottleneck(ratio=2)),
    "bottleneck, 4": Way(Compression(), Bottleneck(ratio=4)),
    "maxout, 2": Way(Compression(), Maxout(ratio=2)),
    "maxout, 4": Way(Compression(), Maxout(ratio=4)),
    "8bit and bottleneck, 4": Way(Compression.parse("8bit"), Bottleneck(ratio=4)),
    "delay_optimizer_step": Way(Compression(), delays=True),
    "8bit, delay_optimizer_step": Way(Compression.parse("8bit"), delays=True),
}


class _Wire(torch.autograd.Function):
    """Hidden states on their way to the next stage, their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codecs: Codecs) -> Tensor:
        ctx.codecs = codecs
        return _travelled(x, codecs.activations)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _travelled(gradients[0], ctx.codecs.gradients), None


def _travelled(tensor: Tensor, by: Codec | None) -> Tensor:
    found: Tensor = decoded(encoded(tensor, by), by, tensor.device)
    return found


class _Averaging:
    """What the servers of all stages make of their sums, and what they carry from one step to the next."""

    def __init__(self, codecs: Codecs, shapes: Sequence[torch.Size]) -> None:
        self._codec = codecs.averaging
        length = sum(shape.numel() for shape in shapes)
        self._lost = [torch.zeros(length) for _ in range(NUM_SERVERS)] if codecs.error_feedback else None
        self._low_rank = LowRank(shapes, codecs.rank) if codecs.rank is not None else None
        self._basis = self._low_rank.initial_basis(torch.zeros(0)) if self._low_rank is not None else torch.zeros(0)

    def mean(self, sums: Sequence[Tensor]) -> Tensor:
        """As `averaging.averager` has it."""
        return self._butterfly(sums) if self._low_rank is None else self._by_low_rank(sums, self._low_rank)

    def _by_low_rank(self, sums: Sequence[Tensor], low_rank: LowRank) -> Tensor:
        """All is linear, so one does what the servers do together."""
        own = torch.stack(list(sums)).sum(dim=0) / NUM_SERVERS
        if self._lost is not None:
            own += self._lost[0]
        left = low_rank.orthonormal(low_rank.left(own, self._basis))
        right = low_rank.right(own, left)
        self._basis = low_rank.basis(right, self._basis)
        if self._lost is not None:
            self._lost[0] = low_rank.left_over(own, left, right)
        return low_rank.product(left, right)

    def _butterfly(self, sums: Sequence[Tensor]) -> Tensor:
        """Each reduces a part."""
        mean = torch.empty_like(sums[0])
        for place in range(NUM_SERVERS):
            part = slice(len(mean) * place // NUM_SERVERS, len(mean) * (place + 1) // NUM_SERVERS)
            pieces = [self._sent(sums, i, part) if i != place else sums[i][part] for i in range(NUM_SERVERS)]
            reduced = torch.stack(pieces).sum(dim=0) / NUM_SERVERS
            if self._lost is not None:
                reduced += self._lost[place][part]
            mean[part] = _travelled(reduced, self._codec)
            if self._lost is not None:
                self._lost[place][part] = reduced - mean[part]
        return mean

    def _sent(self, sums: Sequence[Tensor], sender: int, part: slice) -> Tensor:
        if self._lost is None:
            return _travelled(sums[sender][part], self._codec)
        own = sums[sender][part] + NUM_SERVERS * self._lost[sender][part]
        received = _travelled(own, self._codec)
        self._lost[sender][part] = (own - received) / NUM_SERVERS
        return received


def train(way: Way, seed: int, num_steps: int, rate: Rate = Rate(), *, every: int = EVERY) -> list[float]:
    """The losses on files that training never sees, before the first step and after each `every` of them."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = PythonSource(context=CONTEXT, batch_size=BATCH, max_bytes=4_000_000, seed=seed)
    data.setup("fit")
    model = _model()
    if way.boundary is not None:
        insert_boundary(model, way.boundary, after=CUTS)
    codecs = Codecs.of(way.compression)
    layers = boundary_layers(model)
    for name in CUTS:
        last = layers[name].compress if name in layers else model.get_submodule(name)
        last.register_forward_hook(lambda _, __, hidden: _Wire.apply(hidden, codecs))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate.highest, betas=(0.9, 0.95), weight_decay=0.1)
    share = partial(warmup_cosine, warmup_steps=rate.warmup_steps, num_steps=num_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    averaging = _Averaging(codecs, [one.shape for one in model.parameters()])
    kept = next(iter(DataLoader(data.val_windows, 256, shuffle=True, generator=torch.Generator().manual_seed(0))))
    losses = [_evaluate(model, kept)]
    before: list[Tensor] = []
    for step, batch in zip(range(1, num_steps + 1), _batches(data), strict=False):
        halves = zip(*(one.chunk(NUM_SERVERS) for one in batch), strict=True)
        with _holding(model, before):
            sums = [_gradient(model, codecs, tokens, targets) for tokens, targets in halves]
        mean = averaging.mean(sums)
        if way.delays:
            before = [parameter.detach().clone() for parameter in model.parameters()]
        own = list(model.parameters())
        for parameter, part in zip(own, mean.split([one.numel() for one in own]), strict=True):
            parameter.grad = part.view_as(parameter)
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        schedule.step()
        if step % every == 0:
            losses.append(_evaluate(model, kept))
    return losses


@contextmanager
def _holding(model: nn.Module, weights: Sequence[Tensor]) -> Iterator[None]:
    """Compute with these weights inside; with its own, if there are none."""
    own = [(parameter, parameter.data) for parameter, _ in zip(model.parameters(), weights, strict=False)]
    for (parameter, _), weight in zip(own, weights, strict=True):
        parameter.data = weight
    yield
    for parameter, data in own:
        parameter.data = data


def _gradient(model: ByteGPT, codecs: Codecs, tokens: Tensor, targets: Tensor) -> Tensor:
    """Of one microbatch, whose logits travel to the trainer, and their gradients from it."""
    model.zero_grad()
    logits = _Wire.apply(model(tokens), codecs)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return torch.cat([one.grad.reshape(-1) for one in model.parameters() if one.grad is not None])


@torch.no_grad()
def _evaluate(model: ByteGPT, batch: Sequence[Tensor]) -> float:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item()


def _batches(data: PythonSource) -> Iterator[Sequence[Tensor]]:
    while True:
        yield from data.train_dataloader()


def _trained(job: tuple[str, int, int]) -> tuple[str, int, list[float]]:
    name, seed, num_steps = job
    return name, seed, train(WAYS[name], seed, num_steps, every=EVERY)


def study(names: Sequence[str], num_seeds: int, num_steps: int, num_processes: int) -> dict[str, list[list[float]]]:
    """The curves of each way, one for each seed."""
    jobs = [(name, seed, num_steps) for seed in range(num_seeds) for name in names]
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    OUT.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    for number, (name, seed, losses) in enumerate(mapped(_trained, jobs, num_processes), 1):
        found[name].append(losses)
        (OUT / "compression.json").write_text(json.dumps(found))
        took_s = time.monotonic() - begin_s
        print(f"{number} of {len(jobs)}: {name}, seed {seed}: {losses[-1]:.4f} ({took_s:.0f} s)", flush=True)
    return found


def bits(way: Way) -> tuple[float, float]:
    """Of a hidden element of the model on the wire, the mean of both ways; of a gradient in averaging."""
    codecs = Codecs.of(way.compression)
    ratio = 1 if way.boundary is None else way.boundary.ratio
    averaging = codecs.averaging.bits if codecs.averaging else 32.0
    if codecs.rank is not None:
        low_rank = LowRank([one.shape for one in _model().parameters()], codecs.rank)
        averaging = 32.0 * (low_rank.left_length + low_rank.right_length) / low_rank.length
    there, back = (one.bits if one else 32.0 for one in (codecs.activations, codecs.gradients))
    return (there + back) / 2 / ratio, averaging


def _model() -> ByteGPT:
    return ByteGPT(d_model=D_MODEL, num_blocks=3, num_heads=4, context=CONTEXT)


def show(found: Mapping[str, Sequence[Sequence[float]]], num_steps: int) -> None:
    """A table and a picture."""
    rows: list[Sequence[object]] = [["way", "bits, cuts", "bits, averaging", "loss", "seeds", "of none", "seeds"]]
    plain = [one[-1] for one in found["none"]]
    for name, curves in found.items():
        last = [one[-1] for one in curves]
        shares = [100 * (own / other - 1) for own, other in zip(last, plain, strict=True)]
        cuts, averaging = bits(WAYS[name])
        rows.append(
            [
                name,
                f"{cuts:.3g}",
                f"{averaging:.3g}",
                f"{statistics.mean(last):.4f}",
                f"{min(last):.4f} to {max(last):.4f}",
                f"{statistics.mean(shares):+.2f} %",
                f"{min(shares):+.2f} to {max(shares):+.2f}",
            ]
        )
    write("compression", table(f"Loss on unseen files after {num_steps} steps, in nats a byte", rows))
    _draw(found)


def _draw(found: Mapping[str, Sequence[Sequence[float]]]) -> None:
    mpl.use("Agg")
    figure, axes = plt.subplots(1, len(PANELS), figsize=(15, 4.5), sharey=True)
    for panel, (title, names) in zip(axes, PANELS.items(), strict=True):
        for name in (one for one in ("none", *names) if one in found):
            steps = range(0, EVERY * len(found[name][0]), EVERY)
            mean = [statistics.mean(column) for column in zip(*found[name], strict=True)]
            width = 2.5 if name == "none" else 1.2
            panel.plot(steps[1:], mean[1:], label=name, linewidth=width, color="black" if name == "none" else None)
        panel.set(xlabel="steps", yscale="log", title=title)
        panel.legend()
    axes[0].set(ylabel="nats a byte, unseen files")
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / "compression.png", dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    """Train all ways, and show what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(words)
    names = ["none", *(name for name in options.only if name != "none")]
    found = study(names, options.seeds, options.steps, options.processes)
    show(found, options.steps)


if __name__ == "__main__":
    main()
