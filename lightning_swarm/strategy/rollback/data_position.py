"""Where a loop is in its data, and the way back there.

An ordinary DataLoader cannot begin in the middle of an epoch. But what it gives follows from the random numbers that
it begins with: with those set, what was read before is read again and passed over.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.strategy.data import STATE, SharedLoader, own_generators

_log = logging.getLogger(__name__)

RandomState = dict[str, Any]

_WITH_SAMPLERS: Final = (DataLoader, SharedLoader)
_READS_ITSELF: Final = "_DataLoaderIterDataFetcher"  # `training_step(self, dataloader_iter)`


@dataclass(frozen=True, kw_only=True)
class BatchPosition:
    """After a batch of an epoch.

    Args:
        made: Random numbers where the epoch's iterator was made.
        first: Before its first batch was asked for.
        now: Before the next one is.
        num_batches: That it gave; None: the loaders know their place themselves.
    """

    made: RandomState
    first: RandomState
    now: RandomState
    num_batches: int | None


class DataPosition:
    """Keeps an eye on where the training loop is, until `close`.

    Args:
        trainer: Whose.
        go_on: Where its first epoch goes on; None: where Lightning says.
        on_batch: Called between two batches: all that belongs to the one before is done, the next one is not read. And
            before the first.
        on_arrival: Called before the first batch that is not passed over.
        made: Random numbers where Lightning made the first epoch's iterator, before the loop began.
    """

    def __init__(
        self,
        trainer: Trainer,
        go_on: BatchPosition | None,
        on_batch: Callable[[], None],
        on_arrival: Callable[[], None],
        *,
        made: Callable[[], RandomState | None],
    ) -> None:
        self._loop = trainer.fit_loop.epoch_loop
        self._go_on = go_on
        self._on_batch = on_batch
        self._on_arrival = on_arrival
        self._first_made = made
        self._is_first = True  # of this object's epochs
        self._generators: Sequence[torch.Generator] = ()  # that the loop's loaders were given
        self._made = self._first = random_state()
        self._num_before = 0  # batches of the epoch that this iterator did not give
        self._begin = self._loop.on_run_start
        self._end_batch = self._loop.on_advance_end
        self._reset = self._loop.reset
        self._loop.reset = self._quietly_reset  # type: ignore[method-assign]
        self._loop.on_run_start = self._begun  # type: ignore[method-assign]
        self._loop.on_advance_end = self._batch_ended  # type: ignore[method-assign]

    def close(self) -> None:
        """Leave the loop as it was."""
        for name in ("reset", "on_run_start", "on_advance_end"):
            self._loop.__dict__.pop(name, None)

    @property
    def here(self) -> BatchPosition:
        """Between two batches."""
        knows = {"combined_loader", STATE} & self._loop.trainer.fit_loop.on_save_checkpoint().keys()
        num_batches = None if knows else self._loop.batch_progress.current.ready - self._num_before
        now = random_state(() if knows else self._generators)
        return BatchPosition(made=self._made, first=self._first, now=now, num_batches=num_batches)

    def _quietly_reset(self) -> None:
        if self._go_on is None:
            self._reset()
            return
        with warnings.catch_warnings():
            # That this loader cannot go on in the middle of an epoch. But it is brought there.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")
            self._reset()

    def _begun(self, data_fetcher: Any) -> None:
        """An epoch begins, or goes on."""
        place, self._go_on = self._go_on, None
        combined = self._loop.trainer.fit_loop._combined_loader
        assert combined is not None
        self._generators = generators_of(combined.flattened)
        first_made = self._first_made()
        if place is not None:
            self._is_first = False
            self._return_to(place, data_fetcher)
            return
        iterator, made = data_fetcher.iterator, random_state(self._generators)
        self._begin(data_fetcher)
        self._made = first_made or made if data_fetcher.iterator is iterator else made
        self._first = random_state(self._generators)
        self._num_before = self._loop.batch_progress.current.ready
        if self._is_first:
            self._on_batch()
        self._is_first = False

    def _return_to(self, place: BatchPosition, data_fetcher: Any) -> None:
        self._made, self._first = place.made, place.first
        num_ready = self._loop.batch_progress.current.ready
        self._num_before = num_ready - (place.num_batches or 0)
        if place.num_batches is None or type(data_fetcher).__name__ == _READS_ITSELF:
            self._begin(data_fetcher)
        else:
            set_random_state(place.made, self._generators)
            iter(data_fetcher)
            set_random_state(place.first, self._generators)
            for _ in range(place.num_batches):
                next(data_fetcher)
            fetched, done = data_fetcher.fetched, data_fetcher.done
            self._begin(data_fetcher)
            # Lightning adds what it takes to be passed over, of a loader that began anew.
            data_fetcher.fetched = fetched + self._num_before
            data_fetcher.done = done or data_fetcher.fetched == data_fetcher.length
        # The loop is where it was, and need not look where a file may have been written.
        self._loop.restarting = False
        self._loop.trainer.fit_loop._restarting = False
        self._on_arrival()
        set_random_state(place.now, () if place.num_batches is None else self._generators)

    def _batch_ended(self, data_fetcher: Any) -> None:
        self._end_batch(data_fetcher)
        self._on_batch()


def take_back_batches(checkpoint: Mapping[str, Any], number: int) -> None:
    """Have a checkpoint's training loop go on before its last batches: they are in no update of its weights.

    Args:
        checkpoint: Lightning's.
        number: Of these batches, all of the epoch under way.
    """
    loop = checkpoint["loops"]["fit_loop"]
    if "combined_loader" in loop["state_dict"]:
        _log.warning(
            "A DataLoader that keeps its own place was read %d batches further than the weights that are saved: a run "
            "that goes on from this checkpoint passes over them. Save where an epoch ends.",
            number,
        )
        return
    progress = loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] -= number
    progress["is_last_batch"] = False


def generators_of(loaders: Iterable[object]) -> list[torch.Generator]:
    """That loaders and their samplers were given, instead of the process's."""
    return [one for loader in loaders if isinstance(loader, _WITH_SAMPLERS) for one in own_generators(loader)]


def random_state(generators: Iterable[torch.Generator] = ()) -> RandomState:
    """Of all generators that user code draws from unless told otherwise, and of some others."""
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what users draw from
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "own": [one.get_state() for one in generators],
    }


def set_random_state(state: RandomState, generators: Sequence[torch.Generator]) -> None:
    """Have them go on as they were.

    Raises:
        ConfigError: There were more of the others then, or fewer.
    """
    if len(state["own"]) != len(generators):
        raise ConfigError(
            f"the training loaders drew from {len(state['own'])} generators of their own where this loop goes on, and "
            f"have {len(generators)} here. Give every peer that may take the run over the same loaders and samplers."
        )
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002 - what users draw from
    for device, one in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):  # it may be another machine
        torch.cuda.set_rng_state(one, device)
    for generator, one in zip(generators, state["own"], strict=True):
        generator.set_state(one)
