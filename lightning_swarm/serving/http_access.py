"""The restrictions on the HTTP endpoint's use: host names, API keys, and pages of other sites."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_swarm.serving.http_answers import error_answer
from lightning_swarm.serving.http_fields import RequestError

CLIENT: Final = "swarm.client"
"""The entry of an ASGI scope that names the key of a request, if there are several keys."""


@dataclass(frozen=True)
class Access:
    """The restrictions on the endpoint's use.

    Args:
        keys: The bearer tokens of which requests of `/v1` and `/metrics` must bring one. Empty: no token is needed.
        hosts: The host names by which clients may address the endpoint; `("*",)`: any.
        origins: The origins of other sites whose pages may use the endpoint from a browser.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] = ("*",)
    origins: Sequence[str] = ()


UNRESTRICTED: Final = Access()


class Guarded:
    """Requires a key for `/v1` and `/metrics`. Refuses pages of other sites that `Access.origins` does not name."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request that is refused, and pass on any other."""
        if scope["type"] == "http" and (problem := self._problem(scope)) is not None:
            from starlette.responses import JSONResponse

            answer = error_answer(str(problem), problem.status, problem.code)
            # Closed, because a proxy may disagree about where a malformed request ends.
            await JSONResponse(answer, problem.status, headers={"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Any) -> RequestError | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if {"content-length", "transfer-encoding"} <= headers.keys():
            return RequestError(400, "a request has a Content-Length or a Transfer-Encoding, got both")
        origin = headers.get("origin")  # sent by browsers, with the site of the page that asks
        is_own = origin is None or origin.partition("://")[2] == headers.get("host")
        if not is_own and not {"*", origin} & {*self._access.origins}:
            return RequestError(403, f"pages of {origin} may not use this endpoint: allow it by `--allow-origin`")
        if not self._access.keys or not scope["path"].startswith(("/v1/", "/metrics")):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        same = [hmac.compare_digest(key.strip().encode(), one.encode()) for one in self._access.keys]
        if scheme.lower() == "bearer" and True in same:
            if len(same) > 1:
                scope[CLIENT] = f"key {same.index(True)}"
            return None
        return RequestError(
            401, "this endpoint takes requests with its API key as a bearer token", code="invalid_api_key"
        )


def client_of(request: Any) -> str:
    """Return the client for which a request counts: its key if there are several keys, otherwise its address."""
    return request.scope.get(CLIENT) or (request.client.host if request.client is not None else "")


def names_of(host: str, also: Sequence[str]) -> list[str]:
    """Return the host names that requests to an endpoint at `host` may have; `["*"]` allows all names.

    Names are checked only if `host` is local, so `also`, which adds further names, has no effect for any other host.
    A web page can make its own host name resolve to 127.0.0.1, and so read from an endpoint of the user's machine.
    Such requests are refused because they name the page's host.
    """
    return ["localhost", "127.0.0.1", "[::1]", host, *also] if is_local(host) else ["*"]


def is_local(host: str) -> bool:
    """Return whether a host's name or address means this machine alone."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:  # the server will report it
        return False
    addresses = [ipaddress.ip_address(socket_address[0]) for *_, socket_address in found]
    return all((getattr(one, "ipv4_mapped", None) or one).is_loopback for one in addresses)
