"""The encoding of a `Message`, and of an error as an answer, for every transport. Nothing is ever pickled."""

from __future__ import annotations

import asyncio
import enum
import math
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32  # the same checksum as the standard library's, ten times as fast

from lightning_swarm.core.errors import Damaged, ProtocolError, SwarmError, from_wire, to_wire
from lightning_swarm.network import MAX_CALL_BYTES, SMALL_BYTES, Message
from lightning_swarm.network.tensors import TensorSpec, check_tensor, from_bytes, parse_spec, spec_of, to_bytes

_HUGE_BYTES: Final = 4 << 20  # larger buffers use huge pages, and a pool reuses them
_ALIGNMENT: Final = 64  # torch's own: some libraries round differently if memory is aligned differently


def new_bytes(n: int) -> Tensor:
    """Make an uninitialised uint8 tensor ``[n]`` on the CPU, aligned as torch aligns."""
    if n < _HUGE_BYTES:
        return torch.empty(n, dtype=torch.uint8)
    # numpy asks Linux for huge pages: touching 40 MB for the first time then takes a quarter of the time.
    return torch.from_numpy(_aligned(np.empty(n + _ALIGNMENT, dtype=np.uint8), n))


class BufferPool:
    """Reuses buffers of recurring sizes once nothing refers to them any more."""

    # Linux clears each page before a process gets it. In a process whose memory has been in use for a while, this takes
    # as long as ten passes over the memory: 0.15 s for 50 MB were measured.
    def __init__(self, num_spare: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes  # bytes of the largest unused buffer that is kept
        # The newest unused buffers. Any thread may use them, because `deque`'s methods are atomic.
        self._spare = deque[npt.NDArray[np.uint8]](maxlen=num_spare)

    def new_bytes(self, n: int) -> Tensor:
        """Like the function `new_bytes`, but reuse memory where possible."""
        if n < _HUGE_BYTES:
            return torch.empty(n, dtype=torch.uint8)
        raw = self._take(n)
        buffer = _aligned(raw, n)
        # The tensor and all its views refer to `buffer`, which is finalized once the last of them is gone.
        weakref.finalize(buffer, self._keep, raw).atexit = False
        return torch.from_numpy(buffer)

    def _take(self, n: int) -> npt.NDArray[np.uint8]:
        """Return an unused buffer of the size for `n` aligned bytes, or a new one."""
        for _ in range(len(self._spare)):
            try:
                raw = self._spare.popleft()
            except IndexError:  # another thread took it
                break
            if len(raw) == n + _ALIGNMENT:
                return raw
            self._spare.append(raw)
        return np.empty(n + _ALIGNMENT, dtype=np.uint8)

    def _keep(self, raw: npt.NDArray[np.uint8]) -> None:
        if len(raw) <= self._max_bytes:
            self._spare.append(raw)


def _aligned(raw: npt.NDArray[np.uint8], n: int) -> npt.NDArray[np.uint8]:
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + n]


Buffer = bytes | memoryview

MAX_METHOD_CHARS: Final = 256
MAX_TENSORS: Final = 16_384
MAX_ERROR_CHARS: Final = 32_768
CHUNK_BYTES: Final = 1 << 20
"""Most payload bytes in one write."""

_MAX_CONTROL_BYTES: Final = MAX_CALL_BYTES + (1 << 20)  # a spec has a few dozen bytes, or hundreds with 64 dimensions
_JOIN_BYTES: Final = 1 << 16  # copying this many bytes is cheaper than one more write
_MAGIC: Final = b"LSWM"
_VERSION: Final = 1
_END: Final = b"LEND"
# A message is a fixed header, then a control part (msgpack: method or name of the error, body or its text, dtype and
# shape per tensor), a payload (the tensors' raw bytes, little endian, without padding), and a trailer: marker, checksum
# of the payload. Lengths are checked before memory is allocated, and a tensor reaches the caller only after the
# trailer, so a malformed or broken message changes nothing. The fixed header:
# magic, version, kind, reserved, exchange id, control bytes, payload bytes, control checksum, the header's checksum.
_FIXED: Final = struct.Struct("<4sBBHQIQI")
_CHECKSUM: Final = struct.Struct("<I")
_TRAILER: Final = struct.Struct("<4sI")
HEADER_BYTES: Final = _FIXED.size + _CHECKSUM.size
TRAILER_BYTES: Final = _TRAILER.size


class Kind(enum.IntEnum):
    """The kinds of messages."""

    CALL = 1
    STREAM = 2
    ANSWER = 3
    ERROR = 4
    CANCEL = 5  # the caller does not wait for the answer any more


_KINDS: Final = {kind.value: kind for kind in Kind}  # faster than `Kind(value)`


class Reader(Protocol):
    """A source of bytes: the part of `asyncio.StreamReader` that is used here, and `fill`."""

    async def readexactly(self, n: int, /) -> bytes:
        """Read exactly `n` bytes, or raise `asyncio.IncompleteReadError`."""
        ...

    async def read(self, n: int, /) -> bytes:
        """Read at least one and at most `n` bytes; none at the end."""
        ...

    async def fill(self, view: memoryview, on_piece: Callable[[memoryview], None], /) -> None:
        """Fill all of `view`, and call `on_piece` with each piece that arrives; else `asyncio.IncompleteReadError`."""
        ...


class _Control(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    method: Annotated[str, msgspec.Meta(max_length=MAX_METHOD_CHARS)]
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_CALL_BYTES)]
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Control)


class FixedHeader(NamedTuple):
    """The fixed header of a message."""

    kind: Kind
    exchange_id: int  # chosen by the caller, repeated by the answer
    control_bytes: int
    payload_bytes: int  # bytes of all tensors
    control_checksum: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole message."""
        return HEADER_BYTES + self.control_bytes + self.payload_bytes + TRAILER_BYTES


class Head(NamedTuple):
    """A message without its tensors, whose memory is not allocated yet."""

    kind: Kind
    exchange_id: int  # chosen by the caller, repeated by the answer
    method: str  # or the name of an error
    body: bytes  # or the text of an error
    specs: tuple[tuple[torch.dtype, tuple[int, ...]], ...]  # dtype and shape of each tensor
    payload_bytes: int  # bytes of all tensors

    def check_size(self, max_bytes: int) -> None:
        """Refuse more than `max_bytes` of tensors, before any memory is allocated for them."""
        if self.payload_bytes > max_bytes:
            raise ProtocolError(
                f"A message of `{self.method}` may have at most {max_bytes} bytes of tensors, got {self.payload_bytes}."
            )

    def error(self) -> SwarmError:
        """Make the error that this message carries."""
        return from_wire(self.method, self.body.decode(errors="replace"))


def encode(kind: Kind, exchange_id: int, method: str, message: Message) -> Iterator[Buffer]:
    """Return the buffers that make up a message, in the order of writing, or refuse a message that cannot be sent."""
    check_outgoing(method, message)
    views = [to_bytes(tensor) for tensor in message.tensors]
    specs = tuple(map(spec_of, message.tensors))
    control = _encoder.encode(_Control(method, message.body, specs))
    _check_control_size(len(control))
    payload_bytes = sum(view.nbytes for view in views)
    fixed = _FIXED.pack(_MAGIC, _VERSION, kind, 0, exchange_id, len(control), payload_bytes, crc32(control))
    head = fixed + _CHECKSUM.pack(crc32(fixed)) + control
    if payload_bytes <= _JOIN_BYTES:
        checksum = 0
        for view in views:
            checksum = crc32(view, checksum)
        return iter((b"".join((head, *views, _TRAILER.pack(_END, checksum))),))
    # The tensors are read when their chunks are written, and must not change until then. Contiguous tensors are not
    # copied, except for 64 KiB at both ends.
    return _buffers(head, views)


def encode_error(exchange_id: int, error: BaseException) -> Iterator[Buffer]:
    """Encode an error as an answer."""
    name, text = to_wire(error)
    return encode(Kind.ERROR, exchange_id, name, Message(text[:MAX_ERROR_CHARS].encode(errors="replace")))


def encode_cancel(exchange_id: int) -> bytes:
    """Encode the message that cancels a request."""
    return b"".join(encode(Kind.CANCEL, exchange_id, "", Message()))


def exchange_id_of(data: bytes) -> int:
    """Return the exchange id of a whole message; 0 if it is shorter than a header."""
    return int(_FIXED.unpack_from(data)[4]) if len(data) >= HEADER_BYTES else 0


def decode(data: bytes, fixed: FixedHeader | None = None) -> Head:
    """Decode a whole small message, except its tensors (see `take_tensors`), of at most `SMALL_BYTES`."""
    # `fixed` is its fixed header, if `parse_small` has read it already.
    if len(data) < HEADER_BYTES:
        raise ProtocolError(f"A message of {len(data)} bytes is shorter than its header ({HEADER_BYTES}).")
    fixed = fixed or parse_small(data)
    if len(data) != fixed.num_bytes:
        raise ProtocolError(f"A message announces {fixed.num_bytes} bytes but has {len(data)}.")
    begin, end = HEADER_BYTES + fixed.control_bytes, len(data) - TRAILER_BYTES
    head = _parse_control(fixed, data[HEADER_BYTES:begin])
    _check_trailer(data[end:], crc32(memoryview(data)[begin:end]))
    return head


def take_tensors(data: bytes, head: Head) -> tuple[Tensor, ...]:
    """Read the tensors of a whole message, whose head `decode` has read, into new memory."""
    offset = len(data) - TRAILER_BYTES - head.payload_bytes
    tensors = []
    for dtype, shape in head.specs:
        num_bytes = math.prod(shape) * dtype.itemsize
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        raw.numpy().data[:] = memoryview(data)[offset : offset + num_bytes]
        tensors.append(from_bytes(raw, dtype, shape))
        offset += num_bytes
    return tuple(tensors)


async def read_fixed_header(reader: Reader) -> FixedHeader:
    """Read the beginning of a message: `read_control` must follow. After an error the stream is unusable."""
    return _parse_fixed_header(await reader.readexactly(HEADER_BYTES))


async def read_control(reader: Reader, fixed: FixedHeader) -> Head:
    """Read the rest of a message, except its tensors: `read_tensors` must follow."""
    return _parse_control(fixed, await reader.readexactly(fixed.control_bytes))


async def read_head(reader: Reader) -> Head:
    """Read a message, except its tensors: `read_tensors` must follow. After an error the stream is unusable."""
    return await read_control(reader, await read_fixed_header(reader))


# Without a lowest rate, a trickle of bytes could keep reserved memory for ever. At 4 KiB/s, thirty share 1 Mb/s.
_MIN_BYTES_PER_S: Final = 4 << 10


async def read_tensors(reader: Reader, head: Head, *, stall_timeout: float | None = None) -> tuple[Tensor, ...]:
    """Read the tensors of `head` into new memory; `TimeoutError` if too few bytes come within `stall_timeout` s."""
    # The caller must have bounded the size by `Head.check_size`, because all memory is allocated at once.
    raw = [new_bytes(math.prod(shape) * dtype.itemsize) for dtype, shape in head.specs]
    loop = asyncio.get_running_loop()
    checksum = num_bytes = 0
    begin_s = loop.time()
    async with asyncio.timeout(stall_timeout) as stall:

        def on_piece(piece: memoryview) -> None:
            nonlocal checksum, num_bytes
            checksum = crc32(piece, checksum)
            num_bytes += len(piece)
            if stall_timeout is not None and not stall.expired():  # an expired timeout cannot be moved
                stall.reschedule(min(loop.time(), begin_s + num_bytes / _MIN_BYTES_PER_S) + stall_timeout)

        for buffer in raw:
            await reader.fill(buffer.numpy().data, on_piece)
        _check_trailer(await reader.readexactly(TRAILER_BYTES), checksum)
    return tuple(from_bytes(buffer, dtype, shape) for buffer, (dtype, shape) in zip(raw, head.specs, strict=True))


def _buffers(head: bytes, views: Sequence[memoryview]) -> Iterator[Buffer]:
    """Cut a large payload into writes, the first with the head, the last with the trailer."""
    # libp2p's daemon makes a packet of each write, so up to 64 KiB at both ends of the payload join head and trailer.
    chunks = [view[begin : begin + CHUNK_BYTES] for view in views for begin in range(0, view.nbytes, CHUNK_BYTES)]
    chunks[:1] = chunks[0][:_JOIN_BYTES], chunks[0][_JOIN_BYTES:]
    chunks[-1:] = chunks[-1][:-_JOIN_BYTES], chunks[-1][-_JOIN_BYTES:]
    first, *middle, last = filter(len, chunks)
    checksum = crc32(first)
    yield b"".join((head, first))
    for chunk in middle:
        checksum = crc32(chunk, checksum)
        yield chunk
    yield b"".join((last, _TRAILER.pack(_END, crc32(last, checksum))))


def check_outgoing(method: str, message: Message) -> None:
    """Refuse a message that cannot be sent."""
    if len(method) > MAX_METHOD_CHARS:
        raise ProtocolError(f"A method's name has at most {MAX_METHOD_CHARS} characters, got {len(method)}.")
    if len(message.body) > MAX_CALL_BYTES:
        raise ProtocolError(
            f"The body of a message of `{method}` may have {MAX_CALL_BYTES} bytes, got {len(message.body)}. "
            "Send larger things as tensors."
        )
    if len(message.tensors) > MAX_TENSORS:
        raise ProtocolError(
            f"A message has at most {MAX_TENSORS} tensors, got {len(message.tensors)}. Concatenate some."
        )
    for tensor in message.tensors:
        check_tensor(tensor)


def parse_small(data: bytes | bytearray) -> FixedHeader:
    """Read the fixed header that `data` begins with; refuse more than `SMALL_BYTES` of tensors."""
    fixed = _parse_fixed_header(bytes(data[:HEADER_BYTES]))
    if fixed.payload_bytes > SMALL_BYTES:
        raise ProtocolError(
            f"A message on the stream of calls may have {SMALL_BYTES} bytes of tensors, got {fixed.payload_bytes}."
        )
    return fixed


def _parse_fixed_header(data: bytes) -> FixedHeader:
    magic, version, kind, reserved, exchange_id, control_bytes, payload_bytes, checksum = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise ProtocolError("The received bytes are not a message of lightning_swarm.")
    if version != _VERSION:
        raise ProtocolError(
            f"This peer speaks version {_VERSION} of the protocol, the other side {version}. Use one release."
        )
    if _CHECKSUM.unpack_from(data, _FIXED.size)[0] != crc32(data[: _FIXED.size]):
        raise Damaged("The header of a message is damaged.")
    message_kind = _KINDS.get(kind)
    if message_kind is None or reserved:
        raise ProtocolError(f"Unknown kind of message: {kind}, {reserved}.")
    _check_control_size(control_bytes)
    return FixedHeader(message_kind, exchange_id, control_bytes, payload_bytes, checksum)


def _check_control_size(num_bytes: int) -> None:
    if num_bytes > _MAX_CONTROL_BYTES:
        raise ProtocolError(f"The control part of a message has at most {_MAX_CONTROL_BYTES} bytes, got {num_bytes}.")


def _parse_control(fixed: FixedHeader, data: bytes) -> Head:
    if crc32(data) != fixed.control_checksum:
        raise Damaged("The control part of a message is damaged.")
    try:
        control = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ProtocolError(f"The control part of a message is malformed: {error}") from error
    specs = tuple(map(parse_spec, control.tensors))
    payload_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in specs)
    if payload_bytes != fixed.payload_bytes:
        raise ProtocolError(
            f"A message has {payload_bytes} bytes of tensors, but its header says {fixed.payload_bytes}."
        )
    return Head(fixed.kind, fixed.exchange_id, control.method, control.body, specs, payload_bytes)


def _check_trailer(data: bytes, checksum: int) -> None:
    end, claimed = _TRAILER.unpack(data)
    if end != _END:
        raise ProtocolError("A message lacks its end marker.")
    if claimed != checksum:
        raise Damaged("The tensors of a message are damaged.")
