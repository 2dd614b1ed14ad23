"""Train the same model twice, by the plain Trainer and by a swarm in this thread, and compare the runs."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytorch_lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.client.status import SwarmStatus
from lightning_swarm.core.rebase import written_part
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.batches import RecordReply
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.strategy.framework import IMPORT_TREES, LIGHTNING, PYTORCH_LIGHTNING, ImportTree
from lightning_swarm.strategy.strategy import SwarmStrategy
from lightning_swarm.testing import InMemoryStrategy
from lightning_swarm.testing import pytorch_lightning as pytorch_lightning_testing
from tests.held import Held, watched
from tests.parity.models import Net, make_optimizer, make_schedule

LOSS_TOLERANCE = 1e-11
WEIGHT_TOLERANCE = 1e-10

_OF_THE_STRATEGY = {
    "seed",
    "latency_s",
    "microbatch_s",
    "faults",
    "modify_peer",
    "unlike",
    *inspect.signature(SwarmStrategy).parameters,
}
_OF_THE_STRATEGY -= {"deterministic", "accelerator"}  # the Trainer has arguments of these names

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "precision": "64-true",
}


@dataclass
class Run:
    """Measurements of a training run."""

    module: L.LightningModule
    trainer: L.Trainer | None
    losses: list[float]  # one per batch; 0 where `training_step` returned None
    learning_rates: list[float]  # after each batch
    global_steps: list[int]  # after each batch
    norms: list[float]  # per step: of the whole gradient, before clipping
    weights: dict[str, Tensor]


@dataclass
class SwarmRun(Run):
    """Measurements that only a swarm has."""

    strategy: InMemoryStrategy
    status: SwarmStatus  # when training ended
    records: list[Record]
    rosters: list[list[list[Member]]]  # after each record
    held: Held
    num_microbatches: int
    rerouted: Counter[str] = field(default_factory=Counter)  # events: repeated calls, replays

    @property
    def num_clipped(self) -> int:
        """Count the steps whose gradient was clipped."""
        return sum(record.clip_factor < 1.0 for record in self.records)

    @property
    def num_dropped_graphs(self) -> int:
        """Count the forwards whose graph did not fit into a cache, over all servers."""
        return sum(server.calls.cache.num_dropped_graphs for server in self.strategy.servers)


def run_plain(
    make_module: Callable[[], L.LightningModule], data: DataLoader[Any], *validation: DataLoader[Any], **trainer: Any
) -> Run:
    """Train with the plain Trainer.

    Args:
        make_module: Builds the module; draws its weights after `torch.manual_seed(0)`.
        data: Batches.
        validation: At most one loader.
        trainer: Further arguments of the Trainer, and `ckpt_path`.
    """
    return run_on("auto", make_module, data, *validation, **{"devices": 1, **trainer})


def run_on(
    strategy: Any,
    make_module: Callable[[], L.LightningModule],
    data: DataLoader[Any],
    *validation: DataLoader[Any],
    **trainer: Any,
) -> Run:
    """Train by a Trainer with this strategy, as in `run_plain`."""
    return _run(make_module, data, validation, strategy, trainer)[0]


def run_plain_loop(
    make_module: Callable[[], Net],
    data: DataLoader[Any],
    *,
    target_batch_size: int,
    max_epochs: int,
    gradient_clip_val: float | None = None,
) -> Run:
    """Train with plain torch, where a step is at least `target_batch_size` samples in whole batches.

    Samples weigh equally. The batches that an epoch leaves over go into the next epoch's first step; the last batch
    closes the last step.
    """
    torch.manual_seed(0)
    module = make_module().double()
    optimizer = make_optimizer(module, module.recipe)
    schedule = make_schedule(optimizer, module.recipe)
    run = Run(module, None, [], [], [], [], {})
    pending = steps = 0
    for epoch in range(max_epochs):
        for index, batch in enumerate(data):
            tensors = [tensor.double() if tensor.is_floating_point() else tensor for tensor in batch]
            loss = module.training_step(tensors, index)
            assert isinstance(loss, Tensor)
            (loss * len(tensors[0])).backward()
            pending += len(tensors[0])
            if pending >= target_batch_size or (epoch, index) == (max_epochs - 1, len(data) - 1):
                for parameter in module.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= pending
                highest = gradient_clip_val or float("inf")
                run.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), highest)))
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                pending, steps = 0, steps + 1
            run.losses.append(loss.item())
            run.learning_rates.append(optimizer.param_groups[0].get("lr", 0.0))
            run.global_steps.append(steps)
    run.weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return run


def run_swarm(
    make_module: Callable[[], L.LightningModule],
    data: DataLoader[Any],
    *validation: DataLoader[Any],
    num_stages: int = 2,
    num_servers: int = 2,
    num_joiners: int = 0,
    num_gone: int = 0,
    num_shed: int = 0,
    exact_sums: bool = False,
    **options: Any,
) -> SwarmRun:
    """Train on a swarm, otherwise as in `run_plain`; check that all peers took part and ended up equal.

    Args:
        make_module: As in `run_plain`.
        data: As in `run_plain`.
        validation: As in `run_plain`.
        num_stages: Stages of the model.
        num_servers: Servers at the start.
        num_joiners: Servers that a callback starts later and that do join.
        num_gone: Servers that are in no roster at the end.
        num_shed: How often a server with several stages gives one up.
        exact_sums: The strategy's `deterministic`, a name that the Trainer uses too.
        options: Further arguments of `InMemoryStrategy` and of the Trainer. Microbatches have 3 samples by default.
    """
    swarm = {name: options.pop(name) for name in _OF_THE_STRATEGY & options.keys()}
    module = make_module()
    swarm = {"microbatch_size": 3, "shared": getattr(module, "shared", ()), "deterministic": exact_sums, **swarm}
    strategy = _IN_MEMORY[_framework_of(module)](num_stages=num_stages, **swarm)
    options["devices"] = num_servers + (swarm.get("role") == "trainer")
    with watched() as held:
        plain, watch = _run(make_module, data, validation, strategy, options)
    assert watch.status is not None
    run = SwarmRun(
        **vars(plain),
        strategy=strategy,
        status=watch.status,
        records=watch.records,
        rosters=watch.rosters,
        held=held,
        num_microbatches=watch.num_microbatches,
        rerouted=watch.rerouted,
    )
    if _is_whole(strategy):
        assert run.records, "no step was decided"
    elif num_gone:
        roster = {member for stage in run.rosters[-1] for member in stage}
        if swarm.get("role") == "trainer":  # the trainer may hold the layers around the pipeline
            roster = {member for member in roster if member.peer_id != "peer-0"}
        assert len(roster) == num_servers + num_joiners - num_gone
    else:
        _assert_all_took_part(run, num_stages, num_servers, num_joiners, num_shed)
    return run


def assert_same_curve(swarm: Run, plain: Run, *, loss: float = LOSS_TOLERANCE, weight: float | None = None) -> None:
    """Check each loss within `loss` (relative), each final weight within `weight` (absolute; None: not compared)."""
    assert len(plain.losses) > 1
    assert len(swarm.losses) == len(plain.losses)
    assert swarm.global_steps == plain.global_steps
    for batch, (ours, theirs) in enumerate(zip(swarm.losses, plain.losses, strict=True)):
        assert abs(ours - theirs) <= loss * abs(theirs), f"batch {batch}: loss {ours!r}, plain {theirs!r}"
    assert swarm.weights.keys() == plain.weights.keys()
    if weight is not None:
        for name, tensor in plain.weights.items():
            difference = float((swarm.weights[name] - tensor).abs().max())
            assert difference <= weight, f"{name} differs by {difference:g}"


def assert_exact(swarm: Run, plain: Run) -> None:
    """Check that the runs differ by no more than float64 rounding."""
    assert all(one.dtype == torch.float64 for one in plain.weights.values() if one.is_floating_point())
    assert_same_curve(swarm, plain, weight=WEIGHT_TOLERANCE)


def deviation(swarm: Run, plain: Run) -> tuple[float, float]:
    """Return the largest relative difference of a loss, and the largest difference of a weight."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(swarm.losses, plain.losses, strict=True) if b)
    weights = max(float((swarm.weights[name] - tensor).abs().max()) for name, tensor in plain.weights.items())
    return losses, weights


# ---------------------------------------------------------------------- parts


class _Watch:
    """Records losses, steps and the swarm's state, batch by batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.learning_rates: list[float] = []
        self.global_steps: list[int] = []
        self.norms: list[float] = []
        self.records: list[Record] = []
        self.rosters: list[list[list[Member]]] = []
        self.status: SwarmStatus | None = None
        self.num_microbatches = 0
        self.rerouted: Counter[str] = Counter()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, written_part(InMemoryStrategy)):
            return
        assert trainer.strategy.run is not None
        session = trainer.strategy.run.session
        learn = session._steps._apply_record

        async def noted(record: Record, reply: RecordReply) -> None:
            await learn(record, reply)
            self.records.append(record)
            self.rosters.append(session.run.rosters)

        session._steps._apply_record = noted  # type: ignore[method-assign]

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if isinstance(trainer.strategy, written_part(SwarmStrategy)):
            return  # a swarm's norms are read from its records
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else 0.0)
        self.learning_rates.append(trainer.optimizers[0].param_groups[0].get("lr", 0.0))
        self.global_steps.append(trainer.global_step)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(trainer.strategy, written_part(InMemoryStrategy)):
            return
        assert trainer.strategy.run is not None
        session = trainer.strategy.run.session
        self.status = trainer.strategy.status()
        self.num_microbatches = session.pipeline.num_microbatches
        self.rerouted = session.pipeline.context.fault_counts.copy()
        assert_replicas_equal(trainer.strategy)
        loop = trainer.strategy.run.loop
        assert loop is not None
        if not loop.pending_samples:
            assert_nothing_kept(trainer.strategy)
        self.norms = [record.squared_norm**0.5 for record in self.records]


class _LightningWatch(_Watch, L.Callback):
    pass


class _PytorchLightningWatch(_Watch, pytorch_lightning.Callback):
    pass


_WATCHES = {LIGHTNING: _LightningWatch, PYTORCH_LIGHTNING: _PytorchLightningWatch}
_IN_MEMORY: dict[ImportTree, Any] = {
    LIGHTNING: InMemoryStrategy,
    PYTORCH_LIGHTNING: pytorch_lightning_testing.InMemoryStrategy,
}


def _framework_of(module: Any) -> ImportTree:
    """Return the import tree of Lightning that the module comes from; the Trainer must come from the same one."""
    module = getattr(module, "_orig_mod", module)  # unwraps a compiled module
    return next(framework for framework in IMPORT_TREES if isinstance(module, framework.module))


def _run(
    make_module: Callable[[], L.LightningModule],
    data: DataLoader[Any],
    validation: Sequence[DataLoader[Any]],
    strategy: Any,
    options: dict[str, Any],
) -> tuple[Run, _Watch]:
    torch.manual_seed(0)
    module = make_module()
    framework = _framework_of(module)
    watch = _WATCHES[framework]()
    callbacks = [*options.pop("callbacks", []), watch]
    ckpt_path = options.pop("ckpt_path", None)
    with quiet_warnings():
        trainer = framework.trainer(**{**QUIET, **options}, strategy=strategy, callbacks=callbacks)
        trainer.fit(module, data, list(validation) or None, ckpt_path=ckpt_path)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return Run(module, trainer, watch.losses, watch.learning_rates, watch.global_steps, watch.norms, weights), watch


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Ignore Lightning's hints about very short runs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The number of training batches")
        warnings.filterwarnings("ignore", ".*GPU available but not used")
        yield


def _remaining(strategy: InMemoryStrategy) -> list[Peer]:
    """Return all peers except servers that the newest record left out."""
    assert strategy.run is not None
    members = {member for roster in strategy.run.session._steps.run.rosters for member in roster}
    return [peer for peer in strategy.peers if peer.server is None or peer.server.membership.me in members]


def assert_replicas_equal(strategy: InMemoryStrategy) -> None:
    """Check that all replicas of a stage hold the same bits, optimizer state included."""
    by_stage: dict[int, set[int]] = {}
    for peer in _remaining(strategy):
        if peer.server is not None and peer.server.membership.is_member:
            for index in peer.server.steps.stages:
                by_stage.setdefault(index, set()).add(peer.server.steps.stage(index).fingerprint())
    assert all(len(prints) == 1 for prints in by_stage.values()), "replicas of a stage differ"


def assert_nothing_kept(strategy: InMemoryStrategy) -> None:
    """Check that no peer holds a tensor of any call after the last step is decided."""
    for peer in _remaining(strategy):
        assert peer.server is None or peer.server.calls.cache.used_bytes == 0
        held = [name for name, entry in peer._tickets._entries.items() if entry.message is not None]
        assert not held, f"{peer.transport.peer_id} still holds {held[:3]}"


def _is_whole(strategy: InMemoryStrategy) -> bool:
    assert strategy.servers
    return not strategy.ranges


def _assert_all_took_part(run: SwarmRun, num_stages: int, num_servers: int, num_joiners: int, num_shed: int) -> None:
    strategy = run.strategy
    assert len(run.status.stages) == num_stages
    held = [
        (server, index)
        for server in strategy.servers
        if server.membership.is_member
        for index in server.steps.stages
        if index < num_stages
    ]
    # A trainer may also be the server of the layers around the pipeline.
    servers = {id(server): server for server, _ in held}.values()
    assert len(servers) == num_servers + num_joiners
    assert len(held) == max(num_stages, num_servers) + num_joiners - num_shed
    assert all(server.calls.num_forwards > 0 for server in servers), "some server computed nothing"
    routed = [peer.num_microbatches for stage in run.status.stages for peer in stage.peers]
    assert min(routed) > 0, "some peer was in no route"
    assert run.num_microbatches > len(run.losses), "batches were not cut"
    assert run.records, "no step was decided"


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Return a callback's state without folders, with numbers that compare equal up to rounding."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, (float, Tensor)):
            found[key] = round(float(value), 9)
        elif isinstance(value, str):
            found[key] = value.rpartition("/")[2] if key != "dirpath" else ""
        elif isinstance(value, dict):
            found[key] = {path.rpartition("/")[2]: round(float(score), 9) for path, score in value.items()}
        else:
            found[key] = value
    return found
