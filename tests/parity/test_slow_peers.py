"""A peer ten times slower than the rest computes its share, and delays no step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import lightning as L
import pytest
import torch
from typing_extensions import override

from lightning_swarm.peer.peer import Peer
from lightning_swarm.server.executor import FIRST, Executor, InlineExecutor, Priority
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import LOSS_TOLERANCE, QUIET, WEIGHT_TOLERANCE, quiet_warnings, run_plain
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader

T = TypeVar("T")

STEPS = 9
BATCH = 25
JOB_S = 0.1
SLOW = 10.0


class Paced(Executor):
    """Takes time on the virtual clock for each microbatch, one after the other."""

    def __init__(self, job_s: float) -> None:
        self._job_s = job_s
        self._inner = InlineExecutor()
        self._turn = asyncio.Lock()
        self._jobs: set[asyncio.Future[Any]] = set()

    @override
    def submit(self, priority: Priority, run: Callable[[], T]) -> asyncio.Future[tuple[T, float]]:
        if priority == FIRST:
            return self._inner.submit(priority, run)
        job = asyncio.ensure_future(self._take_time(run))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def _take_time(self, run: Callable[[], T]) -> tuple[T, float]:
        async with self._turn:
            await asyncio.sleep(self._job_s)
            return (await self._inner.submit(FIRST, run))[0], self._job_s

    @property
    @override
    def queued(self) -> int:
        return max(len(self._jobs) - 1, 0)

    @override
    def has_waiting(self, priority: Priority) -> bool:
        return self.queued > 0

    @override
    def close(self) -> None:
        self._inner.close()
        for job in list(self._jobs):
            job.cancel()


class PacedStrategy(InMemoryStrategy):
    """Peers with a time per microbatch; the last peer takes `slow` times as long."""

    def __init__(self, slow: float | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.slow = slow

    @override
    def _peer(self, number: int) -> Peer:
        peer = super()._peer(number)
        job_s = JOB_S * self.slow if self.slow is not None and number == len(self._devices) - 1 else JOB_S
        peer._executor = lambda: Paced(job_s)
        return peer


class Clock(L.Callback):
    """Records when each step ends on the virtual clock, and the number of the last peer's forwards by then."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.num_forwards: list[int] = []
        self.losses: list[float] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, PacedStrategy)
        self.ends_s.append(strategy.virtual_loop.time())
        self.num_forwards.append(strategy.servers[-1].calls.num_forwards)
        self.losses.append(float(outputs["loss"]))


def make() -> Net:
    return DigitsMLP(Recipe(optimizer="adamw"))


def trained(slow: float | None, num_servers: int) -> tuple[dict[str, Any], list[float], Clock, PacedStrategy]:
    """Train; return weights, losses, the clock's records and the strategy."""
    clock = Clock()
    strategy = PacedStrategy(slow, num_stages=2, microbatch_size=1, role="trainer", latency_s=0.001)
    torch.manual_seed(0)
    module = make()
    with quiet_warnings():
        trainer = L.Trainer(
            **QUIET, max_steps=STEPS, max_epochs=-1, devices=1 + num_servers, strategy=strategy, callbacks=[clock]
        )
        trainer.fit(module, loader(digits(), batch_size=BATCH))
    return module.state_dict(), clock.losses, clock, strategy


@pytest.mark.thorough
def test_the_run_goes_on_at_the_others_pace_and_the_slow_one_helps() -> None:
    weights, losses, clock, strategy = trained(SLOW, 4)
    *_, without, _ = trained(None, 3)
    # The trainer learns which peer is slow in the first step, whose microbatches are split equally.
    took_s, without_s = (one.ends_s[-1] - one.ends_s[0] for one in (clock, without))
    assert took_s <= 1.1 * without_s, "they would be better off without it"
    *others, slow = (server.calls.num_forwards for server in strategy.servers)
    assert slow < min(others) / 4
    assert clock.num_forwards[-1] > clock.num_forwards[STEPS // 2] > 0, "it got no work"
    events = strategy.peers[0].events.counts
    assert events["ban"] == events["retry"] == 0, "slowness is no fault"
    plain = run_plain(make, loader(digits(), batch_size=BATCH), max_steps=STEPS, max_epochs=-1)
    assert losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    torch.testing.assert_close(weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)
