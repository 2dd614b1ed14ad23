"""Further trainers of a run: followers of the lead, their counters and random numbers, and their parts of the data."""

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

# Callbacks that end the run or keep its files, by values that only the lead knows.
_LEAD_CALLBACKS = ("Checkpoint", "EarlyStopping", "Timer")


def become_follower(trainer: Trainer) -> Callable[[], None]:
    """Leave validation, files and decisions to the lead. The returned function undoes this."""
    # Loggers and progress bars are off beyond rank zero anyway.
    own: Any = trainer  # untyped: Lightning sets its attributes in its connectors
    fit_loop, bar = trainer.fit_loop, own.progress_bar_callback
    limits = own.limit_val_batches, own.num_sanity_val_steps
    least = fit_loop.min_epochs, fit_loop.epoch_loop.min_steps
    callbacks = list(own.callbacks)
    # Flags by which a bar knows whether it shows. A user's own bar may lack a method that enables it again.
    switches = {name: value for name, value in vars(bar).items() if isinstance(value, bool)} if bar else {}
    own.limit_val_batches, own.num_sanity_val_steps = 0, 0
    remove_deciding_callbacks(trainer)

    def put_back() -> None:
        own.limit_val_batches, own.num_sanity_val_steps = limits
        fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = least
        own.callbacks[:] = [*callbacks, *(callback for callback in own.callbacks if callback not in callbacks)]
        if bar is not None:
            vars(bar).update(switches)

    return put_back


def remove_deciding_callbacks(trainer: Trainer) -> None:
    """Remove callbacks that decide, because the lead decides. A module adds its own callbacks anew in each fit."""
    own: Any = trainer
    own.callbacks[:] = [
        callback for callback in own.callbacks if not isinstance(callback, callbacks_named(*_LEAD_CALLBACKS))
    ]


def drop_lead_schedulers(trainer: Trainer) -> None:
    """Let the lead end the run. Keep only schedulers that count steps; records bring the values of the others."""
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
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask; it never steps here
    for config in trainer.lr_scheduler_configs:  # `drop_lead_schedulers` has kept only schedulers that count steps
        for _ in range(step // config.frequency):
            config.scheduler.step()  # type: ignore[call-arg]  # no plateau scheduler is left


def reseed(rank: int) -> None:
    """Reseed all generators, so that trainers that were started with the same seed draw different numbers."""
    seed = (torch.initial_seed() + rank) % (1 << 63)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - user code draws from it
    torch.manual_seed(seed)


def settle_dtype(precision: Precision) -> Callable[[], None]:
    """Set torch's default dtype to that of `precision`, until the returned function restores the former one."""
    # A server's thread and the trainer's would each set the process's dtype, and then restore the other thread's.
    before = torch.get_default_dtype()
    with precision.forward_context():
        wanted = torch.get_default_dtype()
    torch.set_default_dtype(wanted)
    return lambda: torch.set_default_dtype(before)


def share(trainer: Trainer, dataloader: Any, *, num_trainers: int, joins: bool = False) -> Any:
    """Return a loader of the part of the data that this trainer reads: the same as its rank's part in `ddp`."""
    if num_trainers == 1 and not joins:
        return dataloader
    # Every trainer reads all of the data if it cannot be divided, or if this trainer joins a run under way. Then the
    # trainers must draw at random; a warning follows if they do not seem to.
    rank = cast("StrategyBase", trainer.strategy).local_rank  # `global_rank` may be 0 while data is read
    parts = not joins and trainer._accelerator_connector.use_distributed_sampler
    iterable = not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset)
    if iterable and isinstance(dataloader, DataLoader) and parts:
        return part_of(dataloader, rank, num_trainers)
    if iterable:
        remedy = "Let it begin elsewhere for each `trainer.global_rank`, or draw at random"
        if isinstance(dataloader, DataLoader) and not isinstance(dataloader.dataset, IterDataPipe):
            dataloader = part_of(dataloader, 0, 1)  # all of it, read inside `reading_data` (see `world_size`)
            if not joins:
                remedy = "Let it divide itself by `trainer.global_rank` and `trainer.world_size`, or draw at random"
    elif divides_itself(dataloader.sampler):
        return dataloader
    elif parts:
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
    who = "This trainer, which comes to a run under way," if joins else "Every trainer of the run"
    warn = warnings.warn if joins else rank_zero_warn  # its rank is never zero
    warn(
        f"{who} reads all of its {type(dataloader).__name__}, and as far as can be seen in the same order as the "
        f"others: then each sample counts once for every trainer. {remedy}.",
        stacklevel=2,
    )
    return dataloader
