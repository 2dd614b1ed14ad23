"""Limits of the HTTP endpoint: no client can exhaust its memory, or block its thread pools for other clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakValueDictionary

from lightning_swarm.serving.http_access import client_of
from lightning_swarm.serving.http_fields import RequestError

MAX_BODY_BYTES: Final = 4 << 20
# A body must arrive within `_BODY_S` seconds. Each `_BODY_BYTES_PER_S` bytes that have arrived add one second.
_BODY_S, _BODY_BYTES_PER_S = 10.0, 64 << 10
_SMALL_BODY_BYTES: Final = 64 << 10
_MAX_TOTAL_BYTES: Final = 64 << 20
_GRAMMAR_S: Final = 30.0  # seconds within which a grammar must be compiled

_T = TypeVar("_T")


class _Grow(Protocol):
    def __call__(self, amount: int, *, is_small: bool) -> None: ...


class Budget:
    """Bytes of memory that requests share. A quarter of them is reserved for small requests."""

    def __init__(self, total: int) -> None:
        self._total, self._max_large = total, total * 3 // 4
        self._used = 0
        self._large = Counter[str]()  # client -> bytes of its large amounts

    @contextmanager
    def share(self, client: str) -> Iterator[_Grow]:
        """Hold a share within the context. The yielded function enlarges it, or raises RequestError.

        Large amounts may use three quarters of the bytes. A client's may use at most half of the part of these three
        quarters that other clients' large amounts leave. Only the first bound holds for an unknown client, `""`.
        """
        total = large = 0

        def grow(amount: int, *, is_small: bool) -> None:
            nonlocal total, large
            large_amount = 0 if is_small else amount
            left = self._max_large - (self._large.total() - self._large[client])  # by other clients
            is_too_large = large_amount > 0 and self._large[client] + large_amount > (left // 2 if client else left)
            if self._used + amount > self._total or is_too_large:
                text = f"this endpoint is busy, and holds at most {self._total} bytes of requests. Try again later"
                raise RequestError(429, text)
            total, large = total + amount, large + large_amount
            self._used += amount
            self._large[client] += large_amount

        try:
            yield grow
        finally:
            self._used -= total
            self._large -= Counter({client: large})  # removes clients whose count is 0


class RequestLimits:
    """Reads the bodies of requests, and prepares their prompts and grammars, within bounds."""

    def __init__(self) -> None:
        self._bodies = Budget(_MAX_TOTAL_BYTES)
        # Tokenizing a long prompt takes seconds. On the common threads it would delay all short prompts.
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
        self._grammars = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        # A client enters a pool with one task at a time, so that its tasks cannot fill the pool's queue.
        self._locks = WeakValueDictionary[tuple[object, object], asyncio.Lock]()

    async def body(self, request: Any, resources: ExitStack) -> bytes:
        """Read a request's JSON body; its bytes count until `resources` is closed."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers let pages of other sites send other types without a preflight request.
        if content_type != "application/json":
            raise RequestError(415, f"a request's Content-Type must be application/json, got {content_type!r}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise RequestError(413, f"a request must have at most {MAX_BODY_BYTES} bytes, got {declared}")
        try:
            async with asyncio.timeout(_BODY_S) as limit:
                return await self._read(request, resources.enter_context(self._bodies.share(client_of(request))), limit)
        except TimeoutError as error:
            text = f"a request must arrive within {_BODY_S:g} s, plus 1 s for each {_BODY_BYTES_PER_S} bytes"
            raise RequestError(408, text) from error

    async def _read(self, request: Any, grow: _Grow, limit: asyncio.Timeout) -> bytes:
        body, begin_s, extra_s = bytearray(), asyncio.get_running_loop().time(), 0
        async for part in request.stream():
            if len(body) + len(part) > MAX_BODY_BYTES:
                raise RequestError(413, f"a request must have at most {MAX_BODY_BYTES} bytes")
            grow(len(part), is_small=len(body) + len(part) <= _SMALL_BODY_BYTES)
            body += part
            if len(body) // _BODY_BYTES_PER_S > extra_s:
                extra_s = len(body) // _BODY_BYTES_PER_S
                limit.reschedule(begin_s + _BODY_S + extra_s)
        return bytes(body)

    async def tokenized(self, client: str, tokenize: Callable[[], _T], num_bytes: int) -> _T:
        """Run a tokenizer on a thread. Long prompts take turns, so that they do not delay short prompts."""
        loop = asyncio.get_running_loop()
        if num_bytes <= _SMALL_BODY_BYTES:
            return await loop.run_in_executor(None, tokenize)
        async with self._lock(client, self._long_prompts):
            return await loop.run_in_executor(self._long_prompts, tokenize)

    async def compiled(self, client: str, compile_grammar: Callable[[], _T]) -> _T:
        """Compile a grammar on one of a few threads, within `_GRAMMAR_S` seconds."""
        try:
            async with asyncio.timeout(_GRAMMAR_S), self._lock(client, self._grammars):
                return await asyncio.get_running_loop().run_in_executor(self._grammars, compile_grammar)
        except TimeoutError as error:
            raise RequestError(429, "this endpoint is busy with other grammars. Try again later") from error

    def _lock(self, client: str, pool: object) -> asyncio.Lock:
        return self._locks.setdefault((client or object(), pool), asyncio.Lock())  # unknown clients share none
