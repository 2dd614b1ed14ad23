"""States of a loop between two of its batches, for versions with snapshots: checkpoints without weights.

Other trainers fill steps while this one reads data or waits for a grant, so several records may come between two of its
batches. A state therefore fits every version that contains all batches of this loop so far and cannot contain its next
one. The first is the version to which its newest batch led, the last the version in whose step the next batch got its
grant.
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

from lightning_swarm.client.run_session import RunNews
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.fidelity.module_states import plain_attributes, restore_attributes
from lightning_swarm.model.optimizer_state import parameter_names, parameters_of
from lightning_swarm.protocol.plain_values import Awaited
from lightning_swarm.strategy.metrics import Pending
from lightning_swarm.strategy.rollback.data_position import BatchPosition

_log = logging.getLogger(__name__)

UNSAVED: Final = "unsaved_buffers"
"""Entry of a checkpoint: the buffers that no state dict holds, but that a resumed run needs, too."""

_SHOWN: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")  # in Lightning's logger connector
_LOGGING: Final = ("_first_loop_iter", "_current_fx")  # Lightning's flags for where an epoch's averages begin


Counts = Callable[[int, Collection[int]], bool]
"""Function of a step and places: whether the step's record counts all batches at these places."""


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The state of a loop between two batches."""

    checkpoint: dict[str, Any]  # Lightning's checkpoint, with gaps in place of weights and optimizer state
    gaps: Sequence[Awaited]  # the gaps in the checkpoint, each once
    parameter_names: Sequence[str]  # names in the optimizer's order
    position: BatchPosition
    metrics: Mapping[str, Mapping[str, Any]]  # name in the module -> contents of a torchmetrics object
    results: Mapping[str, tuple[Metric, Mapping[str, Any]]]  # Lightning's results of the epoch so far
    shown: Mapping[str, dict[str, Any]]  # values for callbacks, loggers and progress bars
    logging: Mapping[str, Any]  # attributes of Lightning's logger connector
    pending: Pending  # logged values that are not shared yet
    attributes: Mapping[str, Mapping[str, Any]]  # name of a module -> its mode and plain attributes

    def complete(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return an ordinary checkpoint, filled with the weights and the optimizer state of all stages by name."""
        by_index = {i: optimizer[name] for i, name in enumerate(self.parameter_names) if name in optimizer}
        filled = {id(gap): by_index if gap.name is None else weights[gap.name] for gap in self.gaps}
        complete: dict[str, Any] = _filled(self.checkpoint, filled)
        return complete


@dataclass
class ResumePoint:
    """A state from which a loop may resume, and the versions of the weights that it fits."""

    state: LoopState
    loop_version: int  # records that the loop had counted: equal to `version`, or less after a resume at `version`
    version: int  # lowest version of the weights that the state fits
    # Places of own batches in the open step, the one that starts from `version`. If there are any, only later versions
    # fit, which count these batches.
    completed: Collection[int]
    before: RunNews  # records that the loop had received, but not counted, when the state was taken
    news: RunNews | None = None  # the same when the next batch had its grant; None before that grant

    def fits(self, version: int, counts: Counts, *, is_lead: bool) -> bool:
        """Return whether the state fits a version of the weights; `counts` knows records that the loop has not seen."""
        if version <= self.version:
            return version == self.version and not self.completed
        if self.news is not None:
            # The lead receives other trainers' logs with each record, and does not keep them for versions in between.
            return version == self.news.version if is_lead else version <= self.news.version
        # The next batch has no grant yet: any later version that counts the completed batches fits, but not for the
        # lead, which needs the logs of each record.
        return not is_lead and (not self.completed or counts(self.version, self.completed))

    def news_at(self, version: int) -> RunNews:
        """Return the records that the loop had received, but not counted, if it resumes at a version."""
        return self.news if self.news is not None and version > self.version else self.before


class LoopStates:
    """Keeps the states that fit snapshots that exist or may follow."""

    def __init__(self, trainer: Trainer, names: Collection[str], *, is_lead: bool) -> None:
        self._trainer = trainer
        self._names = names  # names of all tensors that the servers hold
        self._is_lead = is_lead
        self._kept: Sequence[ResumePoint] = ()  # replaced, not changed, because the swarm's event loop reads it
        self._stand_ins: dict[int, tuple[Any, Awaited]] | None = None  # `id` -> stand-in and gap, during `save`
        self._unsaved: dict[str, Any] = {}  # entry `UNSAVED` of the checkpoint, during `save`
        self._warned = False  # that states cannot be saved

    @property
    def versions(self) -> Collection[int]:
        """Return the versions of the weights that the states fit, as far as the loop knows them."""
        known = [point.version for point in self._kept if not point.completed]
        known += [point.news.version for point in self._kept if point.news is not None]
        return {version for version in known if self.find(version) is not None}

    def find(self, version: int, counts: Counts = lambda *_: False) -> ResumePoint | None:
        """Return the latest state that fits a version. May be called from any thread."""
        kept = reversed(self._kept)
        return next((point for point in kept if point.fits(version, counts, is_lead=self._is_lead)), None)

    @property
    def taking(self) -> bool:
        """Return whether `save` is making a checkpoint, which must leave out weights and optimizer state."""
        return self._stand_ins is not None

    def clear(self) -> None:
        """Forget all states."""
        self._kept = ()

    def prune(self, ordered: Collection[int]) -> None:
        """Keep only the newest state, and older ones that fit a version whose snapshots were `ordered` (requested)."""
        older, newest = self._kept[:-1], self._kept[-1:]
        wanted = [self.find(version, lambda *_: True) for version in ordered]
        self._kept = (*(point for point in older if any(point is other for other in wanted)), *newest)

    def resume(self, point: ResumePoint) -> None:
        """Start with the state that the loop resumed from."""
        self._kept = (point,)

    def granted(self, news: RunNews) -> None:
        """Add the records that came before the next batch's grant, or before the end of the data."""
        if self._kept and self._kept[-1].news is None:
            self._kept = (*self._kept[:-1], replace(self._kept[-1], news=news))

    def save(self, version: int, completed: Collection[int], position: BatchPosition, pending: Pending) -> None:
        """Save the state of the loop between two batches, when it has counted all records up to `version`."""
        # Nothing is gathered from the servers, so hooks that use weights find tensors without values.
        self._stand_ins, self._unsaved = {}, {}
        try:
            state = self._take(position, pending)
            # Without a grant since the last state, the new state replaces the last one.
            before = self._kept[:-1] if self._kept and self._kept[-1].news is None else self._kept
            self._kept = (*before, ResumePoint(state, version, version, tuple(completed), RunNews(version)))
        except Exception as error:  # noqa: BLE001 - hooks may raise anything, and the run can continue without
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
        """Make Lightning's checkpoint, and copy it and the values that it lacks."""
        assert self._stand_ins is not None
        trainer = self._trainer
        module = trainer.lightning_module
        with torch.no_grad():
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        dumped[UNSAVED] = self._unsaved
        memo = {key: gap for key, (_, gap) in self._stand_ins.items()}
        names = parameter_names(module)
        kept = copy.deepcopy(dumped, dict(memo))
        valueless = next((name for name, leaf in leaves(kept) if isinstance(leaf, Tensor) and leaf.is_meta), None)
        if valueless is not None:
            raise ConfigError(
                "hooks must not compute with weights while a checkpoint is made, because their values are on the "
                f"servers; the entry {valueless} was computed from them and has no values. Save the weights unchanged "
                "in `on_save_checkpoint`, and compute with them when the checkpoint is loaded."
            )
        return LoopState(
            checkpoint=kept,
            gaps=list(memo.values()),
            parameter_names=[names[id(parameter)] for parameter in parameters_of(trainer.optimizers[0])],
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
        """Return the module's state dict with gaps; `names` maps each name of a tensor to its first name.

        The loop's state keeps tensors that user code has `written`, which servers may lack, and `unsaved` buffers.
        """
        self._unsaved = self._with_gaps(unsaved, names, written)
        return self._with_gaps(own, names, written)

    def _with_gaps(
        self, own: Mapping[str, Any], names: Mapping[str, str], written: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Replace tensors that servers hold by stand-ins without values, and `written` tensors by their values."""
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
        """Return the optimizer's state dict with a gap in place of the state."""
        assert self._stand_ins is not None
        state: dict[int, Any] = {}
        self._stand_ins[id(state)] = state, Awaited(None)
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def restore_metrics(trainer: Trainer, state: LoopState) -> None:
    """Restore the logged values and metrics of a resumed epoch, and attributes that user code had set on modules."""
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
    """Copy all attributes that updates change in a metric. Nothing is gathered from other processes."""
    # Only Lightning's own metrics for logged numbers have `has_reset`.
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache", "has_reset"]
    return copy.deepcopy({name: vars(metric)[name] for name in names if name in vars(metric)})


def _filled(tree: Any, filled: Mapping[int, Any]) -> Any:
    """Copy nested containers, with each gap replaced; `filled` maps the id of a gap to its value."""
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
    """Yield all leaves of nested containers, each with the path of its keys."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{name}[{index}]")
    else:
        yield name, tree
