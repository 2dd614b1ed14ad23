"""Saves and loads checkpoints of a swarm's weights, and writes the lead's files while training continues."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_swarm.client import model_state
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.module_names import is_in_packages
from lightning_swarm.core.override import Override, changed
from lightning_swarm.model import optimizer_state, sharded_format
from lightning_swarm.model.boundary_layers import restore_boundary
from lightning_swarm.model.deferred_init import is_on_meta
from lightning_swarm.model.fidelity.unsaved_buffers import restore_buffers, unsaved_buffers
from lightning_swarm.model.sharded_format import ShardedCheckpoint
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.base import StrategyBase
from lightning_swarm.strategy.framework import IMPORT_TREES, OWN_PACKAGES, callbacks_named
from lightning_swarm.strategy.rollback.data_position import take_back_batches
from lightning_swarm.strategy.rollback.loop_state import UNSAVED
from lightning_swarm.strategy.rollback.rollback import Rollback
from lightning_swarm.strategy.weight_sync import ModuleWeights

_PEERS: Final = "swarm_peers"  # entry of a checkpoint: used invitations, the owner's bans, and convictions


class CheckpointFiles(Callback):
    """Writes the lead's checkpoint files: `ModelCheckpoint`'s in a background thread, all other files at once."""

    def __init__(self, trainer: Trainer, io: CheckpointIO) -> None:
        self._io = io
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-files")
        self._jobs: list[Future[None]] = []
        self._under_way: str | None = None  # path of the newest file that is written in the background
        self._error: BaseException | None = None
        self._in_background = False  # True while a file is saved that nothing reads before the next hook
        self._hook = ""  # name of the Trainer's current or last hook
        self._callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it in its connector
        # Subclasses are not watched, because their code may use the file as soon as it is saved.
        self._watched = [
            callback for callback in self._callbacks if type(callback) in callbacks_named("ModelCheckpoint")
        ]
        self._overrides = [override for callback in self._watched for override in self._watch(callback)]
        self._callbacks.insert(0, self)

    def __reduce__(self) -> tuple[type[Callback], tuple[()]]:  # a copy of the Trainer must not refer to the run
        return Callback, ()

    def save(self, checkpoint: dict[str, Any], path: str | Path, options: Any, unshared: Iterable[Tensor]) -> None:
        """Write a file. `unshared` tensors of the checkpoint need no copy, because nothing else refers to them."""
        self.finish()
        write = partial(self._io.save_checkpoint, storage_options=options)
        copied = _copied(checkpoint, unshared) if self._in_background else None
        if copied is None:
            write(checkpoint, path)
        else:
            self._under_way = os.fspath(path)
            self._jobs.append(self._thread.submit(self._run, write, copied, path))

    def remove(self, path: str | Path) -> None:
        """Remove a file after the pending writes, so that a killed run leaves the old file or its replacement."""
        if self._jobs:
            self._jobs.append(self._thread.submit(self._run, self._io.remove_checkpoint, path))
        else:
            self._io.remove_checkpoint(path)

    def finish(self) -> None:
        """Wait for the pending writes. Raises, once, if a file could not be written."""
        wait(self._jobs)
        self._jobs.clear()
        error, self._error, path, self._under_way = self._error, None, self._under_way, None
        if error is not None:
            error.add_note(f"The checkpoint {path} was not written.")
            raise error

    def close(self) -> None:
        """Remove this callback and wait for the pending writes. Raises as `finish` does."""
        self._callbacks.remove(self)
        for override in self._overrides:
            override.remove()
        self._thread.shutdown()
        self.finish()

    def begin_hook(self, name: str, trainer: Trainer) -> None:
        """Finish the pending writes before a hook of user code, which may read the files."""
        if name != "on_save_checkpoint":  # this hook is called within other hooks
            self._hook = name
        # A failed write, for example on a full disk, is reported at the next batch. `on_exception` only waits, so
        # that the failure does not replace the exception.
        reports_failure = name == "on_train_batch_start" and all(job.done() for job in self._jobs)
        if name == "on_exception":
            wait(self._jobs)
        elif reports_failure or name == "on_train_end" or (self._jobs and self._runs_user_code(trainer, name)):
            self.finish()

    def _runs_user_code(self, trainer: Trainer, name: str) -> bool:
        """Return whether a callback or the module has a hook of this name that is not Lightning's own."""
        hooks = [getattr(owner, name, None) for owner in (*self._callbacks, trainer.lightning_module)]
        return any(hook is not None and not _is_from_library(hook) for hook in hooks)

    def _run(self, work: Callable[..., object], *args: object) -> None:
        """Write or remove a file, in the background thread."""
        if self._error is not None:
            return  # a removal must not follow a failed write of the file's replacement
        try:
            work(*args)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._error = error

    def _watch(self, callback: Any) -> Sequence[Override]:
        """Intercept a `ModelCheckpoint` when it saves a file, and when it checks whether a file exists."""

        def save_checkpoint(trainer: Trainer, filepath: str) -> None:
            # The file must exist at once if the callback links to it, or if a logger or user code runs next.
            is_read = callback.save_last == "link" or any(map(_may_read_file, trainer.loggers))
            in_background = not (is_read or self._runs_user_code(trainer, self._hook))
            with changed(self, _in_background=in_background):
                save.replaced(trainer, filepath)

        def file_exists(filepath: str, trainer: Trainer) -> bool:
            if os.fspath(filepath) == self._under_way:
                self.finish()
            return bool(exists.replaced(filepath, trainer))

        save = Override(callback, "_save_checkpoint", save_checkpoint)
        exists = Override(callback, "file_exists", file_exists)
        return save, exists


def _add_hook(name: str) -> None:
    def hook(self: CheckpointFiles, trainer: Trainer, *_: Any, **__: Any) -> None:
        self.begin_hook(name, trainer)

    setattr(CheckpointFiles, name, hook)


for _name in vars(Callback):  # `begin_hook` must run before each hook of other callbacks and of the module
    if _name.startswith("on_"):
        _add_hook(_name)


def _is_from_library(hook: object) -> bool:
    return is_in_packages(OWN_PACKAGES, getattr(hook, "__module__", None))


def _copied(checkpoint: Mapping[str, Any], unshared: Iterable[Tensor]) -> Any:
    """Copy a checkpoint, except `unshared` tensors, so that training cannot change it; None if it cannot be copied."""
    try:
        return copy.deepcopy(checkpoint, {id(tensor): tensor for tensor in unshared})
    except Exception:  # noqa: BLE001 - a user's class may raise anything, but may still be saved
        return None


def _has_computed_tensors(module: nn.Module, state: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether a state dict has tensors that are neither the module's own nor states of metrics."""
    computed = [key for key, value in state.items() if isinstance(value, Tensor) and key not in names]
    if not computed:
        return False
    named = module.named_modules()
    prefixes = tuple(f"{name}." if name else "" for name, submodule in named if isinstance(submodule, Metric))
    return any(not key.startswith(prefixes) for key in computed) if prefixes else True


def _may_read_file(logger: object) -> bool:
    """Return whether a logger may read a file once it is saved."""
    # The methods of these two classes of loggers do nothing; a subclass may have a method of its own.
    modules = [import_module(f"{framework.name}.loggers") for framework in IMPORT_TREES]
    known = [getattr(module, name) for module in modules for name in ("Logger", "TensorBoardLogger")]
    return getattr(type(logger), "after_save_checkpoint", None) not in [base.after_save_checkpoint for base in known]


class Checkpoints:
    """Saves and loads the swarm's weights in Lightning's checkpoints; `default` is Lightning's own method."""

    def __init__(self, strategy: StrategyBase, rollback: Rollback) -> None:
        self._strategy = strategy
        self._rollback = rollback
        self.writes_files = False  # the user brought no `CheckpointIO`
        self.files: CheckpointFiles | None = None  # set at the lead during training, if `writes_files`
        self.restored_step: int | None = None  # step of the checkpoint that this run resumed from
        self.known_peers: Any = None  # `_PEERS` of that checkpoint, until a run has begun with it
        self._peers_of_newest_run: dict[str, Any] | None = None  # `_PEERS` of the newest run
        self._folder: ShardedCheckpoint | None = None  # the loaded checkpoint, if it is sharded

    def __getstate__(self) -> dict[str, Any]:  # a copy must not refer to the run
        return {**vars(self), "files": None, "restored_step": None, "known_peers": None, "_folder": None}

    @property
    def _is_sharded(self) -> bool:
        return self._strategy.config.state_dict_type == "sharded"

    @property
    def _stale_weights(self) -> ModuleWeights | None:
        """The run's weights, if they are newer than the module's."""
        weights = self._strategy.weights
        return weights if weights is not None and weights.stale else None

    # ------------------------------------------------------------------ saving

    def module_state(self) -> dict[str, Any]:
        """Return the module's state dict with the last step's weights, as far as this peer must save them."""
        strategy, module = self._strategy, self._strategy.own_module
        if not strategy.is_global_zero:
            return {}  # only the lead saves
        state, names = self._state_and_names()
        run = strategy.run
        if self._stale_weights is not None and run is not None and _has_computed_tensors(module, state, names):
            # The module's own `state_dict`, or one of its hooks, may compute tensors from the weights. Repeat it with
            # the newest weights.
            if is_on_meta(module):
                raise ConfigError(
                    "the `state_dict` of a module on the meta device may rename and omit tensors, but must not "
                    f"compute new ones; got {next(key for key in state if key not in names)!r}, which is no tensor of "
                    "the module. Build the module with weights."
                )
            run.access.refresh()
            state, names = self._state_and_names()
        states = self._rollback.states
        if states is not None and states.is_saving:  # a loop's state for rollbacks lacks the servers' weights
            written = run.access.pending if run is not None else {}
            with strategy.paused_access():  # reading tensors here is no use by user code
                unsaved = unsaved_buffers(module)
            return states.without_weights(state, unsaved, {**model_state.first_names(module), **names}, written)
        if strategy.weights is None:
            return state
        if self._is_sharded:
            if renamed := [key for key in names if key not in model_state.first_names(module)]:
                raise ConfigError(
                    "servers write a sharded checkpoint under the names of the module's parameters, so the module's "
                    f"`state_dict` must not rename them; got {renamed[0]!r}. Use `state_dict_type='full'`."
                )
            # Servers add the tensors of their stages to the checkpoint.
            return strategy.weights.without_stages(state, names) if strategy.weights.stale else state
        strategy.weights.complete(state, names)
        return state

    def _state_and_names(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the module's state dict, and key -> first name of the tensor in the module."""
        module = self._strategy.own_module
        with self._strategy.paused_access():
            state: dict[str, Any] = module.state_dict()
            return state, model_state.names_of(module, state)

    def optimizer_state(
        self, optimizer: Optimizer, default: Callable[[Optimizer], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return the optimizer's state dict at the last step."""
        strategy, states, weights = self._strategy, self._rollback.states, self._stale_weights
        with strategy.paused_access():
            if states is not None and states.is_saving:
                return states.without_state(optimizer)
            if not strategy.is_global_zero:
                return {}
            if weights is not None:
                weights.check_optimizer()
            if self._is_sharded:
                names = optimizer_state.parameter_names(strategy.own_module)
                saved = optimizer.state_dict()  # a stale state is omitted below, because the servers write it
                return optimizer_state.number_to_name(optimizer, names, {**saved, "state": {}} if weights else saved)
            return default(optimizer) if weights is None else weights.optimizer_state(optimizer)

    def save(self, checkpoint: dict[str, Any], path: Any, options: Any | None, default: Callable[..., None]) -> None:
        """Write a checkpoint, with the run's invitations and bans, to a file or a sharded folder."""
        strategy, run = self._strategy, self._strategy.run
        if run is not None and run.loop is not None and run.loop.num_late_batches:
            # The weights lack these batches, so a run that resumes must read them again.
            take_back_batches(checkpoint, run.loop.num_late_batches)
        self._remember_peers()
        if self._peers_of_newest_run is not None:  # the run may be over
            checkpoint[_PEERS] = self._peers_of_newest_run
        if self._is_sharded:
            self._save_sharded(checkpoint, path, options)
        elif self.files is None:
            default(checkpoint, path, options)
        else:
            unshared = strategy.weights.gathered if strategy.weights is not None else ()
            self.files.save(checkpoint, path, options, unshared)

    def _save_sharded(self, checkpoint: dict[str, Any], path: Any, options: Any | None) -> None:
        checks.check_folder(path, options)
        if not self._strategy.is_global_zero:
            return
        self.finish_files()
        weights = self._stale_weights
        if weights is not None:
            optimizer = self._strategy.optimizers[0] if "optimizer_states" in checkpoint else None
            weights.save_shards(Path(path), checkpoint, optimizer)
        else:  # the checkpoint has all weights, and servers add none
            model_state.save(Path(path), checkpoint, write_stages=lambda _: [], part=0, also={})

    def remove(self, path: Any, default: Callable[[Any], None]) -> None:
        """Remove a checkpoint after the pending writes."""
        (default if self.files is None else self.files.remove)(path)

    def finish_files(self) -> None:
        """Wait for the pending writes; raises if a file could not be written."""
        if self.files is not None:
            self.files.finish()

    def close_files(self) -> None:
        """Finish the pending writes, and write no more files in the background."""
        files, self.files = self.files, None
        if files is not None:
            files.close()

    # ------------------------------------------------------------------ loading

    def forget_loaded(self) -> None:
        """Forget the loaded checkpoint when the run is over; later checkpoints still have its invitations and bans."""
        self._remember_peers()
        self._folder, self.restored_step, self.known_peers = None, None, None

    def _remember_peers(self) -> None:
        """Remember the run's used invitations, bans and convictions (`_PEERS`), if a run is under way."""
        run = self._strategy.run
        if run is not None and self._strategy.is_global_zero:
            self._peers_of_newest_run = run.peer.lead.known_peers()

    def load(self, path: Any, default: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Read a checkpoint: a rollback's, a sharded folder, or an ordinary file of Lightning."""
        strategy = self._strategy
        self.finish_files()
        restored = self._rollback.load(path)
        if restored is not None:
            self.restored_step = self._rollback.first_step
            return restored
        self._folder = checks.find_folder(path)
        restored = default(path if self._folder is None else Path(path) / sharded_format.REST)
        if self._folder is not None:
            restored["state_dict"] = strategy.initial_weights.read_folder(strategy.own_module, self._folder)
            if self._folder.has_optimizer:  # groups only; the servers load the state
                restored["optimizer_states"] = [optimizer_state.name_to_number(self._folder.read_groups())]
        self.restored_step, self.known_peers = restored.get("global_step"), restored.get(_PEERS)
        return restored

    def load_module(self, checkpoint: Mapping[str, Any], default: Callable[[Mapping[str, Any]], None]) -> None:
        """Load a checkpoint's weights, before or during a run."""
        strategy, module = self._strategy, self._strategy.own_module
        if self._rollback.is_resuming and not strategy.is_global_zero:
            return  # the lead sends the weights
        restore_boundary(module, checkpoint["state_dict"])
        run = strategy.run
        if run is None:  # the run will begin with these weights
            weights, unsaved = checkpoint["state_dict"], checkpoint.get(UNSAVED, {})
            with strategy.initial_weights.restoring(module, {**weights, **unsaved}, strategy.root_device) as state:
                default({**checkpoint, "state_dict": {name: state[name] for name in weights}})
                restore_buffers(module, {name: state[name] for name in unsaved})
            return
        checks.check_in_memory(module, "weights are loaded in the middle of a run")
        if run.session.is_shared:
            raise ConfigError(
                "during a run, weights may be loaded only if the run has a single trainer and admits no others, "
                "because other trainers would continue from the servers' weights; this run has "
                f"{run.session.num_trainers} trainers, and may get more. Load weights before `fit`. To search a "
                "learning rate, use `role='auto'`, and set the result."
            )
        assert strategy.weights is not None
        self._rollback.discard_snapshots()
        strategy.weights.restart_from(checkpoint["global_step"], partial(default, checkpoint))
        if run.loop is not None:
            run.loop.restart()

    def load_optimizer(self, checkpoint: Mapping[str, Any], default: Callable[[Mapping[str, Any]], None]) -> None:
        """Load a checkpoint's optimizer state, and send it to the servers."""
        strategy, saved = self._strategy, None  # `saved`: the state to send, if the optimizer does not get it
        if strategy.is_plain and self._folder is not None:
            whole = {**self._folder.read_groups(), "state": self._folder.read_state(None)}
            checkpoint = {**checkpoint, "optimizer_states": [optimizer_state.name_to_number(whole)]}
        elif self._folder is None and is_on_meta(strategy.own_module):  # only the servers keep the optimizer's state
            (saved,) = checkpoint["optimizer_states"]
            checkpoint = {**checkpoint, "optimizer_states": [{**saved, "state": {}}]}
        default(checkpoint)
        run = strategy.run
        if run is None or run.loop is None or not run.session.is_lead:
            return
        assert strategy.weights is not None
        run.loop.send_selection()  # callbacks may have restored parameter groups
        if self._folder is not None:
            strategy.weights.send_shards(strategy.optimizers[0], self._folder)
        else:
            strategy.weights.send_optimizer(strategy.optimizers[0], saved)
