"""The butterfly: all peers get the same bytes in any order of arrival, and a complete result or none."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import PeerError, ProtocolError, TicketGone
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.compression import CODECS, Codec
from lightning_swarm.protocol.messages.calls import Ticket
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.averaging import all_reduce
from lightning_swarm.server.averaging.all_reduce import (
    AveragingFailed,
    AveragingResult,
    Group,
    PartEncoder,
    average,
    refuse,
    squared_norm,
)


async def compute(run: Callable[[], Any]) -> Any:
    return run()


class Jittery(MemoryNetwork):
    """Delays every message by a different time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    async def wait_latency(self, _sender: PeerId, _receiver: PeerId) -> None:
        await asyncio.sleep(self._rng.uniform(0.0, 2.0))


class Ring:
    """Peers that average vectors."""

    def __init__(self, loop: VirtualLoop, vectors: list[Tensor], network: MemoryNetwork | None = None) -> None:
        self.loop = loop
        self.vectors = vectors
        self.network = network or MemoryNetwork(latency_s=0.01)
        self.names = [PeerId(f"peer-{i}") for i in range(len(vectors))]
        self.transports = [self.network.transport(name) for name in self.names]
        self.tickets = [TicketStore(transport, max_bytes=1 << 30) for transport in self.transports]
        self.shares_with: Callable[[PeerId], bool] = frozenset[PeerId]().__contains__

    async def one(self, place: int, prefix: str = "round-0", timeout: float = 30.0) -> AveragingResult:
        group = self.group(place, prefix, timeout)
        try:
            return await average(self.vectors[place], 4.0, group, place)
        except BaseException as error:
            refuse(group, place, repr(error))
            raise

    def group(self, place: int, prefix: str = "round-0", timeout: float = 30.0) -> Group:
        return Group(self.names, prefix, self.tickets[place], timeout, self.shares_with)

    def average_by(self, codec: Codec, carried: list[Tensor]) -> list[AveragingResult]:
        """Average with a codec, and with each peer's error from an earlier round."""

        async def go() -> list[AveragingResult]:
            parts = PartEncoder(codec, compute)
            works = [
                average(vector, 4.0, self.group(place), place, encoder=parts, carried=carried[place])
                for place, vector in enumerate(self.vectors)
            ]
            return list(await asyncio.gather(*works))

        return self.loop.run_until_complete(go())

    def average(self) -> list[AveragingResult]:
        async def go() -> list[AveragingResult]:
            return list(await asyncio.gather(*map(self.one, range(len(self.names)))))

        return self.loop.run_until_complete(go())

    def failures(self, before: Callable[[], Any]) -> list[Any]:
        """Return the results of all peers but the first if an event happens just after they began."""

        async def go() -> list[Any]:
            works = [asyncio.create_task(self.one(place)) for place in range(1, len(self.names))]
            await asyncio.sleep(0.005)
            before()
            return list(await asyncio.gather(*works, return_exceptions=True))

        return self.loop.run_until_complete(go())


def vectors(num_peers: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_peers * 1000 + length)
    return [torch.randn(length, generator=generator, dtype=dtype) * 10**i for i in range(num_peers)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 1, 3, 4, 1001])
@pytest.mark.parametrize("num_peers", [1, 2, 3, 4, 5])
def test_all_get_the_same_bytes(loop: VirtualLoop, num_peers: int, length: int, dtype: torch.dtype) -> None:
    own = vectors(num_peers, length, dtype)
    copies = [vector.clone() for vector in own]

    results = Ring(loop, own).average()

    expected = torch.zeros(length, dtype=dtype)
    for vector in copies:
        expected += vector
    expected /= 4.0
    for mean, *_ in results:
        assert torch.equal(mean, expected), "added in another order than the roster's"
        assert mean.dtype == dtype
    assert all(torch.equal(vector, copy) for vector, copy in zip(own, copies, strict=True)), "only the sums are read"
    assert sum(result.squared_norm for result in results) == pytest.approx(
        float(expected.double().square().sum()), rel=1e-6
    )


def test_a_large_part_is_added_in_slices_that_let_others_be_heard(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Ring(loop, vectors(3, 1000)).average()
    turns = []

    async def count(_delay: float) -> None:
        turns.append(_delay)

    monkeypatch.setattr(all_reduce, "_SLICE", 100)
    monkeypatch.setattr(all_reduce.asyncio, "sleep", count)
    into, pieces = torch.empty(333), [vector[:333] for vector in vectors(3, 1000)]
    squared_norm = loop.run_until_complete(all_reduce._reduce(into, pieces, 4.0))
    assert turns == 4 * [0]
    assert torch.equal(into, whole[0][0][:333])
    assert squared_norm == pytest.approx(float(into.double().square().sum()), rel=1e-12)


def test_the_order_of_arrival_does_not_matter(loop: VirtualLoop) -> None:
    means = [Ring(loop, vectors(5, 103), Jittery(seed)).average()[0][0] for seed in range(8)]
    assert all(torch.equal(means[0], mean) for mean in means)


@pytest.mark.parametrize("num_peers", [2, 3, 4])
def test_each_peer_sends_as_little_as_there_is_to_send(loop: VirtualLoop, num_peers: int) -> None:
    ring = Ring(loop, vectors(num_peers, 60_000))
    ring.average()
    least = 2 * (num_peers - 1) / num_peers * ring.vectors[0].nbytes
    for transport in ring.transports:
        assert least <= sum(transport.traffic.sent_bytes.values()) <= 1.02 * least


def test_a_member_that_dies_makes_everyone_raise(loop: VirtualLoop) -> None:
    ring = Ring(loop, vectors(4, 100))
    failures = ring.failures(lambda: ring.network.kill(ring.names[0]))
    assert [failure.missed for failure in failures] == 3 * [ring.names[0]]


def test_a_member_that_is_silent_makes_everyone_raise(loop: VirtualLoop) -> None:
    ring = Ring(loop, vectors(3, 100))
    failures = ring.failures(lambda: ring.network.freeze(ring.names[0]))
    assert [failure.missed for failure in failures] == 2 * [ring.names[0]], "who waits for it itself is not to blame"
    assert loop.time() < 100.0


def test_a_member_that_gives_up_makes_everyone_raise_and_is_not_to_blame(loop: VirtualLoop) -> None:
    """The round of its other stage failed."""
    ring = Ring(loop, vectors(2, 100))

    async def go() -> Any:
        work = asyncio.create_task(ring.one(0))
        await asyncio.sleep(1.0)
        work.cancel()
        return (await asyncio.gather(ring.one(1), return_exceptions=True))[0]

    failure = loop.run_until_complete(go())
    assert isinstance(failure, AveragingFailed)
    assert failure.missed is None
    assert loop.time() < 2.0


@pytest.mark.parametrize(
    "part",
    [torch.zeros(49), torch.zeros(33).double(), torch.zeros(33, 1)],
    ids=["length", "dtype", "shape"],
)
def test_a_part_of_another_shape_or_dtype_is_refused(loop: VirtualLoop, part: Tensor) -> None:
    ring = Ring(loop, vectors(3, 100))
    for i in (1, 2):
        ring.tickets[0].offer(f"round-0/part{i}", Message(tensors=(part,)), lambda *_: True)
    failures = ring.failures(lambda: None)
    assert [failure.missed for failure in failures] == 2 * [ring.names[0]]


def test_a_part_is_for_its_reducer_and_the_mean_for_the_run(loop: VirtualLoop) -> None:
    ring, names = Ring(loop, vectors(3, 90)), ("part1", "part2", "reduced0")
    joiner, stranger = (TicketStore(ring.network.transport(name), max_bytes=1 << 20) for name in ("joiner", "stranger"))
    ring.shares_with = frozenset({PeerId("joiner")}).__contains__
    ring.average()

    async def reads(store: TicketStore, name: str) -> bool:
        try:
            await store.fetch(Ticket(peer_id=ring.names[0], name=f"round-0/{name}", key=None), timeout=1.0)
        except TicketGone:
            return False
        return True

    async def table() -> list[list[bool]]:
        return [[await reads(store, name) for name in names] for store in (*ring.tickets[1:], joiner, stranger)]

    assert loop.run_until_complete(table()) == [
        [True, False, True],
        [False, True, True],
        [False, False, True],
        [False, False, False],
    ]


def test_a_repeated_round_gives_the_same_bytes(loop: VirtualLoop) -> None:
    ring = Ring(loop, vectors(3, 50))
    first = ring.average()
    again = ring.average()
    assert all(torch.equal(one.mean, other.mean) for one, other in zip(first, again, strict=True))


def test_rounds_do_not_mix(loop: VirtualLoop) -> None:
    ring = Ring(loop, vectors(3, 50))

    async def go() -> list[AveragingResult]:
        works = [ring.one(place, prefix) for prefix in ("r0", "r1") for place in range(3)]
        return list(await asyncio.gather(*works))

    results = loop.run_until_complete(go())
    assert all(torch.equal(results[0].mean, result.mean) for result in results)
    with pytest.raises(PeerError):
        loop.run_until_complete(ring.one(0, "a round of nobody else", timeout=1.0))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("num_peers", [1, 2, 3, 5])
def test_what_a_codec_loses_is_found_to_the_last_bit(loop: VirtualLoop, name: str, num_peers: int) -> None:
    """Common mean and carried errors together equal the inputs and the previously carried errors."""
    codec = CODECS[name]()
    own = [normal(8192, seed) for seed in range(num_peers)]
    carried = [normal(8192, 100 + seed) / 50 for seed in range(num_peers)]
    results = Ring(loop, own).average_by(codec, carried)
    assert all(torch.equal(results[0].mean, result.mean) for result in results)
    exact = sum(own, torch.zeros(8192, dtype=torch.float64)) / 4.0 + sum(carried)
    assert not torch.allclose(results[0].mean, exact, rtol=1e-6)
    after = results[0].mean + sum(result.carried.lost for result in results if result.carried.lost is not None)
    torch.testing.assert_close(after, exact, rtol=1e-12, atol=1e-12)
    squared_norm = sum(result.squared_norm for result in results)
    assert squared_norm == pytest.approx(float(results[0].mean.square().sum()), rel=1e-12)


def test_numbers_that_no_codec_takes_are_seen_by_all(loop: VirtualLoop) -> None:
    """The step is then skipped, as without a codec."""
    own = [normal(8192, seed) for seed in range(3)]
    own[1][2000] = math.nan
    results = Ring(loop, own).average_by(CODECS["8bit"](), [torch.zeros(8192, dtype=torch.float64)] * 3)
    assert all(bool(result.mean[2000].isnan()) for result in results)
    assert math.isnan(sum(result.squared_norm for result in results))


def test_what_travelled_as_it_is_comes_to_the_device_where_it_is_wanted(loop: VirtualLoop) -> None:
    """Parts too small for a codec travel unencoded."""
    length = 10
    parts = PartEncoder(CODECS["4bit"](), compute)
    wanted = torch.empty(0, device="meta")

    async def go() -> Tensor:
        message = await parts.to_message(normal(length, 0).float())
        return await parts.from_message(message, like=wanted, length=length)

    assert loop.run_until_complete(go()).device == wanted.device


@pytest.mark.parametrize("like", [torch.empty(0), torch.empty(0, dtype=torch.float64)], ids=["length", "dtype"])
def test_what_is_no_such_part_is_not_decoded(loop: VirtualLoop, like: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding it could take many times the memory of the message."""
    codec = CODECS["4bit"]()
    parts = PartEncoder(codec, compute)

    def decode(*_: object) -> Tensor:
        raise AssertionError("decoded")

    async def go() -> Tensor:
        message = await parts.to_message(normal(1 << 16, 0).float())
        monkeypatch.setattr(type(codec), "decode", decode)
        length = 10 if like.dtype == torch.float32 else 1 << 16
        return await parts.from_message(message, like=like, length=length)

    with pytest.raises(ProtocolError, match="a part must have the shape"):
        loop.run_until_complete(go())


def normal(length: int, seed: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_squared_norm_is_one_of_blocks() -> None:
    vector = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    expected = math.fsum(number * number for number in vector.tolist())
    threads = torch.get_num_threads()
    try:
        found = set()
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.add(squared_norm(vector))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
    assert found.pop() == pytest.approx(expected, rel=1e-14)
    assert squared_norm(torch.empty(0)) == 0.0
    assert math.isnan(squared_norm(torch.tensor([1.0, math.nan])))
    assert squared_norm(torch.tensor([1.0, math.inf])) == math.inf


def test_a_squared_norm_that_no_float_holds_is_infinite() -> None:
    vector = torch.zeros(1 << 15, dtype=torch.float64)  # two blocks
    vector[0] = vector[-1] = math.sqrt(1.5e308)
    assert squared_norm(vector) == math.inf
