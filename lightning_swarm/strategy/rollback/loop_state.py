"""A loop between two of its batches, at the versions of which there are snapshots: a checkpoint but for weights.

Records need not come between two batches of a trainer: while it reads data, or waits for a place with a batch in hand,
others fill steps. So what a loop was at belongs to all versions that could not count its next batch, and do count those
before: from the version after the newest of its own steps to the one in whose step the next batch got its place.
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
from lightning_swarm.protocol.plain_values import Awaited
from lightning_swarm.strategy.metrics import Pending
from lightning_swarm.strategy.rollback.data_position import BatchPosition

_log = logging.getLogger(__name__)

_SHOWN: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_LOGGING: Final = ("_first_loop_iter", "_current_fx")  # by which Lightning knows that an epoch's averages begin anew


Counts = Callable[[int, Collection[int]], bool]
"""Whether the record of a step counts all batches at these places."""


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """A loop between two batches.

    Args:
        checkpoint: As Lightning would save it, with gaps.
        gaps: In it, each once.
        parameter_names: In the optimizer's order.
        place: In the data.
        metrics: What torchmetrics objects of the module had gathered, by their names in it.
        results: What was logged in the epoch so far.
        shown: What callbacks, loggers and progress bars find of it.
        logging: Where in the epoch Lightning takes itself to be.
        pending: What is still to be shared of what was logged.
    """

    checkpoint: dict[str, Any]
    gaps: Sequence[Awaited]
    parameter_names: Sequence[str]
    place: BatchPosition
    metrics: Mapping[str, Mapping[str, Any]]
    results: Mapping[str, tuple[Metric, Mapping[str, Any]]]
    shown: Mapping[str, dict[str, Any]]
    logging: Mapping[str, Any]
    pending: Pending

    def complete(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """An ordinary checkpoint.

        Args:
            weights: Of all stages, by their names.
            optimizer: State of all stages, by parameter name.
        """
        by_index = {i: optimizer[name] for i, name in enumerate(self.parameter_names) if name in optimizer}
        filled = {id(gap): by_index if gap.name is None else weights[gap.name] for gap in self.gaps}
        complete: dict[str, Any] = _filled(self.checkpoint, filled)
        return complete


@dataclass
class ResumePoint:
    """Where a loop may go on.

    Args:
        state: It was at.
        num_counted: Records that it had counted.
        version: Of the weights that go with it, at least.
        through: The places of its own batches in the step of that version. If there are any, it is a later one.
        before: What it had heard already and not counted.
        news: What it heard before its next batch had a place; None: it has none as yet.
    """

    state: LoopState
    num_counted: int
    version: int
    through: Collection[int]
    before: RunNews
    news: RunNews | None = None

    def is_at(self, version: int, counts: Counts, *, is_lead: bool) -> bool:
        """Whether it goes with a version of the weights.

        Args:
            version: Which.
            counts: What is known of records, whether the loop has heard of them or not.
            is_lead: What other trainers logged comes with each record: what goes with versions in between is not kept.
        """
        if version <= self.version:
            return version == self.version and not self.through
        if self.news is not None:
            return version == self.news.version if is_lead else version <= self.news.version
        return not is_lead and (not self.through or counts(self.version, self.through))

    def heard_at(self, version: int) -> RunNews:
        """What it had heard and not counted, of the version that it goes on with."""
        return self.news if self.news is not None and version > self.version else self.before


class LoopStates:
    """Keeps those that go with snapshots there are, and that may be.

    Args:
        trainer: Whose loop it is.
        names: Of all tensors that the servers hold.
        is_lead: Whether the run follows this loop.
    """

    def __init__(self, trainer: Trainer, names: Collection[str], *, is_lead: bool) -> None:
        self._trainer = trainer
        self._names = names
        self._is_lead = is_lead
        self._kept: Sequence[ResumePoint] = ()  # replaced, not changed: it is looked at from the swarm's loop
        self._stand_ins: dict[int, tuple[Any, Awaited]] | None = None  # while a state is taken, by their `id`
        self._warned = False

    @property
    def versions(self) -> Collection[int]:
        """Of the weights that the states go with, as far as the loop has heard of them."""
        known = [(one.version, not one.through) for one in self._kept]
        known += [(one.news.version, True) for one in self._kept if one.news is not None]
        return {version for version, goes in known if goes and self.find(version) is not None}

    def find(self, version: int, counts: Counts = lambda *_: False) -> ResumePoint | None:
        """What goes with a version, as late in the loop as can be. From any thread."""
        kept = reversed(self._kept)
        return next((one for one in kept if one.is_at(version, counts, is_lead=self._is_lead)), None)

    @property
    def taking(self) -> bool:
        """Whether weights and optimizer state are asked for only to be left out."""
        return self._stand_ins is not None

    def clear(self) -> None:
        """Keep none of those that there are."""
        self._kept = ()

    def prune(self, ordered: Collection[int]) -> None:
        """Keep none but those that go with snapshots that were ordered, and the newest."""
        older, newest = self._kept[:-1], self._kept[-1:]
        wanted = [self.find(version, lambda *_: True) for version in ordered]
        self._kept = (*(one for one in older if any(one is other for other in wanted)), *newest)

    def resume(self, between: ResumePoint) -> None:
        """The loop is where another run's was."""
        self._kept = (between,)

    def placed(self, news: RunNews) -> None:
        """The next batch has its place, or there is none left."""
        if self._kept and self._kept[-1].news is None:
            self._kept = (*self._kept[:-1], replace(self._kept[-1], news=news))

    def save(self, version: int, through: Collection[int], place: BatchPosition, pending: Pending) -> None:
        """Keep the loop's state; it is between two batches.

        Nothing of it comes from the servers. The hooks that a checkpoint's saving calls are called; those that work on
        weights find tensors without values.

        Args:
            version: That it has counted to.
            through: As in `ResumePoint`.
            place: In the data.
            pending: As in `LoopState`.
        """
        self._stand_ins = {}
        try:
            state = self._taken(place, pending)
            # Without a place for a batch since then, the one before is the same, but older.
            before = self._kept[:-1] if self._kept and self._kept[-1].news is None else self._kept
            self._kept = (*before, ResumePoint(state, version, version, tuple(through), RunNews(version)))
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

    def _taken(self, place: BatchPosition, pending: Pending) -> LoopState:
        assert self._stand_ins is not None
        trainer = self._trainer
        module = trainer.lightning_module
        with torch.no_grad():
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        memo = {key: gap for key, (_, gap) in self._stand_ins.items()}
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        kept = copy.deepcopy(dumped, dict(memo))
        for name in _valueless(kept, ""):
            raise ConfigError(
                f"what a hook made of the weights when a checkpoint was asked for, {name}, has no values: they are on "
                "the servers. Take weights as they are in `on_save_checkpoint`, and work on them when they are loaded."
            )
        return LoopState(
            checkpoint=kept,
            gaps=list(memo.values()),
            parameter_names=[names[id(one)] for group in trainer.optimizers[0].param_groups for one in group["params"]],
            place=place,
            pending=pending,
            metrics={name: _gathered(one) for name, one in module.named_modules() if isinstance(one, Metric)},
            logging={name: getattr(trainer._logger_connector, name) for name in _LOGGING},
            shown={name: dict(getattr(trainer._logger_connector, name)) for name in _SHOWN},
            results={name: (one, _gathered(one)) for name, one in trainer.fit_loop.epoch_loop._results.items()},
        )

    def without_weights(self, own: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """The module's state dict with gaps.

        Args:
            own: The module's own.
            names: The first name of each tensor by all of its names.
        """
        return {
            name: self._gap(names[name], tensor) if names.get(name) in self._names else tensor
            for name, tensor in own.items()
        }

    def without_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state dict with a gap."""
        assert self._stand_ins is not None
        state: dict[int, Any] = {}
        self._stand_ins[id(state)] = state, Awaited(None)
        return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}

    def _gap(self, name: str, tensor: Tensor) -> Tensor:
        assert self._stand_ins is not None
        stand_in = tensor.detach().to("meta")
        self._stand_ins[id(stand_in)] = stand_in, Awaited(name)
        return stand_in


def restore_metrics(trainer: Trainer, state: LoopState) -> None:
    """Let what was logged and measured in an epoch that goes on be what it was."""
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
    for name, (one, gathered) in state.results.items():
        one.__dict__.update(copy.deepcopy(dict(gathered)))
        results[name] = one


def _gathered(metric: Metric) -> dict[str, Any]:
    """Copies of all that updates of a metric change."""
    # `has_reset`: Lightning's own, which hold what was logged as a number.
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


def _valueless(tree: Any, name: str) -> Iterator[str]:
    """The names of tensors that have no values."""
    if isinstance(tree, Tensor) and tree.is_meta:
        yield name
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _valueless(value, f"{name}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _valueless(value, f"{name}[{index}]")
