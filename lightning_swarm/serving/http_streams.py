"""Streams of server-sent events, which are kept alive while a text waits, and end when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing, suppress
from typing import Any, Final, TypeVar

from lightning_swarm.serving.http_answers import error_answer, status_of

STREAM_STATUS: Final = "swarm.status"
"""Entry of an ASGI scope: the status of a stream that failed after its beginning."""

_KEEP_ALIVE_S: Final = 10.0  # longest pause in a stream, in seconds
_EVENTS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

_T = TypeVar("_T")


class ClientGone(Exception):
    """The client has closed its connection."""


async def unless_gone(receive: Callable[[], Any], work: Awaitable[_T]) -> _T:
    """Return the result of `work`. If the client leaves, cancel it and raise ClientGone."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return await working
    finally:
        watching.cancel()
        await _cancel(working)


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, unless it is done, and wait for its end."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # marks the exception as retrieved


def event(content: dict[str, Any]) -> str:
    """Return an event with a JSON object. If the object has a type, this is also the type of the event."""
    type_line = f"event: {content['type']}\n" if "type" in content else ""
    return f"{type_line}data: {json.dumps(content)}\n\n"


async def kept_alive(events: AsyncGenerator[str], comment: Callable[[], str]) -> AsyncGenerator[str]:
    """Yield events, and in pauses comments, which clients ignore, so that no proxy closes an idle connection."""
    async with aclosing(events):
        while True:
            upcoming = asyncio.ensure_future(anext(events, None))
            try:
                while not (await asyncio.wait([upcoming], timeout=_KEEP_ALIVE_S))[0]:
                    yield f": {comment()}\n\n"
            finally:
                await _cancel(upcoming)
            if (next_event := upcoming.result()) is None:
                return
            yield next_event


class EventStream:
    """An ASGI response with a stream of events.

    Args:
        first: The first event. It exists before the status is sent, so that an earlier error can set the status.
        events: The following events.
        resources: Closed at the end of the stream, even if the client leaves before.
    """

    def __init__(self, first: str, events: AsyncGenerator[str], resources: ExitStack) -> None:
        self._first, self._events, self._resources = first, events, resources

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events."""
        with self._resources, suppress(ClientGone):
            await unless_gone(receive, self._send(scope, send))

    async def _send(self, scope: Any, send: Any) -> None:
        async def send_body(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await send_body(self._first)
        async with aclosing(self._events):
            try:
                async for following in self._events:
                    await send_body(following)
            except Exception as error:  # noqa: BLE001 - the status was sent already
                scope[STREAM_STATUS] = status_of(error)
                await send_body(event(error_answer(str(error), status_of(error))))
        await send_body("", more=False)
