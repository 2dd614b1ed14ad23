"""Keeps states of a loop for versions with snapshots: checkpoints without weights, made between two batches.

Other trainers fill steps while this trainer reads data or waits for a grant, so several records may come between two of
its batches. A state therefore fits several versions of the weights: all that include this loop's batches so far, and
that cannot include its next batch. The first is the version to which its newest batch led, the last the version at
which its next batch got its grant.
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
    pending: Pending  # logged values of batches that no record counts yet
    attributes: Mapping[str, Mapping[str, Any]]  # name of a module -> its mode and plain attributes

    def complete(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return an ordinary checkpoint, filled with the weights and the optimizer state of all stages by name."""
        by_index = {i: optimizer[name] for i, name in enumerate(self.parameter_names) if name in optimizer}
        values = {id(gap): by_index if gap.name is None else weights[gap.name] for gap in self.gaps}
        complete: dict[str, Any] = _filled(self.checkpoint, values)
        return complete


@dataclass
class ResumePoint:
    """A state from which a loop may resume, and the versions of the weights that it fits."""

    state: LoopState
    loop_version: int  # records that the loop had counted: equal to `version`, or less after a resume at `version`
    version: int  # lowest version of the weights that the state fits
    # Places of the loop's complete batches in the step that starts from `version`. If there are any, only later
    # versions fit, which include these batches.
    completed: Collection[int]
    uncounted: RunNews  # records that the loop had received, but not counted, when the state was saved
    news: RunNews | None = None  # the same when the next batch had its grant; None before that grant

    def fits(self, version: int, counts: Counts, *, is_lead: bool) -> bool:
        """Return whether the state fits a version of the weights; `counts` knows records that the loop has not seen."""
        if version <= self.version:
            return version == self.version and not self.completed
        if self.news is not None:
            # Each record brings other trainers' logs to the lead, which does not keep them for the versions in between.
            return version == self.news.version if is_lead else version <= self.news.version
        # The next batch has no grant yet: any later version that counts the completed batches fits, but not for the
        # lead, which needs the logs of each record.
        return not is_lead and (not self.completed or counts(self.version, self.completed))

    def uncounted_at(self, version: int) -> RunNews:
        """Return the records that the loop must still count if it resumes at a version."""
        return self.news if self.news is not None and version > self.version else self.uncounted


class LoopStates:
    """Keeps the states that fit snapshots that exist or may follow.

    While `save` makes Lightning's checkpoint, the strategy gives it stand-ins for the values that only servers have
    (`without_weights`, `without_state`). The saved copy has gaps in their place, which `LoopState.complete` fills.
    """

    def __init__(self, trainer: Trainer, names: Collection[str], *, is_lead: bool) -> None:
        self._trainer = trainer
        self._names = names  # names of all tensors that the servers hold
        self._is_lead = is_lead
        self._points: Sequence[ResumePoint] = ()  # replaced, not changed, because the swarm's event loop reads it
        # During `save`: id of a stand-in that Lightning's checkpoint holds -> the stand-in, and the gap to put there.
        self._stand_ins: dict[int, tuple[Any, Awaited]] | None = None
        self._unsaved: dict[str, Any] = {}  # entry `UNSAVED` of the checkpoint, during `save`
        self._warned = False  # a warning has said that states cannot be saved

    @property
    def versions(self) -> Collection[int]:
        """Return the versions of the weights that the states fit, as far as the loop knows them."""
        known = [point.version for point in self._points if not point.completed]
        known += [point.news.version for point in self._points if point.news is not None]
        return {version for version in known if self.find(version) is not None}

    def find(self, version: int, counts: Counts = lambda *_: False) -> ResumePoint | None:
        """Return the latest state that fits a version. May be called from any thread."""
        newest_first = reversed(self._points)
        return next((point for point in newest_first if point.fits(version, counts, is_lead=self._is_lead)), None)

    @property
    def is_saving(self) -> bool:
        """Return whether `save` is making a checkpoint, which must leave out weights and optimizer state."""
        return self._stand_ins is not None

    def clear(self) -> None:
        """Forget all states."""
        self._points = ()

    def prune(self, ordered: Collection[int]) -> None:
        """Keep only the newest state, and older states that fit a version whose snapshots were `ordered`."""
        older, newest = self._points[:-1], self._points[-1:]
        wanted = {id(self.find(version, lambda *_: True)) for version in ordered}
        self._points = (*(point for point in older if id(point) in wanted), *newest)

    def resume(self, point: ResumePoint) -> None:
        """Start with the state that the loop resumed from."""
        self._points = (point,)

    def record_grant(self, news: RunNews) -> None:
        """Add to the newest state the records that came before the next batch's grant, or before the data's end."""
        if self._points and self._points[-1].news is None:
            self._points = (*self._points[:-1], replace(self._points[-1], news=news))

    def save(self, version: int, completed: Collection[int], position: BatchPosition, pending: Pending) -> None:
        """Save the state of the loop between two batches, when it has counted all records up to `version`."""
        # Nothing is gathered from the servers, so hooks that use weights find tensors without values.
        self._stand_ins, self._unsaved = {}, {}
        try:
            state = self._make_state(position, pending)
            # Without a grant since the last state, the new state replaces the last one.
            earlier = self._points[:-1] if self._points and self._points[-1].news is None else self._points
            self._points = (*earlier, ResumePoint(state, version, version, tuple(completed), RunNews(version)))
        except Exception as error:  # noqa: BLE001 - hooks may raise anything, and the run can continue without states
            if not self._warned:
                self._warned = True
                _log.warning(
                    "The loop's state cannot be kept in memory. If all servers of a stage die, this run ends, and can "
                    "resume from a checkpoint file only: %s: %s",
                    type(error).__name__,
                    error,
                )
        finally:
            self._stand_ins = None

    def _make_state(self, position: BatchPosition, pending: Pending) -> LoopState:
        """Copy Lightning's checkpoint, and the values of the loop that it lacks."""
        assert self._stand_ins is not None
        trainer = self._trainer
        module = trainer.lightning_module
        with torch.no_grad():
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        dumped[UNSAVED] = self._unsaved
        memo = {key: gap for key, (_, gap) in self._stand_ins.items()}
        names = parameter_names(module)
        checkpoint = copy.deepcopy(dumped, dict(memo))  # with gaps in place of the stand-ins
        valueless = next((name for name, leaf in leaves(checkpoint) if isinstance(leaf, Tensor) and leaf.is_meta), None)
        if valueless is not None:
            raise ConfigError(
                "hooks must not compute with weights while a checkpoint is made, because their values are on the "
                f"servers; the entry {valueless} was computed from them and has no values. Save the weights unchanged "
                "in `on_save_checkpoint`, and compute with them when the checkpoint is loaded."
            )
        return LoopState(
            checkpoint=checkpoint,
            gaps=list(memo.values()),
            parameter_names=[names[id(parameter)] for parameter in parameters_of(trainer.optimizers[0])],
            position=position,
            pending=pending,
            attributes=plain_attributes(module),
            metrics={name: _contents(metric) for name, metric in module.named_modules() if isinstance(metric, Metric)},
            logging={name: getattr(trainer._logger_connector, name) for name in _LOGGING},
            shown={name: dict(getattr(trainer._logger_connector, name)) for name in _SHOWN},
            results={name: (entry, _contents(entry)) for name, entry in trainer.fit_loop.epoch_loop._results.items()},
        )

    def without_weights(
        self,
        state_dict: dict[str, Any],
        unsaved: Mapping[str, Tensor],
        names: Mapping[str, str],
        written: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """Return the module's state dict with stand-ins; `names` maps each name of a tensor to its first name.

        The loop's state keeps tensors that user code has `written`, which servers may lack, and `unsaved` buffers.
        """
        self._unsaved = self._with_stand_ins(unsaved, names, written)
        return self._with_stand_ins(state_dict, names, written)

    def _with_stand_ins(
        self, tensors: Mapping[str, Any], names: Mapping[str, str], written: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Replace tensors that servers hold by stand-ins without values, and `written` tensors by their values."""
        assert self._stand_ins is not None
        state = dict(tensors)
        for name, tensor in tensors.items():
            if names.get(name) in written:
                state[name] = written[names[name]]
            elif names.get(name) in self._names:
                stand_in = state[name] = tensor.detach().to("meta")
                self._stand_ins[id(stand_in)] = stand_in, Awaited(names[name])
        return state

    def without_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict with a stand-in for the state."""
        assert self._stand_ins is not None
        state: dict[int, Any] = {}
        self._stand_ins[id(state)] = state, Awaited(None)
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def restore_metrics(trainer: Trainer, state: LoopState) -> None:
    """Restore the logged values and metrics of a resumed epoch, and attributes that user code had set on modules."""
    restore_attributes(trainer.lightning_module, state.attributes)
    modules = dict(trainer.lightning_module.named_modules())
    for name, contents in state.metrics.items():
        if isinstance(modules.get(name), Metric):
            modules[name].__dict__.update(copy.deepcopy(dict(contents)))
    for name, values in state.shown.items():
        getattr(trainer._logger_connector, name).update(values)
    for name, value in state.logging.items():
        setattr(trainer._logger_connector, name, value)
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for name, (metric, contents) in state.results.items():
        metric.__dict__.update(copy.deepcopy(dict(contents)))
        results[name] = metric


def _contents(metric: Metric) -> dict[str, Any]:
    """Copy all attributes that updates change in a metric."""
    # Only Lightning's own metrics for logged numbers have `has_reset`.
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache", "has_reset"]
    return copy.deepcopy({name: vars(metric)[name] for name in names if name in vars(metric)})


def _filled(tree: Any, values: Mapping[int, Any]) -> Any:
    """Copy nested containers, and replace each gap in them by its value; `values` maps the gaps' ids to the values."""
    if isinstance(tree, Awaited):
        return values[id(tree)]
    if isinstance(tree, dict):
        copied = copy.copy(tree)
        for key, item in tree.items():
            copied[key] = _filled(item, values)
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(_filled(item, values) for item in tree)
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
