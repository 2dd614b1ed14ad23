"""`TaskTransport`: a transport whose handlers come and go with a task of its peer, such as coordinating."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning_swarm.core.errors import NotCoordinator, SwarmError
from lightning_swarm.network import MAX_STREAM_BYTES, Admit, CallHandler, Message, PeerId, StreamHandler, Transport
from lightning_swarm.network.access import Permit


class TaskTransport(Transport):
    """A peer's transport while it has a task; at other times the task's methods are refused."""

    def __init__(
        self,
        transport: Transport,
        calls: Iterable[str],
        streams: Mapping[str, int],  # method -> most tensor bytes of a request
        *,
        idle: str = "does not coordinate",  # words of the error, after the peer's name
        refusal: type[SwarmError] = NotCoordinator,  # class of that error; callers may then ask another peer
    ) -> None:
        self._idle_text, self._error_class = idle, refusal
        self.peer_id, self.traffic = transport.peer_id, transport.traffic
        self._transport = transport
        self._handlers: dict[str, Callable[[PeerId, Any], Awaitable[Any]] | None] = {}
        self._admits: dict[str, Admit | None] = {}
        # The task's methods are registered now, so that they are refused with a clear error before it first begins.
        for method in calls:
            self.handle_call(method, None)
        for method, max_bytes in streams.items():
            self.handle_stream(method, None, max_bytes=max_bytes)

    def retire(self) -> None:
        """End the task: refuse its methods from now on."""
        self._handlers = dict.fromkeys(self._handlers)

    @property
    def closed(self) -> bool:
        """See `Transport`."""
        return self._transport.closed

    def handle_call(self, method: str, handler: CallHandler | None) -> None:
        """Answer a method by its handler until the task ends; without a handler, refuse its calls."""
        if method not in self._handlers:
            self._transport.handle_call(method, partial(self._answer, method))
        self._handlers[method] = handler

    def handle_stream(
        self,
        method: str,
        handler: StreamHandler | None,
        *,
        max_bytes: int = MAX_STREAM_BYTES,
        admit: Admit | None = None,
    ) -> None:
        """Answer a method by its handler until the task ends; without a handler, refuse its requests."""
        if method not in self._handlers:
            answer, check = partial(self._answer, method), partial(self._admit, method)
            self._transport.handle_stream(method, answer, max_bytes=max_bytes, admit=check)
        self._handlers[method], self._admits[method] = handler, admit

    async def call(self, peer: PeerId, method: str, body: bytes, *, timeout: float) -> bytes:
        """See `Transport`."""
        return await self._transport.call(peer, method, body, timeout=timeout)

    async def stream(
        self, peer: PeerId, method: str, message: Message, *, timeout: float, max_bytes: int = MAX_STREAM_BYTES
    ) -> Message:
        """See `Transport`."""
        return await self._transport.stream(peer, method, message, timeout=timeout, max_bytes=max_bytes)

    async def ping(self, peer: PeerId) -> float:
        """See `Transport`."""
        return await self._transport.ping(peer)

    def permit_of(self, peer: PeerId) -> Permit | None:
        """See `Transport`."""
        return self._transport.permit_of(peer)

    async def certify(self, peer: PeerId) -> Permit | None:
        """See `Transport`."""
        return await self._transport.certify(peer)

    @property
    def num_refused(self) -> int:
        """See `Transport`."""
        return self._transport.num_refused

    @property
    def bans(self) -> list[bytes]:
        """See `Transport`."""
        return self._transport.bans

    def ban(self, signed: bytes) -> None:
        """See `Transport`."""
        self._transport.ban(signed)

    async def connect(self, addresses: Sequence[str]) -> None:
        """See `Transport`."""
        await self._transport.connect(addresses)

    async def identify(self, address: str) -> PeerId | None:
        """See `Transport`."""
        return await self._transport.identify(address)

    async def addresses(self) -> tuple[str, ...]:
        """See `Transport`."""
        return await self._transport.addresses()

    async def close(self) -> None:
        """End the task, and leave the peer's transport open."""
        self.retire()

    def _admit(self, method: str, caller: PeerId) -> None:
        if self._handlers[method] is None:
            raise self._refusal(method)
        admit = self._admits[method]
        if admit is not None:
            admit(caller)

    async def _answer(self, method: str, caller: PeerId, request: Any) -> Any:
        handler = self._handlers[method]
        if handler is None:
            raise self._refusal(method)
        return await handler(caller, request)

    def _refusal(self, method: str) -> SwarmError:
        """Return the error of a peer without the task, by default `NotCoordinator`, which does not blame the peer."""
        return self._error_class(f"{self.peer_id} {self._idle_text} (now), so it does not answer {method}")
