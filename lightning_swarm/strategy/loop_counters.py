"""Adapts the training loop's state to the swarm's steps: schedulers, complete batches, loss scale, ends of steps."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from lightning.pytorch import Trainer
from msgspec.structs import asdict
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from lightning_swarm.core.errors import ConfigError, StepError
from lightning_swarm.core.override import Override, changed
from lightning_swarm.protocol.messages.run import BatchNumber
from lightning_swarm.protocol.messages.scaling import LossScaling
from lightning_swarm.strategy.data.shared import SharedData
from lightning_swarm.strategy.framework import tree_of

_NUM_APPLIED: Final = "_growth_tracker"  # key in the state of a `GradScaler`


class TrainerSchedulers:
    """Moves a Trainer's learning rate schedulers once for each record, from `take_over` on."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._num_ahead = 0  # moves that were made ahead, for records that are not counted yet

    def take_over(self) -> None:
        """Replace Lightning's move of the schedulers after a batch: it is skipped if `move` has already made it."""
        self._update = Override(self._epoch_loop, "update_lr_schedulers", self._update_after_batch)

    def release(self) -> None:
        """Restore Lightning's loop."""
        self._update.remove()

    def restart(self) -> None:
        """Forget pending moves, because the run restarts with other weights."""
        self._num_ahead = 0

    def move(self, num_records: int) -> None:
        """Move the schedulers ahead by `num_records` records that are not counted yet."""
        while self._num_ahead < num_records:
            # Schedulers check whether the optimizer has stepped; the servers have done so.
            self._trainer.optimizers[0]._opt_called = True  # type: ignore[attr-defined]
            self._epoch_loop._update_learning_rates(interval="step", update_plateau_schedulers=False)
            self._num_ahead += 1

    def count(self, *, is_first: bool) -> None:
        """Count a record. Lightning moves the schedulers for a batch's first record, when the batch ends."""
        if not is_first:  # for later records, they move now, unless they moved ahead
            self.move(1)
            self._num_ahead -= 1

    def _update_after_batch(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "step" and not update_plateau_schedulers and self._num_ahead:
            self._num_ahead -= 1
        else:
            self._update.replaced(interval, update_plateau_schedulers=update_plateau_schedulers)


@dataclass(frozen=True)
class LoopBatch:
    """A batch of Lightning's loop, or a batch that this trainer brings in place of another trainer."""

    idx: int  # number of the loop's current batch
    kwargs: OrderedDict[str, Any]  # arguments of `training_step`
    num_samples: int
    number: BatchNumber | None = None  # set if trainers share the data


class CompletedBatches:
    """One trainer's complete batches that no record counts yet."""

    def __init__(self) -> None:
        self._sizes: dict[int, list[int]] = {}  # step -> samples of each batch
        self._batches: dict[int, tuple[int, LoopBatch, int]] = {}  # lease -> step, batch, epoch; see `free_batches`
        self.lost: dict[int, LoopBatch] = {}  # lease -> batch that no record will count, so that it must run again

    def add(self, lease: int, batch: LoopBatch, *, step: int, epoch: int) -> None:
        """Add a complete batch."""
        self._batches[lease] = step, batch, epoch
        self._sizes.setdefault(step, []).append(batch.num_samples)

    def num_samples(self, step: int) -> int:
        """Return the samples of this trainer's complete batches in a step."""
        return sum(self._sizes.get(step, ()))

    def num_batches(self, epoch: int) -> int:
        """Return the number of this trainer's complete batches of an epoch that no record counts yet."""
        return sum(batch_epoch == epoch for _, _, batch_epoch in self._batches.values())

    def mark_lost(self, lease: int) -> None:
        """Mark a batch to run again, because its step does not count it. Raises StepError if the batch was freed."""
        step, batch, _ = self._batches.pop(lease, (0, None, 0))
        if batch is None:
            raise StepError(
                "an earlier batch was struck from the open step, because its gradients on the servers were lost and "
                "could not be computed again. Start again from a checkpoint."
            )
        self.lost[lease] = batch
        if step in self._sizes:
            self._sizes[step].remove(batch.num_samples)

    def free_batches(self) -> None:
        """Free the batches; they cannot run again after this."""
        self._batches.clear()

    def count(self, step: int) -> None:
        """Forget the batches of all steps up to `step`, whose record was counted."""
        self._sizes = {open_step: sizes for open_step, sizes in self._sizes.items() if open_step > step}
        self._batches = {lease: entry for lease, entry in self._batches.items() if entry[0] > step}


def scaling_of(trainer: Trainer) -> LossScaling | None:
    """Return a new run's loss scaling, from the Trainer or its checkpoint; None if losses are not scaled."""
    plugin = trainer.precision_plugin
    scaler: GradScaler | None = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return None
    loaded = trainer._checkpoint_connector._loaded_checkpoint  # Lightning restores the plugin only later
    state = loaded.get(type(plugin).__qualname__) or scaler.state_dict()
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval")
    return LossScaling(**{name: state[name] for name in names}, num_applied=state[_NUM_APPLIED])


class LossScale:
    """The factor that brings gradients into float16's range. Trainers multiply losses by it; servers divide by it."""

    def __init__(self, scaler: GradScaler | None, run_scaling: Callable[[], LossScaling | None] = lambda: None) -> None:
        self._scaler = scaler  # the precision plugin's; None if the plugin never scales
        self._run_scaling = run_scaling  # returns the scaling of all trainers; None if this trainer's scale is its own

    @property
    def adapts(self) -> bool:
        """Return whether the scale changes with the steps."""
        return self._scaler is not None and self._scaler.is_enabled()

    def current(self) -> float:
        """Apply and return the scale of the next loss. Raises StepError if it is not positive and finite."""
        self._follow()
        value = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        if not 0.0 < value < math.inf:
            raise StepError(
                f"the scale of the loss must be positive and finite, but has become {value:g}, because gradients were "
                "not finite at any scale. Find the cause with `Trainer(detect_anomaly=True)`, or use `bf16-mixed`."
            )
        return value

    def update(self, *, skipped: bool) -> None:
        """Make the scaler raise or lower its scale after a step, as on one machine."""
        if self._scaler is None or self._follow():
            return
        # The scaler looks for infinities in gradients, which are on the servers. So give it a stand-in gradient.
        stand_in = torch.nn.Parameter(torch.zeros(()))
        stand_in.grad = torch.full((), math.inf if skipped else 0.0)
        self._scaler.unscale_(SGD([stand_in], lr=0.0))
        self._scaler.update()

    def _follow(self) -> bool:
        """Set the scaler to the run's scale, and return True; False if the run has none, so that the scaler decides."""
        scaling = self._run_scaling()
        if self._scaler is None or scaling is None:
            return False
        state = asdict(scaling)
        self._scaler.load_state_dict({**state, _NUM_APPLIED: state["num_applied"]})
        return True


class LoopCounters:
    """Determines by Lightning's own counters where a step ends, as far as a single trainer can know this."""

    def __init__(self, trainer: Trainer, data: SharedData, target_batch_size: int | None, *, is_lead: bool) -> None:
        self._trainer = trainer
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._data = data
        self._target_batch_size = target_batch_size
        self._is_lead = is_lead

    @property
    def steps_are_windows(self) -> bool:
        """Return whether a step is a window of gradient accumulation, so that Lightning counts its batches."""
        return self._target_batch_size is None

    @property
    def total_weight(self) -> float | None:
        """Return a step's weight: 1 for a window of equally weighted batches; None: the number of its samples."""
        return 1.0 if self.steps_are_windows else None

    def num_samples(self, batch: Any) -> int:
        """Return the samples of a batch; 1 if the number is unknown and does not matter, because steps are windows."""
        framework = tree_of(self._trainer)
        try:
            with warnings.catch_warnings():
                if self.steps_are_windows:
                    warnings.simplefilter("ignore")
                return framework.extract_batch_size(batch)
        except framework.misconfiguration as error:
            if self.steps_are_windows:
                return 1
            raise ConfigError.like(
                framework.misconfiguration,
                "with `target_batch_size`, the number of a batch's samples must be known; this "
                f"{type(batch).__name__} does not show it. Put a tensor with one row for each sample into the batch.",
            ) from error

    def is_full(self, num_samples: int) -> bool:
        """Return whether a step with this number of own samples is full, if no other trainer has batches in it."""
        return self._target_batch_size is not None and num_samples >= self._target_batch_size

    def is_due(self, num_samples: int) -> bool:
        """Return whether a step with this number of own samples ends with the current batch of Lightning's loop."""
        if self.steps_are_windows:
            # A window that the epoch's end cuts off counts as a full window, as in Lightning, because each loss was
            # divided by the full window's length.
            cut_off = self._epoch_loop._num_ready_batches_reached()
            return cut_off or self._epoch_loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches == 0
        return self.is_last_batch and num_samples > 0

    @contextmanager
    def as_one_process(self, number: BatchNumber | None) -> Iterator[None]:
        """Inside, the Trainer's counters count the batches of all trainers, as in one process."""
        if number is None:
            yield
            return
        fit_loop, progress = self._trainer.fit_loop, self._epoch_loop.batch_progress
        num_batches = self._data.num_batches()
        _, index = number  # index in the whole epoch
        with changed(fit_loop, max_batches=num_batches), changed(progress, is_last_batch=index + 1 == num_batches):
            yield

    @property
    def ends_epoch(self) -> bool:
        """Return whether the lead's epoch ends with the current batch: a checkpoint must then include its steps."""
        return self._is_lead and self._epoch_loop._num_ready_batches_reached()

    @property
    def is_last_batch(self) -> bool:
        """Return whether the lead's last epoch ends with the current batch."""
        if self._data.shares:
            return False  # only the coordinator knows the run's last batch
        return self._data.is_last_epoch(self._trainer.current_epoch) and self.ends_epoch
