"""What the DHT may hold, checked before hivemind decodes it."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from lightning_swarm.errors import ProtocolError
from lightning_swarm.network.announcements import MAX_RECORD_BYTES, MAX_RECORD_TTL_S
from lightning_swarm.network.hivemind._engine import (
    DHTRecord,
    DictionaryDHTValue,
    MSGPackSerializer,
    RecordValidatorBase,
)

# A dictionary of records nests five deep.
_MAX_DEPTH: Final = 8
# hivemind's extensions for tuples and for dictionaries, whose bytes it decodes in turn.
_NESTING_EXTENSIONS: Final = (0x40, 0x50)
_MAX_PEER_ID_BYTES: Final = 128
_CLOCK_SKEW_S: Final = 60.0
# msgpack's first bytes: how wide the count is that follows, and what it counts.
_SIZED: Final = {
    **{
        first: (width, "bytes")
        for first, width in zip((0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB), (1, 2, 4) * 2, strict=True)
    },
    **{first: (width, "extension") for first, width in zip((0xC7, 0xC8, 0xC9), (1, 2, 4), strict=True)},
    **{first: (width, "items") for first, width in zip((0xDC, 0xDD), (2, 4), strict=True)},
    **{first: (width, "pairs") for first, width in zip((0xDE, 0xDF), (2, 4), strict=True)},
}
_FIXED_BYTES: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_MAX_PACKED_BYTES: Final = MAX_RECORD_BYTES + 64


class Announcement(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a peer announces.

    Args:
        value: Its bytes.
        expires_at: Unix time. The DHT's own expiry may be later: it keeps whatever lives longest, so one
            that replaces a longer-lived one has to claim to live longer still.
    """

    value: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
    expires_at: float


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Announcement)


def pack(announcement: Announcement) -> bytes:
    """The bytes under which an announcement is stored."""
    return _encoder.encode(announcement)


def unpack(data: object, now_s: float) -> bytes | None:
    """The value of an announcement, or None if it is malformed or has expired."""
    if not isinstance(data, bytes):
        return None
    try:
        announcement = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError):
        return None
    return announcement.value if now_s < announcement.expires_at <= now_s + MAX_RECORD_TTL_S + _CLOCK_SKEW_S else None


class GuardedSerializer(MSGPackSerializer):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's serializer, but what nests deeply is refused: 1 KB of it ends the process that decodes it."""

    @classmethod
    def loads(cls, buf: bytes) -> object:
        """Decode what came from a stranger."""
        check_nesting(buf)
        value = super().loads(buf)
        # hivemind computes with these two, outside of any `try`.
        if isinstance(value, DictionaryDHTValue) and not (
            value.maxsize == math.inf and isinstance(value.latest_expiration_time, float)
        ):
            raise ProtocolError("A dictionary of records is malformed.")
        return value


class PlainRecordsOnly(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Lets nothing into the DHT, or out of it, but short bytes under a peer's name for a bounded time."""

    def validate(self, record: DHTRecord) -> bool:
        """Whether hivemind may store or return a record."""
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


def check_nesting(data: bytes) -> None:
    """Walk over msgpack without decoding it, and without recursion.

    Raises:
        ProtocolError: It nests deeper than any record does, or ends too early.
    """
    regions = [(0, len(data), 0)]
    while regions:
        at, end, depth = regions.pop()
        missing = [math.inf]
        while at < end:
            missing[-1] -= 1
            header = _read_header(data, at)
            at = header.end + header.num_bytes
            if header.num_items:
                missing.append(header.num_items)
            if header.extension in _NESTING_EXTENSIONS:
                regions.append((header.end, at, depth + len(missing)))
            if depth + len(missing) > _MAX_DEPTH or at > end:
                raise ProtocolError("A record nests too deeply, or is cut off.")
            while missing[-1] == 0:
                missing.pop()


class _Header(NamedTuple):
    """Of one msgpack object: where its header ends, and what it says will follow."""

    end: int
    num_bytes: int = 0
    num_items: int = 0
    extension: int | None = None


def _read_header(data: bytes, at: int) -> _Header:
    first = data[at]
    at += 1
    if first in _SIZED:
        width, what = _SIZED[first]
        count = int.from_bytes(data[at : at + width], "big")
        at += width
        if what == "items":
            return _Header(at, num_items=count)
        if what == "pairs":
            return _Header(at, num_items=2 * count)
        if what == "bytes":
            return _Header(at, num_bytes=count)
        return _Header(at + 1, num_bytes=count, extension=int.from_bytes(data[at : at + 1], "big"))
    if 0x80 <= first <= 0x8F:
        return _Header(at, num_items=2 * (first & 0x0F))
    if 0x90 <= first <= 0x9F:
        return _Header(at, num_items=first & 0x0F)
    if 0xA0 <= first <= 0xBF:
        return _Header(at, num_bytes=first & 0x1F)
    if 0xD4 <= first <= 0xD8:
        return _Header(at + 1, num_bytes=1 << (first - 0xD4), extension=int.from_bytes(data[at : at + 1], "big"))
    return _Header(at, num_bytes=_FIXED_BYTES.get(first, 0))
