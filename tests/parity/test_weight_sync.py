"""Transfers of weights between the lead's module and the servers, and the weights on each side."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from torch import Tensor
from typing_extensions import override

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.strategy.module_access import ModuleAccess
from lightning_swarm.testing import InMemoryStrategy
from tests.features.both import fit_both
from tests.features.test_averaging import Watched
from tests.parity.harness import LOSS_TOLERANCE, QUIET, quiet_warnings
from tests.parity.models import DigitsMLP, NanoGPT, digits, loader, sentences

EPOCH = 7

if not hasattr(lightning_callbacks, "WeightAveraging"):
    pytest.skip("came with Lightning 2.6", allow_module_level=True)


@pytest.mark.parametrize("every", [1, 3, 100])
def test_weights_come_home_only_where_they_are_read(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    brought: list[int] = []
    bring = ModuleAccess.refresh

    def noted(self: Any, *, timeout: float | None = None) -> None:
        before = self._version
        bring(self, timeout=timeout)
        if self._version != before:
            brought.append(self._version)

    monkeypatch.setattr(ModuleAccess, "refresh", noted)

    def made(_: str) -> list[L.Callback]:
        return [lightning_callbacks.EMAWeightAveraging(update_every_n_steps=every)]

    fit_both(DoubleMLP, made={"callbacks": made}, max_epochs=2)
    at_the_end = 2 * EPOCH
    assert brought == sorted({*(step + 1 for step in range(0, 2 * EPOCH, every)), at_the_end})


class DoubleMLP(DigitsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.double()


class Counts(lightning_callbacks.WeightAveraging):
    """Updates at every third call, and validates with the trained weights, not the averages."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    @override
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        self.asked += 1
        return self.asked % 3 == 0

    @override
    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Keep the trained weights."""

    @override
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the trained weights."""


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_what_a_subclass_decides_is_done(accumulate_grad_batches: int) -> None:
    callbacks: list[Counts] = []

    def made(_: str) -> list[L.Callback]:
        callbacks.append(Counts())
        return [callbacks[-1]]

    options: dict[str, Any] = {"accumulate_grad_batches": accumulate_grad_batches, "val_check_interval": 3}
    both = fit_both(Watched, loader(digits(), 20), made={"callbacks": made}, max_epochs=3, **options)
    plain, swarm = both.plain.module, both.swarm.module
    assert swarm.found == pytest.approx(plain.found, rel=LOSS_TOLERANCE)  # type: ignore[union-attr]
    assert callbacks[0].asked == callbacks[1].asked > 3
    assert all("should_update" not in vars(callback) for callback in callbacks)


@pytest.mark.thorough
def test_validating_after_fit_swaps_as_the_plain_trainer_does() -> None:
    results = []
    for strategy, devices in (("auto", 1), (InMemoryStrategy(num_stages=2), 2)):
        torch.manual_seed(0)
        module, averaging = Watched(), lightning_callbacks.WeightAveraging()
        with quiet_warnings():
            trainer = L.Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=2, callbacks=[averaging])
            trainer.fit(module, loader(digits()), loader(digits(), 20))
            with torch.no_grad():
                module.net[0].weight.mul_(2.0)
            results.append(trainer.validate(module, loader(digits()), verbose=False)[0]["val_loss"])
            results.append(trainer.test(module, loader(digits()), verbose=False)[0]["test_loss"])
    assert results[2:] == pytest.approx(results[:2], rel=LOSS_TOLERANCE)
    assert results[0] != pytest.approx(results[1], rel=1e-3)


def test_calls_mean_the_weights_that_were_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with lent weights during an open step leaves the gradients of the trained weights unchanged."""
    meant: list[tuple[bool, int]] = []
    send = PipelineContext.send

    async def noted(self: PipelineContext, peer: Any, method: str, request: Any, tensors: Any) -> bytes:
        meant.append((request.key.evaluation, request.key.weights))
        return await send(self, peer, method, request, tensors)

    monkeypatch.setattr(PipelineContext, "send", noted)
    options: dict[str, Any] = {"val_check_interval": 3, "accumulate_grad_batches": 2, "max_epochs": 1}
    averaged, free = (
        fit_both(Watched, loader(digits(), 20), made={"callbacks": lambda _, own=own: own()}, **options)
        for own in (lambda: [lightning_callbacks.WeightAveraging()], list)
    )
    assert {numbers for evaluation, numbers in meant if not evaluation} == {0}
    assert {numbers for evaluation, numbers in meant if evaluation} == {0, 1}  # the first averages equal the weights
    assert averaged.swarm.losses == free.swarm.losses
    assert averaged.swarm.module.found != free.swarm.module.found  # type: ignore[union-attr]


class DoubleGPT(NanoGPT):
    """Keeps embeddings, norm and head on the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.found: list[float] = []

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(*batch)[1])

    @override
    def on_validation_epoch_end(self) -> None:
        self.found.append(float(self.trainer.callback_metrics["val_loss"]))


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["auto", "trainer"])
def test_averages_of_what_is_on_the_trainer(role: str) -> None:
    both = fit_both(
        DoubleGPT,
        loader(sentences(), 20),
        data=lambda: loader(sentences()),
        made={"callbacks": lambda _: [lightning_callbacks.WeightAveraging()]},
        swarm={"pipeline": "transformer.h", "role": role},
        max_epochs=2,
    )
    plain, swarm = both.plain.module, both.swarm.module
    assert isinstance(plain, DoubleGPT)
    assert isinstance(swarm, DoubleGPT)
    assert swarm.found == pytest.approx(plain.found, rel=LOSS_TOLERANCE)
