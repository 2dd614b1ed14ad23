"""Limits on strangers' requests and records in a peer's directory, attacked on real nodes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import msgspec
import pytest

from lightning_swarm.core.errors import Busy, Unreachable
from lightning_swarm.network.identity import Identity
from tests.contract.world import HivemindWorld, Peer, opened

kademlia = pytest.importorskip("lightning_swarm.network.hivemind.kademlia")
engine = pytest.importorskip("lightning_swarm.network.hivemind._engine")
records = pytest.importorskip("lightning_swarm.network.hivemind.records")

LONG_S = 60.0
STRANGER = Identity.generate()


@pytest.fixture(scope="module")
def world() -> Iterator[HivemindWorld]:
    yield from opened(HivemindWorld())


@pytest.fixture(autouse=True)
def rested(world: HivemindWorld) -> None:
    """Reset the rate limits."""
    protocol(world.b)._rates._left.clear()


def protocol(peer: Peer) -> Any:
    return peer.directory._node.protocol  # type: ignore[attr-defined]


def ask(world: HivemindWorld, method: str, request: Any) -> Any:
    """Send an arbitrary request from `a` to `b`."""
    stub = protocol(world.a).get_stub(engine.PeerID.from_base58(world.b.id))
    return world.run(getattr(stub, method)(request, timeout=10.0))


def ids(number: int) -> list[bytes]:
    return [engine.DHTID.generate(source=str(i)).to_bytes() for i in range(number)]


def signed(key: bytes, value: bytes, until: float, identity: Identity = STRANGER) -> bytes:
    """Return a record in its stored form."""
    key_id = engine.DHTID.from_bytes(key)
    record = records.pack(identity, key_id, value, expires_at=until, stored_until=until)
    return bytes(records.GuardedSerializer.dumps(record))


def records_of(
    keys: Sequence[bytes],
    value: bytes = b"",
    *,
    values: Sequence[bytes] | None = None,
    until: float = 0.0,
    identity: Identity = STRANGER,
    **changes: Any,
) -> Any:
    until = until or time.time() + LONG_S
    fields: dict[str, Any] = {
        "keys": keys,
        "subkeys": [msgpack.packb(identity.peer_id)] * len(keys),
        "values": [signed(key, value, until, identity) for key in keys] if values is None else values,
        "expiration_time": [until] * len(keys),
        "in_cache": [False] * len(keys),
    }
    return engine.dht_pb2.StoreRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("method", "request_of", "refusal"),
    [
        ("rpc_find", lambda: engine.dht_pb2.FindRequest(keys=ids(100_000)), "keys to look for, got 100000"),
        ("rpc_store", lambda: records_of([b""] * 40_000, values=[]), "records to store, got 40000"),
        (
            "rpc_store",
            lambda: records_of(ids(1), values=[b"\xdd" + (3_900_000).to_bytes(4, "big") + b"\xc0" * 3_900_000]),
            "3900059",
        ),
        ("rpc_store", lambda: records_of(ids(1), in_cache=[False] * 100_000), "records to store, got 100000"),
        ("rpc_ping", lambda: engine.dht_pb2.PingRequest(peer={"node_id": bytes(1 << 20)}), "20 bytes, got 1048576"),
    ],
    ids=["keys", "records", "bytes", "columns", "node id"],
)
def test_a_message_that_is_too_large_is_refused_before_it_is_walked(
    world: HivemindWorld, method: str, request_of: Any, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.p2p import P2PHandlerError

    request = request_of()

    def walk(*_: Any) -> None:
        raise AssertionError("its content was looked at")

    monkeypatch.setattr(engine.DHTID, "from_bytes", walk)
    monkeypatch.setattr(kademlia.BoundedProtocol.serializer, "loads", walk)
    with pytest.raises(P2PHandlerError, match=refusal):
        ask(world, method, request)


def test_a_peer_that_asks_too_often_is_refused_and_no_other_one(world: HivemindWorld) -> None:
    from hivemind.p2p import P2PHandlerError

    stranger = world.another(world.b)
    stub = protocol(stranger).get_stub(engine.PeerID.from_base58(world.b.id))
    find = engine.dht_pb2.FindRequest(keys=ids(kademlia.MAX_KEYS))

    async def ask_again_and_again() -> None:
        for _ in range(100):
            await stub.rpc_find(find, timeout=10.0)

    with pytest.raises(P2PHandlerError, match="Busy"):
        world.run(ask_again_and_again())
    assert len(ask(world, "rpc_find", engine.dht_pb2.FindRequest(keys=ids(1))).results) == 1


def test_a_peer_has_one_node_in_the_table_however_many_it_claims(world: HivemindWorld) -> None:
    table, me = protocol(world.b).routing_table, engine.PeerID.from_base58(world.a.id)
    before = len(table.uid_to_peer_id)
    for node_id in ids(50):
        ask(world, "rpc_ping", engine.dht_pb2.PingRequest(peer={"node_id": node_id}))
    assert list(table.uid_to_peer_id.values()).count(me) == 1
    assert len(table.uid_to_peer_id) == before


def test_records_that_are_replaced_leave_nothing_behind(world: HivemindWorld) -> None:
    storage, until = protocol(world.b).storage, time.time() + LONG_S
    for i in range(80):
        assert list(ask(world, "rpc_store", records_of(ids(1), until=until + i)).store_ok) == [True]
    assert list(ask(world, "rpc_store", records_of(ids(1), until=until)).store_ok) == [False]
    held = storage.data[engine.DHTID.from_bytes(ids(1)[0])].value
    assert (len(held.data), len(held.expiration_heap) < 40, len(storage.expiration_heap) < 40) == (1, True, True)


def test_nothing_is_cached_for_others(world: HivemindWorld) -> None:
    assert list(ask(world, "rpc_store", records_of(ids(2), in_cache=[True, True])).store_ok) == [False, False]
    assert not protocol(world.b).cache.data


def test_what_one_peer_stores_is_bounded(world: HivemindWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kademlia, "_MAX_PEER_BYTES", 8 * 1024)
    stranger = world.another(world.b)
    stub = protocol(stranger).get_stub(engine.PeerID.from_base58(world.b.id))
    stored = [world.run(stub.rpc_store(records_of([key], bytes(3000)), timeout=10.0)) for key in ids(4)[1:]]
    assert [list(one.store_ok) for one in stored] == [[True], [True], [False]]


def test_who_asks_for_one_record_again_and_again_in_one_message_is_refused(world: HivemindWorld) -> None:
    from hivemind.p2p import P2PHandlerError

    large = records_of(ids(1), bytes(60_000), identity=Identity.generate())
    assert list(ask(world, "rpc_store", large).store_ok) == [True]
    assert len(ask(world, "rpc_find", engine.dht_pb2.FindRequest(keys=ids(1))).results[0].value) > 60_000
    with pytest.raises(P2PHandlerError, match="bytes of records to return"):
        ask(world, "rpc_find", engine.dht_pb2.FindRequest(keys=kademlia.MAX_KEYS * ids(1)))


def test_room_is_counted_for_each_key_each_peer_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kademlia, "_RECORD_BYTES", 0)
    monkeypatch.setattr(kademlia, "_MAX_KEY_BYTES", 10)
    monkeypatch.setattr(kademlia, "_MAX_PEER_BYTES", 12)
    monkeypatch.setattr(kademlia, "_MAX_BYTES_IN_ALL", 20)
    monkeypatch.setattr(kademlia, "_MAX_KEYS_IN_ALL", 3)
    quotas = kademlia.Quotas()

    def take(peer: str, key: int, subkey: str, num_bytes: int, *, until: float = 100.0, at: float = 10.0) -> bool:
        return bool(quotas.take(peer, key, subkey, num_bytes, expires_at=until, now_s=at))

    assert take("a", 1, "x", 8)
    assert not take("b", 1, "y", 3), "the key is full"
    assert take("a", 1, "x", 9), "in place of its first"
    assert not take("a", 2, "x", 4), "the peer has its share"
    assert take("b", 2, "x", 8)
    assert take("b", 3, "x", 1)
    assert not take("c", 4, "x", 1), "too many keys"
    assert not take("c", 3, "y", 3), "all is full"
    assert take("c", 1, "x", 10), "another peer's newer record takes its place"
    assert take("a", 2, "y", 1), "and its room is free"
    assert take("d", 4, "x", 10, at=200.0), "the others have expired"
    assert (quotas._num_bytes, dict(quotas._by_key), dict(quotas._by_peer)) == (10, {4: 10}, {"d": 10})


def test_who_waits_may_ask_again() -> None:
    rates = kademlia.RequestRates()
    rates.charge("a", kademlia._BURST, 0.0)
    for now_s, cost in ((0.0, 1.0), (1.0, kademlia._REQUESTS_PER_S + 1)):
        with pytest.raises(Busy, match="32 requests a second"):
            rates.charge("a", cost, now_s)
    rates.charge("b", 1.0, 0.0)
    rates.charge("a", kademlia._REQUESTS_PER_S, 1.0)


@pytest.mark.parametrize("refusing", ["a", "b", "all"])
def test_a_refusal_hides_nobody_who_stores(
    world: HivemindWorld, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    """The refusal is the last answer, which is the one that hivemind uses."""
    third = world.another(world.a, world.b)
    refused = []

    class Refusing:
        def __init__(self, stub: Any) -> None:
            self.rpc_find = stub.rpc_find
            self._stub = stub

        async def rpc_store(self, request: Any, **options: Any) -> Any:
            answer = await self._stub.rpc_store(request, **options)
            await asyncio.sleep(0.3)
            answer.store_ok[:] = [False]
            refused.append(answer)
            return answer

    get_stub, ids_of = protocol(third).get_stub, {"a": world.a.id, "b": world.b.id}

    def stub(peer: Any) -> Any:
        return Refusing(get_stub(peer)) if ids_of.get(refusing, str(peer)) == str(peer) else get_stub(peer)

    monkeypatch.setattr(protocol(third), "get_stub", stub)
    announcing = third.directory.announce(f"refused by {refusing}", b"here", ttl_s=LONG_S)
    if refusing == "all":
        with pytest.raises(Unreachable, match="No other peer stored"):
            world.run(announcing)
    else:
        world.run(announcing)
    assert refused


def test_hivemind_itself_keeps_its_own_protocol(world: HivemindWorld) -> None:
    """Other users of hivemind in this process can store any record."""
    from hivemind.dht import node

    assert isinstance(protocol(world.b), kademlia.BoundedProtocol)
    assert node.DHTProtocol is engine.DHTProtocol is not kademlia.BoundedProtocol


# ---------------------------------------------------------------------- speaking for another


def validator(peer: Peer) -> Any:
    return protocol(peer).record_validator


def forged(name: str, key: bytes, other: bytes, peer: Peer) -> tuple[bytes, float]:
    """Forge a peer's records of two keys, so that the forgery is the newest under its name."""
    storage = protocol(peer).storage
    true, until = storage.data[engine.DHTID.from_bytes(key)].value.data[peer.id]
    swapped, swapped_until = storage.data[engine.DHTID.from_bytes(other)].value.data[peer.id]
    later = swapped_until if name == "another key" else until + 1.0
    announcement = msgspec.msgpack.decode(records.GuardedSerializer.loads(true), type=records.Announcement)
    changes: dict[str, dict[str, Any]] = {
        "unsigned": {"signature": b""},
        "another value": {"value": b"false"},
        "another end": {"expires_at": announcement.expires_at + 1.0},
        "another signature": {"signature": bytes(64)},
    }
    values = {
        "signed by another": lambda: signed(key, b"false", later),
        "a later expiry": lambda: true,
        "another key": lambda: swapped,
        "one byte": lambda: true[:20] + bytes([true[20] ^ 1]) + true[21:],
        **{
            change: lambda change=change: records.GuardedSerializer.dumps(
                msgspec.msgpack.encode(msgspec.structs.replace(announcement, **changes[change]))
            )
            for change in changes
        },
    }
    assert later > until  # otherwise it would not be the newest, for any signer
    return values[name](), later


FORGERIES = (
    *("signed by another", "a later expiry", "another key", "one byte"),
    *("unsigned", "another value", "another end", "another signature"),
)


def announced(world: HivemindWorld, name: str) -> tuple[bytes, bytes]:
    """Return two keys under which `a` announced a value."""
    for key in (name, f"{name} too"):
        world.run(world.a.directory.announce(key, key.encode(), ttl_s=LONG_S))
    one, other = (engine.DHTID.generate(source=key).to_bytes() for key in (name, f"{name} too"))
    return one, other


@pytest.mark.parametrize("as_dictionary", [False, True], ids=["alone", "in a dictionary"])
@pytest.mark.parametrize("name", FORGERIES)
def test_who_speaks_for_another_is_refused_where_it_would_be_stored(
    world: HivemindWorld, name: str, as_dictionary: bool
) -> None:
    source = f"stored {name} {as_dictionary}"
    key, other = announced(world, source)
    value, until = forged(name, key, other, world.a)
    own = signed(key, b"own", until)
    before = validator(world.b).num_refused
    if as_dictionary:
        dictionary = engine.DictionaryDHTValue()
        dictionary.store(world.a.id, value, until)
        dictionary.store(STRANGER.peer_id, own, until)
        packed = records.GuardedSerializer.dumps(dictionary)
        request = records_of([key], subkeys=[b""], values=[packed], expiration_time=[until])
    else:
        request = records_of([key], subkeys=[msgpack.packb(world.a.id)], values=[value], expiration_time=[until])
    assert list(ask(world, "rpc_store", request).store_ok) == [False]
    assert validator(world.b).num_refused == before + 1
    theirs = {STRANGER.peer_id: b"own"} if as_dictionary else {}
    for peer in (world.a, world.b):
        assert dict(world.run(peer.directory.read(source))) == {world.a.id: source.encode(), **theirs}


def test_who_speaks_for_another_in_an_answer_is_not_heard_and_hides_nothing(world: HivemindWorld) -> None:
    """A malicious peer claims that its forgeries live for ever, and hivemind's search would end with such an answer."""
    sources = {name: f"held {name}" for name in FORGERIES}
    keys = {name: announced(world, source) for name, source in sources.items()}
    liar = world.another(world.a, world.b)
    for name, (key, other) in keys.items():
        value, until = forged(name, key, other, world.a)
        key_id = engine.DHTID.from_bytes(key)
        storage = protocol(liar).storage
        storage.store(key_id, value, until, subkey=world.a.id)
        storage.store(key_id, signed(key, b"own", until), until, subkey=STRANGER.peer_id)
        storage.data[key_id] = type(storage.data[key_id])(storage.data[key_id].value, math.inf)
    reader = world.another(liar, world.a, world.b)
    liar_id = engine.PeerID.from_base58(liar.id)
    for name, source in sources.items():
        key_id, before = engine.DHTID.from_bytes(keys[name][0]), validator(reader).num_refused
        ((answer, _),) = world.run(protocol(reader).call_find(liar_id, [key_id])).values()
        assert (set(answer.value.data), math.isfinite(answer.expiration_time)) == ({STRANGER.peer_id}, True)
        assert validator(reader).num_refused == before + 1
        found = dict(world.run(reader.directory.read(source)))
        assert found == {world.a.id: source.encode(), STRANGER.peer_id: b"own"}, source
