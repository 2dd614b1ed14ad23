"""Rights to call and to be called between peers with certificates, on every transport."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from lightning_swarm.core.errors import AccessDenied, ProtocolError, SwarmError, Uncertified, Unreachable, Untrusted
from lightning_swarm.network import MAX_CALL_BYTES, MAX_STREAM_BYTES, Message, PeerId
from lightning_swarm.network.access import CERTIFY, OPEN_METHODS, PING, Role
from lightning_swarm.network.admission import StreamSlot
from lightning_swarm.network.gatekeeper import STRANGER_BYTES
from lightning_swarm.protocol.rpc import FOLLOW, FORWARD, HELLO, RPCS
from tests.access import INVITATION, FakeCredentials, Gullible, ban_of, certificate_of, credentials_of
from tests.contract.world import HivemindWorld, Peer, World

EVENTUALLY_S = 20.0
SEEN, SERVED, TRAINED = METHODS = HELLO.name, FOLLOW.name, FORWARD.name
LEAST = {rpc.name: rpc.by for rpc in RPCS}


class Handled:
    """The requests that entered a peer's handlers for methods that only this test has."""

    def __init__(self, peer: Peer) -> None:
        self.calls: list[tuple[PeerId, str]] = []
        self.may_answer = asyncio.Event()  # cleared: the handlers wait
        self.may_answer.set()
        self.has_come = asyncio.Event()
        self.cancelled: list[PeerId] = []
        transport: Any = peer.transport
        self._tables = transport._call_handlers, transport._stream_handlers
        for method in METHODS:
            peer.transport.handle_call(method, partial(self._enter, method))
            peer.transport.handle_stream(method, partial(self._enter, method))

    async def _enter(self, method: str, caller: PeerId, request: Any) -> Any:
        self.calls.append((caller, method))
        self.has_come.set()
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled.append(caller)
            raise
        return request

    async def holds(self, number: int) -> None:
        """Wait until a total number of requests has arrived."""
        while len(self.calls) < number:
            self.has_come.clear()
            await self.has_come.wait()

    def remove(self) -> None:
        for table in self._tables:
            for method in METHODS:
                del table[method]


@pytest.fixture
def handled(world: World) -> Iterator[Handled]:
    """The requests at `b`."""
    found = Handled(world.b)
    yield found
    found.remove()
    for peer in (world.a, world.b):
        peer.transport.set_credentials(None)  # type: ignore[attr-defined]


def trust(peer: Peer, credentials: FakeCredentials | None) -> FakeCredentials | None:
    peer.transport.set_credentials(credentials, RPCS)  # type: ignore[attr-defined]
    return credentials


def introduced(world: World, role: Role = Role.KEEPER) -> tuple[FakeCredentials, FakeCredentials]:
    """Return the credentials of both peers."""
    own = credentials_of(world.a.id, role), credentials_of(world.b.id)
    for peer, credentials in zip((world.a, world.b), own, strict=True):
        trust(peer, credentials)
    return own


def call(world: World, method: str = TRAINED, body: bytes = b"hi") -> bytes:
    return world.run(world.a.transport.call(world.b.id, method, body, timeout=EVENTUALLY_S))


def stream(world: World, message: Message, *, max_bytes: int = MAX_STREAM_BYTES) -> Message:
    sending = world.a.transport.stream(world.b.id, TRAINED, message, timeout=EVENTUALLY_S, max_bytes=max_bytes)
    return world.run(sending)


def big() -> Message:
    return Message(b"x", (torch.arange(100_000),))


EXCHANGES: dict[str, Callable[[World], object]] = {
    "call": call,
    "long call": partial(call, body=bytes(MAX_CALL_BYTES)),
    "small stream": lambda world: stream(world, Message(b"x"), max_bytes=0),
    "stream": lambda world: stream(world, big()),
    "stream with a long body": lambda world: stream(world, Message(bytes(MAX_CALL_BYTES))),
}
each_exchange = pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES)


def certifications(world: World) -> int:
    """Return the bytes of the certificates that `a` presented."""
    return world.a.transport.traffic.sent_bytes[world.b.id, CERTIFY]


def test_members_show_their_certificates_once(world: World, handled: Handled) -> None:
    own = introduced(world)
    before = certifications(world)
    assert call(world) == b"hi"
    once = certifications(world) - before
    assert once > 0
    assert torch.equal(stream(world, big()).tensors[0], big().tensors[0])

    async def many() -> None:
        calls = (world.a.transport.call(world.b.id, SEEN, b"", timeout=EVENTUALLY_S) for _ in range(50))
        await asyncio.gather(*calls)

    world.run(many())
    assert world.run(world.b.transport.call(world.a.id, "transport.ping", b"", timeout=EVENTUALLY_S)) == b""
    assert certifications(world) == before + once
    assert [one.num_verified for one in own] == [1, 1]
    assert len(handled.calls) == 52
    permit = world.b.transport.permit_of(world.a.id)
    assert permit is not None
    assert permit.role is Role.KEEPER
    assert world.run(world.b.transport.certify(world.a.id)) == permit


def test_concurrent_calls_wait_for_one_certification(world: World, handled: Handled) -> None:
    own = introduced(world)
    before = certifications(world)

    async def many() -> None:
        calls = (world.a.transport.call(world.b.id, SEEN, b"", timeout=EVENTUALLY_S) for _ in range(50))
        await asyncio.gather(*calls)

    world.run(many())
    assert len(handled.calls) == 50
    assert [one.num_verified for one in own] == [1, 1]
    assert 0 < certifications(world) - before < 2 * len(own[0].certificate)


@each_exchange
def test_a_stranger_is_refused_unread(world: World, handled: Handled, exchange: Callable[[World], object]) -> None:
    trust(world.b, credentials_of(world.b.id))
    before = dict(world.b.transport.traffic.received_bytes)
    with pytest.raises(Uncertified, match=r"only peers with a certificate of its run.*lightning-swarm join --invite"):
        exchange(world)
    assert handled.calls == []
    after = world.b.transport.traffic.received_bytes
    assert {peer for (peer, method), count in after.items() if count != before.get((peer, method), 0)} <= {""}
    assert world.run(world.a.transport.ping(world.b.id)) >= 0.0
    assert world.b.transport.permit_of(world.a.id) is None


@each_exchange
def test_a_peer_without_certificate_is_not_asked(
    world: World, handled: Handled, exchange: Callable[[World], object]
) -> None:
    trust(world.a, credentials_of(world.a.id))
    with pytest.raises(
        Untrusted, match=r"accepts any peer and has no certificate to show.*Start both with the same `trust`"
    ):
        exchange(world)
    assert handled.calls == []
    with pytest.raises(Uncertified):  # also in the other direction
        world.run(world.b.transport.call(world.a.id, TRAINED, b"", timeout=EVENTUALLY_S))


@each_exchange
def test_a_certificate_of_another_run_opens_nothing(
    world: World, handled: Handled, exchange: Callable[[World], object]
) -> None:
    introduced(world)
    trust(world.a, credentials_of(world.a.id, run=b"another run"))
    with pytest.raises(AccessDenied, match="refuses the certificate of this peer: it is not signed by the owner"):
        exchange(world)
    assert handled.calls == []


@each_exchange
def test_nothing_is_sent_to_a_forged_run(world: World, handled: Handled, exchange: Callable[[World], object]) -> None:
    """Its peers accept every certificate, and present one that the run's owner did not sign."""
    trust(world.a, credentials_of(world.a.id))
    trust(world.b, Gullible(certificate_of(world.b.id, run=b"forged")))
    before = dict(world.a.transport.traffic.sent_bytes)
    with pytest.raises(Untrusted, match=r"shows an invalid certificate.*not signed by the owner"):
        exchange(world)
    assert handled.calls == []
    sent = {key for key, count in world.a.transport.traffic.sent_bytes.items() if count != before.get(key, 0)}
    assert sent <= {(world.b.id, CERTIFY), (world.b.id, "transport.introduce")}


@each_exchange
def test_a_peer_that_forgot_is_shown_the_certificate_again(
    world: World, handled: Handled, exchange: Callable[[World], object]
) -> None:
    """For example, it was restarted. The request was refused unread, and enters the handler once."""
    introduced(world)
    call(world)
    handled.calls.clear()
    before = certifications(world)
    trust(world.b, credentials_of(world.b.id))
    exchange(world)
    assert certifications(world) > before
    assert handled.calls == [(world.a.id, TRAINED)]


def test_a_call_is_judged_by_the_gate_that_there_is_now(world: World, handled: Handled) -> None:
    """The calls' shared stream was opened under another gate, which knew no certificate."""
    trust(world.b, credentials_of(world.b.id))
    with pytest.raises(Uncertified):
        call(world)
    introduced(world)
    body = bytes(2 * STRANGER_BYTES)
    assert call(world, body=body) == body
    assert handled.calls == [(world.a.id, TRAINED)]


def test_a_peer_that_forgets_for_ever_is_asked_twice(world: World, handled: Handled) -> None:
    introduced(world)
    gate = world.b.transport._gate  # type: ignore[attr-defined]
    gate._find = lambda peer: None
    before = certifications(world)
    with pytest.raises(AccessDenied, match="forgets this peer's certificate at once") as caught:
        call(world)
    assert type(caught.value) is AccessDenied
    assert handled.calls == []
    assert certifications(world) > before


@pytest.mark.parametrize("role", Role)
def test_a_role_opens_what_it_may(world: World, handled: Handled, role: Role) -> None:
    introduced(world, role)
    for method in METHODS:
        least = LEAST[method]
        if role.includes(least):
            call(world, method)
        else:
            with pytest.raises(AccessDenied, match=f"the role {least} may call `{method}`.*--role {least}") as caught:
                call(world, method)
            assert type(caught.value) is AccessDenied
    assert handled.calls == [(world.a.id, one) for one in METHODS if role.includes(LEAST[one])]


def test_a_server_is_asked_by_no_member_for_what_only_a_trainer_answers(world: World, handled: Handled) -> None:
    introduced(world)
    trust(world.b, credentials_of(world.b.id, Role.SERVER))
    call(world, SERVED)
    with pytest.raises(Untrusted, match=r"the role trainer may be asked for `trainer.loop`"):
        call(world, "trainer.loop")
    trust(world.b, credentials_of(world.b.id, Role.OBSERVER))
    trust(world.a, credentials_of(world.a.id))
    assert call(world, SEEN) == b"hi"
    with pytest.raises(Untrusted, match=r"the role server may be asked for `stage.follow`"):
        call(world, SERVED)
    assert [method for _, method in handled.calls] == [SERVED, SEEN]


def test_a_certificate_ends_while_its_peer_calls(world: World, handled: Handled) -> None:
    soon_s = time.time() + 1000.0
    trust(world.a, FakeCredentials(certificate_of(world.a.id, expires_at_s=soon_s)))
    trust(world.b, credentials_of(world.b.id))
    call(world)
    world.b.transport._gate._wall_s = lambda: soon_s  # type: ignore[attr-defined]
    with pytest.raises(AccessDenied, match="it has expired"):
        call(world)
    assert len(handled.calls) == 1


# ------------------------------------------------------------------ what is under way when a peer is cut off


async def ask_small(caller: Peer, peer: Peer) -> object:
    return await caller.transport.call(peer.id, TRAINED, b"hi", timeout=EVENTUALLY_S)


async def ask_large(caller: Peer, peer: Peer) -> object:
    return await caller.transport.stream(peer.id, TRAINED, big(), timeout=EVENTUALLY_S)


each_ask = pytest.mark.parametrize("ask", [ask_small, ask_large])
Ask = Callable[[Peer, Peer], Coroutine[Any, Any, object]]


@each_ask
@pytest.mark.parametrize("subject", ["peer", "invitation"])
def test_a_ban_ends_what_its_peer_waits_for(world: World, handled: Handled, ask: Ask, subject: str) -> None:
    introduced(world)
    other = world.another(world.a, world.b)
    trust(other, FakeCredentials(certificate_of(other.id, invitation=bytes(16))))

    async def go() -> None:
        handled.may_answer.clear()
        async with asyncio.TaskGroup() as tasks:
            asking, others = (tasks.create_task(expected(ask(one, world.b))) for one in (world.a, other))
            await handled.holds(2)
            world.b.transport.ban(ban_of(world.a.id if subject == "peer" else INVITATION.hex()))
            assert re.search(r"answers .* no more: it .*banned from this run by its owner", str(await asking))
            assert type(await asking) is AccessDenied
            assert handled.cancelled == [world.a.id]
            handled.may_answer.set()
            assert await others is None
        assert isinstance(await expected(ask(world.a, world.b)), AccessDenied | Unreachable)
        assert await expected(ask(other, world.b)) is None

    world.run(go())
    assert [caller for caller, _ in handled.calls].count(world.a.id) == 1


async def expected(asking: Coroutine[Any, Any, object]) -> SwarmError | None:
    """Return the error of a request."""
    try:
        await asking
    except SwarmError as error:
        return error
    return None


@each_ask
def test_a_ban_ends_what_its_peer_is_asked_for(world: World, handled: Handled, ask: Ask) -> None:
    introduced(world)

    async def go() -> None:
        handled.may_answer.clear()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(expected(ask(world.a, world.b)))
            await handled.holds(1)
            world.a.transport.ban(ban_of(world.b.id))
            assert re.search("is not asked any more: it was banned from this run", str(await asking))
            assert type(await asking) is Unreachable

    world.run(go())


@each_ask
@pytest.mark.parametrize("notices", ["the answer", "a ping"])
def test_a_certificate_ends_while_its_peer_waits(world: World, handled: Handled, ask: Ask, notices: str) -> None:
    soon_s = time.time() + 1000.0
    trust(world.a, FakeCredentials(certificate_of(world.a.id, expires_at_s=soon_s)))
    trust(world.b, credentials_of(world.b.id))

    async def go() -> None:
        handled.may_answer.clear()
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(expected(ask(world.a, world.b)))
            await handled.holds(1)
            world.b.transport._gate._wall_s = lambda: soon_s  # type: ignore[attr-defined]
            if notices == "a ping":
                await world.a.transport.ping(world.b.id)
            else:
                handled.may_answer.set()
            assert re.search("answers .* no more: its certificate has expired", str(await asking))
            assert type(await asking) is AccessDenied

    world.run(go())
    assert handled.cancelled == ([world.a.id] if notices == "a ping" else [])


def test_a_member_calls_on_while_a_stranger_floods(world: World, handled: Handled) -> None:
    introduced(world)
    call(world)
    own = trust(world.b, credentials_of(world.b.id))
    assert own is not None
    stranger = world.another(world.a, world.b)

    async def flood() -> set[str]:
        sending = (
            stranger.transport.call(world.b.id, CERTIFY, b"forged %d" % number, timeout=EVENTUALLY_S)
            for number in range(200)
        )
        answers = await asyncio.gather(*sending, return_exceptions=True)
        return {type(answer).__name__ for answer in answers}

    async def go() -> set[str]:
        flooding = asyncio.create_task(flood())
        for _ in range(50):
            await world.a.transport.call(world.b.id, TRAINED, b"", timeout=EVENTUALLY_S)
        return await flooding

    assert world.run(go()) == {"AccessDenied", "Busy"}
    assert len(handled.calls) == 51
    # Only a few certificates of the flood were verified, and the member's own.
    assert own.num_verified <= 4


def test_a_long_certificate_is_refused(world: World, handled: Handled) -> None:
    trust(world.b, credentials_of(world.b.id))
    with pytest.raises(AccessDenied, match="at most 1024 bytes, got 1025"):
        call(world, CERTIFY, bytes(1025))


def test_every_method_of_the_transport_has_a_role(world: World, handled: Handled) -> None:
    registered = {method for method in world.b.transport._call_handlers if method.startswith("transport.")}  # type: ignore[attr-defined]
    assert registered <= OPEN_METHODS
    assert {PING, CERTIFY} <= registered


# ------------------------------------------------------------------ streams of strangers, over libp2p


@pytest.fixture
def daemons(world: World, handled: Handled) -> World:
    if type(world) is not HivemindWorld:
        pytest.skip("streams are libp2p's")
    return world


def test_a_peer_has_its_credentials_before_anybody_reaches_it(daemons: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_swarm.network import hivemind

    gated: list[bool] = []
    opening = hivemind.HivemindTransport.open

    async def open_it(self: Any) -> None:
        gated.append(self._gate is not None)
        await opening(self)

    monkeypatch.setattr(hivemind.HivemindTransport, "open", open_it)

    async def go() -> None:
        addresses = await daemons.a.transport.addresses()
        invited = Peer(*await hivemind.start(initial_peers=addresses, certify=credentials_of, rpcs=RPCS))
        daemons.adopt(invited)
        invited.transport.handle_call(SEEN, nothing)
        with pytest.raises(Uncertified):
            await daemons.a.transport.call(invited.id, SEEN, b"", timeout=EVENTUALLY_S)

    async def nothing(caller: PeerId, body: bytes) -> bytes:
        return b""

    daemons.run(go())
    assert gated == [True]


def test_a_strangers_streams_take_no_members_place(daemons: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_swarm.network.hivemind import transport as hivemind_transport

    stay_s = 2.0
    monkeypatch.setattr(hivemind_transport, "_STRANGER_S", stay_s)
    trust(daemons.b, credentials_of(daemons.b.id))
    there: Any = daemons.b.transport
    stranger = daemons.another(daemons.a, daemons.b)
    own: Any = stranger.transport
    protocols = ("lightning_swarm.call", "lightning_swarm.stream")

    async def go() -> None:
        streams = [await own._daemon.open_stream(daemons.b.id, one) for one in protocols for _ in range(5)]
        while there._strangers._num_open < 4:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        assert [len(there._strangers.of((stranger.id, one))) for one in protocols] == [2, 2]
        assert not any(there._slots.of((stranger.id, one)) for one in protocols)
        async with asyncio.timeout(EVENTUALLY_S):  # time for it to arrive
            for stream in streams:
                with pytest.raises((EOFError, OSError)):
                    await stream.channel.readexactly(1)
                stream.close()
            while there._strangers._num_open:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    daemons.run(go())
    with pytest.raises(Uncertified):
        daemons.run(stranger.transport.call(daemons.b.id, SEEN, b"", timeout=EVENTUALLY_S))
    assert len(there._strangers.of((stranger.id, protocols[0]))) == 1
    trust(stranger, credentials_of(stranger.id))
    daemons.run(stranger.transport.call(daemons.b.id, SEEN, b"", timeout=EVENTUALLY_S))
    assert not there._strangers.of((stranger.id, protocols[0]))
    assert len(there._slots.of((stranger.id, protocols[0]))) == 1
    daemons.run(asyncio.sleep(1.5 * stay_s))
    daemons.run(stranger.transport.call(daemons.b.id, SEEN, b"", timeout=EVENTUALLY_S))
    assert len(there._slots.of((stranger.id, protocols[0]))) == 1, "it stays a member's"
    with pytest.raises((ProtocolError, Unreachable)):
        daemons.run(stranger.transport.call(daemons.b.id, "no.method", b"", timeout=EVENTUALLY_S))


def test_a_peer_that_is_cut_off_is_hung_up_on(daemons: World, handled: Handled) -> None:
    """All streams from and to it end, unused streams included. Another peer keeps its own."""
    introduced(daemons)
    there: Any = daemons.b.transport
    other = daemons.another(daemons.a, daemons.b)
    trust(other, credentials_of(other.id))
    at_a = Handled(daemons.a)
    protocols = ("lightning_swarm.call", "lightning_swarm.stream")

    def slots(peer: Peer) -> list[StreamSlot]:
        return [slot for one in protocols for slot in there._slots.of((peer.id, one))]

    async def go() -> None:
        for one in (daemons.a, other):
            await ask_small(one, daemons.b)
            await ask_large(one, daemons.b)
        await ask_small(daemons.b, daemons.a)
        await ask_large(daemons.b, daemons.a)
        own: Any = daemons.a.transport
        num_open = len(slots(daemons.a))
        streams = [await own._daemon.open_stream(daemons.b.id, one) for one in protocols for _ in range(2)]
        while len(slots(daemons.a)) < num_open + 4:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        others, to_it = slots(other), there._calls._streams[daemons.a.id].result()
        assert daemons.a.id in there._pool._idle.values()
        there.ban(ban_of(daemons.a.id))
        assert to_it.ended
        assert daemons.a.id not in there._pool._idle.values()
        async with asyncio.timeout(EVENTUALLY_S):  # less than the timeout of an idle stream
            for stream in streams:
                with pytest.raises((EOFError, OSError)):
                    await stream.channel.readexactly(1)
                stream.close()
        assert not slots(daemons.a)
        await ask_small(other, daemons.b)
        await ask_large(other, daemons.b)
        assert slots(other)[0] is others[0]
        async with asyncio.timeout(EVENTUALLY_S):
            while isinstance(error := await expected(ask_small(daemons.a, daemons.b)), Unreachable):
                pass  # The end of its own stream is reported a moment later.
        assert "was banned from this run" in str(error)

    try:
        daemons.run(go())
    finally:
        at_a.remove()
