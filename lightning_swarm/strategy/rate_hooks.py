"""Calls the lead's `on_train_batch_start` also for other trainers' steps, if it sets learning rates or the like."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Final

from lightning.pytorch import Trainer

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.core.override import Override, changed
from lightning_swarm.model.fidelity.code_reads import nested
from lightning_swarm.strategy.framework import OWN_PACKAGES
from lightning_swarm.strategy.reachable_values import names_in

_HOOK: Final = "on_train_batch_start"
_NAMES: Final = frozenset({"param_groups", "optimizers"})  # attributes by which a hook reaches hyperparameters


class RateHooks:
    """Calls the hook, at the lead of several trainers, for each step whose hyperparameters it has not set yet.

    The plain Trainer calls the hook before every batch. In a swarm a step may have no batch of the lead, or the lead's
    batch moves to a later step after the hook was called. Only user hooks that set hyperparameters are called.
    """

    def __init__(self, trainer: Trainer, session: Session, hyperparameters: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._session = session
        self._hyperparameters = hyperparameters
        self._former_values: Any = None  # hyperparameters before Lightning's newest call of the hook
        self._step = 0  # the newest step that the hook was called for
        self._batch: tuple[Any, int] = (None, 0)  # the newest batch and its index
        self._sets_hyperparameters = False  # the hook may set hyperparameters
        self._override: Override | None = None  # set if steps may need calls
        if session.is_lead and session.is_shared:
            self._sets_hyperparameters = any(map(_may_set, self._hooks()))
            self._override = Override(trainer._logger_connector, "on_batch_start", self._begin_batch)

    def release(self) -> None:
        """Restore Lightning's method."""
        if self._override is not None:
            self._override.remove()

    def record_call(self, batch: Any, batch_idx: int) -> None:
        """Record that Lightning has called the hook for this batch."""
        if self._override is None:
            return
        self._step = self._session.open_step
        self._sets_hyperparameters = self._sets_hyperparameters or self._former_values != self._hyperparameters()
        self._batch = (batch, batch_idx) if self._sets_hyperparameters else (None, 0)  # keep only a batch that is used

    def call_for_open_step(self) -> None:
        """Call the hook, unless it was called for the open step. Must run before hyperparameters are sent."""
        step = self._session.open_step
        if self._override is None or not self._sets_hyperparameters or step <= self._step:
            return
        self._step = step
        trainer: Any = self._trainer
        hooks = list(self._hooks())
        # If hyperparameters changed during the hooks, but no hook's code shows that it sets them, call all hooks.
        chosen = list(filter(_may_set, hooks)) or hooks
        with self._at_global_step(step):
            for hook in chosen:
                first_args = () if hook.__self__ is trainer.lightning_module else (trainer, trainer.lightning_module)
                hook(*first_args, *self._batch)

    def _begin_batch(self, *args: Any) -> None:
        """Replace the logger connector's `on_batch_start`, which Lightning calls before the hook."""
        assert self._override is not None
        self._override.replaced(*args)
        self._former_values = self._hyperparameters()

    def _at_global_step(self, step: int) -> AbstractContextManager[None]:
        """Return a context in which `global_step` is `step`; it may lag behind, until newer records are counted."""
        loop = self._trainer.fit_loop.epoch_loop
        total = loop.automatic_optimization.optim_progress.optimizer.step.total
        return changed(total, completed=total.completed + step - loop.global_step)

    def _hooks(self) -> Iterator[Any]:
        """Yield user code's overrides of the hook in Lightning's order: first the callbacks', then the module's."""
        trainer: Any = self._trainer
        for owner in (*trainer.callbacks, trainer.lightning_module):
            hook = getattr(owner, _HOOK)
            if isinstance(hook, MethodType) and not is_in_packages(OWN_PACKAGES, hook.__module__):
                yield hook


def _may_set(hook: MethodType) -> bool:
    """Return whether a hook's code names parameter groups, and has an assignment of the form ``x[i] = value``."""
    code = getattr(hook.__func__, "__code__", None)
    if code is None or _NAMES.isdisjoint(names_in(code)):
        return False
    instructions = (instruction for part in nested(code) for instruction in dis.get_instructions(part))
    return any(instruction.opname == "STORE_SUBSCR" for instruction in instructions)
