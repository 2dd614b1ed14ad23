"""The texts of one HTTP request, which wait for their places and are then written at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from lightning_swarm.serving.http_metrics import EndpointMetrics, TextMeter
from lightning_swarm.serving.http_queue import QueuedRequest
from lightning_swarm.serving.pieces import TextPiece
from lightning_swarm.serving.texts import TextWriter
from lightning_swarm.serving.tool_calls import CallReader, with_calls


@dataclass(frozen=True)
class PlannedText:
    """A text that has not begun."""

    begin: Callable[..., TextWriter]  # takes the keyword argument `on_end`
    reader: CallReader | None  # separates tool calls from the text; None: the text has no calls


class RequestTexts:
    """Writes a request's texts once the queue has admitted the request. `close` frees its places."""

    def __init__(
        self,
        planned: Sequence[PlannedText],
        queued: QueuedRequest,
        metrics: EndpointMetrics,
        model: str,
        *,
        arrived_s: float,  # time at which the request arrived
        resources: ExitStack,  # closed when the texts leave the queue
    ) -> None:
        self._planned, self._queued, self._resources = planned, queued, resources
        self._metrics, self._model, self._arrived_s = metrics, model, arrived_s
        self._entered_s = time.monotonic()
        self._writers: list[TextWriter] = []
        metrics.waiting.labels(model).inc(len(planned))
        resources.callback(metrics.waiting.labels(model).dec, len(planned))

    @property
    def is_waiting(self) -> bool:
        """Whether the texts wait for their places."""
        return not self._queued.admitted.done()

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece]]:
        """Yield the texts' pieces as they arrive, each with its text's index. Raises the first error of any text."""
        await self._queued.until_admitted()
        self._resources.close()
        self._metrics.queued.labels(self._model).observe(time.monotonic() - self._entered_s)
        async with aclosing(merged([self._begin(planned) for planned in self._planned])) as pieces:
            async for index, piece in pieces:
                yield index, piece

    def _begin(self, planned: PlannedText) -> AsyncIterator[TextPiece]:
        """Begin one text, which keeps its place until it ends, even if the request ends earlier."""
        at_end, meter = ExitStack(), TextMeter(self._metrics, self._model, self._arrived_s)
        writer = planned.begin(on_end=at_end.close)
        self._writers.append(writer)
        meter.begin(writer)
        at_end.callback(self._queued.release)
        at_end.callback(meter.end, writer)
        pieces = _metered(writer, meter)
        return pieces if planned.reader is None else with_calls(pieces, planned.reader)

    def close(self) -> None:
        """End the texts, or leave the queue. May be called several times."""
        self._queued.leave(num_begun=len(self._writers))
        for writer in self._writers:
            writer.abort()
        self._resources.close()

    def usage(self, num_choices: int) -> dict[str, Any]:
        """Return the numbers of tokens of the prompts and of all texts so far."""
        firsts = self._writers[::num_choices]  # one text of each prompt, so that each prompt counts once
        prompts = sum(text.num_prompt for text in firsts)
        written = sum(text.num_tokens for text in self._writers)
        cached = sum(text.num_cached for text in firsts)
        counts = {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}
        return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


async def _metered(writer: TextWriter, meter: TextMeter) -> AsyncIterator[TextPiece]:
    async for piece in writer.pieces():
        meter.take(writer, piece.finish_reason)
        yield piece


async def merged(texts: Sequence[AsyncIterator[TextPiece]]) -> AsyncGenerator[tuple[int, TextPiece]]:
    """Yield the pieces of several texts as they arrive, each with its text's index."""
    # The queue has room for one piece, so that unread pieces of a slow client stay in the writers, which limit them.
    pieces: asyncio.Queue[tuple[int, TextPiece | BaseException | None]] = asyncio.Queue(1)

    async def read_one(index: int) -> None:
        try:
            async for piece in texts[index]:
                await pieces.put((index, piece))
        except Exception as error:  # noqa: BLE001 - raised below, from the queue
            await pieces.put((index, error))
        else:
            await pieces.put((index, None))

    readers = [asyncio.ensure_future(read_one(index)) for index in range(len(texts))]
    try:
        num_open = len(texts)
        while num_open:
            index, piece = await pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                num_open -= 1
            else:
                yield index, piece
    finally:
        for reader in readers:
            reader.cancel()
