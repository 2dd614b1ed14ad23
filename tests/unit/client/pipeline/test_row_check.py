"""The check of the first cut call classifies blocks by their outputs alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.client.pipeline.microbatches import CallArguments
from lightning_swarm.client.pipeline.row_check import NUM_PROBES, RowCheck
from lightning_swarm.core.errors import ConfigError, StageError
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codec, codec
from lightning_swarm.protocol.messages.calls import ComputeMode

Blocks = Callable[[Tensor, bool], Any]

ROWS, SIZE = 12, 3
COUNTER = itertools.count(1)
BATCH = torch.randn(ROWS, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TRAIN = ComputeMode(training=True, grad=True)


class Calls:
    """Computes calls in this process, with random draws keyed by their numbers, and counts them."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.num = 0

    def __call__(self, probes: Sequence[tuple[CallArguments, int]], mode: ComputeMode) -> Any:
        found = []
        for arguments, number in probes:
            self.num += 1
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(number)
                try:
                    found.append(serialization.flatten(self.blocks(arguments.tensors[0], mode.training)))
                except RuntimeError as error:
                    raise StageError(str(error)) from error
        return found


def check(blocks: Blocks, batch: Tensor = BATCH, *, size: int = SIZE, by: Codec | None = None) -> Calls:
    """Check a training's first call, and that a second call of its kind costs no check."""
    calls = Calls(blocks)
    one = RowCheck(calls, shared=(), codec=by, has_batch_norm=False)
    arguments = CallArguments.of((batch,), {})
    one.check(arguments, TRAIN, rows=len(batch), size=size)
    num_first = calls.num
    one.check(arguments, TRAIN, rows=len(batch), size=size)
    assert calls.num == num_first
    return calls


MIXING: dict[str, Blocks] = {
    "centres": lambda x, _: x - x.mean(0),
    "compares": lambda x, _: x.flatten(1) @ x.flatten(1).T,
    "is causal along dimension 0": lambda x, _: x.cumsum(0),
    "adds a table of positions": lambda x, _: x + torch.arange(len(x)).view(-1, 1, 1),
    "divides by the number of rows": lambda x, _: x / len(x),
    "gives each row's part of a sum": lambda x, _: x.sum((1, 2)).softmax(0),
    "sorts": lambda x, _: x[x.mean((1, 2)).argsort()],
    "pairs halves": lambda x, _: x + x.roll(len(x) // 2, 0),
    "normalises over rows": lambda x, _: nn.functional.group_norm(x.reshape(1, 4, -1), 2).view(x.shape),
    "mixes in train mode": lambda x, training: x - x.mean(0) if training else x,
    "centres, then drops": lambda x, training: nn.functional.dropout(x - x.mean(0), 0.2, training),
    "centres, and samples in eval mode, too": lambda x, _: x - x.mean(0) + torch.randn_like(x),
    "gives NaN to all if one is large": lambda x, _: x + (x.max() - 2).sqrt(),
}


@pytest.mark.parametrize("blocks", MIXING.values(), ids=MIXING.keys())
def test_mixed_rows_are_refused(blocks: Blocks) -> None:
    with pytest.raises(ConfigError, match=r"each sample of a batch by itself.*microbatch_size"):
        check(blocks)


REPEATED: dict[str, Blocks] = {
    "Python's random numbers": lambda x, _: x * random.random(),
    "NumPy's random numbers, beside torch's": lambda x, training: (
        nn.functional.dropout(x, 0.2, training) * np.random.rand()  # noqa: NPY002
    ),
    "a counter": lambda x, _: x * next(COUNTER),
}


@pytest.mark.parametrize("blocks", REPEATED.values(), ids=REPEATED.keys())
def test_what_differs_when_it_is_repeated_is_refused(blocks: Blocks) -> None:
    with pytest.raises(ConfigError, match=r"give equal rows equal outputs.*Draw random numbers from torch"):
        check(blocks)


APART: dict[str, Blocks] = {
    "attends in each row": lambda x, _: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "rounds": lambda x, _: (x.float() * 1.1).double(),
    "sorts, and back": lambda x, _: (2 * x[(order := x.mean((1, 2)).argsort())])[order.argsort()],
    "gives a number for each row": lambda x, _: x.sum((1, 2)),
    "drops": lambda x, training: nn.functional.dropout(x, 0.2, training),
    "samples": lambda x, _: x + torch.randn_like(x),
    "mixes groups that no cut parts": lambda x, _: x.view(-1, SIZE, 5, 4).cumsum(1).view(x.shape),
    "gives NaN for some rows": lambda x, _: x.sqrt(),
}


@pytest.mark.parametrize("blocks", APART.values(), ids=APART.keys())
def test_rows_apart_are_not(blocks: Blocks) -> None:
    check(blocks)


def test_it_costs_a_few_microbatches_once() -> None:
    assert check(lambda x, _: x.tanh()).num == NUM_PROBES


@pytest.mark.parametrize("size", [1, 3, 8, 11])
def test_whatever_the_cut(size: int) -> None:
    check(lambda x, _: x.tanh(), size=size)
    with pytest.raises(ConfigError, match="by itself"):
        check(lambda x, _: x - x.mean(0), size=size)


def test_a_fixed_number_of_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"whole batch, but failed on a part of it: shape .* is invalid"):
        check(lambda x, _: x.view(ROWS, 5, 4))
    with pytest.raises(ConfigError, match="another number of rows for a part"):
        check(lambda x, _: x.reshape(ROWS, -1))


def test_a_number_that_depends_on_the_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"numbers .* must not depend on the rows"):
        check(lambda x, _: {"rows": float(len(x)), "hidden": x})
    check(lambda x, _: {"scale": 2.0, "hidden": x})


def test_what_fails_as_a_whole_is_left_to_the_call() -> None:
    check(lambda x, _: x @ torch.zeros(7, 7, dtype=x.dtype))
    check(lambda x, _: x.sum())


def test_equal_rows_tell_nothing() -> None:
    calls = Calls(lambda x, _: x - x.mean(0))
    one = RowCheck(calls, shared=(), codec=None, has_batch_norm=False)
    one.check(CallArguments.of((torch.ones(4, 2),), {}), TRAIN, rows=4, size=2)
    with pytest.raises(ConfigError, match="by itself"):  # the next batch raises
        one.check(CallArguments.of((torch.eye(4, 2),), {}), TRAIN, rows=4, size=2)


def test_draws_leave_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check(lambda x, training: x + x[torch.randperm(len(x))] if training else x)
    assert "If blocks mix samples" in caplog.text


@pytest.mark.parametrize("name", ["float16", "8bit"])
def test_encoding_is_not_mixing(name: str) -> None:
    by = codec(name)
    assert by is not None

    def blocks(x: Tensor, _: bool) -> Tensor:
        return by.decode(by.encode(x), x.dtype, x.shape)

    check(blocks, by=by)
    with pytest.raises(ConfigError, match="by itself"):
        check(lambda x, _: blocks(x - x.mean(0), False), by=by)
