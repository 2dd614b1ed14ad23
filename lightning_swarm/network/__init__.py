"""What the rest of the package knows of a network: `Transport`, `Directory`, `Message`.

`network/hivemind/` talks over libp2p and a Kademlia DHT; `network/memory.py` is its twin in one
process. Both pass the same contract tests, both send through `network/framing.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

from torch import Tensor

from lightning_swarm.network.bandwidth import LinkEstimates

PeerId = NewType("PeerId", str)
"""A peer's identity: the base58 text of its public key's hash."""

MAX_CALL_BYTES = 1 << 20
"""Longest body of a call or of its answer: they share a stream, and a long one would hold up the others."""

SMALL_BYTES = 64 << 10
"""Most tensor bytes that travel beside calls, on the stream that these share: more of it would hold them up."""

MAX_STREAM_BYTES = 8 << 30
"""Default cap on all tensors of one message. Checked before memory is allocated."""


@dataclass(frozen=True)
class Message:
    """A control body and the tensors that belong to it.

    Args:
        body: At most `MAX_CALL_BYTES`; its meaning is the method's business.
        tensors: CPU tensors of any dense dtype and shape; they travel as raw bytes, never pickled.
    """

    body: bytes = b""
    tensors: tuple[Tensor, ...] = ()

    @property
    def num_tensor_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""``(caller, body) -> body``. The caller is authenticated. A `SwarmError` travels back by its name."""

StreamHandler = Callable[[PeerId, Message], Awaitable[Message]]
"""``(caller, message) -> message``, both with tensors."""


@dataclass
class Traffic:
    """Bytes that this peer put on and took off the wire, framing included; calls to itself are not counted.

    Keys are ``(other peer, method)``.
    """

    sent_bytes: Counter[tuple[PeerId, str]] = field(default_factory=Counter)
    received_bytes: Counter[tuple[PeerId, str]] = field(default_factory=Counter)


class Transport(ABC):
    """Calls between peers. Lives on one asyncio loop; none of its methods may be called from another thread.

    A peer may call itself: the handler runs directly, nothing is copied or counted.
    """

    traffic: Traffic
    links: LinkEstimates

    @property
    @abstractmethod
    def peer_id(self) -> PeerId:
        """This peer."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""

    @abstractmethod
    def handle_call(self, method: str, handler: CallHandler) -> None:
        """Answer the calls of `method`. A method may be registered once."""

    @abstractmethod
    def handle_stream(self, method: str, handler: StreamHandler, *, max_bytes: int = MAX_STREAM_BYTES) -> None:
        """Answer the streams of `method`; a request with more tensor bytes than `max_bytes` is refused unread."""

    @abstractmethod
    async def call(self, peer: PeerId, method: str, body: bytes, *, timeout: float) -> bytes:
        """One small request and its answer.

        Args:
            peer: Whom to ask.
            method: What; the other side must have registered it.
            body: At most `MAX_CALL_BYTES`.
            timeout: Seconds until `DeadlineExceeded`.

        Raises:
            Unreachable: No connection, or it broke before the answer, or the peer fell silent: see `ping`.
            DeadlineExceeded: No answer in time.
            ProtocolError: The body or the answer is too long, or the method is unknown there.
            SwarmError: Whatever the handler raised, by its name.
        """

    @abstractmethod
    async def stream(
        self, peer: PeerId, method: str, message: Message, *, timeout: float, max_bytes: int = MAX_STREAM_BYTES
    ) -> Message:
        """One message with tensors, and an answer with tensors. Raises what `call` raises.

        Args:
            peer: Whom to ask.
            method: What.
            message: The tensors are not changed and may be shared; they must not change until this returns.
            timeout: Seconds for the whole exchange.
            max_bytes: An answer with more tensor bytes is refused before memory is allocated. Where neither it nor the
                request may have more than `SMALL_BYTES`, the exchange costs no more than a call does.
        """

    @abstractmethod
    async def ping(self, peer: PeerId) -> float:
        """Ask whether a peer is alive: seconds until it answered. A peer that computes answers, too.

        Nobody needs to ask before a call: while one is under way, its peer is pinged, and `Unreachable` is raised soon
        after it fell silent. So a call's `timeout` may be as long as the work that it asks for.

        Raises:
            Unreachable: No connection, or no answer for as long as a peer may be silent.
        """

    @abstractmethod
    async def connect(self, addresses: Sequence[str]) -> None:
        """Make peers reachable by their full addresses (as `addresses` of theirs gave them)."""

    @abstractmethod
    async def addresses(self) -> tuple[str, ...]:
        """Full addresses (``/ip4/…/tcp/…/p2p/<peer id>``) under which others can reach this peer."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving; every exchange under way ends with `Unreachable`. Twice is fine."""


class Directory(ABC):
    """Small announcements with an expiry that all peers can read. It tells where to look and decides nothing."""

    @abstractmethod
    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """Publish `value` (at most 64 KiB) under `key` for this peer; replaces its earlier one.

        Raises:
            Unreachable: No other peer stored it although there are others.
            ProtocolError: The value is too long.
        """

    @abstractmethod
    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """What peers announced under `key` and has not expired. Malformed records of others are left out."""

    @abstractmethod
    async def close(self) -> None:
        """Leave. Twice is fine."""
