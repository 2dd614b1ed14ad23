"""Messages with tensors, on every transport."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch
from torch import Tensor

from lightning_swarm.core.errors import (
    Busy,
    ConfigError,
    DeadlineExceeded,
    NotEnlisted,
    ProtocolError,
    SwarmError,
    Unreachable,
)
from lightning_swarm.network import MAX_CALL_BYTES, MAX_STREAM_BYTES, SMALL_BYTES, Message, PeerId, framing, rpc
from lightning_swarm.network.admission import ByteBudget
from lightning_swarm.network.framing import Buffer, Head
from lightning_swarm.network.tensors import DTYPES
from tests.contract.world import World, miss_deadline

SOON_S = 0.3
"""A deadline that is meant to pass."""
EVENTUALLY_S = 20.0
"""A deadline that is not meant to pass."""

BIG = 30 << 20


async def echo(caller: PeerId, message: Message) -> Message:
    return Message(caller.encode() + b" says " + message.body, message.tensors)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype is right.dtype and left.shape == right.shape and torch.equal(left, right)


@pytest.mark.parametrize("max_bytes", [SMALL_BYTES, MAX_STREAM_BYTES])
def test_all_kinds_of_tensors_come_back(world: World, method: str, max_bytes: int) -> None:
    world.b.transport.handle_stream(method, echo)
    base = torch.arange(24).reshape(4, 6)
    tensors = tuple(base[1:, ::2].to(dtype) for dtype in DTYPES.values())
    tensors += (base.t(), torch.tensor(3.5), torch.zeros(0), torch.zeros(2, 0, 3), torch.tensor(1j).conj())
    message = Message(b"\0body", tensors)
    stream = partial(world.a.transport.stream, timeout=EVENTUALLY_S, max_bytes=max_bytes)
    answer = world.run(stream(world.b.id, method, message))
    assert answer.body == world.a.id.encode() + b" says \0body"
    assert all(map(same, tensors, answer.tensors))
    assert len(answer.tensors) == len(tensors)


def test_thirty_megabytes_come_back_and_are_counted(world: World, method: str) -> None:
    world.b.transport.handle_stream(method, echo)
    big = torch.arange(BIG // 8)
    answer = world.run(world.a.transport.stream(world.b.id, method, Message(b"", (big,)), timeout=EVENTUALLY_S))
    assert torch.equal(big, answer.tensors[0])
    mine, theirs = world.a.transport.traffic, world.b.transport.traffic
    assert BIG < mine.sent_bytes[world.b.id, method] == theirs.received_bytes[world.a.id, method] < BIG + 1000
    assert BIG < mine.received_bytes[world.b.id, method] == theirs.sent_bytes[world.a.id, method] < BIG + 1000


def test_what_was_sent_is_not_shared(world: World, method: str) -> None:
    async def double(caller: PeerId, message: Message) -> Message:
        message.tensors[0].mul_(2)
        return message

    world.b.transport.handle_stream(method, double)
    tensor = torch.ones(3)
    answer = world.run(world.a.transport.stream(world.b.id, method, Message(b"", (tensor,)), timeout=EVENTUALLY_S))
    assert answer.tensors[0].tolist() == [2, 2, 2]
    assert tensor.tolist() == [1, 1, 1]


def test_a_message_without_tensors(world: World, method: str) -> None:
    world.b.transport.handle_stream(method, echo)
    answer = world.run(world.a.transport.stream(world.b.id, method, Message(b"hi"), timeout=EVENTUALLY_S))
    assert answer.body.endswith(b" says hi")
    assert answer.tensors == ()


def test_a_peer_may_stream_to_itself_for_free(world: World, method: str) -> None:
    world.a.transport.handle_stream(method, echo, max_bytes=400)
    message = Message(b"", (torch.ones(100),))
    answer = world.run(world.a.transport.stream(world.a.id, method, message, timeout=EVENTUALLY_S))
    assert answer.tensors[0] is message.tensors[0]
    assert (world.a.id, method) not in world.a.transport.traffic.sent_bytes
    with pytest.raises(ProtocolError, match="at most 400"):
        world.run(world.a.transport.stream(world.a.id, method, Message(b"", (torch.ones(101),)), timeout=EVENTUALLY_S))
    with pytest.raises(ProtocolError, match="at most 399"):
        world.run(world.a.transport.stream(world.a.id, method, message, timeout=EVENTUALLY_S, max_bytes=399))


def test_errors_travel_by_name_and_the_next_stream_works(world: World, method: str) -> None:
    async def moody(caller: PeerId, message: Message) -> Message:
        if message.body == b"busy":
            raise Busy("later")
        if message.body == b"bug":
            raise KeyError("bug")
        if message.body == b"sparse":
            return Message(b"", (torch.zeros(2, 2).to_sparse(),))
        if message.body == b"long":
            return Message(bytes(MAX_CALL_BYTES + 1))
        return message

    async def go() -> None:
        for peer in (world.a, world.b):
            peer.transport.handle_stream(method, moody)
            for body, kind in (
                (b"busy", Busy),
                (b"bug", SwarmError),
                (b"sparse", ProtocolError),
                (b"long", ProtocolError),
            ):
                with pytest.raises(kind) as caught:
                    await world.a.transport.stream(peer.id, method, Message(body), timeout=EVENTUALLY_S)
                assert type(caught.value) is kind
            answer = await world.a.transport.stream(peer.id, method, Message(b"good"), timeout=EVENTUALLY_S)
            assert answer.body == b"good"

    world.run(go())


def test_an_unknown_method_is_refused_without_reading_the_tensors(world: World, method: str) -> None:
    message = Message(b"", (torch.zeros(BIG // 4),))
    with pytest.raises(ProtocolError, match="no stream method"):
        world.run(world.a.transport.stream(world.b.id, method, message, timeout=EVENTUALLY_S))
    assert (world.a.id, method) not in world.b.transport.traffic.received_bytes, "strangers can fill the memory"


def test_a_method_is_registered_once(world: World, method: str) -> None:
    world.b.transport.handle_stream(method, echo)
    with pytest.raises(ConfigError, match="already"):
        world.b.transport.handle_stream(method, echo)


def test_calls_and_streams_are_different_methods(world: World, method: str) -> None:
    world.b.transport.handle_stream(method, echo)
    with pytest.raises(ProtocolError, match="no call method"):
        world.run(world.a.transport.call(world.b.id, method, b"", timeout=EVENTUALLY_S))


def test_a_request_that_is_too_large_never_reaches_the_handler(world: World, method: str) -> None:
    async def go() -> None:
        called: list[int] = []

        async def count(caller: PeerId, message: Message) -> Message:
            called.append(sum(tensor.numel() for tensor in message.tensors))
            return Message()

        world.b.transport.handle_stream(method, count, max_bytes=1000)
        for size in (1001, BIG):
            with pytest.raises(ProtocolError, match="at most 1000"):
                await world.a.transport.stream(
                    world.b.id, method, Message(b"", (torch.zeros(size, dtype=torch.uint8),)), timeout=EVENTUALLY_S
                )
        await world.a.transport.stream(
            world.b.id, method, Message(b"", (torch.zeros(1000, dtype=torch.uint8),)), timeout=EVENTUALLY_S
        )
        assert called == [1000]

    world.run(go())


@pytest.mark.parametrize(
    ("max_bytes", "num_bytes", "most"),
    [
        (SMALL_BYTES + 1, BIG, SMALL_BYTES + 1),
        (1000, BIG, SMALL_BYTES),  # it would hold up other calls, so it is not even sent
        (SMALL_BYTES, SMALL_BYTES + 1, SMALL_BYTES),
    ],
)
def test_an_answer_that_is_too_large_is_refused_unread(
    world: World, method: str, max_bytes: int, num_bytes: int, most: int
) -> None:
    async def large(caller: PeerId, message: Message) -> Message:
        return Message(b"", (torch.zeros(num_bytes, dtype=torch.uint8),))

    world.b.transport.handle_stream(method, large)
    with pytest.raises(ProtocolError, match=f"at most {most}"):
        world.run(world.a.transport.stream(world.b.id, method, Message(), timeout=EVENTUALLY_S, max_bytes=max_bytes))
    assert world.a.transport.traffic.received_bytes[world.b.id, method] < 1000


@pytest.mark.parametrize("num_bytes", [0, 1, SMALL_BYTES])
def test_what_is_small_goes_beside_the_calls(world: World, method: str, num_bytes: int) -> None:
    async def go() -> None:
        for bound in (SMALL_BYTES, SMALL_BYTES + 1):  # with the calls' stream, and over a separate stream
            answer = await world.a.transport.stream(world.b.id, method, sent, timeout=EVENTUALLY_S, max_bytes=bound)
            assert answer.body == world.a.id.encode() + b" says body"
            assert torch.equal(answer.tensors[0], sent.tensors[0])
            assert answer.tensors[1].shape == (0, 3)
            answer.tensors[0].fill_(7)
        assert not sent.tensors[0].any(), "it shares memory with what was sent"

    world.b.transport.handle_stream(method, echo)
    sent = Message(b"body", (torch.zeros(num_bytes, dtype=torch.uint8), torch.zeros(0, 3)))
    world.run(go())


@pytest.mark.parametrize("num_bytes", [1001, SMALL_BYTES])
def test_bounds_hold_for_what_goes_beside_calls_too(world: World, method: str, num_bytes: int) -> None:
    called = []

    async def take(caller: PeerId, message: Message) -> Message:
        called.append(message)
        return Message(b"", (torch.zeros(num_bytes, dtype=torch.uint8),))

    async def go() -> None:
        stream = partial(world.a.transport.stream, world.b.id, method, timeout=EVENTUALLY_S, max_bytes=1000)
        with pytest.raises(ProtocolError, match="at most 1000"):
            await stream(Message(b"", (torch.zeros(num_bytes, dtype=torch.uint8),)))
        assert not called
        with pytest.raises(ProtocolError, match="at most 1000"):
            await stream(Message())
        assert len(called) == 1
        assert await world.a.transport.ping(world.b.id) < EVENTUALLY_S  # the stream of the other calls continues

    world.b.transport.handle_stream(method, take, max_bytes=1000)
    world.run(go())


def test_who_is_not_admitted_is_told_before_anything_is_read(
    world: World, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def admit(caller: PeerId) -> None:
        if caller == world.a.id:
            raise NotEnlisted(f"{caller} does not train")

    def no_memory(n: int) -> Tensor:
        raise AssertionError(f"{n} bytes were read")

    world.b.transport.handle_stream(method, echo, admit=admit)
    big, friend = Message(b"", (torch.zeros(1 << 20),)), world.another(world.b)
    answer = world.run(friend.transport.stream(world.b.id, method, big, timeout=EVENTUALLY_S))
    assert len(answer.tensors) == 1
    monkeypatch.setattr(framing, "new_bytes", no_memory)
    for message in (big, Message()):
        with pytest.raises(NotEnlisted, match="does not train"):
            world.run(world.a.transport.stream(world.b.id, method, message, timeout=EVENTUALLY_S))


@pytest.mark.parametrize("is_admitted", [False, True])
def test_what_one_peer_may_have_under_way_is_bounded_and_others_are_not_held_up(
    world: World, method: str, is_admitted: bool
) -> None:
    victim, friend = world.another(world.a), world.another()
    world.run(friend.transport.connect(world.run(victim.transport.addresses())))
    budget = ByteBudget(1 << 30, 5 << 20)
    name = "_budget" if is_admitted else "_unadmitted_budget"
    assert isinstance(getattr(victim.transport, name), ByteBudget)
    setattr(victim.transport, name, budget)
    admit = (lambda caller: None) if is_admitted else None
    number, most, begun = 0, 0, asyncio.Event()

    async def take(caller: PeerId, message: Message) -> Message:
        nonlocal number, most
        number += 1
        most = max(most, number)
        begun.set()
        await asyncio.sleep(0.05)
        number -= 1
        return Message()

    victim.transport.handle_stream(method, take, admit=admit)
    victim.transport.handle_stream(f"{method} at once", echo, admit=admit)

    async def go() -> None:
        stream = partial(world.a.transport.stream, victim.id, method, timeout=EVENTUALLY_S)
        sending = [asyncio.create_task(stream(Message(b"", (torch.zeros(1 << 19),)))) for _ in range(6)]
        await begun.wait()
        message = Message(b"", (torch.zeros(1 << 19),))
        await friend.transport.stream(victim.id, f"{method} at once", message, timeout=EVENTUALLY_S)
        await asyncio.gather(*sending)

    world.run(go())
    assert most == 2
    assert not budget._by_peer


def test_tensors_that_cannot_travel_are_refused_at_once(world: World, method: str) -> None:
    world.b.transport.handle_stream(method, echo)
    message = Message(b"", (torch.zeros(3, device="meta"),))
    for peer in (world.a, world.b):
        with pytest.raises(ProtocolError, match="meta"):
            world.run(world.a.transport.stream(peer.id, method, message, timeout=EVENTUALLY_S))


def test_forty_streams_at_once(world: World, method: str) -> None:
    async def go() -> None:
        everybody_is_here = asyncio.Event()
        here: list[bytes] = []

        async def meet(caller: PeerId, message: Message) -> Message:
            here.append(message.body)
            if len(here) == 40:
                everybody_is_here.set()
            await everybody_is_here.wait()
            return message

        world.b.transport.handle_stream(method, meet)
        messages = [Message(b"%d" % i, (torch.full((50_000,), i),)) for i in range(40)]
        answers = await asyncio.gather(
            *(world.a.transport.stream(world.b.id, method, message, timeout=EVENTUALLY_S) for message in messages)
        )
        for message, answer in zip(messages, answers, strict=True):
            assert answer.body == message.body
            assert torch.equal(answer.tensors[0], message.tensors[0])

    world.run(go())


def test_more_streams_than_may_be_open_wait_for_their_turn(world: World, method: str) -> None:
    world.b.transport.handle_stream(method, echo)

    async def go() -> None:
        answers = await asyncio.gather(
            *(
                world.a.transport.stream(world.b.id, method, Message(b"%d" % i), timeout=EVENTUALLY_S)
                for i in range(200)
            )
        )
        assert [answer.body.split()[-1] for answer in answers] == [b"%d" % i for i in range(200)]

    world.run(go())


def test_a_cancelled_stream_cancels_its_handler(world: World, method: str) -> None:
    async def go() -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def sleepy(caller: PeerId, message: Message) -> Message:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return message

        world.b.transport.handle_stream(method, sleepy)
        async with asyncio.timeout(EVENTUALLY_S):
            exchange = asyncio.create_task(
                world.a.transport.stream(world.b.id, method, Message(b"", (torch.ones(9),)), timeout=EVENTUALLY_S)
            )
            await started.wait()
            exchange.cancel()
            with pytest.raises(asyncio.CancelledError):
                await exchange
            await cancelled.wait()

    world.run(go())


def test_an_answer_that_comes_too_late_disturbs_nobody(world: World, method: str) -> None:
    async def go() -> None:
        begun, given_up, answered = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def stubborn(caller: PeerId, message: Message) -> Message:
            if message.body == b"first":
                begun.set()
                while not given_up.is_set():
                    try:
                        await given_up.wait()
                    except asyncio.CancelledError:
                        continue
                answered.set()
            return message

        world.b.transport.handle_stream(method, stubborn)
        await miss_deadline(lambda s: world.a.transport.stream(world.b.id, method, Message(b"first"), timeout=s), begun)
        given_up.set()
        async with asyncio.timeout(EVENTUALLY_S):
            await answered.wait()
        second = await world.a.transport.stream(world.b.id, method, Message(b"second"), timeout=EVENTUALLY_S)
        assert second.body == b"second"

    world.run(go())


@pytest.mark.parametrize("size", [1, BIG], ids=["answering", "sending"])
def test_a_peer_that_dies_in_mid_stream(world: World, method: str, size: int) -> None:
    victim = world.another(world.a)
    victim.transport.handle_stream(method, echo)

    async def go() -> None:
        # The large request is stuck half-way, and no answer was sent, when the peer dies.
        world.freeze(victim)
        exchange = asyncio.create_task(
            world.a.transport.stream(
                victim.id, method, Message(b"", (torch.zeros(size, dtype=torch.uint8),)), timeout=EVENTUALLY_S
            )
        )
        done, _ = await asyncio.wait({exchange}, timeout=SOON_S)
        assert not done
        world.kill(victim)
        with pytest.raises(Unreachable):
            await exchange

    world.run(world.a.transport.stream(victim.id, method, Message(), timeout=EVENTUALLY_S))
    world.run(go())


def test_a_peer_that_dies_in_the_middle_of_its_answer(world: World, method: str) -> None:
    victim = world.another(world.a)

    async def go() -> None:
        answering = asyncio.Event()

        async def large(caller: PeerId, message: Message) -> Message:
            answering.set()
            return Message(b"", (torch.zeros(BIG, dtype=torch.uint8),) * 20)

        victim.transport.handle_stream(method, large)
        exchange = asyncio.create_task(world.a.transport.stream(victim.id, method, Message(), timeout=EVENTUALLY_S))
        await answering.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not exchange.done()
        world.kill(victim)
        with pytest.raises(Unreachable):
            await exchange

    world.run(go())


def test_a_frozen_peer_misses_the_deadline_and_may_return(world: World, method: str) -> None:
    victim = world.another(world.a)
    victim.transport.handle_stream(method, echo)
    message = Message(b"hi", (torch.ones(BIG // 4),))
    world.run(world.a.transport.stream(victim.id, method, Message(), timeout=EVENTUALLY_S))
    world.freeze(victim)
    with pytest.raises(DeadlineExceeded):
        world.run(world.a.transport.stream(victim.id, method, message, timeout=SOON_S))
    world.thaw(victim)
    answer = world.run(world.a.transport.stream(victim.id, method, message, timeout=EVENTUALLY_S))
    assert torch.equal(answer.tensors[0], message.tensors[0])


def test_closing_ends_what_is_under_way_on_both_sides(world: World, method: str) -> None:
    leaver = world.another(world.a)

    async def go() -> None:
        started = asyncio.Queue[None]()

        async def sleepy(caller: PeerId, message: Message) -> Message:
            started.put_nowait(None)
            await asyncio.Event().wait()
            return message

        for peer in (world.a, leaver):
            peer.transport.handle_stream(method, sleepy)
        exchanges = [
            asyncio.create_task(source.transport.stream(target.id, method, Message(), timeout=EVENTUALLY_S))
            for source, target in ((world.a, leaver), (leaver, world.a), (leaver, leaver))
        ]
        for _ in exchanges:
            await started.get()
        await leaver.transport.close()
        for one in exchanges:
            with pytest.raises(Unreachable):
                await one

    world.run(go())


def test_nobody_there(world: World, method: str) -> None:
    with pytest.raises(Unreachable):
        world.run(world.a.transport.stream(world.stranger, method, Message(), timeout=EVENTUALLY_S))


def test_a_peer_that_answers_twice_is_heard_once(world: World, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second answer must not be used for the next request, which fails or gets its own."""
    honest = rpc.answer_to
    num_doubled = 0

    async def twice(head: Head, respond: rpc.Responder, message: Message) -> list[Buffer]:
        nonlocal num_doubled
        answer = list(await honest(head, respond, message))
        if head.method != method:
            return answer
        num_doubled += 1
        return answer + answer

    monkeypatch.setattr(rpc, "answer_to", twice)
    world.b.transport.handle_stream(method, echo)
    asked = [b"%d" % number for number in range(6)]

    async def ask(body: bytes) -> bytes | SwarmError:
        try:
            return (await world.a.transport.stream(world.b.id, method, Message(body), timeout=EVENTUALLY_S)).body
        except SwarmError as error:
            return error

    answers = [world.run(ask(body)) for body in asked]
    heard = [answer == world.a.id.encode() + b" says " + body for answer, body in zip(answers, asked, strict=True)]
    refused = [isinstance(answer, ProtocolError | Unreachable) for answer in answers]
    assert all(one or other for one, other in zip(heard, refused, strict=True))
    assert heard[0]
    assert num_doubled >= sum(heard)
