"""An endpoint with OpenAI's HTTP protocol for served models: completions and chats, whole or streamed."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.serving.grammar import Grammar, grammar_of
from lightning_swarm.serving.http_answers import AnswerForm, Choice, error_answer, status_of
from lightning_swarm.serving.http_fields import Chat, Completion, RequestError, TextFields, read
from lightning_swarm.serving.http_limits import RequestLimits, names_of
from lightning_swarm.serving.http_prompts import Prompt, tokens_of_chat, tokens_of_prompt
from lightning_swarm.serving.pieces import TextPiece
from lightning_swarm.serving.texts import PromptScores, ServedText, TextWriter
from lightning_swarm.serving.tool_calls import CallReader, ToolUse, tool_use, with_calls

if TYPE_CHECKING:
    from lightning_swarm.serving.grammar_masks import CompiledGrammar

_HEALTH_S: Final = 10.0  # seconds for which a health check is valid, and its timeout
_MAX_CONNECTIONS: Final = 512
_REQUEST_S: Final = 10.0  # seconds within which a request's headers must arrive


@dataclass(frozen=True)
class Access:
    """The restrictions on the endpoint's use.

    Args:
        key: The bearer token that requests of `/v1` must bring. None: no token.
        hosts: The host names by which clients may address the endpoint; `("*",)`: any.
        origins: The origins of other sites whose pages may use the endpoint from a browser.
    """

    key: str | None = None
    hosts: Sequence[str] = ("*",)
    origins: Sequence[str] = ()


class TextEndpoint:
    """Answers HTTP requests about served models: their texts, their list, their health."""

    def __init__(self, served: Sequence[ServedText]) -> None:
        self._served = {one.name: one for one in served}
        self._health: tuple[float, str] = (float("-inf"), "")  # time of the last check, and its problem
        self._looking = asyncio.Lock()  # held during a health check
        self._probe: TextWriter | None = None  # the text of the last health check
        self._limits = RequestLimits()

    def app(self, access: Access = Access()) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import ClientDisconnect
        from starlette.routing import Route

        origins = [
            Middleware(CORSMiddleware, allow_origins=list(access.origins), allow_methods=["*"], allow_headers=["*"])
        ]
        return Starlette(
            middleware=[
                Middleware(_Numbered),
                Middleware(TrustedHostMiddleware, allowed_hosts=list(access.hosts), www_redirect=False),
                *(origins if access.origins else []),
                Middleware(_Guarded, access=access),
            ],
            routes=[
                Route("/health", self._answer_health),
                Route("/v1/models", self._answer_models),
                Route("/v1/models/{name:path}", self._answer_model),
                Route("/v1/completions", self._answer_completion, methods=["POST"]),
                Route("/v1/chat/completions", self._answer_chat, methods=["POST"]),
            ],
            exception_handlers={
                RequestError: self._answer_error,
                HTTPException: self._answer_other,
                ClientDisconnect: self._answer_nobody,
                Exception: self._answer_failure,
            },
        )

    async def _answer_error(self, _: Any, error: Exception) -> Any:
        assert isinstance(error, RequestError)
        return _json(error_answer(str(error), error.status, error.code, error.param), error.status)

    async def _answer_other(self, request: Any, error: Any) -> Any:
        """Answer a request without a matching route or method."""
        message = f"{error.detail}: {request.method} {request.url.path}"
        return _json(error_answer(message, error.status_code), error.status_code, error.headers)

    async def _answer_nobody(self, _: Any, error: Exception) -> Any:
        """Answer a client that left, only so that the server logs no failure of its own."""
        from starlette.responses import Response

        return Response(status_code=400)

    async def _answer_failure(self, _: Any, error: Exception) -> Any:
        return _json(error_answer(str(error), status_of(error)), status_of(error))

    async def _answer_health(self, _: Any) -> Any:
        """Report whether each model has just written a token."""
        async with self._looking:  # simultaneous requests share one check
            if time.monotonic() >= self._health[0] + _HEALTH_S:
                self._health = time.monotonic(), await self._problem()
        problem = self._health[1]
        return _json({"status": problem or "ok"}, 503 if problem else 200)

    async def _problem(self) -> str:
        """Have each model write one token; return the first problem, or an empty text."""
        import torch

        if self._probe is not None and not self._probe.is_done:
            return f"{self._probe.served.name}: a token that was asked for before has not come yet"
        for served in self._served.values():
            given = {
                "input_ids": torch.zeros(1, 1, dtype=torch.long),
                "attention_mask": torch.ones(1, 1, dtype=torch.long),
            }
            writer = self._probe = TextWriter(served, given, TextFields(temperature=0.0), num_new=1)
            try:
                async with asyncio.timeout(_HEALTH_S):
                    async for _ in writer.pieces():
                        pass
            except TimeoutError:
                writer.abort()
                return f"{served.name}: no token came within {_HEALTH_S:g} s"
            except Exception as error:  # noqa: BLE001 - with any error, the model is not healthy
                return f"{served.name}: {error}"
        return ""

    async def _answer_models(self, _: Any) -> Any:
        return _json({"object": "list", "data": [_described(one) for one in self._served.values()]})

    async def _answer_model(self, request: Any) -> Any:
        return _json(_described(self._model(request.path_params["name"])))

    def _model(self, name: str) -> ServedText:
        if name in self._served:
            return self._served[name]
        raise RequestError(
            404,
            f"there is no model {name!r} here; there is {sorted(self._served)}",
            code="model_not_found",
            param="model",
        )

    async def _answer_completion(self, request: Any) -> Any:
        async with self._limits.body(request) as body:
            asked = read(body, Completion)
            served = self._model(asked.model)
            given = [
                await self._limits.tokenized(partial(tokens_of_prompt, served, asked, prompt), len(body))
                for prompt in asked.prompts
            ]
        grammar = await self._compiled(served, grammar_of(asked))
        return await self._answer(request, asked, served, given, _TextKind(grammar=grammar))

    async def _answer_chat(self, request: Any) -> Any:
        async with self._limits.body(request) as body:
            asked = read(body, Chat)
            served = self._model(asked.model)
            given = await self._limits.tokenized(partial(tokens_of_chat, served, asked), len(body))
        answer = grammar_of(asked)
        use = tool_use(served, asked, given.text, answer)
        grammar = await self._compiled(served, answer if use is None else use.grammar)
        return await self._answer(request, asked, served, [given], _TextKind(is_chat=True, grammar=grammar, use=use))

    async def _compiled(self, served: ServedText, grammar: Grammar | None) -> CompiledGrammar | None:
        """Compile a grammar before any token of its texts is computed. Raises RequestError if none can follow it."""
        if grammar is None:
            return None
        return await self._limits.compiled(lambda: served.grammars.compile(grammar))

    async def _answer(
        self, request: Any, asked: TextFields, served: ServedText, given: Sequence[Prompt], kind: _TextKind
    ) -> Any:
        """Write the texts of a request, `asked.n` for each prompt, and return the whole answer or a stream of it."""
        from lightning_swarm.serving.sampling import check_tokens

        check_tokens(asked, served.model.config.get_text_config().vocab_size)
        begun = self._begin(_client_of(request), asked, served, given, kind)
        texts, pieces = [text for text, _ in begun], [piece for _, piece in begun]
        held = ExitStack()
        for text in texts:
            held.callback(text.abort)
        form = AnswerForm(served.name, kind.is_chat, has_scores=asked.num_logprobs is not None)
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            return _stream(_events(pieces, form, partial(_usage, texts, asked.n) if with_usage else None), held)
        choices = [Choice(index) for index in range(len(texts))]
        watching = asyncio.ensure_future(_until_gone(request))
        watching.add_done_callback(lambda _: held.close())  # aborts the texts when the client leaves
        try:
            async for index, piece in _merged(pieces):
                choices[index].add(piece)
        finally:
            watching.cancel()
            held.close()
        return _json(form.whole(choices, _usage(texts, asked.n)))

    def _begin(
        self, client: str, asked: TextFields, served: ServedText, given: Sequence[Prompt], kind: _TextKind
    ) -> list[tuple[TextWriter, AsyncIterator[TextPiece]]]:
        """Begin all texts of a request, or none; return each with its pieces."""
        wanted, texts = list[tuple[Callable[[], TextWriter], CallReader | None]](), list[TextWriter]()
        places = list[ExitStack]()  # each text keeps its place until its thread ends, even if the request ends earlier
        try:
            for one in given:
                num_prompt = one.tokens["input_ids"].shape[1]
                num_new = served.num_new(num_prompt, asked.num_tokens)
                scores = None
                if asked.echo and asked.num_logprobs is not None:
                    served.check_scored(num_prompt)
                    scores = PromptScores(served, one.tokens, asked.num_logprobs)
                for choice in range(asked.n):
                    places.append(ExitStack())
                    places[-1].enter_context(self._limits.text(num_new, client))
                    make = partial(TextWriter, served, one.tokens, asked, num_new=num_new, prompt=one.text)
                    make = partial(make, grammar=kind.grammar, kept_tokens=kind.use.kept_tokens if kind.use else ())
                    begin = partial(make, choice=choice, prompt_scores=scores, on_end=places[-1].close)
                    wanted.append((begin, kind.use.new_reader() if kind.use else None))
            for new_text, _ in wanted:
                texts.append(new_text())
        except BaseException:
            for text in texts:
                text.abort()
            for place in places[len(texts) :]:
                place.close()
            raise
        readers = [reader for _, reader in wanted]
        return [
            (text, text.pieces() if reader is None else with_calls(text.pieces(), reader))
            for text, reader in zip(texts, readers, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class _TextKind:
    """The properties that all texts of a request share."""

    is_chat: bool = False
    grammar: CompiledGrammar | None = None
    use: ToolUse | None = None


def _usage(texts: Sequence[TextWriter], num_choices: int) -> dict[str, int]:
    """Count the tokens of the prompts, each prompt once, and of all texts so far."""
    prompts = sum(text.num_prompt for text in texts[::num_choices])
    written = sum(text.num_tokens for text in texts)
    return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


async def _merged(texts: Sequence[AsyncIterator[TextPiece]]) -> AsyncIterator[tuple[int, TextPiece]]:
    """Yield the pieces of several texts as they arrive, with the texts' indices."""
    pieces: asyncio.Queue[tuple[int, TextPiece | BaseException | None]] = asyncio.Queue()

    async def read_one(index: int) -> None:
        try:
            async for piece in texts[index]:
                pieces.put_nowait((index, piece))
        except Exception as error:  # noqa: BLE001 - raised below, from the queue
            pieces.put_nowait((index, error))
        else:
            pieces.put_nowait((index, None))

    readers = [asyncio.ensure_future(read_one(index)) for index in range(len(texts))]
    try:
        left = len(texts)
        while left:
            index, piece = await pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield index, piece
    finally:
        for reader in readers:
            reader.cancel()


async def _until_gone(request: Any) -> None:
    """Wait until the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _stream(events: AsyncIterator[str], held: ExitStack) -> Any:
    """Return a response of server-sent events. `held` is closed after it, even if the client leaves first."""
    from starlette.responses import StreamingResponse

    class EventStream(StreamingResponse):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            with held:
                await super().__call__(scope, receive, send)

    return EventStream(events, media_type="text/event-stream")


async def _events(
    texts: Sequence[AsyncIterator[TextPiece]], form: AnswerForm, usage: Callable[[], dict[str, int]] | None
) -> AsyncIterator[str]:
    """Yield texts as server-sent events. `usage` counts the tokens at the end; None: they are not reported."""
    choices = [Choice(index) for index in range(len(texts))]
    try:
        async for index, piece in _merged(texts):
            yield _event(form.chunk(choices[index], piece))
            choices[index].add(piece)
        if usage is not None:
            yield _event(form.usage_chunk(usage()))
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - the status was sent already
        yield _event(error_answer(str(error), status_of(error)))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _json(content: dict[str, Any], status: int = 200, headers: Any = None) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=status, headers=headers)


def _described(served: ServedText) -> dict[str, Any]:
    length = {} if served.context is None else {"max_model_len": served.context}
    return {"id": served.name, "object": "model", "created": 0, "owned_by": "swarm", **length}


def _client_of(request: Any) -> str:
    return request.client.host if request.client is not None else ""


class _Numbered:
    """Adds an id to each answer, by which it can be found in logs, such as a proxy's."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        number = f"req-{uuid.uuid4().hex}".encode()

        async def send_with_number(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", number)]}
            await send(message)

        await self._app(scope, receive, send_with_number if scope["type"] == "http" else send)


class _Guarded:
    """Requires the key, if one is set, for `/v1`. Refuses pages of other sites that `Access.origins` does not name."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and (problem := self._problem(scope)) is not None:
            await _json(error_answer(str(problem), problem.status, problem.code), problem.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Any) -> RequestError | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")  # sent by browsers, with the site of the page that asks
        is_own = origin is None or origin.partition("://")[2] == headers.get("host")
        if not is_own and not {"*", origin} & {*self._access.origins}:
            return RequestError(403, f"pages of {origin} may not use this endpoint: allow it by `--allow-origin`")
        if self._access.key is None or not scope["path"].startswith("/v1/"):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), self._access.key.encode()):
            return None
        return RequestError(
            401, "this endpoint takes requests with its API key as a bearer token", code="invalid_api_key"
        )


def run(
    served: Sequence[ServedText],
    *,
    host: str,
    port: int,
    key: str | None = None,
    allowed_hosts: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
) -> None:
    """Answer requests until the process is asked to end.

    If only this machine reaches the endpoint, requests must address it by a name of this machine or an allowed name.
    """
    try:
        import llguidance  # noqa: F401 - texts with grammars import it
        import uvicorn
    except ModuleNotFoundError as error:
        raise ConfigError(
            'the HTTP endpoint needs uvicorn, starlette and llguidance. Run: pip install "lightning-swarm[http]"'
        ) from error
    access = Access(key, names_of(host, allowed_hosts), allowed_origins)
    app = TextEndpoint(served).app(access)
    uvicorn.run(app, host=host, port=port, http=_connections(), log_level="warning", limit_concurrency=_MAX_CONNECTIONS)


def _connections() -> Any:
    """Return uvicorn's protocol, which here also closes connections that send no request for `_REQUEST_S` seconds."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._waiting is not None:
                self._waiting.cancel()

        def _wait(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
            self._waiting = asyncio.get_running_loop().call_later(_REQUEST_S, self._close_if_idle)

        def _close_if_idle(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()  # `close` would wait for a client that does not read

    return Connection
