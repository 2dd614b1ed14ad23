"""Behaviour of hivemind itself. Without the guard, nested records end the process that reads them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
import torch

from lightning_swarm.core.errors import ConfigError, ProtocolError, Unreachable
from lightning_swarm.core.event_loop import ThreadRuntime, UntilCutOff
from lightning_swarm.monitor import checks
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.network.identity import Identity, is_rsa, load_identity, public_key
from tests.contract.world import HivemindWorld, Peer, miss_deadline, opened

hivemind = pytest.importorskip("lightning_swarm.network.hivemind")
records = pytest.importorskip("lightning_swarm.network.hivemind.records")
engine = pytest.importorskip("lightning_swarm.network.hivemind._engine")

LONG_S = 60.0
STRANGER = Identity.generate()
TAG = msgpack.packb(STRANGER.peer_id)


@pytest.fixture(scope="module")
def world() -> Iterator[HivemindWorld]:
    yield from opened(HivemindWorld())


def nested_tuples(levels: int) -> bytes:
    """Return hivemind's encoding, in which each level is an extension with a list of the next."""
    packed = msgpack.packb(None)
    for _ in range(levels):
        packed = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + packed))
    return packed


def signed(key: str, until: float, *, value: bytes = b"good", end_s: float = 0.0, by: Identity = STRANGER) -> bytes:
    """Return a record that is stored until `until`, whose announcement ends then or at `end_s`."""
    key_id = engine.DHTID.generate(source=key)
    packed = records.pack(by, key_id, value, expires_at=end_s or until, stored_until=until)
    return bytes(records.GuardedSerializer.dumps(packed))


NESTED = nested_tuples(300)
HOSTILE = {
    "nested": NESTED,
    "nested lists": b"\x91" * 500 + b"\xc0",
    "nothing": b"",
    "not bytes": msgpack.packb({"a": 1}),
    "cut off": b"\xc4\x20abc",
    "too long": msgpack.packb(bytes(records._MAX_PACKED_BYTES)),
    "no announcement": msgpack.packb(b"whatever"),
    "nested inside": msgpack.packb(NESTED),
    "a dictionary": records.MSGPackSerializer.dumps(engine.DictionaryDHTValue()),
    "unsigned": msgpack.packb(msgspec.msgpack.encode(records.Announcement(b"", time.time() + LONG_S))),
}
ENDS = {"expired": 1.0, "eternal": 1e300}  # name -> end of its signed announcement


def hostile(name: str, key: str, until: float) -> bytes:
    return signed(key, until, end_s=ENDS[name]) if name in ENDS else HOSTILE[name]


async def store_at(world: HivemindWorld, key: str, tag: bytes, value: bytes, until: float) -> Any:
    """Send an arbitrary store request from `a` to `b`."""
    from hivemind.proto import dht_pb2

    node = world.a.directory._node  # type: ignore[attr-defined]
    request = dht_pb2.StoreRequest(
        keys=[engine.DHTID.generate(source=key).to_bytes()],
        subkeys=[tag],
        values=[value],
        expiration_time=[until],
        in_cache=[False],
    )
    stub = node.protocol.get_stub(engine.PeerID.from_base58(world.b.id))
    return await stub.rpc_store(request, timeout=5.0)


@pytest.mark.parametrize("name", [*HOSTILE, *ENDS])
def test_hostile_values_sent_to_us_are_left_out(world: HivemindWorld, name: str) -> None:
    async def go() -> None:
        until = time.time() + LONG_S
        await store_at(world, name, TAG, hostile(name, name, until), until)
        await world.a.directory.announce(name, b"mine", ttl_s=LONG_S)
        for peer in (world.a, world.b):
            assert dict(await peer.directory.read(name)) == {world.a.id: b"mine"}

    world.run(go())


@pytest.mark.parametrize("name", [*HOSTILE, *ENDS])
def test_hostile_values_that_a_peer_holds_are_left_out(world: HivemindWorld, name: str) -> None:
    async def go() -> None:
        key = f"held {name}"
        until = time.time() + LONG_S
        storage = world.a.directory._node.protocol.storage  # type: ignore[attr-defined]
        storage.store(engine.DHTID.generate(source=key), hostile(name, key, until), until, subkey=STRANGER.peer_id)
        assert world.a.id not in await world.b.directory.read(key)
        await world.b.directory.announce(key, b"mine", ttl_s=LONG_S)
        assert (await world.b.directory.read(key))[world.b.id] == b"mine"

    world.run(go())


@pytest.mark.parametrize("tag", [NESTED, msgpack.packb(None), msgpack.packb(7), msgpack.packb("x" * 200), b"", b"\xa9"])
def test_hostile_names_are_refused(world: HivemindWorld, tag: bytes) -> None:
    from hivemind.p2p import P2PHandlerError

    async def go() -> None:
        key, until = f"tag {tag[:20]!r}", time.time() + LONG_S
        try:
            response = await store_at(world, key, tag, signed(key, until), until)
            assert list(response.store_ok) == [False]
        except P2PHandlerError:
            pass  # refused by an error instead
        assert dict(await world.b.directory.read(key)) == {}

    world.run(go())


def test_hostile_dictionaries_are_refused(world: HivemindWorld) -> None:
    from hivemind.p2p import P2PHandlerError

    for value in (
        NESTED,
        b"",
        msgpack.packb(msgpack.ExtType(0x50, NESTED)),
        msgpack.packb(msgpack.ExtType(0x50, b"\x90")),
    ):
        with pytest.raises(P2PHandlerError):
            world.run(store_at(world, "dictionary", b"", value, time.time() + LONG_S))
    assert dict(world.run(world.b.directory.read("dictionary"))) == {}


def test_records_for_ever_are_refused(world: HivemindWorld) -> None:
    forever = float("inf")
    response = world.run(store_at(world, "for ever", TAG, signed("for ever", forever), forever))
    assert list(response.store_ok) == [False]


def test_what_this_test_sends_would_be_stored_if_it_were_harmless(world: HivemindWorld) -> None:
    async def go() -> None:
        until = time.time() + LONG_S
        response = await store_at(world, "harmless", TAG, signed("harmless", until), until)
        assert list(response.store_ok) == [True]
        assert dict(await world.b.directory.read("harmless")) == {STRANGER.peer_id: b"good"}

    world.run(go())


def test_the_directory_decodes_names_bytes_and_dictionaries_of_records_and_nothing_else() -> None:
    dictionary = engine.DictionaryDHTValue()
    dictionary.store("friend", b"\xc4\x01x", time.time() + LONG_S)
    loads, dumps = records.GuardedSerializer.loads, records.GuardedSerializer.dumps
    assert [loads(dumps(value)) for value in ("friend", b"", b"x" * 1000)] == ["friend", b"", b"x" * 1000]
    assert dict(loads(dumps(dictionary)).items()) == dict(dictionary.items())
    nils = b"\xdd" + (3_900_000).to_bytes(4, "big") + b"\xc0" * 3_900_000
    for other in (
        *(NESTED, nils, b"\x91" * 100_000, b"", b"\xc4\x20abc", b"\xa9"),
        *map(msgpack.packb, (1, None, True, 1.5, [], {}, msgpack.ExtType(0x40, b"\x90"), msgpack.ExtType(7, b""))),
        *(msgpack.packb(msgpack.ExtType(0x50, data)) for data in (NESTED, nils, b"\x93\xc0\xc0" + nils, b"\x90")),
    ):
        with pytest.raises(ProtocolError, match=r"of the directory is malformed|extension of the kind 80"):
            loads(other)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("protocol", "at_most"), [("lightning_swarm.call", 4), ("lightning_swarm.stream", 96)])
def test_idle_streams_of_a_stranger_are_bounded_and_hold_nobody_up(
    world: HivemindWorld, protocol: str, at_most: int
) -> None:
    stranger, friend = world.another(world.b), world.another(world.b)
    slots = world.b.transport._slots  # type: ignore[attr-defined]
    before = slots._num_open

    async def go() -> None:
        streams = []
        for _ in range(at_most + 20):
            streams.append(await stranger.transport._daemon.open_stream(world.b.id, protocol))  # type: ignore[attr-defined]
        while sum(stream.ended for stream in streams) < 20:  # noqa: ASYNC110 - the daemon sets no event
            await asyncio.sleep(0.01)
        assert slots._num_open == before + at_most
        for peer in (stranger, friend):
            assert await peer.transport.ping(world.b.id) < 10.0
        for stream in streams:
            stream.close()

    world.run(go())


def test_a_peer_whose_daemon_is_killed_ends_at_once_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("uvloop")
    runtime = ThreadRuntime()
    transport, directory = runtime.run(hivemind.start())
    peer = UntilCutOff(runtime, transport.cut_off, lambda: transport.cut_off.reason)
    killed = rf"the libp2p daemon of this peer, process {transport.daemon_pid}, has ended or answers no more"
    threading.Timer(0.1, os.kill, (transport.daemon_pid, signal.SIGKILL)).start()
    try:
        with pytest.raises(Unreachable, match=killed):
            peer.run(asyncio.Event().wait())  # like a server that waits for the end of its run
        with pytest.raises(Unreachable, match=killed):
            peer.run(transport.call(PeerId("somebody"), "method", b"", timeout=60.0))
        assert peer.run(asyncio.sleep(0.0, "tidied up")) == "tidied up"
        assert re.search(killed, caplog.text)
    finally:
        peer.run(directory.close())
        peer.run(transport.close())
        peer.close()


NUM_MUTANTS = 10_000 * max(1, int(os.environ.get("SWARM_TIMES", "0")))


def test_mutations_of_signed_records_are_all_refused() -> None:
    """`SWARM_TIMES=10` tries 100,000 mutations."""
    rng, until, now_s = random.Random(0), time.time() + LONG_S, time.time()
    validator = records.OwnRecordsOnly(is_local=False)
    key, other = (engine.DHTID.generate(source=source).to_bytes() for source in ("key", "other"))
    true = engine.DHTRecord(key, TAG, signed("key", until, value=bytes(range(100))), until)
    assert validator.validate(true)
    for i in range(NUM_MUTANTS):
        change = dict(vars(true))
        field = rng.choice(["key", "subkey", "value", "value", "value", "value", "expiration_time"])
        change[field] = rng.uniform(now_s, 2 * until) if field == "expiration_time" else mutated(change[field], rng)
        assert change != vars(true)
        assert not validator.validate(engine.DHTRecord(**change)), (i, field, change)
    assert not validator.validate(engine.DHTRecord(other, TAG, true.value, until))
    assert validator.num_refused == NUM_MUTANTS + 1
    assert validator.validate(true)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change, insert or remove one to four bytes."""
    changed = bytearray(data)
    while bytes(changed) == data:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(changed) or 1)
            how = rng.randrange(3)
            changed[at : at + (how < 2)] = rng.randbytes(1) if how else b""
    return bytes(changed)


def test_what_was_verified_is_not_verified_again_and_is_forgotten_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    verified, verify = [], records.is_signed

    def counted(*arguments: Any) -> bool:
        verified.append(arguments)
        return bool(verify(*arguments))

    monkeypatch.setattr(records, "is_signed", counted)
    monkeypatch.setattr(records, "_MAX_VERIFIED", 2)
    until = time.time() + LONG_S
    validator, key = records.OwnRecordsOnly(is_local=False), engine.DHTID.generate(source="key").to_bytes()
    first, second, third = (
        engine.DHTRecord(key, msgpack.packb(by.peer_id), signed("key", until, by=by), until)
        for by in (Identity.generate() for _ in range(3))
    )
    for record, number in ((first, 1), (first, 1), (second, 2), (first, 2), (third, 3), (second, 3), (first, 4)):
        assert validator.validate(record)
        assert len(verified) == number
    assert not validator.validate(engine.DHTRecord(key, msgpack.packb(STRANGER.peer_id), first.value, until))
    assert len(verified) == 5


@pytest.mark.parametrize("is_local", [True, False])
def test_unsigned_records_are_believed_of_rsa_keys_on_this_machine_and_of_no_others(is_local: bool) -> None:
    validator, key = records.OwnRecordsOnly(is_local=is_local), engine.DHTID.generate(source="key").to_bytes()
    until = time.time() + LONG_S
    unsigned = msgpack.packb(msgspec.msgpack.encode(records.Announcement(b"", until)))
    for peer, believed in (("Qm" + "a" * 44, is_local), (STRANGER.peer_id, False), ("somebody", False), ("", False)):
        assert validator.validate(engine.DHTRecord(key, msgpack.packb(peer), unsigned, until)) is believed


# ---------------------------------------------------------------------- identities


def test_the_daemon_has_the_peer_id_that_its_key_says(
    world: HivemindWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    peer = world.another(world.b)
    identity = peer.directory._identity  # type: ignore[attr-defined]
    assert identity.peer_id == peer.id == str(peer.transport._p2p.peer_id)  # type: ignore[attr-defined]
    assert public_key(peer.id)
    assert not list(tmp_path.iterdir())


def test_an_rsa_key_of_before_works_among_peers_of_one_machine(world: HivemindWorld, tmp_path: Path) -> None:
    path = tmp_path / "key"
    engine.P2P.generate_identity(str(path))
    key = load_identity(path)
    assert is_rsa(key.peer_id)
    for beyond in ({"listen": HostPort("0.0.0.0", 0)}, {"announce": ["/ip4/192.0.2.1/tcp/31337"]}):
        with pytest.raises(ConfigError, match=rf"`identity_path` must hold an Ed25519 key .*'{path}' holds an RSA key"):
            world.run(hivemind.start(identity_path=str(path), **beyond))

    async def go() -> None:
        addresses = await world.a.transport.addresses()
        old = world.adopt(Peer(*await hivemind.start(initial_peers=addresses, identity_path=str(path))))
        assert old.id == key.peer_id == str(engine.PeerID.from_identity(path.read_bytes()))
        await old.directory.announce("old", b"value", ttl_s=LONG_S)
        for peer in (world.a, world.b, old):
            assert dict(await peer.directory.read("old")) == {old.id: b"value"}
        validator = world.b.directory._node.protocol.record_validator  # type: ignore[attr-defined]
        before = validator.num_refused
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(validator, "_is_local", False)  # acts like a peer that other machines reach
            await old.directory.announce("old too", b"value", ttl_s=LONG_S)
            assert dict(await world.a.directory.read("old too")) == {old.id: b"value"}
            assert dict(await world.b.directory.read("old too")) == {}
        assert validator.num_refused > before + 1, "where it would be stored, and where it is read"

    world.run(go())


def test_a_key_that_cannot_be_used_starts_nothing(world: HivemindWorld, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"noise")
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(ConfigError, match=r"`identity_path` must be a file with this peer's private key"):
        world.run(hivemind.start(identity_path=str(tmp_path / "key")))


def test_a_key_that_a_running_peer_has_is_refused(
    world: HivemindWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hivemind, "_PAUSE_S", 0.0)
    monkeypatch.setattr(hivemind, "_NUM_ATTEMPTS", 1)
    path = tmp_path / "key"
    path.write_bytes(world.b.directory._identity.encoded)  # type: ignore[attr-defined]
    path.chmod(0o600)

    async def start() -> None:
        initial_peers = await world.a.transport.addresses()
        transport, _ = await hivemind.start(initial_peers=initial_peers, identity_path=str(path))
        await transport.close()  # must not outlive this test

    with pytest.raises(Unreachable, match=rf"`identity_path` must name a key .*\({world.b.id} answers already\)"):
        world.run(start())


def test_a_peer_that_closes_was_not_cut_off(world: HivemindWorld) -> None:
    peer = world.another(world.b)
    world.run(peer.close())
    assert not peer.transport.cut_off.is_set()


def test_calls_that_were_given_up_are_forgotten(world: HivemindWorld) -> None:
    async def go() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def sleepy(caller: PeerId, body: bytes) -> bytes:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return body

        world.b.transport.handle_call("sleepy", sleepy)
        await world.a.transport.ping(world.b.id)
        serving = world.b.transport._tasks  # type: ignore[attr-defined]
        before = set(serving)
        await miss_deadline(lambda s: world.a.transport.call(world.b.id, "sleepy", b"", timeout=s), begun)
        await ended.wait()
        await world.a.transport.ping(world.b.id)  # it follows the abandoned ping on the same stream
        assert set(serving) == before

    world.run(go())


@pytest.mark.thorough
def test_an_import_leaves_the_process_as_it_was() -> None:
    import logging
    import subprocess
    import sys

    code = (
        "import multiprocessing, torch.multiprocessing as t, logging; before = t.get_sharing_strategy(); "
        "import lightning_swarm.network.hivemind; "
        "assert multiprocessing.get_start_method(allow_none=True) is None; "
        "assert t.get_sharing_strategy() == before; assert logging.getLevelName(30) == 'WARNING'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert logging.getLevelName(logging.WARNING) == "WARNING"


@pytest.mark.thorough
def test_what_cannot_be_listened_on(world: HivemindWorld) -> None:
    with pytest.raises(ConfigError, match="IP address"):
        world.run(hivemind.start(listen=HostPort("localhost", 0)))
    (address,) = world.run(world.a.transport.addresses())
    port = Address.parse(address).port
    with pytest.raises(ConfigError, match=rf"`listen` must be .* got 127.0.0.1 and {port}: .* in use.*another port"):
        world.run(hivemind.start(listen=HostPort("127.0.0.1", port)))
    with pytest.raises(ConfigError, match=r"`listen` must be an address of this machine .* got 192.0.2.1 and 0"):
        world.run(hivemind.start(listen=HostPort("192.0.2.1", 0)))


def test_initial_peers_that_are_not_there(world: HivemindWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hivemind, "_PAUSE_S", 0.0)
    with pytest.raises(Unreachable, match="reachable from here"):
        world.run(hivemind.start(initial_peers=[f"/ip4/127.0.0.1/tcp/1/p2p/{world.stranger}"]))


def test_a_ctrl_c_at_the_terminal_does_not_reach_the_daemon(world: HivemindWorld) -> None:
    assert os.getpgid(world.a.transport._p2p._child.pid) != os.getpgid(0)  # type: ignore[attr-defined]
    assert not isinstance(world.loop.subprocess_exec, partial), "what else the loop starts is no concern of ours"


def test_everything_works_on_a_plain_asyncio_loop() -> None:
    async def echo(caller: PeerId, message: Message) -> Message:
        return message

    async def go() -> None:
        first = Peer(*await hivemind.start())
        second = Peer(*await hivemind.start(initial_peers=await first.transport.addresses()))
        first.transport.handle_stream("echo", echo)
        message = Message(b"hi", (torch.arange(1 << 20),))
        for _ in range(3):
            answer = await second.transport.stream(first.id, "echo", message, timeout=LONG_S)
            assert torch.equal(answer.tensors[0], message.tensors[0])
        await second.directory.announce("key", b"value", ttl_s=LONG_S)
        assert dict(await first.directory.read("key")) == {second.id: b"value"}
        await second.close()
        await first.close()
        # Asyncio detects a child's end in a separate thread, and warns if its loop is closed before that.
        for peer in (first, second):
            await asyncio.wait_for(peer.transport._p2p._child.wait(), LONG_S)  # type: ignore[attr-defined]

    asyncio.run(go())


# ---------------------------------------------------------------------- clocks


def test_the_doctor_allows_the_skew_that_hivemind_does() -> None:
    from hivemind.utils import MAX_DHT_TIME_DISCREPANCY_SECONDS

    assert checks.MAX_SKEW_S == MAX_DHT_TIME_DISCREPANCY_SECONDS


def test_a_peer_whose_clock_is_wrong_is_not_let_in_and_told_why(
    world: HivemindWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = engine.DHTProtocol.rpc_ping

    @wraps(answer)  # hivemind reads its annotations
    async def skewed(self: Any, request: Any, context: Any) -> Any:
        response = await answer(self, request, context)
        response.dht_time += 100.0
        return response

    monkeypatch.setattr(engine.DHTProtocol, "rpc_ping", skewed)
    known = world.another()
    with pytest.raises(Unreachable, match=r"clocks must agree.* within 3 seconds .*`lightning-swarm doctor --peer"):
        world.another(known)


def test_an_answer_to_a_call_that_was_just_cancelled_ends_no_other(world: HivemindWorld) -> None:
    """The critical moment lasts one turn of the loop; here the test causes it deterministically."""
    from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]  # ships no types

    async def answer(request: Any, context: Any) -> Any:
        return request

    async def wait_for_ever(request: Any, context: Any) -> Any:
        await asyncio.Event().wait()

    async def go() -> None:
        here, there = (peer.transport._p2p for peer in (world.a, world.b))  # type: ignore[attr-defined]
        await there.add_protobuf_handler("test.echo", answer, BytesValue)
        await there.add_protobuf_handler("test.silent", wait_for_ever, BytesValue)
        ask = partial(here.call_protobuf_handler, there.peer_id)
        control = here._client.control
        before = set(control._pending_calls)
        call = asyncio.create_task(ask("test.silent", BytesValue(), BytesValue))
        while not (pending := set(control._pending_calls) - before):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        for _ in range(10):  # lets the task wait for its answer
            await asyncio.sleep(0)
        call.cancel()
        (call_id,) = pending
        assert control._pending_calls[call_id].cancelled()
        control._pending_calls[call_id].set_result(b"late")  # simulates the task that reads all answers
        control._pending_calls[call_id].set_exception(OSError("late"))
        await asyncio.wait({call})
        assert call.cancelled()
        assert await ask("test.echo", BytesValue(value=b"on"), BytesValue) == BytesValue(value=b"on")

    world.run(go())


def test_a_client_that_reads_no_more_closes_its_transport() -> None:
    """It must not wait for answers that never come."""
    lone = HivemindWorld()
    lone.open()
    try:

        async def go() -> None:
            transport = lone.a.transport
            transport._p2p._client.control._read_task.cancel()  # type: ignore[attr-defined]
            while not transport.closed:  # type: ignore[attr-defined]  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)
            with pytest.raises(Unreachable, match="closed its transport"):
                await transport.call(lone.b.id, "test.echo", b"", timeout=LONG_S)

        lone.run(go())
    finally:
        lone.close()


def test_nobody_complains_of_a_way_that_nobody_waits_for_any_more() -> None:
    """A call was abandoned while its stream to a dead peer was being opened."""
    calls = pytest.importorskip("lightning_swarm.network.hivemind.calls")

    async def main() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        begun, gate = asyncio.Event(), asyncio.Event()
        opening: list[Any] = []

        async def open_stream(peer: PeerId) -> Any:
            opening.append(asyncio.current_task())
            begun.set()
            await gate.wait()
            raise Unreachable(f"{peer} is dead")

        outgoing = calls.OutgoingCalls(open_stream, asyncio.create_task, lambda _: 10.0)
        call = asyncio.create_task(outgoing.exchange(PeerId("b"), b""))
        await begun.wait()
        call.cancel()
        gate.set()
        await asyncio.wait({call, *opening})
        opening.clear()
        del call
        gc.collect()
        return complaints

    assert asyncio.run(main()) == []
