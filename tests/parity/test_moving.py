"""Servers move, by records, to stages that need them; the curve keeps its values and comes sooner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm import Rebalancing
from lightning_swarm.coordinator.rebalancing.balancer import Balancer
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase
from tests.parity.harness import Run, SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, loader
from tests.parity.test_joining import Joining

BATCH = 104
MICROBATCH_S = 0.1
INTERVAL_S = 0.5
SPEEDS = (8, 3, 1, 10, 2, 1, 1)
"""Speeds of the peers. Their initial stages are 2, 1, 0, 2, 1, 0, 2, with rates of 2, 5 and 19."""

BEST = 8.0
"""The highest possible rate of the slowest stage; the stages then have 10, 8, and the sum of the other peers."""


class Timeline(L.Callback):
    """Records when each batch was done on the swarm's clock, and each stage's members at that time."""

    def __init__(self) -> None:
        self.at_s: list[float] = []
        self.rosters: list[list[set[int]]] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        assert strategy.run is not None
        self.at_s.append(strategy.virtual_loop.time())
        run = strategy.run.session._steps.run
        self.rosters.append([{int(one.peer_id.partition("-")[2]) for one in roster} for roster in run.rosters])

    def rate(self, begin: int) -> float:
        """Return the samples/s of all batches from `begin` on, in the unit of `SPEEDS`."""
        return self.rate_between(begin, len(self.at_s) - 1)

    def rate_between(self, begin: int, end: int) -> float:
        """Return the samples/s between two batches."""
        return (end - begin) * BATCH / (self.at_s[end] - self.at_s[begin]) * MICROBATCH_S


def net() -> Net:
    return DigitsMLP(Recipe(optimizer="adamw"))


def data() -> DataLoader[Any]:
    """One large batch an epoch: a slow peer gets few microbatches of it, and rounding distorts its share."""
    images, labels = load_digits(return_X_y=True)
    return loader(TensorDataset(torch.tensor(images[:BATCH] / 16), torch.tensor(labels[:BATCH])), BATCH)


def plain(steps: int) -> Run:
    return run_plain(net, data(), max_steps=steps, max_epochs=-1)


def swarm(steps: int, *callbacks: L.Callback, speeds: Sequence[float] = SPEEDS, **options: Any) -> SwarmRun:
    return run_swarm(
        net,
        data(),
        callbacks=list(callbacks),
        **{
            "num_stages": 3,
            "num_servers": len(speeds),
            "microbatch_size": 1,
            "microbatch_s": [MICROBATCH_S / speed for speed in speeds],
            "latency_s": 1e-4,
            "rebalancing": Rebalancing("gain", interval=INTERVAL_S),
            "max_steps": steps,
            "max_epochs": -1,
            **options,
        },
    )


def moved(records: Sequence[Record]) -> list[tuple[int, str, int]]:
    return [(one.step, gone.member.peer_id, gone.stage_index) for one in records for gone in one.departures]


@pytest.mark.thorough
def test_from_the_worst_assignment_the_swarm_comes_near_the_best_and_stays_there() -> None:
    timeline = Timeline()
    run = swarm(15, timeline)
    assert_exact(run, plain(15))
    first = [[int(peer[-1]) for peer in stage] for stage in run.held.by_stage(run.records[0])]
    assert first == [[2, 5], [1, 4], [0, 3, 6]]
    moves = moved(run.records)
    assert moves
    settled = next(i for i, now in enumerate(timeline.rosters) if now == timeline.rosters[-1])
    assert timeline.rate(settled + 1) >= 0.9 * BEST
    quiet_s = timeline.at_s[-1] - timeline.at_s[max(step for step, _, _ in moves)]
    assert quiet_s > 20 * INTERVAL_S, "twenty intervals, and nobody moved"
    for _, peer, stage in moves:
        assert any(one.peer_id == peer for rosters in run.rosters for one in rosters[stage]), "it arrived"
    assert run.rerouted["replay"] == 0


@pytest.mark.thorough
def test_nobody_moves_if_nobody_shall() -> None:
    timeline = Timeline()
    run = swarm(4, timeline, rebalancing="none")
    assert moved(run.records) == []
    assert timeline.rate(2) < 2.5


STEPS = 8
FEW = (4, 1, 3.5, 1, 4)
"""The two slow servers hold stage 0; one of the other servers moves there."""
MOVER = "peer-4"
"""The server whose move makes the two stages' rates most nearly equal."""


def few(*callbacks: L.Callback, **options: Any) -> SwarmRun:
    return swarm(STEPS, *callbacks, **{"speeds": FEW, "num_stages": 2, "microbatch_size": 4, **options})


def test_a_newcomer_takes_the_slowest_stage_not_the_emptiest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Balancer, "moves", lambda *_, **__: [])
    timeline, joining = Timeline(), Joining(at=4)
    run = few(timeline, joining, speeds=(1, 9, 1, 9, 1, 1), num_servers=5, num_joiners=1)
    assert_exact(run, plain(STEPS))
    assert timeline.rosters[3] == [{1, 3}, {0, 2, 4}]
    assert timeline.rosters[-1] == [{1, 3}, {0, 2, 4, 5}]


@pytest.mark.thorough
@pytest.mark.parametrize("phase", [Phase.JOIN_DONE, Phase.DONATE, Phase.PIECE, Phase.FOLLOW, Phase.LISTEN])
def test_the_run_goes_on_when_the_mover_dies_on_its_way(phase: Phase) -> None:
    plan = FaultPlan().kill(MOVER, at=phase)
    run = few(faults=plan, num_gone=1)
    plan.check()
    assert_exact(run, plain(STEPS))
    assert next((peer, stage) for _, peer, stage in moved(run.records)) == (MOVER, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("phase", [Phase.DONATE, Phase.PIECE, Phase.FOLLOW, Phase.FOLLOW_DONE])
def test_a_mover_arrives_though_its_donor_dies(phase: Phase) -> None:
    plan, timeline = FaultPlan().kill(None, at=phase, of=MOVER), Timeline()  # the donor, whichever server that is
    run = few(timeline, faults=plan, num_gone=1)
    plan.check()
    assert_exact(run, plain(STEPS))
    assert 4 in timeline.rosters[-1][0]


def begun_alone(*callbacks: L.Callback, num_joiners: int, **options: Any) -> SwarmRun:
    """Train with one server that holds all stages as the run begins; more servers join later."""
    joining = Joining(at=2, count=num_joiners)
    settings = {"speeds": [4.0] * (1 + num_joiners), "num_servers": 1, "microbatch_size": 4, **options}
    return swarm(STEPS, joining, *callbacks, num_joiners=num_joiners, **settings)


@pytest.mark.thorough
def test_who_begins_alone_gives_stages_up_to_those_who_come() -> None:
    timeline = Timeline()
    run = begun_alone(timeline, num_joiners=2, num_shed=2)
    assert_exact(run, plain(STEPS))
    assert timeline.rosters[0] == [{0}, {0}, {0}]
    assert timeline.rosters[-1] == [{1}, {2}, {0}]
    assert timeline.rate(5) > 2.5 * timeline.rate_between(0, 2)
    first = run.strategy.servers[0]
    assert first.steps.stages == (2,)
    assert first.membership.is_member
    assert run.rerouted["replay"] == 0


@pytest.mark.thorough
def test_nothing_is_given_up_where_nobody_moves() -> None:
    timeline = Timeline()
    begun_alone(timeline, num_joiners=2, rebalancing="none")
    assert timeline.rosters[-1] == [{0, 1}, {0, 2}, {0}]


SHED = 4
"""This step's record has the first server give up stage 0, which two others hold by then."""


@pytest.mark.thorough
@pytest.mark.parametrize("step", [SHED, SHED + 1])
@pytest.mark.parametrize("phase", [Phase.BACKWARD_DONE, Phase.CLOSE_DONE, Phase.AVERAGE, Phase.APPLY])
def test_a_death_while_a_stage_is_given_up_changes_nothing(phase: Phase, step: int) -> None:
    plan, timeline = FaultPlan().kill("peer-1", at=phase, step=step), Timeline()
    run = begun_alone(timeline, num_joiners=3, num_stages=2, faults=plan, num_gone=1)
    plan.check()
    assert_exact(run, plain(STEPS))
    assert timeline.rosters[SHED - 1] == [{0, 1, 3}, {0, 2}]
    assert 3 in timeline.rosters[-1][0]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("phase", "after"),
    [
        (Phase.DECIDE, [{2, 4}, {3}]),  # its successor's record releases it from both
        (Phase.APPLY, [{2, 4}, {1, 3}]),  # its own record, which its successor finishes
    ],
)
def test_a_stage_is_given_up_or_not_though_the_coordinator_dies(phase: Phase, after: list[set[int]]) -> None:
    """The coordinator itself gives the stage up. Dead, it holds none at the end, and the joiners hold one each."""
    plan, timeline = FaultPlan().kill("peer-1", at=phase, step=SHED), Timeline()
    run = begun_alone(timeline, num_joiners=3, num_stages=2, role="trainer", faults=plan, num_gone=1)
    plan.check()
    assert_exact(run, plain(STEPS))
    assert timeline.rosters[SHED - 1] == [{1, 2, 4}, {1, 3}]
    assert timeline.rosters[SHED] == after
    assert timeline.rosters[-1] == [{2, 4}, {3}]


def led(*callbacks: L.Callback, **options: Any) -> SwarmRun:
    """The most useful move is that of peer-1, the coordinator: from 2 and 10 to 1."""
    settings = {"speeds": (1, 2, 1, 10), "num_servers": 3, "num_stages": 2, "microbatch_size": 4, "role": "trainer"}
    return swarm(STEPS, *callbacks, **{**settings, **options})


@pytest.mark.thorough
def test_who_coordinates_hands_that_over_and_moves() -> None:
    timeline = Timeline()
    run = led(timeline)
    assert_exact(run, plain(STEPS))
    assert timeline.rosters[0] == [{2}, {1, 3}]
    assert timeline.rosters[-1] == [{1, 2}, {3}]
    assert [peer for _, peer, _ in moved(run.records)] == ["peer-1"]
    assert run.rerouted["replay"] == 0
    assert run.rerouted["strike"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("peer", "phase"), [("peer-1", Phase.PREPARE_DONE), ("peer-3", Phase.PREPARE)])
def test_a_death_while_coordination_is_handed_over_changes_nothing(peer: str, phase: Phase) -> None:
    plan, timeline = FaultPlan().kill(peer, at=phase), Timeline()
    run = led(timeline, faults=plan, num_servers=4, speeds=(1, 2, 1, 10, 0.5), num_gone=1)
    plan.check()
    assert_exact(run, plain(STEPS))
    assert all(timeline.rosters[-1])
