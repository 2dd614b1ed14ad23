"""The encoding of control messages as frozen msgspec structs; nothing is ever unpickled."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Annotated, Final, TypeVar

import msgspec

from lightning_swarm.core.errors import ProtocolError

PROTOCOL_VERSION = 13

Count = Annotated[int, msgspec.Meta(ge=0)]
SmallCount = Annotated[int, msgspec.Meta(ge=0, le=1024)]
NumSamples = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
Seconds = NotNegative
# Addresses of one peer.
Addresses = Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=16)]
_CHALLENGE_BITS: Final = 62
Challenge = Annotated[int, msgspec.Meta(ge=0, lt=1 << _CHALLENGE_BITS)]
MAX_TEXT: Final = 100
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


def draw_challenge() -> int:
    """Draw an unpredictable number, so that no peer can prepare its answer before it is asked."""
    return secrets.randbits(_CHALLENGE_BITS)


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all records in the body of a message."""


_T = TypeVar("_T")


def encode(record: WireMessage) -> bytes:
    """Encode a message."""
    return msgspec.msgpack.encode(record)


def decode(body: bytes, message_type: type[_T]) -> _T:
    """Decode a message of a class; raise `ProtocolError` for unknown or missing fields, and for wrong types."""
    try:
        return msgspec.msgpack.decode(body, type=message_type)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ProtocolError(
            f"a message must hold one {message_type.__name__}, got {len(body)} bytes that do not decode to one: {error}"
        ) from error


def to_bitmap(bits: Iterable[bool]) -> bytes:
    """Pack flags, eight per byte, the first flag in the lowest bit."""
    flags = list(bits)
    packed = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        if flag:
            packed[i // 8] |= 1 << (i % 8)
    return bytes(packed)


def from_bitmap(packed: bytes, length: int) -> list[bool]:
    """Unpack `length` flags; refuse a bitmap of another length."""
    if len(packed) != (length + 7) // 8:
        raise ProtocolError(f"a bitmap of {length} flags must have {(length + 7) // 8} bytes, got {len(packed)}")
    return [bool(packed[i // 8] >> (i % 8) & 1) for i in range(length)]


def union(bitmaps: Iterable[bytes]) -> bytes:
    """Return the flags that any of these bitmaps has. They must have equal lengths."""
    return bytes(reduce(or_, values) for values in zip(*bitmaps, strict=True))
