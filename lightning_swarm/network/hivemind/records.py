"""The records of the directory: their encoding, their signatures by the announcing peers, and their validation."""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Annotated, Final

import msgspec

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import MAX_RECORD_BYTES, MAX_RECORD_TTL_S, PeerId
from lightning_swarm.network.hivemind._engine import (
    DHTID,
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RecordValidatorBase,
)
from lightning_swarm.network.identity import Identity, is_rsa, is_signed

_log = logging.getLogger(__name__)

_DOMAIN: Final = b"lightning_swarm/announcement/1"
_SIGNATURE_BYTES: Final = 64
_MAX_PEER_ID_BYTES: Final = 128
_CLOCK_SKEW_S: Final = 60.0
# First bytes of msgpack objects.
_BYTES: Final = frozenset({0xC4, 0xC5, 0xC6})
_EXTENSIONS: Final = frozenset({0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)})
_DICTIONARY: Final = 0x50  # hivemind's extension for the records under one key
_MAX_RECORDS: Final = 4096  # under one key
_MAX_PACKED_BYTES: Final = MAX_RECORD_BYTES + 128
_MAX_VERIFIED: Final = 8192


class Announcement(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A peer's announcement, as it is stored in the DHT."""

    value: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
    # Unix time. The DHT's own expiry may be later: the DHT keeps the record that lives longest, so a replacement must
    # claim to outlive its predecessor.
    expires_at: float
    # The announcing peer signs the key, its own id, the DHT's expiry, and the two fields above. So no other peer can
    # store the record under another id or key, or for longer, in place of a newer one. Empty if the peer has an RSA
    # key, which cannot sign.
    signature: Annotated[bytes, msgspec.Meta(max_length=_SIGNATURE_BYTES)] = b""


_decoder = msgspec.msgpack.Decoder(Announcement)


def pack(identity: Identity, key: DHTID, value: bytes, *, expires_at: float, stored_until: float) -> bytes:
    """Encode an announcement of the peer with this identity, signed if its key can sign."""
    if not identity.can_sign:
        return msgspec.msgpack.encode(Announcement(value, expires_at))
    signed = _signed(key.to_bytes(), identity.peer_id, stored_until, Announcement(value, expires_at))
    return msgspec.msgpack.encode(Announcement(value, expires_at, identity.sign(_DOMAIN, signed)))


def _signed(key: bytes, peer: str, stored_until: float, announcement: Announcement) -> bytes:
    return msgspec.msgpack.encode((key, peer, stored_until, announcement.expires_at, announcement.value))


def unpack(data: object, now_s: float) -> bytes | None:
    """Return the value of an encoded announcement, or None if it is malformed or has expired."""
    if not isinstance(data, bytes):
        return None
    try:
        announcement = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return announcement.value if now_s < announcement.expires_at <= latest_expiry(now_s) else None


def latest_expiry(now_s: float) -> float:
    """Return the latest Unix time at which a record that is valid now may expire."""
    return now_s + MAX_RECORD_TTL_S + _CLOCK_SKEW_S


_ShortBytes = Annotated[bytes, msgspec.Meta(max_length=_MAX_PACKED_BYTES)]
_ShortText = Annotated[str, msgspec.Meta(max_length=_MAX_PEER_ID_BYTES)]
_Records = Annotated[list[tuple[_ShortText, _ShortBytes, float]], msgspec.Meta(max_length=_MAX_RECORDS)]
_bytes_decoder = msgspec.msgpack.Decoder(_ShortBytes)
_text_decoder = msgspec.msgpack.Decoder(_ShortText)
_extension_decoder = msgspec.msgpack.Decoder(msgspec.msgpack.Ext)
_dictionary_decoder = msgspec.msgpack.Decoder(tuple[float, float, _Records])  # two bounds, which are ignored


class GuardedSerializer(MSGPackSerializer):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's serializer, restricted to the directory's data: names, bytes, and dictionaries of records."""

    # hivemind decodes any data: 1 KB of nested msgpack would end the process, and 4 MB of empty values block its loop.
    @classmethod
    def loads(cls, buf: bytes) -> object:
        """Decode untrusted bytes."""
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
    with DictionaryDHTValue().freeze() as dictionary:
        for subkey, value, expires_at in _dictionary_decoder.decode(packed.data)[2]:
            dictionary.store(subkey, value, expires_at)
        return dictionary


class OwnRecordsOnly(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Accepts, when storing and when reading, only records that a peer announced as its own for a bounded time."""

    def __init__(self, *, is_local: bool) -> None:
        # If no other machine reaches this peer, unsigned records of peers with RSA keys are accepted.
        self._is_local = is_local
        # Digests of verified records, the latest last: a read returns the same records from several peers.
        self._verified: dict[bytes, None] = {}
        self.num_refused = 0

    def validate(self, record: DHTRecord) -> bool:
        """Return whether hivemind may store or return a record."""
        if self._is_own(record):
            return True
        self.num_refused += 1
        if self.num_refused & (self.num_refused - 1) == 0:  # logged at powers of two only
            _log.warning(
                "Ignored %d records of the directory so far, because the peers that they name did not sign them. "
                "Either these peers run an older version, which does not sign, or another peer pretends to be them.",
                self.num_refused,
            )
        return False

    def _is_own(self, record: DHTRecord) -> bool:
        """Return whether the peer under whose id a record is stored has announced it, for a bounded time."""
        try:
            peer = PeerId(_text_decoder.decode(record.subkey))
            announcement = _decoder.decode(_bytes_decoder.decode(record.value))
        except (msgspec.MsgspecError, UnicodeError):
            return False
        stored_until = record.expiration_time
        if not (isinstance(stored_until, float) and stored_until <= latest_expiry(time.time())):
            return False
        if not announcement.signature:
            return self._is_local and is_rsa(peer)
        return self._is_signed(peer, _signed(record.key, peer, stored_until, announcement), announcement.signature)

    def _is_signed(self, peer: PeerId, signed: bytes, signature: bytes) -> bool:
        digest = hashlib.sha256(signed + signature).digest()
        if digest in self._verified:
            return True
        if not is_signed(peer, _DOMAIN, signed, signature):
            return False
        self._verified[digest] = None
        if len(self._verified) > _MAX_VERIFIED:
            del self._verified[next(iter(self._verified))]
        return True
