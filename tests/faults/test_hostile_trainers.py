"""An open run admits any trainer beside the lead; if one sends invalid messages, the other peers go on."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_swarm.client.run_generation import Metrics
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.batches import (
    MAX_LOGS,
    MAX_WEIGHT,
    BatchMetrics,
    Grant,
    GrantReply,
    GrantRequest,
    LoggedValue,
    MetricState,
)
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import GRANT, METRICS
from lightning_swarm.strategy.metrics import SharedMetrics
from lightning_swarm.testing import FaultPlan
from tests.faults.harness import NUM_MICROBATCHES, ROWS, FaultySwarm, Trainer
from tests.faults.plans import STAGES, VOTERS

LIAR, HONEST = PeerId("other"), PeerId("third")
TRAINERS = f"trainer {LIAR} {HONEST}"


def logged(name: str, batch_size: int = 1, **changes: Any) -> LoggedValue:
    fields = {"reduce": "mean", "value": 1.0, "on_step": True, "on_epoch": True, "prog_bar": False, "logger": True}
    return LoggedValue(name=name, batch_size=batch_size, **{**fields, **changes})


HONEST_LOGS = (logged("loss"), logged("accuracy"))


class Model(nn.Module):
    """The metric of each trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()


def added(value: float) -> Metrics:
    """Return the metric state of an honest batch."""
    return [MetricState(name="mean", num_updates=1, lengths=[1, 1])], [torch.tensor(value), torch.tensor(1.0)]


Lie = Callable[[Trainer, Grant | None], Awaitable[None]]


class HostileSwarm(FaultySwarm):
    """One of three trainers is malicious at each of its batches.

    Args:
        before: False message sent before it requests a place.
        during: False message sent while it has a place.
        logs: Values that it logs per batch.
        is_scaled: Whether losses are scaled.
    """

    def __init__(
        self,
        *,
        before: Lie | None = None,
        during: Lie | None = None,
        logs: Sequence[LoggedValue] = HONEST_LOGS,
        is_scaled: bool = True,
    ) -> None:
        super().__init__(*STAGES, plan=FaultPlan(), trainers=TRAINERS, voters=VOTERS, is_scaled=is_scaled)
        self._before, self._during = before, during
        self.num_lies = 0
        for name, trainer in self.trainers.items():
            self._log(trainer, logs if name == LIAR else HONEST_LOGS, measures=name == HONEST)
        liar = self.trainers[LIAR]
        honest: Any = liar.steps.grant

        async def grant(*args: Any) -> Grant:
            await self._tell(self._before, None)
            found: Grant = await honest(*args)
            await self._tell(self._during, found)
            return found

        liar.steps.grant = grant  # type: ignore[method-assign]

    async def _tell(self, lie: Lie | None, grant: Grant | None) -> None:
        if lie is not None:
            self.num_lies += 1
            with contextlib.suppress(ProtocolError):
                await lie(self.trainers[LIAR], grant)

    def _log(self, trainer: Trainer, logs: Sequence[LoggedValue], *, measures: bool) -> None:
        """Make a trainer log values of each batch, and perhaps add to a metric."""
        honest: Any = trainer.steps.done

        async def done(lease: int, *args: Any, **options: Any) -> bool:
            if measures:
                await trainer.steps.send_metrics(lease, added(3.0))
            self.num_lies += logs is not HONEST_LOGS
            closing: bool = await honest(lease, *args, **options, logs=logs)
            return closing

        trainer.steps.done = done  # type: ignore[method-assign]

    def tell(self) -> None:
        try:
            self.train()
            assert self.num_lies > 0
            self.audit()
            self._check_heard()
        finally:
            self.close()

    def _check_heard(self) -> None:
        """Check that the lead reads all logs of the records, as in `fit`, with the honest trainers' values."""
        model = Model()
        shared = SharedMetrics(model, {}, max_bytes=None)
        shared.begin_batch(0)
        model.mean.update(3.0)
        shared.follow(model.mean)
        shared.finish_batch(counts=True)
        names: set[str] = set()
        for decided in self.steps.generation.records:
            shared.receive(decided.metrics)
            shared.add_received()
            names |= {one.name for one in decided.logs}
            assert len(decided.logs) <= MAX_LOGS
        assert model.mean.compute() == 3.0
        assert {"loss", "accuracy"} <= names


def scaled(factor: float) -> Lie:
    """Request a place with another loss scale; a request that must wait ends when the next step opens."""
    numbers = iter(range(1 << 20, 1 << 30))

    async def lie(liar: Trainer, _: Grant | None) -> None:
        steps = liar.steps
        request = GrantRequest(
            step=steps.open_step,
            num_samples=NUM_MICROBATCHES * ROWS,
            generation=0,
            gradient_scale=factor * (steps.run.loss_scale or 1.0),
            number=next(numbers),
        )
        reply = decode(
            await liar.transport.call(steps.run.coordinator, GRANT.name, encode(request), timeout=30.0), GrantReply
        )
        if reply.wait is not None and reply.wait.step is not None:
            await steps.wait_closed(reply.wait.step)

    return lie


def measured(states: list[MetricState], *tensors: Tensor) -> Lie:
    async def lie(liar: Trainer, grant: Grant | None) -> None:
        assert grant is not None
        head = BatchMetrics(generation=0, step=grant.step, lease=grant.lease, metrics=states)
        message = Message(encode(head), tensors)
        await liar.transport.stream(liar.steps.run.coordinator, METRICS.name, message, timeout=30.0, max_bytes=0)

    return lie


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("factor", [2.0, 1e-300, 1e300])
def test_no_trainer_settles_the_scale_for_others(factor: float, is_scaled: bool) -> None:
    HostileSwarm(before=scaled(factor), is_scaled=is_scaled).tell()


def state(name: str, *lengths: int, num_updates: int = 1) -> MetricState:
    return MetricState(name=name, num_updates=num_updates, lengths=list(lengths))


MANY = torch.zeros(1 << 20)
FORGED: dict[str, Lie] = {
    "of no metric": measured([state("made up", 1)], MANY[0]),
    "of a module": measured([state("", 1)], MANY[0]),
    "of other states": measured([state("mean", 1)], MANY[0]),
    "of another shape": measured([state("mean", 1, 1)], MANY, MANY),
    "of another dtype": measured([state("mean", 1, 1)], MANY[0].double(), MANY[0].long()),
    "of nothing": measured([state("mean", 0, 0)]),
    "of fewer tensors than it says": measured([state("mean", 1, 1)], MANY[0]),
    "of many updates": measured([state("mean", 1, 1, num_updates=1 << 60)], MANY[0], MANY[0]),
    "of many metrics": measured([state(f"made up {number}", 0) for number in range(MAX_LOGS)]),
}


@pytest.mark.parametrize("forged", FORGED, ids=lambda one: one.replace(" ", "-"))
def test_what_one_trainer_adds_to_metrics_ends_no_other_one(forged: str) -> None:
    HostileSwarm(during=FORGED[forged]).tell()


LOGS: dict[str, Sequence[LoggedValue]] = {
    "as many names as there may be": [logged(f"x{number}") for number in range(MAX_LOGS)],
    "the same name each time": [logged("loss")] * MAX_LOGS,
    "weights that add up beyond all numbers": [logged("loss", MAX_WEIGHT), logged("x", MAX_WEIGHT)],
    "values that are no numbers": [logged("loss", value=float("nan")), logged("accuracy", value=float("inf"))],
    "another reduction": [logged("loss", reduce="max"), logged("accuracy", reduce="sum")],
}


@pytest.mark.parametrize("logs", LOGS, ids=lambda one: one.replace(" ", "-"))
def test_what_one_trainer_logs_ends_no_other_one(logs: str) -> None:
    HostileSwarm(logs=LOGS[logs]).tell()
