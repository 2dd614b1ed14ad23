"""An endpoint with OpenAI's HTTP protocol for served models: completions and chats, whole or streamed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_swarm.core.extras import require_extra
from lightning_swarm.serving.grammar import Grammar, grammar_of
from lightning_swarm.serving.http_access import UNRESTRICTED, Access, Guarded, client_of, names_of
from lightning_swarm.serving.http_answers import AnswerForm, Form, error_answer, status_of
from lightning_swarm.serving.http_fields import Chat, Completion, RequestError, TextFields, read, short
from lightning_swarm.serving.http_limits import RequestLimits
from lightning_swarm.serving.http_metrics import EndpointMetrics
from lightning_swarm.serving.http_page import page
from lightning_swarm.serving.http_prompts import Prompt, tokens_of_chat, tokens_of_prompt
from lightning_swarm.serving.http_queue import DEFAULT_LIMITS, QueueLimits, TextQueue
from lightning_swarm.serving.http_responses import ResponseForm, read_response
from lightning_swarm.serving.http_streams import STREAM_STATUS, ClientGone, EventStream, event, kept_alive, unless_gone
from lightning_swarm.serving.http_texts import PlannedText, RequestTexts
from lightning_swarm.serving.texts import PromptScores, ServedText, TextWriter
from lightning_swarm.serving.tool_calls import ToolUse, tool_use

if TYPE_CHECKING:
    from lightning_swarm.serving.grammar_masks import NewMask

_HEALTH_S: Final = 10.0  # seconds for which a health check is valid, and its timeout
_SPARE_CONNECTIONS: Final = 192  # connections in addition to one for each text and each waiting request
_RETRY_S: Final = "10"  # seconds after which a refused client may try again
_ARRIVED_S: Final = "swarm.arrived_s"  # entry of an ASGI scope: time at which the request arrived


class TextEndpoint:
    """Answers HTTP requests: for texts of the served models, for the list of models, for health and metrics."""

    def __init__(self, served: Sequence[ServedText], limits: QueueLimits = DEFAULT_LIMITS) -> None:
        self._served = {model.name: model for model in served}
        self._health: tuple[float, str] = (float("-inf"), "")  # time of the last check, and the problem that it found
        self._checking_health = asyncio.Lock()  # held during a health check
        self._probe: TextWriter | None = None  # the text of the last health check
        self._limits = RequestLimits()
        self._queue = TextQueue(limits)
        self._metrics = EndpointMetrics(served)

    def app(self, access: Access = UNRESTRICTED) -> Any:
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
        paths = {
            "/": self._answer_page,
            "/health": self._answer_health,
            "/metrics": self._answer_metrics,
            "/v1/models": self._answer_models,
        }
        texts = {
            "/v1/completions": self._answer_completion,
            "/v1/chat/completions": self._answer_chat,
            "/v1/responses": self._answer_response,
        }
        return Starlette(
            middleware=[
                Middleware(_CountingRequests, metrics=self._metrics, paths={*paths, *texts}),
                Middleware(TrustedHostMiddleware, allowed_hosts=list(access.hosts), www_redirect=False),
                *(origins if access.origins else []),
                Middleware(Guarded, access=access),
            ],
            routes=[
                *(Route(path, answer) for path, answer in paths.items()),
                Route("/v1/models/{name:path}", self._answer_model),
                *(Route(path, answer, methods=["POST"]) for path, answer in texts.items()),
            ],
            exception_handlers={
                RequestError: self._answer_error,
                HTTPException: self._answer_other,
                ClientDisconnect: self._answer_gone,
                ClientGone: self._answer_gone,
                Exception: self._answer_failure,
            },
        )

    async def _answer_error(self, _: Any, error: Exception) -> Any:
        assert isinstance(error, RequestError)
        later = {"retry-after": _RETRY_S} if error.status == 429 else None
        return _json(error_answer(str(error), error.status, error.code, error.param), error.status, later)

    async def _answer_other(self, request: Any, error: Any) -> Any:
        """Answer a request without a matching route or method."""
        message = f"{error.detail}: {request.method} {short(request.url.path)}"
        return _json(error_answer(message, error.status_code), error.status_code, error.headers)

    async def _answer_gone(self, _: Any, error: Exception) -> Any:
        """Answer a client that has left, so that the server does not log a failure."""
        from starlette.responses import Response

        return Response(status_code=499)  # as in nginx

    async def _answer_failure(self, _: Any, error: Exception) -> Any:
        return _json(error_answer(str(error), status_of(error)), status_of(error))

    async def _answer_health(self, _: Any) -> Any:
        """Report whether each model has just written a token."""
        async with self._checking_health:  # simultaneous requests share one check
            if time.monotonic() >= self._health[0] + _HEALTH_S:
                self._health = time.monotonic(), await self._problem()
        problem = self._health[1]
        return _json({"status": problem or "ok"}, 503 if problem else 200)

    async def _problem(self) -> str:
        """Have each model write one token; return the first problem, or an empty text."""
        import torch

        if self._probe is not None and not self._probe.is_done:
            return f"{self._probe.served.name}: the token of an earlier check has not come yet"
        for served in self._served.values():
            if served.parent is not None:
                continue  # an adapter has the servers of its model
            encoded = {
                "input_ids": torch.zeros(1, 1, dtype=torch.long),
                "attention_mask": torch.ones(1, 1, dtype=torch.long),
            }
            writer = self._probe = TextWriter(served, encoded, TextFields(temperature=0.0), num_new=1)
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
        return _json({"object": "list", "data": [_description(served) for served in self._served.values()]})

    async def _answer_model(self, request: Any) -> Any:
        return _json(_description(self._model(request.path_params["name"])))

    def _model(self, name: str) -> ServedText:
        if name in self._served:
            return self._served[name]
        raise RequestError(
            404,
            f"there is no model {short(name)!r} here, only {sorted(self._served)}",
            code="model_not_found",
            param="model",
        )

    async def _answer_metrics(self, _: Any) -> Any:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _answer_page(self, _: Any) -> Any:
        from starlette.responses import HTMLResponse

        text, headers = page()
        return HTMLResponse(text, headers=headers)

    async def _answer_completion(self, request: Any) -> Any:
        with ExitStack() as resources:
            body = await self._limits.body(request, resources)
            fields = read(body, Completion)
            served = self._model(fields.model)
            prompts = [
                await self._limits.tokenized(
                    client_of(request), partial(tokens_of_prompt, served, fields, prompt), len(body)
                )
                for prompt in fields.prompts
            ]
            grammar = await self._compiled(request, served, grammar_of(fields))
            return await self._answer(request, fields, served, prompts, _SharedOptions(grammar=grammar), resources)

    async def _answer_chat(self, request: Any) -> Any:
        with ExitStack() as resources:
            body = await self._limits.body(request, resources)
            return await self._chat(request, read(body, Chat), len(body), resources)

    async def _answer_response(self, request: Any) -> Any:
        with ExitStack() as resources:
            body = await self._limits.body(request, resources)
            fields, echo = read_response(body)
            return await self._chat(request, fields, len(body), resources, ResponseForm(fields.model, echo))

    async def _chat(
        self, request: Any, fields: Chat, num_bytes: int, resources: ExitStack, form: Form | None = None
    ) -> Any:
        served = self._model(fields.model)
        prompt = await self._limits.tokenized(client_of(request), partial(tokens_of_chat, served, fields), num_bytes)
        answer = grammar_of(fields)
        use = tool_use(served, fields, prompt.text, answer)
        grammar = await self._compiled(request, served, answer if use is None else use.grammar)
        shared = _SharedOptions(is_chat=True, grammar=grammar, use=use, form=form)
        return await self._answer(request, fields, served, [prompt], shared, resources)

    async def _compiled(self, request: Any, served: ServedText, grammar: Grammar | None) -> NewMask | None:
        """Compile a grammar before any token is computed. Raises RequestError if texts cannot follow it."""
        if grammar is None:
            return None
        return await self._limits.compiled(client_of(request), lambda: served.grammars.compile(grammar))

    async def _answer(
        self,
        request: Any,
        fields: TextFields,
        served: ServedText,
        prompts: Sequence[Prompt],
        shared: _SharedOptions,
        resources: ExitStack,  # holds the memory budget of the request's body
    ) -> Any:
        """Write the texts of a request, `fields.n` for each prompt, and return the whole answer or a stream of it."""
        from lightning_swarm.serving.sampling import check_tokens

        check_tokens(fields, served.model.config.get_text_config().vocab_size)
        client = client_of(request)
        planned, num_new = _plan(client, fields, served, prompts, shared)
        queued = self._queue.enter(client, len(planned), num_new)
        arrived_s = request.scope[_ARRIVED_S]
        texts = RequestTexts(
            planned, queued, self._metrics, served.name, arrived_s=arrived_s, resources=resources.pop_all()
        )
        form: Form = shared.form or AnswerForm(
            served.name,
            shared.is_chat,
            len(planned),
            has_scores=fields.num_logprobs is not None,
            has_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        )
        with ExitStack() as closing:
            closing.callback(texts.close)
            if not fields.stream:
                return _json(await unless_gone(request.receive, _whole(texts, form, fields.n)))
            events = kept_alive(_events(texts, form, fields.n), lambda: "queued" if texts.is_waiting else "waiting")
            first = await unless_gone(request.receive, anext(events))
            return EventStream(first, events, closing.pop_all())


def _plan(
    client: str, fields: TextFields, served: ServedText, prompts: Sequence[Prompt], shared: _SharedOptions
) -> tuple[list[PlannedText], int]:
    """Plan all texts of a request; return them, and the maximum number of new tokens of the longest."""
    planned, longest = list[PlannedText](), 0
    for prompt in prompts:
        num_prompt = prompt.encoded["input_ids"].shape[1]
        num_new = served.num_new(num_prompt, fields.num_tokens)
        longest = max(longest, num_new)
        scores = None
        if fields.echo and fields.num_logprobs is not None:
            served.check_scored(num_prompt)
            scores = PromptScores(served, prompt.encoded, fields.num_logprobs)
        make = partial(TextWriter, served, prompt.encoded, fields, num_new=num_new)
        make = partial(make, prompt=prompt.text, grammar=shared.grammar)
        make = partial(make, prompt_scores=scores, kept_tokens=shared.use.kept_tokens if shared.use else ())
        make = partial(make, scope=(client, fields.cache_salt))
        for choice in range(fields.n):
            planned.append(PlannedText(partial(make, choice=choice), shared.use.new_reader() if shared.use else None))
    return planned, longest


@dataclass(frozen=True, kw_only=True)
class _SharedOptions:
    """The properties that all texts of a request share."""

    is_chat: bool = False
    grammar: NewMask | None = None
    use: ToolUse | None = None
    form: Form | None = None  # None: the form of completions and chats


async def _whole(texts: RequestTexts, form: Form, num_choices: int) -> dict[str, Any]:
    """Return the answer with all texts."""
    async for index, piece in texts.pieces():
        form.take(index, piece)
    return form.whole(texts.usage(num_choices))


async def _events(texts: RequestTexts, form: Form, num_choices: int) -> AsyncGenerator[str]:
    """Yield texts as server-sent events."""
    first = form.begin()  # sent with the first piece, so that an earlier error can set the HTTP status
    async with aclosing(texts.pieces()) as pieces:
        async for index, piece in pieces:
            for content in (*first, *form.take(index, piece)):
                yield event(content)
            first = []
    for content in form.end(texts.usage(num_choices)):
        yield event(content)
    if form.end_mark:
        yield form.end_mark


def _json(content: dict[str, Any], status: int = 200, headers: Any = None) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(content, status_code=status, headers=headers)


def _description(served: ServedText) -> dict[str, Any]:
    length = {} if served.context is None else {"max_model_len": served.context}
    model = {"id": served.name, "object": "model", "created": 0, "owned_by": "swarm", "parent": served.parent}
    return model | length


class _CountingRequests:
    """ASGI middleware that counts requests, and adds to each answer an id for logs, such as a proxy's."""

    def __init__(self, app: Any, metrics: EndpointMetrics, paths: Collection[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, status = f"req-{uuid.uuid4().hex}".encode(), 499
        scope[_ARRIVED_S] = time.monotonic()

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            status = status_of(error)  # an outer middleware answers with this status
            raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._metrics.requests.labels(path, str(scope.get(STREAM_STATUS, status))).inc()


def run(
    served: Sequence[ServedText],
    *,
    host: str,
    port: int,
    limits: QueueLimits = DEFAULT_LIMITS,
    keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
) -> None:
    """Answer requests until the process is asked to end.

    If `host` is local, requests must address the endpoint by a name of this machine or one of `allowed_hosts`.
    """
    require_extra("http", "the HTTP endpoint")
    import uvicorn

    from lightning_swarm.serving.http_connections import Connection

    access = Access(keys, names_of(host, allowed_hosts), allowed_origins)
    app = TextEndpoint(served, limits).app(access)
    limit = limits.texts + limits.waiting + _SPARE_CONNECTIONS
    # WebSockets are off, because no path uses them and uvicorn does not limit their connections.
    uvicorn.run(app, host=host, port=port, http=Connection, ws="none", log_level="warning", limit_concurrency=limit)
