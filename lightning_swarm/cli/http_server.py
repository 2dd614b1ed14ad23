"""An endpoint that speaks OpenAI's HTTP protocol, for served models: completions and chats, whole or as they come."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final

import msgspec

from lightning_swarm.core.errors import ConfigError, SwarmError

_log = logging.getLogger(__name__)

_MAX_BODY_BYTES: Final = 16 << 20
_MAX_TOKENS: Final = 1 << 20
_DEFAULT_TOKENS: Final = 256
_CONTEXT: Final = 4  # tokens of the prompt that the first ones are decoded with
_MAX_STOPS, _MAX_STOP = 16, 256
_MAX_TEXTS: Final = 64  # that are written at once
_MISSING: Final = (
    *("best_of", "echo", "frequency_penalty", "functions", "logit_bias", "logprobs", "presence_penalty"),
    *("response_format", "suffix", "tools"),
)
_HEALTH_S: Final = 10.0  # for so long a token proves that texts can be written

_Stop = str | list[str] | None


class _Settings(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. Fields that are not listed are ignored, as OpenAI's clients expect."""

    model: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    seed: int | None = None
    stop: _Stop = None
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


class _Completion(_Settings, kw_only=True):
    prompt: str | list[str]


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None


class _Chat(_Settings, kw_only=True):
    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)]


class RequestError(Exception):
    """A request that cannot be answered, with its HTTP status."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True)
class ServedText:
    """A model, and the tokenizer that goes with it."""

    name: str
    model: Any
    tokenizer: Any

    @cached_property
    def turn(self) -> AbstractContextManager[Any]:
        """Held while a text is written, where only one may be: some position tables depend on the text so far."""
        text = json.dumps(self.model.config.to_dict(), default=str)
        stateful = any(f'"rope_type": "{kind}"' in text for kind in ("dynamic", "longrope"))
        return threading.Lock() if stateful else nullcontext()

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

    def tokens_of_chat(self, messages: Sequence[_ChatMessage]) -> Any:
        """Turn a chat into tokens, by the template of the model."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise RequestError(
                400,
                f"model {self.name!r} has no chat template, so it takes no chats. Use /v1/completions, with a prompt.",
            )
        parts = [part for one in messages if isinstance(one.content, list) for part in one.content]
        if others := {part.type for part in parts} - {"text"}:
            raise RequestError(400, f"messages are of text, got parts of the type {min(others)!r}")
        said = [
            {
                "role": one.role,
                "content": one.content
                if isinstance(one.content, str)
                else "".join(part.text for part in one.content or ()),
            }
            for one in messages
        ]
        return self.tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
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
class _Written:
    """A piece of a text that is written, or its end."""

    text: str = ""
    finish_reason: str | None = None
    error: BaseException | None = None


class TextWriter:
    """Writes one text on a thread of its own, which ends soon after `abort`."""

    def __init__(self, served: ServedText, given: Mapping[str, Any], settings: _Settings) -> None:
        self.served, self._given, self._settings = served, given, settings
        self._aborted = threading.Event()
        self._pieces: asyncio.Queue[_Written] = asyncio.Queue()
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

    async def pieces(self) -> AsyncIterator[_Written]:
        """Give the text as it comes; the last piece has the reason of its end."""
        finder = StopFinder(self._settings.stops)
        while True:
            piece = await self._pieces.get()
            if piece.error is not None:
                raise piece.error
            if piece.finish_reason is not None:
                yield _Written(finder.rest(), piece.finish_reason)
                return
            text = finder.take(piece.text)
            if finder.found:
                self.abort()
                yield _Written(text, "stop")
                return
            if text:
                yield _Written(text)

    def _put(self, piece: _Written) -> None:
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def _run(self) -> None:
        try:
            reason = self._generate()
        except BaseException as error:  # noqa: BLE001 - the request's task raises it
            self._put(_Written(error=error))
        else:
            self._put(_Written(finish_reason=reason))

    def _generate(self) -> str:
        settings = self._settings
        with self.served.turn:
            found = self._write()
        return "length" if int(found.shape[1]) - self.num_prompt >= settings.num_tokens else "stop"

    def _write(self) -> Any:
        import transformers

        settings = self._settings
        return self.served.model.generate(
            **self._given,
            num_beams=1,
            num_return_sequences=1,
            max_new_tokens=settings.num_tokens,
            do_sample=False,
            logits_processor=transformers.LogitsProcessorList(_processors(settings)),
            stopping_criteria=transformers.StoppingCriteriaList([_Until(self._aborted)]),
            streamer=_Streamer(self),
        )


def _processors(settings: _Settings) -> list[Any]:
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
        self._writer._put(_Written(text))
        self._begin, self._given = self._given, len(self._tokens)


class Endpoint:
    """Answers the requests."""

    def __init__(self, served: Sequence[ServedText]) -> None:
        self._served = {one.name: one for one in served}
        self._health: tuple[float, str] = (float("-inf"), "")  # when it was looked at, and what was wrong
        self._looking = asyncio.Lock()
        self._probe: TextWriter | None = None  # of the health
        self._texts = asyncio.Semaphore(_MAX_TEXTS)

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/health", self._answer_health),
                Route("/v1/models", self._answer_models),
                Route("/v1/completions", self._answer_completion, methods=["POST"]),
                Route("/v1/chat/completions", self._answer_chat, methods=["POST"]),
            ],
            exception_handlers={RequestError: self._answer_error, Exception: self._answer_failure},
        )

    async def _answer_error(self, _: Any, error: Exception) -> Any:
        from starlette.responses import JSONResponse

        assert isinstance(error, RequestError)
        return JSONResponse(_error(str(error), error.status, error.code), status_code=error.status)

    async def _answer_failure(self, _: Any, error: Exception) -> Any:
        from starlette.responses import JSONResponse

        status = _status_of(error)
        return JSONResponse(_error(str(error), status), status_code=status)

    async def _answer_health(self, _: Any) -> Any:
        """Say that texts can be written if a token has just been written, by each model."""
        from starlette.responses import JSONResponse

        async with self._looking:  # many who ask cost one token
            if time.monotonic() >= self._health[0] + _HEALTH_S:
                self._health = time.monotonic(), await self._problem()
        problem = self._health[1]
        return JSONResponse({"status": problem or "ok"}, status_code=503 if problem else 200)

    async def _problem(self) -> str:
        import torch

        if self._probe is not None and not self._probe.is_done:
            return f"{self._probe.served.name}: a token that was asked for before has not come yet"
        for served in self._served.values():
            given = {
                "input_ids": torch.zeros(1, 1, dtype=torch.long),
                "attention_mask": torch.ones(1, 1, dtype=torch.long),
            }
            writer = self._probe = TextWriter(served, given, _Settings(max_tokens=1, temperature=0.0))
            try:
                async with asyncio.timeout(_HEALTH_S):
                    async for _ in writer.pieces():
                        pass
            except TimeoutError:
                writer.abort()
                return f"{served.name}: no token came within {_HEALTH_S:g} s"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is not healthy
                return f"{served.name}: {error}"
        return ""

    async def _answer_models(self, _: Any) -> Any:
        from starlette.responses import JSONResponse

        models = [{"id": name, "object": "model", "created": 0, "owned_by": "swarm"} for name in self._served]
        return JSONResponse({"object": "list", "data": models})

    def _model(self, name: str) -> ServedText:
        if name in self._served:
            return self._served[name]
        raise RequestError(404, f"there is no model {name!r} here; there is {sorted(self._served)}")

    async def _answer_completion(self, request: Any) -> Any:
        asked = await _read(request, _Completion)
        served = self._model(asked.model)
        prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        if len(prompts) != 1 or not prompts[0]:
            raise RequestError(400, f"a completion is of one prompt that is not empty, got {len(prompts)}")
        given = await asyncio.to_thread(served.tokenizer, prompts[0], return_tensors="pt")
        return await self._answer(request, asked, served, given, chat=False)

    async def _answer_chat(self, request: Any) -> Any:
        asked = await _read(request, _Chat)
        served = self._model(asked.model)
        given = await asyncio.to_thread(served.tokens_of_chat, asked.messages)
        return await self._answer(request, asked, served, given, chat=True)

    async def _answer(self, request: Any, asked: _Settings, served: ServedText, given: Any, *, chat: bool) -> Any:
        from starlette.responses import JSONResponse, StreamingResponse

        served.check_length(given["input_ids"].shape[1], asked.num_tokens)
        if self._texts.locked():
            raise RequestError(429, f"{_MAX_TEXTS} texts are written here at once, and no more")
        await self._texts.acquire()
        writer = TextWriter(served, {name: given[name] for name in ("input_ids", "attention_mask")}, asked)
        form = _Form("chat.completion" if chat else "text_completion", served.name, chat)
        if asked.stream:
            with_usage = bool((asked.stream_options or {}).get("include_usage"))
            events = _events(writer, form, self._texts.release, with_usage=with_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        text, reason = "", "stop"
        watching = asyncio.ensure_future(_until_gone(request))
        watching.add_done_callback(lambda _: writer.abort())
        try:
            async for piece in writer.pieces():
                text, reason = text + piece.text, piece.finish_reason or reason
        finally:
            watching.cancel()
            self._texts.release()
        return JSONResponse({**form.whole(text, reason), "usage": writer.usage})


async def _until_gone(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(
    writer: TextWriter, form: _Form, release: Callable[[], None], *, with_usage: bool
) -> AsyncIterator[str]:
    """Give a text as server-sent events. If the client is gone, this is closed, and the text ends."""
    try:
        async for piece in writer.pieces():
            yield f"data: {json.dumps(form.chunk(piece.text, piece.finish_reason))}\n\n"
        if with_usage:
            yield f"data: {json.dumps({**form.chunk('', None), 'choices': [], 'usage': writer.usage})}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the status was sent already
        yield f"data: {json.dumps(_error(str(error), _status_of(error)))}\n\n"
    finally:
        writer.abort()
        release()


@dataclass
class _Form:
    """The form of an answer."""

    kind: str
    model: str
    chat: bool

    def __post_init__(self) -> None:
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._has_begun = False

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        """A whole text."""
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        return self._answer(self.kind, {**content, "finish_reason": reason})

    def chunk(self, text: str, reason: str | None) -> dict[str, Any]:
        """A piece of a text."""
        role = {} if self._has_begun else {"role": "assistant"}
        self._has_begun = True
        content: dict[str, Any] = {"delta": {**role, "content": text}} if self.chat else {"text": text}
        return self._answer(f"{self.kind}.chunk" if self.chat else self.kind, {**content, "finish_reason": reason})

    def _answer(self, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
        choices = [{"index": 0, "logprobs": None, **choice}]
        return {"id": self._id, "object": kind, "created": self._created, "model": self.model, "choices": choices}


async def _read(request: Any, kind: type[Any]) -> Any:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise RequestError(413, f"a request has at most {_MAX_BODY_BYTES} bytes")
    try:
        asked = msgspec.json.decode(bytes(body), type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(400, f"the request cannot be read: {error}") from error
    asked.check()
    return asked


def _status_of(error: Exception) -> int:
    return 503 if isinstance(error, SwarmError) else 500


def _error(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def run(served: Sequence[ServedText], *, host: str, port: int) -> None:
    """Answer requests until the process is told to end."""
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(
            'the HTTP endpoint needs uvicorn and starlette. Run: pip install "lightning-swarm[http]"'
        ) from error
    uvicorn.run(Endpoint(served).app(), host=host, port=port, log_level="warning")
