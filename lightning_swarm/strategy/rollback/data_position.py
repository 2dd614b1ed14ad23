"""Records a training loop's position in its data, and returns a loop to such a position."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.override import Override
from lightning_swarm.strategy.data.loader import SharedLoader, own_generators
from lightning_swarm.strategy.data.shared import STATE, without_resume_warning

_log = logging.getLogger(__name__)

RandomState = dict[str, Any]

_WITH_SAMPLERS: Final = (DataLoader, SharedLoader)
_STEP_FETCHER: Final = "_DataLoaderIterDataFetcher"  # from it `training_step(self, dataloader_iter)` reads the batches


@dataclass(frozen=True, kw_only=True)
class BatchPosition:
    """A position in an epoch, after one of its batches."""

    # Random states at three times.
    at_iterator: RandomState  # when the epoch's iterator was made
    at_first_batch: RandomState  # before the epoch's first batch was read
    at_next_batch: RandomState  # before the next batch is read
    num_batches: int | None  # batches read from the iterator; None if the loaders keep their position themselves


class DataPosition:
    """Follows the training loop's position in its data until `close`. First returns the loop to a given position."""

    def __init__(
        self,
        trainer: Trainer,
        resume_at: BatchPosition | None,
        on_batch: Callable[[DataPosition], None],
        on_arrival: Callable[[], None],
        *,
        take_early_state: Callable[[], RandomState | None],
    ) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._resume_at = resume_at  # position to resume at in the first epoch; None where Lightning itself begins
        self._on_batch = on_batch  # called before the first batch, and after each batch before the next one is read
        self._on_arrival = on_arrival  # called before the first batch that is not skipped
        # Returns the random state in which Lightning made the epoch's iterator, if it did so before the loop began.
        self._take_early_state = take_early_state
        self._in_first_epoch = True  # no epoch has begun since this object was made
        self._generators: Sequence[torch.Generator] = ()  # generators of the loop's loaders
        self._at_iterator = self._at_first_batch = random_state()
        # Batches of the epoch that were read before its current iterator was made. Example: a checkpoint is loaded that
        # was saved after 5 batches. Lightning makes a new iterator, from the first batch, and this number is 5. When 8
        # batches are ready, the position is `num_batches` = 8 - 5 = 3. To return there, 3 batches of a new iterator are
        # skipped, this number is 8 - 3 = 5 again, and the fetcher has fetched 3 + 5 = 8 batches.
        self._num_before = 0
        self._overrides = (
            Override(self._loop, "on_run_start", self._epoch_begins),
            Override(self._loop, "on_advance_end", self._batch_ended),
            Override(self._loop, "reset", self._quietly_reset),
        )
        self._begin, self._end_batch, self._reset = (override.replaced for override in self._overrides)

    def close(self) -> None:
        """Restore Lightning's loop."""
        for override in self._overrides:
            override.remove()

    @property
    def position(self) -> BatchPosition:
        """Return the position between two batches."""
        # Loaders with an entry in the loop's state save their own position.
        save_position = {"combined_loader", STATE} & self._loop.trainer.fit_loop.on_save_checkpoint().keys()
        num_batches = None if save_position else self._loop.batch_progress.current.ready - self._num_before
        return BatchPosition(
            at_iterator=self._at_iterator,
            at_first_batch=self._at_first_batch,
            at_next_batch=random_state(() if save_position else self._generators),
            num_batches=num_batches,
        )

    def _quietly_reset(self) -> None:
        """Reset the loop without Lightning's warning, if the position is about to be restored."""
        with nullcontext() if self._resume_at is None else without_resume_warning():
            self._reset()

    def _epoch_begins(self, data_fetcher: Any) -> None:
        """Record the random states when an epoch begins, or return to the position to resume at."""
        position, self._resume_at = self._resume_at, None
        combined = self._loop.trainer.fit_loop._combined_loader
        assert combined is not None
        self._generators = generators_of(combined.flattened)
        state_before_loop = self._take_early_state()
        if position is not None:
            self._in_first_epoch = False
            self._return_to(position, data_fetcher)
            return
        iterator, state = data_fetcher.iterator, random_state(self._generators)
        self._begin(data_fetcher)
        # If Lightning made the iterator before the loop began, the iterator has the random state of that time.
        made_before_loop = data_fetcher.iterator is iterator
        self._at_iterator = (state_before_loop or state) if made_before_loop else state
        self._at_first_batch = random_state(self._generators)
        self._num_before = self._loop.batch_progress.current.ready
        if self._in_first_epoch:
            self._on_batch(self)
        self._in_first_epoch = False

    def _return_to(self, position: BatchPosition, data_fetcher: Any) -> None:
        """Begin the epoch again, and skip its batches before a position."""
        self._at_iterator, self._at_first_batch = position.at_iterator, position.at_first_batch
        num_ready = self._loop.batch_progress.current.ready
        self._num_before = num_ready - (position.num_batches or 0)
        if position.num_batches is None or type(data_fetcher).__name__ == _STEP_FETCHER:
            self._begin(data_fetcher)
        else:
            # A loader's batches depend only on the random state at its start, so read them again and skip them.
            set_random_state(position.at_iterator, self._generators)
            iter(data_fetcher)
            set_random_state(position.at_first_batch, self._generators)
            for _ in range(position.num_batches):
                next(data_fetcher)
            fetched, done = data_fetcher.fetched, data_fetcher.done
            self._begin(data_fetcher)
            # `_begin` added all ready batches to `fetched`, which included the skipped batches already.
            data_fetcher.fetched = fetched + self._num_before
            data_fetcher.done = done or data_fetcher.fetched == data_fetcher.length
        # The loop is at its exact position, so Lightning must not adjust it, as it does after loading a file.
        self._loop.restarting = False
        self._loop.trainer.fit_loop._restarting = False
        self._on_arrival()
        set_random_state(position.at_next_batch, () if position.num_batches is None else self._generators)

    def _batch_ended(self, data_fetcher: Any) -> None:
        self._end_batch(data_fetcher)
        self._on_batch(self)


def take_back_batches(checkpoint: Mapping[str, Any], number: int) -> None:
    """Move a checkpoint's loop back by its last `number` batches, which its weights do not include yet."""
    loop = checkpoint["loops"]["fit_loop"]
    if "combined_loader" in loop["state_dict"]:
        _log.warning(
            "A DataLoader that saves its own position is %d batches ahead of the saved weights, so a run that resumes "
            "from this checkpoint skips these batches. Save at the end of an epoch.",
            number,
        )
        return
    progress = loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= number
    progress["is_last_batch"] = False


def generators_of(loaders: Iterable[object]) -> list[torch.Generator]:
    """Return the generators that loaders and their samplers draw from in place of the process's own."""
    return [
        generator for loader in loaders if isinstance(loader, _WITH_SAMPLERS) for generator in own_generators(loader)
    ]


def random_state(generators: Iterable[torch.Generator] = ()) -> RandomState:
    """Return the state of all default generators, and of the given `generators`."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - user code draws from it
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "own": [generator.get_state() for generator in generators],
    }


def set_random_state(state: RandomState, generators: Sequence[torch.Generator]) -> None:
    """Set all generators to a state. Raises ConfigError if the number of the loaders' generators differs."""
    if len(state["own"]) != len(generators):
        raise ConfigError(
            f"the training loaders must have as many generators of their own as in the run's former lead, which had "
            f"{len(state['own'])}, got {len(generators)}. Give every peer that may take over the run the same loaders "
            "and samplers."
        )
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - user code draws from it
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):  # another machine may have fewer
        torch.cuda.set_rng_state(cuda_state, device)
    for generator, own_state in zip(generators, state["own"], strict=True):
        generator.set_state(own_state)
