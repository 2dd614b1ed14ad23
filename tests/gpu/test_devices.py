"""Computations that must have the same bits on a CPU and a GPU: draws, hashes, codecs, fixed-point sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.model.fingerprint import digest, fingerprint
from lightning_swarm.model.random import KeyedOnDemand, KeyedRandom
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.compression import CODECS, to_message
from lightning_swarm.protocol.messages.calls import Ticket
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.averaging import all_reduce, deterministic
from lightning_swarm.server.averaging.all_reduce import squared_norm
from lightning_swarm.server.averaging.powersgd import LowRank

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = (1, 7, 4096, 100_003)

DRAWS: dict[str, Callable[[torch.device, int], Tensor]] = {
    "rand": lambda device, n: torch.rand(n, device=device),
    "rand float64": lambda device, n: torch.rand(n, device=device, dtype=torch.float64),
    "rand bfloat16": lambda device, n: torch.rand(n, device=device, dtype=torch.bfloat16),
    "randint": lambda device, n: torch.randint(3, 1000, (n,), device=device),
    "random_": lambda device, n: torch.empty(n, device=device).random_(),
    "randperm": lambda device, n: torch.randperm(n, device=device),
    "bernoulli_": lambda device, n: torch.empty(n, device=device).bernoulli_(0.3),
    "bernoulli": lambda device, n: torch.bernoulli(torch.linspace(0, 1, n, device=CPU).to(device)),
    "rand_like": lambda device, n: torch.rand_like(torch.empty(n, device=device)),
    "dropout": lambda device, n: F.dropout(torch.ones(n, device=device), 0.3),
    "dropout float16": lambda device, n: F.dropout(torch.ones(n, device=device, dtype=torch.float16), 0.5),
    "alpha_dropout": lambda device, n: F.alpha_dropout(torch.ones(n, device=device), 0.5, training=True) != 1,
    "dropout2d": lambda device, n: F.dropout2d(torch.ones(1, n, 2, 2, device=device), 0.5),
    "uniform_ of a transposed tensor": lambda device, n: torch.empty(2, n, device=device).t().uniform_(),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_the_same_bits(name: str, size: int) -> None:
    def draw(device: torch.device) -> Tensor:
        with KeyedRandom(2**63 - 5) as mode:
            found = DRAWS[name](device, size)
        assert mode.draw >= 1, "it did not draw"
        assert found.device.type == device.type
        return found.cpu()

    assert torch.equal(draw(CPU), draw(GPU))


@pytest.mark.parametrize(
    "draw",
    [
        lambda device: torch.randn(5000, device=device, dtype=torch.float64),
        lambda device: torch.empty(5000, device=device, dtype=torch.float64).exponential_(2.0),
        lambda device: torch.normal(torch.zeros(5000, device=device, dtype=torch.float64), 2.0),
        lambda device: F.gumbel_softmax(torch.zeros(50, 9, device=device, dtype=torch.float64)),
    ],
)
def test_draws_are_the_same_but_for_rounding(draw: Callable[[torch.device], Tensor]) -> None:
    found = []
    for device in (CPU, GPU):
        with KeyedRandom(7):
            found.append(draw(device).cpu())
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_generators_stay_where_they_were() -> None:
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    with KeyedRandom(3):
        F.dropout(torch.ones(10, device=GPU))
        torch.rand(3, device=GPU)
    assert torch.equal(torch.cuda.get_rng_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_draw_from_the_gpus_generator_is_noticed() -> None:
    runner, draws = KeyedOnDemand(GPU), False

    def compute() -> Tensor:
        return torch.rand(4, device=GPU) if draws else torch.zeros(4, device=GPU)

    assert not runner.run("kind", 5, compute)[1]
    assert not runner.run("kind", 5, compute)[1]
    draws = True
    before = torch.cuda.get_rng_state()
    found, has_drawn = runner.run("kind", 5, compute)
    assert has_drawn
    assert torch.equal(torch.cuda.get_rng_state(), before)
    with KeyedRandom(5):
        assert torch.equal(found, torch.rand(4, device=GPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_with_dropout_draws_from_the_keyed_stream(dtype: torch.dtype) -> None:
    def attend(seed: int) -> Tensor:
        generator = torch.Generator(GPU).manual_seed(1)
        heads = torch.randn(3, 2, 4, 16, 32, device=GPU, generator=generator).to(dtype)
        with KeyedRandom(seed) as mode:
            out = F.scaled_dot_product_attention(*heads, dropout_p=0.5, is_causal=True)
        assert mode.draw == 1
        return out

    assert torch.equal(attend(1), attend(1))
    assert not torch.equal(attend(1), attend(2))


def test_fingerprints_and_digests() -> None:
    tensors = [
        torch.randn(70_001),
        torch.randn(3, 5, dtype=torch.float64),
        torch.arange(7, dtype=torch.uint8),
        torch.randn(33).to(torch.bfloat16),
        torch.ones(5, dtype=torch.bool),
        torch.randn(6, 4).t(),
        torch.zeros(0),
        torch.randn(()),
    ]
    moved = [tensor.to(GPU) for tensor in tensors]
    assert fingerprint(moved) == fingerprint(tensors)
    assert digest(moved, b"") == digest(tensors, b"")
    moved[0][70_000] += 1
    assert fingerprint(moved) != fingerprint(tensors)


TENSORS = {
    "normal": torch.randn(300, 257, generator=torch.Generator().manual_seed(0)),
    "vector": torch.randn(5_003, generator=torch.Generator().manual_seed(1)),
    "tiny": 1e-30 * torch.randn(64, 64, generator=torch.Generator().manual_seed(2)),
    "wide": torch.randn(64, 64, generator=torch.Generator().manual_seed(3)).exp().pow(6),
    "zeros": torch.zeros(40, 40),
    "half": torch.randn(64, 64, generator=torch.Generator().manual_seed(4)).half(),
}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", CODECS)
def test_codecs(name: str, tensor: str) -> None:
    codec, whole = CODECS[name](), TENSORS[tensor]
    here, there = codec.encode(whole), codec.encode(whole.to(GPU))
    # The same bytes decode to the same bits, from either device.
    for parts in (here, tuple(part.cpu() for part in there)):
        one = codec.decode(parts, whole.dtype, whole.shape)
        other = codec.decode(tuple(part.to(GPU) for part in parts), whole.dtype, whole.shape)
        assert other.device.type == "cuda"
        assert torch.equal(one, other.cpu())
    if name == "8bit":  # bitsandbytes chooses codes on each device in its own way
        highest = whole.float().abs().max()
        lost = [codec.decode(parts, torch.float32, whole.shape).cpu() - whole.float() for parts in (here, there)]
        assert all(float(one.abs().max()) <= 2**-7 * highest for one in lost)
        return
    for part, moved in zip(here, there, strict=True):
        assert torch.equal(part, moved.cpu()), "the same tensor gives other bytes"


def test_sums_in_fixed_point() -> None:
    vectors = [torch.randn(200_003, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    here, there = (deterministic.empty_sum(200_003, device) for device in (CPU, GPU))
    for vector in vectors:
        assert deterministic.fits([vector.to(GPU)], 0.3)
        deterministic.add(here[:, :-1], vector, 0.3)
        deterministic.count_vector(here, was_added=True)
    for vector in reversed(vectors):
        deterministic.add(there[:, :-1], vector.to(GPU), 0.3)
        deterministic.count_vector(there, was_added=True)
    assert torch.equal(here, there.cpu())
    quotients = [deterministic.quotient(sums[:, :-1], 7.0).cpu() for sums in (here, there)]
    assert torch.equal(*quotients)
    assert not deterministic.fits([torch.tensor([float("nan")], device=GPU)], 1.0)
    assert squared_norm(quotients[0].to(GPU)) == pytest.approx(squared_norm(quotients[0]), rel=1e-12)


def test_powersgd_gives_the_same_bits() -> None:
    low_rank = LowRank([torch.Size([60, 50]), torch.Size([60]), torch.Size([8, 90])], 4)
    gradients = torch.randn(low_rank.length, generator=torch.Generator().manual_seed(5))
    left = low_rank.left(gradients, low_rank.initial_basis(gradients))
    orthonormal = low_rank.orthonormal(left)
    assert torch.equal(low_rank.orthonormal(left.to(GPU)).cpu(), orthonormal)
    right = low_rank.right(gradients, orthonormal)
    product = low_rank.product(orthonormal, right)
    assert torch.equal(low_rank.product(orthonormal.to(GPU), right.to(GPU)).cpu(), product)


def test_keyed_dropout_of_a_layer_in_training() -> None:
    def train(device: torch.device) -> Any:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True, dtype=torch.float64).to(device)
        hidden = torch.linspace(-1, 1, 4 * 5 * 16, dtype=torch.float64).view(4, 5, 16).to(device)
        with KeyedRandom(11):
            layer(hidden).square().sum().backward()
        return [parameter.grad.cpu() for parameter in layer.parameters()]

    for one, other in zip(train(CPU), train(GPU), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_a_lone_servers_mean_stays_on_the_gpu_until_a_joiner_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def noted(tree: Any) -> Any:
        made.append(tree)
        return to_message(tree)

    monkeypatch.setattr(all_reduce, "to_message", noted)
    loop, me = VirtualLoop(), PeerId("me")
    store = TicketStore(MemoryNetwork().transport(me), max_bytes=1 << 20)
    group = all_reduce.Group(roster=[me], prefix="round", tickets=store, timeout=5.0)
    found = loop.run_until_complete(all_reduce.average(torch.full((5,), 6.0, device=GPU), 2.0, group, 0))
    assert torch.equal(found.mean.cpu(), torch.full((5,), 3.0))
    assert not made
    ticket = Ticket(peer_id=me, name="round/reduced0", key=None)
    (sent,) = loop.run_until_complete(store.fetch(ticket, timeout=5.0)).tensors
    assert len(made) == 1
    assert sent.device.type == "cpu"
    assert torch.equal(sent, found.mean.cpu())
    loop.close()


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.randn(()), torch.randn(4, 6).t(), torch.arange(9) > 3])
def test_what_is_sent_comes_from_the_gpu_as_it_is(tensor: Tensor) -> None:
    (sent,) = to_message(tensor.to(GPU)).tensors
    assert sent.device.type == "cpu"
    assert sent.is_pinned() or not sent.numel()
    assert torch.equal(sent, tensor)
