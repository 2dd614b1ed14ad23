"""Limits of the HTTP endpoint, so that one client can neither exhaust its memory nor keep all other clients waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Protocol, TypeVar

from lightning_swarm.serving.http_fields import RequestError

MAX_BODY_BYTES: Final = 4 << 20
_BODY_S: Final = 30.0  # seconds within which a body must arrive
_SMALL_BODY_BYTES: Final = 64 << 10
_MAX_BODY_BYTES_IN_ALL: Final = 64 << 20
_GRAMMAR_S: Final = 30.0  # seconds within which a grammar must be compiled

_T = TypeVar("_T")


class _Grow(Protocol):
    def __call__(self, amount: int, *, is_small: bool) -> None: ...


class Budget:
    """A number of bytes that requests share. A quarter of the number is kept for small requests."""

    def __init__(self, total: int) -> None:
        self._total = total
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
                text = f"this endpoint has {self._total} bytes of requests at once, and is busy. Try again later"
                raise RequestError(429, text)
            total, large = total + amount, large + in_large
            self._used, self._used_by_large = self._used + amount, self._used_by_large + in_large

        try:
            yield grow
        finally:
            self._used, self._used_by_large = self._used - total, self._used_by_large - large


class RequestLimits:
    """Reads the bodies of requests, and prepares their prompts and grammars, within bounds."""

    def __init__(self) -> None:
        self._bodies = Budget(_MAX_BODY_BYTES_IN_ALL)
        # Tokenizing a long prompt takes seconds. On the common threads it would delay all short prompts.
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="long-prompts")
        self._grammars = ThreadPoolExecutor(2, thread_name_prefix="grammars")

    async def body(self, request: Any, held: ExitStack) -> bytes:
        """Read a request's JSON body; its memory counts until `held` is closed."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a page of another origin can send other types without a preflight request
            raise RequestError(415, f"a request's Content-Type must be application/json, got {kind!r}")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
            raise RequestError(413, f"a request has at most {MAX_BODY_BYTES} bytes, got {declared}")
        try:
            async with asyncio.timeout(_BODY_S):
                return await self._read(request, held.enter_context(self._bodies.share()))
        except TimeoutError as error:
            raise RequestError(408, f"a request must arrive within {_BODY_S:g} s") from error

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
