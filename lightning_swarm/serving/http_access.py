"""Restricts access to the HTTP endpoint: by host names, by API keys, and for pages of other sites."""

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
"""Entry of an ASGI scope: the name of the request's API key, if the endpoint has several keys."""


@dataclass(frozen=True)
class Access:
    """The restrictions on the endpoint's use.

    Args:
        keys: The API keys. Requests for `/v1` and `/metrics` need one as a bearer token. Empty: no key is needed.
        hosts: The host names by which clients may address the endpoint; `("*",)`: any name.
        origins: The origins of other sites whose pages may use the endpoint from a browser.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] = ("*",)
    origins: Sequence[str] = ()


UNRESTRICTED: Final = Access()


class Guarded:
    """ASGI middleware that requires a key, and refuses pages of sites that are not in `Access.origins`."""

    def __init__(self, app: Any, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer requests that are refused, and pass all other requests on."""
        if scope["type"] == "http" and (problem := self._problem(scope)) is not None:
            from starlette.responses import JSONResponse

            answer = error_answer(str(problem), problem.status, problem.code)
            # The connection is closed, because a proxy may disagree about where a malformed request ends.
            await JSONResponse(answer, problem.status, headers={"connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Any) -> RequestError | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if {"content-length", "transfer-encoding"} <= headers.keys():
            return RequestError(400, "a request must not have both a Content-Length and a Transfer-Encoding")
        origin = headers.get("origin")  # set by browsers to the site of the requesting page
        is_same_site = origin is None or origin.partition("://")[2] == headers.get("host")
        if not is_same_site and not {"*", origin} & {*self._access.origins}:
            remedy = "`lightning-swarm http` permits other sites by `--allow-origin`"
            return RequestError(403, f"pages of {origin} may not use this endpoint: {remedy}")
        if not self._access.keys or not scope["path"].startswith(("/v1/", "/metrics")):
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        matches = [hmac.compare_digest(key.strip().encode(), valid.encode()) for valid in self._access.keys]
        if scheme.lower() == "bearer" and True in matches:
            if len(matches) > 1:
                scope[CLIENT] = f"key {matches.index(True)}"
            return None
        return RequestError(401, "this endpoint requires its API key as a bearer token", code="invalid_api_key")


def client_of(request: Any) -> str:
    """Return the client to which a request is charged: its key if there are several keys, otherwise its address."""
    return request.scope.get(CLIENT) or (request.client.host if request.client is not None else "")


def names_of(host: str, extra_names: Sequence[str]) -> list[str]:
    """Return the host names that requests to an endpoint at `host` may have; `["*"]` allows all names.

    A web page can make its own host name resolve to 127.0.0.1, and so read from an endpoint on the user's machine. Such
    requests are refused, because they name the page's host. So names are checked only if `host` is local; otherwise
    `extra_names` have no effect.
    """
    return ["localhost", "127.0.0.1", "[::1]", host, *extra_names] if is_local(host) else ["*"]


def is_local(host: str) -> bool:
    """Return whether a host's name or address means this machine alone."""
    try:
        infos = socket.getaddrinfo(host, None)
    except OSError:  # the server will report that it cannot listen there
        return False
    addresses = [ipaddress.ip_address(socket_address[0]) for *_, socket_address in infos]
    return all((getattr(address, "ipv4_mapped", None) or address).is_loopback for address in addresses)
