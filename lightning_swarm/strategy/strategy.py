"""`SwarmStrategy`: its settings, and its methods for Lightning, which pass the work to this package's other modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swarm.client.status import SwarmStatus, status_of
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.rebase import written_once
from lightning_swarm.model.boundary_layers import Boundary
from lightning_swarm.model.deferred_init import StayOnMeta
from lightning_swarm.model.fidelity.module_states import record_first_values
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.peer.config import (
    DEFAULT_LISTEN,
    DEFAULT_RUN_ID,
    PeerRole,
    Preemption,
    Rebalancing,
    StateDictType,
    SwarmConfig,
    Trust,
    TrustLevel,
)
from lightning_swarm.protocol.settings import (
    CodecName,
    Compression,
    OnConviction,
    RebalancingRule,
    RobustAveraging,
    RunSettings,
)
from lightning_swarm.strategy import checks, extra_trainers, model_setup, optimizer_checks, startup, teardown
from lightning_swarm.strategy.base import StrategyBase
from lightning_swarm.strategy.checkpointing import Checkpoints
from lightning_swarm.strategy.framework import LIGHTNING, ImportTree
from lightning_swarm.strategy.launcher import SwarmLauncher
from lightning_swarm.strategy.rollback.rollback import Rollback

if TYPE_CHECKING:
    from pytorch_lightning import accelerators, plugins

    # Types of both import trees; `written_once` leaves only the types of the class's own tree.
    EitherAccelerator: TypeAlias = Accelerator | accelerators.Accelerator
    EitherCheckpointIO: TypeAlias = CheckpointIO | plugins.CheckpointIO
    EitherPrecision: TypeAlias = Precision | plugins.Precision

_LIMITS = Limits()
# Deprecated argument -> the record that takes its place.
_RECORDS = {
    "audit_share": "trust=Trust('audited', audit_share=...)",
    "on_conviction": "trust=Trust('audited', on_conviction=...)",
    "robust_averaging": "trust=Trust(robust_averaging=...)",
    "rebalance_interval": "rebalancing=Rebalancing(interval=...)",
}
# Attributes that a compiled LightningModule has in place of the class's own.
_COMPILED = ("forward", "training_step", "validation_step", "test_step", "predict_step", "_compiler_ctx")


@written_once(Strategy, framework=LIGHTNING)
class SwarmStrategy(StrategyBase):
    """Trains one model on a swarm of peers: pipeline stages, each held by one peer or more.

    ``Trainer(accelerator="cpu", devices=4, strategy=SwarmStrategy(num_stages=2))`` starts four peers on this machine.
    The LightningModule stays as it is, and the loss curve is that of the plain Trainer up to float rounding.

    For arguments marked "run-wide", peers that join a run use the values of the peer that started it.

    Args:
        num_stages: Number of stages that the model is cut into. None: one per device. With one stage the model stays
            whole, and trainers compute it themselves, unless an argument defines the cut, or machines without data
            may take part. On one device that no other machine may join, Lightning trains without a swarm.
        pipeline: Dotted name of the submodule to cut, a `Sequential` or a `ModuleList`. None: the blocks that the
            LightningModule's `configure_stages()` returns, or else the only `Sequential` that holds all parameters.
        split: Cost that the cut balances: ``"parameters"``, or the ``"time"`` of each block on this machine with the
            LightningModule's `example_input_array`. Alternatively, the names of the blocks where stages begin.
        boundary: Layers to insert where the model is cut, so that fewer features travel; they are trained with the
            model. `Bottleneck(ratio=4)` or `Maxout(ratio=4)`. A model that already has such layers is cut at them.
        microbatch_size: Samples per microbatch, the unit that is routed through the pipeline. None: each batch is cut
            into enough microbatches to keep the stages busy; it is not cut while this peer's server alone holds all
            stages. Run-wide.
        shared: Names of keyword arguments of the pipelined module that every microbatch gets whole.
        target_batch_size: Samples per optimizer step, independent of the size of a batch. None: a step ends as in
            Lightning, by `accumulate_grad_batches`.
        role: ``"auto"``: the peer that starts the run trains and serves. Peers that join (`initial_peers`) only serve;
            a peer with data takes over if the starter dies. ``"both"``: this process trains and serves; with several
            devices each device's process does, and `target_batch_size` must be set. ``"trainer"``: it trains and
            holds no stage. ``"server"``: it needs no data; `fit` serves until the run is over, then ends the process.
        run_id: Name of the run.
        initial_peers: Peers through which to join: ``"203.0.113.7:31337/12D3..."``, as the first peer prints it, or
            multiaddresses.
        listen: IP address to listen on, with or without a port: ``"0.0.0.0:31337"`` for all addresses of the machine.
            Further peers of this machine take the following ports.
        announce: Address and port at which other peers reach this one, if they differ from `listen`.
        identity_path: File with this peer's private key, which only its owner may read. The file is created if it does
            not exist. With it a restarted peer keeps its id. Further peers of this machine have files beside it, with
            their numbers at the end of the names.
        trust: Peers that may take part: ``"invited"``, ``"audited"``, ``"open"``, or a `Trust`, which also says how
            audits work. None: ``"invited"`` if other machines reach this peer, by `listen` or `announce`, or it has an
            invitation.
        invite: File with the invitation by which this peer joins, which ``lightning-swarm invite`` writes. A peer that
            has been in the run needs no invitation if its `identity_path` is the same.
        gather_on_end: After `fit` the LightningModule holds the trained weights. A module on torch's meta device never
            does.
        state_dict_type: Form of a checkpoint: one file, as elsewhere in Lightning (``"full"``), or a folder to which
            each server writes its own stages, so that no machine needs room for the whole model (``"sharded"``).
        offload_optimizer: Keep the optimizer's state in main memory, and step there. No effect on a CPU.
        delay_optimizer_step: Average gradients and step while the next step's microbatches are computed. Each gradient
            is then computed with weights that are one step old. Run-wide.
        deterministic: Sum gradients so that the trained weights are bit-identical, however many servers there are,
            however the work is divided among them, and whichever of them die. Needs machines of one kind, one trainer
            and `microbatch_size`. ``Trainer(deterministic=True)`` requests reproducible kernels. Run-wide.
        rebalancing: Rule by which servers move to other stages during the run: ``"gain"``, ``"paper"``, ``"none"``, or
            a `Rebalancing`, which also sets the interval. Run-wide.
        preemption: Cloud provider whose preemption notices this peer watches for: ``"aws"``, ``"gcp"``, ``"azure"``, or
            ``"auto"`` to detect it. On notice a server leaves the run in order; a trainer acts as on SIGTERM.
            None: do not watch.
        compression: Format of tensors sent between stages and between the servers of a stage: ``"float16"``,
            ``"bfloat16"``, ``"8bit"``, ``"6bit"``, ``"4bit"``, or ``"none"`` to send them as they are. A `Compression`
            sets activations, gradients and averaging separately. Run-wide.
        limits: Bounds on waiting times and memory.
        accelerator: As in every strategy of Lightning.
        checkpoint_io: As in every strategy of Lightning. None: files of `ModelCheckpoint` are written in the background
            while training continues.
        precision_plugin: As in every strategy of Lightning.
        audit_share: Deprecated. Use `trust=Trust("audited", audit_share=...)`.
        on_conviction: Deprecated. Use `trust=Trust("audited", on_conviction=...)`.
        robust_averaging: Deprecated. Use `trust=Trust(robust_averaging=...)`.
        rebalance_interval: Deprecated. Use `rebalancing=Rebalancing(interval=...)`.

    Raises:
        ConfigError: An argument is out of range. Nothing was started.

    Source: SWARM, arXiv:2301.11913.
    """

    strategy_name = "swarm"
    framework: ClassVar[ImportTree]

    def __init__(
        self,
        num_stages: int | None = None,
        pipeline: str | None = None,
        split: Literal["parameters", "time"] | Sequence[str] = "parameters",
        boundary: Boundary | None = None,
        microbatch_size: int | None = None,
        shared: Sequence[str] = (),
        target_batch_size: int | None = None,
        role: PeerRole = "auto",
        run_id: str = DEFAULT_RUN_ID,
        initial_peers: str | Sequence[str] = (),
        listen: str = DEFAULT_LISTEN,
        announce: str | Sequence[str] = (),
        identity_path: str | None = None,
        trust: TrustLevel | Trust | None = None,
        invite: str | None = None,
        gather_on_end: bool = True,
        state_dict_type: StateDictType = "full",
        offload_optimizer: bool = False,
        delay_optimizer_step: bool = False,
        deterministic: bool = False,
        rebalancing: RebalancingRule | Rebalancing = "gain",
        preemption: Preemption | None = None,
        compression: CodecName | Compression = "none",
        limits: Limits = _LIMITS,
        accelerator: EitherAccelerator | None = None,
        checkpoint_io: EitherCheckpointIO | None = None,
        precision_plugin: EitherPrecision | None = None,
        audit_share: float | None = None,
        on_conviction: OnConviction | None = None,
        robust_averaging: RobustAveraging | None = None,
        rebalance_interval: float | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.framework.use_own_logger()
        deprecated = {"audit_share": audit_share, "on_conviction": on_conviction, "robust_averaging": robust_averaging}
        parsed_trust = Trust.parse(trust, **deprecated)
        parsed_rebalancing = Rebalancing.parse(rebalancing, interval=rebalance_interval)
        for name, value in {**deprecated, "rebalance_interval": rebalance_interval}.items():
            if value is not None:
                self.framework.deprecate(name, instead=_RECORDS[name])
        self.config = SwarmConfig(
            num_stages=num_stages,
            pipeline=pipeline,
            split=split if isinstance(split, str) else tuple(split),
            boundary=boundary,
            shared=_as_tuple(shared),
            role=role,
            run_id=run_id,
            initial_peers=tuple(map(Address.parse, _as_tuple(initial_peers))),
            listen=HostPort.to_listen(listen),
            announce=tuple(map(HostPort.to_announce, _as_tuple(announce))),
            identity_path=identity_path,
            trust=parsed_trust.level,
            invite=invite,
            gather_on_end=gather_on_end,
            state_dict_type=state_dict_type,
            offload_optimizer=offload_optimizer,
            preemption=preemption,
            settings=RunSettings(
                target_batch_size=target_batch_size,
                microbatch_size=microbatch_size,
                delay_optimizer_step=delay_optimizer_step,
                deterministic=deterministic,
                rebalancing=parsed_rebalancing.rule,
                rebalance_interval=parsed_rebalancing.interval,
                compression=Compression.parse(compression),
                audit_share=parsed_trust.share,
                on_conviction=parsed_trust.on_conviction,
                robust_averaging=parsed_trust.robust_averaging,
            ),
            limits=limits,
        )
        self.rollback = Rollback(self)
        self.checkpoints = Checkpoints(self, self.rollback)

    @override
    def __getstate__(self) -> dict[str, Any]:  # a copy has no part in the run
        return {**super().__getstate__(), "peer": None, "joined": None, "_compiled": {}}

    # ------------------------------------------------------------------ module and device

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # After it sets this attribute, Lightning refuses a compiled module in all but three strategies. So store the
        # uncompiled module: hooks run uncompiled, and each peer compiles the stages that it computes.
        self._module = module
        if module is None:
            return
        context = getattr(module, "_compiler_ctx", None)
        if context is not None:
            self._compiled = {name: value for name, value in vars(module).items() if name in _COMPILED}
            if not self.is_plain:
                checks.check_compiling()
            self._module = module = self.framework.to_uncompiled(module)
        if not self.is_plain:
            record_first_values(module)  # before hooks that servers do not call may set attributes

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return self.run is not None or not self.is_plain  # the swarm decides when a step is full

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if not self.config.only_serves:  # a peer that only serves gets all values from the lead
                stack.enter_context(self.initial_weights.recording(self.root_device))
            stack.enter_context(super().tensor_init_context(empty_init=False))
            if empty_init:
                stack.enter_context(torch.device("meta"))
            yield
        if self.lightning_module is not None:  # user code may make a module before Lightning has connected one
            record_first_values(self.lightning_module)

    @override
    def model_to_device(self) -> None:
        with StayOnMeta():
            self.own_module.to(self.root_device)

    @property
    def num_awaited_servers(self) -> int:
        """Return the number of servers that a run waits for; further servers that are ready by then serve, too."""
        return max(1, self.num_devices - (self.config.role == "trainer"))

    # ------------------------------------------------------------------ starting

    @override
    def _configure_launcher(self) -> None:
        checks.check_strategy(self, self.framework)
        checks.check_interactive(self.num_devices, self.framework)
        self.checkpoints.writes_files = self._checkpoint_io is None
        self._launcher = SwarmLauncher(self, self.num_devices)

    @property
    def swarm_launcher(self) -> SwarmLauncher | None:
        """Return the launcher that starts this machine's peers; None if they are all in this process."""
        return self._launcher if isinstance(self._launcher, SwarmLauncher) else None

    # Methods that the launcher calls.
    check = startup.check
    serve = startup.serve

    def follow(self, trainer: Trainer) -> None:
        """Make this process a trainer that follows the lead, which is another process."""
        self.rollback.restore_lead_role = extra_trainers.become_follower(trainer)

    def check_peers(self) -> None:
        """Raise if a peer that this process started has ended."""
        if self.swarm_launcher is not None:
            self.swarm_launcher.check_children()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # This is Lightning's first call to a strategy after the module has added its callbacks.
        if self.is_plain:
            checks.check_callback_imports(self.own_module.trainer)
            vars(self.own_module).update(self._compiled)  # Lightning's check for compiled modules is over
            self._compiled = {}
        elif not self.config.only_serves:
            self._has_begun = False  # each run, even after a rollback, begins without a batch
            startup.complete_callbacks(self, self.own_module.trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.own_module.trainer
        return startup.share_loader(self, trainer, dataloader) if trainer.training else dataloader

    correct_estimated_steps = startup.correct_estimated_steps  # called by `EstimatedSteps`

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with contextlib.nullcontext() if self.is_plain else optimizer_checks.refusing_several_optimizers():
            super().setup_optimizers(trainer)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        # This is the module's last change before its optimizer is made.
        model_setup.cut(self, self.own_module, restored=self.checkpoints.restored_step is not None)
        return super()._setup_model(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        startup.prepare_module(self, trainer)
        super().setup(trainer)
        if not model_setup.computes_alone(self, trainer):
            self.run = startup.enter_run(self, trainer)
            startup.connect(self, self.run)

    start_run = startup.start_run

    # ------------------------------------------------------------------ the loop

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._in_batches = self._has_begun = True
        if self.weights is not None:
            self.weights.stale = True  # from the first batch on, only the servers have the newest weights

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self.run is not None and self.run.loop is not None:
            self.run.loop.begin_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self.run is not None and self.run.loop is not None:
            self.run.session.end_backward()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.run is not None:
            self.run.session.pipeline.marks.begin_window()  # Lightning clears gradients before it validates
            self.run.session.renew()
        return super().validation_step(*args, **kwargs)

    # ------------------------------------------------------------------ saving and loading

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.checkpoints.module_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        return self.checkpoints.optimizer_state(optimizer, super().optimizer_state)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        self.checkpoints.save(checkpoint, filepath, storage_options, super().save_checkpoint)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self.checkpoints.remove(filepath, super().remove_checkpoint)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        load = super().load_checkpoint  # accepts `weights_only` since Lightning 2.6
        return self.checkpoints.load(checkpoint_path, lambda path: load(path, *args, **kwargs))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        load = super().load_model_state_dict
        self.checkpoints.load_module(checkpoint, lambda filled: load(filled, strict))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.checkpoints.load_optimizer(checkpoint, super().load_optimizer_state_dict)

    # ------------------------------------------------------------------ ending

    leave = teardown.leave

    @override
    def on_train_end(self) -> None:
        if self.run is not None:
            self.run.end_loop()
            self.checkpoints.finish_files()

    @override
    def on_exception(self, exception: BaseException) -> None:
        teardown.handle_exception(self, exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        teardown.tear_down(self, super().teardown)

    # ------------------------------------------------------------------ for users

    @property
    def address(self) -> str:
        """The address at which other peers join, in the form for ``lightning-swarm join`` and `initial_peers`.

        Raises:
            ConfigError: The peer has not started yet, or has ended.
        """
        if self.peer is None:
            raise ConfigError("`address` needs a run under way: ask for it from fit_start to fit_end.")
        return self.peer.address

    @property
    def local_processes(self) -> list[int]:
        """Ids of the processes that were started for this machine's other peers, except processes found dead."""
        return self.swarm_launcher.processes if self.swarm_launcher is not None else []

    def status(self) -> SwarmStatus:
        """The trainer's view of stages and peers at this moment.

        Raises:
            ConfigError: No run is under way.
        """
        if self.run is None:
            raise ConfigError("`status()` needs a run under way: call it from fit_start to fit_end.")
        return status_of(self.run.session)


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
