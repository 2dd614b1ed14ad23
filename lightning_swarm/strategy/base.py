"""The base of `SwarmStrategy`: the state that the strategy's modules share, ranks of trainers, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_swarm.model.deferred_init import InitialWeights
from lightning_swarm.model.partition import defines_stages
from lightning_swarm.peer import process
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import RunView, StageManifest
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.collectives import decode_shared, encode_shared, is_called_by_user, refuse_collective
from lightning_swarm.strategy.data.loader import is_reading
from lightning_swarm.strategy.data.shared import SharedData
from lightning_swarm.strategy.framework import ImportTree, callbacks_named
from lightning_swarm.strategy.run import SwarmRun
from lightning_swarm.strategy.weight_sync import ModuleWeights

if TYPE_CHECKING:
    _Strategy = Strategy
else:
    _Strategy = object  # at run time, `core.rebase.written_once` adds the Strategy of either import tree to the bases


class MachineLauncher(_Launcher):
    """The part of the launcher that numbers this machine's peers."""

    def __init__(self, num_peers: int) -> None:
        super().__init__()
        self._num_peers = num_peers  # on this machine, this process included
        self.local_rank = process.local_rank()  # this process's number among this machine's peers
        # Id of the launch that started this machine's peers together. Unlike a run's id, it is never reused.
        self.launch_id = process.launch_id()

    @property
    def starts_peers(self) -> bool:
        """Return whether this process starts the other peers of its machine."""
        return self._num_peers > 1 and self.local_rank == 0


class StrategyBase(_Strategy):
    """The strategy's module, run, ranks and collectives, for Lightning and for the strategy's other modules."""

    # Collectives that Lightning calls return at once, as in one process, because the lead alone decides and saves. If
    # user code calls `broadcast` or `barrier` before the first batch, other trainers wait for the lead, and get its
    # value; the lead never waits. Collectives that need other trainers' values are refused.

    framework: ClassVar[ImportTree]  # the import tree for which this strategy was derived
    config: SwarmConfig

    def __init__(self, *args: Any) -> None:
        self._compiled: dict[str, Any] = {}  # attributes of a compiled module, such as its compiled `forward`
        super().__init__(*args)
        # Lightning's accelerator connector sets these two.
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self.peer: Peer | None = None
        self.initial_weights = InitialWeights()  # makes weights that the module does not hold
        self.ranges: Sequence[range] = ()  # the blocks of each stage, once the module is set up
        self.inherited_stages: Sequence[StageManifest] = ()  # the stages of a run that this process took over
        self.total_steps: int | None = None  # the steps of the whole fit, while a peer without data makes an optimizer
        self.has_read_data = False  # whether this peer, which only serves, read the data to build the model
        self.data: SharedData | None = None  # set before the run begins
        self.run: SwarmRun | None = None  # the run under way
        self.weights: ModuleWeights | None = None  # set at the lead; kept after the run
        self.joined: RunView | None = None  # the run under way that this process joined as another trainer
        self.is_shared = False  # the run has, or may get, other trainers
        self.num_trainers = 1  # trainers that are started together on this machine
        self.divides_data = True  # the strategy divides the data among the trainers; otherwise user code does
        self._num_collectives = 0  # user code's collectives in this call of the Trainer
        self._has_begun = False  # the first batch has begun
        self._in_batches = False  # Lightning is running batches, not making loaders
        self._former_rank: int | None = None  # during a run: `rank_zero_only.rank` before the run

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
        return self.config.needs_no_swarm(self.num_devices) and module is not None and not defines_stages(module)

    @property
    def own_peer(self) -> Peer:
        """Return this process's peer, once it has started."""
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
        # The rank may exceed the devices: a child runs the script's first strategy, even if a later one has started it.
        return self._devices[self.local_rank % len(self._devices)]

    @property
    def local_rank(self) -> int:
        """Return the number of this process among this machine's peers."""
        return self._launcher.local_rank if isinstance(self._launcher, MachineLauncher) else 0

    @property
    def launch_id(self) -> str:
        """Return the id of this machine's newest launch of peers; empty without a launch."""
        return self._launcher.launch_id if isinstance(self._launcher, MachineLauncher) else ""

    def paused_access(self) -> AbstractContextManager[None]:
        """Return a context in which uses of the module's weights do not count as user code's."""
        return nullcontext() if self.run is None else self.run.access.paused()

    # ------------------------------------------------------------------ the trainers of a run

    def count_trainers(self, trainer: Trainer) -> None:
        """Set the number of trainers that a call of the Trainer starts on this machine, and check their settings."""
        every_peer_trains = self.config.role == "both" and trainer.state.fn == TrainerFn.FITTING
        self.num_trainers = self.num_devices if every_peer_trains else 1
        self.divides_data = bool(trainer._accelerator_connector.use_distributed_sampler)
        self._num_collectives = 0
        if self.num_trainers > 1:
            checks.check_trainers(trainer, self.config)
        self.is_shared = self.num_trainers > 1 or checks.may_be_shared(trainer, self.config)

    def join_running(self, trainer: Trainer) -> bool:
        """Join a run under way as another trainer, and return True; False if this process begins a run."""
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
        """Set the rank for a run under way that this process `joined`, or, if None, for a run that it leads."""
        self.joined = joined
        ranks = vars(rank_zero_only)  # a process of rank zero logs
        if self._former_rank is None:
            self._former_rank = ranks["rank"]
        ranks["rank"] = self.global_rank

    def restore_rank(self) -> None:
        """Restore the process's own rank after a run, and forget the run's model."""
        self.joined, self.inherited_stages, self._compiled = None, (), {}
        if self._former_rank is not None:
            vars(rank_zero_only)["rank"], self._former_rank = self._former_rank, None

    def waits_for_fit(self, trainer: Trainer) -> bool:
        """Return whether this process was started to train beside the lead, but only evaluates so far."""
        is_other_trainer = self.local_rank > 0 and process.is_trainer()
        return is_other_trainer and self.peer is None and trainer.state.fn != TrainerFn.FITTING

    @contextmanager
    def evaluating_beside(self, trainer: Trainer) -> Iterator[None]:
        """Inside, an evaluation writes no predictions, because the lead runs the same evaluation, and writes them."""
        untyped: Any = trainer  # Lightning sets its attributes in its connectors
        callbacks, writers = list(untyped.callbacks), callbacks_named("BasePredictionWriter")
        untyped.callbacks[:] = [callback for callback in callbacks if not isinstance(callback, writers)]
        try:
            yield
        finally:
            untyped.callbacks[:] = callbacks

    @property
    def global_rank(self) -> int:
        """Return this trainer's rank.

        - In a process that joined a run under way: a rank after the ranks of all earlier trainers.
        - For code that makes or reads data, if the swarm divides the data: 0, as in one process.
        - Otherwise: the local rank.
        """
        if self.joined is not None:
            return self.local_rank + len(self.joined.seats.trainers)
        return 0 if self.divides_data and is_reading() else self.local_rank

    @property
    def world_size(self) -> int:
        """Return 1, as in one process; to user code that divides the data itself, return the number of trainers."""
        return self.num_trainers if not self.divides_data and is_reading() else 1

    @property
    @override
    def is_global_zero(self) -> bool:
        return self.local_rank == 0 and self.joined is None

    @property
    def is_distributed(self) -> bool:
        """Return whether `sync_dist=True` has an effect: only in training, because the lead alone validates."""
        module = self.lightning_module
        # Lightning also reads this when it makes loaders; True would make it divide the data in its own way.
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
        """Return `obj` to Lightning, and the lead's value to user code, if one program started all trainers."""
        return self._lead_value(obj, "broadcast") if is_called_by_user() else obj

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait, if user code calls this, until the lead has reached the same barrier. The lead does not wait."""
        if is_called_by_user():
            self._lead_value(None, "barrier")
            return
        if name == "train_dataloader()":
            self._in_batches = False  # Lightning is about to prepare the training loader
        starts_peers = isinstance(self._launcher, MachineLauncher) and self._launcher.starts_peers
        if name == "pre_setup" and (self.num_trainers > 1 or starts_peers):
            # The files that `prepare_data` makes on this machine must exist before any process reads them.
            if starts_peers or self.is_global_zero:
                self.own_peer.lead.announce_event(self.launch_id, "prepare_data")
            else:
                self.own_peer.follower.await_event(self.launch_id, "prepare_data")

    def _lead_value(self, value: Any, name: str) -> Any:
        """Return the lead's value of the collective with the same number, as all trainers make the same calls."""
        trainer = self.own_module.trainer
        # No other trainer takes part: the lead validates alone, and before `fit`, each process evaluates independently.
        is_alone = trainer.sanity_checking or trainer.validating or self.waits_for_fit(trainer)
        if is_alone or (self.num_trainers == 1 and self.joined is None):
            return value
        if self._has_begun or self.joined is not None:
            if name == "broadcast":
                refuse_collective(name)
            return value
        self._num_collectives += 1
        event = f"{name} {self._num_collectives}"
        if self.is_global_zero:
            self.own_peer.lead.announce_event(self.launch_id, event, encode_shared(value, name))
            return value
        return decode_shared(self.own_peer.follower.await_event(self.launch_id, event), name)
