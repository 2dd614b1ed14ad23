"""Several trainers of one run: their ranks and collectives in Lightning, their parts of the data, and followers.

`RankHooks` is the base of `SwarmStrategy`, and has the state that the other modules of the strategy share.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, SequentialSampler
from typing_extensions import override

from lightning_swarm.model.deferred_init import InitialWeights
from lightning_swarm.model.partition import defines_stages
from lightning_swarm.peer import process
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import RunView, StageManifest
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.collectives import asks_as_user, decode_shared, encode_shared, refuse_collective
from lightning_swarm.strategy.data.loader import divides_itself, is_reading, part_of
from lightning_swarm.strategy.data.shared import SharedData
from lightning_swarm.strategy.framework import ImportTree, callbacks_named, tree_of
from lightning_swarm.strategy.run import SwarmRun
from lightning_swarm.strategy.weight_sync import ModuleWeights

# Callbacks that end the run or keep its files, by values that only the lead knows.
_LEAD_CALLBACKS = ("Checkpoint", "EarlyStopping", "Timer")


if TYPE_CHECKING:
    _Strategy = Strategy
else:
    _Strategy = object  # `written_once` puts `SwarmStrategy` before the Strategy of either import tree


class MachineLauncher(_Launcher):
    """The part of the launcher with this process's number among this machine's peers."""

    def __init__(self, num_peers: int) -> None:
        super().__init__()
        self._num_peers = num_peers  # on this machine, this process included
        self.local_rank = process.local_rank()  # this process's number among this machine's peers
        self.launch_id = process.launch_id()  # id of the newest peers started together; a run's id may be reused

    @property
    def starts_others(self) -> bool:
        """Return whether this process starts further peers of its machine."""
        return self._num_peers > 1 and self.local_rank == 0


class RankHooks(_Strategy):
    """The base of `SwarmStrategy` with the state that other modules share: the module, the run, ranks, collectives."""

    # Lightning's own collectives return at once, as in one process, because the lead alone decides and saves. Before
    # the first batch, user code gets the lead's values: other trainers wait for the lead, which never waits.
    # Collectives that need other trainers' values are refused.

    framework: ClassVar[ImportTree]
    config: SwarmConfig

    def __init__(self, *args: Any) -> None:
        self._compiled: dict[str, Any] = {}  # attributes of a compiled module that replace its methods
        super().__init__(*args)
        # Lightning's accelerator connector sets these two.
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self.peer: Peer | None = None
        self.initial_weights = InitialWeights()  # makes weights that the module does not hold
        self.ranges: Sequence[range] = ()  # the blocks of each stage, once the module is set up
        self.inherited_stages: Sequence[StageManifest] = ()  # the cut of a run that this process took over
        self.total_steps: int | None = None  # steps of the run, while a peer without data makes its optimizer
        self.has_read_data = False  # a peer that serves has read the data to build the model
        self.data: SharedData | None = None  # of the current run, or of the run that is about to begin
        self.run: SwarmRun | None = None  # the run under way
        self.weights: ModuleWeights | None = None  # the lead's, of the current run or the last run
        self.joined: RunView | None = None  # the run that this process joined as a further trainer
        self.is_shared = False  # the run has, or may get, other trainers
        self.num_trainers = 1  # trainers that are started together on this machine
        self.divides_data = True  # the strategy divides the data among them; else user code does
        self._num_collectives = 0  # user code's collectives in this call of the Trainer
        self._has_begun = False  # the first batch has begun
        self._in_batches = False  # Lightning is running batches, not making loaders
        self._own_rank: int | None = None  # former `rank_zero_only.rank`, while a run has replaced it

    @property
    def own_module(self) -> LightningModule:
        """Return the module, once Lightning has connected it."""
        module = self.lightning_module
        assert module is not None
        return module

    @property
    def compiler(self) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
        """Return the function that compiles stages, if the module was compiled."""
        context = self._compiled.get("_compiler_ctx")
        return None if context is None else context["dynamo_ctx"]

    @property
    def is_plain(self) -> bool:
        """Return whether no other peer takes part, so that Lightning's own loop trains the whole module."""
        module = self.lightning_module
        return self.config.is_for_one(self.num_devices) and module is not None and not defines_stages(module)

    @property
    def own_peer(self) -> Peer:
        """Return this process's peer, once it was started."""
        assert self.peer is not None
        return self.peer

    @property
    def _devices(self) -> list[torch.device]:
        return self.parallel_devices or [torch.device("cpu")]

    @property
    def num_devices(self) -> int:
        """Return the number of this machine's peers: one for each device."""
        return len(self._devices)

    @property
    @override
    def root_device(self) -> torch.device:
        # A child serves at the script's first swarm, which may have fewer devices than the swarm that started it.
        return self._devices[self.local_rank % len(self._devices)]

    @property
    def local_rank(self) -> int:
        """Return the number of this process among this machine's peers."""
        return self._launcher.local_rank if isinstance(self._launcher, MachineLauncher) else 0

    @property
    def launch_id(self) -> str:
        """Return the id of this machine's newest peers; empty if they are all in this process."""
        return self._launcher.launch_id if isinstance(self._launcher, MachineLauncher) else ""

    def paused_access(self) -> AbstractContextManager[None]:
        """Return a context in which uses of the module's weights do not count as user code's."""
        return nullcontext() if self.run is None else self.run.access.paused()

    # ------------------------------------------------------------------ the trainers of a run

    def count_trainers(self, trainer: Trainer) -> None:
        """Count the trainers that a call of the Trainer starts on this machine; count its collectives anew."""
        together = self.config.role == "both" and trainer.state.fn == TrainerFn.FITTING
        self.num_trainers = self.num_devices if together else 1
        self.divides_data = bool(trainer._accelerator_connector.use_distributed_sampler)
        self._num_collectives = 0
        if self.num_trainers > 1:
            checks.check_trainers(trainer, self.config)
        self.is_shared = self.num_trainers > 1 or checks.may_be_shared(trainer, self.config)

    def join_running(self, trainer: Trainer) -> bool:
        """Join a run under way as a further trainer, and return True; False if this process begins a run."""
        config = self.config
        may_train = config.role in ("both", "trainer") and trainer.state.fn == TrainerFn.FITTING
        if not may_train or not config.initial_peers or self.local_rank:
            return False
        view = self.own_peer.follower.settle_run()
        if view is None:
            return False
        checks.check_trainers(trainer, config)
        rank_zero_info(f"Training in run {config.run_id!r}, which is at step {view.version}, beside its lead.")
        self.is_shared, self.num_trainers = True, 1
        self.take_rank(view)
        return True

    def take_rank(self, joined: RunView | None) -> None:
        """Set the rank for a run that this process joined as a further trainer, or for a run that it now leads."""
        self.joined = joined
        ranks = vars(rank_zero_only)  # a process of rank zero logs
        if self._own_rank is None:
            self._own_rank = ranks["rank"]
        ranks["rank"] = self.global_rank

    def restore_rank(self) -> None:
        """Restore the process's own rank after a run, and forget the run's model."""
        self.joined, self.inherited_stages, self._compiled = None, (), {}
        if self._own_rank is not None:
            vars(rank_zero_only)["rank"], self._own_rank = self._own_rank, None

    def waits_for_fit(self, trainer: Trainer) -> bool:
        """Return whether this process was started to train beside the lead, but only evaluates so far."""
        is_child = self.local_rank > 0 and process.is_trainer()
        return is_child and self.peer is None and trainer.state.fn != TrainerFn.FITTING

    @contextmanager
    def evaluating_beside(self, trainer: Trainer) -> Iterator[None]:
        """Inside, an evaluation writes no predictions, because the lead runs the same evaluation, and writes them."""
        own: Any = trainer  # untyped: Lightning sets its attributes in its connectors
        callbacks, writers = list(own.callbacks), callbacks_named("BasePredictionWriter")
        own.callbacks[:] = [callback for callback in callbacks if not isinstance(callback, writers)]
        try:
            yield
        finally:
            own.callbacks[:] = callbacks

    @property
    def global_rank(self) -> int:
        """Return this trainer's rank.

        - In a process that joined a run under way: a rank after those of all earlier trainers.
        - For code that makes or reads data, if the swarm divides the data: 0, as in one process.
        - Otherwise: the local rank.
        """
        if self.joined is not None:
            return self.local_rank + len(self.joined.seats.trainers)
        return 0 if self.divides_data and is_reading() else self.local_rank

    @property
    def world_size(self) -> int:
        """Return 1, as in one process; for user code that divides the data itself, the number of trainers."""
        return self.num_trainers if not self.divides_data and is_reading() else 1

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.local_rank == 0 and self.joined is None

    @property
    def is_distributed(self) -> bool:
        """Return whether `sync_dist=True` has an effect: only in training, because the lead alone validates."""
        module = self.lightning_module
        # Lightning also asks when it makes loaders; True would make it divide the data in its own way.
        return self._in_batches and self.is_shared and module is not None and bool(module.trainer.training)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        # Within a batch, the other trainers are in batches of their own.
        session = None if self.run is None else self.run.session
        if session is not None and session.is_shared and session.pipeline.batch is not None:
            refuse_collective("reduce")
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self.is_distributed:
            refuse_collective("all_gather")
        return tensor

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the lead's value to user code of trainers that one program started; else the process's own value."""
        return self._of_lead(obj, "broadcast") if asks_as_user() else obj

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait, if user code asks, until the lead has reached the same barrier. The lead does not wait."""
        if asks_as_user():
            self._of_lead(None, "barrier")
            return
        if name == "train_dataloader()":
            self._in_batches = False
        starts_others = isinstance(self._launcher, MachineLauncher) and self._launcher.starts_others
        if name == "pre_setup" and (self.num_trainers > 1 or starts_others):
            # The files that `prepare_data` makes on this machine must exist before any process reads them.
            if starts_others or self.is_global_zero:
                self.own_peer.lead.announce_event(self.launch_id, "prepare_data")
            else:
                self.own_peer.follower.await_event(self.launch_id, "prepare_data")

    def _of_lead(self, value: Any, name: str) -> Any:
        """Return the lead's value from the call of the same number: trainers of one program make the same calls."""
        trainer = self.own_module.trainer
        # Only this process runs here: the lead validates alone, and a waiting child evaluates by itself.
        lead_is_alone = trainer.sanity_checking or trainer.validating or self.waits_for_fit(trainer)
        if lead_is_alone or (self.num_trainers == 1 and self.joined is None):
            return value
        if self._has_begun or self.joined is not None:
            if name == "broadcast":
                refuse_collective(name)
            return value
        self._num_collectives += 1
        what = f"{name} {self._num_collectives}"
        if self.is_global_zero:
            self.own_peer.lead.announce_event(self.launch_id, what, encode_shared(value, name))
            return value
        return decode_shared(self.own_peer.follower.await_event(self.launch_id, what), name)


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
    rank = cast("RankHooks", trainer.strategy).local_rank  # `global_rank` may be 0 while data is read
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
