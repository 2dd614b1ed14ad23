"""`HivemindDirectory`: announcements in a Kademlia DHT."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, Final

import msgspec

from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError, Unreachable
from lightning_swarm.network import MAX_RECORD_BYTES, MAX_RECORD_TTL_S, Directory, PeerId, check_record
from lightning_swarm.network.hivemind._engine import (
    DHTID,
    P2P,
    DHTNode,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RecordValidatorBase,
    ValidationError,
)
from lightning_swarm.network.hivemind.kademlia import BoundedNode, BoundedProtocol
from lightning_swarm.network.transport import BaseTransport

_MAX_PEER_ID_BYTES: Final = 128
_CLOCK_SKEW_S: Final = 60.0
# First bytes of msgpack objects.
_BYTES: Final = frozenset({0xC4, 0xC5, 0xC6})
_EXTENSIONS: Final = frozenset({0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)})
_DICTIONARY: Final = 0x50  # hivemind's extension for the records under one key
_MAX_RECORDS: Final = 4096  # under one key
_MAX_PACKED_BYTES: Final = MAX_RECORD_BYTES + 64


class Announcement(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A peer's announcement, as it is stored in the DHT."""

    value: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
    # Unix time. The DHT's own expiry may be later: the DHT keeps the record that lives longest, so a record that
    # replaces a longer-lived one has to claim to live longer still.
    expires_at: float


_decoder = msgspec.msgpack.Decoder(Announcement)


def unpack(data: object, now_s: float) -> bytes | None:
    """Return the value of an encoded announcement, or None if it is malformed or has expired."""
    if not isinstance(data, bytes):
        return None
    try:
        announcement = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return announcement.value if now_s < announcement.expires_at <= now_s + MAX_RECORD_TTL_S + _CLOCK_SKEW_S else None


_ShortBytes = Annotated[bytes, msgspec.Meta(max_length=_MAX_PACKED_BYTES)]
_ShortText = Annotated[str, msgspec.Meta(max_length=_MAX_PEER_ID_BYTES)]
_Records = Annotated[list[tuple[_ShortText, _ShortBytes, float]], msgspec.Meta(max_length=_MAX_RECORDS)]
_bytes_decoder = msgspec.msgpack.Decoder(_ShortBytes)
_text_decoder = msgspec.msgpack.Decoder(_ShortText)
_extension_decoder = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_dictionary_decoder = msgspec.msgpack.Decoder(tuple[float, float, _Records])  # two bounds, of which none is believed


class GuardedSerializer(MSGPackSerializer):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's serializer, for what the directory has: names, bytes, and dictionaries of records."""

    # hivemind decodes whatever comes: 1 KB of nested msgpack would end the process, and 4 MB of nothing block its loop.
    @classmethod
    def loads(cls, buf: bytes) -> object:
        """Decode bytes that came from a stranger."""
        first = buf[0] if buf else None
        try:
            if first in _EXTENSIONS:
                return _to_dictionary(_extension_decoder.decode(buf))
            return (_bytes_decoder if first in _BYTES else _text_decoder).decode(buf)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ProtocolError(f"A record of the directory is malformed: {error}.") from error


def _to_dictionary(packed: msgspec.msgpack.Ext) -> DictionaryDHTValue:
    if packed.code != _DICTIONARY:
        raise ProtocolError(f"A dictionary of records is an extension of the kind {_DICTIONARY}, got {packed.code}.")
    with DictionaryDHTValue().freeze() as found:
        for subkey, value, expires_at in _dictionary_decoder.decode(packed.data)[2]:
            found.store(subkey, value, expires_at)
        return found


class PlainRecordsOnly(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Lets only short bytes, under a peer's name and for a bounded time, into the DHT and out of it."""

    def validate(self, record: DHTRecord) -> bool:
        """Return whether hivemind may store or return a record."""
        return (
            _is_short_text(record.subkey)
            and _is_short_bytes(record.value)
            and isinstance(record.expiration_time, float)
            and record.expiration_time <= time.time() + MAX_RECORD_TTL_S + _CLOCK_SKEW_S
        )


def _is_short_text(packed: Any) -> bool:
    if not isinstance(packed, bytes) or not 1 < len(packed) <= _MAX_PEER_ID_BYTES:
        return False
    if 0xA0 <= packed[0] <= 0xBF:
        return len(packed) == 1 + packed[0] - 0xA0
    return packed[0] == 0xD9 and len(packed) == 2 + packed[1]


def _is_short_bytes(packed: Any) -> bool:
    if not isinstance(packed, bytes) or not 2 <= len(packed) <= _MAX_PACKED_BYTES:
        return False
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(packed[0])
    return width is not None and len(packed) == 1 + width + int.from_bytes(packed[1 : 1 + width], "big")


_TIMEOUT_S: Final = 15.0
_LEAVE_TIMEOUT_S: Final = 1.0
_NEWER_S: Final = 0.001  # hivemind tells records apart by their expiry: a record that ends so much later is newer
_NODE_ID_BITS: Final = 160

# For the class, not for one node: a node serves others before its creation returns.
BoundedProtocol.serializer = GuardedSerializer


class HivemindDirectory(Directory):
    """A peer's directory in a Kademlia DHT, made by `lightning_swarm.network.hivemind.start`."""

    def __init__(self, transport: BaseTransport, node: DHTNode) -> None:
        self._transport = transport
        self._node = node
        self._closed = False
        self._stored_until: dict[str, float] = {}

    @classmethod
    async def join(cls, transport: BaseTransport, p2p: P2P, initial_peers: Sequence[str]) -> HivemindDirectory:
        """Become part of the DHT of `initial_peers`, or begin a new one without any."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                node = await BoundedNode.create(
                    p2p,
                    # hivemind would draw the id from `random`, which `seed_everything` makes equal in all peers.
                    node_id=DHTID(secrets.randbits(_NODE_ID_BITS)),
                    initial_peers=list(initial_peers) or None,
                    record_validator=PlainRecordsOnly(),
                    cache_locally=False,  # peers read the newest records, and keep none for others in a cache
                    cache_on_store=False,
                    cache_nearest=0,
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"The initial peers did not answer within {_TIMEOUT_S:g} s.") from error
        except RuntimeError as error:
            raise Unreachable(f"None of the initial peers answers ({', '.join(initial_peers)}): {error}.") from error
        except ValidationError as error:
            raise Unreachable(
                "Peers must reach each other, and their clocks must agree; the initial peers "
                f"({', '.join(initial_peers)}) say: {' '.join(str(error).split())}. "
                "`lightning-swarm doctor --peer ADDRESS` compares clocks; else open this peer's port in its firewall "
                "and set `listen` to an address that others reach."
            ) from error
        return cls(transport, node)

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """See `Directory`."""
        check_record(key, value, ttl_s)
        self._check_open()
        expires_at = time.time() + ttl_s
        # hivemind keeps the record that lives longest, so a new one must live longest; its real end is inside.
        stored_until = max(expires_at, self._stored_until.get(key, 0.0) + _NEWER_S)
        self._stored_until[key] = stored_until
        record = msgspec.msgpack.encode(Announcement(value, expires_at))
        async with self._deadline(f"announce under {key!r}"):
            knows_others = bool(self._node.protocol.routing_table.uid_to_peer_id)
            if knows_others and not await self._node.store(
                key, record, stored_until, subkey=self._transport.peer_id, exclude_self=True
            ):
                raise Unreachable(f"No other peer stored what {self._transport.peer_id} announced under {key!r}.")
        # Also here, for other peers may leave or not have come yet: a joining peer is given what is stored here.
        self._node.protocol.storage.store(
            DHTID.generate(source=key), GuardedSerializer.dumps(record), stored_until, subkey=self._transport.peer_id
        )

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """See `Directory`. The nearest peers answer with the records that they have now."""
        self._check_open()
        async with self._deadline(f"read {key!r}"):
            found = await self._node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        now_s = time.time()
        values = {peer: unpack(record.value, now_s) for peer, record in found.value.items()}
        return {PeerId(peer): value for peer, value in values.items() if isinstance(peer, str) and value is not None}

    async def close(self) -> None:
        """See `Directory`. Announcements stay until they expire."""
        if self._closed:
            return
        self._closed = True
        self._node.is_alive = False
        if (refreshing := self._node.cache_refresh_task) is not None:
            refreshing.cancel()
        # hivemind's shutdown asks the daemon, and would wait for ever if it is dead.
        if not self._transport.closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._node.shutdown()

    def _check_open(self) -> None:
        if self._closed:
            raise Unreachable("This peer has left the directory.")

    @asynccontextmanager
    async def _deadline(self, purpose: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(f"Could not {purpose} within {_TIMEOUT_S:g} s.") from error
