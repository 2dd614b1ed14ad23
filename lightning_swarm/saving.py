"""Checkpoint files that are written while training goes on."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from typing_extensions import override

from lightning_swarm.framework import FRAMEWORKS, callbacks_named


class Files(Callback):
    """The lead's files: `ModelCheckpoint`'s in a thread of their own, one after the other, all others at once.

    Who asks whether a file under way is there waits for it, and so do the next file and the end of training. What is to
    be removed is removed after what was written before it, so a run that is killed leaves the old file or the new one.

    Args:
        trainer: Whose; this becomes the first of its callbacks, until `close`.
        io: Writes and removes files, from either thread.
    """

    def __init__(self, trainer: Trainer, io: CheckpointIO) -> None:
        self._io = io
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-files")
        self._jobs: list[Future[None]] = []
        self._under_way: str | None = None
        self._error: BaseException | None = None
        self._meanwhile = False  # who saves now looks at no file when it has been saved
        self._callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it in its connector
        # One of a user's own may do anything with the file as soon as it was saved.
        self._watched = [one for one in self._callbacks if type(one) in callbacks_named("ModelCheckpoint")]
        for callback in self._watched:
            self._watch(callback)
        self._callbacks.insert(0, self)

    def save(self, checkpoint: dict[str, Any], path: str | Path, options: Any, own: Iterable[Tensor]) -> None:
        """Write a file.

        Args:
            checkpoint: All of it.
            path: Where.
            options: As `CheckpointIO` takes them.
            own: Tensors in it that nobody else has.

        Raises:
            Exception: This file, or the one before it, cannot be written.
        """
        self.finish()
        write = partial(self._io.save_checkpoint, storage_options=options)
        taken = _copied(checkpoint, own) if self._meanwhile else None
        if taken is None:
            write(checkpoint, path)
        else:
            self._under_way = os.fspath(path)
            self._submit(write, taken, path)

    def remove(self, path: str | Path) -> None:
        """Remove a file, once what is under way has been written."""
        if self._jobs:
            self._submit(self._io.remove_checkpoint, path)
        else:
            self._io.remove_checkpoint(path)

    def finish(self) -> None:
        """Wait for what is under way.

        Raises:
            Exception: It cannot be written. It is said once.
        """
        wait(self._jobs)
        self._jobs.clear()
        error, self._error, path, self._under_way = self._error, None, self._under_way, None
        if error is not None:
            error.add_note(f"The checkpoint {path} was not written.")
            raise error

    def close(self) -> None:
        """Leave the Trainer's callbacks as they were, when all is written. Raises as `finish`."""
        self._callbacks.remove(self)
        while self._watched:
            callback = self._watched.pop()
            del callback._save_checkpoint, callback.file_exists
        self._thread.shutdown()
        self.finish()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if all(job.done() for job in self._jobs):
            self.finish()  # a full disk is said at the next batch

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finish()  # the others look for the last file now

    def _submit(self, do: Callable[..., object], *args: object) -> None:
        self._jobs.append(self._thread.submit(self._do, do, *args))

    def _do(self, do: Callable[..., object], *args: object) -> None:
        if self._error is not None:
            return  # the file in whose place this one was to be removed is not there
        try:
            do(*args)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._error = error

    def _watch(self, callback: Any) -> None:
        """Know when a `ModelCheckpoint` saves, and when it looks for a file."""
        save, exists = callback._save_checkpoint, callback.file_exists

        def save_meanwhile(trainer: Trainer, filepath: str) -> None:
            # It links to the file, or a logger is told of it: then it has to be there.
            self._meanwhile = callback.save_last != "link" and not any(map(_reads, trainer.loggers))
            try:
                save(trainer, filepath)
            finally:
                self._meanwhile = False

        def is_there(filepath: str, trainer: Trainer) -> bool:
            if os.fspath(filepath) == self._under_way:
                self.finish()
            return bool(exists(filepath, trainer))

        callback._save_checkpoint, callback.file_exists = save_meanwhile, is_there


def _copied(checkpoint: Mapping[str, Any], own: Iterable[Tensor]) -> Any:
    """What stays as it is while training goes on. None: something in it cannot be copied."""
    try:
        return copy.deepcopy(checkpoint, {id(tensor): tensor for tensor in own})
    except Exception:  # noqa: BLE001 - of a user's own classes, which can be saved all the same
        return None


def _reads(logger: object) -> bool:
    """Whether a logger may look at a file when it was saved."""
    modules = [import_module(f"{framework.name}.loggers") for framework in FRAMEWORKS]
    known = [getattr(module, name) for module in modules for name in ("Logger", "TensorBoardLogger")]
    return getattr(type(logger), "after_save_checkpoint", None) not in [one.after_save_checkpoint for one in known]
