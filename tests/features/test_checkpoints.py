"""Checkpoints."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.model.sharded_format import ShardedCheckpoint
from lightning_swarm.strategy import checkpointing
from tests.features.both import STEPS, Both, Evaluated, Trained, approx, fit_both
from tests.features.mark import WORKS, feature
from tests.parity.harness import LOSS_TOLERANCE, QUIET, WEIGHT_TOLERANCE, quiet_warnings, run_plain, run_swarm
from tests.parity.models import DigitsMLP, NanoGPT, Net, digits, loader, sentences


def saved(
    folder: Path, *validation: Any, save: dict[str, Any], model: type[Trained] | None = None, **options: Any
) -> tuple[Both, list[str]]:
    """Return both runs and a ModelCheckpoint's file names; check that the swarm's files and weights are equal."""
    both = fit_both(
        model or (Evaluated if validation else Trained),
        *validation,
        enable_checkpointing=True,
        made={"callbacks": lambda name: [ModelCheckpoint(folder / name, **save)]},
        **options,
    )
    plain, swarm = (sorted(path.name for path in (folder / name).iterdir()) for name in ("plain", "swarm"))
    assert swarm == plain
    for name in plain:
        theirs, ours = (torch.load(folder / run / name, weights_only=True) for run in ("plain", "swarm"))
        assert ours["global_step"] == theirs["global_step"]
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=0.0, atol=WEIGHT_TOLERANCE)
    return both, plain


@feature("`ModelCheckpoint(monitor=..., save_top_k=...)`", WORKS)
def test_by_metric(tmp_path: Path) -> None:
    save = {"filename": "{step}-{val_loss:.4f}", "monitor": "val_loss", "save_top_k": 2}
    both, files = saved(tmp_path, loader(digits(), 20), save=save, max_epochs=4)
    assert len(files) == 2
    plain, swarm = (trainer.checkpoint_callback for trainer in both.trainers)
    assert float(swarm.best_model_score) == approx(float(plain.best_model_score))


@feature(
    "`ModelCheckpoint(every_n_train_steps=...)`",
    WORKS,
    "counts the swarm's steps; with several trainers, saves at steps that end with a batch of the lead",
)
def test_every_n_steps(tmp_path: Path) -> None:
    save = {"filename": "{step}", "every_n_train_steps": 3, "save_top_k": -1}
    assert saved(tmp_path, save=save, max_steps=STEPS)[1] == ["step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]


@feature("`ModelCheckpoint(save_last=True)`", WORKS)
def test_save_last(tmp_path: Path) -> None:
    save = {"save_last": True, "save_top_k": 0}
    assert saved(tmp_path, save=save, max_epochs=2)[1] == ["last.ckpt"]


@feature("`ModelCheckpoint(save_weights_only=True)`", WORKS)
def test_save_weights_only(tmp_path: Path) -> None:
    save = {"filename": "{epoch}", "save_weights_only": True}
    assert saved(tmp_path, save=save, max_epochs=2)[1] == ["epoch=1.ckpt"]


@feature("`OnExceptionCheckpoint`", WORKS)
@pytest.mark.filterwarnings("ignore:`.fit\\(ckpt_path=None\\)` was called without a model")
@pytest.mark.filterwarnings('ignore:.fit\\(ckpt_path="last"\\) is set, but there is no last checkpoint')
def test_on_exception(tmp_path: Path) -> None:
    class Breaks(L.Callback):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                raise RuntimeError("enough")

    for name, run in (("plain", run_plain), ("swarm", run_swarm)):
        callbacks = [OnExceptionCheckpoint(tmp_path, name), Breaks()]
        with pytest.raises(RuntimeError, match="enough"):
            run(DigitsMLP, loader(digits()), max_steps=STEPS, enable_checkpointing=True, callbacks=callbacks)
    theirs, ours = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("plain", "swarm"))
    assert ours["global_step"] == theirs["global_step"] == 5
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=0.0, atol=WEIGHT_TOLERANCE)


@feature(
    "files are written atomically",
    WORKS,
    "Lightning's own `CheckpointIO` ensures that a partly written file never has the name of a complete file",
)
def test_atomic_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.ckpt"

    class SavesTwice(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(file)
            if trainer.global_step == 4:
                monkeypatch.setattr(LocalFileOpener, "write", cut_off)
                with pytest.raises(OSError, match="No space"):
                    trainer.save_checkpoint(file)
                monkeypatch.undo()

    written = []

    def cut_off(self: LocalFileOpener, data: Any) -> None:
        written.append(self.f.write(bytes(data)[:100]))
        raise OSError(errno.ENOSPC, "No space left on device")

    run_swarm(Trained, loader(digits()), max_steps=STEPS, callbacks=[SavesTwice()])
    assert written == [100]
    assert torch.load(file, weights_only=True)["global_step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["file.ckpt"]


@feature(
    "files of `ModelCheckpoint` are written while training continues",
    WORKS,
    "weights are gathered first. Training waits for the file if a hook of your own comes next, if a logger "
    "reads the files, with `save_last='link'`, or with `plugins=[TorchCheckpointIO()]`",
)
def test_written_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, save = threading.Event(), TorchCheckpointIO.save_checkpoint

    def slow(self: TorchCheckpointIO, *args: Any, **kwargs: Any) -> None:
        assert goes_on.wait(60.0), "training waited for the file"
        save(self, *args, **kwargs)

    class Notes(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == STEPS:
                goes_on.set()

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", slow)
    monkeypatch.setattr(checkpointing, "OWN_PACKAGES", (*checkpointing.OWN_PACKAGES, "tests"))
    assert saved_by_swarm(tmp_path, every_n_train_steps=5, callbacks=[Notes()]) == [5]


def saved_by_swarm(folder: Path, *, every_n_train_steps: int, callbacks: list[L.Callback], **options: Any) -> list[int]:
    """Return the steps of a ModelCheckpoint's files; check each against the plain Trainer after as many steps."""
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=every_n_train_steps, save_top_k=-1)
    run_swarm(
        Trained, loader(digits()), max_steps=STEPS, enable_checkpointing=True, callbacks=[*callbacks, save], **options
    )
    files = [torch.load(path, weights_only=True) for path in folder.iterdir()]
    for file in files:
        plain = run_plain(Trained, loader(digits()), max_steps=file["global_step"])
        torch.testing.assert_close(file["state_dict"], plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)
    return sorted(file["global_step"] for file in files)


@feature(
    "`Trainer(plugins=[AsyncCheckpointIO()])`",
    WORKS,
    "all files are written while training continues, as in plain Lightning",
)
def test_writing_meanwhile(tmp_path: Path) -> None:
    goes_on, steps = threading.Event(), []

    class Slow(TorchCheckpointIO):
        @override
        def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            assert threading.current_thread() is not threading.main_thread()
            assert goes_on.wait(60.0), "training waited for the file"
            super().save_checkpoint(checkpoint, *args, **kwargs)

    class Notes(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            steps.append(trainer.global_step)
            if trainer.global_step == STEPS:
                goes_on.set()

    plugins = [AsyncCheckpointIO(Slow())]
    assert saved_by_swarm(tmp_path, every_n_train_steps=3, callbacks=[Notes()], plugins=plugins) == [3, 6, 9]
    assert steps == list(range(1, STEPS + 1))


class Sized(Net):
    """Has a width that only the file contains."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10)))
        self.save_hyperparameters()
        self.double()  # before weights are restored, as the file holds float64

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    @override
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])


class SizedGPT(NanoGPT):
    """The same with blocks in a list, and with a tied head."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width=width)
        self.save_hyperparameters()
        self.double()

    @override
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])[0]


@feature(
    "`Trainer.save_checkpoint`, `LightningModule.load_from_checkpoint`",
    WORKS,
    "an ordinary file, with `save_hyperparameters`; loading it needs no swarm",
)
@pytest.mark.parametrize(
    ("cls", "data", "options"),
    [(Sized, digits, {}), (SizedGPT, sentences, {"pipeline": "transformer.h"})],
    ids=["sequential", "list"],
)
def test_saving_and_loading(cls: Any, data: Any, options: dict[str, Any], tmp_path: Path) -> None:
    swarm = run_swarm(lambda: cls(width=12), loader(data()), max_steps=STEPS, **options)
    assert swarm.trainer is not None
    swarm.trainer.save_checkpoint(tmp_path / "trained.ckpt")
    loaded = cls.load_from_checkpoint(tmp_path / "trained.ckpt", weights_only=True)
    torch.testing.assert_close(dict(loaded.state_dict()), swarm.weights, rtol=0.0, atol=0.0)
    with quiet_warnings():
        ours = swarm.trainer.predict(swarm.module, loader(data()))
        theirs = L.Trainer(**QUIET, devices=1).predict(loaded, loader(data()))
    assert theirs is not None
    assert len(theirs) == 7
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-12)


@feature("`Trainer.validate`, `test`, `predict` with `ckpt_path='best'`, `'last'`", WORKS)
def test_evaluating_files(tmp_path: Path) -> None:
    """The best file is of the first of two epochs; neither file equals the module's current weights."""
    both = fit_both(
        lambda: Evaluated().double(),  # before weights are restored, as the file holds float64
        loader(digits(), 20),
        enable_checkpointing=True,
        made={
            "callbacks": lambda name: [
                ModelCheckpoint(
                    tmp_path / name, "{epoch}", monitor="val_loss", mode="max", save_top_k=-1, save_last=True
                )
            ]
        },
        max_epochs=2,
    )
    found: list[list[Any]] = []
    for run in (both.plain, both.swarm):
        for parameter in run.module.parameters():
            parameter.data.zero_()
        for ckpt_path in (None, "best", "last"):
            with quiet_warnings():
                found.append(
                    [
                        getattr(run.trainer, fn)(run.module, loader(digits(), 20), ckpt_path=ckpt_path)
                        for fn in ("validate", "test", "predict")
                    ]
                )
    torch.testing.assert_close(found[3:], found[:3], rtol=LOSS_TOLERANCE, atol=1e-12)
    zeros, best, last = (validated["val_loss"] for [validated], _, _ in found[:3])
    assert zeros > best > last


@feature("`Trainer.fit(ckpt_path=...)`", WORKS, "both ways between a swarm of any number of stages and a plain Trainer")
@pytest.mark.parametrize(("first", "then"), [(run_swarm, run_plain), (run_plain, run_swarm)])
def test_resuming(first: Any, then: Any, tmp_path: Path) -> None:
    def double() -> L.LightningModule:
        return Trained().double()  # before weights are restored, as the file holds float64

    whole = run_plain(double, loader(digits()), max_epochs=2)
    first(double, loader(digits()), max_epochs=1).trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = then(double, loader(digits()), max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    assert rest.losses == pytest.approx(whole.losses[7:], rel=LOSS_TOLERANCE)
    assert rest.global_steps == whole.global_steps[7:]


@feature(
    "a folder to which each server writes its part: `SwarmStrategy(state_dict_type='sharded')`",
    WORKS,
    "as with `FSDPStrategy`; a plain Trainer can resume from it after `lightning-swarm export`: "
    "[checkpoints](checkpoints.md)",
)
def test_sharded(tmp_path: Path) -> None:
    save = {"filename": "{step}", "every_n_train_steps": 4, "save_top_k": 2, "save_last": "link", "monitor": "step"}
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "enable_checkpointing": True,
        "made": {"callbacks": lambda name: [ModelCheckpoint(tmp_path / name, mode="max", **save)]},
        "swarm": {"state_dict_type": "sharded"},
    }
    both = fit_both(**options)
    plain, swarm = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "swarm"))
    assert swarm == plain == ["last.ckpt", "step=4.ckpt", "step=8.ckpt"]
    assert both.trainers[1].checkpoint_callback.best_model_path == str(tmp_path / "swarm" / "step=8.ckpt")
    found = ShardedCheckpoint(tmp_path / "swarm" / "step=8.ckpt")
    theirs = torch.load(tmp_path / "plain" / "step=8.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(found.read_weights(found.weights), dict(theirs), rtol=0.0, atol=WEIGHT_TOLERANCE)


class Renamed(Trained):
    """Renames its tensors in checkpoints, as modules do that were refactored."""

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {f"backbone.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = {name.removeprefix("backbone."): value for name, value in state_dict.items()}
        return super().load_state_dict(own, *args, **kwargs)


class Halved(Trained):
    """Saves tensors that it computes."""

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value / 2.0 for name, value in super().state_dict(*args, **kwargs).items()}


@feature("a custom `state_dict`, or hooks on it: other names, or tensors computed from the module's tensors", WORKS)
@pytest.mark.parametrize("model", [Renamed, Halved])
def test_own_state_dict(model: type[Trained], tmp_path: Path) -> None:
    save = {"filename": "{step}", "every_n_train_steps": 3, "save_top_k": -1}
    saved(tmp_path, save=save, max_steps=STEPS, model=model)
