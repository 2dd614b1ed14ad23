"""When the lead's own module holds the swarm's weights, or the swarm its: where callbacks read and write weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_swarm.framework import callbacks_named
from lightning_swarm.weights import Weights


def writes_weights(trainer: Trainer) -> bool:
    """Whether a callback puts averages into the lead's module."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it in its connector
    return any(isinstance(one, callbacks_named("WeightAveraging", "StochasticWeightAveraging")) for one in callbacks)


class Home(Callback):
    """The first of the Trainer's callbacks, until `close`: what the others look at is there before them.

    Args:
        trainer: Whose module it is.
        weights: Those of the run.
        stays: Whether what was trained is in the module when training ends. It is what it looks like then: callbacks
            may change it, and it is saved as it is.
    """

    def __init__(self, trainer: Trainer, weights: Weights, *, stays: bool) -> None:
        self._callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it in its connector
        self._weights = weights
        self._stays = stays
        self._wrapped: list[tuple[Any, str]] = []
        for callback in self._callbacks:
            if isinstance(callback, callbacks_named("WeightAveraging")):
                self._average(callback)
        self._callbacks.insert(0, self)

    def close(self) -> None:
        """Leave the Trainer's callbacks as they were."""
        self._callbacks.remove(self)
        while self._wrapped:
            callback, name = self._wrapped.pop()
            del vars(callback)[name]

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if any(_reads(callback, trainer.current_epoch) for callback in self._callbacks):
            self._weights.visit_home()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stays:
            self._weights.stay_home(trainer.optimizers[0])

    def _average(self, callback: Any) -> None:
        """Serve a `WeightAveraging`, whatever its subclass decides, and only when it decides to read or write."""

        def visit_if(updates: bool) -> None:
            if updates:
                self._weights.visit_home()

        self._wrap(callback, "should_update", after=visit_if)
        # It swaps its averages with what the module holds, and swaps back.
        self._wrap(
            callback, "on_validation_epoch_start", before=self._weights.visit_home, after=lambda _: self._weights.lend()
        )
        self._wrap(callback, "on_validation_epoch_end", before=self._weights.take_back)

    def _wrap(
        self,
        callback: Any,
        name: str,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Do something before a method of the callback, and after it with what it returned."""
        own = getattr(callback, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before()
            returned = own(*args, **kwargs)
            after(returned)
            return returned

        setattr(callback, name, wrapped)
        self._wrapped.append((callback, name))


def _reads(callback: Any, epoch: int) -> bool:
    """Whether a callback reads weights at the beginning of an epoch."""
    if isinstance(callback, callbacks_named("StochasticWeightAveraging")):
        return bool(epoch >= callback.swa_start)
    # It passes over parameters whose values equal those of another one that trains: by the values of now.
    return isinstance(callback, callbacks_named("BaseFinetuning"))
