"""Warns of values of user code that change while several trainers train, because each trainer has its own."""

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

_FIRST: Final = 8  # the first 8 batches are all examined; then every eighth
_MAX_NAMED: Final = 5


class OwnValues:
    """Warns once of user code's values that change from batch to batch, and once of values that validation changes.

    A counter of batches, a queue or a moving mean differs on each trainer. Values set in validation exist on the lead
    only. Such a value may be harmless, because it is unknown whether a loss depends on it.
    """

    def __init__(
        self,
        trainer: Trainer,
        num_trainers: Callable[[], int],
        brings_metrics: Callable[[], bool],  # whether all trainers receive the lead's metrics when an epoch begins
        *,
        is_lead: bool,
    ) -> None:
        self._trainer = trainer
        self._num_trainers = num_trainers
        self._brings_metrics = brings_metrics
        self._first: Mapping[str, Any] | None = None  # stamps at the first look with several trainers
        self._num_looks = 0  # batches that began with several trainers
        self._warned, self._warned_of_validation = False, False
        framework = tree_of(trainer)
        # Attributes that Lightning itself sets on each module and data module.
        self._bare_module = frozenset(vars(framework.module()))
        self._bare_data = frozenset(vars(framework.data_module()))
        # Names in the module's code. In batches, only callbacks' attributes of these names are examined.
        self._used = frozenset[str]().union(*(names_in(one.__code__) for one in functions_of(type(self._module))))
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        self._before: Mapping[str, Any] | None = None  # stamps from before the current validation
        self._overrides = [
            Override(val_loop, "on_run_start", self._begin_validation),
            Override(val_loop, "on_run_end", self._end_validation),
        ] if is_lead else []  # fmt: skip

    def release(self) -> None:
        """Restore Lightning's validation loop."""
        for override in self._overrides:
            override.remove()

    def look(self) -> None:
        """When a batch begins, warn if values differ from their first stamps."""
        if self._num_trainers() < 2:
            return
        self._num_looks += 1
        if self._warned or (self._num_looks > _FIRST and self._num_looks % _FIRST):
            return
        found = self._stamps(self._in_batches)
        if self._first is None:
            self._first = found
            if self._overrides:  # this is the lead
                self._check_metrics()
        if changed := _changed(self._first, found):
            self._warned = True
            _log.warning(
                "Attributes change while several trainers train: %s. Each trainer has its own values. Where the loss "
                "depends on one, compute it from %s.",
                _named(changed),
                self._remedy,
            )

    def _begin_validation(self) -> None:
        if not (self._warned_of_validation or self._num_trainers() < 2 or self._trainer.sanity_checking):
            self._before = self._stamps(self._around_validation)
        self._overrides[0].replaced()

    def _end_validation(self) -> Any:
        """Replace the validation loop's `on_run_end`, which calls the last hooks of a validation."""
        result = self._overrides[1].replaced()
        before, self._before = self._before, None
        after = {} if before is None else self._stamps(self._around_validation)
        if before is not None and (changed := _changed(before, after) + [name for name in after if name not in before]):
            self._warned_of_validation = True
            _log.warning(
                "Validation, which the lead alone runs, has changed values: %s. Each trainer has its own, and the "
                "others keep theirs. Compute what the loss or the data depend on from %s.",
                _named(changed),
                self._remedy,
            )
        return result

    def _stamps(self, values: Callable[[], Iterator[tuple[str, Any]]]) -> dict[str, Any]:
        """Return stamps of values by their paths; equal stamps mean that a value did not change."""
        found: dict[str, Any] = {}
        try:
            found.update(values())
        except Exception as error:  # noqa: BLE001 - a user's property may raise anything, and training must go on
            _log.debug("Not all values could be looked at: %r", error)
        return found

    @property
    def _remedy(self) -> str:
        of_run = "`self.trainer.global_step`, which is the run's"
        if not self._brings_metrics():
            return of_run
        return (
            f"{of_run}, or where an epoch begins from `trainer.callback_metrics`, in which all trainers have what the "
            "lead's validation logged"
        )

    def _check_metrics(self) -> None:
        """Warn if the module's code reads metrics that the other trainers receive late, or never."""
        trainer: Any = self._trainer
        in_mid_epoch = trainer.check_val_every_n_epoch is None or trainer.val_check_interval != 1.0
        brings = self._brings_metrics()
        if not trainer.enable_validation or (brings and not in_mid_epoch):
            return
        reading = [one for one in functions_of(type(self._module)) if not _is_of_evaluation(one)]
        if any("callback_metrics" in names_in(one.__code__) for one in reading):
            _log.warning(
                "%s reads `callback_metrics`, and the lead alone validates: the others %s. "
                "Each trainer has at once what it logs itself. Validate at the end of each epoch, with data that "
                "trainers share, for all to have the same.",
                type(self._module).__name__,
                "get its values where their next epoch begins" if brings else "do not get its values",
            )

    def _around_validation(self) -> Iterator[tuple[str, Any]]:
        return chain(self._of_module(), self._of_callbacks(), self._of_data())

    def _in_batches(self) -> Iterator[tuple[str, Any]]:
        used = ((path, value) for path, value in self._of_callbacks() if path.rpartition(".")[2] in self._used)
        return chain(self._of_module(), used)

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self._trainer.lightning_module
        return module

    def _of_module(self) -> Iterator[tuple[str, Any]]:
        """Stamp attributes of all modules and of the objects in them, and globals and variables around functions."""
        for name, module in self._module.named_modules():
            if isinstance(module, Metric | MetricCollection):
                continue  # metrics are shared among trainers
            for key, value in attributes_of(module).items():
                # The run handles these values itself.
                if key not in self._bare_module and not isinstance(value, nn.Module | nn.Parameter | Optimizer):
                    yield from stamps_of(f"{name}.{key}" if name else key, value)
        for function in functions_of(type(self._module)):
            yield from closure_stamps(function)

    def _of_callbacks(self) -> Iterator[tuple[str, Any]]:
        """Stamp attributes of callbacks whose only base class from a library is `Callback`."""
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]  # set in its connector
        for callback in callbacks:
            bases = [base for base in type(callback).__mro__ if _is_librarys(base)]
            if not _is_librarys(type(callback)) and {base.__name__ for base in bases} <= {"Callback", "object"}:
                for key, value in attributes_of(callback).items():
                    if not isinstance(value, list | dict):  # lists and dicts of callbacks are logs for the user
                        yield from stamps_of(f"{type(callback).__name__}.{key}", value)

    def _of_data(self) -> Iterator[tuple[str, Any]]:
        """Stamp attributes of the data module and of datasets, and the values that a collate function refers to."""
        trainer: Any = self._trainer
        if trainer.datamodule is not None:
            for key, value in attributes_of(trainer.datamodule).items():
                if key not in self._bare_data and not isinstance(value, DataLoader):
                    yield from stamps_of(f"{type(trainer.datamodule).__name__}.{key}", value)
        combined = trainer.fit_loop._combined_loader
        for loader in combined.flattened if combined is not None else ():
            if (dataset := getattr(loader, "dataset", None)) is not None:
                yield from stamps_of(type(dataset).__name__, dataset)
            if (collate := getattr(loader, "collate_fn", None)) is not None:
                yield from callable_stamps("collate_fn", collate)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the names of values that have stamps in both mappings, and not the same."""
    return [name for name, value in after.items() if name in before and not value == before[name]]  # noqa: SIM201


def _is_of_evaluation(function: FunctionType) -> bool:
    """Return whether only the lead calls a hook or step."""
    return any(word in function.__name__ for word in ("validation", "test", "predict"))


def _named(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_MAX_NAMED]))


def _is_librarys(kind: type) -> bool:
    return is_in_packages((*OWN_PACKAGES, "torch", "builtins"), kind.__module__)
