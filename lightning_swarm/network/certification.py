"""Exchange of certificates between two peers, before one asks the other for anything."""

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
from lightning_swarm.network.access import MAY, Permit
from lightning_swarm.network.gatekeeper import Gatekeeper

_T = TypeVar("_T")

CERTIFY: Final = "transport.certify"
"""The method by which a peer shows its certificate, and sees the other one's."""

_TIMEOUT_S: Final = 30.0


@dataclass(eq=False)
class Certification:
    """Shows this peer's certificate to others, and verifies what they show; at most one at a time with each peer."""

    _gate: Gatekeeper
    _call: Callable[..., Awaitable[bytes]]  # see `Transport.call`
    _spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]  # for as long as the transport is open
    _running: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)

    async def permit_of(self, peer: PeerId) -> Permit | None:
        """Return what a peer's certificate permits, after the certificates are exchanged if it is not known."""
        if peer != self._gate.own and not self._gate.knows(peer):
            await self._certify_at(peer)
        return self._gate.permit_of(peer)

    async def ask(self, peer: PeerId, method: str, ask: Callable[[], Awaitable[_T]]) -> _T:
        """Ask a peer that has shown its certificate, and show it this one's again if it has forgotten that."""
        if method in MAY and MAY[method] is None:
            return await ask()
        if not self._gate.may_be_asked(peer, method):
            if not self._gate.knows(peer):
                await self._certify_at(peer)
            self._gate.check_answers(peer, method)
        try:
            return await ask()
        except Uncertified:
            await self._certify_at(peer)
            self._gate.check_answers(peer, method)  # it may have come back in another role
        try:
            return await ask()
        except Uncertified as error:  # by another name, so that nobody repeats a request that a handler has begun
            raise AccessDenied(f"{peer} forgets this peer's certificate at once: {error}") from error

    async def _certify_at(self, peer: PeerId) -> None:
        running = self._running.get(peer)
        if running is None:
            running = self._running[peer] = self._spawn(self._exchange(peer))
            running.add_done_callback(partial(self._end, peer))
        # Not awaited itself: a call that is given up must not end what other calls wait for.
        await asyncio.wait({running})
        if running.cancelled():
            raise Unreachable(f"The transport was closed before {peer} had answered.")
        error = running.exception()
        if isinstance(error, SwarmError):
            raise type(error)(str(error)) from error
        running.result()

    def _end(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        del self._running[peer]
        if not task.cancelled():
            task.exception()  # retrieved: perhaps nobody waits for it any more

    async def _exchange(self, peer: PeerId) -> None:
        """Show a peer this one's certificate, and verify the one that it answers with."""
        try:
            shown = await self._call(peer, CERTIFY, self._gate.credentials.certificate, timeout=_TIMEOUT_S)
        except AccessDenied as error:
            raise AccessDenied(f"{peer} refuses the certificate of this peer: {error}") from error
        except ProtocolError as error:
            if isinstance(error, PeerError):  # it was damaged on its way, say
                raise
            raise Untrusted(f"{peer} shows no certificate, so nothing was sent to it: {error}") from error
        try:
            self._gate.certify(peer, shown)
        except AccessDenied as error:
            text = f"{peer} shows a certificate that does not hold, so nothing was sent to it: {error}"
            raise Untrusted(text) from error
