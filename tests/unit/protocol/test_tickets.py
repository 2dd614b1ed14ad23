"""Tickets: requested before or after they are promised, fetched, failed, forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import (
    Busy,
    DeadlineExceeded,
    ProtocolError,
    StageError,
    SwarmError,
    TicketGone,
    Unreachable,
)
from lightning_swarm.network import SMALL_BYTES, Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol import tickets
from lightning_swarm.protocol.messages.calls import FetchRequest, Ticket, WaitReply, WaitRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import FETCH, WAIT
from lightning_swarm.protocol.tickets import TicketStore, with_key

T = TypeVar("T")

MESSAGE = Message(b"body", (torch.arange(3),))
HOLDER = PeerId("holder")


def anybody(_peer: PeerId, _key: bytes | None) -> bool:
    return True


def ticket(name: str) -> Ticket:
    return Ticket(peer_id=HOLDER, name=name, key=None)


class Pair:
    """A holder of tickets, and a peer that requests them."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.network = MemoryNetwork(latency_s=0.01)
        self.holder = TicketStore(self.network.transport(HOLDER), max_bytes=1 << 20)
        self.asker = TicketStore(self.network.transport("asker"), max_bytes=1 << 20)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work, and let it run until it waits."""
        task = self.loop.create_task(work)
        self.run(asyncio.sleep(1.0))
        return task

    def result(self, task: asyncio.Task[T]) -> T:
        return self.loop.run_until_complete(task)


@pytest.fixture
def pair(loop: VirtualLoop) -> Pair:
    return Pair(loop)


@pytest.fixture(params=["small", "large"], autouse=True)
def small_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send tensors with the announcement, or have them fetched separately."""
    if request.param == "large":
        monkeypatch.setattr(tickets, "SMALL_BYTES", 0)


@pytest.fixture(params=["holder", "asker"])
def consumer(pair: Pair, request: pytest.FixtureRequest) -> TicketStore:
    """The requester: another peer, or the holder itself."""
    store: TicketStore = getattr(pair, request.param)
    return store


def test_asking_before_the_promise_is_fine(pair: Pair, consumer: TicketStore) -> None:
    waiting = pair.start(consumer.wait(ticket("x"), timeout=100.0))
    fetching = pair.start(consumer.fetch(ticket("x"), timeout=100.0))
    assert pair.holder.promise("x", anybody) is True
    pair.run(asyncio.sleep(50.0))
    assert not waiting.done()
    pair.holder.fulfil("x", MESSAGE, b"report")

    assert pair.result(waiting) == b"report"
    fetched = pair.result(fetching)
    assert fetched.body == b"body"
    assert torch.equal(fetched.tensors[0], MESSAGE.tensors[0])


def test_a_result_can_be_asked_for_any_number_of_times(pair: Pair, consumer: TicketStore) -> None:
    pair.holder.offer("x", MESSAGE, anybody)
    for _ in range(3):
        assert pair.run(consumer.wait(ticket("x"), timeout=1.0)) == b""
        assert pair.run(consumer.fetch(ticket("x"), timeout=1.0)).body == b"body"


def test_a_promise_is_given_once(pair: Pair) -> None:
    assert pair.holder.promise("x", anybody) is True
    assert pair.holder.promise("x", anybody) is False
    pair.holder.fulfil("x", MESSAGE)
    assert pair.holder.promise("x", anybody) is False
    pair.holder.fulfil("x", Message(b"another"))
    assert pair.run(pair.asker.fetch(ticket("x"), timeout=1.0)).body == b"body"


@pytest.mark.parametrize("error", [StageError("a block"), Busy("full"), ProtocolError("no"), DeadlineExceeded("late")])
def test_a_failure_reaches_who_waits_by_its_name(pair: Pair, consumer: TicketStore, error: SwarmError) -> None:
    waiting = pair.start(consumer.wait(ticket("x"), timeout=100.0))
    pair.holder.promise("x", anybody)
    pair.holder.fail("x", error)

    with pytest.raises(type(error), match=str(error)):
        pair.result(waiting)
    with pytest.raises(type(error), match=str(error)):
        pair.run(consumer.fetch(ticket("x"), timeout=1.0))


def test_a_failure_is_not_for_good(pair: Pair, consumer: TicketStore) -> None:
    pair.holder.promise("x", anybody)
    pair.holder.fail("x", StageError("once"))
    assert pair.holder.promise("x", anybody) is True
    pair.holder.fail("y", StageError("nobody promised y"))
    pair.holder.fulfil("x", MESSAGE)
    pair.holder.fail("x", StageError("too late"))
    assert pair.run(consumer.fetch(ticket("x"), timeout=1.0)).body == b"body"


def test_what_is_fetched_once_is_forgotten_but_not_its_report(pair: Pair, consumer: TicketStore) -> None:
    pair.holder.promise("x", anybody)
    pair.holder.fulfil("x", MESSAGE, b"report", once=True)
    assert pair.run(consumer.fetch(ticket("x"), timeout=1.0)).body == b"body"

    with pytest.raises(TicketGone):
        pair.run(consumer.fetch(ticket("x"), timeout=1.0))
    assert pair.run(consumer.wait(ticket("x"), timeout=1.0)) == b"report"
    assert pair.holder.promise("x", anybody) is True, "it may be computed again"


def test_of_two_who_fetch_what_is_there_once_one_gets_it(pair: Pair, consumer: TicketStore) -> None:
    both = [pair.start(consumer.fetch(ticket("x"), timeout=100.0)) for _ in range(2)]
    pair.holder.promise("x", anybody)
    pair.holder.fulfil("x", MESSAGE, once=True)
    pair.run(asyncio.sleep(1.0))
    failed = [task.exception() for task in both if task.exception()]
    assert len(failed) == 1
    assert isinstance(failed[0], TicketGone)


def test_tensors_that_were_fetched_once_are_gone(pair: Pair, consumer: TicketStore) -> None:
    pair.holder.promise("x", anybody)
    pair.holder.fulfil("x", MESSAGE, once=True)
    assert pair.run(consumer.fetch(ticket("x"), timeout=1.0)).body == b"body"
    with pytest.raises(TicketGone, match="dropped to save memory"):
        pair.run(consumer.fetch(ticket("x"), timeout=1.0))


def test_dropped_names_are_forgotten_and_their_waiters_told(pair: Pair, consumer: TicketStore) -> None:
    pair.holder.offer("s1.x", MESSAGE, anybody)
    pair.holder.offer("s10.x", MESSAGE, anybody)
    pair.holder.promise("s1.y", anybody)
    waiting = pair.start(consumer.wait(ticket("s1.y"), timeout=100.0))

    pair.holder.drop("s1.")

    with pytest.raises(TicketGone, match="released"):
        pair.result(waiting)
    pair.holder.fulfil("s1.y", MESSAGE)  # its work ended too late
    for name in ("s1.x", "s1.y"):
        with pytest.raises(DeadlineExceeded):
            pair.run(consumer.fetch(ticket(name), timeout=1.0))
    assert pair.run(consumer.fetch(ticket("s10.x"), timeout=1.0)).body == b"body"


def test_who_waits_outlasts_a_withdrawn_promise(pair: Pair, consumer: TicketStore) -> None:
    pair.holder.promise("x", anybody)
    fetching = pair.start(consumer.fetch(ticket("x"), timeout=100.0))
    pair.holder.withdraw("x")
    pair.holder.withdraw("unknown")
    assert pair.holder.promise("x", anybody) is True
    pair.holder.fulfil("x", MESSAGE)
    assert pair.result(fetching).body == b"body"


@pytest.mark.parametrize("timeout", [0.5, 30.0, 300.0])
def test_every_wait_has_a_deadline(pair: Pair, consumer: TicketStore, timeout: float) -> None:
    with pytest.raises(DeadlineExceeded):
        pair.run(consumer.wait(ticket("x"), timeout=timeout))
    assert timeout <= pair.loop.time() <= timeout + 0.1
    assert not pair.holder._entries, "an unpromised name outlived those who asked for it"


def test_a_holder_that_is_gone_is_unreachable_at_once(pair: Pair) -> None:
    waiting = pair.start(pair.asker.wait(ticket("x"), timeout=300.0))
    pair.network.kill(PeerId("holder"))
    with pytest.raises(Unreachable):
        pair.result(waiting)
    assert pair.loop.time() < 2.0


def test_a_holder_that_is_silent_is_given_up(pair: Pair) -> None:
    pair.network.freeze(PeerId("holder"))
    with pytest.raises(Unreachable, match="no sign of life"):
        pair.run(pair.asker.wait(ticket("x"), timeout=300.0))
    assert pair.loop.time() < 15.0


def test_names_that_nobody_promised_are_bounded_for_each_peer_and_in_all(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "_MAX_UNPROMISED", 3)
    monkeypatch.setattr(tickets, "_MAX_UNPROMISED_IN_ALL", 5)
    pair.holder.offer("there", MESSAGE, anybody)
    others = [TicketStore(pair.network.transport(f"other-{i}"), max_bytes=1 << 20) for i in range(3)]
    early = [pair.start(pair.asker.wait(ticket(f"{i}"), timeout=100.0)) for i in range(3)]

    with pytest.raises(Busy, match=r"a peer may wait for 3 names that are not promised yet.*; asker waits for 3"):
        pair.run(pair.asker.wait(ticket("one more"), timeout=1.0))
    again = pair.start(pair.asker.wait(ticket("2"), timeout=100.0))
    pair.run(pair.asker.wait(ticket("there"), timeout=1.0))
    waiting = [pair.start(other.wait(ticket(f"of {i}"), timeout=100.0)) for i, other in enumerate(others[:2])]
    with pytest.raises(Busy, match="and all peers for 5"):
        pair.run(others[2].wait(ticket("one more"), timeout=1.0))

    pair.holder.offer("0", MESSAGE, anybody)
    pair.holder.drop("1")
    pair.result(early[0])
    with pytest.raises(TicketGone):
        pair.result(early[1])
    for store in (pair.asker, others[2]):
        with pytest.raises(DeadlineExceeded):
            pair.run(store.wait(ticket("one more"), timeout=1.0))
    for task in (early[2], again, *waiting):
        with pytest.raises(DeadlineExceeded):
            pair.result(task)
    assert (dict(pair.holder._unpromised), pair.holder._num_unpromised) == ({}, 0)


@pytest.mark.parametrize("shown", [None, bytes(16)])
@pytest.mark.parametrize("first", ["asks", "promises", "has it"])
def test_who_only_guesses_a_name_gets_nothing_and_takes_nothing_away(
    pair: Pair, first: str, shown: bytes | None
) -> None:
    key = b"told to a reader"
    guessed, known = Ticket(peer_id=HOLDER, name="x", key=shown), Ticket(peer_id=HOLDER, name="x", key=key)
    reader = TicketStore(pair.network.transport("reader"), max_bytes=1 << 20)
    waiting = [pair.start(store.fetch(guessed, timeout=100.0)) for store in [pair.asker] if first == "asks"]
    reading = pair.start(reader.fetch(known, timeout=100.0))
    pair.holder.promise("x", with_key(key))
    if first == "promises":
        waiting.append(pair.start(pair.asker.fetch(guessed, timeout=100.0)))
    pair.holder.fulfil("x", MESSAGE, b"report", once=True)
    if first == "has it":
        waiting.append(pair.start(pair.asker.fetch(guessed, timeout=100.0)))

    with pytest.raises(TicketGone, match="x is not for asker"):
        pair.result(waiting[0])
    fetch = Message(encode(FetchRequest(name="x", ticket_key=shown)))
    with pytest.raises(TicketGone, match="x is not for asker"):
        pair.run(pair.asker._transport.stream(HOLDER, FETCH.name, fetch, timeout=1.0))
    with pytest.raises(TicketGone, match="x is not for asker"):
        pair.run(pair.asker.wait(guessed, timeout=1.0))
    assert pair.result(reading).body == b"body"


def test_the_error_of_a_result_is_for_its_readers_too(pair: Pair) -> None:
    early = pair.start(pair.asker.wait(ticket("x"), timeout=100.0))
    pair.holder.promise("x", with_key(b"told to a reader"))
    pair.holder.fail("x", StageError("a line of the model"))
    with pytest.raises(TicketGone, match="x is not for asker"):
        pair.result(early)


@pytest.mark.parametrize("hold_s", [float("nan"), float("inf"), -1.0])
def test_an_absurd_time_to_hold_is_refused(pair: Pair, hold_s: float) -> None:
    body = encode(WaitRequest(name="x", hold_s=hold_s))
    with pytest.raises(ProtocolError):
        pair.run(pair.asker._transport.stream(PeerId("holder"), WAIT.name, Message(body), timeout=1.0))
    assert not pair.holder._entries


def test_a_ticket_larger_than_the_limit_is_refused(pair: Pair) -> None:
    pair.holder.offer("x", Message(tensors=(torch.zeros((1 << 20) + 1, dtype=torch.uint8),)), anybody)
    with pytest.raises(ProtocolError, match="at most"):
        pair.run(pair.asker.fetch(ticket("x"), timeout=1.0))


@pytest.mark.parametrize(("num_bytes", "num_fetched"), [(60_000, 0), (SMALL_BYTES - 4, 0), (SMALL_BYTES, 1)])
def test_what_is_small_comes_with_the_word_that_it_is_there(pair: Pair, num_bytes: int, num_fetched: int) -> None:
    bound = tickets.SMALL_BYTES
    pair.holder.offer("x", Message(b"body", (torch.zeros(num_bytes, dtype=torch.uint8),)), anybody)
    message = pair.run(pair.asker.fetch(ticket("x"), timeout=1.0))
    assert (message.body, message.tensors[0].numel()) == (b"body", num_bytes)
    sent = pair.asker._transport.traffic.sent_bytes
    asked = [method for (_, method) in sent]
    assert asked == [WAIT.name, FETCH.name][: 1 + (num_fetched if bound else 1)]


def test_who_does_not_ask_for_the_tensor_leaves_it_there(pair: Pair) -> None:
    pair.holder.promise("x", anybody)
    pair.holder.fulfil("x", MESSAGE, b"report", once=True)
    for _ in range(2):
        assert pair.run(pair.asker.wait(ticket("x"), timeout=1.0)) == b"report"
    assert pair.run(pair.asker.fetch(ticket("x"), timeout=1.0)).body == b"body"


@pytest.mark.parametrize("take_bytes", [0, 10, 1 << 40])
def test_no_more_comes_than_was_asked_for(pair: Pair, take_bytes: int) -> None:
    pair.holder.offer("x", MESSAGE, anybody)
    pair.holder.offer("large", Message(tensors=(torch.zeros(SMALL_BYTES + 1, dtype=torch.uint8),)), anybody)
    for name in ("x", "large"):
        request = Message(encode(WaitRequest(name=name, hold_s=1.0, take_bytes=take_bytes)))
        answer = pair.run(pair.asker._transport.stream(PeerId("holder"), WAIT.name, request, timeout=1.0))
        is_taken = name == "x" and take_bytes > 10 and tickets.SMALL_BYTES > 0
        assert decode(answer.body, WaitReply) == WaitReply(ready=True, taken=b"body" if is_taken else None)
        assert len(answer.tensors) == is_taken


def test_a_holder_that_does_not_hold_the_question_is_asked_no_oftener_for_it(loop: VirtualLoop) -> None:
    network = MemoryNetwork()  # without latency, so that no answer takes time
    holder = network.transport("holder")
    num_asked = 0

    async def answer_at_once(caller: PeerId, message: Message) -> Message:
        nonlocal num_asked
        num_asked += 1
        assert num_asked <= 10, "it is asked for ever"
        return Message(encode(WaitReply(ready=False)))

    holder.handle_stream(WAIT.name, answer_at_once)
    asker = TicketStore(network.transport("asker"), max_bytes=1 << 20)
    for ask in (asker.wait, asker.fetch):
        num_asked, begin_s = 0, loop.time()
        with pytest.raises(DeadlineExceeded, match="x did not appear at holder within 25 s"):
            loop.run_until_complete(ask(Ticket(peer_id=PeerId("holder"), name="x", key=None), timeout=25.0))
        assert loop.time() - begin_s == pytest.approx(25.0)
        assert num_asked == 3


def test_a_message_may_be_made_by_the_first_fetch(pair: Pair) -> None:
    made: list[Message] = []

    def make() -> Message:
        made.append(MESSAGE)
        return MESSAGE

    pair.holder.offer("later", make, anybody)
    pair.run(pair.asker.wait(ticket("later"), timeout=5.0))
    assert not made, "nobody wants it yet"
    for _ in range(2):
        found = pair.run(pair.asker.fetch(ticket("later"), timeout=5.0))
        assert torch.equal(found.tensors[0], MESSAGE.tensors[0])
    assert found.body == MESSAGE.body
    assert len(made) == 1
    own = Ticket(peer_id=HOLDER, name="own", key=None)
    pair.holder.offer("own", make, anybody)
    assert pair.run(pair.holder.fetch(own, timeout=5.0)) is MESSAGE
    made.pop()
    pair.holder.drop("later")
    pair.holder.offer("dropped", make, anybody)
    pair.holder.drop("dropped")
    assert len(made) == 1
