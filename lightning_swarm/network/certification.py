"""Exchange of certificates between two peers, before their first request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from lightning_swarm.core.errors import (
    AccessDenied,
    PeerError,
    ProtocolError,
    SwarmError,
    Uncertified,
    Unreachable,
    Untrusted,
)
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import CERTIFY, OPEN_METHODS, Permit
from lightning_swarm.network.gatekeeper import Gatekeeper

_T = TypeVar("_T")

_TIMEOUT_S: Final = 30.0


@dataclass(eq=False)
class Certification:
    """Exchanges certificates with other peers, and verifies theirs; one exchange at a time with each peer."""

    _gate: Gatekeeper
    _call: Callable[..., Awaitable[bytes]]  # see `Transport.call`
    _spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]  # runs a task while the transport is open
    _running: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)

    async def permit_of(self, peer: PeerId) -> Permit | None:
        """Return a peer's permit. Exchange certificates first if the peer is unknown."""
        if peer != self._gate.own and not self._gate.is_certified(peer):
            await self._certify_at(peer)
        return self._gate.permit_of(peer)

    async def ask(self, peer: PeerId, method: str, send: Callable[[], Awaitable[_T]]) -> _T:
        """Certify a peer and send it a request; if it has forgotten this peer's certificate, do both once more."""
        if method in OPEN_METHODS:
            return await send()
        if not self._gate.may_be_asked(peer, method):
            if not self._gate.is_certified(peer):
                await self._certify_at(peer)
            self._gate.check_before_asking(peer, method)
        try:
            return await send()
        except Uncertified:
            await self._certify_at(peer)
            self._gate.check_before_asking(peer, method)  # the peer's role may have changed
        try:
            return await send()
        # `Uncertified` must not leave this method: within a handler it would pass on to that handler's caller, which
        # would then repeat a request that the handler has already begun.
        except Uncertified as error:
            raise AccessDenied(f"{peer} forgets this peer's certificate at once: {error}") from error

    async def _certify_at(self, peer: PeerId) -> None:
        """Exchange certificates with a peer, or await the exchange that is already running; raise its error."""
        running = self._running.get(peer)
        if running is None:
            running = self._running[peer] = self._spawn(self._exchange(peer))
            running.add_done_callback(partial(self._end, peer))
        # Awaiting the task itself would cancel it with this call, while other calls wait for it.
        await asyncio.wait({running})
        if running.cancelled():
            raise Unreachable(f"The transport was closed before {peer} had answered.")
        error = running.exception()
        if isinstance(error, SwarmError):
            raise type(error)(str(error)) from error  # a new error, because several calls may wait
        running.result()

    def _end(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        del self._running[peer]
        if not task.cancelled():
            task.exception()  # retrieved, because no call may be waiting for it any more

    async def _exchange(self, peer: PeerId) -> None:
        """Send this peer's certificate to another peer, and verify the certificate in the answer."""
        try:
            certificate = await self._call(peer, CERTIFY, self._gate.credentials.certificate, timeout=_TIMEOUT_S)
        except AccessDenied as error:
            raise AccessDenied(f"{peer} refuses the certificate of this peer: {error}") from error
        except ProtocolError as error:
            if isinstance(error, PeerError):  # such as `Damaged`
                raise
            raise Untrusted(f"{peer} shows no certificate, so nothing was sent to it: {error}") from error
        try:
            self._gate.certify(peer, certificate)
        except AccessDenied as error:
            text = f"{peer} shows an invalid certificate, so nothing was sent to it: {error}"
            raise Untrusted(text) from error
