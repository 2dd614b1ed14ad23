"""hivemind's Kademlia protocol with limits on requests and on stored records, for each peer and in total."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final

from lightning_swarm.core.errors import Busy, ProtocolError
from lightning_swarm.network.hivemind._engine import (
    DHTID,
    DHTNode,
    DHTProtocol,
    DictionaryDHTValue,
    P2PContext,
    PeerID,
    dht_pb2,
)
from lightning_swarm.network.hivemind.records import GuardedSerializer, latest_expiry

MAX_KEYS: Final = 64  # limit of one request
MAX_REQUEST_BYTES: Final = 256 << 10  # limit of one request's records
_MAX_ANSWER_BYTES: Final = 2 << 20  # hivemind's messages have up to 4 MiB
_MAX_KEY_BYTES: Final = 1 << 20  # limit of the records under one key, which are read together
_MAX_KEYS_IN_ALL: Final = 1024
_MAX_PEER_BYTES: Final = 1 << 20  # limit of the records that one peer stored here, its own or passed on
_MAX_BYTES_IN_ALL: Final = 16 << 20
_RECORD_BYTES: Final = 256  # overhead of a record besides its value
_MAX_NEIGHBOURS: Final = 64  # limit of one answer; hivemind's buckets have 20
_MAX_NODES: Final = 4096  # limit of the routing table
_NODE_ID_BYTES: Final = 20
# Budget of one peer, in small requests. A search asks each peer once or twice. Costly operations count as several.
_REQUESTS_PER_S: Final = 32.0
_BURST: Final = 512.0
_BYTES_PER_REQUEST: Final = 16 << 10
_RECORDS_PER_REQUEST: Final = 8
_NODE_COST: Final = 64.0  # hivemind reads all records for a new node, and may send some
_MAX_CALLERS: Final = 1024
_SWEEP_S: Final = 1.0


@dataclass
class RequestRates:
    """Limits each peer's rate of requests; after a pause, a peer may send a burst."""

    # peer -> (requests left, time of that count)
    _left: dict[Hashable, tuple[float, float]] = field(default_factory=dict)

    def charge(self, peer: Hashable, cost: float, now_s: float) -> None:
        """Charge a peer for a request, or refuse the request with `Busy` and charge nothing."""
        left, at_s = self._left.pop(peer, (_BURST, now_s))
        left = min(_BURST, left + (now_s - at_s) * _REQUESTS_PER_S) - cost
        self._left[peer] = (left if left >= 0 else left + cost), now_s  # a refused request costs nothing
        if len(self._left) > _MAX_CALLERS:  # forget the peer that has been silent for longest
            del self._left[next(iter(self._left))]
        if left < 0:
            raise Busy(
                f"a peer may send this directory {_REQUESTS_PER_S:g} requests a second, on average. Try again later."
            )


@dataclass
class Quotas:
    """Counts the bytes of stored records: by key, by the peer that stored them, and in total."""

    # (key, subkey) -> (peer that stored the record, bytes, time of expiry)
    _records: dict[tuple[Hashable, Hashable], tuple[Hashable, int, float]] = field(default_factory=dict)
    _by_key: Counter[Hashable] = field(default_factory=Counter)
    _by_peer: Counter[Hashable] = field(default_factory=Counter)
    _num_bytes: int = 0
    _swept_s: float = 0.0

    def take(
        self, peer: Hashable, key: Hashable, subkey: Hashable, num_bytes: int, *, expires_at: float, now_s: float
    ) -> bool:
        """Count a record in place of its predecessor. False: there is no room for it, and nothing has changed."""
        num_bytes += _RECORD_BYTES
        former = self._records.get((key, subkey), (None, 0, 0.0))
        if not self._has_room(peer, key, num_bytes, former) and not (
            self._sweep(now_s) and self._has_room(peer, key, num_bytes, former)
        ):
            return False
        self._forget(key, subkey)
        self._records[key, subkey] = peer, num_bytes, expires_at
        self._by_key[key] += num_bytes
        self._by_peer[peer] += num_bytes
        self._num_bytes += num_bytes
        return True

    def num_bytes(self, key: Hashable) -> int:
        """Return the bytes of all records under a key."""
        return self._by_key[key]

    def _has_room(self, peer: Hashable, key: Hashable, num_bytes: int, former: tuple[Hashable, int, float]) -> bool:
        """Return whether there is room for a peer's record under a key in place of the `former` record."""
        former_peer, former_bytes, _ = former
        added_bytes = num_bytes - former_bytes
        added_by_peer = num_bytes - (former_bytes if former_peer == peer else 0)
        return (
            self._by_key[key] + added_bytes <= _MAX_KEY_BYTES
            and self._by_peer[peer] + added_by_peer <= _MAX_PEER_BYTES
            and self._num_bytes + added_bytes <= _MAX_BYTES_IN_ALL
            and (key in self._by_key or len(self._by_key) < _MAX_KEYS_IN_ALL)
        )

    def _sweep(self, now_s: float) -> bool:
        """Forget expired records, unless the last sweep was a moment ago; return whether this sweep was done."""
        if now_s < self._swept_s + _SWEEP_S:
            return False
        self._swept_s = now_s
        expired = [key_and_subkey for key_and_subkey, (_, _, end_s) in self._records.items() if end_s < now_s]
        for key, subkey in expired:
            self._forget(key, subkey)
        return True

    def _forget(self, key: Hashable, subkey: Hashable) -> None:
        peer, num_bytes, _ = self._records.pop((key, subkey), (None, 0, 0.0))
        if num_bytes:
            self._num_bytes -= num_bytes
            for counts, counted in ((self._by_key, key), (self._by_peer, peer)):
                counts[counted] -= num_bytes
                if not counts[counted]:
                    del counts[counted]


class BoundedProtocol(DHTProtocol):  # type: ignore[misc]  # hivemind is untyped
    """Checks the size of each message before its content, and stores no more than `Quotas` allow."""

    serializer = GuardedSerializer
    # hivemind fills these class attributes once, and this class must not share those of `DHTProtocol`.
    _rpc_handlers = None
    _stub_type = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rates = RequestRates()
        self._quotas = Quotas()

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        # hivemind makes a method's name on the wire from the class's name, which differs from `DHTProtocol` here.
        return str(DHTProtocol._get_handle_name(namespace, method_name))

    # ------------------------------------------------------------------ requests of other peers

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        """See `DHTProtocol`."""
        self._charge(context, 1.0)
        _check_node_id(request.peer.node_id)
        return await super().rpc_ping(request, context)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """See `DHTProtocol`."""
        _check_number(len(request.keys), MAX_KEYS, "keys to look for")
        num_bytes = sum(map(self._quotas.num_bytes, map(DHTID.from_bytes, request.keys)))
        _check_number(num_bytes, _MAX_ANSWER_BYTES, "bytes of records to return")
        self._charge(context, len(request.keys) + num_bytes / _BYTES_PER_REQUEST)
        _check_node_id(request.peer.node_id)
        return await super().rpc_find(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """See `DHTProtocol`. Records for the cache are refused."""
        columns = request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache
        for column in columns:
            _check_number(len(column), MAX_KEYS, "records to store")
        num_bytes = sum(map(len, request.values)) + sum(map(len, request.subkeys))
        _check_number(num_bytes, MAX_REQUEST_BYTES, "bytes to store")
        self._charge(context, len(request.keys) + num_bytes / _BYTES_PER_REQUEST)
        _check_node_id(request.peer.node_id)
        if request.peer.node_id:
            node_id = DHTID.from_bytes(request.peer.node_id)
            asyncio.create_task(self.update_routing_table(node_id, context.remote_id))  # noqa: RUF006 - as hivemind does
        stored = [
            not in_cache and self._store(context.remote_id, key, tag, value, expires_at)
            for key, tag, value, expires_at, in_cache in zip(*columns, strict=True)
        ]
        return dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info)

    def _charge(self, context: P2PContext, cost: float) -> None:
        self._rates.charge(context.remote_id, cost, time.time())

    def _store(self, sender: PeerID, key: bytes, tag: bytes, value: bytes, expires_at: float) -> bool:
        """Store one record, or a dictionary of records; return False if any was not stored."""
        # `tag` is the encoded subkey of one record, or hivemind's mark of a dictionary.
        if tag == self.IS_DICTIONARY:
            dictionary = self.serializer.loads(value)
            if not isinstance(dictionary, DictionaryDHTValue):
                return False
            records = [(subkey, *record) for subkey, record in dictionary.data.items()]
        else:
            records = [(self.serializer.loads(tag), value, expires_at)]
        # Charged before any record is verified, because verifying takes time, too.
        self._rates.charge(sender, len(records) / _RECORDS_PER_REQUEST, time.time())
        stored = [self._store_record(sender, key, *record) for record in records]
        return all(stored)

    def _store_record(self, sender: PeerID, key: bytes, subkey: object, value: bytes, expires_at: float) -> bool:
        """Store a record; False if it has expired, is older than the stored record, is invalid, or finds no room."""
        key_id = DHTID.from_bytes(key)
        stored_records = self.storage.get(key_id)
        former = stored_records.value.get(subkey) if stored_records is not None else None
        now_s = time.time()
        if expires_at < now_s or (former is not None and former.expiration_time >= expires_at):
            return False
        if not self._is_valid(key, subkey, value, expires_at):
            return False
        if not self._quotas.take(sender, key_id, subkey, len(value), expires_at=expires_at, now_s=now_s):
            return False
        stored = bool(self.storage.store_subkey(key_id, subkey, value, expires_at))
        _drop_stale_entries(self.storage)
        _drop_stale_entries(self.storage.data[key_id].value)
        return stored

    def _is_valid(self, key: bytes, subkey: object, value: bytes, expires_at: float) -> bool:
        return bool(self._validate_record(key, self.serializer.dumps(subkey), value, expires_at))

    # ------------------------------------------------------------------ the routing table

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """See `DHTProtocol`. A peer has one node id, its newest, and the table is bounded."""
        table = self.routing_table
        former_id = table.get(peer_id=peer_id)
        if responded and node_id is not None and former_id != node_id:
            is_taken = table.get(node_id=node_id) is not None  # another peer has this node id
            if is_taken or (former_id is None and len(table.uid_to_peer_id) >= _MAX_NODES):
                return
            with suppress(Busy):
                self._rates.charge(peer_id, _NODE_COST, time.time())
                if former_id is not None:
                    del table[former_id]
                await super().update_routing_table(node_id, peer_id, responded)
            return
        await super().update_routing_table(node_id, peer_id, responded)

    # ------------------------------------------------------------------ answers of other peers

    async def call_store(self, *arguments: Any, **options: Any) -> list[bool] | None:
        """See `DHTProtocol`. A refusal is treated like no answer, so that hivemind asks another peer."""
        # hivemind uses the last of several answers, so one refusal would hide that other peers have stored the record.
        stored = await super().call_store(*arguments, **options)
        return list(stored) if stored is not None and any(stored) else None

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Remove invalid records from an answer, so that the valid records remain."""
        for subkey, (value, expires_at) in list(dictionary.data.items()):
            if not self._is_valid(key_bytes, subkey, value, expires_at):
                del dictionary[subkey]
        return True

    def get_stub(self, peer: PeerID) -> Any:
        """See `DHTProtocol`."""
        return _CheckedStub(super().get_stub(peer))


class _CheckedStub:
    """Sends requests to a peer, and refuses answers beyond the limits."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def rpc_find(self, request: dht_pb2.FindRequest, timeout: float | None = None) -> dht_pb2.FindResponse:
        response = await self._stub.rpc_find(request, timeout=timeout)
        _check_number(len(response.results), len(request.keys), "answers")
        for result in response.results:
            # An answer that claims to live for ever would end a search before other peers answer.
            result.expiration_time = min(result.expiration_time, latest_expiry(time.time()))
            for ids in (result.nearest_node_ids, result.nearest_peer_ids):
                _check_number(len(ids), _MAX_NEIGHBOURS, "neighbours")
            for node_id in result.nearest_node_ids:
                _check_node_id(node_id)
        return response


def _check_node_id(node_id: bytes) -> None:
    if len(node_id) not in (0, _NODE_ID_BYTES):
        raise ProtocolError(f"a node's id has {_NODE_ID_BYTES} bytes, got {len(node_id)}.")


def _check_number(number: int, most: int, noun: str) -> None:
    if number > most:
        raise ProtocolError(f"a message of the directory may have at most {most} {noun}, got {number}.")


def _drop_stale_entries(storage: Any) -> None:
    """Remove the entries that hivemind's storage leaves in its heap for each replaced record."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 16:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


def _bounded(create: FunctionType) -> FunctionType:
    """Copy a function of hivemind so that it makes a `BoundedProtocol`. hivemind itself stays unchanged."""
    names = {**create.__globals__, DHTProtocol.__name__: BoundedProtocol}
    copy = FunctionType(create.__code__, names, create.__name__, create.__defaults__, create.__closure__)
    copy.__kwdefaults__ = create.__kwdefaults__
    return copy


class BoundedNode(DHTNode):  # type: ignore[misc]  # hivemind is untyped
    """A node whose protocol is a `BoundedProtocol`."""

    create = classmethod(_bounded(DHTNode.create.__func__))
