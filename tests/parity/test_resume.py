"""Swarm and plain Trainer resume from each other's checkpoints with the same curve; a swarm evaluates too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from msgspec import UNSET
from pytorch_optimizer import Lamb
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import UsedInvitation
from lightning_swarm.testing import InMemoryStrategy
from tests.features.both import Trained
from tests.features.test_trainers import Lines
from tests.parity.harness import (
    LOSS_TOLERANCE,
    QUIET,
    WEIGHT_TOLERANCE,
    Run,
    assert_exact,
    quiet_warnings,
    run_plain,
    run_swarm,
)
from tests.parity.models import DigitsMLP, NanoGPT, Net, Recipe, Trees, digits, loader, records, sentences

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

EPOCH = 7
"""Batches of an epoch. Resuming starts at an epoch's end, because an ordinary DataLoader cannot resume in its middle.
"""


def make_digits() -> Net:
    # Convert before weights are restored, as its file holds float64.
    return DigitsMLP(Recipe(schedule="onecycle")).double()


def make_trees() -> Net:
    return Trees(Recipe(optimizer="sgd", schedule="cosine")).double()


def make_gpt() -> NanoGPT:
    return NanoGPT(Recipe(schedule="onecycle")).double()


def go(run: Any, make: Any, data: Any, folder: Path, num_epochs: int, **options: Any) -> Run:
    """Train until epoch `num_epochs`, from the newest file in `folder` if there is one, and save a file there."""
    files = sorted(folder.glob("*.ckpt"), key=lambda path: int(path.stem))
    done: Run = run(
        make,
        loader(data),
        max_epochs=num_epochs,
        enable_checkpointing=True,
        callbacks=[
            ModelCheckpoint(folder, "{step:03d}", auto_insert_metric_name=False, every_n_epochs=1, save_top_k=-1)
        ],
        **({"ckpt_path": files[-1]} if files else {}),
        **options,
    )
    assert len(sorted(folder.glob("*.ckpt"))) == num_epochs
    return done


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("make", "data", "swarm"),
    [(make_digits, digits, {}), (make_trees, records, {}), (make_gpt, sentences, {"pipeline": "transformer.h"})],
)
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_one_curve_through_swarm_plain_swarm(
    make: Any, data: Any, swarm: dict[str, Any], accumulate_grad_batches: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate_grad_batches}
    plain = run_plain(make, loader(data()), max_epochs=5, **options)
    parts = [
        go(run_swarm, make, data(), tmp_path, 1, num_stages=2, num_servers=3, **options, **swarm),
        go(run_plain, make, data(), tmp_path, 3, **options),
        go(run_swarm, make, data(), tmp_path, 5, num_stages=4, num_servers=2, **options, **swarm),
    ]
    assert [len(part.losses) for part in parts] == [EPOCH, 2 * EPOCH, 2 * EPOCH]
    assert [step for part in parts for step in part.global_steps] == plain.global_steps
    rates = [rate for part in parts for rate in part.learning_rates]
    assert rates == pytest.approx(plain.learning_rates, rel=1e-12)
    assert [loss for part in parts for loss in part.losses] == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    torch.testing.assert_close(parts[-1].weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


class Matrices(L.LightningModule):
    """A model with matrices only, which every optimizer accepts."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        widths = (64, 12, 12, 10)
        layers = [nn.Linear(*pair, bias=False) for pair in pairwise(widths)]
        self.net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        self.optimizer = optimizer

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.01)


def adam_8bit(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer that saves its state in another form than it keeps it."""
    from bitsandbytes.optim import Adam8bit

    return Adam8bit(parameters, lr=lr, min_8bit_size=1)


@pytest.mark.first_cells(3)
@pytest.mark.parametrize(
    "optimizer",
    [
        adam_8bit,
        Lamb,
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ],
)
@pytest.mark.parametrize("first", [run_plain, run_swarm])
def test_every_optimizer_goes_on_as_the_plain_trainers(first: Any, optimizer: Any, tmp_path: Path) -> None:
    """Optimizers keep their state in different ways.

    Some have state before their first step. Some keep it in another dtype than their parameters' until they load. Some
    count their steps in the parameter groups.
    """

    def make() -> L.LightningModule:
        return Matrices(optimizer).double()

    for name in ("plain", "swarm"):
        (tmp_path / name).mkdir()
    go(run_plain, make, digits(), tmp_path / "plain", 1)
    plain = go(run_plain, make, digits(), tmp_path / "plain", 2)
    go(first, make, digits(), tmp_path / "swarm", 1)
    swarm = go(run_swarm, make, digits(), tmp_path / "swarm", 2, num_servers=3)
    assert_exact(swarm, plain)
    files = [torch.load(tmp_path / name / f"{2 * EPOCH:03}.ckpt", weights_only=True) for name in ("plain", "swarm")]
    theirs, ours = (file["optimizer_states"] for file in files)
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=WEIGHT_TOLERANCE)  # compares dtypes, too


@pytest.mark.thorough
def test_a_resumed_swarm_draws_the_same_masks(tmp_path: Path) -> None:
    """A draw is keyed by its step, and steps continue from the file's."""

    def make() -> Net:
        return DigitsMLP(Recipe(), dropout=0.2).double()

    through = run_swarm(make, loader(digits()), max_epochs=3)
    go(run_swarm, make, digits(), tmp_path, 1, num_servers=3)
    rest = go(run_swarm, make, digits(), tmp_path, 3, num_servers=4)
    assert rest.losses == pytest.approx(through.losses[EPOCH:], rel=LOSS_TOLERANCE)


def test_a_second_fit_goes_on() -> None:
    counts = []
    for strategy, devices in (("auto", 1), (InMemoryStrategy(num_stages=2), 2)):
        torch.manual_seed(0)
        module = make_digits()
        with quiet_warnings():
            trainer = L.Trainer(**QUIET, strategy=strategy, devices=devices, max_steps=5)
            trainer.fit(module, loader(digits()))
            trainer.fit_loop.epoch_loop.max_steps = 8
            trainer.fit(module, loader(digits()))
        counts.append((trainer.global_step, {k: v.clone() for k, v in module.state_dict().items()}))
    assert counts[0][0] == counts[1][0] == 8
    torch.testing.assert_close(counts[1][1], counts[0][1], rtol=0.0, atol=WEIGHT_TOLERANCE)


class Evaluated(DigitsMLP):
    """Has all steps that a Trainer runs beside `fit`."""

    def evaluate(self, batch: list[Tensor], name: str) -> None:
        logits = self.net(batch[0])
        self.log(f"{name}_loss", F.cross_entropy(logits, batch[1]))
        self.log(f"{name}_accuracy", (logits.argmax(1) == batch[1]).double().mean())

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    @override
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    @override
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    @override
    def configure_optimizers(self) -> Any:
        raise AssertionError("nobody trains")


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("from_file", [True, False])
def test_validate_test_and_predict_equal_the_plain_trainers(
    inference_mode: bool, from_file: bool, tmp_path: Path
) -> None:
    trained = run_plain(make_digits, loader(digits()), max_steps=3 * EPOCH, max_epochs=-1)
    assert trained.trainer is not None
    trained.trainer.save_checkpoint(tmp_path / "trained.ckpt", weights_only=True)
    results = []
    for strategy, devices in (("auto", 1), (InMemoryStrategy(num_stages=3), 4)):
        module = Evaluated().double()
        ckpt_path = tmp_path / "trained.ckpt" if from_file else None
        if not from_file:
            module.load_state_dict(trained.weights)
        with quiet_warnings():
            trainer = L.Trainer(**QUIET, strategy=strategy, devices=devices, inference_mode=inference_mode)
            asked = [trainer.validate, trainer.test]
            metrics = [ask(module, loader(digits()), ckpt_path=ckpt_path, verbose=False)[0] for ask in asked]
            predicted = trainer.predict(module, loader(digits()), ckpt_path=ckpt_path)
        if isinstance(strategy, InMemoryStrategy):
            assert all(server.calls.num_forwards > 0 for server in strategy.servers)
        assert predicted is not None
        results.append(({k: v for one in metrics for k, v in one.items()}, torch.cat(predicted)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12)
    assert set(results[0][0]) == {"val_loss", "val_accuracy", "test_loss", "test_accuracy"}
    torch.testing.assert_close(results[1][1], results[0][1], rtol=0.0, atol=1e-12)


def test_predictions_of_a_loaded_file_are_the_swarms(tmp_path: Path) -> None:
    swarm = go(run_swarm, make_digits, digits(), tmp_path, 1, num_stages=3)
    loaded = DigitsMLP().double()
    file = torch.load(tmp_path / f"{EPOCH:03}.ckpt", weights_only=True)
    loaded.load_state_dict(file["state_dict"])
    images = digits().tensors[0].double()
    with torch.no_grad():
        assert torch.equal(loaded.net(images), swarm.module.net(images))  # type: ignore[operator]


class Broken(Exception):
    """An error in a user's code."""


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("batches", [3, 4, EPOCH])
def test_what_is_logged_after_a_resume_has_the_plain_trainers_steps(tmp_path: Path, window: int, batches: int) -> None:
    """The loop's state also equals the plain Trainer's if an epoch or a window was cut off."""

    class Saves(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == batches - 1:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    options: dict[str, Any] = {"accumulate_grad_batches": window, "limit_train_batches": EPOCH, "log_every_n_steps": 1}
    run_plain(Trained, loader(digits()), max_epochs=1, callbacks=[Saves()], **options)
    found = []
    for run in (run_plain, run_swarm):
        lines = Lines()
        run(Trained, loader(digits()), max_epochs=2, logger=lines, ckpt_path=tmp_path / "mid.ckpt", **options)
        # A swarm logs further values of its own.
        rows = zip(lines.steps, lines.lines, strict=True)
        found.append([step for step, row in rows if "swarm/peers" not in row])
    assert found[1] == found[0]
    assert found[0]


@pytest.mark.filterwarnings("ignore:.*fit\\(ckpt_path=")
@pytest.mark.parametrize("window", [1, 2])
def test_an_exception_leaves_the_plain_trainers_progress(tmp_path: Path, window: int) -> None:
    class Module(Trained):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.trainer.fit_loop.epoch_loop.total_batch_idx == EPOCH + 3:
                raise Broken
            return super().training_step(batch, batch_idx)

    found = []
    for name, run in (("plain", run_plain), ("swarm", run_swarm)):
        options: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": EPOCH, "accumulate_grad_batches": window}
        callbacks = [OnExceptionCheckpoint(tmp_path, name)]
        with pytest.raises(Broken):
            run(Module, loader(digits()), callbacks=callbacks, enable_checkpointing=True, **options)
        found.append(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["loops"])
    assert found[1] == found[0]


class _Came(L.Callback):
    """Records the use of an invitation in the run, and keeps the uses that the file had recorded before."""

    def __init__(self) -> None:
        self.before: Any = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        lead = trainer.strategy.own_peer.lead  # type: ignore[attr-defined]
        self.before = lead._arrivals.used
        lead.run.invitations = [UsedInvitation(number=bytes(16), uses=2, peers=[PeerId("gone")])]


def test_a_checkpoint_tells_who_came_and_plain_lightning_takes_it(tmp_path: Path) -> None:
    def train(run: Any, came: _Came | None = None, **options: Any) -> Any:
        callbacks = [ModelCheckpoint(tmp_path, save_last=True), *([came] if came else [])]
        return run(make_digits, loader(digits()), enable_checkpointing=True, callbacks=callbacks, **options)

    train(run_swarm, first := _Came(), max_epochs=1)
    assert first.before is UNSET
    path = tmp_path / "last.ckpt"
    assert torch.load(path, weights_only=True)["swarm_peers"]["invitations"][0]["peers"] == ["gone"]
    trained = train(run_swarm, second := _Came(), max_epochs=2, ckpt_path=path)
    trained.trainer.save_checkpoint(tmp_path / "after.ckpt")
    after = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert after["swarm_peers"]["invitations"][0]["peers"] == ["gone"], "also once `fit` is over"
    assert second.before == [UsedInvitation(number=bytes(16), uses=2, peers=[PeerId("gone")])]
    train(run_plain, max_epochs=3, ckpt_path=path)
    assert "swarm_peers" not in torch.load(path, weights_only=True)
