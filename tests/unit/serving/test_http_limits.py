"""The HTTP endpoint under malicious clients: the real application on a virtual clock, without sockets."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.serving import http_limits, http_server
from lightning_swarm.serving.http_access import Access, names_of
from lightning_swarm.serving.http_limits import MAX_BODY_BYTES
from lightning_swarm.serving.http_server import TextEndpoint
from lightning_swarm.serving.texts import ServedText
from tests.unit.serving.endpoint import JSON, SMALL, Client, Writer, run, until


@pytest.mark.parametrize(
    ("headers", "host", "status"),
    [
        ((JSON,), "127.0.0.1:8000", 200),
        ((JSON,), "localhost", 200),
        ((JSON,), "[::1]:8000", 200),
        ((("content-type", "application/json; charset=utf-8"),), "127.0.0.1", 200),
        ((JSON,), "proxy.example", 200),
        ((JSON,), "evil.example", 400),
        ((JSON,), "127.0.0.1.evil.example", 400),
        ((("content-type", "text/plain"),), "127.0.0.1", 415),
        ((("content-type", "application/x-www-form-urlencoded"),), "127.0.0.1", 415),
        ((), "127.0.0.1", 415),
        ((JSON, ("content-length", str(MAX_BODY_BYTES + 1))), "127.0.0.1", 413),
    ],
)
def test_a_page_of_another_origin_is_refused(headers: Any, host: str, status: int, served: ServedText) -> None:
    async def ask() -> None:
        app = TextEndpoint([served]).app(Access(hosts=names_of("127.0.0.1", ["proxy.example"])))
        client = Client(app, headers=headers, host=host).body(SMALL)
        asked = asyncio.ensure_future(client.run())
        await until(lambda: Writer.made or asked.done())
        for writer in Writer.made:
            writer.over.set()
        assert await asked == status, client.content

    run(ask())


def test_an_endpoint_that_others_reach_is_addressed_by_any_name() -> None:
    assert names_of("0.0.0.0", []) == ["*"]
    local = ("::1", "localhost", "LOCALHOST", "127.0.1.1", "::ffff:127.0.0.1")
    assert [host for host in local if "*" in names_of(host, [])] == []


def test_a_body_in_tiny_parts_takes_no_more_memory_than_its_bytes(served: ServedText) -> None:
    async def attack() -> None:
        client = Client(TextEndpoint([served]).app())
        num_parts = 20_000
        for _ in range(num_parts):
            client.body(b" ", more=True)
        tracemalloc.start()
        try:
            asked = asyncio.ensure_future(client.run())
            await until(client.to_send.empty)  # the parts so far were received, and more will follow
            assert tracemalloc.get_traced_memory()[0] < 100 * num_parts
        finally:
            tracemalloc.stop()
        client.body(SMALL)
        await until(lambda: Writer.made)
        Writer.made[0].over.set()
        assert await asked == 200

    run(attack())


def test_a_client_that_leaves_amid_its_body_gives_its_room_back(served: ServedText) -> None:
    async def attack() -> None:
        app = TextEndpoint([served]).app()
        for _ in range(20):  # 80 MB in all, which exceeds the limit
            client = Client(app).body(b"a" * 4_000_000, more=True)
            client.to_send.put_nowait({"type": "http.disconnect"})
            assert await client.run() == 499  # and raises no error, which a server would log

    run(attack())


def test_bodies_that_never_end_leave_room_and_are_given_up(served: ServedText) -> None:
    async def attack() -> None:
        app = TextEndpoint([served]).app()
        first = [Client(app, address="192.0.2.1").body(b"a" * 4_000_000, more=True) for _ in range(30)]
        clients = [*first, *(Client(app).body(b"a" * 4_000_000, more=True) for _ in range(30))]
        asked = [asyncio.ensure_future(client.run()) for client in clients]
        await until(lambda: sum(client.status == 429 for client in clients) == 48)  # 12 requests are held: 48 MB
        assert sum(not client.status for client in first) == 6  # a single address leaves half to others
        held = [client for client in clients if not client.status]
        held[0].body(b"a" * 400_000)
        await until(lambda: held[0].status)
        assert held[0].status == 413
        small = Client(app).body(SMALL)
        answered = asyncio.ensure_future(small.run())
        await until(lambda: Writer.made)
        Writer.made[0].over.set()
        assert await answered == 200
        await asyncio.gather(*asked)  # virtual seconds
        assert [client.status for client in held[1:]] == [408] * 11
        assert b"within 10 s" in held[1].content
        last = Client(app).body(b"a" * 4_000_000)  # no JSON, but within the limit
        assert await last.run() == 400

    run(attack(), VirtualLoop())


def test_long_prompts_do_not_hold_up_short_ones(served: ServedText) -> None:
    async def attack() -> None:
        app = TextEndpoint([served]).app()
        long = json.dumps({"model": "m", "prompt": "a " * 1_000_000, "max_tokens": 4}).encode()
        waiting = [asyncio.ensure_future(Client(app).body(long).run()) for _ in range(40)]
        answered = asyncio.ensure_future(Client(app).body(SMALL).run())
        await until(lambda: Writer.made)  # the short prompt's; no long prompt is tokenized yet
        assert not served.tokenizer.may_go.is_set()
        Writer.made[0].over.set()
        assert await answered == 200
        served.tokenizer.may_go.set()
        await until(lambda: len(Writer.made) + sum(one.done() for one in waiting) == 41)
        for writer in Writer.made:
            writer.over.set()
        statuses = await asyncio.gather(*waiting)
        assert sorted({*statuses}) == [200, 429]

    run(attack())


def test_grammars_that_take_long_do_not_hold_up_other_requests(
    served: ServedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "_GRAMMAR_S", 0.3)
    may_go = served.tokenizer.may_go
    served.__dict__["grammars"] = SimpleNamespace(compile=lambda _: may_go.wait(60.0))
    slow = {"model": "m", "prompt": "a", "max_tokens": 4, "structured_outputs": {"choice": ["a"]}}

    async def attack() -> None:
        app = TextEndpoint([served]).app()
        waiting = [asyncio.ensure_future(Client(app).body(json.dumps(slow).encode()).run()) for _ in range(5)]
        answered = asyncio.ensure_future(Client(app).body(SMALL).run())
        await until(lambda: Writer.made)
        Writer.made[0].over.set()
        assert await answered == 200
        assert await asyncio.gather(*waiting) == [429] * 5
        assert not may_go.is_set()

    run(attack())


def test_one_client_leaves_places_for_others(served: ServedText) -> None:
    async def attack() -> None:
        app = TextEndpoint([served]).app()
        clients = [Client(app, address="192.0.2.1").body(SMALL) for _ in range(40)]
        asked = [asyncio.ensure_future(client.run()) for client in clients]
        await until(lambda: len(Writer.made) == 32)
        other = asyncio.ensure_future(Client(app, address="192.0.2.2").body(SMALL).run())
        await until(lambda: len(Writer.made) == 33)
        for writer in Writer.made:
            writer.over.set()
        assert await other == 200
        await until(lambda: len(Writer.made) == 41)  # the client's others had to wait
        for writer in Writer.made:
            writer.over.set()
        assert await asyncio.gather(*asked) == [200] * 40

    run(attack())


@pytest.mark.parametrize("stream", [False, True])
def test_long_texts_leave_places_for_short_ones(stream: bool, served: ServedText) -> None:
    async def attack() -> None:
        app = TextEndpoint([served]).app()
        long = json.dumps({"model": "m", "prompt": "a", "max_tokens": 30000, "stream": stream}).encode()
        clients = [Client(app).body(long) for _ in range(64)]
        asked = [asyncio.ensure_future(client.run()) for client in clients]
        await until(lambda: len(Writer.made) == 48)
        answered = asyncio.ensure_future(Client(app).body(SMALL).run())
        await until(lambda: len(Writer.made) == 49)
        Writer.made[48].over.set()
        assert await answered == 200
        for client in clients:  # all hang up, also those that wait
            client.leave()
        await asyncio.gather(*asked)
        assert all(writer.is_aborted for writer in Writer.made[:48])
        again = [asyncio.ensure_future(Client(app).body(long).run()) for _ in range(48)]
        await until(lambda: len(Writer.made) == 97)
        for one in again:
            one.cancel()

    run(attack())


def test_a_stream_whose_client_left_before_it_began_gives_its_place_back(served: ServedText) -> None:
    async def attack() -> None:
        app = TextEndpoint([served]).app()
        long = json.dumps({"model": "m", "prompt": "a", "max_tokens": 30000, "stream": True}).encode()
        for number in range(1, 100):  # more than the limit
            client = Client(app).body(long)
            client.leave()
            assert await client.run() == 499
            assert len(Writer.made) == number
            assert Writer.made[-1].is_aborted

    run(attack())


def test_a_request_that_fails_gives_its_places_back(served: ServedText, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third text of each request cannot begin."""

    class Failing(Writer):
        def __init__(self, *_: Any, choice: int, **options: Any) -> None:
            if choice == 2:
                raise RuntimeError("can't start new thread")
            super().__init__(**options)

    monkeypatch.setattr(http_server, "TextWriter", Failing)

    async def attack() -> None:
        app = TextEndpoint([served]).app()
        body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 4, "n": 3}).encode()
        for _ in range(100):  # more than the limit
            client = Client(app).body(body)
            with pytest.raises(RuntimeError, match="start new thread"):
                await client.run()
            assert client.status == 500

    run(attack())
    assert len(Writer.made) == 200
    assert all(writer.is_aborted for writer in Writer.made)
