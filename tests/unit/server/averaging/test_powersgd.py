"""PowerSGD: the common product, each peer's carried error, and the traffic."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from torch import Size, Tensor

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.protocol.compression import codec
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.server.averaging.all_reduce import AveragingFailed, AveragingResult, AveragingState, PartEncoder
from lightning_swarm.server.averaging.averager import Butterfly, PowerSGD, refuse
from lightning_swarm.server.averaging.powersgd import LowRank, orthonormal
from tests.unit.server.averaging.test_all_reduce import Ring, compute
from tests.wire import Averaging

SHAPES = [Size([40, 30]), Size([40]), Size([16, 3, 5]), Size([3, 4]), Size([])]
LENGTH = sum(shape.numel() for shape in SHAPES)
RANK = 2
WEIGHT = 4.0


def low_rank() -> LowRank:
    return LowRank(SHAPES, RANK)


def averager(*, error_feedback: bool = True) -> PowerSGD:
    return PowerSGD(low_rank(), error_feedback, compute)


def normal(seed: int, length: int = LENGTH) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference() -> Averaging:
    compression = Compression(
        activations="none", gradients="none", averaging="powersgd", rank=RANK, error_feedback=True
    )
    return Averaging(compression, SHAPES, normal(0))


def average(ring: Ring, by: PowerSGD, carried: list[AveragingState], prefix: str = "round-0") -> list[AveragingResult]:
    async def go() -> list[AveragingResult]:
        works = [
            by.average(vector, WEIGHT, ring.group(place, prefix), place, carried[place])
            for place, vector in enumerate(ring.vectors)
        ]
        return list(await asyncio.gather(*works))

    return ring.loop.run_until_complete(go())


def test_only_matrices_for_which_it_pays_are_cut() -> None:
    found = low_rank()
    assert found.length == LENGTH
    assert found.left_length == (40 + 12 + 1) + RANK * (40 + 16)
    assert found.right_length == RANK * (30 + 15)


@pytest.mark.parametrize("num_peers", [2, 3, 5])
def test_all_have_the_same_bits_and_those_of_one_machine(loop: VirtualLoop, num_peers: int) -> None:
    """Holds over several steps, with errors carried from one to the next."""
    one, carried = reference(), [AveragingState()] * num_peers
    for step in range(4):
        own = [normal(10 * step + place) for place in range(num_peers)]
        results = average(Ring(loop, own), averager(), carried, f"round-{step}")
        assert all(torch.equal(results[0].mean, result.mean) for result in results)
        expected = one.mean(dict(enumerate(own)), WEIGHT)
        torch.testing.assert_close(results[0].mean, expected, rtol=1e-10, atol=1e-10)
        squared_norm = sum(result.squared_norm for result in results)
        assert squared_norm == pytest.approx(float(expected.square().sum()), rel=1e-10)
        carried = [result.carried for result in results]


@pytest.mark.parametrize("num_peers", [2, 3, 5])
def test_what_is_lost_is_carried_to_the_last_bit(loop: VirtualLoop, num_peers: int) -> None:
    own = [normal(place) for place in range(num_peers)]
    before = [normal(100 + place) / 50 for place in range(num_peers)]
    results = average(Ring(loop, own), averager(), [AveragingState(lost) for lost in before])
    exact = sum(own, torch.zeros_like(own[0])) / WEIGHT + sum(before)
    assert float((results[0].mean - exact).norm() / exact.norm()) > 0.1
    after = results[0].mean + sum(one.carried.lost for one in results if one.carried.lost is not None)
    torch.testing.assert_close(after, exact, rtol=1e-12, atol=1e-12)


def test_without_error_feedback_nothing_is_carried_but_directions(loop: VirtualLoop) -> None:
    results = average(Ring(loop, [normal(0), normal(1)]), averager(error_feedback=False), [AveragingState()] * 2)
    for result in results:
        assert result.carried.lost is None
        assert result.carried.basis is not None
        assert torch.equal(result.carried.basis, results[0].carried.basis)


def test_of_a_matrix_of_low_rank_nothing_is_lost(loop: VirtualLoop) -> None:
    shape = Size([50, 40])
    by = PowerSGD(LowRank([shape], 3), True, compute)
    matrix = normal(0, 150).view(50, 3) @ normal(1, 120).view(3, 40)
    results = average(Ring(loop, [matrix.flatten(), matrix.flatten()]), by, [AveragingState()] * 2)
    torch.testing.assert_close(results[0].mean, matrix.flatten() * 2 / WEIGHT, rtol=1e-10, atol=1e-10)


def test_directions_come_closer_from_step_to_step(loop: VirtualLoop) -> None:
    """Each step starts from the basis that the previous step found."""
    shape = Size([60, 50])
    by = PowerSGD(LowRank([shape], 2), False, compute)
    weights = torch.tensor([1.0, 0.9] + 48 * [0.3], dtype=torch.float64)
    matrix = torch.linalg.qr(normal(0, 3000).view(60, 50)).Q * weights
    best = float(weights[2:].norm())
    carried, errors = [AveragingState()] * 2, []
    for step in range(12):
        results = average(Ring(loop, [matrix.flatten(), matrix.flatten()]), by, carried, f"round-{step}")
        carried = [result.carried for result in results]
        errors.append(float((results[0].mean - matrix.flatten() * 2 / WEIGHT).norm() * WEIGHT / 2))
    assert 0.0 <= errors[-1] - best < 0.05 * (errors[0] - best)


@pytest.mark.parametrize("num_peers", [2, 4])
def test_each_peer_sends_little(loop: VirtualLoop, num_peers: int) -> None:
    by = PowerSGD(LowRank([Size([1000, 800])], 4), True, compute)
    ring = Ring(loop, [normal(place, 800_000) for place in range(num_peers)])
    average(ring, by, [AveragingState()] * num_peers)
    least = 2 * (num_peers - 1) / num_peers * 4 * (1000 + 800) * 8
    for transport in ring.transports:
        assert least <= sum(transport.traffic.sent_bytes.values()) <= 1.1 * least


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_seen_by_all(loop: VirtualLoop, value: float) -> None:
    """The step is then skipped."""
    own = [normal(0), normal(1)]
    own[1][7] = value
    results = average(Ring(loop, own), averager(), [AveragingState()] * 2)
    assert not math.isfinite(sum(result.squared_norm for result in results))
    assert torch.equal(results[0].mean.isnan(), results[1].mean.isnan())


def test_a_gradient_of_zeros_keeps_its_directions(loop: VirtualLoop) -> None:
    nothing = [torch.zeros(LENGTH, dtype=torch.float64)] * 2
    results = average(Ring(loop, nothing), averager(), [AveragingState()] * 2)
    assert not results[0].mean.any()
    basis = results[0].carried.basis
    assert basis is not None
    assert torch.equal(basis, low_rank().initial_basis(nothing[0]))


def test_who_is_alone_loses_nothing(loop: VirtualLoop) -> None:
    """It also applies the error that it carried from earlier rounds with other peers."""
    own, lost = normal(0), normal(1)
    for by in (averager(), Butterfly(PartEncoder(codec("4bit"), compute), True)):
        ring = Ring(loop, [own])
        (result,) = average(ring, by, [AveragingState(lost)])  # type: ignore[arg-type]
        torch.testing.assert_close(result.mean, own / WEIGHT + lost, rtol=1e-12, atol=1e-12)
        assert result.carried.lost is None


@pytest.mark.parametrize("num_peers", [1, 3])
def test_who_has_no_part_in_it_gets_the_same_bits(loop: VirtualLoop, num_peers: int) -> None:
    ring = Ring(loop, [normal(place) for place in range(num_peers)])
    results = average(ring, averager(), [AveragingState()] * num_peers)
    group = ring.group(0)
    mean, carried = loop.run_until_complete(averager().collect(ring.vectors[0], group))
    assert torch.equal(mean, results[0].mean)
    assert carried.lost is None
    if num_peers > 1:
        assert carried.basis is not None
        assert results[0].carried.basis is not None
        assert torch.equal(carried.basis, results[0].carried.basis)


@pytest.mark.parametrize("after_s", [0.005, 0.05])
def test_a_member_that_gives_up_makes_everyone_raise(loop: VirtualLoop, after_s: float) -> None:
    """It gives up in the first half of a round, or in the second."""
    ring = Ring(loop, [normal(place) for place in range(3)])

    async def one(place: int) -> Any:
        group = ring.group(place)
        try:
            return await averager().average(ring.vectors[place], WEIGHT, group, place, AveragingState())
        except BaseException as error:
            refuse(group, place, repr(error))
            raise

    async def go() -> list[Any]:
        works = [asyncio.create_task(one(place)) for place in range(3)]
        await asyncio.sleep(after_s)
        assert not works[0].done()
        works[0].cancel()
        return list(await asyncio.gather(*works[1:], return_exceptions=True))

    failures = loop.run_until_complete(go())
    assert all(isinstance(failure, AveragingFailed) and failure.missed is None for failure in failures)
    assert loop.time() < 5.0


def test_orthonormal_columns_span_what_the_columns_did() -> None:
    columns = normal(0, 200).view(50, 4)
    columns[:, 2] = columns[:, 0] + 1e-9 * columns[:, 2]  # nearly equal
    columns *= torch.tensor([1e-150, 1e150, 1e-150, 1.0], dtype=torch.float64)
    found = orthonormal(columns)
    torch.testing.assert_close(found.T @ found, torch.eye(4, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    unit = columns / columns.norm(dim=0)
    torch.testing.assert_close(found @ (found.T @ unit), unit, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_rows", [5, 32, 97, 1000])
def test_columns_that_add_nothing_become_zeros(num_rows: int, dtype: torch.dtype) -> None:
    """Their rounding residue could have the direction of another column."""
    one = normal(num_rows, num_rows).to(dtype)
    for columns in ([one] * 4, [torch.ones_like(one)] * 4, [one, -one, one / 4, one - one]):
        found = orthonormal(torch.stack(columns, dim=1))
        torch.testing.assert_close(found[:, 0], columns[0] / columns[0].norm())
        assert not found[:, 1:].any()
    found = orthonormal(torch.stack([one, 3 * one, one / 7, one], dim=1)).double()
    products = found.T @ found
    assert (products - products.diagonal().round().diag()).abs().max() < 1e-6, "only what float32 rounded may be left"
    assert not orthonormal(torch.zeros(num_rows, 3, dtype=dtype)).any()


def test_a_column_of_nan_stays_one() -> None:
    columns = normal(0, 20).view(5, 4)
    columns[1, 2] = math.nan
    assert orthonormal(columns)[:, 2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_feedback_of_a_gradient_of_rank_one_stays_small(loop: VirtualLoop, dtype: torch.dtype) -> None:
    """For example, the gradient of a layer whose outputs are summed has equal rows."""
    by = PowerSGD(LowRank([Size([32, 48])], 4), True, compute)
    own = (torch.ones(32, 1) * normal(0, 48).float()).to(dtype).flatten()
    carried = [AveragingState()] * 2
    for step in range(10):
        results = average(Ring(loop, [own, own]), by, carried, f"round-{step}")
        carried = [result.carried for result in results]
        torch.testing.assert_close(results[0].mean, own * 2 / WEIGHT, rtol=1e-4, atol=1e-4)


def test_bits_do_not_depend_on_how_many_threads_there_are() -> None:
    by = LowRank([Size([3000, 1100])], 4)
    left = normal(0, by.left_length).float()
    right = normal(1, by.right_length).float()
    before = torch.get_num_threads()
    found = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(by.product(by.orthonormal(left), right))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
