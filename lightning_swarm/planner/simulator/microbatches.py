"""A swarm microbatch by microbatch: all that a real one does, on virtual time.

Peers route, average, decide records, download and move by the very code of a real swarm, over the network's in-memory
twin. Only their computing is waiting, and their lines are made up.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.simulated_link import SimulatedLink
from lightning_swarm.planner.simulator.fluid import Change, Scenario, Span, best_of
from lightning_swarm.testing import InMemoryStrategy

_FLOAT_BYTES = 4


class SyntheticBlock(nn.Module):
    """One stage. Each sample is a row; its elements are all equal.

    Args:
        gives: Elements of a row that it returns.
        num_parameters: Its own.
    """

    def __init__(self, gives: int, num_parameters: int) -> None:
        super().__init__()
        self._gives = gives
        self.weight = nn.Parameter(torch.full((num_parameters,), 0.5))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """``[samples, any]`` to ``[samples, gives]``."""
        return (hidden[:, :1] * self.weight[0]).expand(-1, self._gives).contiguous()


class Simulated(L.LightningModule):
    """As many blocks as stages. What goes in and what comes out is small, as tokens and losses are.

    Args:
        num_stages: Of the pipeline.
        boundary_bytes: Of a sample, from a stage to the next.
        stage_bytes: Of a stage's weights.
        wrap: Makes the stage of each block, by its index.
    """

    def __init__(
        self,
        num_stages: int,
        boundary_bytes: int,
        stage_bytes: int,
        wrap: Callable[[int, SyntheticBlock], nn.Module] = lambda _, block: block,
    ) -> None:
        super().__init__()
        width, size = (max(1, num_bytes // _FLOAT_BYTES) for num_bytes in (boundary_bytes, stage_bytes))
        widths = [width] * (num_stages - 1) + [1]
        self.blocks = nn.Sequential(*(wrap(index, SyntheticBlock(gives, size)) for index, gives in enumerate(widths)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.blocks(batch)
        return out.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Ones(Dataset[Tensor]):
    """Samples ``[1]``."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    @override
    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1)


def batches(batch_size: int) -> DataLoader[Tensor]:
    """What `Simulated` trains on: epochs of 64 batches."""
    return DataLoader(Ones(64 * batch_size), batch_size=batch_size)


@dataclass(frozen=True)
class Work:
    """What a swarm of a scenario trains.

    Args:
        per_step: Microbatches of a step.
        size: Samples of a microbatch.
        boundary_bytes: Of a sample, from a stage to the next.
        stage_bytes: Of a stage's weights; its optimizer has twice as many.
        lines: Makes the line of each peer. Without: they send anything at once.
        latency_s: Of each message, beside that of its lines.
    """

    per_step: int
    size: int = 1
    boundary_bytes: int = 1 << 12
    stage_bytes: int = 1 << 12
    lines: Mapping[PeerId, Callable[[], SimulatedLink]] = field(default_factory=dict)
    latency_s: float = 1e-4

    def line(self, peer: PeerId) -> SimulatedLink:
        """A new one of that peer."""
        return self.lines.get(peer, SimulatedLink)()


def simulate(scenario: Scenario, work: Work, *, seed: int = 0) -> list[Span]:
    """What comes of it: a span for each step; those that a run goes back on are there, too.

    A trainer that holds no stage, and whose line is without limits, has all data. `Scenario.move_s` and `join_s` mean
    nothing here: who moves or comes downloads its stage.

    Args:
        scenario: Who is there, and what happens to them.
        work: What they do.
        seed: Wires the pipelines.
    """
    first = _first(scenario)
    strategy = InMemoryStrategy(
        seed=seed,
        num_stages=scenario.num_stages,
        role="trainer",
        microbatch_size=work.size,
        microbatch_s=[1.0, *(work.size / samples_per_s for samples_per_s in first.values())],
        lines=[SimulatedLink(), *map(work.line, first)],
        latency_s=work.latency_s,
        rebalancing=scenario.rule,
        rebalance_interval=scenario.interval_s,
        limits=Limits(max_in_flight=max(64, 4 * len(first))),
    )
    events = _ScenarioEvents(strategy, scenario, work)
    with _quiet(), isolate_rng():
        torch.manual_seed(seed)  # of which a run's manifest tells, so that messages are as long every time
        trainer = L.Trainer(
            accelerator="cpu",
            devices=len(first) + 1,
            strategy=strategy,
            max_epochs=-1,
            callbacks=[events],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(
            Simulated(scenario.num_stages, work.boundary_bytes, work.stage_bytes), batches(work.per_step * work.size)
        )
    return events.spans


def _first(scenario: Scenario) -> dict[PeerId, float]:
    """Who is there as it begins, and what they do."""
    begin_s = scenario.changes[0].at_s
    rates = {change.peer: change.samples_per_s for change in scenario.changes if change.at_s == begin_s}
    return {peer: samples_per_s for peer, samples_per_s in rates.items() if samples_per_s}


@contextmanager
def _quiet() -> Iterator[None]:
    """What is worth a word of a run of its own is not of a simulated one."""
    logs = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_swarm")]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


class _ScenarioEvents(L.Callback):
    """Has happen what the scenario says, and writes down what becomes of it."""

    def __init__(self, strategy: InMemoryStrategy, scenario: Scenario, work: Work) -> None:
        self.spans: list[Span] = []
        self._strategy = strategy
        self._scenario = scenario
        self._work = work
        self._began_s: float | None = None  # on the loop's clock: when the scenario's first changes are past
        self._at_s = scenario.changes[0].at_s  # in the scenario: up to then spans are written
        self._names: dict[PeerId, PeerId] = {}  # here, by their names in the scenario
        self._alive: dict[PeerId, float] = {}
        self._best = 0.0
        self._best_sum = 0.0  # since the last span, times seconds
        self._best_s = self._at_s
        self._sent_bytes = 0
        self._moves = 0

    @property
    def _now_s(self) -> float:
        """In the scenario."""
        assert self._began_s is not None
        return self._strategy.virtual_loop.time() - self._began_s + self._scenario.changes[0].at_s

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._began_s is not None:
            return  # the run went back, and time did not
        loop = self._strategy.virtual_loop
        self._began_s = loop.time()
        self._alive = _first(self._scenario)
        servers = self._strategy.peers[1:]
        self._names = {name: peer.transport.peer_id for name, peer in zip(self._alive, servers, strict=True)}
        self._best = best_of(self._alive.values(), self._scenario.num_stages)
        loop.run_until_complete(self._strategy.spawn(self._happen()))

    async def _happen(self) -> None:
        for change in self._scenario.changes:
            if change.at_s == self._scenario.changes[0].at_s:
                continue
            await asyncio.sleep(change.at_s - self._now_s)
            self._count_best()
            await self._change(change)
            self._best = best_of(self._alive.values(), self._scenario.num_stages)

    async def _change(self, change: Change) -> None:
        peer, rate = change.peer, change.samples_per_s
        if rate == 0.0:
            if self._alive.pop(peer, None) is not None:
                self._strategy.go(self._names.pop(peer))
            return
        self._alive[peer] = rate
        takes_s = self._work.size / rate
        if peer in self._names:
            self._strategy.set_pace(self._names[peer], takes_s)
        else:
            self._names[peer] = await self._strategy.come(takes_s, self._work.line(peer))

    def _count_best(self) -> None:
        self._best_sum += (self._now_s - self._best_s) * self._best
        self._best_s = self._now_s

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._count_best()
        took_s = self._now_s - self._at_s
        status = self._strategy.status()
        serving = [len(stage.peers) for stage in status.stages]
        servers = [server for server in self._strategy.servers if server.admission.ready.is_set()]
        queued = [stage.load.queued for server in servers for stage in server.stepping.sums.stages.values()]
        sent_bytes = sum(peer.transport.traffic.sent_bytes.total() for peer in self._strategy.peers)
        moves = sum(peer.events.counts["moves"] for peer in self._strategy.peers)
        self.spans.append(
            Span(
                self._at_s,
                self._now_s,
                self._work.per_step * self._work.size / took_s,
                self._best_sum / took_s,
                moves - self._moves,
                min(serving),
                max(serving),
                sum(queued) / max(1, len(queued)),
                sent_bytes - self._sent_bytes,
            )
        )
        self._at_s, self._best_sum = self._now_s, 0.0
        self._sent_bytes, self._moves = sent_bytes, moves
        trainer.should_stop = self._now_s >= self._scenario.end_s
