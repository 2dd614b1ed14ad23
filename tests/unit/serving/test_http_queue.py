"""The queue of the HTTP endpoint: who gets places, in which order, and who is refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.serving import http_streams
from lightning_swarm.serving.http_access import Access
from lightning_swarm.serving.http_fields import MAX_TEXTS, RequestError
from lightning_swarm.serving.http_queue import QueuedRequest, QueueLimits, TextQueue
from lightning_swarm.serving.http_server import TextEndpoint
from lightning_swarm.serving.texts import ServedText
from tests.unit.serving.endpoint import JSON, SMALL, Client, Writer, run, until

STREAM = json.dumps({"model": "m", "prompt": "a", "max_tokens": 4, "stream": True}).encode()
SHORT, LONG = 4, 4000  # new tokens


def admitted(tickets: Sequence[QueuedRequest]) -> list[int]:
    return [index for index, one in enumerate(tickets) if one.admitted.done() and not one.admitted.exception()]


def test_clients_take_turns() -> None:
    async def use() -> None:
        queue = TextQueue(QueueLimits(texts=1))
        tickets = [queue.enter(client, 1, SHORT) for client in "aaaabb"]
        order = []
        for _ in tickets:
            (new,) = {*admitted(tickets)} - {*order}
            order.append(new)
            tickets[new].release()
        assert order == [0, 1, 4, 2, 5, 3]

    run(use())


def test_a_request_for_many_places_is_not_overtaken() -> None:
    async def use() -> None:
        queue = TextQueue(QueueLimits(texts=8))
        first = [queue.enter("a", 1, SHORT) for _ in range(5)]
        many = queue.enter("b", 6, SHORT)
        later = queue.enter("c", 1, SHORT)
        for one in first[:2]:
            one.release()
            assert not many.admitted.done()
            assert not later.admitted.done()
        first[2].release()
        assert many.admitted.done()
        assert not later.admitted.done()
        first[3].release()
        assert later.admitted.done()

    run(use())


def test_short_texts_pass_by_long_ones() -> None:
    async def use() -> None:
        queue = TextQueue(QueueLimits(texts=8))
        tickets = [queue.enter(client, 1, LONG) for client in "aaabbbcc"]
        assert len(admitted(tickets)) == 6  # three quarters
        short = [queue.enter(client, 1, SHORT) for client in "cdd"]
        assert admitted(short) == [0, 1]
        tickets[0].release()
        assert (admitted(tickets)[-1], admitted(short)) == (6, [0, 1])

    run(use())


def test_a_full_queue_refuses_the_client_that_fills_it() -> None:
    async def use() -> None:
        queue = TextQueue(QueueLimits(texts=1, waiting=4))
        tickets = [queue.enter("a", 1, SHORT) for _ in range(5)]
        with pytest.raises(RequestError, match="4 requests are waiting already"):
            queue.enter("a", 1, SHORT)
        tickets += [queue.enter(client, 1, SHORT) for client in "bc"]
        refused = [index for index, one in enumerate(tickets) if one.admitted.done() and one.admitted.exception()]
        assert refused == [3, 4]  # the newest of the client with most
        with pytest.raises(RequestError, match="Try again later"):
            await tickets[4].until_admitted()
        with pytest.raises(RequestError):
            queue.enter("b", 1, SHORT)  # it would only change places with another client
        assert not tickets[-1].admitted.done()

    run(use())


def test_a_request_whose_time_ends_as_it_is_admitted_stays_admitted() -> None:
    async def use() -> None:
        loop, queue = asyncio.get_running_loop(), TextQueue(QueueLimits(texts=1, waiting=1))
        failed = list[Any]()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        first = queue.enter("a", 1, SHORT)
        loop.call_later(60.0, first.release)
        second = queue.enter("a", 1, SHORT)
        await asyncio.sleep(60.0)
        await second.until_admitted()
        assert not failed

    run(use(), VirtualLoop())


@pytest.mark.parametrize(("number", "tokens", "most"), [(9, SHORT, 8), (7, LONG, 6)])
def test_more_texts_than_there_are_places_are_refused_at_once(number: int, tokens: int, most: int) -> None:
    async def use() -> None:
        queue = TextQueue(QueueLimits(texts=8))
        with pytest.raises(
            RequestError, match=f"a request must have at most {most} (long|short) texts, got {number}"
        ) as found:
            queue.enter("", number, tokens)
        assert found.value.status == 400
        assert queue.enter("", most, tokens).admitted.done()

    run(use())


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_and_each_request_has_its_turn(seed: int) -> None:
    rng = random.Random(seed)
    limits = QueueLimits(texts=rng.choice([1, 3, 8, 64]), waiting=rng.choice([0, 2, 10]))

    async def use() -> None:
        queue = TextQueue(limits)
        left: dict[QueuedRequest, int] = {}  # requests in the queue, or with places
        for _ in range(400):
            if rng.random() < 0.5:
                try:
                    ticket = queue.enter(rng.choice(["", "a", "b", "c"]), rng.randint(1, 4), rng.choice([SHORT, LONG]))
                except RequestError:
                    continue
                left[ticket] = ticket.num_texts
            elif left:
                ticket = rng.choice([*left])
                if not ticket.admitted.done() or left[ticket] == ticket.num_texts:
                    for _ in range(ticket.num_texts if ticket.admitted.done() else 0):
                        ticket.release()
                    ticket.leave(num_begun=ticket.num_texts)
                    del left[ticket]
            for one in [one for one in left if one.admitted.done() and one.admitted.exception()]:
                del left[one]
            check(queue, left)
        for _ in range(len(left)):  # those with places end, until none waits
            ticket = next(one for one in left if one.admitted.done())
            for _ in range(left.pop(ticket)):
                ticket.release()
        assert not left
        assert (queue._running, queue._num_long, queue._lines, queue._waiting) == (Counter(), 0, {}, Counter())

    def check(queue: TextQueue, left: dict[QueuedRequest, int]) -> None:
        written = [one for one in left if one.admitted.done()]
        assert sum(one.num_texts for one in written) == queue._running.total() <= limits.texts
        assert sum(one.num_texts for one in written if one.is_long) == queue._num_long <= limits.max_share
        assert len(left) - len(written) == queue._waiting.total() <= limits.waiting
        for client in "abc":
            assert queue._running[client] <= min(MAX_TEXTS, limits.max_share)

    run(use())


def endpoint(served: ServedText, **limits: Any) -> Any:
    return TextEndpoint([served], QueueLimits(**{"texts": 1, **limits})).app()


@pytest.mark.parametrize("body", [SMALL, STREAM], ids=["whole", "stream"])
def test_a_request_that_waits_too_long_is_refused(
    body: bytes, served: ServedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_streams, "_KEEP_ALIVE_S", 25.0)

    async def ask() -> None:
        app = endpoint(served)
        first = asyncio.ensure_future(Client(app).body(SMALL).run())
        await until(lambda: Writer.made)
        late = Client(app).body(body)
        begin_s = asyncio.get_running_loop().time()
        await late.run()
        assert asyncio.get_running_loop().time() - begin_s == 60.0  # virtual
        assert b"no place became free within 60 s" in late.content
        if body == STREAM:  # its status was sent with the first comment
            assert late.content.count(b": queued\n\n") == 2
            assert late.status == 200
        else:
            assert (late.status, late.headers[b"retry-after"]) == (429, b"10")
        assert len(Writer.made) == 1
        Writer.made[0].over.set()
        assert await first == 200

    run(ask(), VirtualLoop())


@pytest.mark.parametrize("body", [SMALL, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("has_begun", [False, True], ids=["before its first comment", "after it"])
def test_a_client_that_leaves_the_queue_makes_room_at_once(body: bytes, has_begun: bool, served: ServedText) -> None:
    async def ask() -> None:
        app = endpoint(served, waiting=1)
        first = asyncio.ensure_future(Client(app).body(SMALL).run())
        await until(lambda: Writer.made)
        leaves = Client(app).body(body)
        left = asyncio.ensure_future(leaves.run())
        await asyncio.sleep(15.0 if has_begun else 1.0)  # virtual
        full = Client(app).body(SMALL)
        assert await full.run() == 429
        assert full.headers[b"retry-after"] == b"10"
        leaves.leave()
        await left
        assert leaves.status == (200 if has_begun and body == STREAM else 499)
        waits = asyncio.ensure_future(Client(app).body(SMALL).run())
        await asyncio.sleep(1.0)
        assert not waits.done()
        Writer.made[0].over.set()
        await until(lambda: len(Writer.made) == 2)  # the second place is not that of the client that left
        Writer.made[1].over.set()
        assert (await first, await waits) == (200, 200)

    run(ask(), VirtualLoop())


def test_a_stream_that_waits_is_kept_alive(served: ServedText) -> None:
    async def ask() -> None:
        app = endpoint(served)
        first = asyncio.ensure_future(Client(app).body(SMALL).run())
        await until(lambda: Writer.made)
        waits = Client(app).body(STREAM)
        streamed = asyncio.ensure_future(waits.run())
        await asyncio.sleep(35.0)  # virtual
        assert waits.content == b": queued\n\n" * 3
        Writer.made[0].over.set()
        await first
        await asyncio.sleep(20.0)
        Writer.made[1].over.set()
        await streamed
        *comments, text, end, rest = waits.content.decode().split("\n\n")
        assert comments == [": queued"] * 3 + [": waiting"] * 2
        assert json.loads(text.removeprefix("data: "))["choices"][0]["text"] == "b"
        assert (end, rest) == ("data: [DONE]", "")

    run(ask(), VirtualLoop())


def test_texts_are_counted_where_they_are(served: ServedText) -> None:
    found = TextEndpoint([served], QueueLimits(texts=1))

    def count() -> list[str]:
        lines = [line for line in found._metrics.text().splitlines() if line.startswith("lightning_swarm:num_requests")]
        return [line.split()[-1] for line in lines]

    async def ask() -> None:
        app = found.app()
        assert count() == ["0.0", "0.0"]
        first = asyncio.ensure_future(Client(app).body(SMALL).run())
        await until(lambda: Writer.made)
        waits, leaves = Client(app).body(STREAM), Client(app).body(SMALL)
        asked = [asyncio.ensure_future(one.run()) for one in (waits, leaves)]
        await asyncio.sleep(1.0)  # virtual
        assert count() == ["1.0", "2.0"]
        leaves.leave()
        await asked[1]
        assert count() == ["1.0", "1.0"]
        Writer.made[0].over.set()
        await first
        await until(lambda: len(Writer.made) == 2)
        assert count() == ["1.0", "0.0"]
        waits.leave()
        await asked[0]
        assert count() == ["0.0", "0.0"]
        statuses = [line for line in found._metrics.text().splitlines() if "http_requests_total{" in line]
        made = 'lightning_swarm:http_requests_total{handler="/v1/completions",status='
        assert sorted(statuses) == [f'{made}"200"}} 1.0', f'{made}"499"}} 2.0']

    run(ask(), VirtualLoop())


def test_keys_are_clients_if_there_are_several(served: ServedText) -> None:
    """The first key has three of four places, from wherever its requests come; the last one is for the second key."""
    keys = ["a" * 16, "b" * 16]

    async def ask() -> None:
        app = TextEndpoint([served], QueueLimits(texts=4)).app(Access(keys))

        def client(key: str, address: str) -> Client:
            return Client(app, headers=(JSON, ("authorization", f"Bearer {key}")), address=address).body(SMALL)

        asked = [asyncio.ensure_future(client(keys[0], f"192.0.2.{number}").run()) for number in range(4)]
        await asyncio.sleep(1.0)
        assert len(Writer.made) == 3
        asked.append(asyncio.ensure_future(client(keys[1], "192.0.2.0").run()))
        await asyncio.sleep(1.0)
        assert len(Writer.made) == 4
        for number in range(5):
            await until(lambda number=number: len(Writer.made) > number)
            Writer.made[number].over.set()
        assert await asyncio.gather(*asked) == [200] * 5
        assert await client("c" * 16, "192.0.2.9").run() == 401

    run(ask(), VirtualLoop())
