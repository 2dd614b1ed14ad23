"""Measures what audits cost where nobody lies: time, bytes and computing of a step; for `benchmarks.liars`.

All peers share one thread, so a step's time is that of all peers' work together: what machines compute side by side
counts here as if they took turns, and what waits for messages costs nothing. How long machines that compute side by
side wait for audits is measured apart, on a virtual clock, where microbatches and messages take time and nothing else.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.liar_swarms import Traffic, counted, hush
from benchmarks.report import table, write
from benchmarks.train import Blocks, Noise
from lightning_swarm import Trust
from lightning_swarm.coordinator.audit import step_audits
from lightning_swarm.coordinator.audit.policy import PROBATION, AuditMemory, Standing
from lightning_swarm.protocol.settings import AUDIT_SHARE
from lightning_swarm.testing import InMemoryStrategy, local_swarm

WIDTH: Final = 256
NUM_BLOCKS: Final = 2
NUM_PEERS: Final = 8
BATCH, MICROBATCH = 128, 4
NUM_STEPS: Final = 25
WARM_UP: Final = 5  # steps that do not count: in the first ones of a small stage all is audited
NUM_TURNS: Final = 4
WAYS: Final[dict[str, dict[str, Any]]] = {
    "undefended": {},
    "audited": {"trust": Trust("audited", audit_share=AUDIT_SHARE)},
}


# On the virtual clock: all machines are busy, for no link is slow.
MICROBATCH_S, LATENCY_S = 1.0, 0.02
NUM_VIRTUAL_STEPS: Final = 150


@dataclass
class Costs:
    """What the steps of one run cost, without those that do not count."""

    steps_s: list[float] = field(default_factory=list)
    jobs: int = 0
    tensor_bytes: Counter[str] = field(default_factory=Counter)
    audits: int = 0


def standing_of(strategy: InMemoryStrategy) -> Standing:
    """Return what the run's coordinator knows of its servers from audits."""
    server = strategy.peers[0].server
    assert server is not None
    coordinator = server.admission.election.coordinator
    assert coordinator is not None
    memory: AuditMemory = getattr(
        coordinator.generation.context.oversight, "memory", AuditMemory()
    )  # absent without audits
    return memory.standing


def end_probation(strategy: InMemoryStrategy) -> None:
    """Count all servers' work as audited often enough: the costs of a long run are measured."""
    standing_of(strategy).passed.update({peer.transport.peer_id: PROBATION for peer in strategy.peers})


# A run draws the steps that have audits. For the time of a median step each step has its share of them.
@contextlib.contextmanager
def alike_in_each_step() -> Iterator[None]:
    """Have each step audit the same share of the work."""
    drawn = step_audits.share_of_step  # type: ignore[attr-defined]
    step_audits.share_of_step = lambda share, draw, **_: share  # type: ignore[attr-defined]
    try:
        yield
    finally:
        step_audits.share_of_step = drawn  # type: ignore[attr-defined]


class _Clock(L.Callback):
    def __init__(self, traffic: Traffic, strategy: InMemoryStrategy, costs: Costs) -> None:
        self._traffic, self._strategy, self._costs = traffic, strategy, costs
        self._began_s, self._audits_before = 0.0, 0

    def _num_passed(self) -> int:
        return sum(standing_of(self._strategy).passed.values())

    @override
    def on_train_start(self, *_: Any) -> None:
        end_probation(self._strategy)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now_s, traffic, costs = time.process_time(), self._traffic, self._costs  # whatever else the machine does
        if trainer.global_step == WARM_UP:
            traffic.jobs, traffic.tensor_bytes = 0, Counter()
            self._audits_before = self._num_passed()
        elif trainer.global_step > WARM_UP:
            costs.steps_s.append(now_s - self._began_s)
            costs.jobs, costs.tensor_bytes = traffic.jobs, Counter(traffic.tensor_bytes)
            costs.audits = self._num_passed() - self._audits_before
        self._began_s = now_s


def one_run(settings: dict[str, Any], seed: int) -> Costs:
    """Run a swarm of two stages, and measure its steps."""
    hush()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    costs, model = Costs(), Blocks(WIDTH, NUM_BLOCKS)
    given: dict[str, Any] = {"num_stages": 2, "microbatch_size": MICROBATCH, "seed": seed, **settings}
    with counted() as traffic, local_swarm(NUM_PEERS, **given) as swarm:
        trainer = swarm.trainer(max_steps=NUM_STEPS)
        trainer.callbacks.append(_Clock(traffic, swarm.strategies[-1], costs))  # type: ignore[attr-defined]
        trainer.fit(model, DataLoader(Noise(WIDTH, NUM_STEPS * BATCH), BATCH))
    return costs


class _Linear(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)


class _VirtualClock(L.Callback):
    def __init__(self, strategy: InMemoryStrategy, ends_s: list[float]) -> None:
        self._strategy, self._ends_s = strategy, ends_s

    @override
    def on_train_start(self, *_: Any) -> None:
        end_probation(self._strategy)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self._ends_s.append(self._strategy.virtual_loop.time())


def waits(settings: dict[str, Any], seed: int) -> tuple[float, float]:
    """Return a step's mean seconds where machines compute side by side, on the virtual clock; and its kB."""
    hush()
    torch.manual_seed(seed)
    ends_s: list[float] = []
    model = Blocks(8, 2, _Linear)
    pace: dict[str, Any] = {"microbatch_s": [MICROBATCH_S], "latency_s": LATENCY_S}
    given: dict[str, Any] = {"num_stages": 2, "microbatch_size": MICROBATCH, "seed": seed, **pace, **settings}
    with counted() as traffic, local_swarm(NUM_PEERS, **given) as swarm:
        trainer = swarm.trainer(max_steps=NUM_VIRTUAL_STEPS)
        trainer.callbacks.append(_VirtualClock(swarm.strategies[-1], ends_s))  # type: ignore[attr-defined]
        trainer.fit(model, DataLoader(Noise(8, NUM_VIRTUAL_STEPS * BATCH, 1), BATCH))
    return (ends_s[-1] - ends_s[WARM_UP]) / (len(ends_s) - 1 - WARM_UP), _activations(traffic) / len(ends_s)


def profile(settings: dict[str, Any]) -> dict[str, float]:
    """Return the seconds that each function takes by itself in a run."""
    profiler = cProfile.Profile()
    profiler.enable()
    one_run(settings, 0)
    profiler.disable()
    found = Counter[str]()
    for (file, _, name), (_, _, own_s, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        found[f"{Path(file).stem}.{name}" if file != "~" else name] += own_s
    return dict(found)


def measure_costs() -> None:
    """Measure both ways in turns, and print the table and where the extra goes."""
    found: dict[str, list[Costs]] = {way: [] for way in WAYS}
    with alike_in_each_step():
        for turn in range(NUM_TURNS):
            for way in WAYS if turn % 2 else reversed(WAYS):
                found[way].append(one_run(WAYS[way], turn))
                print(way, statistics.median(found[way][-1].steps_s), found[way][-1].audits, flush=True)
        before, after = profile(WAYS["undefended"]), profile(WAYS["audited"])
    rows: list[list[object]] = [["a step's", *WAYS, "ratio", "quartiles"]]
    rows.append(_row("CPU time, ms", [[1e3 * statistics.median(one.steps_s) for one in found[way]] for way in WAYS]))
    rows.append(_row("mean CPU time, ms", [[1e3 * statistics.mean(one.steps_s) for one in found[way]] for way in WAYS]))
    num = NUM_STEPS - WARM_UP
    rows.append(_row("forwards and backwards", [[one.jobs / num for one in found[way]] for way in WAYS]))
    rows.append(_row("bytes of activations, kB", [[_activations(one) / num for one in found[way]] for way in WAYS]))
    rows.append(
        _row("bytes of averaging, kB", [[one.tensor_bytes["averaging"] / num / 1e3 for one in found[w]] for w in WAYS])
    )
    waited = {way: [waits(WAYS[way], turn) for turn in range(NUM_TURNS)] for way in WAYS}
    long = f"of {NUM_VIRTUAL_STEPS} steps side by side"
    rows.append(_row(f"time, s, {long}", [[seconds for seconds, _ in waited[way]] for way in WAYS]))
    rows.append(
        _row(f"bytes of activations, kB, {long}", [[kilobytes for _, kilobytes in waited[way]] for way in WAYS])
    )
    audits = statistics.mean(one.audits / num / NUM_PEERS for one in found["audited"])
    title = (
        f"Costs of audits at a share of 1/16: {NUM_PEERS} peers, two stages of {WIDTH}-wide transformer blocks, "
        f"{BATCH // MICROBATCH} microbatches; {audits:.3f} of server-steps audited"
    )
    extra = sorted(((after.get(name, 0.0) - before.get(name, 0.0), name) for name in after), reverse=True)[:12]
    extras: list[list[object]] = [["function", "extra seconds", "of undefended"]]
    extras += [[name, f"{seconds:.2f}", f"{seconds / sum(before.values()):.3f}"] for seconds, name in extra]
    write("audit-costs", f"{table(title, rows)}\n\n{table('Where the extra goes, by a profile', extras)}")


def _activations(counted_in: Costs | Traffic) -> float:
    return (counted_in.tensor_bytes["activations"] + counted_in.tensor_bytes["audits"]) / 1e3


def _row(name: str, both: Sequence[Sequence[float]]) -> list[object]:
    ratios = [audited / alone for alone, audited in zip(*both, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    each = [f"{statistics.median(one):.4g}" for one in both]
    return [name, *each, f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]
