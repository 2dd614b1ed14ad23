"""Brings a strategy into a run. The functions stand in the order in which `SwarmStrategy` calls them.

`check` runs before the peers start. During Lightning's setup, `complete_callbacks`, `share_loader` and `prepare_module`
prepare callbacks, data and module. Then `enter_run` starts the run as its lead, or joins it (`start_run`), and
`connect` puts the run's loop, pipeline and weights in place of Lightning's. A peer that only serves calls `serve`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.enums import GradClipAlgorithmType

from lightning_swarm.client.pipeline.interception import intercept
from lightning_swarm.client.run_session import Session
from lightning_swarm.model.autocast import on_this_thread
from lightning_swarm.model.deferred_init import is_on_meta
from lightning_swarm.model.optimizer_state import kind_of, read_selection
from lightning_swarm.monitor.membership import Membership
from lightning_swarm.peer.manifest import RunSpec
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.strategy import checks, extra_trainers, model_setup, optimizer_checks
from lightning_swarm.strategy.checkpointing import CheckpointFiles
from lightning_swarm.strategy.data.shared import SharedData, can_share
from lightning_swarm.strategy.framework import callbacks_of
from lightning_swarm.strategy.join_bar import reporting_join
from lightning_swarm.strategy.logged_numbers import LoggedNumbers
from lightning_swarm.strategy.loop_counters import scaling_of
from lightning_swarm.strategy.module_access import ModuleAccess
from lightning_swarm.strategy.optimization_loop import SwarmOptimization
from lightning_swarm.strategy.rollback.rollback import Rollback
from lightning_swarm.strategy.run import SwarmRun
from lightning_swarm.strategy.run_log import RunLog
from lightning_swarm.strategy.step_estimate import expected_steps
from lightning_swarm.strategy.swarm_monitor import add_default_monitor
from lightning_swarm.strategy.weight_sync import ModuleWeights, WeightSync

if TYPE_CHECKING:
    from lightning_swarm.strategy.strategy import SwarmStrategy


# ------------------------------------------------------------------ before there is a run


def check(strategy: SwarmStrategy, trainer: Trainer, call_arguments: Mapping[str, Any]) -> None:
    """Refuse unsupported settings and models, as far as they are known before the model is configured."""
    # `call_arguments`: the arguments of the Trainer's method, by name.
    module, config = trainer.lightning_module, strategy.config
    checks.check_trainer(trainer, module, config)
    strategy.count_trainers(trainer)
    checks.check_data(trainer, module, call_arguments)
    ckpt_path = call_arguments.get("ckpt_path")
    checks.check_ckpt_path(ckpt_path)
    model_setup.check(strategy, trainer, restored=ckpt_path is not None)
    checks.check_servers(config, strategy.num_devices)


def complete_callbacks(strategy: SwarmStrategy, trainer: Trainer) -> None:
    """Check the Trainer's callbacks, including the module's (`configure_callbacks`), and add the default monitor.

    Also create `strategy.data`, and decide whether several trainers share the run (`strategy.is_shared`).
    """
    is_one_of_several = strategy.num_trainers > 1 or not strategy.is_global_zero
    strategy.data = SharedData(trainer)
    if not strategy.is_global_zero:
        extra_trainers.remove_deciding_callbacks(trainer)
    checks.check_callback_imports(trainer)
    if trainer.state.fn == TrainerFn.FITTING:
        checks.check_callbacks(trainer)
        if is_one_of_several:
            checks.check_trainers(trainer, strategy.config)
            strategy.data.watch_hooks()
        if strategy.is_global_zero:
            add_default_monitor(trainer)
    strategy.is_shared = is_one_of_several or checks.may_be_shared(trainer, strategy.config)


# ------------------------------------------------------------------ data


def share_loader(strategy: SwarmStrategy, trainer: Trainer, dataloader: object) -> object:
    """Return the loader that replaces the user's training loader: it reads this trainer's part of the data."""
    config = strategy.config
    joins = strategy.joined is not None
    divided = partial(extra_trainers.share, trainer, dataloader, num_trainers=strategy.num_trainers, joins=joins)
    # With `delay_optimizer_step`, only one trainer may read data.
    may_share_order = (
        config.role == "both"
        and config.settings.target_batch_size is not None
        and not config.settings.delay_optimizer_step
    )
    if (may_share_order or strategy.is_shared) and can_share(dataloader, trainer):
        assert strategy.data is not None
        loader: object = strategy.data.share(dataloader, divided)
    else:
        loader = divided()
    strategy.rollback.record_loader(loader)
    return loader


def correct_estimated_steps(strategy: SwarmStrategy, trainer: Trainer, estimate: Callable[[], float]) -> float:
    """Return the optimizer steps of a whole fit; `estimate` returns Lightning's number, which counts by batches."""
    if strategy.total_steps is not None:
        return strategy.total_steps
    steps = estimate()  # also loads the data
    # With a target, a step ends after a number of samples, not of batches.
    target, combined = strategy.config.settings.target_batch_size, trainer.fit_loop._combined_loader
    if target is None or trainer.max_epochs == -1 or combined is None:
        return steps
    if (data := strategy.data) is not None and data.origin is not None:
        corrected = expected_steps(trainer, data.origin, data.num_batches(), target)
    else:
        corrected = expected_steps(trainer, combined.flattened[0], trainer.num_training_batches, target)
    return steps if corrected is None else corrected


# ------------------------------------------------------------------ the module


def prepare_module(strategy: SwarmStrategy, trainer: Trainer) -> None:
    """Reseed this process if it is not the first trainer, and record the storages of tensors on the meta device."""
    if strategy.joined is not None:
        extra_trainers.reseed(strategy.own_peer.boot_id)
    elif not strategy.is_global_zero:
        extra_trainers.reseed(strategy.local_rank)
    checks.check_on_meta(trainer, trainer.lightning_module, strategy.config)
    strategy.initial_weights.index_tensors(trainer.lightning_module)


# ------------------------------------------------------------------ the run


def enter_run(strategy: SwarmStrategy, trainer: Trainer) -> SwarmRun:
    """Start or join the run, and return this trainer's part in it; `connect` must follow."""
    module, config, peer = trainer.lightning_module, strategy.config, strategy.own_peer
    if not strategy.is_global_zero:
        extra_trainers.leave_end_and_schedulers_to_lead(trainer)
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    selection = read_selection(module, optimizer_checks.check_optimizers(strategy.optimizers)) if is_fitting else None
    model = model_setup.peer_model(strategy, module)
    stages = model.build_stages(strategy.ranges)  # refuses a model that cannot be cut, before any peer is called
    written_keys: frozenset[str] = frozenset()
    if is_fitting:
        in_stages = sum(bool(stage.spec.parameters) for stage in stages) > 1
        written_keys = optimizer_checks.check_steps(strategy.optimizers[0], module, in_stages=in_stages)
    assert strategy.data is not None
    with contextlib.ExitStack() as undo:
        if strategy.is_shared:  # `undo` also restores the dtype if the run cannot be started
            undo.callback(extra_trainers.set_default_dtype(strategy.precision_plugin))
        session = strategy.start_run(trainer, model, selection)
        access = ModuleAccess(peer, session, stages, config.limits)
        undo.callback(access.close)
        return SwarmRun(
            trainer=trainer,
            peer=peer,
            config=config,
            session=session,
            model=model,
            access=access,
            data=strategy.data,
            joined_late=strategy.joined is not None,
            written_keys=written_keys,
            undo=undo.pop_all(),
        )


def start_run(strategy: SwarmStrategy, trainer: Trainer, model: PeerModel, selection: Selection | None) -> Session:
    """Start a run as its lead, or join it as one of several trainers."""
    config, rollback, device = strategy.config, strategy.rollback, strategy.root_device
    follower = strategy.own_peer.follower
    if strategy.joined is not None and not (rollback.is_resuming or rollback.follows_new_lead):
        serves = config.role == "both"
        # Only a server with all weights can take over the lead.
        may_lead = serves and model_setup.has_whole_model(trainer.lightning_module, config)
        session, epoch = follower.train_in(strategy.joined, model, device, serves=serves, may_take_over=may_lead)
        extra_trainers.begin_at(trainer, step=session.version, epoch=epoch)
        return session
    if strategy.is_global_zero:
        return start_as_lead(strategy, trainer, model, selection)
    session = follower.join_run(model, device)
    if rollback.follows_new_lead:
        extra_trainers.begin_at(trainer, step=session.version, epoch=session.enlist())
    return session


def start_as_lead(strategy: SwarmStrategy, trainer: Trainer, model: PeerModel, selection: Selection | None) -> Session:
    """Start a run as its lead."""
    peer, launcher = strategy.own_peer, strategy.swarm_launcher
    if launcher is not None:
        peer.lead.num_known_dead = lambda: launcher.num_ended
    peer.lead.check_first()
    if strategy.checkpoints.known_peers is not None:
        peer.lead.restore_peers(strategy.checkpoints.known_peers)
        strategy.checkpoints.known_peers = None  # a later generation of the run must not restore this older list
    if strategy.config.role != "trainer":
        peer.serve(model.twin(), trains=True)
    spec = _run_spec(strategy, trainer, selection)
    return peer.start_run(spec, model, strategy.root_device, strategy.check_peers)


def _run_spec(strategy: SwarmStrategy, trainer: Trainer, selection: Selection | None) -> RunSpec:
    config, restored_step = strategy.config, strategy.checkpoints.restored_step
    clip_at = trainer.gradient_clip_val or None  # Lightning's 0 means no clipping
    by_norm = trainer.gradient_clip_algorithm in (None, GradClipAlgorithmType.NORM)
    # `max_steps` does not count the steps of trial callbacks, such as `LearningRateFinder`; Lightning limits these.
    is_limited = trainer.max_steps != -1 and not callbacks_of(trainer, *checks.TRIAL_CALLBACKS)
    return RunSpec(
        ranges=strategy.ranges,
        num_servers=strategy.num_awaited_servers,
        num_trainers=strategy.num_trainers if config.role != "trainer" else 0,
        open_to_trainers=selection is not None and checks.may_be_shared(trainer, config),
        seed=torch.initial_seed() % (1 << 62),
        gradient_clip_norm=clip_at if by_norm else None,
        gradient_clip_value=None if by_norm else clip_at,
        # Lightning restores its own counter only later.
        first_step=trainer.global_step if restored_step is None else restored_step,
        selection=selection,
        scaling=scaling_of(trainer) if strategy.is_shared else None,
        max_steps=trainer.max_steps if is_limited else None,
        total_steps=_total_steps(trainer) if selection is not None else None,
        optimizer=kind_of(trainer.optimizers[0]) if selection is not None else None,
        unportable=optimizer_checks.unportable(trainer.optimizers[0], trainer.lightning_module)
        if selection is not None
        else "",
    )


def _total_steps(trainer: Trainer) -> int | None:
    """Return the number of steps of the whole run; None if unknown, or if the data must be loaded first to know it."""
    if trainer.max_epochs == -1:
        return trainer.max_steps if trainer.max_steps != -1 else None
    if trainer.train_dataloader is None:
        return None
    steps = trainer.estimated_stepping_batches
    return int(steps) if steps != float("inf") else None


def connect(strategy: SwarmStrategy, run: SwarmRun) -> None:
    """Connect the module, the loop and, at the lead, the weights to the run."""
    is_fitting = run.trainer.state.fn == TrainerFn.FITTING
    strategy.initial_weights.mark_used(run.trainer.lightning_module, trains=is_fitting)
    if not run.model.blocks.is_empty:
        run.undo.enter_context(on_this_thread())
        run.undo.callback(intercept(run.model.blocks, run.session.pipeline).remove)
    if is_fitting:
        checks.check_scaling(run.session.run, scales=scaling_of(run.trainer) is not None)
        _connect_loop(strategy, run)
    if run.session.is_lead:
        _connect_weights(strategy, run)


def _connect_loop(strategy: SwarmStrategy, run: SwarmRun) -> None:
    run.data.open(run.session)
    run_log = _open_log(strategy.rollback, run) if run.session.is_lead else None
    run.loop = SwarmOptimization(run.trainer, run.session, run.data, run.config, run.access, run_log)
    run.loop.take_over()
    run.undo.callback(run.loop.release)
    run.is_training = True
    strategy.rollback.begin_run(run)


def _open_log(rollback: Rollback, run: SwarmRun) -> RunLog:
    """Begin to log membership changes, after a rollback also lost peers, and to offer logged numbers to surveys."""
    if rollback.membership is None:
        rollback.membership = Membership(run.session.run, run.peer.lead.addresses)
    run_log = RunLog(run.trainer, run.session, rollback.membership)
    run.undo.callback(run_log.open().close)
    run.undo.callback(LoggedNumbers(run.trainer, run.peer).release)
    run_log.catch_up()
    return run_log


def _connect_weights(strategy: SwarmStrategy, run: SwarmRun) -> None:
    """Connect, at the lead, the module's weights, the optimizer's state and checkpoint files to the run."""
    trainer, module, access, config = run.trainer, run.trainer.lightning_module, run.access, run.config
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    is_stale = is_on_meta(module) or (strategy.weights is not None and strategy.weights.stale)
    weights = strategy.weights = ModuleWeights(run.peer, run.session, module, access, limits=config.limits)
    weights.stale = is_stale
    if is_fitting:
        weights.send_first_state(strategy.optimizers[0])
        weights.watch_optimizer(trainer, run.written_keys)
    if run.gathers_weights:
        run.undo.callback(WeightSync(trainer, weights, access).close)
    if is_fitting and config.gather_on_end and not run.gathers_weights:
        rank_zero_info("The model is on torch's meta device: only checkpoints will contain the trained weights.")
    if is_fitting and strategy.checkpoints.writes_files:
        strategy.checkpoints.files = CheckpointFiles(trainer, strategy.checkpoint_io)


# ------------------------------------------------------------------ serving


def serve(
    strategy: SwarmStrategy,
    trainer: Trainer,
    datamodule: LightningDataModule | None,
    call_arguments: Mapping[str, Any] | None = None,  # arguments of the Trainer's method; None: this peer never leads
) -> str | None:
    """Serve until the run is over. If the lead dies and this peer must lead, return the checkpoint to start from."""
    module, peer = strategy.own_module, strategy.own_peer
    strategy.connect(module)
    model_setup.set_up(trainer, module, datamodule)
    restore = model_setup.remember(module)  # serving changes the module, but a takeover needs it unchanged
    model = model_setup.served_model(strategy, module)
    may_lead = call_arguments is not None and model_setup.could_lead(trainer, module, strategy.config, call_arguments)
    peer.serve(model, may_take_over=may_lead)
    with reporting_join() as report:
        peer.runtime.run(peer.serve_run(report))
    if not peer.must_take_over:
        peer.close()
        return None
    target = strategy.rollback.take_over(trainer, peer)
    has_other_trainers = peer.lead.run is not None and peer.lead.run.is_shared
    peer.events.note("went_back", step=target.version, reason="this peer takes over from the former lead")
    peer.release(target.version)
    restore(model)
    if has_other_trainers:
        strategy.config = replace(strategy.config, role="both")
    return str(target.path)
