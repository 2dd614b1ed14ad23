"""Lightning's loop around a swarm: counters, schedules, checkpoints, and refused arguments."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.override import Override
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import (
    LOSS_TOLERANCE,
    QUIET,
    WEIGHT_TOLERANCE,
    assert_exact,
    quiet_warnings,
    run_plain,
    run_plain_loop,
    run_swarm,
)
from tests.parity.models import BATCH_SIZE, DigitsMLP, Net, Recipe, Trees, digits, loader, make_optimizer, records

STEPS = 9


def scheduled() -> DigitsMLP:
    return DigitsMLP(Recipe(schedule="onecycle"))


# ---------------------------------------------------------------------- counters


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2, 3])
def test_counters_and_learning_rates_are_in_phase(accumulate_grad_batches: int) -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": accumulate_grad_batches}
    plain = run_plain(scheduled, loader(digits()), **options)
    swarm = run_swarm(scheduled, loader(digits()), num_servers=3, **options)
    assert swarm.global_steps == plain.global_steps
    assert swarm.learning_rates == plain.learning_rates
    assert len(set(plain.learning_rates)) >= STEPS
    assert plain.trainer is not None
    assert swarm.trainer is not None
    assert swarm.trainer.global_step == plain.trainer.global_step == STEPS
    assert swarm.trainer.current_epoch == plain.trainer.current_epoch
    assert len(swarm.losses) == len(plain.losses), "max_steps cost another batch"
    assert swarm.trainer.fit_loop.state_dict() == plain.trainer.fit_loop.state_dict()


class EstimatesItsSteps(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        assert self.trainer is not None
        optimizer = make_optimizer(self, self.recipe)
        total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_estimated_stepping_batches(accumulate_grad_batches: int) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate_grad_batches}
    plain = run_plain(EstimatesItsSteps, loader(digits()), **options)
    assert_exact(run_swarm(EstimatesItsSteps, loader(digits()), num_servers=3, **options), plain)


def test_the_new_version_is_there_when_a_batch_ends() -> None:
    seen: list[tuple[int, int]] = []
    weights: dict[str, list[Tensor]] = {"plain": [], "swarm": []}

    class Look(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            state = trainer.strategy.lightning_module_state_dict()["net.0.weight"].clone()
            if isinstance(trainer.strategy, InMemoryStrategy):
                seen.append((trainer.strategy.status().step, trainer.global_step))
                weights["swarm"].append(state)
            else:
                weights["plain"].append(state)

    for run in (run_plain, run_swarm):
        run(DigitsMLP, loader(digits()), max_steps=STEPS, accumulate_grad_batches=2, callbacks=[Look()])
    assert seen[-1] == (STEPS, STEPS)
    assert all(version == global_step for version, global_step in seen)
    for ours, theirs in zip(weights["swarm"], weights["plain"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=WEIGHT_TOLERANCE)
    assert any(not torch.equal(one, weights["plain"][0]) for one in weights["plain"])


class AsksAhead(DigitsMLP):
    """Its hooks ask whether the current batch ends a step, as Lightning's own loop does afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, bool]] = []

    def ask(self, hook: str, batch_idx: int) -> None:
        self.found.append((hook, batch_idx, self.trainer.fit_loop._should_accumulate()))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ask("start", batch_idx)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ask("step", batch_idx)
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.ask("end", batch_idx)


@pytest.mark.parametrize("accumulate_grad_batches", [1, 2, 3])
def test_a_hook_learns_whether_the_batch_in_hand_ends_a_step(accumulate_grad_batches: int) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate_grad_batches}
    models: list[AsksAhead] = []

    def make() -> AsksAhead:
        models.append(AsksAhead())
        return models[-1]

    run_plain(make, loader(digits()), **options)
    plain = models[-1].found
    run_swarm(make, loader(digits()), num_servers=3, **options)
    assert plain in [model.found for model in models[1:]]
    assert len(plain) > 2 * 3 * 6
    assert {asked for *_, asked in plain} == ({False} if accumulate_grad_batches == 1 else {False, True})


def test_a_batch_above_the_target_is_a_step() -> None:
    options: dict[str, Any] = {"target_batch_size": 5, "max_epochs": 2}
    reference = run_plain_loop(DigitsMLP, loader(digits()), **options)
    swarm = run_swarm(DigitsMLP, loader(digits()), **options)
    assert_exact(swarm, reference)
    # The last batch of an epoch has 4 samples, so it waits for the first batch of the next epoch.
    assert [record.closing.num_samples for record in swarm.records] == [*6 * [8], 12, *5 * [8], 4]


def test_samples_weigh_equally_with_a_target() -> None:
    options: dict[str, Any] = {"target_batch_size": 52, "max_epochs": 5}
    reference = run_plain_loop(DigitsMLP, loader(digits()), **options)
    whole = run_plain_loop(DigitsMLP, loader(digits(), 52), **options)
    swarm = run_swarm(DigitsMLP, loader(digits()), **options)
    assert_exact(swarm, reference)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(swarm.weights[name], tensor, rtol=0.0, atol=WEIGHT_TOLERANCE)


class Endless(IterableDataset[Any]):
    """Has no length, so the Trainer finds the end of an epoch only by reaching it."""

    @override
    def __iter__(self) -> Iterator[Any]:
        return iter(digits())


def test_data_without_a_length() -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": 3}
    plain = run_plain(scheduled, DataLoader(Endless(), BATCH_SIZE), **options)
    assert_exact(run_swarm(scheduled, DataLoader(Endless(), BATCH_SIZE), **options), plain)
    target: dict[str, Any] = {"max_epochs": 3, "target_batch_size": 20}
    reference = run_plain_loop(scheduled, loader(digits()), **target)
    assert_exact(run_swarm(scheduled, DataLoader(Endless(), BATCH_SIZE), **target), reference)


class StopInMidWindow(L.Callback):
    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.fit_loop.total_batch_idx == 11


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3, "limit_train_batches": 5},
        {"max_epochs": 3, "overfit_batches": 2},
        {"max_epochs": 5, "callbacks": [StopInMidWindow()]},
        {"fast_dev_run": 4},
    ],
    ids=["fewer batches", "the same batches", "a callback that stops", "a trial"],
)
def test_epochs_that_are_cut_short(options: dict[str, Any]) -> None:
    options = {"accumulate_grad_batches": 3, **options}
    plain = run_plain(scheduled, loader(digits()), **options)
    assert_exact(run_swarm(scheduled, loader(digits()), **options), plain)


def test_a_window_that_a_hook_cuts_off_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class EndsItsEpochs(DigitsMLP):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 4 else None

    run_swarm(EndsItsEpochs, loader(digits()), max_epochs=2, accumulate_grad_batches=3)
    assert "The window's 8 samples count in the next step" in caplog.text


class OnPlateau(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self, self.recipe)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


def test_a_schedule_by_what_validation_found() -> None:
    # Validation comes in the middle of accumulation windows.
    options = {"max_epochs": 4, "accumulate_grad_batches": 3, "val_check_interval": 2}
    plain = run_plain(OnPlateau, loader(digits()), loader(digits(), 20), **options)
    swarm = run_swarm(OnPlateau, loader(digits()), loader(digits(), 20), **options)
    assert_exact(swarm, plain)
    assert swarm.learning_rates == plain.learning_rates
    assert len(set(plain.learning_rates)) > 1


class PoisonedOnce(DigitsMLP):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.global_step != 2 else loss * float("nan")


class LeftOutOnce(DigitsMLP):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.global_step != 2 else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_gradient_that_is_not_finite_skips_the_step(caplog: pytest.LogCaptureFixture) -> None:
    without = run_plain(LeftOutOnce, loader(digits()), max_steps=STEPS)
    swarm = run_swarm(PoisonedOnce, loader(digits()), max_steps=STEPS, num_servers=4)
    assert [record.outcome for record in swarm.records] == ["apply", "apply", "skip", *(STEPS - 3) * ["apply"]]
    assert "Step 2 was skipped in all stages" in caplog.text
    for name, tensor in without.weights.items():
        torch.testing.assert_close(swarm.weights[name], tensor, rtol=0.0, atol=WEIGHT_TOLERANCE)


def test_fitting_twice() -> None:
    weights = []
    for strategy, devices in (("auto", 1), (InMemoryStrategy(num_stages=2, microbatch_size=3), 3)):
        torch.manual_seed(0)
        module = scheduled()
        trainer = L.Trainer(**{**QUIET, "devices": devices, "strategy": strategy, "max_epochs": 2})
        with quiet_warnings():
            trainer.fit(module, loader(digits()))
            trainer.fit_loop.max_epochs = 4
            trainer.fit(module, loader(digits()))
        assert trainer.global_step == 28
        weights.append(module.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0.0, atol=WEIGHT_TOLERANCE)


# ---------------------------------------------------------------------- checkpoints


def saving(folder: Path, **options: Any) -> list[L.Callback]:
    return [ModelCheckpoint(folder, "{step}", save_top_k=-1, **options)]


def assert_close(ours: Any, theirs: Any, where: str = "checkpoint") -> None:
    """Compare two trees: floats and tensors up to rounding, all else exactly."""
    assert type(ours) is type(theirs), where
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_close(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_close(one, other, f"{where}[{index}]")
    elif isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype, where
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=WEIGHT_TOLERANCE, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15), where
    else:
        assert ours == theirs, where


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("model", "data"), [(DigitsMLP, digits), (Trees, records)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_checkpoints_are_those_of_the_plain_trainer(
    model: Callable[..., Net], data: Callable[[], Any], optimizer: Any, tmp_path: Path
) -> None:
    recipe = Recipe(optimizer=optimizer, schedule="onecycle")
    options: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    for name, run in (("plain", run_plain), ("swarm", run_swarm)):
        callbacks = saving(tmp_path / name, every_n_train_steps=2)
        run(lambda: model(recipe), loader(data()), callbacks=callbacks, **options)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == [f"step={step}.ckpt" for step in (2, 4, 6, 8)]
    assert sorted(path.name for path in (tmp_path / "swarm").iterdir()) == files
    for file in files:
        theirs = torch.load(tmp_path / "plain" / file, weights_only=False)
        ours = torch.load(tmp_path / "swarm" / file, weights_only=False)
        for checkpoint in (ours, theirs):
            # The callbacks' states contain paths, so compare their names only.
            checkpoint["callbacks"] = list(checkpoint["callbacks"])
        assert theirs["optimizer_states"][0]["state"], "nothing to compare"
        assert_close(ours, theirs)


def test_a_checkpoint_loads_without_a_swarm(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "enable_checkpointing": True, "precision": "32-true"}
    swarm = run_swarm(
        DigitsMLP, loader(digits()), callbacks=saving(tmp_path, every_n_train_steps=STEPS), num_stages=3, **options
    )
    loaded = DigitsMLP.load_from_checkpoint(tmp_path / f"step={STEPS}.ckpt", weights_only=True)
    assert loaded.state_dict().keys() == swarm.weights.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, swarm.weights[name])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_plain_trainer_goes_on_where_a_swarm_stopped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True}

    def double() -> L.LightningModule:
        # Convert before weights are restored, because the Trainer would convert only afterwards.
        return scheduled().double()

    plain = run_plain(double, loader(digits()), max_epochs=3)
    run_swarm(
        double,
        loader(digits()),
        max_epochs=2,
        callbacks=saving(tmp_path, every_n_epochs=1),
        num_servers=3,
        **options,
    )
    # The file holds this callback's state, so loading requires the callback.
    options["callbacks"] = saving(tmp_path, every_n_epochs=1)
    rest = run_plain(double, loader(digits()), max_epochs=3, ckpt_path=tmp_path / "step=14.ckpt", **options)
    assert rest.global_steps == plain.global_steps[14:]
    assert rest.learning_rates == pytest.approx(plain.learning_rates[14:], rel=1e-12)
    assert rest.losses == pytest.approx(plain.losses[14:], rel=LOSS_TOLERANCE)
    assert len(rest.losses) == 7


def test_without_gathering_weights_stay_on_the_servers() -> None:
    torch.manual_seed(0)
    initial = DigitsMLP().double().state_dict()
    gathered = run_swarm(DigitsMLP, loader(digits()), max_steps=STEPS)
    left = run_swarm(DigitsMLP, loader(digits()), max_steps=STEPS, gather_on_end=False)
    assert left.losses == pytest.approx(gathered.losses, rel=LOSS_TOLERANCE)
    own, foreign = "net.7.weight", "net.0.weight"
    assert left.strategy.servers[1].steps.stage(0).parameters.keys() >= {foreign}
    assert not torch.equal(left.weights[foreign], gathered.weights[foreign])
    assert not torch.equal(gathered.weights[own], initial[own])
    assert not torch.equal(gathered.weights[foreign], initial[foreign])


def test_saving_after_the_end_is_saving_what_was_trained(tmp_path: Path) -> None:
    runs = {"plain": run_plain(scheduled, loader(digits()), max_steps=STEPS)}
    runs["swarm"] = run_swarm(scheduled, loader(digits()), max_steps=STEPS)
    for name, run in runs.items():
        assert run.trainer is not None
        run.trainer.save_checkpoint(tmp_path / name)
    theirs = torch.load(tmp_path / "plain", weights_only=False)
    assert theirs["optimizer_states"][0]["state"], "nothing to compare"
    assert_close(torch.load(tmp_path / "swarm", weights_only=False), theirs)


def test_loading_after_the_end_is_loading_into_the_trainer(tmp_path: Path) -> None:
    """Cluster environments restore a Trainer that is done, when no server is left to be notified."""
    found = []
    for run in (run_plain, run_swarm):
        trainer = run(scheduled, loader(digits()), max_steps=STEPS).trainer
        assert trainer is not None
        path = tmp_path / run.__name__
        trainer.save_checkpoint(path)
        state = trainer.optimizers[0].state
        for one in state.values():
            one["exp_avg"].zero_()
        trainer._checkpoint_connector.restore(path)
        found.append([one["exp_avg"].clone() for one in trainer.optimizers[0].state.values()])
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=1e-10)
    assert all(one.any() for one in found[0])


def test_a_loop_has_its_own_methods_after_a_fit() -> None:
    """The module also trains on with a plain Trainer."""
    run = run_swarm(DigitsMLP, loader(digits()), max_steps=3)
    assert run.trainer is not None
    epoch_loop = run.trainer.fit_loop.epoch_loop
    for loop in (run.trainer.fit_loop, epoch_loop, epoch_loop.automatic_optimization):
        assert not [name for name, value in vars(loop).items() if isinstance(value, Override)]
    before = [parameter.clone() for parameter in run.module.parameters()]
    L.Trainer(**QUIET, max_steps=3).fit(run.module, loader(digits()))
    assert not any(map(torch.equal, before, run.module.parameters()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_trainer_is_copied_before_and_after_it_trains(copied: Callable[[L.Trainer], L.Trainer]) -> None:
    options: dict[str, Any] = {**QUIET, "devices": 1, "max_steps": 3}
    trainer = L.Trainer(**options, strategy=SwarmStrategy(num_stages=1))
    weights = []
    for one in (copied(trainer), trainer):
        torch.manual_seed(0)
        module = DigitsMLP()
        one.fit(module, loader(digits()))
        weights.append(list(module.parameters()))
        assert copied(one).global_step == 3
    torch.testing.assert_close(weights[0], weights[1], rtol=0.0, atol=0.0)


class WithoutParameters(L.LightningModule):
    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("mean", batch[0].mean())

    @override
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return batch[0].mean()


@pytest.mark.parametrize("options", [{}, {"pipeline": "net"}], ids=["whole", "cut"])
def test_what_has_no_parameters_validates_and_predicts(options: dict[str, Any]) -> None:
    found = []
    for strategy in ("auto", SwarmStrategy(num_stages=1, **options)):
        trainer = L.Trainer(**QUIET, devices=1, strategy=strategy)
        (metrics,) = trainer.validate(WithoutParameters(), loader(digits()), verbose=False)
        found.append((metrics, trainer.predict(WithoutParameters(), loader(digits()))))
    assert found[0] == found[1]


def test_a_checkpoint_that_is_not_there_is_lightnings_error(tmp_path: Path) -> None:
    """Scripts that begin anew in that case catch this error."""
    options: dict[str, Any] = {"max_steps": 1, "ckpt_path": str(tmp_path / "nowhere.ckpt")}
    for run in (run_plain, run_swarm):
        with pytest.raises(FileNotFoundError):
            run(DigitsMLP, loader(digits()), **options)


@pytest.mark.parametrize("hook", ["optimizer_step", "configure_gradient_clipping", "optimizer_zero_grad"])
def test_a_hook_that_is_wrapped_in_its_object_is_refused(hook: str) -> None:
    """The swarm's loop would never call it."""

    def make() -> DigitsMLP:
        module = DigitsMLP()
        own = getattr(module, hook)
        setattr(module, hook, functools.update_wrapper(functools.partial(own), own))
        return module

    with pytest.raises(ConfigError, match=f"`{hook}` must be Lightning's own.*Remove the override"):
        run_swarm(make, loader(digits()), max_steps=1)


def test_saving_after_the_end_is_refused_when_nothing_was_gathered(tmp_path: Path) -> None:
    run = run_swarm(DigitsMLP, loader(digits()), max_steps=STEPS, gather_on_end=False)
    assert run.trainer is not None
    with pytest.raises(ConfigError, match=r"must hold the trained weights.*not gathered.*Keep `gather_on_end=True`"):
        run.trainer.save_checkpoint(tmp_path / "stale.ckpt")
    assert not (tmp_path / "stale.ckpt").exists()


class BreaksOff(L.Callback):
    """Stops a run by an exception, and keeps the module."""

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if trainer.global_step == 5:
            self.module = pl_module
            raise RuntimeError("enough")


def test_an_interrupted_run_leaves_its_weights_in_the_module() -> None:
    states = []
    for run in (run_plain, run_swarm):
        callback = BreaksOff()
        with pytest.raises(RuntimeError, match="enough"):
            run(DigitsMLP, loader(digits()), max_steps=STEPS, callbacks=[callback])
        states.append({name: tensor.clone() for name, tensor in callback.module.state_dict().items()})
    torch.testing.assert_close(states[1], states[0], rtol=0.0, atol=WEIGHT_TOLERANCE)


# ---------------------------------------------------------------------- refused


class Manual(DigitsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class StepsItself(DigitsMLP):
    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class ClipsItself(DigitsMLP):
    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class TwoOptimizers(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:4].parameters(), 0.1), torch.optim.SGD(self.net[4:].parameters(), 0.1)]


class Untrained(DigitsMLP):
    @override
    def configure_optimizers(self) -> None: ...


class SecondOrder(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoChain(DigitsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Linear(10, 10)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.outside(self.net(batch[0])), batch[1])


Case = tuple[Callable[[], L.LightningModule], dict[str, Any], dict[str, Any], str]
"""A module, arguments of the Trainer and of the strategy, and the error with its rule, value and remedy."""

# These errors are found by the Trainer's arguments and the module's class, before the first peer starts.
AT_ONCE: dict[str, Case] = {
    "manual optimization": (
        Manual,
        {},
        {},
        r"`automatic_optimization` must be True.*got False.*Let Lightning optimize",
    ),
    "own optimizer_step": (StepsItself, {}, {}, r"`optimizer_step` must be .*StepsItself overrides it.*Remove"),
    "own clipping": (ClipsItself, {}, {}, r"`configure_gradient_clipping` must be .*ClipsItself overrides it.*Remove"),
    "several nodes": (DigitsMLP, {"num_nodes": 2}, {}, r"`num_nodes` must be 1.*got 2.*Leave it out"),
    "float16 weights": (DigitsMLP, {"precision": "16-true"}, {}, r"`precision` must be one of .*got '16-true'"),
    "two rules for a step's end": (
        DigitsMLP,
        {"accumulate_grad_batches": 3},
        {"target_batch_size": 20},
        r"`target_batch_size` and `accumulate_grad_batches`.*got 20 and 3. Leave one out",
    ),
    "pruned weights": (
        DigitsMLP,
        {"callbacks": lambda: [ModelPruning("l1_unstructured")]},
        {},
        r"callbacks must not .*got ModelPruning.*Remove it",
    ),
    "nobody serves": (DigitsMLP, {"devices": 1}, {"role": "trainer"}, r"`role='trainer'`.*at least 2, got 1.*Raise"),
}
# These errors need the module and its optimizer.
AT_SETUP: dict[str, Case] = {
    "too few blocks": (DigitsMLP, {}, {"num_stages": 9}, r"`num_stages` must be 1..8.*got 9.*Lower it"),
    "two optimizers": (TwoOptimizers, {}, {}, r"must return one optimizer, got several.*parameter groups"),
    "no optimizer": (Untrained, {}, {}, r"must return an optimizer .*got none.*Return one"),
    "LBFGS": (SecondOrder, {}, {}, r"must step from one dense gradient, got LBFGS.*Use SGD"),
    "no chain": (NoChain, {}, {}, r"got none in NoChain.*configure_stages.*outside\.weight"),
}


def refused(case: Case) -> InMemoryStrategy:
    make_module, options, swarm, message = case
    strategy = InMemoryStrategy(**{"num_stages": 2, **swarm})
    options = {name: value() if callable(value) else value for name, value in options.items()}
    trainer = L.Trainer(
        **{"accelerator": "cpu", "devices": 2, "max_steps": 1, "logger": False, **options},
        strategy=strategy,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(make_module(), loader(digits()))
    return strategy


@pytest.mark.parametrize("case", AT_ONCE.values(), ids=list(AT_ONCE))
def test_it_is_refused_before_anything_starts(case: Case) -> None:
    strategy = refused(case)
    assert strategy.network is None
    assert not strategy.peers


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("case", AT_SETUP.values(), ids=list(AT_SETUP))
def test_it_is_refused_before_anyone_is_asked(case: Case) -> None:
    strategy = refused(case)
    assert all(peer.server is None and peer.lead.run is None for peer in strategy.peers)
