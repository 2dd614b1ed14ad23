"""Hyperparameters that the lead's `on_train_batch_start` sets, for steps that other trainers fill, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from lightning.pytorch import Trainer

from lightning_swarm.client.session import Session
from lightning_swarm.core.override import Override
from lightning_swarm.strategy.framework import OWN_PACKAGES, framework_of
from lightning_swarm.strategy.reachable_values import names_in

_HOOK: Final = "on_train_batch_start"
_NAMES: Final = frozenset({"param_groups", "optimizers"})  # by which a hook comes at hyperparameters


class RateHooks:
    """At the lead of several trainers: calls the hook for each step whose hyperparameters it has not set yet.

    The plain Trainer calls it before every batch. Here the lead may have no batch in a step, or get a place in a later
    step than the one in which it called the hook. It is called again only if it sets hyperparameters.
    """

    def __init__(self, trainer: Trainer, session: Session, hyperparameters: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._session = session
        self._hyperparameters = hyperparameters
        self._before: Any = None
        self._step = 0  # for which the hook was called
        self._batch: tuple[Any, int] = (None, 0)
        self._sets = any(_NAMES & names_in(hook.__code__) for hook in self._hooks())
        self._start: Override | None = None
        if session.is_lead and session.is_shared:
            self._start = Override(trainer._logger_connector, "on_batch_start", self._begin_batch)

    def release(self) -> None:
        """Leave Lightning's loop as it was."""
        if self._start is not None:
            self._start.remove()

    def called(self, batch: Any, batch_idx: int) -> None:
        """Lightning has called the hook for this batch."""
        if self._start is None:
            return
        self._batch, self._step = (batch, batch_idx), self._session.open_step
        self._sets = self._sets or self._before != self._hyperparameters()

    def call(self) -> None:
        """Before the open step's hyperparameters are told: have the hook set them, once a step at least."""
        step = self._session.open_step
        if self._start is None or not self._sets or step <= self._step:
            return
        self._step = step
        call = framework_of(self._trainer).call
        with self._at(step):
            call._call_callback_hooks(self._trainer, _HOOK, *self._batch)
            call._call_lightning_module_hook(self._trainer, _HOOK, *self._batch)

    def _begin_batch(self, *args: Any) -> None:
        """Takes the place of what Lightning calls before the hook, and before an evaluation's hook."""
        assert self._start is not None
        self._start.replaced(*args)
        self._before = self._hyperparameters()

    @contextmanager
    def _at(self, step: int) -> Iterator[None]:
        """Inside, `global_step` is `step`: records that came may not be counted yet."""
        loop = self._trainer.fit_loop.epoch_loop
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
        counted = total.completed
        total.completed += step - loop.global_step
        try:
            yield
        finally:
            total.completed = counted

    def _hooks(self) -> Iterator[Any]:
        """The functions by which user code overrides the hook."""
        trainer: Any = self._trainer
        for owner in (trainer.lightning_module, *trainer.callbacks):
            hook = getattr(owner, _HOOK)
            hook = getattr(hook, "__func__", hook)
            if hasattr(hook, "__code__") and hook.__module__.partition(".")[0] not in OWN_PACKAGES:
                yield hook
