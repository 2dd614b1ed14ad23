"""Texts that a served model writes for an endpoint: each on a thread of its own, piece by piece."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final

import msgspec

_MAX_TOKENS: Final = 1 << 20
_DEFAULT_TOKENS: Final = 256
_CONTEXT: Final = 4  # tokens of the prompt that the first ones are decoded with
_MAX_STOPS, _MAX_STOP = 16, 256
_MISSING: Final = (
    *("best_of", "echo", "frequency_penalty", "functions", "logit_bias", "logprobs", "presence_penalty"),
    *("response_format", "suffix", "tools"),
)


class RequestError(Exception):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class TextSettings(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. Fields that are not listed are ignored, as OpenAI's clients expect."""

    model: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    # What is not there: refused, unless it asks for nothing.
    best_of: int | None = None
    echo: bool | None = None
    frequency_penalty: float | None = None
    functions: list[Any] | None = None
    logit_bias: dict[str, Any] | None = None
    logprobs: bool | int | None = None
    presence_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    suffix: str | None = None
    tools: list[Any] | None = None

    def check(self) -> None:
        """Refuse what this endpoint does not do, for an answer without it would be another one."""
        for name in _MISSING:
            value = getattr(self, name)
            if value and value != {"type": "text"} and not (name == "best_of" and value == 1):
                raise RequestError(400, f"`{name}` is not there, got {value!r}: leave it out")
        if self.n not in (None, 1):
            raise RequestError(400, f"`n` must be 1, got {self.n}: ask several times")
        if len(self.stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP for stop in self.stops):
            raise RequestError(400, f"`stop` has at most {_MAX_STOPS} texts of {_MAX_STOP} characters")

    @property
    def num_tokens(self) -> int:
        """The most tokens of the text."""
        return self.max_completion_tokens or self.max_tokens or _DEFAULT_TOKENS

    @property
    def stops(self) -> list[str]:
        """The strings that end the text, without being part of it."""
        return [one for one in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if one]


@dataclass(frozen=True)
class ServedText:
    """A model, and the tokenizer that goes with it."""

    name: str
    model: Any
    tokenizer: Any

    @cached_property
    def turn(self) -> AbstractContextManager[Any]:
        """Held while a text is written, where only one may be: some position tables depend on the text so far."""
        from lightning_swarm.peer.remote_model import positions_depend_on_length

        return threading.Lock() if positions_depend_on_length(self.model) else nullcontext()

    def check_length(self, num_prompt: int, num_new: int) -> None:
        """Refuse a text that is longer than the model's positions."""
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(longest, int) and num_prompt + num_new > longest:
            raise RequestError(
                400,
                f"this model's texts have at most {longest} tokens, got {num_prompt} of the prompt and `max_tokens` "
                f"{num_new}. Ask for fewer",
                code="context_length_exceeded",
            )


class StopFinder:
    """Passes text on as it comes, but for what may be the beginning of a string that ends it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def take(self, text: str) -> str:
        """Take more text, and return what is certainly before any of the strings."""
        self._held += text
        places = [place for place in (self._held.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.found = True
            passed, self._held = self._held[: min(places)], ""
            return passed
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        passed = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return passed

    def _overlap(self, stop: str) -> int:
        """Return how much of the string's beginning is at the end of what is held."""
        longest = min(len(stop) - 1, len(self._held))
        return next((length for length in range(longest, 0, -1) if self._held.endswith(stop[:length])), 0)

    def rest(self) -> str:
        """Return what is held when no more comes."""
        held, self._held = self._held, ""
        return held


@dataclass
class TextPiece:
    """A piece of a text that is written, or its end."""

    text: str = ""
    finish_reason: str | None = None
    error: BaseException | None = None


class TextWriter:
    """Writes one text on a thread of its own, which ends soon after `abort`."""

    def __init__(self, served: ServedText, given: Mapping[str, Any], settings: TextSettings) -> None:
        self.served, self._given, self._settings = served, given, settings
        self._aborted = threading.Event()
        self._pieces: asyncio.Queue[TextPiece] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.num_prompt = int(given["input_ids"].shape[1])
        self.prompt_end: list[int] = given["input_ids"][0, -_CONTEXT:].tolist()
        self.num_tokens = 0
        self._thread = threading.Thread(target=self._run, name="text", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """Write no more."""
        self._aborted.set()

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of the prompt and of the text so far."""
        total = self.num_prompt + self.num_tokens
        return {"prompt_tokens": self.num_prompt, "completion_tokens": self.num_tokens, "total_tokens": total}

    @property
    def is_done(self) -> bool:
        """Return whether its thread has ended."""
        return not self._thread.is_alive()

    async def pieces(self) -> AsyncIterator[TextPiece]:
        """Give the text as it comes; the last piece has the reason of its end."""
        finder = StopFinder(self._settings.stops)
        while True:
            piece = await self._pieces.get()
            if piece.error is not None:
                raise piece.error
            if piece.finish_reason is not None:
                yield TextPiece(finder.rest(), piece.finish_reason)
                return
            text = finder.take(piece.text)
            if finder.found:
                self.abort()
                yield TextPiece(text, "stop")
                return
            if text:
                yield TextPiece(text)

    def put(self, piece: TextPiece) -> None:
        """On its thread: pass a piece on to whoever reads."""
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def _run(self) -> None:
        try:
            reason = self._generate()
        except BaseException as error:  # noqa: BLE001 - the request's task raises it
            self.put(TextPiece(error=error))
        else:
            self.put(TextPiece(finish_reason=reason))

    def _generate(self) -> str:
        settings = self._settings
        with self.served.turn:
            found = self._write()
        return "length" if int(found.shape[1]) - self.num_prompt >= settings.num_tokens else "stop"

    def _write(self) -> Any:
        import transformers

        from lightning_swarm.peer.remote_model import prefill_in_chunks

        settings = self._settings
        return self.served.model.generate(
            **self._given,
            **prefill_in_chunks(self.served.model, self.num_prompt),
            num_beams=1,
            num_return_sequences=1,
            max_new_tokens=settings.num_tokens,
            do_sample=False,
            logits_processor=transformers.LogitsProcessorList(_processors(settings)),
            stopping_criteria=transformers.StoppingCriteriaList([_Until(self._aborted)]),
            streamer=_Streamer(self),
        )


def _processors(settings: TextSettings) -> list[Any]:
    """Have tokens drawn by a generator of the request's own: texts are written at the same time, on several threads."""
    import torch
    import transformers

    temperature = 1.0 if settings.temperature is None else settings.temperature
    if temperature == 0.0:
        return []
    generator = torch.Generator()
    if settings.seed is None:
        generator.seed()
    else:
        generator.manual_seed(settings.seed & ((1 << 63) - 1))

    class Drawn(transformers.LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            # The largest of the logits with Gumbel noise is a token drawn by their softmax.
            noise = torch.empty(scores.shape, dtype=torch.float64).exponential_(generator=generator).log().neg()
            return scores + noise.to(scores.device, scores.dtype)

    chosen: list[Any] = [transformers.TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    if settings.top_p is not None and settings.top_p < 1.0:
        chosen.append(transformers.TopPLogitsWarper(settings.top_p))
    return [*chosen, Drawn()]


class _Until:
    """Stops a text when an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        import torch

        return torch.full((len(input_ids),), self._event.is_set(), dtype=torch.bool, device=input_ids.device)


class _Streamer:
    """Turns tokens into text that does not change any more when others follow."""

    def __init__(self, writer: TextWriter) -> None:
        self._writer = writer
        self._tokens = list(writer.prompt_end)  # a token may have a space before it, but at the beginning of a text
        self._begin, self._given = 0, len(self._tokens)  # what is decoded begins there; up to there it was given
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """Take the prompt, and then each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._tokens += value.flatten().tolist()
        self._writer.num_tokens += value.numel()
        text = self._new_text()
        if text and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else a character is not complete
            self._give(text)

    def end(self) -> None:
        """Give the rest."""
        if text := self._new_text():
            self._give(text)

    def _new_text(self) -> str:
        return self._decoded(len(self._tokens))[len(self._decoded(self._given)) :]

    def _decoded(self, end: int) -> str:
        text: str = self._writer.served.tokenizer.decode(
            self._tokens[self._begin : end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _give(self, text: str) -> None:
        self._writer.put(TextPiece(text))
        self._begin, self._given = self._given, len(self._tokens)
