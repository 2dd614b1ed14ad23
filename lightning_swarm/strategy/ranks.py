"""Lightning's hooks on processes: this one's rank among the run's trainers, and what it would collect from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_swarm.client.session import Session
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import RunView
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.launcher import SwarmLauncher

if TYPE_CHECKING:
    _Strategy = Strategy
else:
    _Strategy = object  # `written_once` puts `SwarmStrategy` before the Strategy of either import tree


class RankHooks(_Strategy):
    """The part of `SwarmStrategy` that knows this process among others.

    Trainers do not wait for each other: what one process would answer is answered at once. That is what Lightning's own
    callers need, for the lead decides and saves alone. What would need the others' values is refused.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Lightning's accelerator connector sets these two.
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self.peer: Peer | None = None
        self.num_trainers = 1  # that are started together, on this machine
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

    @property
    def global_rank(self) -> int:
        """The local rank; in a process that joined a run under way, behind all who trained before."""
        return self.local_rank + (len(self._joined.seats.trainers) if self._joined is not None else 0)

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
        if self._session is not None:
            checks.check_alone(self._session, "reduce")
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self.is_distributed:
            checks.refuse_collective("all_gather")
        return tensor

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    @override
    def barrier(self, name: str | None = None) -> None:
        if name == "train_dataloader()":
            self._in_batches = False
        if name == "pre_setup" and self.num_trainers > 1:
            # What `prepare_data` leaves on this machine is there before anyone looks for it.
            assert self.peer is not None
            launch_id = self._swarm_launcher.launch_id if self._swarm_launcher is not None else ""
            (self.peer.lead.say_prepared if self.is_global_zero else self.peer.follower.await_prepared)(launch_id)
