"""`SkipDivergence`: rolls a run back if its loss diverges, and skips the batches of the diverging steps."""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Collection, Iterator
from statistics import fmean, median
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, Diverged
from lightning_swarm.core.rebase import written_once, written_part
from lightning_swarm.protocol.messages.run import MAX_SKIPPED, BatchNumber
from lightning_swarm.strategy.framework import CallbackBase

__all__ = ["SkipDivergence", "skipped_batches"]

_log = logging.getLogger(__name__)
_MAX_STEPS: Final = 512  # the run remembers the batches of its newest 1024 steps
_PAUSE: Final = "Lower the learning rate, or look for the cause in these batches; then continue from a checkpoint."


class LossHistory:
    """Decides from the losses of steps when a run has diverged. Pure."""

    def __init__(self, patience: int, factor: float | None, window: int) -> None:
        self._patience = patience
        self._factor = factor
        self.good: deque[float] = deque(maxlen=window)  # newest losses that have not diverged
        self.bad: list[int] = []  # the newest steps, one after the other, whose losses have diverged

    def add(self, step: int, loss: float) -> bool:
        """Add a step's loss. Returns whether as many losses in a row as the patience have diverged."""
        if self._is_bad(loss):
            self.bad.append(step)
        else:
            self.bad.clear()
            self.good.append(loss)
        return len(self.bad) >= self._patience

    def _is_bad(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if self._factor is None or len(self.good) < (self.good.maxlen or 0):
            return False
        middle = median(self.good)
        return loss > middle + (self._factor - 1.0) * abs(middle)


@written_once(Callback)
class SkipDivergence(CallbackBase):
    """Rolls a run back if its loss diverges, and skips the batches of the diverging steps.

    A step has diverged if its loss is not finite, or is more than `factor` times the median of the last `window`
    losses. After `patience` diverged steps in a row, the run rolls back to its newest snapshot from before them, and
    trains again without their batches and those of the `num_before` steps before. The result is that of a run whose
    data lack these batches. A warning names them, and the event ``went_back`` counts each rollback.

    The loss of a step is the mean over the lead's own batches. Skipped batches get no `training_step`;
    `on_train_batch_start` and `on_train_batch_end` are called for them, with NaN as the loss. The skipped batches
    are in the callback's state, so a run that resumes from a checkpoint in the same epoch skips them, too. In the plain
    Trainer the callback does nothing.

    Args:
        patience: Number of diverged steps in a row after which the run rolls back, 1 to 512.
        factor: Least ratio of a diverged loss to the median; None if only losses that are not finite count.
        window: Number of losses of which the median is taken. With fewer, only losses that are not finite count.
        num_before: Number of steps before the first diverged step that are skipped, too. The update of the step before
            a high loss may have caused it.
        max_rollbacks: Most rollbacks of one fit. The next divergence ends the run with an error.

    Raises:
        ConfigError: An argument is out of its range.

    Example:
        >>> trainer = Trainer(strategy=strategy, callbacks=[SkipDivergence(patience=3, factor=3.0)])
    """

    def __init__(
        self,
        patience: int = 3,
        factor: float | None = 3.0,
        window: int = 32,
        num_before: int = 1,
        max_rollbacks: int = 3,
    ) -> None:
        super().__init__()
        lowest = {"patience": (patience, 1), "window": (window, 1), "num_before": (num_before, 0)}
        lowest["max_rollbacks"] = (max_rollbacks, 1)
        for name, (value, least) in lowest.items():
            if type(value) is not int or not least <= value <= _MAX_STEPS:
                raise ConfigError(
                    f"`{name}` of `SkipDivergence` must be a whole number of {least} to {_MAX_STEPS}, got "
                    f"{value!r}. Choose another."
                )
        if factor is not None and not 1.0 < factor < math.inf:
            raise ConfigError(
                f"`factor` of `SkipDivergence` must be finite and more than 1, got {factor!r}. With None, only losses "
                "that are not finite count as diverged."
            )
        self.skipped: set[BatchNumber] = set()  # epoch and index of each batch that no step may contain
        self.num_rollbacks = 0
        self._num_before = num_before
        self._max_rollbacks = max_rollbacks
        self._history = LossHistory(patience, factor, window)
        self._losses: dict[int, list[float]] = {}  # open step -> losses of its batches so far
        self._batches: dict[int, list[BatchNumber]] = {}  # newest steps -> their batches, if trainers share no order

    # ------------------------------------------------------------------ Lightning's hooks

    @override
    def state_dict(self) -> dict[str, Any]:
        skipped = [list(number) for number in sorted(self.skipped)]
        return {"skipped": skipped, "num_rollbacks": self.num_rollbacks, "losses": list(self._history.good)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # After a rollback, the state is that of the snapshot, which does not contain the newest skipped batches.
        self.skipped |= {(epoch, index) for epoch, index in state_dict["skipped"]}
        self.num_rollbacks = max(self.num_rollbacks, state_dict["num_rollbacks"])
        self._history.good.clear()
        self._history.good.extend(state_dict["losses"])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._losses, self._batches = {}, {}
        self._history.bad.clear()
        if _has_run(trainer) and "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise ConfigError(
                "`SkipDivergence` cannot skip batches that `training_step` itself reads from a `dataloader_iter`. Let "
                "`training_step` take `batch`, or leave the callback out."
            )

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not _has_run(trainer):
            return
        run: Any = trainer.strategy.run  # type: ignore[attr-defined]
        if not run.data.shares and run.session.num_trainers > 1:
            raise ConfigError(
                "`SkipDivergence` needs data in which each batch has a number, but the trainers of this run each read "
                "their own. Use a DataLoader that they can share (docs/data.md), one trainer, or no `SkipDivergence`."
            )

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _has_run(trainer):
            return
        run: Any = trainer.strategy.run  # type: ignore[attr-defined]
        newest, loss = run.loop.newest_batch, outputs.get("loss") if outputs else None
        if newest is not None and loss is not None:
            step, number = newest
            self._losses.setdefault(step, []).append(float(torch.as_tensor(loss).detach()))
            self._batches.setdefault(step, []).append(number)
        for step in sorted(step for step in self._losses if step < run.session.version):
            if self._history.add(step, fmean(self._losses.pop(step))):
                self._roll_back(run)
        oldest_needed = (self._history.bad or [run.session.version])[0] - self._num_before - 1
        self._batches = {step: numbers for step, numbers in self._batches.items() if step >= oldest_needed}

    # ------------------------------------------------------------------ rolling back

    def _roll_back(self, run: Any) -> None:
        """Raise the error that makes the run roll back, after recording the batches to skip."""
        first, last = self._history.bad[0], self._history.bad[-1]
        begin = max(first - self._num_before, run.session.run.manifest.first_step)
        skipped = set(self._batches_of(run, begin, last))
        named = f"the loss of {last - first + 1} steps in a row, {first} to {last}, has diverged or is not finite"
        if self.num_rollbacks >= self._max_rollbacks:
            raise Diverged(f"{named}, after {self.num_rollbacks} rollbacks (`max_rollbacks`). {_PAUSE}", None)
        if len(self.skipped | skipped) > MAX_SKIPPED:
            raise Diverged(f"{named}, and more than {MAX_SKIPPED} batches would be skipped. {_PAUSE}", None)
        self.num_rollbacks += 1
        self.skipped |= skipped
        _log.warning(
            "Rollback %d of at most %d: %s. The run goes back to a snapshot of step %d or earlier, and skips these "
            "batches (epoch, index): %s.",
            self.num_rollbacks,
            self._max_rollbacks,
            named,
            begin,
            ", ".join(map(str, sorted(skipped))),
        )
        raise Diverged(named, run.session.run.weights_version(begin))

    def _batches_of(self, run: Any, begin: int, last: int) -> Iterator[BatchNumber]:
        """Yield the batches of the steps from `begin` to `last`, those of all trainers."""
        first, end = run.session.run.position_at(begin), run.session.run.position_at(last + 1)
        if not run.data.shares:
            yield from (number for step in range(begin, last + 1) for number in self._batches.get(step, ()))
        elif first is not None and end is not None:
            yield from run.data.numbers_between(first, end)


def _has_run(trainer: Trainer) -> bool:
    """Return whether this process leads a swarm's run."""
    return trainer.is_global_zero and getattr(trainer.strategy, "run", None) is not None


def skipped_batches(trainer: Trainer) -> Collection[BatchNumber]:
    """Return the batches that the Trainer's `SkipDivergence` callbacks skip."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it in its connector
    kind: Any = written_part(SkipDivergence)
    return {number for callback in callbacks if isinstance(callback, kind) for number in callback.skipped}
