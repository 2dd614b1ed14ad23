"""What strangers may ask of a peer's directory, and what they may leave in it: the attacks are made on real nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from lightning_swarm.core.errors import Busy
from tests.contract.world import HivemindWorld, Peer, opened

kademlia = pytest.importorskip("lightning_swarm.network.hivemind.kademlia")
engine = pytest.importorskip("lightning_swarm.network.hivemind._engine")

LONG_S = 60.0
VALUE = msgpack.packb(b"value")


@pytest.fixture(scope="module")
def world() -> Iterator[HivemindWorld]:
    yield from opened(HivemindWorld())


@pytest.fixture(autouse=True)
def rested(world: HivemindWorld) -> None:
    """No peer has asked for anything of late."""
    protocol(world.b)._rates._left.clear()


def protocol(peer: Peer) -> Any:
    return peer.directory._node.protocol  # type: ignore[attr-defined]


def ask(world: HivemindWorld, method: str, request: Any) -> Any:
    """What a stranger sends: `a` asks `b`."""
    stub = protocol(world.a).get_stub(engine.PeerID.from_base58(world.b.id))
    return world.run(getattr(stub, method)(request, timeout=10.0))


def ids(number: int) -> list[bytes]:
    return [engine.DHTID.generate(source=str(i)).to_bytes() for i in range(number)]


def records_of(number: int, value: bytes = VALUE, *, expires_at: float = 0.0, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "keys": ids(number),
        "subkeys": [msgpack.packb("stranger")] * number,
        "values": [value] * number,
        "expiration_time": [expires_at or time.time() + LONG_S] * number,
        "in_cache": [False] * number,
    }
    return engine.dht_pb2.StoreRequest(**{**fields, **changes})


@pytest.mark.parametrize(
    ("method", "request_of", "refusal"),
    [
        ("rpc_find", lambda: engine.dht_pb2.FindRequest(keys=ids(100_000)), "100000 keys are looked for"),
        ("rpc_store", lambda: records_of(40_000), "40000 records are stored"),
        ("rpc_store", lambda: records_of(1, b"\xdd" + (3_900_000).to_bytes(4, "big") + b"\xc0" * 3_900_000), "3900014"),
        ("rpc_store", lambda: records_of(1, in_cache=[False] * 100_000), "100000 records are stored"),
        ("rpc_ping", lambda: engine.dht_pb2.PingRequest(peer={"node_id": bytes(1 << 20)}), "20 bytes, got 1048576"),
    ],
    ids=["keys", "records", "bytes", "columns", "node id"],
)
def test_a_message_that_is_too_large_is_refused_before_it_is_walked(
    world: HivemindWorld, method: str, request_of: Any, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.p2p import P2PHandlerError

    def walk(*_: Any) -> None:
        raise AssertionError("its content was looked at")

    monkeypatch.setattr(engine.DHTID, "from_bytes", walk)
    monkeypatch.setattr(kademlia.BoundedProtocol.serializer, "loads", walk)
    with pytest.raises(P2PHandlerError, match=refusal):
        ask(world, method, request_of())


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
        assert list(ask(world, "rpc_store", records_of(1, expires_at=until + i)).store_ok) == [True]
    assert list(ask(world, "rpc_store", records_of(1, expires_at=until)).store_ok) == [False]
    held = storage.data[engine.DHTID.from_bytes(ids(1)[0])].value
    assert (len(held.data), len(held.expiration_heap) < 40, len(storage.expiration_heap) < 40) == (1, True, True)


def test_nothing_is_cached_for_others(world: HivemindWorld) -> None:
    assert list(ask(world, "rpc_store", records_of(2, in_cache=[True, True])).store_ok) == [False, False]
    assert not protocol(world.b).cache.data


def test_what_one_peer_stores_is_bounded(world: HivemindWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kademlia, "_MAX_PEER_BYTES", 8 * 1024)
    stranger = world.another(world.b)
    stub = protocol(stranger).get_stub(engine.PeerID.from_base58(world.b.id))
    value = msgpack.packb(bytes(3000))
    stored = [world.run(stub.rpc_store(records_of(1, value, keys=[key]), timeout=10.0)) for key in ids(4)[1:]]
    assert [list(one.store_ok) for one in stored] == [[True], [True], [False]]


def test_who_asks_for_one_record_again_and_again_in_one_message_is_refused(world: HivemindWorld) -> None:
    from hivemind.p2p import P2PHandlerError

    value = msgpack.packb(bytes(60_000))
    assert list(ask(world, "rpc_store", records_of(1, value, subkeys=[msgpack.packb("large")])).store_ok) == [True]
    assert len(ask(world, "rpc_find", engine.dht_pb2.FindRequest(keys=ids(1))).results[0].value) > 60_000
    with pytest.raises(P2PHandlerError, match="bytes are asked for by one message"):
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
        with pytest.raises(Busy, match="32 things a second"):
            rates.charge("a", cost, now_s)
    rates.charge("b", 1.0, 0.0)
    rates.charge("a", kademlia._REQUESTS_PER_S, 1.0)


def test_hivemind_itself_keeps_its_own_protocol(world: HivemindWorld) -> None:
    """Other users of hivemind in this process store what they like."""
    from hivemind.dht import node

    assert isinstance(protocol(world.b), kademlia.BoundedProtocol)
    assert node.DHTProtocol is engine.DHTProtocol is not kademlia.BoundedProtocol
