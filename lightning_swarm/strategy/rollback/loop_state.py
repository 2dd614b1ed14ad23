"""States of a loop between two of its batches, for the versions that have snapshots: checkpoints without weights.

Records need not come between two batches of a trainer: while it reads data, or waits for a grant with a batch in hand,
others fill steps. So a state belongs to all versions that cannot count the loop's next batch, and do count those
before: from the version after the newest of its own steps to the version in whose step the next batch got its grant.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_swarm.client.session import RunNews
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.module_states import plain_attributes, restore_attributes
from lightning_swarm.protocol.plain_values import Awaited
from lightning_swarm.strategy.metrics import Pending
from lightning_swarm.strategy.rollback.data_position import BatchPosition

_log = logging.getLogger(__name__)

UNSAVED: Final = "unsaved_buffers"
"""Entry of a checkpoint: the buffers that no state dict holds, which a run that goes on needs, too."""

_SHOWN: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_LOGGING: Final = ("_first_loop_iter", "_current_fx")  # by which Lightning knows that an epoch's averages begin anew


Counts = Callable[[int, Collection[int]], bool]
"""Says if the record of a step counts all batches of these leases."""


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The state of a loop between two batches."""

    checkpoint: dict[str, Any]  # as Lightning would save it, with gaps
    gaps: Sequence[Awaited]  # in the checkpoint, each once
    parameter_names: Sequence[str]  # in the optimizer's order
    position: BatchPosition
    metrics: Mapping[str, Mapping[str, Any]]  # what torchmetrics objects had gathered, by their names in the module
    results: Mapping[str, tuple[Metric, Mapping[str, Any]]]  # what was logged in the epoch so far
    shown: Mapping[str, dict[str, Any]]  # what callbacks, loggers and progress bars find of it
    logging: Mapping[str, Any]  # where in the epoch Lightning takes itself to be
    pending: Pending  # what is still to be shared of what was logged
    attributes: Mapping[str, Mapping[str, Any]]  # modes and plain attributes of modules, by their names

    def complete(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """An ordinary checkpoint, with the weights and the optimizer state of all stages by name."""
        by_index = {i: optimizer[name] for i, name in enumerate(self.parameter_names) if name in optimizer}
        filled = {id(gap): by_index if gap.name is None else weights[gap.name] for gap in self.gaps}
        complete: dict[str, Any] = _filled(self.checkpoint, filled)
        return complete


@dataclass
class ResumePoint:
    """A state from which a loop may go on, and the versions of the weights that it goes with."""

    state: LoopState
    num_counted: int  # records
    version: int  # of the weights, at least
    completed: Collection[int]  # leases of its own batches in that version's step; with any, it goes with later ones
    before: RunNews  # what it had heard already and not counted
    news: RunNews | None = None  # what it heard before its next batch had a grant; None: that has none as yet

    def is_at(self, version: int, counts: Counts, *, is_lead: bool) -> bool:
        """True if the state goes with a version of the weights. `counts` knows records that it did not hear of."""
        if version <= self.version:
            return version == self.version and not self.completed
        if self.news is not None:
            # At the lead, what other trainers logged comes with each record, and is not kept for versions in between.
            return version == self.news.version if is_lead else version <= self.news.version
        return not is_lead and (not self.completed or counts(self.version, self.completed))

    def news_at(self, version: int) -> RunNews:
        """The news that the loop had heard and not counted, where it goes on with a version."""
        return self.news if self.news is not None and version > self.version else self.before


class LoopStates:
    """Keeps the states that go with snapshots that exist or may come to."""

    def __init__(self, trainer: Trainer, names: Collection[str], *, is_lead: bool) -> None:
        self._trainer = trainer
        self._names = names  # of all tensors that the servers hold
        self._is_lead = is_lead
        self._kept: Sequence[ResumePoint] = ()  # replaced, not changed: the swarm's event loop reads it
        self._stand_ins: dict[int, tuple[Any, Awaited]] | None = None  # while a state is taken, by their `id`
        self._unsaved: dict[str, Any] = {}
        self._warned = False

    @property
    def versions(self) -> Collection[int]:
        """The versions of the weights that the states go with, as far as the loop has heard of them."""
        known = [(point.version, not point.completed) for point in self._kept]
        known += [(point.news.version, True) for point in self._kept if point.news is not None]
        return {version for version, goes in known if goes and self.find(version) is not None}

    def find(self, version: int, counts: Counts = lambda *_: False) -> ResumePoint | None:
        """The latest state that goes with a version. May be called from any thread."""
        kept = reversed(self._kept)
        return next((point for point in kept if point.is_at(version, counts, is_lead=self._is_lead)), None)

    @property
    def taking(self) -> bool:
        """True while weights and optimizer state are asked for only to be left out."""
        return self._stand_ins is not None

    def clear(self) -> None:
        """Forget all states."""
        self._kept = ()

    def prune(self, ordered: Collection[int]) -> None:
        """Keep the newest state, and of the others those that go with snapshots that were ordered."""
        older, newest = self._kept[:-1], self._kept[-1:]
        wanted = [self.find(version, lambda *_: True) for version in ordered]
        self._kept = (*(point for point in older if any(point is other for other in wanted)), *newest)

    def resume(self, point: ResumePoint) -> None:
        """The loop is where another run's loop was."""
        self._kept = (point,)

    def granted(self, news: RunNews) -> None:
        """The next batch has its grant, or none is left."""
        if self._kept and self._kept[-1].news is None:
            self._kept = (*self._kept[:-1], replace(self._kept[-1], news=news))

    def save(self, version: int, completed: Collection[int], position: BatchPosition, pending: Pending) -> None:
        """Keep the state of the loop, which is between two batches and has counted to `version`."""
        # Nothing of it comes from the servers: hooks that work on weights find tensors without values.
        self._stand_ins, self._unsaved = {}, {}
        try:
            state = self._take(position, pending)
            # Without a grant for a batch since then, the state before is the same, but older.
            before = self._kept[:-1] if self._kept and self._kept[-1].news is None else self._kept
            self._kept = (*before, ResumePoint(state, version, version, tuple(completed), RunNews(version)))
        except Exception as error:  # noqa: BLE001 - what hooks raise; the run is in no need of it now
            if not self._warned:
                self._warned = True
                _log.warning(
                    "The loop's state cannot be kept in memory, so this run will break off if all servers of a stage "
                    "die, and go on from a checkpoint file only: %s: %s",
                    type(error).__name__,
                    error,
                )
        finally:
            self._stand_ins = None

    def _take(self, position: BatchPosition, pending: Pending) -> LoopState:
        assert self._stand_ins is not None
        trainer = self._trainer
        module = trainer.lightning_module
        with torch.no_grad():
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        dumped[UNSAVED] = self._unsaved
        memo = {key: gap for key, (_, gap) in self._stand_ins.items()}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        kept = copy.deepcopy(dumped, dict(memo))
        valueless = next((name for name, leaf in leaves(kept) if isinstance(leaf, Tensor) and leaf.is_meta), None)
        if valueless is not None:
            raise ConfigError(
                f"what a hook made of the weights when a checkpoint was asked for, {valueless}, has no values: they "
                "are on the servers. Take weights as they are in `on_save_checkpoint`, and work on them when they are "
                "loaded."
            )
        return LoopState(
            checkpoint=kept,
            gaps=list(memo.values()),
            parameter_names=[
                names[id(parameter)] for group in trainer.optimizers[0].param_groups for parameter in group["params"]
            ],
            position=position,
            pending=pending,
            attributes=plain_attributes(module),
            metrics={name: _gathered(metric) for name, metric in module.named_modules() if isinstance(metric, Metric)},
            logging={name: getattr(trainer._logger_connector, name) for name in _LOGGING},
            shown={name: dict(getattr(trainer._logger_connector, name)) for name in _SHOWN},
            results={name: (entry, _gathered(entry)) for name, entry in trainer.fit_loop.epoch_loop._results.items()},
        )

    def without_weights(
        self,
        own: dict[str, Any],
        unsaved: Mapping[str, Tensor],
        names: Mapping[str, str],
        written: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """The module's state dict with gaps; `names` are the first name of each tensor by all of its names.

        What user code has `written`, the servers may not have: it is kept with the loop. So are `unsaved` buffers.
        """
        self._unsaved = self._with_gaps(unsaved, names, written)
        return self._with_gaps(own, names, written)

    def _with_gaps(
        self, own: Mapping[str, Any], names: Mapping[str, str], written: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        assert self._stand_ins is not None
        state = dict(own)
        for name, tensor in own.items():
            if names.get(name) in written:
                state[name] = written[names[name]]
            elif names.get(name) in self._names:
                stand_in = state[name] = tensor.detach().to("meta")
                self._stand_ins[id(stand_in)] = stand_in, Awaited(names[name])
        return state

    def without_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict with a gap."""
        assert self._stand_ins is not None
        state: dict[int, Any] = {}
        self._stand_ins[id(state)] = state, Awaited(None)
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def restore_metrics(trainer: Trainer, state: LoopState) -> None:
    """Restore what was logged and measured in an epoch that goes on, and what user code had set on modules."""
    restore_attributes(trainer.lightning_module, state.attributes)
    modules = dict(trainer.lightning_module.named_modules())
    for name, gathered in state.metrics.items():
        if isinstance(modules.get(name), Metric):
            modules[name].__dict__.update(copy.deepcopy(dict(gathered)))
    for name, found in state.shown.items():
        getattr(trainer._logger_connector, name).update(found)
    for name, value in state.logging.items():
        setattr(trainer._logger_connector, name, value)
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for name, (metric, gathered) in state.results.items():
        metric.__dict__.update(copy.deepcopy(dict(gathered)))
        results[name] = metric


def _gathered(metric: Metric) -> dict[str, Any]:
    """Copies of all that updates of a metric change."""
    # `has_reset`: of Lightning's own metrics, which hold what was logged as a number.
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache", "has_reset"]
    return copy.deepcopy({name: vars(metric)[name] for name in names if name in vars(metric)})


def _filled(tree: Any, filled: Mapping[int, Any]) -> Any:
    """A copy of nested containers, with gaps replaced."""
    if isinstance(tree, Awaited):
        return filled[id(tree)]
    if isinstance(tree, dict):
        copied = copy.copy(tree)
        for key, value in tree.items():
            copied[key] = _filled(value, filled)
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(_filled(value, filled) for value in tree)
    return tree


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All that nested containers hold, each with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{name}[{index}]")
    else:
        yield name, tree
