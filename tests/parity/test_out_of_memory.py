"""Servers that run out of memory: each microbatch counts once on any server, and the curve stays the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, OutOfMemory, StepError
from lightning_swarm.server.averaging_round import AveragingRounds
from lightning_swarm.server.optimizer import StageOptimizer
from tests.faults.test_audited import audited
from tests.faults.test_audited import train as train_unaudited
from tests.parity.harness import SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, digits, loader
from tests.parity.test_delayed import assert_late, run_late
from tests.parity.trainers import ThreadStrategy
from tests.parity.trainers import assert_exact as assert_same_curve
from tests.parity.trainers import train as train_several
from tests.small_memory import SmallMemory, check_ran_out, limit_memory

STEPS = 4
NO_GRAPH = 700
"""In bytes: too few for the graph of one microbatch of stage 0 (704) or stage 1 (720)."""
ONE_GRAPH = 800
TWO_GRAPHS = 1_500
FEW_FAIL, MANY_FAIL = 0.25, 0.4


def train(*memories: SmallMemory, **options: Any) -> SwarmRun:
    """Train on servers with these memories, all of which run out; compare with the plain Trainer."""
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=STEPS)
    swarm = run_small(*memories, **options)
    assert_exact(swarm, plain)
    return swarm


def run_small(*memories: SmallMemory, **options: Any) -> SwarmRun:
    settings = {"num_stages": 2, "num_servers": 4, "microbatch_size": 1, "max_steps": STEPS, **options}
    swarm = run_swarm(DigitsMLP, loader(digits()), modify_peer=limit_memory(memories), **settings)
    check_ran_out(memories)
    return swarm


def refused(swarm: SwarmRun) -> int:
    """Count how often a server had no memory for one microbatch."""
    return sum(server.events.counts["out_of_memory"] for server in swarm.strategy.servers)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_bytes", [ONE_GRAPH, TWO_GRAPHS])
def test_graphs_that_find_no_room_are_computed_again_and_nothing_is_sent_again(num_bytes: int) -> None:
    memories = [SmallMemory(f"peer-{i}", num_bytes=num_bytes) for i in range(4)]
    swarm = train(*memories)
    assert not swarm.rerouted
    assert not refused(swarm)
    limits = [server.calls.graphs.limit.most for server in swarm.strategy.servers]
    assert all(limit < 2 for limit in limits)
    struck = [memory.struck.total() for memory in memories]
    assert max(struck) <= 2, "they learnt nothing from running out"


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("stage", [0, 1])
def test_another_server_computes_what_does_not_fit(stage: int, caplog: pytest.LogCaptureFixture) -> None:
    small = "peer-1" if stage == 0 else "peer-2"
    with caplog.at_level(logging.WARNING, "lightning_swarm.events"):
        swarm = run_small(SmallMemory(small, num_bytes=NO_GRAPH), num_servers=4)
    assert_exact(swarm, run_plain(DigitsMLP, loader(digits()), max_steps=STEPS))
    assert swarm.rerouted["replaced"] == refused(swarm) > 0
    assert all(len(roster) == 2 for roster in swarm.rosters[-1]), "it is no member any more"
    lines = [record.getMessage() for record in caplog.records]
    assert any(f"stage {stage}, {small}" in line and "Tried to allocate" in line for line in lines), lines


@pytest.mark.thorough
@pytest.mark.parametrize("num_servers", [2, 4])
def test_what_fits_nowhere_ends_with_the_rule_the_value_and_the_remedy(num_servers: int) -> None:
    memories = [SmallMemory(f"peer-{i}", num_bytes=NO_GRAPH, stage=1) for i in range(num_servers)]
    with pytest.raises(OutOfMemory, match=r"one microbatch of its stage.*of stage 1.*Tried to.*`microbatch_size`"):
        run_small(*memories, num_servers=num_servers)


@pytest.mark.thorough
@pytest.mark.parametrize("everywhere", [False, True])
def test_computations_that_fail_at_random_half_way(everywhere: bool) -> None:
    """Most calls find memory in the second attempt; the rest go to another server, or run once more alone."""
    fails = FEW_FAIL if everywhere else MANY_FAIL
    names = [f"peer-{i}" for i in range(4)] if everywhere else ["peer-0", "peer-1"]
    memories = [SmallMemory(name, fails=fails, seed=number) for number, name in enumerate(names)]
    swarm = train(*memories)
    for direction in ("forward", "backward"):
        assert sum(memory.struck[direction] for memory in memories) > 0
    assert everywhere or refused(swarm) > 0


@pytest.mark.thorough
def test_late_steps() -> None:
    memories = [SmallMemory(f"peer-{i}", fails=FEW_FAIL, seed=i) for i in range(4)]
    swarm = run_small(*memories, delay_optimizer_step=True, max_steps=8)
    assert_late(swarm, run_late(DigitsMLP, loader(digits()), max_steps=8))


LONG: dict[str, Any] = {"rebalancing": "gain", "latency_s": 0.01, "microbatch_s": [1.0], "max_steps": 14}
"""Let virtual time pass, so that servers check whether they can stay."""


def test_a_server_without_memory_for_its_stage_moves_to_another_one() -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=14)
    swarm = run_small(SmallMemory("peer-1", num_bytes=NO_GRAPH, stage=0), **LONG)
    assert_exact(swarm, plain)
    moves = [departure for record in swarm.records for departure in record.departures]
    assert [move.stage_index for move in moves if move.member.peer_id == "peer-1"] == [1]
    assert "peer-1" in [member.peer_id for member in swarm.rosters[-1][1]]


@pytest.mark.thorough
def test_a_server_without_memory_for_any_stage_leaves_and_says_why() -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=14)
    swarm = run_small(SmallMemory("peer-2", num_bytes=NO_GRAPH), num_gone=1, **LONG)
    assert_exact(swarm, plain)
    (error,) = swarm.strategy.refusals
    assert isinstance(error, ConfigError)
    assert "must have memory for one microbatch" in str(error)
    assert "peer-2" not in [member.peer_id for roster in swarm.rosters[-1] for member in roster]


def failing_once(honest: Callable[..., Any], at: int) -> tuple[Callable[..., Any], list[int]]:
    """Return a method that runs out of memory half-way in one of its calls, and the list of its calls."""
    calls: list[int] = []

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(len(calls))
        found = honest(*args, **options)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return found

    return fail, calls


def test_a_server_that_cannot_step_its_optimizer_leaves_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=14)
    step, calls = failing_once(StageOptimizer.step, at=11)
    monkeypatch.setattr(StageOptimizer, "step", step)
    swarm = run_small(num_gone=1, **LONG)
    assert len(calls) > 11
    assert_exact(swarm, plain)
    (error,) = swarm.strategy.refusals
    assert isinstance(error, StepError)
    assert "the step of its optimizer" in str(error)


def test_a_server_that_cannot_average_is_left_out_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=14)
    average, calls = failing_once(AveragingRounds._averager, at=11)
    monkeypatch.setattr(AveragingRounds, "_averager", average)
    swarm = run_small(num_gone=0, **LONG)
    assert len(calls) > 11
    assert_exact(swarm, plain)


@pytest.mark.thorough
def test_several_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    memories = [SmallMemory(f"peer-{rank}", num_bytes=ONE_GRAPH) for rank in range(2)]
    make = ThreadStrategy.make_peer

    def make_small(self: ThreadStrategy) -> None:
        make(self)
        assert self.peer is not None
        memories[self._rank].watch(self.peer, f"peer-{self._rank}")

    monkeypatch.setattr(ThreadStrategy, "make_peer", make_small)
    seen = train_several(2, swarm={"microbatch_size": 1})
    check_ran_out(memories)
    assert_same_curve(seen, DigitsMLP, digits(), num_trainers=2)


class RunsOut(DigitsMLP):
    """A model whose second trainer runs out of memory in its third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_batches += 1
        strategy = self.trainer.strategy
        if isinstance(strategy, ThreadStrategy) and strategy._rank == 1 and self.num_batches == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return super().training_step(batch, batch_idx)


def test_a_trainer_of_an_uncut_model_ends_with_its_own_error_and_the_run_goes_on() -> None:
    whole = {"num_stages": 1, "microbatch_size": None}
    seen = train_several(3, lambda seen: RunsOut(), swarm=whole, raises=False, max_steps=12)
    assert list(seen.errors) == [1]
    assert isinstance(seen.errors[1], torch.OutOfMemoryError)
    assert [record.step for record in seen.records] == list(range(12))
    assert_same_curve(seen, DigitsMLP, digits(), num_trainers=3, gone=[1])


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("always", [True, False])
def test_an_audited_server_without_memory_is_not_convicted(always: bool) -> None:
    memory = SmallMemory("peer-3", fails=1.0 if always else MANY_FAIL)
    settings = {"num_stages": 1, "microbatch_size": 8}
    found, strategy = audited(4, memories=[memory], **settings)
    expected, _ = train_unaudited(4, **settings)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-10)
    counts = strategy.servers[0].events.counts
    assert not counts["convicted"]
    assert memory.struck
