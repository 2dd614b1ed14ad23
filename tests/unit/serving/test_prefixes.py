"""Prefixes at a model's server: whose sessions may begin with them, refused requests, and their memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from lightning_swarm.core.errors import Busy, ProtocolError, SwarmError
from lightning_swarm.model.inference import attention_cache
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import CacheLayer, CacheRecipe, SessionBranch, SessionBranched
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import SESSION_BRANCH
from tests.served import LIMITS, ServedSwarm, make_model

A, CLIENT, OTHER = map(PeerId, ("a", "client", "other"))
NEW = "7" * 32
PROMPT = torch.arange(3, 23)[None]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ServedSwarm]]:
    """Return a function that makes a server, at which a client has written a text."""
    made: list[ServedSwarm] = []

    def make_swarm(**options: Any) -> ServedSwarm:
        make_model("llama").save_pretrained(tmp_path)
        swarm = ServedSwarm(tmp_path, num_stages=2)
        made.append(swarm)
        swarm.serve("a", **options)
        remote = swarm.connect()
        remote.swarm.prefixes.texts.min_tokens = 4
        remote.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4, do_sample=False)
        swarm.sleep(1.0)
        return swarm

    yield make_swarm
    for swarm in made:
        swarm.close()


def state(swarm: ServedSwarm) -> Any:
    server = swarm.hosts["a"].server
    assert server is not None
    sessions = server.sessions
    return sessions.num_open, sessions.num_prefixes, sessions._used_bytes(), [*sessions._prefixes._kept]


def source_of(swarm: ServedSwarm) -> str:
    assert swarm.client is not None
    (source,) = swarm.client.prefixes.texts._texts
    return source


def request(swarm: ServedSwarm, **changes: Any) -> SessionBranch:
    fields = {
        "session": NEW,
        "client": CLIENT,
        "stage_index": 0,
        "route": [A, A],
        "adapters": [],
        "source": source_of(swarm),
        "numbers": [2],
        "digests": [],
    }
    return SessionBranch(**{**fields, **changes})


def ask(swarm: ServedSwarm, body: SessionBranch | bytes, *, by: PeerId = CLIENT) -> int:
    """Return the number of steps with which the server begins."""
    assert swarm.client is not None
    transport = swarm.client.routes.transport if by == CLIENT else swarm.network.transport(by)
    body = body if isinstance(body, bytes) else encode(body)
    try:
        answer = swarm.loop.run_until_complete(transport.call(A, SESSION_BRANCH.name, body, timeout=5.0))
    finally:
        if by != CLIENT:
            swarm.loop.run_until_complete(transport.close())
    return decode(answer, SessionBranched).number


def test_a_session_begins_with_any_steps_of_another_one(make: Callable[..., ServedSwarm]) -> None:
    swarm = make()
    num_open, num_prefixes, num_bytes, _ = state(swarm)
    assert (num_open, num_prefixes) == (0, 2), "one text at two stages"
    for number in (1, 4):
        assert ask(swarm, request(swarm, session=f"{number:032}", numbers=[number])) == number
    assert ask(swarm, request(swarm, numbers=[1, 3, 9])) == 3, "the longest that exists"
    assert state(swarm)[:2] == (6, 2)
    assert state(swarm)[2] == 4 * num_bytes, "branches count with all memory that they hold"


@pytest.mark.parametrize("shares", [False, True])
def test_nobody_begins_with_the_steps_of_another_client(make: Callable[..., ServedSwarm], shares: bool) -> None:
    """Neither by the id of a session, nor by digests of texts that it does not have."""
    swarm = make(shares_prefixes=shares)
    before = state(swarm)
    assert ask(swarm, request(swarm, client=OTHER), by=OTHER) == 0
    rng = random.Random(0)
    for _ in range(20):
        digests = [rng.randbytes(32) for _ in range(3)]
        changes = {"source": None, "numbers": [1, 2, 3], "digests": digests}
        assert ask(swarm, request(swarm, client=OTHER, **changes), by=OTHER) == 0
        assert ask(swarm, request(swarm, stage_index=1, route=[A], **changes), by=OTHER) == 0
    assert state(swarm) == before


REFUSED: list[tuple[dict[str, Any], PeerId, type[SwarmError], str]] = [
    ({}, OTHER, ProtocolError, "must come from their client"),
    ({"route": [OTHER, A]}, CLIENT, ProtocolError, "route must begin with the server"),
    ({"stage_index": 7}, CLIENT, Busy, "stage 7 is not served"),
    ({"adapters": [bytes(32), None]}, CLIENT, SwarmError, "adapter"),
]


@pytest.mark.parametrize(("changes", "by", "kind", "words"), REFUSED)
def test_refused_requests_change_nothing(
    make: Callable[..., ServedSwarm], changes: dict[str, Any], by: PeerId, kind: type[SwarmError], words: str
) -> None:
    swarm = make()
    before = state(swarm)
    with pytest.raises(kind, match=words):
        ask(swarm, request(swarm, **changes), by=by)
    assert state(swarm) == before


def test_a_session_that_has_begun_gets_no_prefix(make: Callable[..., ServedSwarm]) -> None:
    swarm = make()
    assert ask(swarm, request(swarm)) == 2
    before = state(swarm)
    with pytest.raises(ProtocolError, match="got a session that has begun"):
        ask(swarm, request(swarm, numbers=[3]))
    assert state(swarm) == before


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"numbers": [2, 2]}, "must increase"),
    ({"numbers": []}, "length >= 1"),
    ({"numbers": [*range(1, 66)]}, "length <= 64"),
    ({"digests": [bytes(32)]}, "named by its digest, or all prefixes by one source"),
    ({"source": None}, "named by its digest, or all prefixes by one source"),
    ({"source": "short"}, "length >= 32"),
    ({"route": []}, "length >= 1"),
    ({"adapters": [None]}, "2 servers must have as many adapters"),
    ({"generation": 1}, "generation"),
    ({"unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(("changes", "words"), MALFORMED)
def test_malformed_requests_change_nothing(
    make: Callable[..., ServedSwarm], changes: dict[str, Any], words: str
) -> None:
    swarm = make()
    before = state(swarm)
    fields = msgspec.msgpack.decode(encode(request(swarm)))
    with pytest.raises(ProtocolError, match=words):
        ask(swarm, msgspec.msgpack.encode({**fields, **changes}))
    assert state(swarm) == before


def test_mutated_requests_crash_nothing(make: Callable[..., ServedSwarm]) -> None:
    swarm = make()
    rng, good, refused = random.Random(0), encode(request(swarm)), list[str]()
    for _ in range(500):
        body = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            ask(swarm, bytes(body))
        except SwarmError as error:
            refused.append(str(error))
    assert len(refused) > 250
    assert not any("internal error" in one for one in refused)
    assert state(swarm)[1] == 2
    assert ask(swarm, request(swarm, session="8" * 32)) == 2


def test_branches_that_do_nothing_take_bounded_memory(make: Callable[..., ServedSwarm]) -> None:
    """A branch of one token holds the memory of the whole text, even after the text itself is dropped."""
    swarm = make()
    server = swarm.hosts["a"].server
    assert server is not None
    limit = 4 * state(swarm)[2]
    server.sessions._limits = replace(LIMITS, session_bytes=limit)
    for number in range(1, 12):
        found = ask(swarm, request(swarm, session=f"{number:032}", numbers=[1]))
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for one in (*server.sessions._sessions.values(), *server.sessions._prefixes._kept.values())
            for tensor in attention_cache.tensors(one.cache)
        }
        assert sum(held.values()) <= server.sessions._used_bytes() <= limit
    assert found == 0, "at last the text was dropped for its branches"
    assert server.sessions.num_prefixes < 2


def test_only_what_the_memory_still_has_can_be_cut() -> None:
    full, sliding, linear = (CacheLayer(kind=kind, window=4) for kind in ("full", "sliding", "linear"))
    states = torch.zeros(1, 1, 3, 2)
    for layers, length, can in [([full], 9, True), ([full, sliding], 3, True), ([full, sliding], 4, False)]:
        cache = attention_cache.build(CacheRecipe(layers=layers, records_past=False))
        for index in range(len(layers)):
            for _ in range(length):
                cache.update(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), index)
        assert attention_cache.can_be_cut(cache) == can
        if can:
            branch = attention_cache.branch_of(cache, remove=2)
            branch.update(states, states, 0)
            lengths = [attention_cache.length_of(one) for one in (branch, cache)]
            assert lengths == [length + 1, length], "the branch grows by itself"
    assert not attention_cache.can_be_cut(attention_cache.build(CacheRecipe(layers=[linear], records_past=False)))
