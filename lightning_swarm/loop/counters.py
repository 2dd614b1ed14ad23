"""Where a step ends by Lightning's own counters, as far as one trainer can say."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_swarm.data import SharedData


class Counters:
    """Of one trainer's loop.

    Args:
        trainer: Lightning's.
        data: That trainers share, if they do.
        target_batch_size: Samples of a step; None: Lightning's own arithmetic.
        is_lead: Whether the run follows this loop.
    """

    def __init__(self, trainer: Trainer, data: SharedData, target_batch_size: int | None, *, is_lead: bool) -> None:
        self._trainer = trainer
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._data = data
        self._target_batch_size = target_batch_size
        self._is_lead = is_lead

    @property
    def by_windows(self) -> bool:
        """Whether a step is a window of accumulation."""
        return self._target_batch_size is None

    @property
    def total_weight(self) -> float | None:
        """Of a step: a full window's, of batches that weigh equally; None: it adds up."""
        return 1.0 if self.by_windows else None

    def begins_window(self, batch_idx: int) -> bool:
        """Whether Lightning's accumulation begins with this batch."""
        return batch_idx % self._trainer.accumulate_grad_batches == 0

    def is_full(self, num_samples: int) -> bool:
        """Whether a step with so many of this trainer's samples is, if no other trainer has batches in it."""
        return self._target_batch_size is not None and num_samples >= self._target_batch_size

    def is_due(self, num_samples: int) -> bool:
        """Whether the step ends here whatever was granted: where Lightning's would, or with the last batch.

        Args:
            num_samples: Of this trainer's in it.
        """
        if self.by_windows:
            # A window that is cut off by the epoch's end counts as a full one, as Lightning has it: each loss was
            # divided by the window's length already.
            cut_off = self._epoch_loop._num_ready_batches_reached()
            return cut_off or self._epoch_loop.batch_progress.current.ready % self._trainer.accumulate_grad_batches == 0
        return self.is_last_batch and num_samples > 0

    @property
    def ends_epoch(self) -> bool:
        """Whether the lead's epoch ends here: what follows it, a checkpoint say, shall miss no step of it."""
        return self._is_lead and self._epoch_loop._num_ready_batches_reached()

    @property
    def is_last_batch(self) -> bool:
        """Whether the lead's last epoch ends here."""
        if self._data.shares:
            return False  # who coordinates knows which batch is the run's last one
        max_epochs = self._trainer.fit_loop.max_epochs
        last_epoch = max_epochs not in (None, -1) and self._trainer.current_epoch + 1 >= max_epochs
        return last_epoch and self.ends_epoch
