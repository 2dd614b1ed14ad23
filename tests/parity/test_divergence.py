"""A run whose loss diverges rolls back and skips the batches: its result is that of a run that never saw them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from typing_extensions import override

from lightning_swarm import SkipDivergence
from lightning_swarm.core.errors import ConfigError, Diverged
from tests.parity.harness import WEIGHT_TOLERANCE, run_plain
from tests.parity.models import DigitsMLP, Recipe, digits, loader
from tests.parity.test_rollback import SHORT, Fit, Killing
from tests.parity.test_shared_data import assert_same
from tests.parity.test_trainers_roll_back import LIMITS as SEVERAL
from tests.parity.trainers import numbered, train

SIZE = 4
LIMITS = replace(SHORT, snapshot_interval=300.0)
"""The only snapshot is that of the first step: short runs would otherwise keep none from before the divergence."""


def samples(
    spoiled: Collection[int] = (), *, value: float = 1e4, without: Collection[int] = (), number: bool = False
) -> DataLoader[Any]:
    """Return batches of digits, with a factor of the loss, `value` in `spoiled` batches; leave out some batches."""
    images, labels = digits().tensors
    factors = torch.tensor([value if row // SIZE in spoiled else 1.0 for row in range(len(images))])
    data = TensorDataset(images, labels, factors)
    rows = [row for row in range(len(images)) if row // SIZE not in without]
    return loader(Subset(numbered(data) if number else data, rows), SIZE)


class Scaled(DigitsMLP):
    """Multiplies its loss by a factor in the batch."""

    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw", schedule="onecycle"))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx) * batch[2].mean()


def skipping(**options: Any) -> SkipDivergence:
    return SkipDivergence(**{"patience": 2, "factor": 10.0, "window": 4, **options})


ONE_EPOCH: dict[str, Any] = {"max_epochs": 1, "max_steps": -1}


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("options", [{}, {"num_before": 0}])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_diverging_steps_are_skipped(
    value: float, window: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The batches belong to whole accumulation windows; the windows after them stay the same."""
    first = 7 if window == 1 else 6
    bad = range(first, first + 2 * window)
    skip = skipping(**options, window=2)
    fit = Fit(
        Killing([], []),
        Scaled,
        data=samples(bad, value=value),
        limits=LIMITS,
        callbacks=[skip],
        accumulate_grad_batches=window,
        **ONE_EPOCH,
    )
    assert fit.went_back_to() == [1]
    left_out = [*range(first - window * options.get("num_before", 1), first), *bad]
    assert sorted(skip.skipped) == [(0, index) for index in left_out]
    assert "(0, 7), (0, 8)" in caplog.text
    plain = run_plain(Scaled, samples(without=left_out), accumulate_grad_batches=window, **ONE_EPOCH)
    assert fit.trainer.global_step == plain.global_steps[-1]
    torch.testing.assert_close(fit.weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


def test_steps_of_several_trainers_are_skipped() -> None:
    """Steps have three batches of both trainers; the spoiled ones belong to both."""
    skip = skipping(patience=1, window=2, num_before=0)
    options: dict[str, Any] = {"swarm": {"limits": replace(SEVERAL, snapshot_interval=300.0)}, **ONE_EPOCH}
    seen = train(
        2,
        lambda seen: Scaled(),
        data=lambda: samples([6, 7, 8], number=True),
        callbacks=lambda rank: [skip] if rank == 0 else [],
        **options,
    )
    reference = train(1, lambda seen: Scaled(), data=lambda: samples(without=[6, 7, 8], number=True), **options)
    assert seen.went_back == [1]
    assert sorted(skip.skipped) == [(0, 6), (0, 7), (0, 8)]
    assert {rank for rank, _ in seen.batches.values()} == {0, 1}
    assert_same(seen, reference)


@pytest.mark.parametrize(
    ("limits", "options", "spoiled", "words"),
    [
        (LIMITS, {"max_rollbacks": 1}, [4, 5, 7, 8], r"after 1 rollbacks \(`max_rollbacks`\). Lower the learning rate"),
        (replace(SHORT, snapshot_interval=None), {}, [4, 5], "no snapshot of step 3 or earlier is left"),
    ],
)
def test_a_run_that_cannot_go_back_ends_with_an_error(
    limits: Any, options: dict[str, Any], spoiled: list[int], words: str
) -> None:
    with pytest.raises(Diverged, match="the loss of 2 steps in a row") as caught:
        Fit(
            Killing([], []),
            Scaled,
            data=samples(spoiled),
            limits=limits,
            callbacks=[skipping(**options, window=2)],
            **ONE_EPOCH,
        )
    text = "\n".join([str(caught.value), *caught.value.__notes__])
    assert re.search(words, text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"patience": 0}, "`patience` of `SkipDivergence` must be a whole number of 1 to 512, got 0"),
        ({"window": 2.5}, "`window` of `SkipDivergence` must be a whole number of 1 to 512, got 2.5"),
        ({"num_before": -1}, "`num_before` .* of 0 to 512, got -1"),
        ({"factor": 1.0}, "`factor` of `SkipDivergence` must be finite and more than 1, got 1.0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SkipDivergence(**options)


@pytest.mark.filterwarnings("ignore:Every trainer of the run reads all")
def test_trainers_that_read_their_own_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="`SkipDivergence` needs data in which each batch has a number"):
        train(
            2,
            lambda seen: Scaled(),
            data=lambda: samples(number=True),
            callbacks=lambda rank: [skipping()] if rank == 0 else [],
            use_distributed_sampler=False,
            max_steps=3,
        )
