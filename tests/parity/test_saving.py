"""Files written during training: in order, with the values of their step, and with every failure reported."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future, wait
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_swarm.strategy import checkpointing
from tests.features.both import STEPS, Trained
from tests.features.test_trainers import Lines
from tests.parity.harness import run_plain, run_swarm
from tests.parity.models import digits, loader


@pytest.fixture
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests' own hooks run before a file is complete."""
    monkeypatch.setattr(checkpointing, "OWN_PACKAGES", (*checkpointing.OWN_PACKAGES, "tests"))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that holds up all of Lightning's files after the first until it is set."""
    goes_on, saved = threading.Event(), TorchCheckpointIO.save_checkpoint
    number = count()

    def save(self: TorchCheckpointIO, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        waits = threading.current_thread() is not threading.main_thread() and next(number)
        assert not waits or goes_on.wait(20.0), "training waited for the file"
        saved(self, checkpoint, *args, **kwargs)

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", save)
    return goes_on


@pytest.fixture
def waited_for(held: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set `held` as soon as the run waits for a file."""

    def wait_for(jobs: list[Future[None]]) -> None:
        if not all(job.done() for job in jobs):
            held.set()
        wait(jobs)

    monkeypatch.setattr(checkpointing, "wait", wait_for)


class Looks(L.Callback):
    """Lists the files in a folder after each step; releases them at the last step."""

    def __init__(self, folder: Path, goes_on: threading.Event, last: int = STEPS) -> None:
        self.folder = folder
        self.goes_on = goes_on
        self.last = last
        self.seen: dict[int, list[str]] = {}

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen[trainer.global_step] = sorted(path.name for path in self.folder.glob("*"))
        if trainer.global_step == self.last:
            self.goes_on.set()


@pytest.mark.usefixtures("own_hooks")
def test_written_meanwhile(tmp_path: Path, held: threading.Event) -> None:
    """The old file remains until the new one is complete."""
    looks = Looks(tmp_path, held, last=8)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3)
    run_swarm(Trained, loader(digits()), max_steps=STEPS, enable_checkpointing=True, callbacks=[looks, save])
    assert looks.seen[6] == looks.seen[7] == looks.seen[8] == ["step=3.ckpt"]
    (file,) = tmp_path.iterdir()
    assert file.name == "step=9.ckpt"
    assert torch.load(file, weights_only=True)["global_step"] == STEPS


@pytest.mark.usefixtures("own_hooks")
def test_what_is_under_way_stays_as_it_was(tmp_path: Path, waited_for: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that training changes later are copied, servers' tensors are not. When training ends, the file exists."""
    copied, there = checkpointing._copied, []

    def watched(checkpoint: dict[str, Any], own: Any) -> Any:
        taken = copied(checkpoint, own)
        states = [checkpoint["optimizer_states"][0]["state"], taken["optimizer_states"][0]["state"]]
        for old, new in [(checkpoint["state_dict"], taken["state_dict"]), *zip(*map(dict.values, states), strict=True)]:
            assert all(new[name] is tensor for name, tensor in old.items())
        return taken

    class Counts(L.Callback):
        steps = torch.zeros(1)

        @override
        def on_train_batch_end(self, *_: Any) -> None:
            self.steps += 1

        @override
        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        @override
        def on_train_end(self, *_: Any) -> None:
            there.extend(path.name for path in tmp_path.iterdir())

    monkeypatch.setattr(checkpointing, "_copied", watched)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    run_swarm(Trained, loader(digits()), max_steps=9, enable_checkpointing=True, callbacks=[Counts(), save])
    assert sorted(there) == ["step=4.ckpt", "step=8.ckpt"]
    file = torch.load(tmp_path / "step=8.ckpt", weights_only=True)
    assert [state["steps"].item() for key, state in file["callbacks"].items() if "Counts" in key] == [8.0]


@pytest.mark.usefixtures("own_hooks")
def test_files_under_way_keep_their_names(tmp_path: Path, held: threading.Event, waited_for: None) -> None:
    """Two files under way with the same name get different names, as with the plain Trainer."""
    found = []
    for name, run in (("plain", run_plain), ("swarm", run_swarm)):
        (held.clear if name == "swarm" else held.set)()
        saves = [ModelCheckpoint(tmp_path / name, "same", every_n_train_steps=9, mode=mode) for mode in ("min", "max")]
        run(Trained, loader(digits()), max_steps=STEPS, enable_checkpointing=True, callbacks=saves)
        steps = {path.name: torch.load(path, weights_only=True)["global_step"] for path in (tmp_path / name).iterdir()}
        found.append((steps, [Path(save.best_model_path).name for save in saves]))
    assert found[1] == found[0]
    assert len(found[0][0]) == 2


@pytest.mark.usefixtures("own_hooks")
@pytest.mark.parametrize("at", [3, STEPS], ids=["in mid-run", "the last"])
def test_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The failure ends the run, and the previous file stays."""
    save = TorchCheckpointIO.save_checkpoint

    def fails(self: TorchCheckpointIO, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if checkpoint["global_step"] == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, checkpoint, *args, **kwargs)

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", fails)
    looks = Looks(tmp_path, threading.Event())
    callbacks = [looks, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)]
    with pytest.raises(OSError, match="No space") as error:
        run_swarm(Trained, loader(digits()), max_steps=STEPS, enable_checkpointing=True, callbacks=callbacks)
    assert error.value.__notes__ == [f"The checkpoint {tmp_path / f'step={at}.ckpt'} was not written."]
    assert [path.name for path in tmp_path.iterdir()] == [f"step={at - 1}.ckpt"]
    assert max(looks.seen) <= at + 1


@pytest.mark.each_value
@pytest.mark.usefixtures("own_hooks", "waited_for")
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start", "on_train_epoch_start"])
@pytest.mark.parametrize("in_module", [False, True], ids=["callback", "module"])
def test_what_users_wrote_finds_the_file(tmp_path: Path, hook: str, in_module: bool) -> None:
    """The file is there in any hook that comes next, although files here are written only if the run waits for them."""
    found = []

    def look(self: object, *_: Any) -> None:
        if save.best_model_path:
            found.append(Path(save.best_model_path).exists())

    look.__module__ = "__main__"  # a user's module
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3)
    module = type("Module", (Trained,), {hook: look} if in_module else {})
    callback = type("Looks", (L.Callback,), {} if in_module else {hook: look})()
    callbacks = [callback, save]
    run_swarm(module, loader(digits()), max_steps=STEPS, enable_checkpointing=True, callbacks=callbacks)
    assert found
    assert all(found)


class Uploads(Lines):
    """Reads a file as soon as it is reported as written."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    @override
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        self.read.append(torch.load(checkpoint_callback.best_model_path, weights_only=True)["global_step"])


def test_a_logger_finds_the_file_that_it_is_told_of(tmp_path: Path) -> None:
    logger = Uploads()
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3)
    run_swarm(Trained, loader(digits()), max_steps=6, enable_checkpointing=True, callbacks=[save], logger=logger)
    assert logger.read == [3, 6]


def test_a_link_leads_to_a_file(tmp_path: Path, held: threading.Event) -> None:
    held.set()
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_last="link")
    dangling = []

    class Follows(L.Callback):
        @override
        def on_train_batch_start(self, *_: Any) -> None:
            dangling.append(any(not path.exists() for path in tmp_path.iterdir()))

    run_swarm(Trained, loader(digits()), max_steps=STEPS, enable_checkpointing=True, callbacks=[Follows(), save])
    assert not any(dangling)
    assert (tmp_path / "last.ckpt").is_symlink()


def test_who_saves_by_hand_finds_the_file(tmp_path: Path, held: threading.Event) -> None:
    """`save_checkpoint` returns when the file is complete, and a user's own CheckpointIO is called as usual."""
    held.set()
    file, threads = tmp_path / "file.ckpt", []

    class Saves(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(file)
            assert torch.load(file, weights_only=True)["global_step"] == trainer.global_step

    class Own(TorchCheckpointIO):
        @override
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            threads.append(threading.current_thread())
            super().save_checkpoint(*args, **kwargs)

    run_swarm(Trained, loader(digits()), max_steps=3, callbacks=[Saves()])
    save = ModelCheckpoint(tmp_path / "own", "{step}", every_n_train_steps=1)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [save], "plugins": [Own()]}
    run_swarm(Trained, loader(digits()), max_steps=3, **options)
    assert threads == [threading.main_thread()] * 3
