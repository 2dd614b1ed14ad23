"""The batches of a step, and the trainers that bring them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from lightning_swarm.client.step_client import StepClient
from lightning_swarm.coordinator.step.data_order import DataOrder, StepWindow
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import Grant, GrantRequest, Lease
from lightning_swarm.protocol.messages.run import MAX_PLANS, EpochPlan, PlanRequest, RandomNumbers, TakePlanRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import GRANT, PLAN, TAKE_PLAN
from lightning_swarm.protocol.run_state import lanes_of, next_in_lane, owner_of
from lightning_swarm.strategy.data import loader
from lightning_swarm.strategy.data.listing import EpochListing
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, Swarm, key, rows

OTHER = PeerId("other")
NOWHERE = RandomNumbers(torch=b"", python=b"", python_gauss=None, numpy=b"", numpy_place=0, numpy_gauss=None, own=[])


def plan(epoch: int, *sizes: tuple[int, int], begin: int = 0, last: bool = False) -> EpochPlan:
    return EpochPlan(epoch=epoch, begin=begin, sizes=list(sizes), digest=bytes(32), random=NOWHERE, last=last)


def test_a_reported_batch_has_the_size_of_its_number() -> None:
    """The trainer reports it to a new coordinator, which knows the order from the lead."""
    step = OpenStep(0, 8)
    step.plan(order(plan(0, (4, 2))), (0, 0))
    for size, origins in ((1000, {}), (4, {0: (4.0, OTHER)})):
        grant = Grant(lease=1, generation=0, step=0, first=0, weight=float(size), batch=(0, 0), samples=size)
        request = GrantRequest(step=0, num_samples=size, generation=0, batch=(0, 0))
        step.restore(OTHER, Lease(grant=grant, request=request), None)
        assert step.origins == origins


def order(*plans: EpochPlan) -> DataOrder:
    found = DataOrder()
    for one in plans:
        found.add(one)
    return found


# ---------------------------------------------------------------------- windows


def test_a_step_takes_whole_batches_until_its_samples_are_reached() -> None:
    window = StepWindow(order(plan(0, (4, 3), (2, 1))), (0, 0), 10)
    assert window.numbers == [(0, 0), (0, 1), (0, 2)]
    assert [window.place(number) for number in window.numbers] == [0, 4, 8]
    assert window.whole
    assert window.end == (0, 3)


def test_what_is_left_of_an_epoch_is_in_a_step_of_the_next() -> None:
    known = order(plan(0, (4, 3), (2, 1)))
    window = StepWindow(known, (0, 3), 10)
    assert (window.numbers, window.whole, window.end) == ([(0, 3)], False, (0, 4))
    known.add(plan(1, (4, 3), last=True))
    assert window.numbers == [(0, 3), (1, 0), (1, 1)]
    assert window.end == (1, 2)
    rest = StepWindow(known, window.end, 10)
    assert (rest.numbers, rest.whole, rest.end) == ([(1, 2)], True, (1, 3)), "no epoch follows"


def test_steps_pass_over_skipped_batches() -> None:
    known = order(replace(plan(0, (4, 5)), skipped=[1, 2, 4]), replace(plan(1, (4, 2), last=True), skipped=[0]))
    window = StepWindow(known, (0, 0), 8)
    assert (window.numbers, window.end) == ([(0, 0), (0, 3)], (1, 1))
    assert [window.place(number) for number in window.numbers] == [0, 4]
    assert window.is_passed((0, 5), {(0, 0), (0, 3)})
    with pytest.raises(ProtocolError, match="epoch 2 has 1 batches, so cannot skip 1"):
        known.add(replace(plan(2, (4, 1)), skipped=[1]))


def test_another_batch_takes_the_place_of_one_that_was_dropped() -> None:
    window = StepWindow(order(plan(0, (4, 5))), (0, 0), 8)
    assert window.numbers == [(0, 0), (0, 1)]
    window.dropped.add((0, 0))
    assert window.numbers == [(0, 1), (0, 2)]
    assert window.place((0, 2)) == 8, "places are those of the order"
    assert window.end == (0, 3)


def test_an_epoch_is_passed_when_all_of_it_is_through() -> None:
    window = StepWindow(order(plan(0, (4, 2))), (0, 0), 12)
    assert not window.is_passed((0, 2), {(0, 0)})
    assert window.is_passed((0, 2), {(0, 0), (0, 1)})
    assert not StepWindow(order(plan(0, (4, 4))), (0, 0), 8).is_passed((0, 4), {(0, 0), (0, 1)}), "another step follows"


def test_an_epoch_has_one_order() -> None:
    known = order(plan(0, (4, 2)))
    known.add(plan(0, (4, 2)))
    with pytest.raises(ProtocolError, match="epoch 0 already has an order"):
        known.add(plan(0, (4, 3)))
    with pytest.raises(ProtocolError, match="so cannot begin at 3"):
        known.add(plan(1, (4, 2), begin=3))
    with pytest.raises(ProtocolError, match="epoch 0 has no batch 2"):
        known.size((0, 2))
    many = order(*(plan(epoch, (1, 1)) for epoch in range(MAX_PLANS)))
    with pytest.raises(ProtocolError, match=f"may extend over {MAX_PLANS} epochs"):
        many.add(plan(MAX_PLANS, (1, 1)))


def test_lanes_part_an_epoch() -> None:
    lanes = lanes_of([OTHER, LEAD], LEAD)
    assert lanes == [LEAD, OTHER]
    for begin in (0, 3):
        own = {peer: [i for i in range(begin, begin + 6) if next_in_lane(begin, i, lanes, peer) == i] for peer in lanes}
        assert own[LEAD] == [begin, begin + 2, begin + 4]
        assert all(owner_of(begin, index, lanes) == peer for peer, indices in own.items() for index in indices)
    assert next_in_lane(0, 3, lanes, PeerId("a newcomer")) == 3


# ---------------------------------------------------------------------- listings, random numbers


def test_a_listing_is_known_by_its_digest() -> None:
    batches = [[3, 1], [2, 0], [4]]
    listing = EpochListing(batches, 3)
    assert [listing[i] for i in range(3)] == batches
    assert listing.sizes == [(2, 2), (1, 1)]
    assert listing.digest == EpochListing(batches, 3).digest
    others = [[[3, 1], [0, 2], [4]], [[3, 1, 2], [0], [4]], [["3", "1"], ["2", "0"], ["4"]]]
    assert len({listing.digest, *(EpochListing(one, 3).digest for one in others)}) == 4
    assert EpochListing(batches, 2).sizes == [(2, 2)]
    with pytest.raises(IndexError):
        listing[3]
    with pytest.raises(ConfigError, match="batch 1 has none"):
        EpochListing([[1], []], 2)


def test_random_numbers_are_gone_on_with_and_put_back() -> None:
    import random

    import numpy as np

    own = torch.Generator().manual_seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()  # noqa: NPY002 - what users draw from

    def draw() -> list[float]:
        return [
            float(torch.rand(())),
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),  # noqa: NPY002 - what users draw from
            float(torch.rand((), generator=own)),
        ]

    taken = msgspec.msgpack.decode(encode(loader.take_random_numbers([own])), type=RandomNumbers)
    drawn = draw()
    after = loader.take_random_numbers([])
    with loader.drawing_from(taken, [own]):
        assert draw() == drawn
    assert loader.take_random_numbers([]) == after
    for broken in (
        {"torch": b"1"},
        {"python": b"1234"},
        {"python": b"1"},
        {"numpy": b"1234"},
        {"numpy_place": 1 << 70},
        {"own": [b"x"]},
        {"own": []},
    ):
        with pytest.raises(ProtocolError), loader.drawing_from(msgspec.structs.replace(taken, **broken), [own]):
            pass
        assert loader.take_random_numbers([]) == after


# ---------------------------------------------------------------------- at who coordinates

LIMITS = Limits(call_timeout=30.0, lead_timeout=100.0)


def planned(make_swarm: MakeSwarm, *sizes: tuple[int, int], **options: Any) -> tuple[Swarm, StepClient]:
    swarm = make_swarm("a", "b", target_batch_size=4, limits=LIMITS)
    other = swarm.client(swarm.network.transport(OTHER))
    swarm.run(swarm.steps.plan(plan(0, *(sizes or ((2, 4),)), **options), (0, 0)))
    return swarm, other


async def bring(swarm: Swarm, steps: StepClient, batch: tuple[int, int], seed: int = 0) -> Grant:
    grant = await steps.request_grant(steps.next_serial(), 2, 1.0, batch)
    assert isinstance(grant, Grant)
    await end(swarm, steps, grant, seed)
    return grant


async def end(swarm: Swarm, steps: StepClient, grant: Grant, seed: int = 0) -> None:
    k = key(grant.first, step=grant.step)
    await swarm.through(k, rows(seed), weight=grant.weight)
    await steps.done(grant.lease, [k.receipt])


def test_a_place_goes_with_the_batch_and_not_with_who_comes_first(make_swarm: MakeSwarm) -> None:
    swarm, other = planned(make_swarm)

    async def both() -> tuple[Grant, Grant]:
        first = asyncio.create_task(swarm.steps.request_grant(1, 2, 1.0, (0, 0)))
        theirs = await bring(swarm, other, (0, 1), 1)
        own = await first
        assert isinstance(own, Grant)
        await end(swarm, swarm.steps, own)
        return own, theirs

    own, theirs = swarm.run(both())
    assert (own.first, theirs.first) == (0, 2)
    assert (own.batch, own.samples) == ((0, 0), 2)
    record = swarm.run(swarm.record(0))
    assert record.position == (0, 2)
    assert swarm.steps.run.position == (0, 2)
    assert swarm.run(other.request_grant(9, 2, 1.0, (0, 0))) is None or other.open_step == 0, "it counts already"


def test_what_is_in_other_hands_is_passed(make_swarm: MakeSwarm) -> None:
    swarm, other = planned(make_swarm)
    swarm.run(bring(swarm, swarm.steps, (0, 0)))
    assert swarm.run(other.request_grant(1, 2, 1.0, (0, 0))) is None
    besides = swarm.run(other.request_grant(2, 2, 1.0, (0, 2)))
    assert isinstance(besides, Grant)
    assert besides.batch == (0, 1), "that is in its own lane, and it is further on"
    assert swarm.run(swarm.steps.request_grant(2, 2, 1.0, (0, 2))) == 0, "its step is not open"


def test_a_batch_that_its_trainer_gives_back_is_dropped_and_others_are_granted_again(make_swarm: MakeSwarm) -> None:
    swarm, other = planned(make_swarm)
    grant = swarm.run(swarm.steps.request_grant(1, 2, 1.0, (0, 0)))
    assert isinstance(grant, Grant)
    swarm.run(swarm.steps.withdraw(grant.lease))
    again = swarm.run(other.request_grant(1, 2, 1.0, (0, 0)))
    assert isinstance(again, Grant)
    assert again.first != grant.first, "servers may have been told to give up what goes by that name"
    assert again.first % (1 << 26) == grant.first, "and draws are the same"
    swarm.run(other.withdraw(again.lease, dropped=True))
    assert swarm.run(swarm.steps.request_grant(2, 2, 1.0, (0, 0))) is None
    third = swarm.run(swarm.steps.request_grant(3, 2, 1.0, (0, 2)))
    assert isinstance(third, Grant), "it comes in the place of the one that was dropped"
    assert (third.step, third.first) == (0, 4)


def test_who_waits_is_given_what_nobody_brings(make_swarm: MakeSwarm) -> None:
    """The lead has begun, but does not reach its batch."""
    swarm, other = planned(make_swarm, (2, 4))

    async def besides() -> Grant:
        begun = await swarm.steps.request_grant(1, 2, 1.0, (0, 0))
        assert isinstance(begun, Grant)
        await swarm.steps.withdraw(begun.lease)
        await bring(swarm, other, (0, 1), 1)
        found = await other.request_grant(other.next_serial(), 2, 1.0, (0, 3))
        assert found == 0, "it has to wait"
        assert not await other.wait_closed(0), "until the lead has had time enough"
        grant = await other.request_grant(other.next_serial(), 2, 1.0, (0, 3))
        assert isinstance(grant, Grant)
        return grant

    grant = swarm.run(besides())
    assert (grant.batch, grant.step) == ((0, 0), 0)


def test_a_batch_that_is_dropped_lets_another_trainer_go_on(make_swarm: MakeSwarm) -> None:
    """That trainer waits with the batch that replaces the dropped one."""
    swarm, other = planned(make_swarm, (2, 4))

    async def go_on() -> Grant:
        await bring(swarm, swarm.steps, (0, 0))
        dropped = await other.request_grant(other.next_serial(), 2, 1.0, (0, 1))
        assert isinstance(dropped, Grant)
        number = swarm.steps.next_serial()
        assert await swarm.steps.request_grant(number, 2, 1.0, (0, 2)) == 0, "the step has all that it takes"
        waiting = asyncio.create_task(swarm.steps.wait_closed(0))
        await other.withdraw(dropped.lease, dropped=True)
        async with asyncio.timeout(60.0):
            assert not await waiting
        grant = await swarm.steps.request_grant(number, 2, 1.0, (0, 2))
        assert isinstance(grant, Grant)
        return grant

    grant = swarm.run(go_on())
    assert (grant.batch, grant.step) == ((0, 2), 0)


def test_the_end_of_an_epoch_is_passed_with_its_last_record(make_swarm: MakeSwarm) -> None:
    swarm, _ = planned(make_swarm, (2, 3), last=True)
    for index in range(2):
        swarm.run(bring(swarm, swarm.steps, (0, index), index))
    swarm.run(swarm.record(0))
    assert swarm.run(swarm.steps.request_grant(7, 1, 1.0, (0, 3))) != 0
    swarm.run(bring(swarm, swarm.steps, (0, 2)))
    assert swarm.run(swarm.steps.request_grant(8, 1, 1.0, (0, 3))) == 1, "its step closes, though it is not full"
    record = swarm.run(swarm.record(1))
    assert record.closing.num_samples == 2
    assert swarm.run(swarm.steps.request_grant(9, 1, 1.0, (0, 3))) is None


@pytest.mark.parametrize(
    ("method", "request_", "words"),
    [
        (GRANT.name, GrantRequest(step=0, num_samples=2, generation=0), "either all batches of step 0 have an epoch"),
        (
            GRANT.name,
            GrantRequest(step=0, num_samples=2, generation=0, batch=(0, 5)),
            "epoch 0 has 4 batches, got number 5",
        ),
        (PLAN.name, PlanRequest(generation=0, plan=plan(0, (3, 3)), position=(0, 0)), "epoch 0 already has an order"),
        (PLAN.name, PlanRequest(generation=7, plan=plan(1, (3, 3)), position=(0, 0)), "generation"),
        (TAKE_PLAN.name, TakePlanRequest(generation=7, epoch=0), "generation"),
    ],
)
def test_a_liar_gets_an_error_and_changes_nothing(
    make_swarm: MakeSwarm, method: str, request_: Any, words: str
) -> None:
    swarm, _ = planned(make_swarm)
    swarm.run(bring(swarm, swarm.steps, (0, 0)))
    books = swarm.coordinator.generation.step_state
    before = (books.order.plans, books.open.free, books.open.num_granted)
    caller = swarm.trainer if method == PLAN.name else swarm.network.find(OTHER)
    with pytest.raises(ProtocolError, match=words):
        swarm.run(caller.call(PeerId("a"), method, encode(request_), timeout=1.0))
    assert (books.order.plans, books.open.free, books.open.num_granted) == before


def test_only_the_lead_says_the_order(make_swarm: MakeSwarm) -> None:
    swarm, _ = planned(make_swarm)
    request = encode(PlanRequest(generation=0, plan=plan(1, (3, 3)), position=(0, 0)))
    with pytest.raises(ProtocolError, match="sends the order of batches, not other"):
        swarm.run(swarm.network.find(OTHER).call(PeerId("a"), PLAN.name, request, timeout=1.0))
    assert [one.epoch for one in swarm.coordinator.generation.step_state.order.plans] == [0]


def test_a_plan_is_waited_for_and_an_epoch_that_is_over_has_none(make_swarm: MakeSwarm) -> None:
    swarm, other = planned(make_swarm, (2, 2))

    async def take() -> EpochPlan | None:
        waiting = asyncio.create_task(other.take_plan(1))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await swarm.steps.plan(plan(1, (2, 4)), (0, 0))
        return await waiting

    found = swarm.run(take())
    assert found == plan(1, (2, 4))
    for index in range(2):
        swarm.run(bring(swarm, swarm.steps, (0, index), index))
    swarm.run(swarm.record(0))
    assert swarm.run(other.take_plan(0)) is None


def test_a_new_coordinator_asks_the_lead_for_the_order(make_swarm: MakeSwarm) -> None:
    from lightning_swarm.coordinator.takeover import rebuild

    swarm, other = planned(make_swarm)
    swarm.run(bring(swarm, swarm.steps, (0, 0)))
    dropped = swarm.run(other.request_grant(1, 2, 1.0, (0, 1)))
    assert isinstance(dropped, Grant)
    swarm.run(other.withdraw(dropped.lease, dropped=True))
    reports = {LEAD: swarm.steps._journal.report(), OTHER: other._journal.report()}
    run = swarm.steps.run
    run.follow_term((2, "b", 1))
    books = rebuild(run, reports, {}, complete=True)
    assert books.open.window is not None
    assert books.open.window.numbers == [(0, 0), (0, 2)], "what was dropped stays so"
    assert books.open.free == [(0, 2)]
    alone = rebuild(run, {OTHER: reports[OTHER]}, {}, complete=False)
    assert alone.open.window is None, "it waits for the lead to register"
    alone.plan(plan(0, (2, 4)), (0, 0))
    assert alone.open.free == [(0, 0), (0, 2)], "whatever the lead had: of two leases of a batch one counts"


def test_a_batch_in_the_place_of_one_that_was_dropped_does_not_count_twice(make_swarm: MakeSwarm) -> None:
    """The trainer that dropped it is gone when another peer takes over coordination."""
    from lightning_swarm.coordinator.takeover import rebuild

    swarm, other = planned(make_swarm)
    swarm.run(bring(swarm, swarm.steps, (0, 0)))
    dropped = swarm.run(other.request_grant(1, 2, 1.0, (0, 1)))
    assert isinstance(dropped, Grant)
    swarm.run(other.withdraw(dropped.lease, dropped=True))
    swarm.run(bring(swarm, swarm.steps, (0, 2), 2))
    swarm.steps.run.follow_term((2, "b", 1))
    report = swarm.steps._journal.report()
    assert [lease.grant.batch for lease in report.leases] == [(0, 0), (0, 2)]
    step = rebuild(swarm.steps.run, {LEAD: report}, {}, complete=False).open
    assert step.window is not None
    assert (step.window.numbers, step.window.end) == ([(0, 0), (0, 1)], (0, 2))
    assert step.free == [(0, 1)]
    assert step.complete_batches == {(0, 0)}, "the next step takes the other one"
    heard = rebuild(swarm.steps.run, {LEAD: report, OTHER: other._journal.report()}, {}, complete=True).open
    assert heard.complete_batches == {(0, 0), (0, 2)}
