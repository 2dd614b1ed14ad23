"""Lightning's hooks on state: what is saved, loaded, and gone back to."""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm.client import model_state
from lightning_swarm.core.errors import ConfigError, SwarmError, WentBack
from lightning_swarm.model import optimizer_state, sharded_format
from lightning_swarm.model.boundary_layers import restore_boundary
from lightning_swarm.model.deferred_init import InitialWeights, is_on_meta
from lightning_swarm.model.sharded_format import ShardedCheckpoint
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import StageManifest
from lightning_swarm.strategy import checks
from lightning_swarm.strategy.framework import FRAMEWORKS, callbacks_named
from lightning_swarm.strategy.optimization_loop import SwarmOptimization
from lightning_swarm.strategy.ranks import RankHooks
from lightning_swarm.strategy.rollback.data_position import take_back_batches
from lightning_swarm.strategy.rollback.rollback import Rollback, RollbackTarget
from lightning_swarm.strategy.weight_sync import ModuleWeights


class CheckpointFiles(Callback):
    """The lead's files: `ModelCheckpoint`'s in a thread of their own, one after the other, all others at once.

    Who asks whether a file under way is there waits for it, and so do the next file and the end of training. What is to
    be removed is removed after what was written before it, so a run that is killed leaves the old file or the new one.

    Args:
        trainer: Whose; this becomes the first of its callbacks, until `close`.
        io: Writes and removes files, from either thread.
    """

    def __init__(self, trainer: Trainer, io: CheckpointIO) -> None:
        self._io = io
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="swarm-files")
        self._jobs: list[Future[None]] = []
        self._under_way: str | None = None
        self._error: BaseException | None = None
        self._meanwhile = False  # who saves now looks at no file when it has been saved
        self._callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it in its connector
        # One of a user's own may do anything with the file as soon as it was saved.
        self._watched = [one for one in self._callbacks if type(one) in callbacks_named("ModelCheckpoint")]
        for callback in self._watched:
            self._watch(callback)
        self._callbacks.insert(0, self)

    def save(self, checkpoint: dict[str, Any], path: str | Path, options: Any, own: Iterable[Tensor]) -> None:
        """Write a file.

        Args:
            checkpoint: All of it.
            path: Where.
            options: As `CheckpointIO` takes them.
            own: Tensors in it that nobody else has.

        Raises:
            Exception: This file, or the one before it, cannot be written.
        """
        self.finish()
        write = partial(self._io.save_checkpoint, storage_options=options)
        taken = _copied(checkpoint, own) if self._meanwhile else None
        if taken is None:
            write(checkpoint, path)
        else:
            self._under_way = os.fspath(path)
            self._submit(write, taken, path)

    def remove(self, path: str | Path) -> None:
        """Remove a file, once what is under way has been written."""
        if self._jobs:
            self._submit(self._io.remove_checkpoint, path)
        else:
            self._io.remove_checkpoint(path)

    def finish(self) -> None:
        """Wait for what is under way.

        Raises:
            Exception: It cannot be written. It is said once.
        """
        wait(self._jobs)
        self._jobs.clear()
        error, self._error, path, self._under_way = self._error, None, self._under_way, None
        if error is not None:
            error.add_note(f"The checkpoint {path} was not written.")
            raise error

    def close(self) -> None:
        """Leave the Trainer's callbacks as they were, when all is written. Raises as `finish`."""
        self._callbacks.remove(self)
        while self._watched:
            callback = self._watched.pop()
            del callback._save_checkpoint, callback.file_exists
        self._thread.shutdown()
        self.finish()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if all(job.done() for job in self._jobs):
            self.finish()  # a full disk is said at the next batch

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.finish()  # the others look for the last file now

    def _submit(self, do: Callable[..., object], *args: object) -> None:
        self._jobs.append(self._thread.submit(self._do, do, *args))

    def _do(self, do: Callable[..., object], *args: object) -> None:
        if self._error is not None:
            return  # the file in whose place this one was to be removed is not there
        try:
            do(*args)
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._error = error

    def _watch(self, callback: Any) -> None:
        """Know when a `ModelCheckpoint` saves, and when it looks for a file."""
        save, exists = callback._save_checkpoint, callback.file_exists

        def save_meanwhile(trainer: Trainer, filepath: str) -> None:
            # It links to the file, or a logger is told of it: then it has to be there.
            self._meanwhile = callback.save_last != "link" and not any(map(_reads, trainer.loggers))
            try:
                save(trainer, filepath)
            finally:
                self._meanwhile = False

        def is_there(filepath: str, trainer: Trainer) -> bool:
            if os.fspath(filepath) == self._under_way:
                self.finish()
            return bool(exists(filepath, trainer))

        callback._save_checkpoint, callback.file_exists = save_meanwhile, is_there


def _copied(checkpoint: Mapping[str, Any], own: Iterable[Tensor]) -> Any:
    """What stays as it is while training goes on. None: something in it cannot be copied."""
    try:
        return copy.deepcopy(checkpoint, {id(tensor): tensor for tensor in own})
    except Exception:  # noqa: BLE001 - of a user's own classes, which can be saved all the same
        return None


def _reads(logger: object) -> bool:
    """Whether a logger may look at a file when it was saved."""
    modules = [import_module(f"{framework.name}.loggers") for framework in FRAMEWORKS]
    known = [getattr(module, name) for module in modules for name in ("Logger", "TensorBoardLogger")]
    return getattr(type(logger), "after_save_checkpoint", None) not in [one.after_save_checkpoint for one in known]


_log = logging.getLogger(__name__)


class CheckpointHooks(RankHooks):
    """The part of `SwarmStrategy` that brings a run to where another one was."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loop: SwarmOptimization | None = None
        self._weights: ModuleWeights | None = None  # of this run or, once it is over, of the last one
        self._files: CheckpointFiles | None = (
            None  # of the lead while it trains, unless its user brought a `CheckpointIO`
        )
        self._folder: ShardedCheckpoint | None = None  # that is loaded
        self._restored_step: int | None = None  # of the checkpoint that this run goes on from
        self._origin = InitialWeights()  # of weights that the module does not hold
        self._way_back = Rollback()
        self._goes_back = False  # what is torn down goes on
        self._put_back: Callable[[], None] = lambda: None  # what was left to the lead, where another one is it
        self._inherited: Sequence[StageManifest] = ()  # of the run that this process took over: it stays cut as it is

    # ------------------------------------------------------------------ saved and loaded

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module = self._own_module
        if not self.is_global_zero:
            return {}  # the lead saves, and keeps weights
        own: dict[str, Any] = module.state_dict()
        states = self._way_back.states
        if states is not None and states.taking:
            return states.without_weights(own, model_state.first_names(module))
        if self._weights is None:
            return own
        if self.config.state_dict_type == "sharded":
            return self._weights.without_stages(own) if self._weights.stale else own
        self._weights.complete(own)
        return own

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        states = self._way_back.states
        if states is not None and states.taking:
            return states.without_state(optimizer)
        if not self.is_global_zero:
            return {}
        weights = self._weights if self._weights is not None and self._weights.stale else None
        if self.config.state_dict_type == "sharded":
            names = {id(parameter): name for name, parameter in self._own_module.named_parameters()}
            saved = optimizer.state_dict()  # of which the servers have what is not here
            return optimizer_state.by_names(optimizer, names, {**saved, "state": {}} if weights else saved)
        if weights is not None:
            return weights.optimizer_state(optimizer)
        return super().optimizer_state(optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._loop is not None and self._loop.num_late_batches:
            take_back_batches(checkpoint, self._loop.num_late_batches)
        if self.config.state_dict_type == "sharded":
            self._save_sharded(checkpoint, filepath, storage_options)
        elif self._files is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            own = self._weights.gathered if self._weights is not None else ()
            self._files.save(checkpoint, filepath, storage_options, own)

    def _save_sharded(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None) -> None:
        checks.check_folder(path, storage_options)
        if not self.is_global_zero:
            return
        if self._files is not None:
            self._files.finish()
        if self._weights is not None and self._weights.stale:
            optimizer = self.optimizers[0] if "optimizer_states" in checkpoint else None
            self._weights.save_shards(Path(path), checkpoint, optimizer)
        else:
            model_state.save(Path(path), checkpoint, lambda _: [], part=0, also={})

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._files is None:
            super().remove_checkpoint(filepath)
        else:
            self._files.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self._files is not None:
            self._files.finish()
        restored = self._way_back.load(checkpoint_path)
        if restored is not None:
            self._restored_step = self._way_back.first_step
            return restored
        self._folder = checks.find_folder(checkpoint_path)
        path = checkpoint_path if self._folder is None else Path(checkpoint_path) / sharded_format.REST
        restored = super().load_checkpoint(path, *args, **kwargs)  # `weights_only`, since Lightning 2.6
        if self._folder is not None:
            restored["state_dict"] = self._origin.read_folder(self._own_module, self._folder)
            if self._folder.has_optimizer:  # whose state is for the servers
                restored["optimizer_states"] = [optimizer_state.by_numbers(self._folder.read_groups())]
        self._restored_step = restored.get("global_step")
        return restored

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._way_back.goes_on and not self.is_global_zero:
            return  # the lead hands them out
        module = self._own_module
        restore_boundary(module, checkpoint["state_dict"])
        if self._session is None:  # the run is still to begin, with these weights
            with self._origin.restoring(module, checkpoint["state_dict"], self.root_device) as state:
                super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)
            return
        checks.check_in_memory(module, "weights are loaded in the middle of a run")
        load = functools.partial(super().load_model_state_dict, checkpoint, strict)
        if self._session.is_shared:
            raise ConfigError(
                "weights are loaded in the middle of a run where one trainer is all there is, for others would go on "
                f"from newer ones; this run has {self._session.num_trainers}, and may have more. Load them before "
                "`fit`; look for a learning rate with `role='auto'`, and set what it finds."
            )
        assert self._weights is not None
        self._way_back.weights_replaced()
        self._weights.go_back(checkpoint["global_step"], load)
        if self._loop is not None:
            self._loop.go_back()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = None
        if self._folder is None and is_on_meta(self._own_module):  # on which an optimizer keeps no state either
            (saved,) = checkpoint["optimizer_states"]
            checkpoint = {**checkpoint, "optimizer_states": [{**saved, "state": {}}]}
        super().load_optimizer_state_dict(checkpoint)
        if not self.is_global_zero:
            return
        assert self._weights is not None
        assert self._loop is not None
        self._loop.tell_selection(self.optimizers[0])  # callbacks may have restored parameter groups
        if self._folder is not None:
            self._weights.hand_out_shards(self.optimizers[0], self._folder)
        else:
            self._weights.hand_out_optimizer(self.optimizers[0], saved)

    # ------------------------------------------------------------------ gone back to

    def go_back(self, trainer: Trainer, error: SwarmError) -> str | None:
        """After an error: make ready to run the Trainer's function again, with what is left of the swarm.

        Args:
            trainer: Whose.
            error: What broke the run off.

        Returns:
            The checkpoint to go on from; empty: from none, as one that comes to the run. None: nowhere, or nothing is
            lost that the run needs.
        """
        if self.peer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        found = self._way_on(trainer, self.peer, error)
        if found is None:
            return None
        version, path = found
        say = self.peer.events.note if self.is_global_zero else self.peer.events.hear  # once for the swarm
        say("went_back", step=version, reason=str(error.__cause__ or error))
        trainer.training = True  # it may have been validating
        self._goes_back = True
        try:
            trainer._teardown()
        finally:
            self._goes_back = False
        if self._swarm_launcher is not None:
            self._swarm_launcher.forget_ended()
        trainer.training, trainer.should_stop = True, False
        return path

    def _way_on(self, trainer: Trainer, peer: Peer, error: SwarmError) -> tuple[int, str] | None:
        """The version of the weights, and the checkpoint, as `go_back` has it. This peer may be the lead then."""
        if self.is_global_zero:
            goal = self._way_back.find(trainer, peer, error)
        elif isinstance(error, WentBack) and not peer.follower.is_told and self._comes_to is not None:
            return self._come_again(peer)
        else:
            version = peer.follower.told_to_go_back()
            if version is None:
                return None
            if not peer.inherits and peer.follower.is_led_anew:
                self._way_back.begin_anew()
                return version, ""
            goal = self._inherit(trainer, peer) if peer.inherits else self._way_back.follow(version, error)
        return None if goal is None else (goal.version, str(goal.path))

    def _come_again(self, peer: Peer) -> tuple[int, str] | None:
        """To a run that has gone back without this trainer, whose server was not in it to be told."""
        view = peer.follower.find_run_again()
        if view is None:
            return None
        self._comes_to = view
        self._way_back.discard_states()
        return view.manifest.first_step, ""

    def _take_over(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """Where the run that another peer led goes on with this one as its lead."""
        goal = self._way_back.inherit(trainer, peer)
        assert peer.lead.run is not None
        self._inherited = peer.lead.run.manifest.stages
        self.config = replace(self.config, initial_peers=())  # from here on it is the starter of runs
        return goal

    def _inherit(self, trainer: Trainer, peer: Peer) -> RollbackTarget:
        """Lead from here on, where this process trained beside another one."""
        goal = self._take_over(trainer, peer)
        _log.warning(
            "The lead of run %r is gone. This peer takes the run over, from step %d on.",
            self.config.run_id,
            goal.version,
        )
        self._comes_to = None
        self._take_rank()
        self._put_back()
        return goal
