"""Moves a run's weights and optimizer state between its servers and the lead's module, checkpoints and optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm.client import model_state
from lightning_swarm.client.run_session import Session
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.model import optimizer_state
from lightning_swarm.model.sharded_format import ShardedCheckpoint
from lightning_swarm.network import Transport
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.state import WrittenValue
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.strategy.module_access import ModuleAccess
from lightning_swarm.strategy.optimizer_access import OptimizerAccess

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ModuleWeights:
    """Moves weights and optimizer state between the servers and the lead's module and checkpoints."""

    def __init__(
        self, peer: Peer, session: Session, module: nn.Module, access: ModuleAccess, *, limits: Limits
    ) -> None:
        self.stale = False  # the module's weights are older than the swarm's
        self._access = access
        self._peer = peer
        self._session: Session | None = session
        self._module = module
        self._limits = limits
        self._gathered: list[weakref.ref[Tensor]] = []  # tensors of the newest checkpoint; see `gathered`
        self._optimizer_access: OptimizerAccess | None = None

    def __getstate__(self) -> dict[str, Any]:  # a copy must not refer to the run
        return {**vars(self), **dict.fromkeys(("_peer", "_session", "_access", "_optimizer_access")), "_gathered": []}

    def end_run(self) -> None:
        """Forget the run, which is over. Weights that were not gathered are lost."""
        self._session = self._optimizer_access = None

    # ------------------------------------------------------------------ in the module

    def end_training(self) -> None:
        """Wait for the last record, and remove uncounted batches from the statistics of the module's batch norms."""
        session, _ = self._active_run
        session.end_training()

    def gather_into_module(self, optimizer: Optimizer, *, timeout: float | None = None) -> None:
        """Gather the last step's weights and optimizer state into module and optimizer; `timeout` is in seconds."""
        timeout = self._limits.call_timeout if timeout is None else timeout
        state = self.optimizer_state(optimizer, timeout)
        self._access.refresh(timeout=timeout)
        optimizer.load_state_dict(state)
        self.stale = False

    # ------------------------------------------------------------------ in checkpoints

    @property
    def gathered(self) -> Sequence[Tensor]:
        """Return the tensors that were gathered for the newest checkpoint, which nothing else refers to."""
        return [tensor for tensor in (reference() for reference in self._gathered) if tensor is not None]

    def complete(self, state_dict: dict[str, Any], names: Mapping[str, str]) -> None:
        """Fill the module's state dict with the last step's weights; `names`: its keys -> the tensors' first names."""
        self._gathered.clear()
        if self.stale:
            weights = {**self._gather(model_state.gather_weights), **self._access.pending}
            self._gathered += map(weakref.ref, weights.values())
            state_dict.update({key: weights[names[key]] for key in state_dict if names.get(key) in weights})

    def without_stages(self, state_dict: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """Return the module's state dict without the stages' tensors; `names` as in `complete`."""
        in_stages = set().union(*self._saved_names)
        return {key: value for key, value in state_dict.items() if names.get(key) not in in_stages}

    def save_shards(self, path: Path, checkpoint: Mapping[str, Any], optimizer: Optimizer | None) -> None:
        """Write a checkpoint without the stages' tensors into a folder, and have servers add their stages."""
        session, _ = self._active_run
        names, parameter_names = self._saved_names, self._parameter_names  # names of each stage; id -> name

        def as_saved(state: Mapping[str, dict[str, Any]]) -> Mapping[str, dict[str, Any]]:
            with self._access.paused():
                return optimizer_state.as_saved(optimizer, parameter_names, state) if optimizer is not None else {}

        def write(folder: Path) -> list[WrittenValue]:
            session.settle_weights()
            session.renew()
            convert = as_saved if optimizer is not None else None
            limits, events = self._limits, self._peer.events
            return self._call(
                model_state.write_stages, session.version, folder, names, convert, limits=limits, events=events
            )

        in_stages = set().union(*names)
        saved = self._module.state_dict(keep_vars=True).keys()
        first_names = model_state.first_names(self._module).items()
        also = {name: first for name, first in first_names if name != first and first in in_stages and name in saved}
        model_state.save(path, checkpoint, write, part=len(names), also=also)

    @property
    def _saved_names(self) -> list[set[str]]:
        """Return the names of the tensors that each stage saves; a shared tensor belongs to its first stage."""
        names: list[set[str]] = []
        for spec in (stage.spec for stage in self._peer.lead.stages):
            own = {tensor.name for tensor in (*spec.parameters, *spec.buffers) if tensor.persistent}
            names.append(own.difference(*names))
        return names

    def optimizer_state(self, optimizer: Optimizer, timeout: float | None = None) -> dict[str, Any]:
        """Return the optimizer's state of all stages at the last step, with parameters numbered as in one process."""
        state = self._gather(model_state.gather_optimizer, timeout)
        with self._access.paused():
            renumbered = optimizer_state.as_state_dict(optimizer, self._parameter_names, state)
        self._gathered += map(weakref.ref, serialization.flatten(list(renumbered["state"].values()))[1])
        return renumbered

    def _gather(self, gather: Callable[..., Coroutine[Any, Any, _T]], timeout: float | None = None) -> _T:
        _ = self._active_run  # raises if no run is under way
        return self._access.gather(gather, timeout=timeout)

    def _call(
        self,
        call: Callable[Concatenate[Transport, RunState, _P], Coroutine[Any, Any, _T]],
        *args: _P.args,
        **options: _P.kwargs,
    ) -> _T:
        _, run = self._active_run
        return self._peer.runtime.run(call(self._peer.transport, run, *args, **options))

    # ------------------------------------------------------------------ on the servers

    def restart_from(self, step: int, load: Callable[[], None]) -> None:
        """Restart the run at `step`, with the weights that `load` puts into the module."""
        session, _ = self._active_run
        with self._access.paused():
            self._peer.lead.roll_back(session, step, load)
        self._access.note_current()
        self.stale = False

    def send_first_state(self, optimizer: Optimizer) -> None:
        """Send the servers the state that an optimizer has before the run, for example from an earlier run."""
        tensors = serialization.flatten(list(optimizer.state.values()))[1]
        if tensors and not any(tensor.is_meta for tensor in tensors):  # for a module on meta, servers make the state
            self.send_optimizer(optimizer)

    def send_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any] | None = None) -> None:
        """Send the servers the optimizer state in `saved`, or the optimizer's own if `saved` is None."""
        names = self._parameter_names
        state = (
            optimizer_state.state_by_name(optimizer, names)
            if saved is None
            else optimizer_state.loaded_state(optimizer, saved, names)
        )
        self._call(model_state.scatter_optimizer, state, timeout=self._limits.call_timeout)
        self._note_optimizer()

    def send_shards(self, optimizer: Optimizer, folder: ShardedCheckpoint) -> None:
        """Send the servers the optimizer state in a sharded checkpoint, one stage after the other."""
        _, run = self._active_run
        groups = folder.read_groups()["param_groups"]
        for index, stage in enumerate(run.manifest.stages):
            state = folder.read_state(name for name, _, _ in stage.parameters)
            saved = optimizer_state.name_to_number({"state": state, "param_groups": groups})
            loaded = optimizer_state.loaded_state(optimizer, saved, self._parameter_names)
            timeout = self._limits.call_timeout
            self._call(model_state.scatter_optimizer, loaded, timeout=timeout, stages=[index])
        self._note_optimizer()

    def watch_optimizer(self, trainer: Trainer, written: Collection[str]) -> None:
        """Make the Trainer's optimizer show the last step's state to user code. Its steps write the keys `written`."""
        session, _ = self._active_run
        gather = partial(self._gather, model_state.gather_optimizer)
        optimizer = OptimizerAccess(trainer, self._access, gather, lambda: session.version, written)
        self._optimizer_access = optimizer
        self._access.add_optimizer(optimizer.check, optimizer.close)

    def check_optimizer(self) -> None:
        """Refuse to save or return the optimizer's state if user code changed it, because servers lack the change."""
        if self._optimizer_access is not None:
            self._optimizer_access.check()

    def _note_optimizer(self) -> None:
        if self._optimizer_access is not None:
            self._optimizer_access.note_current()

    @property
    def _parameter_names(self) -> dict[int, str]:
        return optimizer_state.parameter_names(self._module)

    @property
    def _active_run(self) -> tuple[Session, RunState]:
        """Session and state of the run, while it is under way."""
        if self._session is None:
            raise ConfigError(
                "a checkpoint must hold the trained weights, but the run is over, and the weights were not gathered. "
                "Keep `gather_on_end=True`, or save during fit (ModelCheckpoint)."
            )
        assert self._peer.lead.run is not None
        return self._session, self._peer.lead.run


class WeightSync(Callback):
    """Gathers the trained weights into the module when training ends, as the Trainer's first callback until `close`."""

    # It is the first callback, so that it runs before callbacks that change or save the trained weights.
    def __init__(self, trainer: Trainer, weights: ModuleWeights, access: ModuleAccess) -> None:
        self._callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it in its connector
        self._weights, self._access = weights, access
        self._callbacks.insert(0, self)

    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:  # a copy of the Trainer must not refer to the run
        return Callback, ()

    def close(self) -> None:
        """Remove this callback from the Trainer's."""
        self._callbacks.remove(self)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._weights.check_optimizer()
        self._weights.end_training()
        self._weights.gather_into_module(trainer.optimizers[0])
        self._access.end()
