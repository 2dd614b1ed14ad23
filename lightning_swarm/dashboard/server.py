"""The HTTP endpoint of the dashboard: the page, the overview as JSON and as a stream of events, and metrics."""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from typing_extensions import override

from lightning_swarm.dashboard.metrics import metrics_text
from lightning_swarm.dashboard.overview import Overview
from lightning_swarm.serving.http_access import UNRESTRICTED, Guarded, names_of
from lightning_swarm.serving.http_connections import Connection
from lightning_swarm.serving.http_streams import EventStream, kept_alive

MAX_STREAMS: Final = 32
_MAX_CONNECTIONS: Final = 128
_FILES: Final = {
    "/": ("page.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src "
    "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # the first address has the token
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class OverviewFeed:
    """The newest overview, which the thread of the surveys publishes and the event loop reads."""

    newest: tuple[Overview, str]  # with its event; set before the first request

    def __init__(self) -> None:
        self.is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()

    def publish(self, overview: Overview) -> None:
        """Replace the overview; safe on any thread."""
        self.newest = overview, f"data: {msgspec.json.encode(overview.shown()).decode()}\n\n"
        self._notify()

    def _notify(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """End all streams."""
        self.is_closed = True
        self._notify()

    @asynccontextmanager
    async def opened(self, _: Any) -> AsyncIterator[None]:
        """Connect the feed to the running loop."""
        self._loop = asyncio.get_running_loop()
        yield
        self._loop = None

    async def events(self, seen: Overview) -> AsyncGenerator[str]:
        """Yield the newest overview whenever it has changed. A slow reader misses the overviews in between."""
        while not self.is_closed:
            overview, text = self.newest
            if overview is seen:
                await self._changed.wait()
                continue
            seen = overview
            yield text


class DashboardApp:
    """Answers HTTP requests about the overviews of a feed."""

    def __init__(self, feed: OverviewFeed) -> None:
        self._feed = feed
        self._num_streams = 0

    def app(self, *, token: str | None, hosts: list[str]) -> Starlette:
        """Return the ASGI application. `hosts`: the names by which browsers may address it; `["*"]`: any."""
        zipped = [Middleware(GZipMiddleware)]
        answers = {"/api/state": self._answer_state, "/metrics": self._answer_metrics}
        return Starlette(
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
                Middleware(Guarded, access=UNRESTRICTED),
                *([Middleware(TokenGate, token=token)] if token is not None else []),
            ],
            routes=[
                *(Route(path, _answer_file, middleware=zipped) for path in _FILES),
                *(Route(path, answer, middleware=zipped) for path, answer in answers.items()),
                Route("/api/events", self._answer_events),  # compressed events would wait in a buffer
            ],
            lifespan=self._feed.opened,
        )

    async def _answer_state(self, _: Request) -> Response:
        return Response(msgspec.json.encode(self._feed.newest[0]), media_type="application/json")

    async def _answer_metrics(self, _: Request) -> Response:
        return Response(metrics_text(self._feed.newest[0]), media_type="text/plain; version=0.0.4")

    async def _answer_events(self, _: Request) -> Any:
        if self._num_streams >= MAX_STREAMS:
            return PlainTextResponse(f"at most {MAX_STREAMS} pages are open at once. Close one.", 503)
        self._num_streams += 1
        held = ExitStack()
        held.callback(self._end_stream)
        overview, text = self._feed.newest
        return EventStream(text, kept_alive(self._feed.events(overview), lambda: "waiting"), held)

    def _end_stream(self) -> None:
        self._num_streams -= 1


async def _answer_file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    return Response(Path(__file__).with_name(name).read_bytes(), media_type=kind)


class TokenGate:
    """ASGI middleware that requires the token, as a bearer token or in the cookie that the printed address sets."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request without the token, and pass on any other."""
        if scope["type"] == "http":
            request = Request(scope)
            cookie = f"swarm-dashboard-{(scope.get('server') or ('', 0))[1]}"  # all ports of a host share its cookies
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            given = request.query_params.get("token")
            if given is not None and self._is_token(given):
                moved = RedirectResponse("/", 303)
                # A strict cookie would not be sent after the redirect if a page of another site links here.
                moved.set_cookie(cookie, self._token, httponly=True, samesite="lax")
                await moved(scope, receive, send)
                return
            is_bearer = scheme.lower() == "bearer" and self._is_token(key.strip())
            if not is_bearer and not self._is_token(request.cookies.get(cookie, "")):
                text = "This dashboard needs its token. Open the address that the command printed, with `?token=`."
                await PlainTextResponse(text, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self._token.encode())


class DashboardServer(uvicorn.Server):
    """uvicorn's server, which ends the streams when it stops, because it would wait for them."""

    def __init__(self, feed: OverviewFeed, *, token: str | None, host: str) -> None:
        app = DashboardApp(feed).app(token=token, hosts=names_of(host, ()))
        options: dict[str, Any] = {"http": Connection, "ws": "none", "log_level": "warning"}
        options |= {"headers": [*_HEADERS.items()], "limit_concurrency": _MAX_CONNECTIONS}
        super().__init__(uvicorn.Config(app, **options))
        self._feed = feed

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)
