"""Adapts Lightning's loop to runs of several trainers: callbacks, counters, random numbers and parts of the data."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, SequentialSampler

from lightning_swarm.strategy.base import StrategyBase
from lightning_swarm.strategy.data.loader import divides_itself, part_of
from lightning_swarm.strategy.framework import callbacks_named, tree_of

# Callbacks that end the run or write its files, by values that only the lead has.
_LEAD_CALLBACKS = ("Checkpoint", "EarlyStopping", "Timer")


def become_follower(trainer: Trainer) -> Callable[[], None]:
    """Turn off a Trainer's validation, files and decisions, which are the lead's. The returned function undoes this."""
    # Lightning itself turns off loggers and progress bars on ranks other than zero.
    untyped: Any = trainer  # Lightning sets its attributes in its connectors
    fit_loop, bar = trainer.fit_loop, untyped.progress_bar_callback
    validation = untyped.limit_val_batches, untyped.num_sanity_val_steps
    minima = fit_loop.min_epochs, fit_loop.epoch_loop.min_steps  # `leave_end_and_schedulers_to_lead` changes them
    callbacks = list(untyped.callbacks)
    # Lightning turns off flags of a progress bar. A user's own bar may lack a method that turns them on again.
    flags = {name: value for name, value in vars(bar).items() if isinstance(value, bool)} if bar else {}
    untyped.limit_val_batches, untyped.num_sanity_val_steps = 0, 0
    remove_deciding_callbacks(trainer)

    def restore() -> None:
        untyped.limit_val_batches, untyped.num_sanity_val_steps = validation
        fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = minima
        added = [callback for callback in untyped.callbacks if callback not in callbacks]
        untyped.callbacks[:] = [*callbacks, *added]
        if bar is not None:
            vars(bar).update(flags)

    return restore


def remove_deciding_callbacks(trainer: Trainer) -> None:
    """Remove callbacks that end a run or write files. Each fit repeats this, because the module adds its own again."""
    untyped: Any = trainer
    lead_callbacks = callbacks_named(*_LEAD_CALLBACKS)
    untyped.callbacks[:] = [callback for callback in untyped.callbacks if not isinstance(callback, lead_callbacks)]


def leave_end_and_schedulers_to_lead(trainer: Trainer) -> None:
    """Let the lead end the run, and step all schedulers except those that count steps; records bring their values."""
    fit_loop = trainer.fit_loop
    fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = 0, None
    trainer.strategy.lr_scheduler_configs = [
        config
        for config in trainer.strategy.lr_scheduler_configs
        if config.interval == "step" and not config.reduce_on_plateau
    ]


def begin_at(trainer: Trainer, *, step: int, epoch: int) -> None:
    """Set the counters and schedulers of a fit that is about to begin to the run's step and epoch."""
    fit_loop = trainer.fit_loop
    for progress in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        vars(progress).update(dict.fromkeys(("ready", "started", "processed", "completed"), epoch))
    epoch_loop = fit_loop.epoch_loop
    optimizer_step = epoch_loop.automatic_optimization.optim_progress.optimizer.step
    optimizer_step.total.ready = optimizer_step.total.completed = step
    epoch_loop._batches_that_stepped = step
    for optimizer in trainer.optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check this, but servers step
    for config in trainer.lr_scheduler_configs:  # only schedulers that count steps are left
        for _ in range(step // config.frequency):
            config.scheduler.step()  # type: ignore[call-arg]  # no plateau scheduler is left


def reseed(rank: int) -> None:
    """Reseed all generators, so that trainers that were started with the same seed draw different numbers."""
    seed = (torch.initial_seed() + rank) % (1 << 63)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - user code draws from it
    torch.manual_seed(seed)


def set_default_dtype(precision: Precision) -> Callable[[], None]:
    """Set torch's default dtype to the dtype of `precision`. The returned function restores the former dtype."""
    # If `precision` set the process's dtype for each forward, the threads of a server and of the trainer would restore
    # each other's values.
    former = torch.get_default_dtype()
    with precision.forward_context():
        dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    return lambda: torch.set_default_dtype(former)


def share(trainer: Trainer, dataloader: Any, *, num_trainers: int, joins: bool = False) -> Any:
    """Return a loader of this trainer's part, its rank's in `ddp`; warn if all trainers would read all in one order."""
    if num_trainers == 1 and not joins:
        return dataloader
    # If the data cannot be divided, or this trainer joins a run under way, every trainer reads all of it. This is right
    # only if the trainers draw at random; a branch that sets `remedy` leads to the warning that they may not.
    rank = cast("StrategyBase", trainer.strategy).local_rank  # `global_rank` may be 0 while data is read
    divides = not joins and trainer._accelerator_connector.use_distributed_sampler
    is_iterable = not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset)
    if is_iterable and isinstance(dataloader, DataLoader) and divides:
        return part_of(dataloader, rank, num_trainers)
    if is_iterable:
        remedy = "Let it begin at another sample for each `trainer.global_rank`, or draw at random"
        if isinstance(dataloader, DataLoader) and not isinstance(dataloader.dataset, IterDataPipe):
            dataloader = part_of(dataloader, 0, 1)  # the only part, read inside `reading_data` (see `world_size`)
            if not joins:
                remedy = "Let it divide itself by `trainer.global_rank` and `trainer.world_size`, or draw at random"
    elif divides_itself(dataloader.sampler):
        return dataloader
    elif divides:
        framework = tree_of(trainer)
        sampler = framework.make_sampler(
            dataloader,
            framework.is_shuffled(dataloader),
            trainer.overfit_batches,  # type: ignore[attr-defined]  # Lightning sets it in its connector
            num_replicas=num_trainers,
            rank=rank,
        )
        return framework.make_loader(dataloader, sampler)
    elif isinstance(dataloader.sampler, SequentialSampler):
        remedy = "Shuffle" if joins else "Leave `use_distributed_sampler` out, or shuffle"
    else:
        return dataloader
    subject = "This trainer, which joins a run under way," if joins else "Every trainer of the run"
    warn = warnings.warn if joins else rank_zero_warn  # the rank of a joining trainer is never zero
    warn(
        f"{subject} reads all of its {type(dataloader).__name__}, apparently in the same order as the others, so that "
        f"each sample counts once for every trainer. {remedy}.",
        stacklevel=2,
    )
    return dataloader
