"""The wire format: messages round-trip, and malformed bytes are refused."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import Busy, ProtocolError, StageError, SwarmError
from lightning_swarm.network import MAX_CALL_BYTES, Message, framing
from lightning_swarm.network.framing import Head, Kind
from lightning_swarm.network.rpc import Feed
from lightning_swarm.network.tensors import DTYPES, MAX_DIMS

_JOINED = framing._JOIN_BYTES
MAX_BYTES = 1 << 20
ALL_DTYPES = list(DTYPES.values())


class BytesReader:
    """Returns bytes, at most `piece` at a time, and counts the bytes read."""

    def __init__(self, data: bytes, piece: int = 1 << 30) -> None:
        self.data = data
        self.piece = piece
        self.at = 0

    async def readexactly(self, n: int, /) -> bytes:
        data = self.data[self.at : self.at + n]
        self.at += len(data)
        if len(data) < n:
            raise asyncio.IncompleteReadError(data, n)
        return data

    async def read(self, n: int, /) -> bytes:
        data = self.data[self.at : self.at + min(n, self.piece)]
        self.at += len(data)
        return data

    async def fill(self, view: memoryview, seen: Callable[[memoryview], None], /) -> None:
        while view:
            if not (data := await self.read(len(view))):
                raise asyncio.IncompleteReadError(b"", len(view))
            view[: len(data)] = data
            seen(view[: len(data)])
            view = view[len(data) :]


Read = Callable[..., tuple[Head, tuple[Tensor, ...]]]


@pytest.fixture
def read() -> Iterator[Read]:
    loop = VirtualLoop()

    def read(data: bytes | BytesReader, max_bytes: int = MAX_BYTES) -> tuple[Head, tuple[Tensor, ...]]:
        reader = data if isinstance(data, BytesReader) else BytesReader(data)

        async def go() -> tuple[Head, tuple[Tensor, ...]]:
            head = await framing.read_head(reader)
            head.check_size(max_bytes)
            return head, await framing.read_tensors(reader, head)

        return loop.run_until_complete(go())

    yield read
    loop.close()


def wire(message: Message, kind: Kind = Kind.STREAM, exchange_id: int = 7, method: str = "m") -> bytes:
    return b"".join(framing.encode(kind, exchange_id, method, message))


def forge(control: Any, payload: bytes = b"", **fields: Any) -> bytes:
    """Return a message with correct checksums and any false claims."""
    raw = control if isinstance(control, bytes) else msgspec.msgpack.encode(control)
    header = {
        "magic": b"LSWM",
        "version": 1,
        "kind": 2,
        "reserved": 0,
        "exchange_id": 7,
        "control_bytes": len(raw),
        "payload_bytes": len(payload),
        "control_checksum": zlib.crc32(raw),
    }
    fixed = framing._FIXED.pack(*(header | fields).values())
    trailer = framing._TRAILER.pack(b"LEND", zlib.crc32(payload))
    return fixed + framing._CHECKSUM.pack(zlib.crc32(fixed)) + raw + payload + trailer


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Return whether the bytes are equal, including NaN payloads and signs of zeros."""
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.empty(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), generator=generator).to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("piece", [1, 7, 1 << 30])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_all_dtypes_and_shapes_come_back_bit_by_bit(read: Read, dtype: torch.dtype, piece: int) -> None:
    tensors = tuple(random_tensor(dtype, shape) for shape in [(), (0,), (3,), (2, 0, 5), (2, 3, 4)])
    head, back = read(BytesReader(wire(Message(b"body", tensors)), piece))
    assert (head.kind, head.exchange_id, head.method, head.body) == (Kind.STREAM, 7, "m", b"body")
    for sent, received in zip(tensors, back, strict=True):
        assert received.dtype is dtype
        assert received.shape == sent.shape
        assert same_bytes(sent, received)


def test_views_are_sent_as_they_look(read: Read) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    complex_base = torch.tensor([1 + 2j, 3 - 4j])
    row_of_a_column = base[1:2, 3]  # contiguous for torch, with the column's stride
    views = (base.t(), base[::2, 1::2], base[:, 3], row_of_a_column, base.expand(2, 4, 6))
    views += (complex_base.conj(), complex_base.conj().imag)
    _, back = read(wire(Message(tensors=views)))
    for sent, received in zip(views, back, strict=True):
        assert torch.equal(sent, received)


def test_a_parameter_arrives_as_a_plain_tensor(read: Read) -> None:
    _, (back,) = read(wire(Message(tensors=(torch.nn.Parameter(torch.ones(2)),))))
    assert type(back) is Tensor
    assert not back.requires_grad


def test_large_tensors_are_not_copied_to_be_sent() -> None:
    tensor = torch.zeros(framing.CHUNK_BYTES * 3 // 2, dtype=torch.uint8)
    _, *chunks, _ = framing.encode(Kind.STREAM, 1, "m", Message(tensors=(tensor,)))
    assert [len(chunk) for chunk in chunks] == [framing.CHUNK_BYTES - _JOINED, framing.CHUNK_BYTES // 2 - _JOINED]
    tensor.fill_(5)
    assert bytes(chunks[1])[:3] == b"\5\5\5"


@pytest.mark.parametrize(
    "sizes",
    [
        (_JOINED,),
        (_JOINED + 1,),
        (2 * _JOINED,),
        (2 * _JOINED + 1,),
        (framing.CHUNK_BYTES,),
        (framing.CHUNK_BYTES + 1,),
        (framing.CHUNK_BYTES + _JOINED,),
        (framing.CHUNK_BYTES, 1),
        (0, _JOINED + 1, 0),
        (1, _JOINED),
        (_JOINED, 1),
        (_JOINED, _JOINED),
        (1,) * 10 + (_JOINED,) + (0,) + (1,) * 10,
    ],
    ids=str,
)
def test_head_and_end_go_with_tensors_of_whatever_sizes(read: Read, sizes: tuple[int, ...]) -> None:
    tensors = tuple(random_tensor(torch.uint8, (size,)) for size in sizes)
    buffers = list(framing.encode(Kind.STREAM, 7, "m", Message(b"body", tensors)))
    assert all(0 < len(buffer) <= framing.CHUNK_BYTES for buffer in buffers)
    assert len(buffers[0]) > framing.HEADER_BYTES + len(b"body")
    assert len(buffers[-1]) > framing.TRAILER_BYTES
    _, back = read(b"".join(buffers), sum(sizes))
    assert all(same_bytes(sent, received) for sent, received in zip(tensors, back, strict=True))


def test_errors_come_back_by_name() -> None:
    for error in (Busy("later"), StageError("traceback"), ProtocolError("no")):
        head = framing.decode(b"".join(framing.encode_error(3, error)))
        assert type(head.error()) is type(error)
        assert str(head.error()) == str(error)
    head = framing.decode(b"".join(framing.encode_error(3, KeyError("bug"))))
    assert type(head.error()) is SwarmError
    assert "KeyError" in str(head.error())


def test_an_endless_error_text_is_cut() -> None:
    head = framing.decode(b"".join(framing.encode_error(3, Busy("é" * 10_000_000))))
    assert len(str(head.error())) == framing.MAX_ERROR_CHARS


def test_every_truncation_is_noticed(read: Read) -> None:
    data = wire(Message(b"body", (torch.arange(3), torch.tensor(True))))
    for length in range(len(data)):
        with pytest.raises(asyncio.IncompleteReadError):
            read(data[:length])
    call = wire(Message(b"body"), Kind.CALL)
    for length in range(len(call)):
        with pytest.raises(ProtocolError):
            framing.decode(call[:length])
    with pytest.raises(ProtocolError):
        framing.decode(call + b"\0")


def test_every_flipped_bit_is_noticed(read: Read) -> None:
    data = wire(Message(b"body", (torch.arange(3), torch.tensor(True), torch.zeros(0))))
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            read(bytes(damaged))


def test_every_flipped_bit_of_a_call_is_noticed() -> None:
    data = wire(Message(b"body"), Kind.CALL)
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            framing.decode(bytes(damaged))


def test_the_forger_of_these_tests_knows_the_format(read: Read) -> None:
    head, (tensor,) = read(forge(["m", b"b", [["int8", [2]]]], b"\1\2"))
    assert head.body == b"b"
    assert tensor.tolist() == [1, 2]


@pytest.mark.parametrize(
    "fields",
    [
        {"magic": b"HTTP"},
        {"version": 2},
        {"kind": 0},
        {"kind": 6},
        {"reserved": 1},
        {"control_checksum": 0},
        {"payload_bytes": 1},
        {"payload_bytes": (1 << 64) - 1},
        {"control_bytes": (1 << 32) - 1},
        {"control_bytes": framing._MAX_CONTROL_BYTES + 1},
    ],
    ids=str,
)
def test_impossible_headers(read: Read, fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        read(forge(["m", b"", []], **fields))


def test_an_absurd_control_part_is_not_even_read(read: Read) -> None:
    reader = BytesReader(forge(b"x" * 100, control_bytes=(1 << 32) - 1))
    with pytest.raises(ProtocolError):
        read(reader)
    assert reader.at == framing.HEADER_BYTES


def deep(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


@pytest.mark.parametrize(
    "control",
    [
        b"",
        b"\xc1",
        deep(100_000),
        {"method": "m"},
        [],
        ["m", b""],
        ["m", b"", [], 0],
        [b"m", b"", []],
        ["m", "text", []],
        ["m" * (framing.MAX_METHOD_CHARS + 1), b"", []],
        ["m", b"x" * (MAX_CALL_BYTES + 1), []],
        ["m", b"", [["int8", [0]]] * (framing.MAX_TENSORS + 1)],
        ["m", b"", [["int8"]]],
        ["m", b"", [["object", []]]],
        ["m", b"", [["complex32", [0]]]],
        ["m", b"", [["Tensor", [0]]]],
        ["m", b"", [["int8", [-1]]]],
        ["m", b"", [["int8", [0.0]]]],
        ["m", b"", [["int8", [True]]]],
        ["m", b"", [["int8", [0] * (MAX_DIMS + 1)]]],
        ["m", b"", [["int8", [0, 1 << 62]]]],
        ["m", b"", [["int8", [0, 1 << 31, 1 << 32]]]],
    ],
    ids=lambda control: repr(control)[:40],
)
def test_malformed_control_parts(read: Read, control: Any) -> None:
    with pytest.raises(ProtocolError):
        read(forge(control))


def test_bad_utf8_is_a_protocol_error(read: Read) -> None:
    with pytest.raises(ProtocolError):
        read(forge(b"\x93\xa1\xff\xc4\x00\x90"))


def test_too_many_bytes_are_refused_before_memory_is_taken(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "new_bytes", lambda _: pytest.fail("memory was allocated"))
    data = forge(["m", b"", [["float64", [1 << 40]]]], payload_bytes=1 << 43)
    with pytest.raises(ProtocolError, match="at most 1000"):
        read(data, max_bytes=1000)


def test_a_bool_is_zero_or_one(read: Read) -> None:
    with pytest.raises(ProtocolError, match="bool"):
        read(forge(["m", b"", [["bool", [2]]]], b"\1\2"))


def test_a_message_that_stalls_is_given_up() -> None:
    loop = VirtualLoop()

    async def go() -> None:
        reader = Feed()
        reader.feed_data(wire(Message(tensors=(torch.zeros(100),)))[:-50])
        head = await framing.read_head(reader)
        with pytest.raises(TimeoutError):
            await framing.read_tensors(reader, head, stall_timeout=3.0)

    loop.run_until_complete(go())
    assert loop.time() == 3.0
    loop.close()


def test_a_message_that_goes_on_a_moment_too_late_is_given_up() -> None:
    loop = VirtualLoop()

    class Late(BytesReader):
        async def fill(self, view: memoryview, seen: Callable[[memoryview], None], /) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                seen(view[:1])  # the socket is still read after the deadline

    async def go() -> None:
        reader = Late(wire(Message(tensors=(torch.zeros(100),))))
        head = await framing.read_head(reader)
        with pytest.raises(TimeoutError):
            await framing.read_tensors(reader, head, stall_timeout=3.0)

    loop.run_until_complete(go())
    assert loop.time() == 3.0
    loop.close()


def test_a_message_that_trickles_in_is_read() -> None:
    loop = VirtualLoop()

    async def go() -> None:
        reader = Feed()
        data = wire(Message(tensors=(torch.ones(100_000),)))

        async def trickle() -> None:
            for at in range(0, len(data), 50_000):
                await asyncio.sleep(2.0)
                reader.feed_data(data[at : at + 50_000])

        async with asyncio.TaskGroup() as group:
            group.create_task(trickle())
            head = await framing.read_head(reader)
            (tensor,) = await framing.read_tensors(reader, head, stall_timeout=3.0)
        assert torch.equal(tensor, torch.ones(100_000))

    loop.run_until_complete(go())
    assert loop.time() > 10.0
    loop.close()


@pytest.mark.parametrize(
    "message",
    [
        Message(b"x" * (MAX_CALL_BYTES + 1)),
        Message(tensors=(torch.zeros(2, device="meta"),)),
        Message(tensors=(torch.zeros(2, 2).to_sparse(),)),
        Message(tensors=(torch.zeros(2, dtype=torch.float8_e4m3fn),)),
        Message(tensors=(torch.zeros([1] * (MAX_DIMS + 1)),)),
        Message(tensors=(torch.zeros(0),) * (framing.MAX_TENSORS + 1)),
    ],
    ids=["body", "meta", "sparse", "float8", "dims", "tensors"],
)
def test_what_cannot_travel_is_refused_at_once(message: Message) -> None:
    with pytest.raises(ProtocolError):
        framing.encode(Kind.STREAM, 1, "m", message)


def test_the_largest_body_fits() -> None:
    body = bytes(MAX_CALL_BYTES)
    assert framing.decode(wire(Message(body), Kind.CALL)).body == body
