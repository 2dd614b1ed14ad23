"""An endpoint that speaks OpenAI's HTTP protocol, for served models: completions and chats, whole or as they come."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import msgspec

from lightning_swarm.cli.http_limits import RequestLimits, names_of
from lightning_swarm.cli.texts import RequestError, ServedText, TextSettings, TextWriter
from lightning_swarm.core.errors import ConfigError, SwarmError

_HEALTH_S: Final = 10.0  # for so long a token proves that texts can be written


class _Completion(TextSettings, kw_only=True):
    prompt: str | list[str]


class _ContentPart(msgspec.Struct):
    type: str
    text: str = ""


class _ChatMessage(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None


class _Chat(TextSettings, kw_only=True):
    messages: Annotated[list[_ChatMessage], msgspec.Meta(min_length=1)]


def _tokens_of_chat(served: ServedText, messages: Sequence[_ChatMessage]) -> Any:
    """Turn a chat into tokens, by the template of the model."""
    if getattr(served.tokenizer, "chat_template", None) is None:
        raise RequestError(
            400,
            f"model {served.name!r} has no chat template, so it takes no chats. Use /v1/completions, with a prompt.",
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
    return served.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)


class TextEndpoint:
    """Answers the requests."""

    def __init__(self, served: Sequence[ServedText]) -> None:
        self._served = {one.name: one for one in served}
        self._health: tuple[float, str] = (float("-inf"), "")  # when it was looked at, and what was wrong
        self._looking = asyncio.Lock()
        self._probe: TextWriter | None = None  # of the health
        self._limits = RequestLimits()

    def app(self, hosts: Sequence[str] = ("*",)) -> Any:
        """Return the ASGI application; `hosts` are the names by which clients may address it."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import ClientDisconnect
        from starlette.routing import Route

        return Starlette(
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
            routes=[
                Route("/health", self._answer_health),
                Route("/v1/models", self._answer_models),
                Route("/v1/completions", self._answer_completion, methods=["POST"]),
                Route("/v1/chat/completions", self._answer_chat, methods=["POST"]),
            ],
            exception_handlers={
                RequestError: self._answer_error,
                ClientDisconnect: self._answer_nobody,
                Exception: self._answer_failure,
            },
        )

    async def _answer_error(self, _: Any, error: Exception) -> Any:
        from starlette.responses import JSONResponse

        assert isinstance(error, RequestError)
        return JSONResponse(_error(str(error), error.status, error.code), status_code=error.status)

    async def _answer_nobody(self, _: Any, error: Exception) -> Any:
        """Answer a client that left: the response goes nowhere, and the server logs no failure of its own."""
        from starlette.responses import Response

        return Response(status_code=400)

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
            writer = self._probe = TextWriter(served, given, TextSettings(max_tokens=1, temperature=0.0))
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
        async with self._limits.body(request) as body:
            asked = _decoded(body, _Completion)
            served = self._model(asked.model)
            prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
            if len(prompts) != 1 or not prompts[0]:
                raise RequestError(400, f"a completion is of one prompt that is not empty, got {len(prompts)}")
            tokenize = partial(served.tokenizer, prompts[0], return_tensors="pt")
            given = await self._limits.tokenized(tokenize, len(body))
        return await self._answer(request, asked, served, given, chat=False)

    async def _answer_chat(self, request: Any) -> Any:
        async with self._limits.body(request) as body:
            asked = _decoded(body, _Chat)
            served = self._model(asked.model)
            given = await self._limits.tokenized(partial(_tokens_of_chat, served, asked.messages), len(body))
        return await self._answer(request, asked, served, given, chat=True)

    async def _answer(self, request: Any, asked: TextSettings, served: ServedText, given: Any, *, chat: bool) -> Any:
        from starlette.responses import JSONResponse

        served.check_length(given["input_ids"].shape[1], asked.num_tokens)
        held = ExitStack()
        held.enter_context(self._limits.text(asked.num_tokens))
        writer = TextWriter(served, {name: given[name] for name in ("input_ids", "attention_mask")}, asked)
        form = _Form("chat.completion" if chat else "text_completion", served.name, chat)
        if asked.stream:
            with_usage = bool((asked.stream_options or {}).get("include_usage"))
            held.callback(writer.abort)
            return _stream(_events(writer, form, with_usage=with_usage), held)
        text, reason = "", "stop"
        watching = asyncio.ensure_future(_until_gone(request))
        watching.add_done_callback(lambda _: writer.abort())
        try:
            async for piece in writer.pieces():
                text, reason = text + piece.text, piece.finish_reason or reason
        finally:
            watching.cancel()
            held.close()
        return JSONResponse({**form.whole(text, reason), "usage": writer.usage})


async def _until_gone(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _stream(events: AsyncIterator[str], held: ExitStack) -> Any:
    """Return a response of server-sent events. `held` is closed after it, also if the client left before the first."""
    from starlette.responses import StreamingResponse

    class EventStream(StreamingResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            with held:
                await super().__call__(scope, receive, send)

    return EventStream(events, media_type="text/event-stream")


async def _events(writer: TextWriter, form: _Form, *, with_usage: bool) -> AsyncIterator[str]:
    """Yield a text as server-sent events."""
    try:
        async for piece in writer.pieces():
            yield f"data: {json.dumps(form.chunk(piece.text, piece.finish_reason))}\n\n"
        if with_usage:
            yield f"data: {json.dumps({**form.chunk('', None), 'choices': [], 'usage': writer.usage})}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the status was sent already
        yield f"data: {json.dumps(_error(str(error), _status_of(error)))}\n\n"


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


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        asked = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(400, f"the request cannot be read: {error}") from error
    asked.check()
    return asked


def _status_of(error: Exception) -> int:
    return 503 if isinstance(error, SwarmError) else 500


def _error(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def run(served: Sequence[ServedText], *, host: str, port: int, allowed_hosts: Sequence[str] = ()) -> None:
    """Answer requests until the process is told to end.

    If only this machine reaches the endpoint, requests must address it by a name of this machine, or an allowed one.
    """
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(
            'the HTTP endpoint needs uvicorn and starlette. Run: pip install "lightning-swarm[http]"'
        ) from error
    app = TextEndpoint(served).app(names_of(host, allowed_hosts))
    uvicorn.run(app, host=host, port=port, log_level="warning")
