"""Simulates a swarm microbatch by microbatch: real peers on a virtual clock, which wait instead of computing."""

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
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.simulated_link import SimulatedLink
from lightning_swarm.peer.config import Rebalancing
from lightning_swarm.planner.simulator.fluid import Change, Scenario, Span, best_of
from lightning_swarm.testing import InMemoryStrategy
from lightning_swarm.testing.local import QUIET

_FLOAT_BYTES = 4


class SyntheticBlock(nn.Module):
    """A stage that maps ``[samples, any]`` to ``[samples, width]``, with equal elements in each row."""

    def __init__(self, width: int, num_parameters: int) -> None:
        super().__init__()
        self._width = width
        self.weight = nn.Parameter(torch.full((num_parameters,), 0.5))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        return (hidden[:, :1] * self.weight[0]).expand(-1, self._width).contiguous()


class Simulated(L.LightningModule):
    """A model of one block for each stage. Its input and output are as small as tokens and losses."""

    def __init__(
        self,
        num_stages: int,
        boundary_bytes: int,
        stage_bytes: int,
        wrap: Callable[[int, SyntheticBlock], nn.Module] = lambda _, block: block,  # makes a stage of each block
    ) -> None:
        super().__init__()
        boundary_width, size = (max(1, num_bytes // _FLOAT_BYTES) for num_bytes in (boundary_bytes, stage_bytes))
        widths = [boundary_width] * (num_stages - 1) + [1]
        self.blocks = nn.Sequential(*(wrap(index, SyntheticBlock(width, size)) for index, width in enumerate(widths)))

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.blocks(batch)
        return out.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


def batches(batch_size: int) -> DataLoader[Tensor]:
    """Make the training data of `Simulated`: epochs of 64 batches."""
    return DataLoader(torch.ones(64 * batch_size, 1), batch_size=batch_size)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Work:
    """The work and traffic of the peers of a scenario."""

    per_step: int  # number of microbatches
    size: int = 1  # samples per microbatch
    boundary_bytes: int = 1 << 12  # per sample, sent from a stage to the next
    stage_bytes: int = 1 << 12  # size of a stage's weights; its optimizer's state is twice as large
    # peer -> function that makes its link; a peer that is not listed has a link without limits
    lines: Mapping[PeerId, Callable[[], SimulatedLink]] = field(default_factory=dict)
    latency_s: float = 1e-4  # latency of each message, beside the latency of the links

    def line(self, peer: PeerId) -> SimulatedLink:
        """Make a new link for a peer."""
        return self.lines.get(peer, SimulatedLink)()


def simulate(scenario: Scenario, work: Work, *, seed: int = 0) -> list[Span]:
    """Simulate a scenario, and return a span for each step, including steps in which the run rolls back."""
    # `Scenario.move_s` and `join_s` mean nothing here: a peer that moves or joins downloads its stage.
    initial = _initial_rates(scenario)
    strategy = InMemoryStrategy(
        seed=seed,
        num_stages=scenario.num_stages,
        role="trainer",  # a peer with all data, no stage, and a link without limits
        microbatch_size=work.size,
        # The first peer of both lists is the trainer, which holds no stage, so that its speed has no influence.
        microbatch_s=[1.0, *(work.size / samples_per_s for samples_per_s in initial.values())],
        links=[SimulatedLink(), *map(work.line, initial)],
        latency_s=work.latency_s,
        rebalancing=Rebalancing(scenario.rule, interval=scenario.interval_s),
        limits=Limits(max_in_flight=max(64, 4 * len(initial))),
    )
    events = _ScenarioEvents(strategy, scenario, work)
    with _quiet(), isolate_rng():
        torch.manual_seed(seed)  # the manifest contains the seed, so a fixed seed keeps message sizes equal
        trainer = L.Trainer(**QUIET, devices=len(initial) + 1, strategy=strategy, max_epochs=-1, callbacks=[events])
        trainer.fit(
            Simulated(scenario.num_stages, work.boundary_bytes, work.stage_bytes), batches(work.per_step * work.size)
        )
    return events.spans


def _initial_rates(scenario: Scenario) -> dict[PeerId, float]:
    begin_s = scenario.changes[0].at_s
    rates = {change.peer: change.samples_per_s for change in scenario.changes if change.at_s == begin_s}
    return {peer: samples_per_s for peer, samples_per_s in rates.items() if samples_per_s}


@contextmanager
def _quiet() -> Iterator[None]:
    logs = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_swarm")]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


class _ScenarioEvents(L.Callback):
    """Makes the scenario's changes happen, and writes a span for each step."""

    def __init__(self, strategy: InMemoryStrategy, scenario: Scenario, work: Work) -> None:
        self.spans: list[Span] = []
        self._strategy = strategy
        self._scenario = scenario
        self._work = work
        self._start_s: float | None = None  # the time of the scenario's initial changes, on the loop's clock
        self._span_begin_s = scenario.changes[0].at_s  # time of the scenario
        self._names: dict[PeerId, PeerId] = {}  # name in the scenario -> peer id
        self._alive: dict[PeerId, float] = {}  # name in the scenario -> samples/s
        self._best = 0.0  # samples/s of the best assignment of the living peers
        self._best_samples = 0.0  # samples that the best assignments would have trained since the last span
        self._best_s = self._span_begin_s  # time up to which `_best_samples` is counted
        self._sent_bytes = 0
        self._moves = 0

    @property
    def _now_s(self) -> float:
        assert self._start_s is not None
        return self._strategy.virtual_loop.time() - self._start_s + self._scenario.changes[0].at_s

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._start_s is not None:
            return  # a rollback starts training again, but the scenario's time continues
        loop = self._strategy.virtual_loop
        self._start_s = loop.time()
        self._alive = _initial_rates(self._scenario)
        servers = self._strategy.peers[1:]
        self._names = {name: peer.transport.peer_id for name, peer in zip(self._alive, servers, strict=True)}
        self._best = best_of(self._alive.values(), self._scenario.num_stages)
        loop.run_until_complete(self._strategy.spawn(self._make_changes()))

    async def _make_changes(self) -> None:
        for change in self._scenario.changes:
            if change.at_s == self._scenario.changes[0].at_s:  # the run began with this peer
                continue
            await asyncio.sleep(change.at_s - self._now_s)
            self._count_best()
            await self._change(change)
            self._best = best_of(self._alive.values(), self._scenario.num_stages)

    async def _change(self, change: Change) -> None:
        """Kill a peer whose rate becomes 0, change the rate of a living peer, or start a new peer."""
        peer, rate = change.peer, change.samples_per_s
        if rate == 0.0:
            if self._alive.pop(peer, None) is not None:
                self._strategy.kill_peer(self._names.pop(peer))
            return
        self._alive[peer] = rate
        microbatch_s = self._work.size / rate
        if peer in self._names:
            self._strategy.set_pace(self._names[peer], microbatch_s)
        else:
            self._names[peer] = await self._strategy.add_server(microbatch_s, self._work.line(peer))

    def _count_best(self) -> None:
        self._best_samples += (self._now_s - self._best_s) * self._best
        self._best_s = self._now_s

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._count_best()
        length_s = self._now_s - self._span_begin_s
        status = self._strategy.status()
        serving = [len(stage.peers) for stage in status.stages]
        servers = [server for server in self._strategy.servers if server.admission.ready.is_set()]
        queued = [stage.load.queued for server in servers for stage in server.steps.sums.stages.values()]
        sent_bytes = sum(peer.transport.traffic.sent_bytes.total() for peer in self._strategy.peers)
        moves = sum(peer.events.counts["moves"] for peer in self._strategy.peers)
        self.spans.append(
            Span(
                self._span_begin_s,
                self._now_s,
                samples_per_s=self._work.per_step * self._work.size / length_s,
                best=self._best_samples / length_s,
                num_moves=moves - self._moves,
                fewest=min(serving),
                most=max(serving),
                queued=sum(queued) / max(1, len(queued)),
                sent_bytes=sent_bytes - self._sent_bytes,
            )
        )
        self._span_begin_s, self._best_samples = self._now_s, 0.0
        self._sent_bytes, self._moves = sent_bytes, moves
        trainer.should_stop = self._now_s >= self._scenario.end_s
