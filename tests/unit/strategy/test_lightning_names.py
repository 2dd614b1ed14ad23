"""The private names of Lightning on which the strategy depends: a release that moves one fails here, by name."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch

from lightning_swarm.strategy.checks import _IS_INTERACTIVE, _LOADERS, _STEP_HOOKS, _WEIGHT_CALLBACKS
from lightning_swarm.strategy.framework import LIGHTNING, PYTORCH_LIGHTNING, ImportTree


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("framework", [LIGHTNING, PYTORCH_LIGHTNING], ids=lambda framework: framework.name)
def test_lightning_still_has_the_private_names_that_we_rely_on(framework: ImportTree) -> None:
    def of(module: str, name: str) -> Any:
        return getattr(import_module(f"{framework.name}.{module}"), name)

    _AutomaticOptimization = of("loops.optimization.automatic", "_AutomaticOptimization")  # noqa: N806
    _TrainingEpochLoop = of("loops.training_epoch_loop", "_TrainingEpochLoop")  # noqa: N806
    _Launcher = of("strategies.launchers.launcher", "_Launcher")  # noqa: N806
    Strategy = of("strategies", "Strategy")  # noqa: N806
    LightningModule, Trainer, call = framework.module, framework.trainer, framework.call  # noqa: N806

    # `SwarmOptimization` replaces `run`, and uses the closure and the counters.
    assert parameters(_AutomaticOptimization.run) == ["self", "optimizer", "batch_idx", "kwargs"]
    assert parameters(_AutomaticOptimization._make_closure) == ["self", "kwargs", "optimizer", "batch_idx"]
    trainer = Trainer(max_epochs=7, logger=False, enable_checkpointing=False, accelerator="cpu")
    epoch_loop = trainer.fit_loop.epoch_loop
    assert isinstance(epoch_loop.automatic_optimization, _AutomaticOptimization)
    progress = epoch_loop.automatic_optimization.optim_progress
    assert epoch_loop.global_step == 0
    progress.optimizer.step.increment_ready()
    progress.optimizer.step.increment_completed()
    assert epoch_loop.global_step == 1, "what `SwarmOptimization` increments is no longer the global step"
    assert epoch_loop.batch_progress.current.ready == 0
    assert callable(epoch_loop._num_ready_batches_reached)
    assert epoch_loop.max_steps == -1
    assert epoch_loop._batches_that_stepped == 0
    assert trainer.fit_loop.max_epochs == 7

    # It replaces these two of Lightning.
    assert "self.automatic_optimization.run(" in inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._accumulated_batches_reached()" in inspect.getsource(_TrainingEpochLoop._should_accumulate)
    assert parameters(_TrainingEpochLoop._accumulated_batches_reached) == ["self"]
    assert "handles_gradient_accumulation" in inspect.getsource(_TrainingEpochLoop._should_accumulate)

    # `LoggedNumbers` follows these two.
    assert parameters(trainer._logger_connector.update_train_step_metrics) == []
    assert parameters(trainer._logger_connector.log_metrics) == ["metrics", "step"]

    # Hooks, launchers and helpers that are called or overridden by their private names.
    assert parameters(call._call_callback_hooks)[:2] == ["trainer", "hook_name"]
    assert parameters(call._call_lightning_module_hook)[:2] == ["trainer", "hook_name"]
    assert "pl_module" in parameters(call._call_lightning_module_hook)
    assert parameters(call._call_configure_model) == ["trainer"]
    assert parameters(Strategy._configure_launcher) == ["self"]
    assert parameters(_Launcher.launch) == ["self", "function", "args", "kwargs"]
    assert parameters(_Launcher.kill) == ["self", "signum"]
    assert isinstance(inspect.getattr_static(_Launcher, "is_interactive_compatible"), property)
    assert "_trainer" in vars(LightningModule())
    assert issubclass(framework.misconfiguration, Exception)
    assert framework.extract_batch_size(torch.zeros(3, 2)) == 3
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert framework.configure_optimizers(optimizer)[0] == [optimizer]

    # `checks` refuses by these names.
    assert not any(framework.is_overridden(hook, LightningModule()) for hook in _STEP_HOOKS)
    assert all(hasattr(LightningModule, hook) for hook in _STEP_HOOKS)
    assert all(hasattr(LightningModule, hook) for hook in _LOADERS.values())
    assert {"train_dataloaders", "datamodule"} <= set(parameters(Trainer._fit_impl))
    for run in (Trainer._validate_impl, Trainer._test_impl, Trainer._predict_impl):
        assert {"dataloaders", "datamodule"} <= set(parameters(run))
    assert _IS_INTERACTIVE is False
    assert all(hasattr(framework.callbacks, name) for name in _WEIGHT_CALLBACKS)

    # `weight_sync` wraps these.
    assert hasattr(framework.callbacks, "BaseFinetuning")
    assert isinstance(framework.callbacks.StochasticWeightAveraging.swa_start, property)
    if hasattr(framework.callbacks, "WeightAveraging"):  # new in 2.6
        wrapped = ("should_update", "on_validation_epoch_start", "on_validation_epoch_end")
        assert all(name in vars(framework.callbacks.WeightAveraging) for name in wrapped)

    # `checkpointing` wraps these, and looks for code that reads files.
    checkpoints = framework.callbacks.ModelCheckpoint
    assert parameters(checkpoints._save_checkpoint) == ["self", "trainer", "filepath"]
    assert parameters(checkpoints.file_exists) == ["self", "filepath", "trainer"]
    assert "self.file_exists(" in inspect.getsource(checkpoints._get_metric_interpolated_filepath_name)
    assert checkpoints(save_last="link").save_last == "link"
    assert "after_save_checkpoint" in vars(of("loggers", "Logger"))

    # Schedulers look for this before they warn that no optimizer stepped.
    assert "_opt_called" in inspect.getsource(torch.optim.lr_scheduler)
