"""Limits of the HTTP endpoint: no client can exhaust its memory, or block its thread pools for all clients."""

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
# A body must arrive within `_BODY_S` seconds, and a second more for each `_BODY_BYTES_PER_S` bytes that have arrived.
_BODY_S, _BODY_BYTES_PER_S = 10.0, 64 << 10
_SMALL_BODY_BYTES: Final = 64 << 10
_MAX_BODY_BYTES_IN_ALL: Final = 64 << 20
_GRAMMAR_S: Final = 30.0  # seconds within which a grammar must be compiled

_T = TypeVar("_T")


class _Grow(Protocol):
    def __call__(self, amount: int, *, is_small: bool) -> None: ...


class Budget:
    """A number of bytes that requests share. A quarter of the number is kept for small requests."""

    def __init__(self, total: int) -> None:
        self._total, self._most_large = total, total * 3 // 4
        self._used = 0
        self._large = Counter[str]()  # client -> large amounts

    @contextmanager
    def share(self, client: str) -> Iterator[_Grow]:
        """Hold a share until the context ends. The yielded function enlarges it, or raises RequestError.

        Large amounts may not use the last quarter. A client's large amounts may use at most half of the rest that the
        large amounts of other clients leave.
        """
        total = large = 0

        def grow(amount: int, *, is_small: bool) -> None:
            nonlocal total, large
            in_large = 0 if is_small else amount
            left = self._most_large - self._large.total() - in_large
            is_too_large = in_large > 0 and left < (self._large[client] + in_large if client else 0)
            if self._used + amount > self._total or is_too_large:
                text = f"this endpoint has {self._total} bytes of requests at once, and is busy. Try again later"
                raise RequestError(429, text)
            total, large = total + amount, large + in_large
            self._used += amount
            self._large[client] += in_large

        try:
            yield grow
        finally:
            self._used -= total
            self._large -= Counter({client: large})  # removes a client without any


class RequestLimits:
    """Reads the bodies of requests, and prepares their prompts and grammars, within bounds."""

    def __init__(self) -> None:
        self._bodies = Budget(_MAX_BODY_BYTES_IN_ALL)
        # Tokenizing a long prompt takes seconds. On the common threads it would delay all short prompts.
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
        self._grammars = ThreadPoolExecutor(2, thread_name_prefix="grammars")
        # A lock for each client and pool: at most one of a client's long prompts or grammars is in a pool's queue.
        self._turns = WeakValueDictionary[tuple[object, object], asyncio.Lock]()

    async def body(self, request: Any, held: ExitStack) -> bytes:
        """Read a request's JSON body; its memory counts until `held` is closed."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another origin can send other types without a preflight request
            raise RequestError(415, f"a request's Content-Type must be application/json, got {kind!r}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise RequestError(413, f"a request has at most {MAX_BODY_BYTES} bytes, got {declared}")
        try:
            async with asyncio.timeout(_BODY_S) as limit:
                return await self._read(request, held.enter_context(self._bodies.share(client_of(request))), limit)
        except TimeoutError as error:
            text = f"a request must arrive within {_BODY_S:g} s, and {_BODY_BYTES_PER_S} bytes of it in each further s"
            raise RequestError(408, text) from error

    async def _read(self, request: Any, grow: _Grow, limit: asyncio.Timeout) -> bytes:
        body, begin_s, more_s = bytearray(), asyncio.get_running_loop().time(), 0
        async for part in request.stream():
            if len(body) + len(part) > MAX_BODY_BYTES:
                raise RequestError(413, f"a request has at most {MAX_BODY_BYTES} bytes")
            grow(len(part), is_small=len(body) + len(part) <= _SMALL_BODY_BYTES)
            body += part
            if len(body) // _BODY_BYTES_PER_S > more_s:
                more_s = len(body) // _BODY_BYTES_PER_S
                limit.reschedule(begin_s + _BODY_S + more_s)
        return bytes(body)

    async def tokenized(self, client: str, tokenize: Callable[[], _T], num_bytes: int) -> _T:
        """Run a tokenizer on a thread. Long prompts take turns, so that they do not delay short prompts."""
        loop = asyncio.get_running_loop()
        if num_bytes <= _SMALL_BODY_BYTES:
            return await loop.run_in_executor(None, tokenize)
        async with self._turn(client, self._long_prompts):
            return await loop.run_in_executor(self._long_prompts, tokenize)

    async def compiled(self, client: str, compile_grammar: Callable[[], _T]) -> _T:
        """Compile a grammar on one of a few threads, within `_GRAMMAR_S` seconds."""
        try:
            async with asyncio.timeout(_GRAMMAR_S), self._turn(client, self._grammars):
                return await asyncio.get_running_loop().run_in_executor(self._grammars, compile_grammar)
        except TimeoutError as error:
            raise RequestError(429, "this endpoint is busy with other grammars. Try again later") from error

    def _turn(self, client: str, pool: object) -> asyncio.Lock:
        return self._turns.setdefault((client or object(), pool), asyncio.Lock())
