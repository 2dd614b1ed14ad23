"""The HTTP endpoint's connections under hostile clients: uvicorn with real sockets, and short limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
import uvicorn

from lightning_swarm.serving import http_connections, http_limits, http_server
from lightning_swarm.serving.http_connections import Connection
from lightning_swarm.serving.http_server import TextEndpoint
from lightning_swarm.serving.pieces import TextPiece
from lightning_swarm.serving.texts import ServedText
from tests.unit.serving.endpoint import SMALL, Writer, run, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
STREAM = SMALL.replace(b"}", b', "stream": true}')
MOST = 8  # connections


class Endless(Writer):
    """A text that never ends, in pieces of 64 KiB."""

    async def pieces(self) -> AsyncIterator[TextPiece]:
        while not self.is_aborted:
            yield TextPiece("b" * (64 << 10))


@contextlib.asynccontextmanager
async def endpoint(served: ServedText) -> AsyncGenerator[Peer]:
    app = TextEndpoint([served]).app()
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None, limit_concurrency=MOST)
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.ensure_future(server.serve([listening]))
    await until(lambda: server.started)
    peer = Peer(server, listening.getsockname())
    try:
        yield peer
    finally:
        for writer in peer.writers:
            writer.transport.abort()
        server.should_exit = server.force_exit = True
        await serving


class Peer:
    """Connects to the endpoint from any address of this machine."""

    def __init__(self, server: uvicorn.Server, address: Any) -> None:
        self.server, self._address = server, address
        self.writers: list[asyncio.StreamWriter] = []

    async def connect(self, data: bytes, host: str = "127.0.0.2") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._address, local_addr=(host, 0), limit=1 << 16)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def ask(self, body: bytes = SMALL, host: str = "127.0.0.3") -> bytes:
        """Ask for a text that ends at once; return the answer."""
        number = len(Writer.made)
        head = b"%sconnection: close\r\ncontent-length: %d\r\n\r\n" % (HEAD, len(body))
        reader, _ = await self.connect(head + body, host)
        reading = asyncio.ensure_future(reader.read(-1))
        await until(lambda: len(Writer.made) > number or reading.done())
        for made in Writer.made[number:]:
            made.over.set()
        return await reading

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)


BEGINNINGS = {
    "nothing": b"",
    "half of the headers": HEAD,
    "half of a body": HEAD + b"content-length: 100\r\n\r\n{",
    "chunks that stop": HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n",
}


@pytest.mark.parametrize("host", ["127.0.0.2", "127.0.0.3"])  # the second is the honest client's own
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_stalled_requests_make_room_for_others(beginning: bytes, host: str, served: ServedText) -> None:
    async def attack() -> None:
        async with endpoint(served) as peer:
            stalled = [await peer.connect(beginning, host) for _ in range(3 * MOST)]
            await until(lambda: peer.num_connections < MOST)
            assert b"200 OK" in await peer.ask()
            closed = [asyncio.ensure_future(reader.read()) for reader, _ in stalled]
            await until(lambda: sum(one.done() for one in closed) > 2 * MOST)
            assert peer.num_connections >= MOST // 2  # the rest was left alone

    run(attack())


def test_slow_uploads_of_one_address_do_not_end_those_of_another(served: ServedText) -> None:
    async def attack() -> None:
        async with endpoint(served) as peer:
            reader, writer = await peer.connect(HEAD + b"content-length: %d\r\n\r\n" % len(SMALL), "127.0.0.3")
            for _ in range(3 * MOST):
                await peer.connect(BEGINNINGS["half of a body"])
            await until(lambda: peer.num_connections < MOST)
            writer.write(SMALL)
            await until(lambda: Writer.made)
            Writer.made[0].over.set()
            assert b"200 OK" in await reader.readline()

    run(attack())


@pytest.mark.parametrize("num_bytes", [1, 1000])
def test_a_body_must_make_progress(num_bytes: int, served: ServedText, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drips a body whose parts are too small, or large enough to be waited for."""
    monkeypatch.setattr(http_limits, "_BODY_S", 0.2)
    monkeypatch.setattr(http_limits, "_BODY_BYTES_PER_S", 1000)

    async def attack() -> None:
        async with endpoint(served) as peer:
            body = SMALL + b" " * (num_bytes * 30)
            reader, writer = await peer.connect(HEAD + b"content-length: %d\r\n\r\n" % len(body))
            writer.write(SMALL)
            answer = asyncio.ensure_future(reader.readline())
            for _ in range(30):
                await asyncio.wait([answer], timeout=0.02)
                writer.write(b" " * num_bytes)
            await until(lambda: Writer.made or answer.done())
            for one in Writer.made:
                one.over.set()
            assert (b"408" if num_bytes == 1 else b"200 OK") in await answer

    run(attack())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_loses_its_text(
    stream: bool, served: ServedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "_READ_S", 0.2)
    monkeypatch.setattr(http_connections, "_REQUEST_S", 0.2)

    class Long(Writer):
        async def pieces(self) -> AsyncIterator[TextPiece]:
            await self.over.wait()
            self.on_end()
            yield TextPiece("b" * (16 << 20), "stop")

    monkeypatch.setattr(http_server, "TextWriter", Endless if stream else Long)

    async def attack() -> None:
        async with endpoint(served) as peer:
            body = STREAM if stream else SMALL
            _, writer = await peer.connect(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: Writer.made)
            if not stream:
                Writer.made[0].over.set()
            await until(lambda: not peer.num_connections and Writer.made[0].is_aborted)

    run(attack())


def test_a_client_that_reads_slowly_gets_its_whole_answer(served: ServedText, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads 16 MB in parts, each part in time, and all of them later than any single limit."""
    monkeypatch.setattr(http_connections, "_READ_S", 2.0)
    monkeypatch.setattr(http_connections, "_REQUEST_S", 0.1)

    class Long(Writer):
        async def pieces(self) -> AsyncIterator[TextPiece]:
            self.on_end()
            yield TextPiece("b" * (16 << 20), "stop")

    monkeypatch.setattr(http_server, "TextWriter", Long)

    async def act() -> None:
        async with endpoint(served) as peer:
            reader, _ = await peer.connect(HEAD + b"content-length: %d\r\n\r\n" % len(SMALL) + SMALL)
            parts = []
            for _ in range(12):
                parts.append(await reader.readexactly(1 << 20))
                await asyncio.sleep(0.2)
            while not b"".join(parts[-2:]).endswith(b"}}}"):
                parts.append(await reader.read(1 << 20))
            assert sum(map(len, parts)) > 16 << 20
            await until(lambda: not peer.num_connections)  # and is then closed, for it asks nothing more

    run(act())


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 100_000 + b"\r\n", b"400"),
        (b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", b"400"),
        (
            HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n",
            b"400",
        ),
        (HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcdef", b"400"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n5;" + b"a" * 1_000_000 + b"\r\n", b"400"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n", b"400"),
        (HEAD + b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"content-length: 99999999999999999999999\r\n\r\n", b"4"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),
    ],
)
def test_a_malformed_request_gets_one_answer(request_bytes: bytes, status: bytes, served: ServedText) -> None:
    """No request is smuggled after another one, and none takes more memory than its headers may."""

    async def attack() -> None:
        async with endpoint(served) as peer:
            reader, writer = await peer.connect(request_bytes)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 " + status), answer
            rest = b""
            with contextlib.suppress(OSError):  # it was closed with unread data
                writer.write_eof()
                rest = await reader.read(-1)
            assert b"HTTP/1.1" not in rest
            assert b"200 OK" in await peer.ask()

    run(attack())
