"""Fingerprints: equal for equal bytes, and different for each difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_swarm.model.fingerprint import _ROW, Fingerprint, _row_sums, _row_sums_on_cpu, digest, fingerprint, proof
from lightning_swarm.network import PeerId
from lightning_swarm.network.tensors import DTYPES
from lightning_swarm.server.server import Server
from tests.unit.conftest import MakeSwarm
from tests.unit.model.forged import cancelling_words
from tests.unit.swarm import rows


def random_bytes(num_bytes: int) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d is not torch.bool], ids=str)
def test_every_bit_matters(dtype: torch.dtype) -> None:
    raw = random_bytes(48)
    base = fingerprint([raw.clone().view(dtype)])
    found = {base}
    for bit in range(8 * len(raw)):
        changed = raw.clone()
        changed[bit // 8] ^= 1 << (bit % 8)
        found.add(fingerprint([changed.view(dtype)]))
    assert len(found) == 8 * len(raw) + 1


@pytest.mark.parametrize("length", [2, 3, 4, 100, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_signs_do_not_cancel(length: int, dtype: torch.dtype) -> None:
    """Only the highest bits differ, in an even number of places."""
    weights = torch.randn(length, dtype=dtype, generator=torch.Generator().manual_seed(0))
    assert fingerprint([weights]) != fingerprint([-weights])
    pair = weights.clone()
    pair[-2:] *= -1
    assert fingerprint([weights]) != fingerprint([pair])


def test_position_and_order_matter() -> None:
    one, two = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0])
    different = [
        [one, two],
        [two, one],
        [torch.cat([one, two])],
        [one.flip(0), two],
        [one],
        [one, two, torch.zeros(0)],
        [one, two, torch.zeros(1)],
        [],
    ]
    assert len({fingerprint(tensors) for tensors in different}) == len(different)


def test_swapped_elements_matter_wherever_they_are() -> None:
    weights = torch.arange(70_000, dtype=torch.float32)
    found = {fingerprint([weights])}
    for i, j in ((0, 1), (0, 65_536), (32_767, 32_768), (100, 69_999)):
        swapped = weights.clone()
        swapped[[i, j]] = weights[[j, i]]
        found.add(fingerprint([swapped]))
    assert len(found) == 5


def test_equal_bytes_are_equal_however_they_lie_in_memory() -> None:
    weights = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    expected = fingerprint([weights])
    assert fingerprint([weights.clone().requires_grad_()]) == expected
    assert fingerprint([weights.t().contiguous().t()]) == expected
    assert fingerprint([torch.cat([weights, weights])[6:]]) == expected
    assert fingerprint(iter([weights])) == expected


def test_a_proof_shows_what_a_fingerprint_does_not() -> None:
    """An attacker changes a word in each of two rows such that the fingerprint stays."""
    one, other = cancelling_words()
    words = (1 << 30) + torch.randint(0, 1000, (2, _ROW), generator=torch.Generator().manual_seed(0))
    others = words.clone()
    others[0, ::7] += one
    others[1, ::7] += other
    assert others.min() >= -(1 << 31)
    weights, poison = (rows.int().view(torch.float32).view(-1) for rows in (words, others))
    assert fingerprint([weights]) == fingerprint([poison]), "the attack is one"
    for challenge in (1, 2, 1 << 61):
        assert proof([weights], challenge) == proof([weights.clone()], challenge) < 1 << 64
        assert proof([weights], challenge) != proof([poison], challenge)
    assert proof([weights], 1) != proof([weights], 2)
    assert len({digest([weights], prefix) for prefix in (b"", b"x")} | {digest([poison], b"")}) == 3
    halves = [weights[:_ROW], weights[_ROW:]]
    assert digest([weights], b"") != digest(halves, b"") != digest(halves[::-1], b"")


def test_a_known_value_stays() -> None:
    """Peers of two releases must agree."""
    assert fingerprint([torch.arange(10.0), torch.tensor(1), torch.tensor([True])]) == 5489748971663517389


@pytest.mark.parametrize("length", [1, 100, _ROW, _ROW + 1, 3 * _ROW - 1])
def test_numpy_and_torch_find_the_same(length: int) -> None:
    """CPU and GPU implementations must agree."""
    words = torch.randint(-(1 << 31), 1 << 31, (length,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    assert [*_row_sums_on_cpu(words)] == [*_row_sums(words)]


def test_taken_in_pieces_it_is_the_same() -> None:
    tensors = [torch.arange(5_000_000, dtype=torch.float32), torch.tensor(3.0), torch.zeros(0)]
    pieces = Fingerprint(tensors)
    num_pieces = 1
    while pieces.advance():
        num_pieces += 1
    assert num_pieces > len(tensors)
    assert pieces.finish() == pieces.finish() == fingerprint(tensors)


def test_what_a_stage_took_ahead_counts_while_nothing_was_written(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a c", "b")
    for first in (2, 4):  # after the first step a snapshot with the fingerprint is taken
        swarm.run(swarm.step(rows(first), rows(first + 1)))
    stage, other = (swarm.servers[PeerId(peer)].steps.stage(0) for peer in "ac")
    assert stage.state_hash.advance()
    assert stage.fingerprint() == other.fingerprint()
    assert not stage.state_hash.advance()
    with torch.no_grad():
        next(iter(stage.parameters.values())).view(-1)[0] += 1
    assert stage.fingerprint() != other.fingerprint()


def test_a_server_works_ahead_where_it_will_be_asked(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(swarm.step(rows(0), rows(1)))

    def is_asked(server: Server) -> bool:
        stage = server.steps.stage(server.steps.stages[0])
        return server.steps.sums._is_compared(stage)

    both = [swarm.servers[PeerId(peer)] for peer in "ab"]
    assert [is_asked(server) for server in both] == [False, False]
    joiner = swarm.join("j")
    assert is_asked(joiner), "before it is a member"
    swarm.run(swarm.step(rows(2), rows(3)))
    assert joiner.membership.is_member
    assert [is_asked(server) for server in both] == [True, True], "somebody was joining"
    swarm.run(swarm.step(rows(4), rows(5)))
    joined = joiner.steps.stages[0]
    assert [is_asked(server) for server in both] == [joined == stage for stage in (0, 1)]
    assert is_asked(joiner)
