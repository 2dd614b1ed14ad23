"""`SwarmStrategy`: Lightning's hooks, each a few lines that call the parts below.

Those on processes, on saved state and on ends are in `ranks`, `resuming` and `ending`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.client.pipeline.interception import Interception
from lightning_swarm.client.session import Session
from lightning_swarm.client.status import SwarmStatus, status_of
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.rebase import written_once
from lightning_swarm.model.boundary_layers import Boundary
from lightning_swarm.model.deferred_init import is_on_meta, staying_on_meta
from lightning_swarm.model.partition import find_blocks
from lightning_swarm.model.selection import read_selection
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.peer.config import Compression, Preemption, Role, StateDictType, SwarmConfig
from lightning_swarm.protocol.messages.run import CodecName, Rebalancing, Selection, ranges_of
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.strategy import checks, extra_trainers, model_setup
from lightning_swarm.strategy.checkpointing import CheckpointFiles
from lightning_swarm.strategy.data import SharedData, can_share
from lightning_swarm.strategy.framework import LIGHTNING, ImportTree
from lightning_swarm.strategy.launcher import SwarmLauncher
from lightning_swarm.strategy.optimization_loop import SwarmOptimization
from lightning_swarm.strategy.teardown import TeardownHooks
from lightning_swarm.strategy.weight_sync import ModuleWeights, WeightSync, writes_weights

if TYPE_CHECKING:
    from pytorch_lightning import accelerators, plugins

    # Of either import tree: `written_once` leaves those of its own.
    EitherAccelerator: TypeAlias = Accelerator | accelerators.Accelerator
    EitherCheckpointIO: TypeAlias = CheckpointIO | plugins.CheckpointIO
    EitherPrecision: TypeAlias = Precision | plugins.Precision

_log = logging.getLogger(__name__)
_LIMITS = Limits()


@written_once(Strategy, framework=LIGHTNING)
class SwarmStrategy(TeardownHooks):
    """Trains one model on a swarm of peers: pipeline stages, each held by one peer or more.

    ``Trainer(accelerator="cpu", devices=4, strategy=SwarmStrategy(num_stages=2))`` starts four peers on this machine.
    The LightningModule stays as it is; the loss curve is the plain Trainer's up to float rounding.

    Args:
        num_stages: Into how many stages the model is cut. None: one for each device.
        pipeline: Dotted name of the submodule to cut, a `Sequential` or a `ModuleList`. None: the blocks that the
            LightningModule's `configure_stages()` returns, else the one `Sequential` that holds all parameters.
        split: How the cut is balanced: by ``"parameters"``, or by the ``"time"`` that each block takes on this machine
            with the LightningModule's `example_input_array`. Or the names of the blocks where stages begin.
        boundary: Layers that are put into the model where it is cut, so that fewer features travel, and trained with
            it: `Bottleneck(ratio=4)` or `Maxout(ratio=4)`. A model that has such layers is cut where they stand.
        microbatch_size: Samples routed at once. None: each batch in as many parts as keep the stages busy. The
            starter's word holds.
        shared: Names of keyword arguments of the pipelined module that go whole to every microbatch.
        target_batch_size: Samples of one optimizer step, whatever the batches are. None: Lightning's own
            arithmetic with `accumulate_grad_batches`.
        role: ``"auto"``: who starts the run trains and serves, who joins it (`initial_peers`) serves, and trains on in
            the place of a starter that dies if it has data. ``"both"``: this process trains and serves, and with
            several devices so do the others; it needs `target_batch_size` then. ``"trainer"``: it holds no stage.
            ``"server"``: it needs no data; `fit` serves until the run is over, then ends the process.
        run_id: Names the run.
        initial_peers: Whom to join: ``"203.0.113.7:31337/12D3..."``, as the first peer prints it, or multiaddresses.
        listen: IP address to listen on, with a port or without: ``"0.0.0.0:31337"`` for all of the machine's. Further
            peers of the machine take the ports that follow.
        announce: At which address and port others reach this peer, if not at those it listens on.
        identity_path: File of this peer's private key, made if it is not there: keeps its id when it is started again.
        gather_on_end: After `fit` the LightningModule holds the trained weights. One on torch's meta device never does.
        state_dict_type: What a checkpoint is: ``"full"``: one file, as elsewhere in Lightning; ``"sharded"``: a folder,
            to which each server writes its own stages, so that nobody has to hold the whole model.
        offload_optimizer: Keep the optimizer's state in the host's memory, and step there. On a CPU it is there anyway.
        delay_optimizer_step: Average and step while the next step's microbatches are computed: each step's gradient is
            that of the weights one step before. The starter's word holds.
        deterministic: Add gradients up so that the trained weights do not depend, to the bit, on which servers compute
            what, nor on how many there are, nor on which of them die: on machines of one kind, for one trainer. It
            needs `microbatch_size`. That a server's own kernels give the same twice is asked for by
            ``Trainer(deterministic=True)``. The starter's word holds.
        rebalancing: Which servers move to another stage during the run: ``"gain"``: where the pipeline gains more by
            it than it costs; ``"paper"``: by the SWARM paper's rule; ``"none"``: nobody. The starter's word holds.
        rebalance_interval: Seconds between two decisions on that, at the latest; when peers come or go it is decided at
            once.
        preemption: Whose notice to heed that this machine is about to be taken away: ``"aws"``, ``"gcp"``, ``"azure"``,
            or ``"auto"`` for whichever answers. A server leaves the run in order then; a trainer takes it for a
            SIGTERM. None: nobody is asked.
        compression: How tensors travel between stages and between the servers of a stage: ``"float16"``,
            ``"bfloat16"``, ``"8bit"``, ``"6bit"``, ``"4bit"`` or, as they are, ``"none"``. Or a `Compression`, which
            says it of activations, gradients and averaging apart. The starter's word holds.
        limits: Bounds on waiting and memory.
        accelerator: As in every strategy of Lightning.
        checkpoint_io: As in every strategy of Lightning. None: files of `ModelCheckpoint` are written while training
            goes on.
        precision_plugin: As in every strategy of Lightning.

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
        role: Role = "auto",
        run_id: str = "swarm",
        initial_peers: str | Sequence[str] = (),
        listen: str = "127.0.0.1",
        announce: str | Sequence[str] = (),
        identity_path: str | None = None,
        gather_on_end: bool = True,
        state_dict_type: StateDictType = "full",
        offload_optimizer: bool = False,
        delay_optimizer_step: bool = False,
        deterministic: bool = False,
        rebalancing: Rebalancing = "gain",
        rebalance_interval: float = 300.0,
        preemption: Preemption | None = None,
        compression: CodecName | Compression = "none",
        limits: Limits = _LIMITS,
        accelerator: EitherAccelerator | None = None,
        checkpoint_io: EitherCheckpointIO | None = None,
        precision_plugin: EitherPrecision | None = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin)
        self.framework.take_messages()
        self.config = SwarmConfig(
            num_stages=num_stages,
            pipeline=pipeline,
            split=split if isinstance(split, str) else tuple(split),
            boundary=boundary,
            microbatch_size=microbatch_size,
            shared=_as_tuple(shared),
            target_batch_size=target_batch_size,
            role=role,
            run_id=run_id,
            initial_peers=tuple(map(Address.parse, _as_tuple(initial_peers))),
            listen=HostPort.to_listen(listen),
            announce=tuple(map(HostPort.to_announce, _as_tuple(announce))),
            identity_path=identity_path,
            gather_on_end=gather_on_end,
            state_dict_type=state_dict_type,
            offload_optimizer=offload_optimizer,
            delay_optimizer_step=delay_optimizer_step,
            deterministic=deterministic,
            rebalancing=rebalancing,
            rebalance_interval=rebalance_interval,
            preemption=preemption,
            compression=Compression.parse(compression),
            limits=limits,
        )
        self._ranges: Sequence[range] = ()  # the blocks of each stage, once the module is set up
        self._writes_files = False  # nobody brought a `CheckpointIO`

    # ------------------------------------------------------------------ what Lightning asks

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        # Lightning refuses a compiled module with all but three strategies, right after it has set this. Here the
        # trainer's hooks run as they are, and the stages are compiled where they are computed.
        context = getattr(module, "_compiler_ctx", None)
        if context is not None:
            self._compiler = context["dynamo_ctx"]
            checks.check_compiling()
            module = self.framework.to_uncompiled(module)
        self._module = module

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        return True  # the swarm says when a step is full

    @override
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if not self.config.only_serves:  # who serves gets all values from the lead
                stack.enter_context(self._origin.recording(self.root_device))
            stack.enter_context(super().tensor_init_context(empty_init=False))
            if empty_init:
                stack.enter_context(torch.device("meta"))
            yield

    @override
    def model_to_device(self) -> None:
        with staying_on_meta():
            self._own_module.to(self.root_device)

    # ------------------------------------------------------------------ data

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._own_module.trainer
        if not trainer.training:
            return dataloader
        part = partial(
            extra_trainers.share, trainer, dataloader, num_trainers=self.num_trainers, comes=self._comes_to is not None
        )
        if self._shares_data and can_share(dataloader, trainer):
            made: object = self._data_of(trainer).share(dataloader, part)
        else:
            made = part()
        self._way_back.loader_made(made)
        return made

    @property
    def _shares_data(self) -> bool:
        """Whether others may train along."""
        config = self.config
        together = config.role == "both" and config.target_batch_size is not None and not config.delay_optimizer_step
        return together or self._is_shared

    def _data_of(self, trainer: Trainer) -> SharedData:
        """Of this run, or of the one that it is about to begin."""
        if self._data is None:
            self._data = SharedData(trainer)
        return self._data

    # ------------------------------------------------------------------ starting

    @override
    def _configure_launcher(self) -> None:
        checks.check_strategy(self, self.framework)
        checks.check_interactive(len(self._devices))
        self._writes_files = self._checkpoint_io is None
        self._launcher = SwarmLauncher(self, len(self._devices))

    def check(self, trainer: Trainer, handed: Mapping[str, Any]) -> None:
        """Refuse what cannot work, as far as it can be seen before the model is configured.

        Args:
            trainer: Whose.
            handed: What its method was called with.
        """
        module = self._own_module
        checks.check_trainer(trainer, module, self.config)
        together = self.config.role == "both" and trainer.state.fn == TrainerFn.FITTING
        self.num_trainers = len(self._devices) if together else 1
        if self.num_trainers > 1:
            checks.check_trainers(trainer, self.config)
        self._is_shared = self.num_trainers > 1 or checks.may_be_shared(trainer, self.config)
        checks.check_data(trainer, module, handed)
        ckpt_path = handed.get("ckpt_path")
        checks.check_ckpt_path(ckpt_path)
        model_setup.check(trainer, self.config, self._num_stages, restored=ckpt_path is not None)
        checks.check_servers(self.config, len(self._devices))

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" in str(error):  # Lightning's remedy for it is one that a swarm refuses
                raise ConfigError(checks.ONE_OPTIMIZER.format("several")) from error
            raise

    def follow(self, trainer: Trainer) -> None:
        """Become a trainer beside the lead, which another process is."""
        self._put_back = extra_trainers.follow(trainer)

    @override
    def setup_environment(self) -> None:
        """The first that is asked of a strategy once the module has brought its callbacks."""
        super().setup_environment()
        if self.config.only_serves:
            return
        trainer, beside = self._own_module.trainer, self.num_trainers > 1 or not self.is_global_zero
        if not self.is_global_zero:
            extra_trainers.leave_decisions(trainer)
        checks.check_brought_callbacks(trainer, self.config, beside_others=beside)
        self._is_shared = beside or checks.may_be_shared(trainer, self.config)

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        """The last that is done to the module before its optimizer is made."""
        module, config = self._own_module, self.config
        blocks = find_blocks(module, config.pipeline)
        # Where the run is cut in which this process is to train, or which it took over; else it begins one.
        ranges = ranges_of(self._comes_to.manifest.stages if self._comes_to is not None else self._inherited)
        self._ranges = ranges or model_setup.choose(module.trainer, blocks, config, self._num_stages)
        restored = self._restored_step is not None
        model_setup.insert_layers(module.trainer, blocks, config, self._ranges, restored=restored)
        self._origin.fill_outside(module, blocks, self.root_device)
        return super()._setup_model(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        if self._comes_to is not None:
            assert self.peer is not None
            extra_trainers.reseed(self.peer.boot_id)
        elif not self.is_global_zero:
            extra_trainers.reseed(self.local_rank)
        module = self._own_module
        checks.check_on_meta(trainer, module, self.config)
        self._origin.index_tensors(module)
        super().setup(trainer)
        if not self.is_global_zero:
            extra_trainers.follow_schedule(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        selection = read_selection(module, checks.check_optimizers(self.optimizers)) if fitting else None
        model = self._models.of(module, keep=True)
        model.cut(self._ranges)  # what cannot be cut is refused here, before anyone is asked
        self._session = self._start_run(trainer, model, self._ranges, selection)
        self._origin.spend(module, trains=fitting)
        self._undo.callback(Interception(model.blocks, self._session.pipeline).remove)
        if fitting:
            self._take_loop_over(trainer, self._session)
        if self.is_global_zero:
            self._come_home(trainer, self._session)

    def _start_run(
        self, trainer: Trainer, model: PeerModel, ranges: Sequence[range], selection: Selection | None
    ) -> Session:
        assert self.peer is not None
        follower, device = self.peer.follower, self.root_device
        if self._is_shared:
            self._undo.callback(extra_trainers.settle_dtype(self.precision_plugin))
        if self._comes_to is not None and not (self._way_back.goes_on or self._way_back.begins_anew):
            server = self._for_server(trainer, model) if self.config.role == "both" else None
            inherits = server is not None and model_setup.has_whole_model(self._own_module, self.config)
            session, epoch = follower.train_in(self._comes_to, model, server, device, inherits=inherits)
            extra_trainers.begin_at(trainer, step=session.version, epoch=epoch)
            return session
        if self.is_global_zero:
            return self._begin_run(trainer, model, ranges, selection)
        session = follower.join_run(model, self._for_server(trainer, model), device)
        if self._way_back.begins_anew:
            extra_trainers.begin_at(trainer, step=session.version, epoch=session.lead_epoch())
        return session

    def _begin_run(
        self, trainer: Trainer, model: PeerModel, ranges: Sequence[range], selection: Selection | None
    ) -> Session:
        """As the lead."""
        assert self.peer is not None
        launcher = self._swarm_launcher
        if launcher is not None:
            self.peer.lead.num_known_dead = lambda: launcher.num_ended
        self.peer.lead.check_first()
        serves = self.config.role != "trainer"
        if serves:
            self.peer.serve(self._for_server(trainer, model), trains=True)
        spec = model_setup.run_spec(
            trainer,
            ranges,
            selection,
            num_servers=self._num_servers,
            num_trainers=self.num_trainers if serves else 0,
            open_to_trainers=checks.may_be_shared(trainer, self.config),
            # Lightning restores its own counter only after this.
            first_step=trainer.global_step if self._restored_step is None else self._restored_step,
        )
        return self.peer.start_run(spec, model, self.root_device, self.check_peers)

    @property
    def _num_servers(self) -> int:
        """How many of them the run waits for; whoever else is there serves, too."""
        return max(1, len(self._devices) - (self.config.role == "trainer"))

    def check_peers(self) -> None:
        """Raise if a peer that this process started has ended."""
        if self._swarm_launcher is not None:
            self._swarm_launcher.check_children()

    def _take_loop_over(self, trainer: Trainer, session: Session) -> None:
        """Have the training loop's steps be the swarm's."""
        assert self.peer is not None
        limits, data = self.config.limits, self._data_of(trainer)
        data.open(session)
        self._undo.callback(data.close)
        self._loop = SwarmOptimization(
            trainer, session, self.config.target_batch_size, max_metric_bytes=limits.max_metric_bytes, data=data
        )
        self._loop.take_over()
        self._trains = True
        self._way_back.watch(trainer, self.peer, session, self._loop, snapshot_interval=limits.snapshot_interval)

    def _come_home(self, trainer: Trainer, session: Session) -> None:
        """At the lead: have weights and files be where callbacks, and whoever comes after the run, look for them."""
        assert self.peer is not None
        module, fitting = self._own_module, trainer.state.fn == TrainerFn.FITTING
        stale = is_on_meta(module) or (self._weights is not None and self._weights.stale)
        self._weights = ModuleWeights(self.peer, session, module, limits=self.config.limits, stale=stale)
        self._undo.callback(WeightSync(trainer, self._weights, stays=self._gathers).close)
        if fitting and self.config.gather_on_end and not self._gathers:
            rank_zero_info("The model is on torch's meta device: what is trained will be in checkpoints only.")
        if fitting and self._writes_files:
            self._files = CheckpointFiles(trainer, self.checkpoint_io)

    # ------------------------------------------------------------------ serving

    def serve(
        self, trainer: Trainer, datamodule: LightningDataModule | None, handed: Mapping[str, Any] | None = None
    ) -> str | None:
        """Be a server until the run is over. Enters no loop and touches no data, unless the lead dies.

        Args:
            trainer: Of this process; it does not run before.
            datamodule: For a LightningModule that asks it for a size, say. It is neither prepared nor set up.
            handed: What the Trainer's method was called with; None: this peer never leads.

        Returns:
            The checkpoint from which this peer is to run the Trainer's function, in the place of the lead. None: the
            run is over.
        """
        assert self.peer is not None
        module = self._own_module
        self.connect(module)
        model_setup.set_up(trainer, module, datamodule)
        put_back = model_setup.remember(module)
        model = self._models.served(module)
        inherits = handed is not None and model_setup.could_lead(trainer, module, self.config, handed)
        self.peer.serve(model, inherits=inherits)
        self.peer.serve_to_the_end(rank_zero_info)
        if not self.peer.inherits:
            self.peer.close()
            return None
        goal = self._take_over(trainer, self.peer)
        shared = self.peer.lead.run is not None and self.peer.lead.run.is_shared
        self.peer.events.note("went_back", step=goal.version, reason="this peer leads in the place of another one")
        self.peer.release(goal.version)
        put_back(model)
        if shared:  # others train in it
            self.config = replace(self.config, role="both")
        return str(goal.path)

    @property
    def _models(self) -> model_setup.ModelSetup:
        return model_setup.ModelSetup(
            config=self.config,
            framework=self.framework,
            device=self.root_device,
            origin=self._origin,
            compiler=self._compiler,
            knows_length=self.is_global_zero and not self.config.only_serves,
        )

    def _for_server(self, trainer: Trainer, model: PeerModel) -> PeerModel:
        """What this trainer's own server computes with."""
        written = writes_weights(trainer)
        return self._models.beside(self._own_module, model, shared=self._is_shared, written=written)

    # ------------------------------------------------------------------ the loop

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._looping = True
        if self._weights is not None:
            self._weights.stale = True

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._loop is not None:
            self._loop.begin_backward()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._session is not None:
            self._session.renew()
        return super().validation_step(*args, **kwargs)

    # ------------------------------------------------------------------ what users ask

    @property
    def address(self) -> str:
        """Where others join, as ``lightning-swarm join`` and `initial_peers` take it.

        Raises:
            ConfigError: There is no peer yet, or any more.
        """
        if self.peer is None:
            raise ConfigError("`address` needs a run under way: ask for it from fit_start to fit_end.")
        return self.peer.address

    @property
    def local_processes(self) -> list[int]:
        """Ids of the processes that were started for this machine's other peers, and have not been missed."""
        return self._swarm_launcher.processes if self._swarm_launcher is not None else []

    def status(self) -> SwarmStatus:
        """The trainer's view of stages and peers at this moment.

        Raises:
            ConfigError: No run is under way.
        """
        if self._session is None:
            raise ConfigError("`status()` needs a run under way: call it from fit_start to fit_end.")
        return status_of(self._session)

    # ------------------------------------------------------------------ parts

    @property
    def _num_stages(self) -> int:
        return self.config.num_stages or len(self._devices)


def _as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
