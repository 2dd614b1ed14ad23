"""Learning-rate schedulers that follow records: Lightning moves them once a batch, in which more of these may come."""

from __future__ import annotations

from functools import partial

from lightning.pytorch import Trainer
from torch.optim import Optimizer


class Schedulers:
    """Of one Trainer, from `take_over` on."""

    def __init__(self, trainer: Trainer) -> None:
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._num_moved = 0  # how often they were moved for records that are not counted yet

    def take_over(self) -> None:
        """Have Lightning's loop not move them once more where they were moved for a record that is still to come."""
        self._update = partial(type(self._epoch_loop).update_lr_schedulers, self._epoch_loop)
        self._epoch_loop.update_lr_schedulers = self._update_after_batch  # type: ignore[method-assign]

    def go_back(self) -> None:
        """The run goes on from other weights."""
        self._num_moved = 0

    def move(self, optimizer: Optimizer, num_records: int) -> None:
        """Have them be where so many records that are not counted yet bring them."""
        while self._num_moved < num_records:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # they ask whether it stepped; it did, elsewhere
            self._epoch_loop._update_learning_rates(interval="step", update_plateau_schedulers=False)
            self._num_moved += 1

    def count(self, optimizer: Optimizer, *, is_first: bool) -> None:
        """A record is counted; for the first one in a batch Lightning moves them."""
        if not is_first:
            self.move(optimizer, 1)
            self._num_moved -= 1

    def _update_after_batch(self, interval: str, update_plateau_schedulers: bool) -> None:
        """What Lightning calls after a batch."""
        if interval == "step" and not update_plateau_schedulers and self._num_moved:
            self._num_moved -= 1
        else:
            self._update(interval, update_plateau_schedulers=update_plateau_schedulers)
