"""When the lead's own module holds the swarm's weights during `fit`: before callbacks that read or write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_swarm.framework import callbacks_named


class Home(Callback):
    """The first of the Trainer's callbacks, until `close`: what the others look at is there before them.

    Args:
        callbacks: The Trainer's.
        visit: Brings the weights of the last step home.
        stay: Brings everything home, for good; None: it stays where it is.
    """

    def __init__(self, callbacks: list[Any], visit: Callable[[], None], stay: Callable[[], None] | None) -> None:
        self._callbacks = callbacks
        self._visit = visit
        self._stay = stay
        callbacks.insert(0, self)

    def close(self) -> None:
        """Leave the Trainer's callbacks as they were."""
        self._callbacks.remove(self)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # It passes over parameters whose values equal those of another one that trains: by the values of now.
        if any(isinstance(callback, callbacks_named("BaseFinetuning")) for callback in self._callbacks):
            self._visit()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stay is not None:
            self._stay()
