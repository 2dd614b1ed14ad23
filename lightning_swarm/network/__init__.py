"""The interface of a network for the rest of the package; `network/hivemind/` and `network/memory.py` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NewType

from typing_extensions import override

from lightning_swarm.core.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_swarm.network.access import Permit

PeerId = NewType("PeerId", str)
"""A peer's identity: the base58 text of its Ed25519 public key, or of the hash of its RSA key."""

MAX_CALL_BYTES = 1 << 20
"""Longest body of a call or of its answer. Calls share a stream, and a long body would delay other calls."""

SMALL_BYTES = 64 << 10
"""Most tensor bytes of a message that shares the stream of the calls. A larger message would delay the calls."""

MAX_STREAM_BYTES = 8 << 30
"""Default cap on the bytes of all tensors of one message. It is checked before memory is allocated."""


@dataclass(frozen=True)
class Message:
    """A control body and the tensors that belong to it."""

    body: bytes = b""  # at most `MAX_CALL_BYTES`; its meaning depends on the method
    tensors: tuple[Tensor, ...] = ()  # on the CPU, of any dense dtype and shape; they travel as raw bytes

    @property
    def num_tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
"""``(caller, body) -> body``. The caller is authenticated. A `SwarmError` is raised again at the caller."""

StreamHandler = Callable[[PeerId, Message], Awaitable[Message]]
"""``(caller, message) -> message``, both with tensors."""


Admit = Callable[[PeerId], None]
"""Checks a caller, and raises a `SwarmError` if it may not call."""


_MAX_COUNTS: Final = 4096
_FORMER: Final = PeerId("")  # stands for the peers whose counts were added up to make room


class ByteCounts(Counter[tuple[PeerId, str]]):
    """Bytes by ``(other peer, method)``. Beyond `_MAX_COUNTS` counts, the older half is added up by method."""

    all_bytes = 0  # may be read from any thread

    @override
    def __setitem__(self, key: tuple[PeerId, str], count: int) -> None:
        if len(self) >= _MAX_COUNTS and key not in self:
            for former in list(self)[: len(self) // 2]:
                former_count, merged = self.pop(former), (_FORMER, former[1])
                super().__setitem__(merged, self.get(merged, 0) + former_count)
        self.all_bytes += count - self.get(key, 0)
        super().__setitem__(key, count)


@dataclass
class Traffic:
    """Bytes, framing included, that this peer has exchanged."""

    sent_bytes: ByteCounts = field(default_factory=ByteCounts)
    received_bytes: ByteCounts = field(default_factory=ByteCounts)

    def totals(self) -> tuple[int, int]:
        """Return all bytes sent and all bytes received. Safe from any thread."""
        return self.sent_bytes.all_bytes, self.received_bytes.all_bytes


_SHORT_BYTES: Final = 4 << 10  # messages up to this length measure the round trip
_LONG_BYTES: Final = 64 << 10  # messages of this length or more measure the bandwidth
_MAX_LINKS: Final = 1024


@dataclass(frozen=True)
class TransferSample:
    """The length of a long message, and the seconds from the start of its request to the end of its answer."""

    num_bytes: int
    took_s: float


@dataclass
class LinkEstimate:
    """The best samples of the link to a peer. Slower exchanges, which waited or shared the link, are ignored."""

    round_trip_s: float | None = None  # fastest short call with its answer; None: no sample
    sent: TransferSample | None = None  # fastest long request; None: no sample
    received: TransferSample | None = None  # fastest long answer; None: no sample


class LinkEstimates(dict[str, LinkEstimate]):
    """Link estimates by peer id, of the `_MAX_LINKS` peers that were met last."""

    def add_sample(self, peer: str, *, sent_bytes: int, received_bytes: int, took_s: float) -> None:
        """Add the sample of an exchange: bytes of the request and of the answer, and the seconds that it took."""
        link = self.get(peer)
        if link is None:
            if len(self) >= _MAX_LINKS:  # over weeks, most of the oldest peers are gone; others are measured again
                del self[next(iter(self))]
            link = self[peer] = LinkEstimate()
        num_bytes = max(sent_bytes, received_bytes)
        if num_bytes <= _SHORT_BYTES:
            link.round_trip_s = took_s if link.round_trip_s is None else min(took_s, link.round_trip_s)
        elif num_bytes >= _LONG_BYTES and sent_bytes > received_bytes:
            link.sent = _faster(link.sent, TransferSample(num_bytes, took_s))
        elif num_bytes >= _LONG_BYTES:
            link.received = _faster(link.received, TransferSample(num_bytes, took_s))


def _faster(best: TransferSample | None, new: TransferSample) -> TransferSample:
    return new if best is None or new.num_bytes * best.took_s > best.num_bytes * new.took_s else best


class Transport(ABC):
    """Exchanges messages with other peers, on one asyncio loop: no method may be called from another thread."""

    peer_id: PeerId  # this peer's
    traffic: Traffic
    links: LinkEstimates
    on_refused: Callable[[int], None]
    """Called with the number of requests that were refused for lack of a permit since the last time it was called."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether this peer can no longer send anything."""

    @abstractmethod
    def handle_call(self, method: str, handler: CallHandler) -> None:
        """Answer the calls of `method`, which may be registered only once."""

    @abstractmethod
    def handle_stream(
        self, method: str, handler: StreamHandler, *, max_bytes: int = MAX_STREAM_BYTES, admit: Admit | None = None
    ) -> None:
        """Answer the streams of `method`. Requests with more tensor bytes than `max_bytes` are refused unread."""
        # Requests of callers that `admit` refuses are refused unread, too. Without `admit`, fewer bytes of each
        # caller may be under way.

    @abstractmethod
    async def call(self, peer: PeerId, method: str, body: bytes, *, timeout: float) -> bytes:
        """Send one request of at most `MAX_CALL_BYTES`, and return its answer within `timeout` seconds."""
        # If the peer is this one, the handler runs directly, and nothing is copied or counted. Raises:
        # - Unreachable: there is no connection, it broke before the answer, or the peer fell silent (see `ping`);
        # - DeadlineExceeded: no answer came in time;
        # - ProtocolError: the body or the answer is too long, or the method is unknown there;
        # - AccessDenied: this peer's certificate does not permit the call there;
        # - Untrusted: that peer shows no certificate of this run, so nothing was sent to it;
        # - any other SwarmError that the handler raised, which is sent by its name.

    @abstractmethod
    async def stream(
        self, peer: PeerId, method: str, message: Message, *, timeout: float, max_bytes: int = MAX_STREAM_BYTES
    ) -> Message:
        """Send one message with tensors and return the answer, which has tensors, too. Raises the errors of `call`."""
        # The tensors are only read and may be shared, but must not change until this returns. An answer with more than
        # `max_bytes` of tensors is refused before memory is allocated. If `max_bytes` and the request are at most
        # `SMALL_BYTES`, the exchange costs no more than a call.

    @abstractmethod
    async def ping(self, peer: PeerId) -> float:
        """Return the seconds until a peer answers, even if it computes; `Unreachable` if it is silent for too long."""
        # There is no need to ping before a call: during an exchange its peer is pinged, and `Unreachable` is raised
        # soon after it falls silent. So a call's `timeout` may be as long as the requested work.

    @abstractmethod
    def permit_of(self, peer: PeerId) -> Permit | None:
        """Return the permit of a peer's certificate; None: it has shown none, or all peers may call."""

    @abstractmethod
    async def certify(self, peer: PeerId) -> Permit | None:
        """Like `permit_of`, after exchanging certificates if necessary. Raises the errors of `call`."""

    @property
    @abstractmethod
    def num_refused(self) -> int:
        """The number of requests that were refused because a certificate was missing, or did not permit them."""

    @property
    @abstractmethod
    def bans(self) -> list[bytes]:
        """The newest signed ban of each peer or invitation that was ever banned, lifted bans included."""

    @abstractmethod
    def ban(self, signed: bytes) -> None:
        """Apply the owner's ban, or lift it; `AccessDenied` if the owner did not sign it, or if all peers may call."""

    @abstractmethod
    async def connect(self, addresses: Sequence[str]) -> None:
        """Make peers reachable by their full addresses, as their own `addresses` returns them."""

    @abstractmethod
    async def identify(self, address: str) -> PeerId | None:
        """Return the id of the peer that answers at an address (``/ip4/…/tcp/…``); None if no peer is found."""

    @abstractmethod
    async def addresses(self) -> tuple[str, ...]:
        """Return the full addresses (``/ip4/…/tcp/…/p2p/<peer id>``) by which other peers can reach this one."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving, and end all open exchanges with `Unreachable`. A second call does nothing."""


MAX_RECORD_BYTES: Final = 64 << 10
"""Longest value of an announcement."""

MAX_RECORD_TTL_S: Final = 86_400.0
"""Longest life of an announcement. An announcement with a longer life is malformed."""


def check_record(key: str, value: bytes, ttl_s: float) -> None:
    """Refuse an announcement that other peers would ignore."""
    if len(value) > MAX_RECORD_BYTES:
        raise ProtocolError(f"An announcement has at most {MAX_RECORD_BYTES} bytes, got {len(value)} for {key!r}.")
    if not 0 < ttl_s <= MAX_RECORD_TTL_S:
        raise ProtocolError(f"An announcement lives up to {MAX_RECORD_TTL_S:g} s, got {ttl_s:g} for {key!r}.")


class Directory(ABC):
    """Small announcements with an expiry, which all peers can read. They are hints: no decision depends on them."""

    @abstractmethod
    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """Replace this peer's announcement under `key`; `Unreachable` if there are other peers and none stored it."""

    @abstractmethod
    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """Return the announcements under `key` that have not expired. Malformed announcements are left out."""

    @abstractmethod
    async def close(self) -> None:
        """Leave the directory. A second call does nothing."""
