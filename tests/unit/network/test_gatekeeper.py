"""Each method of a peer with certificates, for each role; and the cost of callers without certificates."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import AccessDenied, Busy, SwarmError, Uncertified, Unreachable
from lightning_swarm.network import Message, PeerId, gatekeeper
from lightning_swarm.network.access import CERTIFY, OPEN_METHODS, PING, Role
from lightning_swarm.network.framing import Head, Kind, decode
from lightning_swarm.network.gatekeeper import Gatekeeper, RefusalLog
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.network.rpc import answer_to
from lightning_swarm.protocol.rpc import RPCS
from tests.access import HOUR_S, INVITATION, FakeCredentials, ban_of, certificate_of, credentials_of
from tests.unit.conftest import MakeSwarm

A, B = PeerId("a"), PeerId("b")
NOW_S = 1_000_000.0


LEAST = {**dict.fromkeys(OPEN_METHODS), **{rpc.name: rpc.by for rpc in RPCS}}  # None: any peer may call it


def test_real_peers_register_what_the_table_names(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b")
    for transport in (swarm.trainer, *(server._transport for server in swarm.servers.values())):
        registered: set[str] = {*transport._call_handlers, *transport._stream_handlers}  # type: ignore[attr-defined]
        assert registered <= LEAST.keys()


# ------------------------------------------------------------------ the matrix


def forms(role: Role) -> dict[str, bytes | None]:
    """Return the certificates that a caller of a role may present."""
    return {
        "certified": certificate_of(A, role),
        "expired": certificate_of(A, role, expires_at_s=time.time() - 1.0),
        "other run": certificate_of(A, role, run=b"another run"),
        "other peer": certificate_of(B, role),
        "none": None,
        "banned": certificate_of(A, role),
        "invitation banned": certificate_of(A, role),
        "certified, then expired": certificate_of(A, role),
        "certified, then banned": certificate_of(A, role),
        "certified, then invitation banned": certificate_of(A, role),
    }


BANNED = {"banned": A, "invitation banned": INVITATION.hex()}
KINDS = ("call", "small stream", "large stream")


async def send(caller: MemoryTransport, peer: PeerId, kind: str, method: str) -> None:
    """Send a request of a caller without credentials, so that only the other side's gate can refuse it."""
    if kind == "call":
        await caller.call(peer, method, b"", timeout=10.0)
    elif kind == "small stream":
        await caller.stream(peer, method, Message(), timeout=10.0, max_bytes=0)
    else:
        await caller.stream(peer, method, Message(b"", (torch.ones(100_000),)), timeout=10.0)


async def show(caller: MemoryTransport, served: MemoryTransport, form: str, certificate: bytes | None) -> None:
    """Present a certificate, and make it invalid afterwards if the form says so."""
    first, _, then = form.rpartition(", then ")
    served.set_credentials(credentials_of(served.peer_id), RPCS)  # forgets all certificates
    if form in BANNED:
        served.ban(ban_of(BANNED[form]))
    if certificate is not None:
        with nullcontext() if "certified" in (form, first) else pytest.raises(AccessDenied):
            await caller.call(served.peer_id, CERTIFY, certificate, timeout=10.0)
    gate = served._gate
    assert gate is not None
    assert gate.is_certified(A) == ("certified" in (form, first))
    if first and then in BANNED:
        served.ban(ban_of(BANNED[then]))
    elif first:
        gate._wall_s = lambda: time.time() + 2 * HOUR_S


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("role", Role)
def test_a_method_is_entered_exactly_where_the_table_says(loop: VirtualLoop, role: Role) -> None:
    """The request reaches the gate with any certificate, and the gate alone decides."""
    network = MemoryNetwork()
    served = network.transport("served")
    entered: list[tuple[str, str]] = []

    async def enter(kind: str, method: str, caller: PeerId, request: Any) -> Any:
        entered.append((kind, method))
        return request

    for method in LEAST:
        for kind, table, register in (
            ("call", served._call_handlers, served.handle_call),
            ("stream", served._stream_handlers, served.handle_stream),
        ):
            if method not in table:
                register(method, partial(enter, kind, method))  # type: ignore[operator]
    own = {PING, CERTIFY}

    async def go() -> None:
        caller = network.transport(A)
        for form, certificate in forms(role).items():
            await show(caller, served, form, certificate)
            for (method, least), kind in itertools.product(LEAST.items(), KINDS):
                if (kind == "call" and method in own) or (kind == "large stream" and least is None):
                    continue  # The transport answers it, or no peer has it.
                entered.clear()
                refusal: type[Exception] | None = None
                try:
                    await send(caller, served.peer_id, kind, method)
                except SwarmError as error:
                    refusal = type(error)
                case = (form, kind, method)
                if least is None or (form == "certified" and role.includes(least)):
                    assert (entered, refusal) == ([(kind.split()[-1], method)], None), case
                else:
                    assert (entered, refusal) == ([], AccessDenied if form == "certified" else Uncertified), case

    loop.run_until_complete(go())


def banned_meanwhile(served: MemoryTransport) -> None:
    served.ban(ban_of(A))


def server_meanwhile(served: MemoryTransport) -> None:
    assert served._gate is not None
    served._gate.certify(A, certificate_of(A, Role.SERVER))


def forgotten_meanwhile(served: MemoryTransport) -> None:
    assert served._gate is not None
    del served._gate._permits[A]


@pytest.mark.parametrize("message", [Message(), Message(b"", (torch.zeros(1),))], ids=["call", "tensors"])
@pytest.mark.parametrize(
    ("change", "refusal", "text"),
    [
        (banned_meanwhile, AccessDenied, "served answers a no more: it was banned"),
        (server_meanwhile, AccessDenied, "the certificate of a has the role server"),
        (forgotten_meanwhile, Uncertified, "only peers with a certificate"),
    ],
)
def test_a_peer_that_may_no_more_when_its_tensors_have_come_enters_nothing(
    loop: VirtualLoop,
    change: Callable[[MemoryTransport], None],
    refusal: type[SwarmError],
    text: str,
    message: Message,
) -> None:
    served = MemoryNetwork().transport("served")
    served.set_credentials(credentials_of(served.peer_id), RPCS)
    entered: list[PeerId] = []

    async def enter(caller: PeerId, message: Message) -> Message:
        entered.append(caller)
        return message

    served.handle_stream("stage.forward", enter)

    async def go() -> None:
        gate = served._gate
        assert gate is not None
        gate.certify(A, certificate_of(A))
        head = Head(Kind.STREAM, 1, "stage.forward", b"", (), 0)
        method = served._handler_of(A, head)
        change(served)
        answer = decode(b"".join(await answer_to(head, method, message)))
        assert answer.kind is Kind.ERROR
        assert answer.exchange_id == 1
        with pytest.raises(refusal, match=text):
            raise answer.error()

    loop.run_until_complete(go())
    assert entered == []


def test_a_handler_that_ends_its_own_caller_is_done_first(loop: VirtualLoop) -> None:
    """A ban may be sent by the peer that it bans. The caller gets the ban as its answer, and the handler completes."""
    served = MemoryNetwork().transport("served")
    served.set_credentials(credentials_of(served.peer_id), RPCS)
    ended: list[PeerId] = []

    async def heed(caller: PeerId, body: bytes) -> bytes:
        served.ban(ban_of(A))
        ended.append(caller)
        return b""

    served.handle_call("peer.ban", heed)

    async def go() -> None:
        assert served._gate is not None
        served._gate.certify(A, certificate_of(A))
        head = Head(Kind.CALL, 1, "peer.ban", b"", (), 0)
        answer = decode(b"".join(await answer_to(head, served._handler_of(A, head), Message())))
        assert answer.kind is Kind.ERROR
        with pytest.raises(AccessDenied, match="served answers a no more: it was banned"):
            raise answer.error()
        await asyncio.sleep(0)  # would raise if this task had been cancelled, too

    loop.run_until_complete(go())
    assert ended == [A]


def test_an_unknown_method_is_for_nobody(loop: VirtualLoop) -> None:
    gate = Gatekeeper(B, credentials_of(B), RPCS)
    gate.certify(A, certificate_of(A))

    async def go() -> None:
        with pytest.raises(AccessDenied, match=r"no role may call `new.method`"):
            gate.check_on_arrival(A, "new.method")

    loop.run_until_complete(go())


def test_a_peer_may_do_everything_to_itself(loop: VirtualLoop) -> None:
    own = MemoryNetwork().transport(B)
    own.set_credentials(credentials_of(B, Role.OBSERVER), RPCS)

    async def same(caller: PeerId, body: bytes) -> bytes:
        return body

    own.handle_call("stage.forward", same)
    assert loop.run_until_complete(own.call(B, "stage.forward", b"hi", timeout=1.0)) == b"hi"
    permit = own.permit_of(B)
    assert permit is not None
    assert permit.role is Role.OBSERVER


# ------------------------------------------------------------------ what a gate keeps


def gate_at(clock_s: list[float], credentials: FakeCredentials | None = None) -> Gatekeeper:
    return Gatekeeper(B, credentials or credentials_of(B), RPCS, wall_s=lambda: clock_s[-1])


def test_a_permit_ends_by_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    clock_s = [NOW_S]
    gate = gate_at(clock_s)
    gate.certify(A, certificate_of(A, expires_at_s=NOW_S + HOUR_S))
    clock_s.append(NOW_S + HOUR_S - 1.0)
    assert gate.permit_of(A) is not None
    assert not caplog.messages
    clock_s.append(NOW_S + HOUR_S)
    for _ in range(2):
        assert gate.permit_of(A) is None
    assert not gate._permits
    (said,) = caplog.messages
    assert said.startswith("The certificate of a has expired")
    gate.certify(A, certificate_of(A, expires_at_s=NOW_S + 2 * HOUR_S))
    assert gate.permit_of(A) is not None


def test_who_is_cut_off_is_told_once() -> None:
    """It is only reported for known peers: unknown peers only have short-lived streams."""
    clock_s, cut_off = [NOW_S], list[PeerId]()
    gate = Gatekeeper(B, credentials_of(B), RPCS, on_cut_off=cut_off.append, wall_s=lambda: clock_s[-1])
    for name in "acde":
        gate.certify(
            PeerId(name), certificate_of(PeerId(name), expires_at_s=NOW_S + HOUR_S, invitation=name.encode() * 16)
        )
    for _ in range(2):
        gate.ban(ban_of(A))
        gate.ban(ban_of("stranger"))
        gate.ban(ban_of((b"c" * 16).hex()))
        with pytest.raises(AccessDenied, match="was banned"):
            gate.certify(A, certificate_of(A, expires_at_s=NOW_S + HOUR_S))
    assert cut_off == [A, "c"]
    clock_s.append(NOW_S + HOUR_S)
    assert not any(gate.is_certified(PeerId(name)) for name in "aced")
    assert cut_off == [A, "c", "e", "d"]


def test_a_banned_peer_counts_as_gone_also_where_it_has_shown_nothing() -> None:
    gate = Gatekeeper(B, credentials_of(B), RPCS)
    gate.check_not_cut_off(A)
    gate.ban(ban_of(A))
    with pytest.raises(Unreachable, match="a is not asked any more: it was banned"):
        gate.check_not_cut_off(A)
    gate.check_not_cut_off(PeerId("c"))


def test_the_peers_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "_MAX_PERMITS", 3)
    gate = Gatekeeper(B, credentials_of(B), RPCS)
    for name in "cdefg":
        gate.certify(A, certificate_of(A))
        assert gate.permit_of(A) is not None
        gate.certify(PeerId(name), certificate_of(PeerId(name)))
    assert list(gate._permits) == [PeerId("f"), A, PeerId("g")]
    assert gate.permit_of(PeerId("c")) is None


def test_a_known_certificate_is_not_verified_again() -> None:
    own = credentials_of(B)
    gate = Gatekeeper(B, own, RPCS)
    certificate = certificate_of(A)
    for _ in range(10):
        gate.certify(A, certificate)
    assert own.num_verified == 1


def test_certificates_that_do_not_hold_are_looked_at_ever_more_rarely() -> None:
    clock_s = [NOW_S]
    own = credentials_of(B)
    gate = gate_at(clock_s, own)
    for _ in range(10_000):  # covers an hour
        with pytest.raises((AccessDenied, Busy)):
            gate.certify(A, b"forged")
        clock_s.append(clock_s[-1] + HOUR_S / 10_000)
    assert own.num_verified < 70
    gate.certify(PeerId("c"), certificate_of(PeerId("c"), expires_at_s=NOW_S + 2 * HOUR_S))  # other peers do not wait
    with pytest.raises(Busy, match=r"the next certificate of a is verified in \d+ s.*it is not signed by the owner"):
        gate.certify(A, certificate_of(A, expires_at_s=NOW_S + 2 * HOUR_S))
    clock_s.append(clock_s[-1] + 64.0)
    gate.certify(A, certificate_of(A, expires_at_s=NOW_S + 2 * HOUR_S))
    clock_s.append(NOW_S)  # the clock is set back
    assert gate.permit_of(A) is not None


def test_many_strangers_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "_MAX_FAILING", 10)
    gate = Gatekeeper(B, credentials_of(B), RPCS)
    for number in range(100):
        with pytest.raises(AccessDenied):
            gate.certify(PeerId(f"s{number}"), b"forged")
    assert len(gate._failing) == 10
    assert not gate._permits


def test_a_mutated_certificate_opens_nothing() -> None:
    """2,000 mutations: bits flipped, bytes lost, added and swapped."""
    rng = random.Random(0)
    clock_s = [time.time()]
    gate = gate_at(clock_s)
    true = certificate_of(A, Role.OBSERVER, expires_at_s=clock_s[0] + 1e9)
    for number in range(2000):
        clock_s.append(clock_s[-1] + 64.0)  # enough time for each to be verified
        forged = bytearray(true)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(forged))
            if number % 3 == 0:
                forged[place] ^= 1 << rng.randrange(8)
            elif number % 3 == 1:
                del forged[place]
            else:
                forged.insert(place, rng.randrange(256))
        if bytes(forged) == true:
            continue
        with pytest.raises(AccessDenied):
            gate.certify(A, bytes(forged))
        assert gate.permit_of(A) is None
    clock_s.append(clock_s[-1] + 64.0)
    gate.certify(A, true)
    assert gate.permit_of(A) is not None


# ------------------------------------------------------------------ what people see


def test_refusals_are_told_once_a_minute_with_a_count(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    counts: list[int] = []
    log = RefusalLog(counts.append)

    async def go() -> None:
        for _ in range(130):
            log.note(A, "it has\nno certificate")
            await asyncio.sleep(1.0)
        await asyncio.sleep(600.0)

    with caplog.at_level(logging.WARNING, logger=gatekeeper.__name__):
        loop.run_until_complete(go())
    assert caplog.messages == [f"{n} requests of a were refused: it has no certificate" for n in (5, 60, 60, 5)]
    assert counts == [5, 60, 60, 5]
    assert not log._refused


def test_who_shows_its_certificate_at_once_is_no_stranger(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gatekeeper(B, credentials_of(B), RPCS)

    async def go() -> None:
        for certificate in (certificate_of(A), None):
            with pytest.raises(Uncertified):
                gate.check_on_arrival(A if certificate else PeerId("c"), "peer.hello")
            if certificate:
                gate.certify(A, certificate)
        await asyncio.sleep(100.0)

    with caplog.at_level(logging.WARNING, logger=gatekeeper.__name__):
        loop.run_until_complete(go())
    (message,) = caplog.messages
    assert message.startswith("1 requests of c were refused: b answers only peers with a certificate")


def test_many_strangers_fill_no_log(loop: VirtualLoop, caplog: pytest.LogCaptureFixture) -> None:
    counts: list[int] = []
    log = RefusalLog(counts.append)

    async def go() -> None:
        for number in range(1000):
            log.note(PeerId(f"s{number}"), "no")
        await asyncio.sleep(6.0)

    with caplog.at_level(logging.WARNING, logger=gatekeeper.__name__):
        loop.run_until_complete(go())
    assert len(caplog.messages) == 32
    assert sum(counts) == 1000
    assert caplog.messages[0] == "1 requests of s0 were refused: no 968 requests of other peers were refused, too."


# ------------------------------------------------------------------ over the network


def test_a_peer_comes_back_in_the_middle(loop: VirtualLoop) -> None:
    """It has forgotten all certificates; the other peers know its certificate, and present theirs again."""
    network = MemoryNetwork(latency_s=0.001)
    a = network.transport(A)
    a.set_credentials(credentials_of(A), RPCS)
    entered: list[bytes] = []

    async def enter(caller: PeerId, body: bytes) -> bytes:
        entered.append(body)
        return body

    def begin() -> Any:
        b = network.transport(B)
        b.set_credentials(credentials_of(B), RPCS)
        b.handle_call("stage.forward", enter)
        return b

    begin()

    async def go() -> None:
        for life in range(3):
            bodies = [b"%d %d" % (life, number) for number in range(20)]
            answers = await asyncio.gather(*(a.call(B, "stage.forward", body, timeout=10.0) for body in bodies))
            assert answers == bodies
            network.kill(B)
            with pytest.raises(SwarmError):
                await a.call(B, "stage.forward", b"", timeout=10.0)
            begin()

    loop.run_until_complete(go())
    assert sorted(entered) == sorted(b"%d %d" % pair for pair in itertools.product(range(3), range(20)))
