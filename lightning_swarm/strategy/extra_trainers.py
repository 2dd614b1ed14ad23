"""Several trainers of one run, in Lightning's terms: their ranks, and the lead's loop that decides for the others."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, SequentialSampler
from typing_extensions import override

from lightning_swarm.client.session import Session
from lightning_swarm.core.override import Override
from lightning_swarm.peer import process
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import RunView
from lightning_swarm.strategy.collectives import asks_as_user, heard, refuse_collective, said
from lightning_swarm.strategy.data.loader import divides_itself, is_reading, part_of, reading_data
from lightning_swarm.strategy.framework import callbacks_named, framework_of
from lightning_swarm.strategy.launcher import SwarmLauncher

# They decide when the run ends or what is kept of it, by what only the lead knows.
_LEAD_CALLBACKS = ("Checkpoint", "EarlyStopping", "Timer")


if TYPE_CHECKING:
    _Strategy = Strategy
else:
    _Strategy = object  # `written_once` puts `SwarmStrategy` before the Strategy of either import tree


class RankHooks(_Strategy):
    """The part of `SwarmStrategy` that knows this process among others, none of which waits for another."""

    # What one process would answer is answered at once. That is what Lightning's own callers need, for the lead decides
    # and saves alone. User code gets the lead's values before the first batch; what would need the others' is refused.

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Lightning's accelerator connector sets these two.
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self.peer: Peer | None = None
        self.num_trainers = 1  # that are started together, on this machine
        self.divides_data = True  # among them; else the user's code does
        self._num_collectives = 0  # that user code has asked for in this call of the Trainer
        self._has_begun = False  # its first batch
        self._session: Session | None = None
        self._is_shared = False  # others train in the run, or may come to
        self._joined: RunView | None = None  # the run under way in which this process is one more trainer
        self._in_batches = False  # Lightning runs batches, and does not make its loaders

    @property
    def _own_module(self) -> LightningModule:
        """The module, once Lightning has connected it."""
        module = self.lightning_module
        assert module is not None
        return module

    @property
    def _own_peer(self) -> Peer:
        """This process's peer, once it was started."""
        assert self.peer is not None
        return self.peer

    @property
    def _devices(self) -> list[torch.device]:
        return self.parallel_devices or [torch.device("cpu")]

    @property
    @override
    def root_device(self) -> torch.device:
        # A child serves at the script's first use of a swarm, which may have fewer devices than the one it is for.
        return self._devices[self.local_rank % len(self._devices)]

    @property
    def _swarm_launcher(self) -> SwarmLauncher | None:
        """The launcher that starts this machine's peers. None: they are all in this process."""
        return self._launcher if isinstance(self._launcher, SwarmLauncher) else None

    @property
    def local_rank(self) -> int:
        """The number of this process among this machine's peers."""
        return self._swarm_launcher.local_rank if self._swarm_launcher is not None else 0

    def waits_for_fit(self, trainer: Trainer) -> bool:
        """Tell whether this process was started to train beside the lead, and only evaluates as yet."""
        is_child = self.local_rank > 0 and process.is_trainer()
        return is_child and self.peer is None and trainer.state.fn != TrainerFn.FITTING

    @contextmanager
    def evaluating_beside(self, trainer: Trainer) -> Iterator[None]:
        """Inside, an evaluation writes nothing: the lead, which does the same, writes."""
        own: Any = trainer  # whose attributes Lightning sets in its connectors
        callbacks, writers = list(own.callbacks), callbacks_named("BasePredictionWriter")
        own.callbacks[:] = [callback for callback in callbacks if not isinstance(callback, writers)]
        try:
            yield
        finally:
            own.callbacks[:] = callbacks

    @property
    def global_rank(self) -> int:
        """The local rank; in a process that joined a run under way, behind all who trained before.

        Code that makes or reads data has rank 0 of 1, as in one process, where the swarm divides it among trainers.
        """
        if self._joined is not None:
            return self.local_rank + len(self._joined.seats.trainers)
        return 0 if self.divides_data and is_reading() else self.local_rank

    @property
    def world_size(self) -> int:
        """One, as in one process; to code that itself divides data among the trainers, their number."""
        return self.num_trainers if not self.divides_data and is_reading() else 1

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.local_rank == 0 and self._joined is None

    @property
    def is_distributed(self) -> bool:
        """Lightning asks whether `sync_dist=True` means something. The lead alone validates."""
        module = self.lightning_module
        # Where it makes loaders it asks, too, and would share the data in a way of its own.
        return self._in_batches and self._is_shared and module is not None and bool(module.trainer.training)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # In a batch: the others are in batches of their own.
        if self._session is not None and self._session.is_shared and self._session.pipeline.batch is not None:
            refuse_collective("reduce")
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self.is_distributed:
            refuse_collective("all_gather")
        return tensor

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The lead's value, at all trainers that one program started, where user code asks; else the process's own."""
        return self._of_lead(obj, "broadcast") if asks_as_user() else obj

    @override
    def barrier(self, name: str | None = None) -> None:
        """Where user code asks, a trainer waits until the lead, which waits for nobody, has come as far."""
        if asks_as_user():
            self._of_lead(None, "barrier")
            return
        if name == "train_dataloader()":
            self._in_batches = False
        launcher = self._swarm_launcher
        starts_others = launcher is not None and launcher.starts_others
        if name == "pre_setup" and (self.num_trainers > 1 or starts_others):
            # What `prepare_data` leaves on this machine is there before anyone looks for it.
            if starts_others or self.is_global_zero:
                self._own_peer.lead.say(self._launch_id, "prepare_data")
            else:
                self._own_peer.follower.await_said(self._launch_id, "prepare_data")

    @property
    def _launch_id(self) -> str:
        return "" if self._swarm_launcher is None else self._swarm_launcher.launch_id

    def _of_lead(self, value: Any, name: str) -> Any:
        """The lead's value, of the call of this number: trainers that one program started make the same calls."""
        trainer = self._own_module.trainer
        is_leads = trainer.sanity_checking or trainer.validating or self.waits_for_fit(trainer)  # nobody else is there
        if is_leads or (self.num_trainers == 1 and self._joined is None):
            return value
        if self._has_begun or self._joined is not None:
            if name == "broadcast":
                refuse_collective(name)
            return value
        self._num_collectives += 1
        what = f"{name} {self._num_collectives}"
        if self.is_global_zero:
            self._own_peer.lead.say(self._launch_id, what, said(value, name))
            return value
        return heard(self._own_peer.follower.await_said(self._launch_id, what), name)


class RankOverride:
    """Sets the rank by which Lightning decides which process logs, and puts the process's own rank back."""

    def __init__(self) -> None:
        self._before: int | None = None

    def set(self, rank: int) -> None:
        """Have this process log if its rank is zero by now."""
        ranks = vars(rank_zero_only)
        if self._before is None:
            self._before = ranks["rank"]
        ranks["rank"] = rank

    def restore(self) -> None:
        """Put the process's own rank back."""
        if self._before is not None:
            vars(rank_zero_only)["rank"], self._before = self._before, None


def follow(trainer: Trainer) -> Callable[[], None]:
    """Leave validation, files and decisions to the lead. The returned function undoes this."""
    # Loggers and progress bars are off beyond rank zero anyway.
    own: Any = trainer  # whose attributes Lightning sets in its connectors
    fit_loop, bar = trainer.fit_loop, own.progress_bar_callback
    limits = own.limit_val_batches, own.num_sanity_val_steps
    least = fit_loop.min_epochs, fit_loop.epoch_loop.min_steps
    callbacks = list(own.callbacks)
    # By which a bar knows whether it shows: a user's own need not have a method that has it show again.
    switches = {name: value for name, value in vars(bar).items() if isinstance(value, bool)} if bar else {}
    own.limit_val_batches, own.num_sanity_val_steps = 0, 0
    leave_decisions(trainer)

    def put_back() -> None:
        own.limit_val_batches, own.num_sanity_val_steps = limits
        fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = least
        own.callbacks[:] = [*callbacks, *(callback for callback in own.callbacks if callback not in callbacks)]
        if bar is not None:
            vars(bar).update(switches)

    return put_back


def leave_decisions(trainer: Trainer) -> None:
    """Remove callbacks that decide, for the lead decides. Those that a module brings come anew with each fit."""
    own: Any = trainer
    own.callbacks[:] = [
        callback for callback in own.callbacks if not isinstance(callback, callbacks_named(*_LEAD_CALLBACKS))
    ]


def follow_schedule(trainer: Trainer) -> None:
    """Let the lead end the run, and keep only the schedulers that count its steps: records bring the others' values."""
    fit_loop = trainer.fit_loop
    fit_loop.min_epochs, fit_loop.epoch_loop.min_steps = 0, None
    trainer.strategy.lr_scheduler_configs = [
        config
        for config in trainer.strategy.lr_scheduler_configs
        if config.interval == "step" and not config.reduce_on_plateau
    ]


def begin_at(trainer: Trainer, *, step: int, epoch: int) -> None:
    """Set the counters of a fit that is about to begin to where the run is, and the schedulers of its steps."""
    fit_loop = trainer.fit_loop
    for progress in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        vars(progress).update(dict.fromkeys(("ready", "started", "processed", "completed"), epoch))
    epoch_loop = fit_loop.epoch_loop
    optimizer_step = epoch_loop.automatic_optimization.optim_progress.optimizer.step
    optimizer_step.total.ready = optimizer_step.total.completed = step
    epoch_loop._batches_that_stepped = step
    for optimizer in trainer.optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask; it never steps here
    for config in trainer.lr_scheduler_configs:  # `follow_schedule` has left those that count steps
        for _ in range(step // config.frequency):
            config.scheduler.step()  # type: ignore[call-arg]  # which is none on a plateau


def reseed(rank: int) -> None:
    """Draw other random numbers than the trainers that were started with the same seed."""
    seed = (torch.initial_seed() + rank) % (1 << 63)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - what users draw from
    torch.manual_seed(seed)


def settle_dtype(precision: Precision) -> Callable[[], None]:
    """Keep the default dtype of `precision` until what is returned is called."""
    # A server's thread and the trainer's would each set the process's dtype and put back what they found: the other's.
    before = torch.get_default_dtype()
    with precision.forward_context():
        wanted = torch.get_default_dtype()
    torch.set_default_dtype(wanted)
    return lambda: torch.set_default_dtype(before)


def watch_data_hooks(trainer: Trainer) -> Callable[[], None]:
    """Have hooks that make data run as such. The returned function undoes this."""
    module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]  # set in its connector
    hooks = [(data, "setup"), (data, "train_dataloader"), (module, "train_dataloader")]
    is_overridden = framework_of(trainer).is_overridden
    found = [
        Override(owner, name, partial(_read_by, getattr(owner, name)))
        for owner, name in hooks
        if owner is not None and is_overridden(name, owner)
    ]

    def put_back() -> None:
        for one in found:
            one.remove()

    return put_back


def _read_by(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with reading_data():
        return hook(*args, **kwargs)


def share(trainer: Trainer, dataloader: Any, *, num_trainers: int, joins: bool = False) -> Any:
    """The part of its data that this trainer reads: what Lightning gives the process of that rank in `ddp`."""
    if num_trainers == 1 and not joins:
        return dataloader
    # What has no parts, and any data of a trainer that joins a run under way, is read whole by every trainer. Then they
    # must draw at random, and a warning says so if they do not seem to.
    rank = cast("RankHooks", trainer.strategy).local_rank  # which is no other one where data is read
    parts = not joins and trainer._accelerator_connector.use_distributed_sampler
    iterable = not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset)
    if iterable and isinstance(dataloader, DataLoader) and parts:
        return part_of(dataloader, rank, num_trainers)
    if iterable:
        remedy = "Let it begin elsewhere for each `trainer.global_rank`, or draw at random"
        if isinstance(dataloader, DataLoader) and not isinstance(dataloader.dataset, IterDataPipe):
            dataloader = part_of(dataloader, 0, 1)
            if not joins:
                remedy = "Let it divide itself by `trainer.global_rank` and `trainer.world_size`, or draw at random"
    elif divides_itself(dataloader.sampler):
        return dataloader
    elif parts:
        framework = framework_of(trainer)
        sampler = framework.distributed_sampler(
            dataloader,
            framework.is_shuffled(dataloader),
            trainer.overfit_batches,  # type: ignore[attr-defined]  # Lightning sets it in its connector
            num_replicas=num_trainers,
            rank=rank,
        )
        return framework.with_sampler(dataloader, sampler)
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
