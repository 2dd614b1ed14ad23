"""A network within one process, for tests: the same framing and checksums as over hivemind, on any event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import SwarmError, Unreachable
from lightning_swarm.network import Directory, Message, PeerId, check_record
from lightning_swarm.network.framing import TRAILER_BYTES, Buffer, Kind, decode
from lightning_swarm.network.rpc import Channel, Feed, Tap
from lightning_swarm.network.simulated_link import SimulatedLink, cross
from lightning_swarm.network.transport import SILENCE_S, BaseTransport

_PIPE_BYTES: Final = 1 << 20


class WireTap(Tap, Protocol):
    """A tap that can also damage messages on the wire."""

    @property
    def may_damage(self) -> bool:
        """Return whether the tap may still damage messages. If not, `damages` is not called."""
        ...

    def damages(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, /, *, answer: bytes | None, is_answer: bool
    ) -> bool:
        """Decide whether this message arrives with one bit flipped. `answer` is known only for the answer to a call."""
        ...


class MemoryNetwork:
    """Wires between peers of one process, and the faults that can happen to them."""

    def __init__(
        self,
        *,
        latency_s: float = 0.0,  # delay of each request and of each answer
        silence_s: float = SILENCE_S,  # silence after which a peer counts as gone
        links: Mapping[PeerId, SimulatedLink] = MappingProxyType({}),  # peer -> its link, whose latency is added
    ) -> None:
        self.tap: WireTap | None = None  # taps all wires
        self.silence_s = silence_s
        self._latency_s = latency_s
        self._links = links
        self._cuts: dict[frozenset[PeerId], asyncio.Event] = {}  # two peers -> set by `mend`
        self._peers: dict[PeerId, MemoryTransport] = {}
        self._frozen: dict[PeerId, asyncio.Event] = {}  # peer -> set when it thaws
        self.wires: dict[_Wire, None] = {}  # ordered, so that a run repeats exactly
        # key -> peer -> (announcement, time of expiry)
        self.announcements: defaultdict[str, dict[PeerId, tuple[bytes, float]]] = defaultdict(dict)
        self._numbers = itertools.count(1)

    def attach_tap(self, tap: WireTap) -> None:
        """Put a tap on all wires and on all peers' exchanges."""
        self.tap = tap
        for transport in self._peers.values():
            transport.tap = tap

    @property
    def wire_tap(self) -> WireTap | None:
        """The tap, while it may damage something."""
        return self.tap if self.tap is not None and self.tap.may_damage else None

    def transport(self, name: str | None = None) -> MemoryTransport:
        """Add a peer with the id `name`. A peer that was killed or closed may return under its name."""
        number = next(self._numbers)
        peer_id = PeerId(name or f"peer-{number}")
        if peer_id in self._peers:
            raise ValueError(f"There is a live peer {peer_id!r} already.")
        self._peers[peer_id] = transport = MemoryTransport(self, peer_id, number)
        transport.tap = self.tap
        return transport

    def directory(self, transport: MemoryTransport) -> MemoryDirectory:
        """Make the directory as this peer sees it."""
        return MemoryDirectory(self, transport)

    def kill(self, peer: PeerId) -> None:
        """End a peer as `kill -9` does: all exchanges from it and to it break."""
        self._peers[peer].die()

    def freeze(self, peer: PeerId) -> None:
        """Hold back all bytes to and from a peer until `thaw`, without breaking anything."""
        self._frozen.setdefault(peer, asyncio.Event())

    def thaw(self, peer: PeerId) -> None:
        """Release a frozen peer. The bytes that were held back arrive."""
        if thawed := self._frozen.pop(peer, None):
            thawed.set()

    def is_frozen(self, peer: PeerId) -> bool:
        """Return whether the peer is frozen."""
        return peer in self._frozen

    def is_live(self, peer: PeerId) -> bool:
        """Return whether a peer of this name exists and was neither killed nor closed."""
        return peer in self._peers

    def cut(self, peer_a: PeerId, peer_b: PeerId) -> None:
        """Hold back all bytes between two peers until `mend`, without breaking anything."""
        self._cuts.setdefault(frozenset((peer_a, peer_b)), asyncio.Event())

    def mend(self, peer_a: PeerId, peer_b: PeerId) -> None:
        """Let two peers reach each other again. The bytes that were held back arrive."""
        if mended := self._cuts.pop(frozenset((peer_a, peer_b)), None):
            mended.set()

    def peer_at(self, address: str) -> PeerId | None:
        """Return the live peer at an address without an id."""
        return next((name for name, peer in self._peers.items() if peer.address == f"{address}/p2p/{name}"), None)

    def find(self, peer: PeerId) -> MemoryTransport:
        """Return the live peer of this name, or raise `Unreachable`."""
        if peer not in self._peers:
            raise Unreachable(f"No connection to {peer}: there is no such peer.")
        return self._peers[peer]

    async def wait_latency(self, sender: PeerId, receiver: PeerId) -> None:
        """Wait for the latency between two peers."""
        links = [self._links[peer] for peer in {sender, receiver} & self._links.keys()]
        await asyncio.sleep(self._latency_s + sum(link.latency_s for link in links))

    async def carry(self, sender: PeerId, receiver: PeerId, buffer: Buffer) -> Buffer:
        """Carry one buffer across, or raise `ConnectionError` if either peer is gone."""
        # All bytes between peers come through here, so this is the place for faults.
        while obstacle := (
            self._frozen.get(sender)
            or self._frozen.get(receiver)
            or (self._cuts.get(frozenset((sender, receiver))) if self._cuts else None)
        ):
            await obstacle.wait()
        link, remote_link = self._links.get(sender), self._links.get(receiver)
        if sender != receiver and not (link is None and remote_link is None):
            await cross(link, remote_link, len(buffer))
        for peer in (sender, receiver):
            if peer not in self._peers:
                raise ConnectionResetError(f"{peer} is gone")
        return bytes(buffer)

    def remove(self, peer: PeerId) -> None:
        """Take a peer off the network, and break its wires in both directions."""
        self._peers.pop(peer, None)
        self.thaw(peer)
        for cut in [cut for cut in self._cuts if peer in cut]:
            self.mend(*cut)
        for wire in tuple(self.wires):
            if peer in (wire.sender, wire.receiver):
                wire.fail()


class _Wire(asyncio.ReadTransport):
    """A wire that carries bytes in one direction, through a bounded buffer. It breaks if either end is removed."""

    def __init__(self, network: MemoryNetwork, sender: PeerId, receiver: PeerId) -> None:
        super().__init__()
        self.sender, self.receiver = sender, receiver
        self.reader = Feed(limit=_PIPE_BYTES, loop=asyncio.get_running_loop())
        self.reader.set_transport(self)
        self._network = network
        network.wires[self] = None
        self._room = asyncio.Event()
        self._room.set()
        self._broken = False
        self._has_waited_latency = False  # whether the first buffer has waited for the latency; later buffers need not
        self.damaged = False  # the next buffer will arrive with one bit flipped

    def pause_reading(self) -> None:
        """Hold back writes, because the reader is full."""
        self._room.clear()

    def resume_reading(self) -> None:
        """Allow writes, because the reader has room again."""
        self._room.set()

    async def write(self, buffer: Buffer) -> None:
        """Carry one buffer to the other end, and wait for room for the next."""
        if not self._has_waited_latency:
            self._has_waited_latency = True
            await self._network.wait_latency(self.sender, self.receiver)
        data = await self._network.carry(self.sender, self.receiver, buffer)
        if self.damaged:
            self.damaged, data = False, _damage(bytes(data))
        if not self._broken:
            self.reader.feed_data(data)
        # This pause lets the reader run between two buffers, so it also sees incomplete messages, as over a socket.
        await asyncio.sleep(0)
        await self._room.wait()
        if self._broken:
            raise ConnectionResetError("the wire broke")

    def hang_up(self) -> None:
        """End the wire in order: all written bytes arrive, then the reader sees the end."""
        if not self._broken:
            self._broken = True
            self.reader.feed_eof()
        self._room.set()
        self._network.wires.pop(self, None)

    def fail(self) -> None:
        """Break the wire, as the death of a peer does: the reader gets an error."""
        self._broken = True
        self.reader.set_exception(ConnectionResetError("the peer is gone"))
        self._room.set()
        self._network.wires.pop(self, None)


class MemoryTransport(BaseTransport):
    """A peer's transport in a `MemoryNetwork`, which makes it."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, number: int) -> None:
        super().__init__(peer_id, silence_s=network.silence_s)
        self._network = network
        self.address = f"/ip4/127.0.0.1/tcp/{number}/p2p/{peer_id}"

    async def connect(self, addresses: Sequence[str]) -> None:
        """See `Transport`. Peers of one network reach each other anyway."""
        for address in addresses:
            self._network.find(PeerId(address.rpartition("/p2p/")[2]))

    async def identify(self, address: str) -> PeerId | None:
        """See `Transport`."""
        return self._network.peer_at(address)

    async def addresses(self) -> tuple[str, ...]:
        """See `Transport`."""
        return (self.address,)

    async def close(self) -> None:
        """See `Transport`."""
        self.die()
        await self._wait_until_served()

    def die(self) -> None:
        """Leave the network and cancel all tasks at once, without waiting for them."""
        if not self.closed:
            self._network.remove(self.peer_id)
            self._break_off()

    async def _send_call(self, peer: PeerId, method: str, request: bytes) -> tuple[None, bytes]:
        network, tap = self._network, self._network.wire_tap
        network.find(peer)
        body = decode(request).body if tap else b""
        if tap and tap.damages(self.peer_id, peer, method, body, answer=None, is_answer=False):
            request = _damage(request)
        try:
            await network.wait_latency(self.peer_id, peer)
            arrived = bytes(await network.carry(self.peer_id, peer, request))
            answer = await network.find(peer).answer_call(self.peer_id, arrived)
            if tap and tap.damages(self.peer_id, peer, method, body, answer=_body(answer), is_answer=True):
                answer = _damage(answer)
            await network.wait_latency(peer, self.peer_id)
            return None, bytes(await network.carry(peer, self.peer_id, answer))
        except ConnectionError as error:
            raise Unreachable(f"The connection broke during `{method}`: {error}.") from error

    async def answer_call(self, caller: PeerId, request: bytes) -> bytes:
        """Answer an encoded call in a task that is cancelled if this peer dies; then raise `ConnectionError`."""
        serving = self._spawn(self._serve_call(caller, request))
        try:
            await asyncio.wait({serving})
        except asyncio.CancelledError:
            serving.cancel()
            raise
        if serving.cancelled():
            raise ConnectionResetError(f"{self.peer_id} is gone")
        return serving.result()

    async def _send_stream(
        self, peer: PeerId, method: str, message: Message, max_bytes: int, exchange_id: int
    ) -> Message:
        remote = self._network.find(peer)
        request, answer = _Wire(self._network, self.peer_id, peer), _Wire(self._network, peer, self.peer_id)
        if tap := self._network.wire_tap:
            exchange = (self.peer_id, peer, method, message.body)
            request.damaged = tap.damages(*exchange, answer=None, is_answer=False)
            answer.damaged = tap.damages(*exchange, answer=None, is_answer=True)
        remote._spawn(remote._serve_wires(self.peer_id, request, answer))
        try:
            channel = Channel(answer.reader, request.write)
            return (await self._ask_over_channel(channel, peer, method, message, max_bytes, exchange_id))[0]
        finally:
            request.hang_up()
            answer.hang_up()

    async def _serve_wires(self, caller: PeerId, request: _Wire, answer: _Wire) -> None:
        try:
            await self._serve_channel(Channel(request.reader, answer.write), caller)
        finally:
            request.hang_up()
            answer.hang_up()


def _damage(data: bytes) -> bytes:
    """Flip one bit near the end: in a whole message, in the last byte before the trailer."""
    index = max(0, len(data) - TRAILER_BYTES - 1)
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


def _body(answer: bytes) -> bytes:
    try:
        head = decode(answer)
    except SwarmError:
        return b""
    return head.body if head.kind is Kind.ANSWER else b""


class MemoryDirectory(Directory):
    """A directory where every announcement is visible at once. A frozen peer sees only its own."""

    def __init__(self, network: MemoryNetwork, transport: MemoryTransport) -> None:
        self._network = network
        self._peer_id = transport.peer_id
        self._closed = False

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """See `Directory`."""
        check_record(key, value, ttl_s)
        await self._network.wait_latency(self._peer_id, self._peer_id)
        self._check_open()
        if self._network.is_frozen(self._peer_id):
            raise Unreachable(f"No other peer stored what {self._peer_id} announced under {key!r}.")
        self._network.announcements[key][self._peer_id] = (value, now_s() + ttl_s)

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """See `Directory`."""
        await self._network.wait_latency(self._peer_id, self._peer_id)
        self._check_open()
        records, at_s = self._network.announcements[key], now_s()
        for peer in [peer for peer, (_, expires_at) in records.items() if expires_at <= at_s]:
            del records[peer]
        sees_only_itself = self._network.is_frozen(self._peer_id)
        return {peer: value for peer, (value, _) in records.items() if not sees_only_itself or peer == self._peer_id}

    async def close(self) -> None:
        """See `Directory`. Announcements stay until they expire."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Unreachable("This peer has left the directory.")
        self._network.find(self._peer_id)
