"""Prompts of other peers at a lead: malformed requests are refused, and none waits for ever."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import Busy, SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.peer.text_requests import MAX_WAITING, TextRequests
from lightning_swarm.protocol.messages.inference import RunText, RunTextRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import RUN_TEXT

REQUEST = RunTextRequest(prompt="abc", max_new_tokens=8, follows=False, seed=3, temperature=1.0)
LEAD = PeerId("lead")


def test_mutated_requests_are_refused_or_wait() -> None:
    loop, network, rng = VirtualLoop(), MemoryNetwork(), random.Random(0)
    requests = TextRequests(network.transport(LEAD), lambda callback: loop.call_soon(callback) and None)
    requests.is_open = True
    client, good = network.transport("stranger"), encode(REQUEST)

    async def ask() -> str:
        body = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        asking = asyncio.ensure_future(client.call(LEAD, RUN_TEXT.name, bytes(body), timeout=60.0))
        await asyncio.sleep(1.0)
        for waiting in requests.waiting(MAX_WAITING):
            request = waiting.request
            assert 1 <= len(request.prompt) <= 1 << 16
            assert 1 <= request.max_new_tokens <= 1 << 14
            requests.finish(waiting, RunText(text="d", num_tokens=1, steps=[1]))
        try:
            await asking
        except SwarmError as error:
            return type(error).__name__
        return "answered"

    async def ask_all() -> Counter[str]:
        return Counter([await ask() for _ in range(300)])

    found = loop.run_until_complete(ask_all())
    assert found.keys() == {"ProtocolError", "answered"}
    assert not requests.waiting(MAX_WAITING)
    loop.close()


def test_prompts_that_wait_at_the_end_are_refused() -> None:
    loop, network = VirtualLoop(), MemoryNetwork()
    requests = TextRequests(network.transport(LEAD), lambda callback: loop.call_soon(callback) and None)
    requests.is_open = True
    client = network.transport("stranger")

    async def ask() -> list[BaseException | RunText]:
        asked = [RUN_TEXT.ask(client, LEAD, REQUEST, timeout=60.0) for _ in range(MAX_WAITING + 1)]
        waiting = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert len(requests.waiting(2)) == 2
        requests.close()
        return await waiting

    found = loop.run_until_complete(ask())
    assert {type(one) for one in found} == {Busy}
    assert sum("wait here already" in str(one) for one in found) == 1
    assert not requests.waiting(1)
    loop.close()


def test_prompts_of_one_caller_leave_places_and_turns_to_others() -> None:
    """A full queue refuses the newest prompt of the caller with most, also if another caller comes last."""
    loop, network = VirtualLoop(), MemoryNetwork()
    requests = TextRequests(network.transport(LEAD), lambda callback: loop.call_soon(callback) and None)
    requests.is_open = True
    many, few = network.transport("many"), [network.transport(f"few {number}") for number in range(3)]

    async def ask() -> tuple[list[Any], list[Any]]:
        flood = [asyncio.ensure_future(RUN_TEXT.ask(many, LEAD, REQUEST, timeout=60.0)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(1.0)
        others = [asyncio.ensure_future(RUN_TEXT.ask(one, LEAD, REQUEST, timeout=60.0)) for one in few]
        await asyncio.sleep(1.0)
        assert len(requests.waiting(MAX_WAITING)) == MAX_WAITING
        assert [one.caller for one in requests.waiting(4)] == [one.peer_id for one in (many, *few)]
        while waiting := requests.waiting(1):
            requests.finish(waiting[0], RunText(text="d", num_tokens=1, steps=[1]))
        gathered = asyncio.gather
        return await gathered(*flood, return_exceptions=True), await gathered(*others, return_exceptions=True)

    flood, others = loop.run_until_complete(ask())
    assert [type(one) for one in flood] == [RunText] * (MAX_WAITING - 3) + [Busy] * 3
    assert [type(one) for one in others] == [RunText] * 3
    loop.close()
