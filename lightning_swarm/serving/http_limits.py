"""Limits of the HTTP endpoint, so that one client can neither exhaust its memory nor keep all other clients waiting."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Protocol, TypeVar

from lightning_swarm.serving.http_fields import MAX_TEXTS, RequestError

MAX_BODY_BYTES: Final = 4 << 20
_BODY_S: Final = 30.0  # seconds within which a body must arrive
_SMALL_BODY_BYTES: Final = 64 << 10
_SMALL_TEXT_TOKENS: Final = 512
_MAX_BODY_BYTES_IN_ALL: Final = 64 << 20
_MAX_TEXTS_IN_ALL: Final = 64
_GRAMMAR_S: Final = 30.0  # seconds within which a grammar must be compiled

_T = TypeVar("_T")


class _Grow(Protocol):
    def __call__(self, amount: int, *, is_small: bool) -> None: ...


class Budget:
    """A number of bytes, or of texts, that requests share. A quarter of the number is kept for small requests."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._used = self._used_by_large = 0

    @contextmanager
    def share(self) -> Iterator[_Grow]:
        """Hold a share until the context ends. The yielded function enlarges it, or raises RequestError.

        A large amount may not use the last quarter.
        """
        total = large = 0

        def grow(amount: int, *, is_small: bool) -> None:
            nonlocal total, large
            in_large = 0 if is_small else amount
            if self._used + amount > self._total or self._used_by_large + in_large > self._total * 3 // 4:
                raise RequestError(
                    429, f"this endpoint has {self._total} {self._what} at once, and is busy. Try again later"
                )
            total, large = total + amount, large + in_large
            self._used, self._used_by_large = self._used + amount, self._used_by_large + in_large

        try:
            yield grow
        finally:
            self._used, self._used_by_large = self._used - total, self._used_by_large - large


class RequestLimits:
    """Admits requests by the bytes of their bodies, and by the number and length of the texts that they ask for."""

    def __init__(self) -> None:
        self._bodies = Budget(_MAX_BODY_BYTES_IN_ALL, "bytes of requests")
        self._texts = Budget(_MAX_TEXTS_IN_ALL, "texts")
        self._of_clients: dict[str, int] = {}  # client's address -> number of texts
        # Tokenizing a long prompt takes seconds. On the common threads it would delay all short prompts.
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
        self._grammars = ThreadPoolExecutor(2, thread_name_prefix="grammars")

    @asynccontextmanager
    async def body(self, request: Any) -> AsyncIterator[bytes]:
        """Read a request's JSON body; its memory counts until the context ends."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another origin can send other types without a preflight request
            raise RequestError(415, f"a request's Content-Type must be application/json, got {kind!r}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise RequestError(413, f"a request has at most {MAX_BODY_BYTES} bytes, got {declared}")
        with self._bodies.share() as grow:
            try:
                async with asyncio.timeout(_BODY_S):
                    content = await self._read(request, grow)
            except TimeoutError as error:
                raise RequestError(408, f"a request must arrive within {_BODY_S:g} s") from error
            yield content

    async def _read(self, request: Any, grow: _Grow) -> bytes:
        body = bytearray()
        async for part in request.stream():
            if len(body) + len(part) > MAX_BODY_BYTES:
                raise RequestError(413, f"a request has at most {MAX_BODY_BYTES} bytes")
            grow(len(part), is_small=len(body) + len(part) <= _SMALL_BODY_BYTES)
            body += part
        return bytes(body)

    async def tokenized(self, tokenize: Callable[[], _T], num_bytes: int) -> _T:
        """Run a tokenizer on a thread. Long prompts take turns, so that they do not delay short prompts."""
        pool = None if num_bytes <= _SMALL_BODY_BYTES else self._long_prompts
        return await asyncio.get_running_loop().run_in_executor(pool, tokenize)

    async def compiled(self, compile_grammar: Callable[[], _T]) -> _T:
        """Compile a grammar on a thread. A few are compiled at once; the others wait, but not for long."""
        try:
            async with asyncio.timeout(_GRAMMAR_S):
                return await asyncio.get_running_loop().run_in_executor(self._grammars, compile_grammar)
        except TimeoutError as error:
            raise RequestError(429, "this endpoint is busy with other grammars. Try again later") from error

    @contextmanager
    def text(self, num_tokens: int, client: str) -> Iterator[None]:
        """Hold a slot for a text of at most `num_tokens` new tokens while it is written for the client."""
        num_own = self._of_clients.get(client, 0)
        # Requests without an address have an empty `client`, and share no limit.
        if client and num_own >= MAX_TEXTS:
            raise RequestError(429, f"one client has at most {MAX_TEXTS} texts at once. Try again later")
        with self._texts.share() as grow:
            grow(1, is_small=num_tokens <= _SMALL_TEXT_TOKENS)
            self._of_clients[client] = num_own + 1
            try:
                yield
            finally:
                self._of_clients[client] -= 1
                if not self._of_clients[client]:
                    del self._of_clients[client]


def names_of(host: str, also: Sequence[str]) -> list[str]:
    """Return the host names that requests to an endpoint at `host` may have; `["*"]` allows all names.

    Names are checked only if `host` is local, so `also`, which adds further names, has no effect for any other host.
    A web page can make its own host name resolve to 127.0.0.1, and so read from an endpoint of the user's machine.
    Such requests are refused because they name the page's host.
    """
    return ["localhost", "127.0.0.1", "[::1]", host, *also] if is_local(host) else ["*"]


def is_local(host: str) -> bool:
    """Return whether a host's name or address means this machine alone."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # the server will report it
        return False
    addresses = [ipaddress.ip_address(socket_address[0]) for *_, socket_address in found]
    return all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in addresses)
