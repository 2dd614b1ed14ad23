"""The set of trained parameters changes between steps: allowed changes, and the traffic that they cause."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.protocol.rpc import BACKWARD, FORWARD
from tests.features.both import Trained, fit_both
from tests.features.test_finetuning import EPOCH, Backbone, Filtered, in_phases, reselections, unfreezing
from tests.parity.harness import LOSS_TOLERANCE, WEIGHT_TOLERANCE, run_plain, run_swarm
from tests.parity.models import DigitsMLP, NanoGPT, digits, loader, sentences


def test_frozen_from_the_first_step_on() -> None:
    class Late(Trained):
        @override
        def on_fit_start(self) -> None:
            self.net[0].requires_grad_(False)

    assert set(reselections(fit_both(Late, max_epochs=1).swarm)) == {0}


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"target_batch_size": 20}])
def test_a_change_in_mid_step_is_refused(options: dict[str, Any]) -> None:
    class Hasty(DigitsMLP):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].requires_grad_(batch_idx == 0)

    message = r"only when a step begins.*\['net.0.bias', 'net.0.weight'\] changed with 8 samples.*beginning of an acc"
    with pytest.raises(ConfigError, match=message):
        run_swarm(Hasty, loader(digits()), max_steps=4, **options)


def test_a_change_at_the_beginning_of_a_window_counts_from_there_on() -> None:
    class Patient(Trained):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net[0].requires_grad_(batch_idx // 2 != 1)

    both = fit_both(Patient, accumulate_grad_batches=2, max_epochs=2)
    assert reselections(both.swarm) == {1: 2, 2: 2, 5: 2, 6: 2}


@pytest.mark.each_value
@pytest.mark.parametrize("made", [unfreezing, in_phases])
@pytest.mark.parametrize(("first", "then"), [(run_plain, run_swarm), (run_swarm, run_plain)])
def test_resuming_after_an_unfreeze(made: Any, first: Any, then: Any, tmp_path: Path) -> None:
    """Any combination of Trainers equals the plain Trainer with its own file."""

    def make() -> Any:
        return Backbone().double() if made is unfreezing else Filtered().double()

    def both_parts(first: Any, then: Any) -> Any:
        first(make, loader(digits()), max_epochs=2, callbacks=made()).trainer.save_checkpoint(tmp_path / "half.ckpt")
        return then(make, loader(digits()), max_epochs=4, callbacks=made(), ckpt_path=tmp_path / "half.ckpt")

    plain, other = both_parts(run_plain, run_plain), both_parts(first, then)
    assert other.losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    assert other.learning_rates == plain.learning_rates
    torch.testing.assert_close(other.weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


def test_no_gradient_goes_to_stages_that_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, bool]] = []
    send = PipelineContext.send

    async def noted(self: PipelineContext, peer: Any, method: Any, request: Any, tensors: Any) -> Any:
        if not request.key.is_probe:
            calls.append((method.name, request.stage_index, getattr(request, "keep", True)))
        return await send(self, peer, method, request, tensors)

    monkeypatch.setattr(PipelineContext, "send", noted)
    both = fit_both(Backbone, made={"callbacks": unfreezing}, max_epochs=2)
    in_all = EPOCH * 3 - 1  # microbatches of an epoch: of 3, 3 and 2 samples, or of 3 and 1
    assert Counter(calls) == {
        (FORWARD.name, 0, False): in_all,
        (FORWARD.name, 0, True): in_all,
        (FORWARD.name, 1, True): 2 * in_all,
        (BACKWARD.name, 0, True): in_all,
        (BACKWARD.name, 1, True): 2 * in_all,
    }
    held = [[any(stage.values()) for stage in both.swarm.held.by_stage(record)] for record in both.swarm.records]
    assert held == [[False, True]] * EPOCH + [[True, True]] * EPOCH


class Head(NanoGPT):
    """At first only the trainer's layers train; later the first stage thaws, then the embeddings freeze."""

    @override
    def setup(self, stage: str) -> None:
        for block in self.transformer["h"]:  # type: ignore[union-attr]  # the type of a dict's values is `Module`
            block.requires_grad_(False)

    @override
    def on_train_epoch_start(self) -> None:
        for index, block in enumerate(self.transformer["h"]):  # type: ignore[union-attr, arg-type]  # see above
            block.requires_grad_(self.current_epoch + index > 3)
        self.transformer["wpe"].requires_grad_(self.current_epoch != 2)


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["auto", "trainer"])
def test_blocks_frozen_under_a_head_on_the_trainer(role: str) -> None:
    swarm = {"pipeline": "transformer.h", "role": role}
    both = fit_both(Head, data=lambda: loader(sentences()), swarm=swarm, max_epochs=4)
    assert set(reselections(both.swarm)) == {EPOCH, 2 * EPOCH, 3 * EPOCH}
