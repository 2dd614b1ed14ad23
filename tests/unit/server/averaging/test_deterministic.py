"""Sums whose bits do not depend on the order, and that report values which they cannot represent."""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import PeerError
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.compression import to_message
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.averaging import deterministic
from lightning_swarm.server.averaging.all_reduce import AveragingResult, AveragingState, Group, squared_norm
from lightning_swarm.server.averaging.deterministic import COARSE, FINE, LIMIT, MAX_ADDED, DeterministicAverager
from lightning_swarm.server.gradient_buffer import ExactSum, GradientSum

CPU = torch.device("cpu")
TINY = torch.finfo(torch.float32).tiny
LENGTH = 10


def added(numbers: Sequence[float], weight: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    total = deterministic.empty_sum(1, CPU)
    for number in numbers:
        vector = torch.tensor([number], dtype=dtype)
        assert deterministic.fits([vector], weight)
        deterministic.add(total[:, :1], vector, weight)
        deterministic.count_vector(total, was_added=True)
    return total


def value(total: Tensor) -> Fraction:
    coarse, fine = total[:, 0].tolist()
    return coarse * Fraction(COARSE) + fine * Fraction(FINE)


# --- what is added ---


@pytest.mark.parametrize(
    "number",
    [0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 1e-3, -1e-9, 123456.789, COARSE / 2, -COARSE / 2, LIMIT - 1, 1 - LIMIT, FINE],
)
def test_a_number_is_held_to_half_of_a_fine_unit(number: float) -> None:
    total = added([number])
    assert abs(value(total) - Fraction(number)) <= Fraction(FINE) / 2
    assert float(deterministic.quotient(total[:, :1], 1.0)) == pytest.approx(number, rel=1e-15, abs=FINE / 2)


@pytest.mark.parametrize("exponent", range(-32, 28))
def test_numbers_of_float32_are_held_as_they_are(exponent: int) -> None:
    generator = torch.Generator().manual_seed(exponent + 100)
    for mantissa in (1.0 + torch.rand(20, generator=generator)).tolist():
        number = float(torch.tensor(math.ldexp(mantissa, exponent), dtype=torch.float32))
        assert value(added([number], dtype=torch.float32)) == Fraction(number)
        assert float(deterministic.quotient(added([number, -number, number])[:, :1], 1.0)) == number


@pytest.mark.parametrize("number", [5e-324, -5e-324, TINY, -TINY, FINE / 2, -FINE / 2])
def test_what_is_below_half_of_a_fine_unit_is_nothing(number: float) -> None:
    assert value(added([number] * 7)) == 0


def test_large_and_small_numbers_that_cancel_leave_the_rest() -> None:
    numbers = [2.0**27, 3e-9, -(2.0**27), 5e-9, 1000.0, -1000.0]
    assert functools.reduce(operator.add, numbers) != math.fsum(numbers), "as floats they would not"
    expected = sum(map(Fraction, numbers))
    assert abs(value(added(numbers)) - expected) <= 6 * Fraction(FINE) / 2


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_as_many_of_the_largest_as_are_allowed_do_not_overflow(sign: float) -> None:
    largest = sign * math.nextafter(LIMIT, 0.0)
    one = added([largest, sign * math.nextafter(COARSE / 2, 0.0)])
    coarse, fine = (abs(number) for number in one[:, 0].tolist())
    assert coarse * MAX_ADDED < 1 << 63
    assert fine * MAX_ADDED < 1 << 63
    # Double the sum repeatedly, as if as many copies had been added.
    many = added([largest])
    for _ in range(20):
        many = many + many
    assert many[0, -1] == MAX_ADDED
    assert deterministic.is_whole(many[:, -1])
    assert value(many) == MAX_ADDED * value(added([largest]))
    assert not deterministic.is_whole(many[:, -1] + torch.tensor([1, 0]))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, LIMIT, -LIMIT, 2 * LIMIT, 1e300])
def test_what_does_not_fit(number: float) -> None:
    vectors = [torch.ones(3, dtype=torch.float64), torch.tensor([0.0, number, 0.0], dtype=torch.float64)]
    assert not deterministic.fits(vectors, 1.0)
    assert deterministic.fits(vectors[:1], 1.0)
    assert deterministic.fits([torch.empty(0)], 1.0)
    assert deterministic.fits([], 1.0)


def test_the_weight_counts() -> None:
    below = [torch.tensor([LIMIT / 4])]
    assert deterministic.fits(below, 3.0)
    assert not deterministic.fits(below, 4.0)
    assert value(added([0.5], weight=3.0)) == Fraction(3, 2)


# --- a stage's sum ---


def gradients(number: int) -> list[list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(2, 3, generator=generator), torch.randn(4, generator=generator) if i % 2 else None]
        for i in range(number)
    ]


def summed(kind: type[GradientSum], added: Sequence[list[Tensor | None]]) -> GradientSum:
    total = kind([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))], CPU)
    for one in added:
        total.add(one, 3.0)
    return total


def test_the_order_changes_floats_but_no_bit_of_an_exact_sum() -> None:
    orders = list(itertools.permutations(gradients(5)))
    exact = [summed(ExactSum, order).values for order in orders]
    assert all(torch.equal(one, exact[0]) for one in exact)
    floats = [summed(GradientSum, order).values for order in orders]
    assert not all(torch.equal(one, floats[0]) for one in floats)
    mean = deterministic.quotient(exact[0][:, :-1], 7.0)
    torch.testing.assert_close(mean.float(), floats[0] / 7.0)


def test_an_exact_sum_knows_what_was_touched_and_can_be_cleared() -> None:
    total = summed(ExactSum, gradients(1))
    assert total.touched == [True, False]
    total.add(gradients(2)[1], 1.0)
    assert total.touched == [True, True]
    assert total.values[:, -1].tolist() == [2, 0]
    assert (total.like.shape, total.like.dtype) == ((LENGTH,), torch.float32)
    total.clear()
    assert not total.values.any()
    assert total.touched == [False, False]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, LIMIT])
def test_what_does_not_fit_is_counted_and_not_added(number: float) -> None:
    before, *_, last = orders = gradients(3)
    bad: list[Tensor | None] = [torch.full((2, 3), number), torch.ones(4)]
    total, other = summed(ExactSum, [before, bad, last]), summed(ExactSum, [last, before, bad])
    assert torch.equal(total.values, other.values)
    assert torch.equal(total.values[:, :-1], summed(ExactSum, [orders[0], last]).values[:, :-1])
    assert total.values[:, -1].tolist() == [2, 1]


# --- a round ---


async def compute(run: Callable[[], Any]) -> Any:
    return run()


class Ring:
    """Peers that average exact sums."""

    def __init__(self, loop: VirtualLoop, sums: Sequence[Tensor]) -> None:
        self.loop = loop
        self.sums = sums
        network = MemoryNetwork(latency_s=0.01)
        self.names = [PeerId(f"peer-{i}") for i in range(len(sums) + 1)]
        self.tickets = [TicketStore(network.transport(name), max_bytes=1 << 30) for name in self.names]
        self.averager = DeterministicAverager(torch.empty(LENGTH), compute)

    def group(self, place: int) -> Group:
        return Group(self.names[:-1], "round-0", self.tickets[place], 30.0, shares_with=self.names[-1:].__contains__)

    async def one(self, place: int) -> AveragingResult:
        return await self.averager.average(self.sums[place], 7.0, self.group(place), place, AveragingState())

    def average(self) -> tuple[list[AveragingResult], Tensor]:
        """Return all members' results, and the result of a peer without a sum."""

        async def go() -> tuple[list[AveragingResult], Tensor]:
            found = list(await asyncio.gather(*map(self.one, range(len(self.sums)))))
            return found, (await self.averager.collect(torch.empty(LENGTH), self.group(len(self.sums))))[0]

        return self.loop.run_until_complete(go())


def scattered(num_peers: int, seed: int, added: Sequence[list[Tensor | None]]) -> list[Tensor]:
    """Distribute the gradients over the peers at random, and return the peers' sums."""
    rng = random.Random(seed)
    hands: list[list[list[Tensor | None]]] = [[] for _ in range(num_peers)]
    for one in rng.sample(list(added), len(added)):
        rng.choice(hands).append(one)
    return [summed(ExactSum, hand).values for hand in hands]


def test_who_added_what_and_how_many_did_changes_no_bit_of_the_mean_nor_of_its_norm(loop: VirtualLoop) -> None:
    means, norms = [], set()
    for num_peers in (1, 2, 3, 5, 12):
        found, collected = Ring(loop, scattered(num_peers, seed=num_peers, added=gradients(9))).average()
        means += [collected, *(one.mean for one in found)]
        norms.add(math.fsum(one.squared_norm for one in found))
    assert all(torch.equal(one, means[0]) for one in means)
    assert means[0].dtype == torch.float32
    assert norms == {squared_norm(means[0])}
    torch.testing.assert_close(means[0], summed(GradientSum, gradients(9)).values / 7.0)


@pytest.mark.parametrize("num_peers", [1, 3])
@pytest.mark.parametrize("number", [math.nan, math.inf, LIMIT])
def test_a_sum_that_lacks_something_has_no_mean(loop: VirtualLoop, num_peers: int, number: float) -> None:
    bad: list[Tensor | None] = [torch.full((2, 3), number), None]
    found, collected = Ring(loop, scattered(num_peers, seed=0, added=[*gradients(5), bad])).average()
    assert all(one.mean.isnan().all() for one in found)
    assert collected.isnan().all()
    assert math.isnan(math.fsum(one.squared_norm for one in found))


def test_more_than_can_be_added_has_no_mean(loop: VirtualLoop) -> None:
    sums = scattered(2, seed=0, added=gradients(4))
    sums[0][0, -1] += MAX_ADDED - 4
    assert all(one.mean.isfinite().all() for one in Ring(loop, sums).average()[0])
    sums[1][0, -1] += 1
    assert all(one.mean.isnan().all() for one in Ring(loop, sums).average()[0])


@pytest.mark.parametrize(
    "tree",
    [
        torch.zeros(LENGTH // 2, dtype=torch.int64),
        (torch.zeros(5), torch.zeros(5), torch.zeros(2, dtype=torch.int64)),
        tuple(torch.zeros(n, dtype=torch.int64) for n in (5, 4, 2)),
        tuple(torch.zeros(n, dtype=torch.int64) for n in (5, 5, 3)),
        tuple(torch.zeros(n, dtype=torch.int64) for n in (5, 5)),
    ],
    ids=["no tuple", "floats", "short", "counts", "no counts"],
)
def test_a_part_of_another_kind_is_refused(loop: VirtualLoop, tree: Any) -> None:
    ring = Ring(loop, scattered(2, seed=0, added=gradients(4)))
    ring.tickets[1].offer("round-0/part0", to_message(tree), lambda *_: True)
    with pytest.raises(PeerError, match="must be two vectors of"):
        ring.loop.run_until_complete(ring.one(0))
