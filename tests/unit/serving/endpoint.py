"""An endpoint whose texts end when a test ends them, and clients that speak ASGI, without sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from lightning_swarm.serving.pieces import TextPiece

JSON = ("content-type", "application/json")
SMALL = json.dumps({"model": "m", "prompt": "a", "max_tokens": 4}).encode()


class Writer:
    """A text that ends when the test ends it."""

    made: list[Writer]

    num_prompt = num_tokens = num_cached = 1

    def __init__(self, *_: Any, on_end: Callable[[], None], **__: Any) -> None:
        self.over, self.is_aborted, self.on_end = asyncio.Event(), False, on_end
        Writer.made.append(self)

    def abort(self) -> None:
        self.is_aborted = True
        self.over.set()
        self.on_end()

    async def pieces(self) -> AsyncIterator[TextPiece]:
        await self.over.wait()
        self.on_end()
        yield TextPiece("b", "stop")


class Ids:
    """Token ids, of which only the shape is read here."""

    shape = (1, 1)


class Tokenizer:
    """Takes until the test ends it for a long prompt."""

    def __init__(self) -> None:
        self.may_go = threading.Event()

    def __call__(self, prompt: str, **_: Any) -> dict[str, Any]:
        if len(prompt) > 1 << 20:
            assert self.may_go.wait(60.0)
        return {"input_ids": Ids(), "attention_mask": Ids()}


class Model:
    """A model without a limit on the length of texts."""

    generation_config = None

    class config:  # noqa: N801 - as models name it
        vocab_size = 9

        @classmethod
        def get_text_config(cls) -> Any:
            return cls


class Client:
    """Sends a request to the application as ASGI messages."""

    def __init__(
        self,
        app: Any,
        *,
        headers: Sequence[tuple[str, str]] = (JSON,),
        host: str = "127.0.0.1:8000",
        address: str | None = None,
    ) -> None:
        self._app, self._client = app, None if address is None else (address, 1)
        self._headers = [(name.encode(), value.encode()) for name, value in [("host", host), *headers]]
        self.to_send: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.status, self.content = 0, b""
        self.headers: dict[bytes, bytes] = {}

    async def receive(self) -> dict[str, Any]:
        return await self.to_send.get()

    async def take(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.headers |= dict(message.get("headers", ()))
        self.content += message.get("body", b"")

    def leave(self) -> None:
        self.to_send.put_nowait({"type": "http.disconnect"})

    def body(self, part: bytes, *, more: bool = False) -> Client:
        self.to_send.put_nowait({"type": "http.request", "body": part, "more_body": more})
        return self

    async def run(self) -> int:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": self._headers,
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "client": self._client,
        }
        await self._app(scope, self.receive, self.take)
        return self.status


def run(work: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop | None = None) -> None:
    loop = loop or asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.wait([task]))
    finally:
        loop.close()


async def until(reached: Callable[[], object]) -> None:
    while not reached():  # noqa: ASYNC110 - what is awaited has no event of its own
        await asyncio.sleep(0)
