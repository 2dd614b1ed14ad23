"""The network in one process: the twin of `network/hivemind/`, for tests, on any loop.

It sends through the real framing with checksums, so a message is copied, counted and checked as on a
real network. On a `VirtualLoop` a run repeats exactly.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import ProtocolError, SwarmError, Unreachable
from lightning_swarm.network import Directory, Message, PeerId
from lightning_swarm.network.framing import Buffer, Kind, decode
from lightning_swarm.network.rpc import Channel, Feed, ask, serve
from lightning_swarm.network.transport import SILENCE_S, BaseTransport, Tap

MAX_RECORD_BYTES: Final = 64 << 10
"""Longest value of an announcement."""

MAX_RECORD_TTL_S: Final = 86_400.0
"""Longest life of an announcement: what claims to live longer is malformed."""


def check_record(key: str, value: bytes, ttl_s: float) -> None:
    """Refuse an announcement that others would leave out."""
    if len(value) > MAX_RECORD_BYTES:
        raise ProtocolError(f"An announcement has at most {MAX_RECORD_BYTES} bytes, got {len(value)} for {key!r}.")
    if not 0 < ttl_s <= MAX_RECORD_TTL_S:
        raise ProtocolError(f"An announcement lives up to {MAX_RECORD_TTL_S:g} s, got {ttl_s:g} for {key!r}.")


PIECE_BYTES: Final = 1 << 16
"""Goes over a line at once."""

FIRST_WINDOW_BYTES: Final = 1 << 18
"""Of a stream."""


@dataclass
class Direction:
    """One of a line's two. Who comes later waits.

    Args:
        bytes_per_s: What it carries.
    """

    bytes_per_s: float = math.inf
    _free_s: float = 0.0

    def transmit(self, num_bytes: int, now_s: float) -> float:
        """Send some bytes after all that are there already. Returns when they are through."""
        self._free_s = max(self._free_s, now_s) + num_bytes / self.bytes_per_s
        return self._free_s


@dataclass
class FlowWindow:
    """What a stream lets be under way before the reader gives way for more; then twice as much, and so on.

    Args:
        round_trip_s: Until the reader's word on what was sent first is there.

    Source: yamux's specification, and the doubling of go-yamux, which libp2p's daemon has.
    """

    round_trip_s: float
    _size_bytes: int = FIRST_WINDOW_BYTES
    _left_bytes: int = FIRST_WINDOW_BYTES
    _began_s: float | None = None

    def send(self, num_bytes: int, now_s: float) -> float:
        """Send a piece after the one before. Returns when it may leave."""
        if self._began_s is None:
            self._began_s = now_s
        if self._left_bytes <= 0:
            now_s = max(now_s, self._began_s + self.round_trip_s)
            self._size_bytes *= 2
            self._left_bytes, self._began_s = self._size_bytes, now_s
        self._left_bytes -= num_bytes
        return now_s


@dataclass(frozen=True)
class SimulatedLink:
    """Both directions.

    Args:
        up: What the peer sends.
        down: What it gets.
        latency_s: From the peer to where all lines meet, or back.
    """

    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    latency_s: float = 0.0


_PIPE_BYTES: Final = 1 << 20


class WireTap(Tap, Protocol):
    """A tap that sees the wires, too."""

    def damages(
        self, caller: PeerId, peer: PeerId, method: str, request: bytes, /, *, answer: bytes | None, is_answer: bool
    ) -> bool:
        """Whether this message shall arrive with a bit turned over. `answer` is known where a call is answered."""
        ...


class MemoryNetwork:
    """All the wires between some peers, and what can happen to them.

    Args:
        latency_s: How long each request and each answer is on its way.
        silence_s: How long a peer may be silent in the eyes of the others.
        lines: Of single peers, beside that latency.
    """

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        silence_s: float = SILENCE_S,
        lines: Mapping[PeerId, SimulatedLink] = MappingProxyType({}),
    ) -> None:
        self._tap: WireTap | None = None
        self.silence_s = silence_s
        self._latency_s = latency_s
        self._lines = lines
        self._cuts: dict[frozenset[PeerId], asyncio.Event] = {}
        self._peers: dict[PeerId, MemoryTransport] = {}
        self._frozen: dict[PeerId, asyncio.Event] = {}
        self._wires: dict[_MemoryStream, None] = {}
        self._records: dict[str, dict[PeerId, tuple[bytes, float]]] = {}
        self._numbers = itertools.count(1)

    @property
    def tapped(self) -> WireTap | None:
        """What sits on all wires, if there is something."""
        return self._tap

    def be_tapped(self, tap: WireTap) -> None:
        """Have `tap` sit on all wires, and at all peers' exchanges."""
        self._tap = tap
        for transport in self._peers.values():
            transport.tap = tap

    def transport(self, name: str | None = None) -> MemoryTransport:
        """A new peer. Its `peer_id` is `name`; one that was killed or closed may return under its name."""
        number = next(self._numbers)
        peer_id = PeerId(name or f"peer-{number}")
        if peer_id in self._peers:
            raise ValueError(f"There is a live peer {peer_id!r} already.")
        self._peers[peer_id] = transport = MemoryTransport(self, peer_id, number)
        transport.tap = self._tap
        return transport

    def directory(self, transport: MemoryTransport) -> MemoryDirectory:
        """The directory as this peer sees it."""
        return MemoryDirectory(self, transport)

    def kill(self, peer: PeerId) -> None:
        """End a peer as `kill -9` does: all that it does and all that is done with it breaks off."""
        self._peers[peer].die()

    def freeze(self, peer: PeerId) -> None:
        """Let nothing reach or leave a peer until `thaw`; nothing breaks either."""
        self._frozen.setdefault(peer, asyncio.Event())

    def thaw(self, peer: PeerId) -> None:
        """Let a frozen peer go on. What was sent to it arrives."""
        if thawed := self._frozen.pop(peer, None):
            thawed.set()

    def is_frozen(self, peer: PeerId) -> bool:
        """Whether `freeze` holds."""
        return peer in self._frozen

    def is_live(self, peer: PeerId) -> bool:
        """Whether there is a peer of this name that was neither killed nor closed."""
        return peer in self._peers

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Let nothing pass between two peers until `mend`; nothing breaks either."""
        self._cuts.setdefault(frozenset((one, other)), asyncio.Event())

    def mend(self, one: PeerId, other: PeerId) -> None:
        """Let two peers reach each other again. What was sent arrives."""
        if mended := self._cuts.pop(frozenset((one, other)), None):
            mended.set()

    def find(self, peer: PeerId) -> MemoryTransport:
        """A live peer.

        Raises:
            Unreachable: There is none of this name.
        """
        if peer not in self._peers:
            raise Unreachable(f"No connection to {peer}: there is no such peer.")
        return self._peers[peer]

    async def depart(self, sender: PeerId, receiver: PeerId) -> None:
        """Hold a message back for as long as it takes to get from one peer to the other."""
        lines = [self._lines[peer] for peer in {sender, receiver} & self._lines.keys()]
        await asyncio.sleep(self._latency_s + sum(line.latency_s for line in lines))

    async def carry(self, sender: PeerId, receiver: PeerId, buffer: Buffer) -> Buffer:
        """Take one buffer across. All bytes between peers come through here: the place for faults.

        Raises:
            ConnectionError: Either of the two is gone.
        """
        while held := self._held(sender, receiver):
            await held.wait()
        await self._cross(sender, receiver, len(buffer))
        for peer in (sender, receiver):
            if peer not in self._peers:
                raise ConnectionResetError(f"{peer} is gone")
        return bytes(buffer)

    async def _cross(self, sender: PeerId, receiver: PeerId, num_bytes: int) -> None:
        """Let some bytes pass both lines, a piece after the other: others' pieces come in between."""
        one, other = self._lines.get(sender), self._lines.get(receiver)
        if (one is None and other is None) or sender == receiver:
            return
        # Each message as over a stream of its own, though some streams have grown a larger window before.
        window = FlowWindow(2 * sum(line.latency_s for line in (one, other) if line is not None))
        for at in range(0, num_bytes, PIECE_BYTES):
            piece, at_s = min(PIECE_BYTES, num_bytes - at), now_s()
            if (leaves_s := window.send(piece, at_s)) > at_s:
                await asyncio.sleep(leaves_s - at_s)
                at_s = leaves_s
            until_s = max(
                at_s if one is None else one.up.transmit(piece, at_s),
                at_s if other is None else other.down.transmit(piece, at_s),
            )
            await asyncio.sleep(until_s - at_s)

    def _held(self, sender: PeerId, receiver: PeerId) -> asyncio.Event | None:
        """What must happen before anything gets from one to the other."""
        return (
            self._frozen.get(sender)
            or self._frozen.get(receiver)
            or (self._cuts.get(frozenset((sender, receiver))) if self._cuts else None)
        )

    def records(self, key: str) -> dict[PeerId, tuple[bytes, float]]:
        """Who announced what under `key`, and until when."""
        return self._records.setdefault(key, {})

    def connect_wire(self, sender: PeerId, receiver: PeerId) -> _MemoryStream:
        """A new wire in one direction. It breaks if either end goes."""
        wire = _MemoryStream(self, sender, receiver)
        self._wires[wire] = None
        return wire

    def drop_wire(self, wire: _MemoryStream) -> None:
        """Forget a wire that has been closed."""
        self._wires.pop(wire, None)

    def remove(self, peer: PeerId) -> None:
        """Take a peer off the network: wires to it break, in both directions."""
        self._peers.pop(peer, None)
        self.thaw(peer)
        for one, other in [tuple(cut) for cut in self._cuts if peer in cut]:
            self.mend(one, other)
        for wire in tuple(self._wires):
            if peer in (wire.sender, wire.receiver):
                wire.break_off()


class _MemoryStream(asyncio.ReadTransport):
    """Bytes in one direction, with bounded room."""

    def __init__(self, network: MemoryNetwork, sender: PeerId, receiver: PeerId) -> None:
        super().__init__()
        self.sender, self.receiver = sender, receiver
        self.reader = Feed(limit=_PIPE_BYTES, loop=asyncio.get_running_loop())
        self.reader.set_transport(self)
        self._network = network
        self._room = asyncio.Event()
        self._room.set()
        self._broken = False
        self._departed = False
        self.damaged = False  # the next buffer will arrive with a bit turned over

    def pause_reading(self) -> None:
        """The reader is full."""
        self._room.clear()

    def resume_reading(self) -> None:
        """The reader has room again."""
        self._room.set()

    async def write(self, buffer: Buffer) -> None:
        """Bring one buffer to the other end, and wait for room for the next."""
        if not self._departed:
            self._departed = True
            await self._network.depart(self.sender, self.receiver)
        data = await self._network.carry(self.sender, self.receiver, buffer)
        if self.damaged:
            self.damaged, data = False, _damage(bytes(data))
        if not self._broken:
            self.reader.feed_data(data)
        # Without this a reader that keeps up would only ever see complete messages.
        await asyncio.sleep(0)
        await self._room.wait()
        if self._broken:
            raise ConnectionResetError("the wire broke")

    def hang_up(self) -> None:
        """End it in order: what is underway arrives, then the reader sees the end."""
        if not self._broken:
            self._broken = True
            self.reader.feed_eof()
        self._room.set()
        self._network.drop_wire(self)

    def break_off(self) -> None:
        """End it as a dying peer does."""
        self._broken = True
        self.reader.set_exception(ConnectionResetError("the peer is gone"))
        self._room.set()
        self._network.drop_wire(self)


class MemoryTransport(BaseTransport):
    """A peer of a `MemoryNetwork`, which makes it."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, number: int) -> None:
        super().__init__(peer_id, silence_s=network.silence_s)
        self._network = network
        self._address = f"/ip4/127.0.0.1/tcp/{number}/p2p/{peer_id}"

    async def connect(self, addresses: Sequence[str]) -> None:
        """See `Transport`. Peers of one network reach each other anyway."""
        for address in addresses:
            self._network.find(PeerId(address.rpartition("/p2p/")[2]))

    async def addresses(self) -> tuple[str, ...]:
        """See `Transport`."""
        return (self._address,)

    async def close(self) -> None:
        """See `Transport`."""
        self.die()
        await self._wait_until_served()

    def die(self) -> None:
        """Stop at once, without waiting for anything."""
        if not self._closed:
            self._network.remove(self._peer_id)
            self._break_off()

    async def _send_call(self, peer: PeerId, method: str, request: bytes) -> bytes:
        network, tap = self._network, self._network.tapped
        network.find(peer)
        body = decode(request).body if tap else b""
        if tap and tap.damages(self._peer_id, peer, method, body, answer=None, is_answer=False):
            request = _damage(request)
        try:
            await network.depart(self._peer_id, peer)
            arrived = bytes(await network.carry(self._peer_id, peer, request))
            answer = await network.find(peer).answer_call(self._peer_id, arrived)
            if tap and tap.damages(self._peer_id, peer, method, body, answer=_body(answer), is_answer=True):
                answer = _damage(answer)
            await network.depart(peer, self._peer_id)
            return bytes(await network.carry(peer, self._peer_id, answer))
        except ConnectionError as error:
            raise Unreachable(f"The connection broke during `{method}`: {error}.") from error

    async def answer_call(self, caller: PeerId, request: bytes) -> bytes:
        """Answer an encoded call in a task of this peer, so that it ends with this peer.

        Raises:
            ConnectionError: This peer died or closed.
        """
        serving = self._spawn(self._serve_call(caller, request))
        try:
            await asyncio.wait({serving})
        except asyncio.CancelledError:
            serving.cancel()
            raise
        if serving.cancelled():
            raise ConnectionResetError(f"{self._peer_id} is gone")
        return serving.result()

    async def _send_stream(self, peer: PeerId, method: str, message: Message, max_bytes: int) -> Message:
        remote = self._network.find(peer)
        request = self._network.connect_wire(self._peer_id, peer)
        answer = self._network.connect_wire(peer, self._peer_id)
        if tap := self._network.tapped:
            seen = (self._peer_id, peer, method, message.body)
            request.damaged = tap.damages(*seen, answer=None, is_answer=False)
            answer.damaged = tap.damages(*seen, answer=None, is_answer=True)
        channel = Channel(answer.reader, request.write)
        remote.accept(self._peer_id, request, answer)
        try:
            with self._liveness.moving(peer, channel):
                return (await ask(channel, Kind.STREAM, next(self._exchange_ids), method, message, max_bytes))[0]
        finally:
            _hang_up(request, answer)
            self._count(peer, method, channel)

    def accept(self, caller: PeerId, request: _MemoryStream, answer: _MemoryStream) -> None:
        """Serve what comes over a new pair of wires."""

        async def serve_wires() -> None:
            channel = Channel(request.reader, answer.write)
            try:
                await serve(
                    channel, partial(self._find, caller), partial(self._count_served, caller), idle_timeout=60.0
                )
            finally:
                _hang_up(request, answer)

        self._spawn(serve_wires())


def _damage(data: bytes) -> bytes:
    """With a bit turned over, near the end."""
    place = max(0, len(data) - 9)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def _body(answer: bytes) -> bytes:
    """Of an encoded answer; nothing if it is an error."""
    try:
        head = decode(answer)
    except SwarmError:
        return b""
    return head.body if head.kind is Kind.ANSWER else b""


def _hang_up(*wires: _MemoryStream) -> None:
    for wire in wires:
        wire.hang_up()


class MemoryDirectory(Directory):
    """A directory that is up to date at once. A frozen peer sees what it announced itself."""

    def __init__(self, network: MemoryNetwork, transport: MemoryTransport) -> None:
        self._network = network
        self._peer_id = transport.peer_id
        self._closed = False

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """See `Directory`."""
        check_record(key, value, ttl_s)
        await self._network.depart(self._peer_id, self._peer_id)
        self._check_open()
        if self._network.is_frozen(self._peer_id):
            raise Unreachable(f"No other peer stored what {self._peer_id} announced under {key!r}.")
        self._network.records(key)[self._peer_id] = (value, now_s() + ttl_s)

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """See `Directory`."""
        await self._network.depart(self._peer_id, self._peer_id)
        self._check_open()
        records, at_s = self._network.records(key), now_s()
        for peer in [peer for peer, (_, expires_at) in records.items() if expires_at <= at_s]:
            del records[peer]
        alone = self._network.is_frozen(self._peer_id)
        return {peer: value for peer, (value, _) in records.items() if not alone or peer == self._peer_id}

    async def close(self) -> None:
        """See `Directory`. What was announced stays until it expires."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Unreachable("This peer has left the directory.")
        self._network.find(self._peer_id)
