"""A tuning server's memory: kept results are counted once, and fetched values are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.serving import tuning_server
from lightning_swarm.serving.tuning_server import FetchSlots, TuningHandlers

CLIENT, OTHER = PeerId("client"), PeerId("other")
CALL = "x" * 32


def result(num_bytes: int) -> Any:
    """Return a kept result of this size, without a graph."""
    message = Message(b"", (torch.zeros(num_bytes, dtype=torch.uint8),))
    return tuning_server._Kept("forward", None, message, since_s=now_s())


def test_a_result_that_replaces_another_is_counted_once() -> None:
    """Two requests for one call may end in any order, so one result may find the other's in its place."""

    async def keep() -> None:
        network = MemoryNetwork()
        nothing: Any = SimpleNamespace()
        handlers = TuningHandlers(
            network.transport(PeerId("server")), nothing, Limits(cache_bytes=1000), nothing, torch.device("cpu")
        )
        for _ in range(4):
            handlers._keep((CLIENT, CALL, 0), result(400))
        assert handlers.kept_bytes == 400
        handlers._keep((OTHER, CALL, 0), result(500))
        assert handlers.kept_bytes == 900
        assert len(handlers._kept) == 2
        handlers._drop((OTHER, CALL, 0))
        handlers._drop((CLIENT, CALL, 0))
        assert handlers.kept_bytes == 0
        if handlers._aging is not None:
            handlers._aging.cancel()

    asyncio.run(keep())


def test_fetched_values_are_few_for_each_client_and_in_all() -> None:
    holding: Counter[str] = Counter()
    most: Counter[str] = Counter()

    async def hold(slots: FetchSlots, client: PeerId) -> None:
        async with slots.held(client):
            holding.update([client, "all"])
            for name, number in holding.items():
                most[name] = max(most[name], number)
            for _ in range(3):
                await asyncio.sleep(0)
            holding.subtract([client, "all"])

    async def crowd() -> None:
        slots = FetchSlots()
        clients = [PeerId(f"client-{number}") for number in range(20)]
        await asyncio.gather(*(hold(slots, client) for client in clients for _ in range(10)))
        assert not slots._of_client, "idle clients are forgotten"
        assert not slots._num_calls

    asyncio.run(crowd())
    assert most.pop("all") == 8
    assert set(most.values()) == {2}
