"""Warns if values of user code change while several trainers train, because each trainer has its own copy of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import FunctionType
from typing import Any, Final

from lightning.pytorch import Trainer
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.core.override import Override
from lightning_swarm.strategy.framework import OWN_PACKAGES, tree_of
from lightning_swarm.strategy.reachable_values import (
    attributes_of,
    callable_stamps,
    closure_stamps,
    functions_of,
    names_in,
    stamps_of,
)

_log = logging.getLogger(__name__)

_INTERVAL: Final = 8  # examine the first 8 batches, and every eighth batch after them
_MAX_NAMED: Final = 5


class OwnValues:
    """Warns once if values of user code change between batches, and once if validation changes them.

    A counter of batches, a queue or a moving mean differs on each trainer. Values set in validation exist on the lead
    only. The warning may be needless, because it is unknown whether a loss depends on such a value.
    """

    def __init__(
        self,
        trainer: Trainer,
        num_trainers: Callable[[], int],
        shares_metrics: Callable[[], bool],  # whether all trainers receive the lead's metrics when an epoch begins
        *,
        is_lead: bool,
    ) -> None:
        self._trainer = trainer
        self._num_trainers = num_trainers
        self._shares_metrics = shares_metrics
        self._first_stamps: Mapping[str, Any] | None = None  # from the first batch with several trainers
        self._num_batches = 0  # number of batches that began with several trainers
        self._warned, self._warned_of_validation = False, False
        framework = tree_of(trainer)
        # Attributes that Lightning itself sets on each module and data module.
        self._default_in_module = frozenset(vars(framework.module()))
        self._default_in_data = frozenset(vars(framework.data_module()))
        # Names in the module's code. Between batches, only callbacks' attributes of these names are examined.
        functions = functions_of(type(self._module))
        self._names_in_module = frozenset[str]().union(*(names_in(function.__code__) for function in functions))
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        self._stamps_before: Mapping[str, Any] | None = None  # from before the current validation
        self._overrides = [
            Override(val_loop, "on_run_start", self._begin_validation),
            Override(val_loop, "on_run_end", self._end_validation),
        ] if is_lead else []  # fmt: skip

    def release(self) -> None:
        """Restore Lightning's validation loop."""
        for override in self._overrides:
            override.remove()

    def begin_batch(self) -> None:
        """Warn if values differ from their first stamps. Called when a batch begins."""
        if self._num_trainers() < 2:
            return
        self._num_batches += 1
        if self._warned or (self._num_batches > _INTERVAL and self._num_batches % _INTERVAL):
            return
        stamps = self._collect(self._batch_stamps)
        if self._first_stamps is None:
            self._first_stamps = stamps
            if self._overrides:  # this is the lead
                self._check_metrics()
        if changed := _changed(self._first_stamps, stamps):
            self._warned = True
            _log.warning(
                "Attributes change while several trainers train: %s. Each trainer has its own values. If the loss "
                "depends on such a value, compute it from %s.",
                _quoted(changed),
                self._remedy,
            )

    def _begin_validation(self) -> None:
        if not (self._warned_of_validation or self._num_trainers() < 2 or self._trainer.sanity_checking):
            self._stamps_before = self._collect(self._validation_stamps)
        self._overrides[0].replaced()

    def _end_validation(self) -> Any:
        """Replace the validation loop's `on_run_end`, which calls the last hooks of a validation."""
        result = self._overrides[1].replaced()
        before, self._stamps_before = self._stamps_before, None
        after = {} if before is None else self._collect(self._validation_stamps)
        if before is not None and (changed := _changed(before, after) + [name for name in after if name not in before]):
            self._warned_of_validation = True
            _log.warning(
                "Validation runs only on the lead, and has changed values there: %s. On the other trainers, these "
                "values stay as they are. If the loss or the data depend on such a value, compute it from %s.",
                _quoted(changed),
                self._remedy,
            )
        return result

    def _collect(self, stamps: Callable[[], Iterator[tuple[str, Any]]]) -> dict[str, Any]:
        """Return stamps of values by their paths; equal stamps mean that a value did not change."""
        stamp_by_path: dict[str, Any] = {}
        try:
            stamp_by_path.update(stamps())
        except Exception as error:  # noqa: BLE001 - a user's property may raise anything, and training must go on
            _log.debug("Not all values could be examined: %r", error)
        return stamp_by_path

    @property
    def _remedy(self) -> str:
        """Return sources of values that are equal on all trainers, for a warning."""
        step = "`self.trainer.global_step`, which is the run's step on every trainer"
        if not self._shares_metrics():
            return step
        return f"{step}, or, when an epoch begins, from the lead's validation metrics in `trainer.callback_metrics`"

    def _check_metrics(self) -> None:
        """Warn if the module's code reads metrics that the other trainers receive late, or never."""
        trainer: Any = self._trainer
        validates_in_mid_epoch = trainer.check_val_every_n_epoch is None or trainer.val_check_interval != 1.0
        are_shared = self._shares_metrics()
        if not trainer.enable_validation or (are_shared and not validates_in_mid_epoch):
            return
        functions = [function for function in functions_of(type(self._module)) if not _is_for_evaluation(function)]
        if any("callback_metrics" in names_in(function.__code__) for function in functions):
            _log.warning(
                "%s reads `callback_metrics`, but only the lead validates: the other trainers %s. A trainer's own "
                "logged values are available at once. For equal metrics on all trainers, let them share the data, and "
                "validate at the end of each epoch.",
                type(self._module).__name__,
                "get its metrics when their next epoch begins" if are_shared else "do not get its metrics",
            )

    def _validation_stamps(self) -> Iterator[tuple[str, Any]]:
        return chain(self._module_stamps(), self._callback_stamps(), self._data_stamps())

    def _batch_stamps(self) -> Iterator[tuple[str, Any]]:
        names = self._names_in_module
        used = ((path, stamp) for path, stamp in self._callback_stamps() if path.rpartition(".")[2] in names)
        return chain(self._module_stamps(), used)

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self._trainer.lightning_module
        return module

    def _module_stamps(self) -> Iterator[tuple[str, Any]]:
        """Stamp attributes of all modules and of their objects, and globals and outer variables of their functions."""
        for name, module in self._module.named_modules():
            if isinstance(module, Metric | MetricCollection):
                continue  # metrics are shared among trainers
            for key, value in attributes_of(module).items():
                # The run handles these values itself.
                if key not in self._default_in_module and not isinstance(value, nn.Module | nn.Parameter | Optimizer):
                    yield from stamps_of(f"{name}.{key}" if name else key, value)
        for function in functions_of(type(self._module)):
            yield from closure_stamps(function)

    def _callback_stamps(self) -> Iterator[tuple[str, Any]]:
        """Stamp attributes of callbacks whose only base class from a library is `Callback`."""
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]  # set in its connector
        for callback in callbacks:
            bases = [base for base in type(callback).__mro__ if _is_from_library(base)]
            if not _is_from_library(type(callback)) and {base.__name__ for base in bases} <= {"Callback", "object"}:
                for key, value in attributes_of(callback).items():
                    if not isinstance(value, list | dict):  # lists and dicts of callbacks are logs for the user
                        yield from stamps_of(f"{type(callback).__name__}.{key}", value)

    def _data_stamps(self) -> Iterator[tuple[str, Any]]:
        """Stamp attributes of the data module and of datasets, and the values that a collate function refers to."""
        trainer: Any = self._trainer
        if trainer.datamodule is not None:
            for key, value in attributes_of(trainer.datamodule).items():
                if key not in self._default_in_data and not isinstance(value, DataLoader):
                    yield from stamps_of(f"{type(trainer.datamodule).__name__}.{key}", value)
        combined = trainer.fit_loop._combined_loader
        for loader in combined.flattened if combined is not None else ():
            if (dataset := getattr(loader, "dataset", None)) is not None:
                yield from stamps_of(type(dataset).__name__, dataset)
            if (collate := getattr(loader, "collate_fn", None)) is not None:
                yield from callable_stamps("collate_fn", collate)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names that are in both mappings, and whose stamps differ."""
    return [name for name, value in after.items() if name in before and not value == before[name]]  # noqa: SIM201


def _is_for_evaluation(function: FunctionType) -> bool:
    """Return whether a hook or step is called only by the lead, which alone evaluates."""
    return any(word in function.__name__ for word in ("validation", "test", "predict"))


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_MAX_NAMED]))


def _is_from_library(cls: type) -> bool:
    return is_in_packages((*OWN_PACKAGES, "torch", "builtins"), cls.__module__)
