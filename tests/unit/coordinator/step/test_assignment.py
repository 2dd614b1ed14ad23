"""Assignment of a step's batches to trainers of unequal speed."""

from __future__ import annotations

import asyncio
import itertools
import logging

import pytest

from lightning_swarm.coordinator.step.assignment import (
    BatchTimes,
    Lane,
    WaitingTrainer,
    choose_additional,
    leave_to_others,
)
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.step.test_data_order import end, plan
from tests.unit.swarm import LEAD, Swarm

OTHER = PeerId("other")
LIMITS = Limits(call_timeout=30.0, lead_timeout=100.0)


def test_who_waits_brings_at_once_what_nobody_comes_to_and_the_rest_in_time() -> None:
    waiting = WaitingTrainer((0, 5), since_s=10.0, patience_s=2.0)
    free = [(0, 1), (0, 2), (0, 6)]
    assert choose_additional(waiting, free, {(0, 2)}, [], now_s=10.0) == (0, 2)
    assert choose_additional(waiting, free, set(), [], now_s=11.9) is None
    assert choose_additional(waiting, free, set(), [], now_s=12.0) == (0, 1)
    assert choose_additional(waiting, free[2:], set(free), [], now_s=12.0) is None, "that is beyond its own"


def test_who_is_faster_takes_the_end_of_a_slower_ones_lane() -> None:
    free = [(0, 1), (0, 2), (0, 3), (0, 7)]
    waiting = WaitingTrainer((0, 5), since_s=10.0, patience_s=2.0, took_s=1.0)
    slow, slower, further_on = Lane((0, 2), end_s=12.0), Lane((0, 3), end_s=13.0), Lane((0, 7), end_s=20.0)
    assert choose_additional(waiting, free, set(), [slow, slower], now_s=10.0) == (0, 3)
    assert choose_additional(waiting, free, set(), [slow, further_on], now_s=10.0) == (0, 2)
    assert choose_additional(waiting, free, {(0, 1)}, [slow], now_s=10.0) == (0, 1), "nobody else comes to that one"
    assert choose_additional(waiting, free, set(), [further_on], now_s=10.0) is None, "that is beyond its own"
    assert choose_additional(waiting, free, set(), [Lane((0, 2), end_s=11.1)], now_s=10.0) is None, "as fast as itself"
    waiting = WaitingTrainer((0, 5), since_s=10.0, patience_s=2.0)
    assert choose_additional(waiting, free, set(), [slow], now_s=10.0) is None, "nobody knows how fast it is"


@pytest.mark.parametrize(
    ("num_free", "own_s", "others", "seconds"),
    [
        (1, 3.0, [(10.0, 1.0)], 1.1),
        (2, 3.0, [(10.0, 1.0)], 2.2),
        (3, 3.0, [(10.0, 1.0)], None),  # it finishes one before the other finishes three
        (1, 3.0, [(11.0, 1.0)], 2.2),
        (5, 3.0, [(10.0, 1.0), (10.5, 1.0)], None),
        (3, 3.0, [(10.0, 1.0), (10.3, 1.0)], 2.2),
        (1, 1.0, [(10.0, 1.0)], None),  # equal trainers leave each other no batch
        (1, 3.0, [], None),
        (1, None, [(10.0, 1.0)], None),
    ],
)
def test_a_batch_is_left_to_others_that_are_through_with_all_before(
    num_free: int, own_s: float | None, others: list[tuple[float, float]], seconds: float | None
) -> None:
    assert leave_to_others(num_free, own_s, others, now_s=10.0) == seconds


def test_what_a_batch_takes_is_believed_less_with_each_that_is_left() -> None:
    times = BatchTimes()
    times.granted(0.0)
    assert times.free_s(1.0) is None, "it may take for ever"
    times.ended(5.0)
    assert times.least_s is None, "a first batch compiles, and fills caches"
    times.granted(6.0)
    times.ended(7.0)
    times.ended(9.0)  # a repeated report
    assert (times.least_s, times.took_s) == (1.0, 1.0)
    assert times.free_s(7.5) == 7.5
    assert times.free_s(8.5) is None, "it does something else than to train"
    times.num_left = 3
    assert times.least_s == pytest.approx(0.8**3)
    times.granted(10.0)
    assert (times.least_s, times.free_s(10.2), times.free_s(12.0)) == (1.0, 11.0, 12.0)


# ---------------------------------------------------------------------- among trainers


class Trainers:
    """The lead and another trainer on a virtual clock; records each one's batches, and when steps ended."""

    def __init__(self, make_swarm: MakeSwarm, batches_of_a_step: int) -> None:
        self.swarm: Swarm = make_swarm(
            "a", "b", target_batch_size=2 * batches_of_a_step, limits=LIMITS, trainers=f"{LEAD} {OTHER}"
        )
        self.clients = {LEAD: self.swarm.steps, OTHER: self.swarm.client(self.swarm.network.transport(OTHER))}
        self.swarm.run(self.swarm.steps.plan(plan(0, (2, 1000)), (0, 0)))
        self.brought: dict[int, list[PeerId]] = {}
        self.ends_s: list[float] = []

    def train(self, num_steps: int, lead_s: float, other_s: float) -> None:
        """Run some steps with trainers that take these seconds for a batch."""

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._train(rank, took_s)) for rank, took_s in enumerate((lead_s, other_s))]
                while len(self.ends_s) < num_steps:
                    await asyncio.sleep(0.01)
                    if self.swarm.steps.version > len(self.ends_s):
                        self.ends_s.append(self.swarm.loop.time())
                for task in tasks:
                    task.cancel()

        self.swarm.run(all_of_them())

    async def _train(self, rank: int, took_s: float) -> None:
        name, steps = list(self.clients.items())[rank]
        for index in itertools.count(rank, len(self.clients)):
            number, is_through = steps.next_serial(), False
            while not is_through:
                found = await steps.request_grant(number, 2, 1.0, (0, index))
                if isinstance(found, Grant):
                    await asyncio.sleep(took_s)
                    await end(self.swarm, steps, found)
                    self.brought.setdefault(found.step, []).append(name)
                    is_through, number = found.batch == (0, index), steps.next_serial()
                elif found is None:
                    is_through = True
                else:
                    await steps.wait_closed(found)

    def step_s(self, last: int) -> float:
        """Return the mean seconds of the last steps."""
        return (self.ends_s[-1] - self.ends_s[-1 - last]) / last


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    ("lead_s", "other_s", "at_most_s", "of_the_lead"),
    [
        (1.0, 3.1, 12.6, 12),  # 12.1 s with divisible batches; 12.4 s with whole batches
        (3.1, 1.0, 12.6, 4),
        (1.0, 5.0, 14.3, 14),
        (1.0, 1.05, 8.6, 8),
    ],
)
def test_the_end_of_a_step_does_not_wait_for_a_slow_trainer(
    make_swarm: MakeSwarm, lead_s: float, other_s: float, at_most_s: float, of_the_lead: int
) -> None:
    trainers = Trainers(make_swarm, 16)
    trainers.train(5, lead_s, other_s)
    assert trainers.step_s(2) < at_most_s
    for step in (2, 3, 4):
        assert sorted(trainers.brought[step]) == sorted([LEAD] * of_the_lead + [OTHER] * (16 - of_the_lead))


def test_a_far_slower_trainer_is_told_of_and_tried_again(
    make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    trainers = Trainers(make_swarm, 4)
    with caplog.at_level(logging.WARNING):
        trainers.train(40, 0.1, 5.0)
    tried = [step for step, brought in trainers.brought.items() if OTHER in brought]
    assert tried[:2] == [0, 1], "its second batch tells how slow it is"
    assert 2 <= len(tried[2:]) <= 5, "after ten steps or so it may be faster"
    assert [one.getMessage() for one in caplog.records if "gets few batches" in one.getMessage()] == [
        (
            "Trainer other gets few batches: its newest one took 5 s, and other trainers complete a step sooner "
            "without it. Raise `target_batch_size`, or lower the batch size of all trainers."
        )
    ]


async def bring(trainers: Trainers, name: PeerId, index: int, took_s: float) -> None:
    steps = trainers.clients[name]
    grant = await steps.request_grant(steps.next_serial(), 2, 1.0, (0, index))
    assert isinstance(grant, Grant)
    assert grant.batch == (0, index)
    await asyncio.sleep(took_s)
    await end(trainers.swarm, steps, grant)


def measured(make_swarm: MakeSwarm) -> Trainers:
    """Run two steps of two batches, for which the lead takes 1 s each, the other trainer 5 s."""
    trainers = Trainers(make_swarm, 2)

    async def two_steps() -> None:
        for step in range(2):
            await asyncio.gather(
                bring(trainers, LEAD, 2 * step, 1.0),
                bring(trainers, OTHER, 2 * step + 1, 5.0),
            )
            await asyncio.gather(*(steps.wait_closed(step) for steps in trainers.clients.values()))

    trainers.swarm.run(two_steps())
    return trainers


def test_what_a_trainer_leaves_goes_to_one_that_waits_already(make_swarm: MakeSwarm) -> None:
    trainers = measured(make_swarm)
    lead, other = trainers.clients[LEAD], trainers.clients[OTHER]

    async def leave() -> None:
        await bring(trainers, LEAD, 4, 1.0)
        number = lead.next_serial()
        assert await lead.request_grant(number, 2, 1.0, (0, 6)) == 2
        waiting = asyncio.create_task(lead.wait_closed(2))
        await asyncio.sleep(0.1)
        begun_s = trainers.swarm.loop.time()
        left = other.next_serial()
        assert await other.request_grant(left, 2, 1.0, (0, 5)) == 2, "the lead is through with it sooner"
        assert not await waiting
        grant = await lead.request_grant(number, 2, 1.0, (0, 6))
        assert isinstance(grant, Grant)
        assert grant.batch == (0, 5)
        assert trainers.swarm.loop.time() - begun_s < 0.1
        assert await other.request_grant(left, 2, 1.0, (0, 5)) is None, "that one needs no place any more"

    trainers.swarm.run(leave())


def test_what_nobody_takes_is_brought_by_the_trainer_that_left_it(make_swarm: MakeSwarm) -> None:
    """For example, the faster trainer is frozen."""
    trainers = measured(make_swarm)
    other = trainers.clients[OTHER]

    async def take_back() -> None:
        await bring(trainers, LEAD, 4, 1.0)
        begun_s, number = trainers.swarm.loop.time(), other.next_serial()
        assert await other.request_grant(number, 2, 1.0, (0, 5)) == 2
        assert not await other.wait_closed(2)
        assert trainers.swarm.loop.time() - begun_s == pytest.approx(1.1, abs=0.05)
        grant = await other.request_grant(number, 2, 1.0, (0, 5))
        assert isinstance(grant, Grant)
        assert grant.batch == (0, 5)

    trainers.swarm.run(take_back())
