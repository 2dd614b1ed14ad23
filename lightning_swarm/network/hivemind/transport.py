"""`HivemindTransport`: calls and tensors in this package's framing, over streams of libp2p or of local sockets."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from typing_extensions import override

from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError, Unreachable
from lightning_swarm.core.process import max_files
from lightning_swarm.core.tasks import cancel_and_wait, gather
from lightning_swarm.network import MAX_STREAM_BYTES, Message, PeerId
from lightning_swarm.network.access import INTRODUCE
from lightning_swarm.network.admission import StreamSlot, StreamSlots
from lightning_swarm.network.framing import FixedHeader, Kind
from lightning_swarm.network.gatekeeper import Gatekeeper
from lightning_swarm.network.hivemind._engine import P2P, StreamInfo
from lightning_swarm.network.hivemind.calls import IncomingCalls, OutgoingCalls
from lightning_swarm.network.hivemind.daemon import ignore_late_answers, wait_for_exit
from lightning_swarm.network.hivemind.local_streams import LocalPeers
from lightning_swarm.network.hivemind.streams import Daemon, Stream, StreamPool
from lightning_swarm.network.identity import Identity
from lightning_swarm.network.rpc import ask
from lightning_swarm.network.transport import BaseTransport

_log = logging.getLogger(__name__)

_CALL: Final = "lightning_swarm.call"
_STREAM: Final = "lightning_swarm.stream"
# Most open streams from one other peer. It uses one for calls, and a few more while it replaces a broken stream.
_MAX_STREAMS: Final = {_CALL: 4, _STREAM: 96}
_MAX_STREAMS_IN_ALL: Final = 2048
# Most open streams from peers that have not shown a required certificate, and how long such streams may stay open.
_STREAMS_PER_STRANGER: Final = 2
_STREAMS_OF_ALL_STRANGERS: Final = 256  # members of a large run may return to a peer at once, each for a round trip
_STRANGER_S: Final = 10.0
_FAREWELL_S: Final = 1.0  # delay before hanging up on a peer that was cut off, so that it receives the refusals
_CONNECT_TIMEOUT_S: Final = 30.0
_IDENTIFY_S: Final = 5.0
_ACTUAL_ID: Final = re.compile(r"remote key matches (\w+)")
_SHUTDOWN_TIMEOUT_S: Final = 5.0


class HivemindTransport(BaseTransport):
    """A peer's transport on libp2p, made by this package's `start`. It owns `p2p`, the client of the daemon."""

    def __init__(self, p2p: P2P, *, silence_s: float, neighbours: bool, receive_bytes: int = MAX_STREAM_BYTES) -> None:
        super().__init__(PeerId(p2p.peer_id.to_base58()), silence_s=silence_s, receive_bytes=receive_bytes)
        self._p2p = p2p
        self._daemon = Daemon(p2p)
        self._pool = StreamPool(partial(self._open_stream, protocol=_STREAM))
        self._calls = OutgoingCalls(partial(self._open_stream, protocol=_CALL), self._spawn, self._liveness.patience_s)
        # Half the time that a peer may be silent, so that there is time left to try the daemon.
        greeting_s = silence_s / 2
        self._neighbours = (
            LocalPeers(self.peer_id, self._ask_introduction, self._serve_stream, greeting_s=greeting_s)
            if neighbours
            else None
        )
        # Half of this process's file descriptors: this peer and the user's code need the rest.
        self._slots = StreamSlots(min(max_files() // 2, _MAX_STREAMS_IN_ALL))
        # Separate slots, so that strangers occupy none of the members' slots.
        self._strangers = StreamSlots(min(max_files() // 8, _STREAMS_OF_ALL_STRANGERS))
        self._watch: asyncio.Task[None] | None = None

    @property
    def daemon_pid(self) -> int:
        """The libp2p daemon's process id. Without that process no peer can reach this one."""
        return int(self._p2p._child.pid)

    async def open(self) -> None:
        """Begin to serve. All methods share two libp2p protocols, so they may be registered at any time."""
        self._watch = asyncio.create_task(self._watch_daemon(ignore_late_answers(self._p2p)))
        for protocol in (_CALL, _STREAM):
            await self._p2p.add_binary_stream_handler(protocol, partial(self._on_stream, protocol))
        if self._neighbours is not None:
            self.handle_call(INTRODUCE, self._neighbours.answer)
            await self._neighbours.listen()

    async def connect(self, addresses: Sequence[str]) -> None:
        """See `Transport`."""
        by_peer: defaultdict[PeerId, list[str]] = defaultdict(list)
        for address in addresses:
            maddr, separator, peer = address.rpartition("/p2p/")
            if not separator:
                raise ProtocolError(f"A full address ends in /p2p/<peer id>, got {address!r}.")
            by_peer[PeerId(peer)].append(maddr)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await gather(self._daemon.connect(peer, maddrs) for peer, maddrs in by_peer.items())
        except TimeoutError as error:
            raise DeadlineExceeded(f"{', '.join(by_peer)} did not answer within {_CONNECT_TIMEOUT_S:g} s.") from error

    async def identify(self, address: str) -> PeerId | None:
        """See `Transport`."""
        # The encrypted handshake fails if the peer has another id, and the daemon's error contains the actual id.
        unused_id = Identity.generate().peer_id
        try:
            async with asyncio.timeout(_IDENTIFY_S):
                await self._daemon.connect(unused_id, [address])
        except (TimeoutError, Unreachable) as error:
            if match := _ACTUAL_ID.search(str(error)):
                return PeerId(match[1])
        # The daemon does not dial the address where it listens. At an announced address, another peer may answer.
        is_own = f"{address}/p2p/{self.peer_id}" in await self.addresses()
        return self.peer_id if is_own else None

    async def addresses(self) -> tuple[str, ...]:
        """See `Transport`."""
        return tuple(map(str, await self._p2p.get_visible_maddrs()))

    async def close(self) -> None:
        """See `Transport`."""
        self._break_off()
        await self._wait_until_served()
        if self._watch is not None:
            await cancel_and_wait([self._watch])
        pid = self.daemon_pid
        self._p2p._terminate()
        try:
            async with asyncio.timeout(_SHUTDOWN_TIMEOUT_S):
                await wait_for_exit(pid)
        except TimeoutError:
            # `_terminate` sends a SIGTERM, which a stopped process does not handle.
            with suppress(ProcessLookupError):
                self._p2p._child.kill()
            await wait_for_exit(pid)

    async def _watch_daemon(self, reading: asyncio.Task[None]) -> None:
        # Without the daemon, or the task that reads from it, hivemind's client would wait for answers for ever.
        exiting = asyncio.create_task(wait_for_exit(self.daemon_pid))
        try:
            await asyncio.wait({exiting, reading}, return_when=asyncio.FIRST_COMPLETED)
            self.cut_off.reason = (
                f"the libp2p daemon of this peer, process {self.daemon_pid}, has ended or answers no more. Without it, "
                "no other peer reaches this peer, so all others count it as gone. Find out why that process ended (out "
                "of memory, for example), then start this peer again."
            )
            _log.error("%s", self.cut_off.reason)
            self._break_off()
            self.cut_off.set()
        finally:
            await cancel_and_wait([exiting])

    @override
    def _break_off(self) -> None:
        super()._break_off()
        self._pool.hang_up()
        if self._neighbours is not None:
            self._neighbours.close()

    async def _open_stream(self, peer: PeerId, protocol: str) -> Stream:
        if self._neighbours is not None and (stream := await self._neighbours.open_stream(peer, protocol)):
            return stream
        return await self._daemon.open_stream(peer, protocol)

    async def _ask_introduction(self, peer: PeerId) -> bytes:
        """Ask a neighbour for the secrets of `INTRODUCE`, over its daemon."""
        stream = await self._daemon.open_stream(peer, _STREAM)
        try:
            answer, _ = await ask(stream.channel, Kind.CALL, next(self._exchange_ids), INTRODUCE, Message(), 0)
        finally:
            self._count_traffic(peer, INTRODUCE, stream.channel)
            stream.close()
        return answer.body

    async def _send_call(self, peer: PeerId, method: str, request: bytes) -> tuple[FixedHeader, bytes]:
        return await self._calls.exchange(peer, request)

    async def _send_stream(
        self, peer: PeerId, method: str, message: Message, max_bytes: int, exchange_id: int
    ) -> Message:
        async with self._pool.lease(peer) as stream:
            answer, is_reusable = await self._ask_over_channel(
                stream.channel, peer, method, message, max_bytes, exchange_id
            )
            if is_reusable and not self.closed:
                self._pool.keep(peer, stream)
            return answer

    async def _on_stream(
        self, protocol: str, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._serve_stream(protocol, PeerId(info.peer_id.to_base58()), reader, writer)

    async def _serve_stream(
        self, protocol: str, caller: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer the requests on a stream that another peer has opened."""
        stream = Stream(reader, writer)
        slot = None if self.closed else self._open_slot(protocol, caller, stream)
        try:
            if slot is not None:
                with self._ended_by_close():
                    if protocol == _CALL:
                        check = partial(self._check_size, caller)
                        await IncomingCalls(
                            stream, partial(self._serve_call, caller), self._spawn, slot, check
                        ).answer()
                    else:
                        await self._serve_channel(stream.channel, caller, slot)
        except asyncio.CancelledError:
            # asyncio's stream server would log the cancellation of a task that it started as a failure.
            if not self.closed:
                raise
        finally:
            stream.close()
            if slot is not None:
                self._slots.close(slot)
                self._strangers.close(slot)

    def _open_slot(self, protocol: str, caller: PeerId, stream: Stream) -> StreamSlot | None:
        """Assign a slot to a stream that a caller has opened. None: the stream must close."""
        owner = (caller, protocol)
        if self._gate is None or self._gate.is_certified(caller):
            return self._slots.open(owner, stream.close, at_most=_MAX_STREAMS.get(protocol, 0))
        slot = self._strangers.open(owner, stream.close, at_most=_STREAMS_PER_STRANGER)
        if slot is not None:
            asyncio.get_running_loop().call_later(_STRANGER_S, self._end_stranger, slot)
        return slot

    def _end_stranger(self, slot: StreamSlot) -> None:
        """Hang up on a peer that has shown no certificate within `_STRANGER_S`."""
        if slot in self._strangers.of(slot.owner):
            self._strangers.close(slot)
            slot.hang_up()

    @override
    def _on_certified(self, peer: PeerId) -> None:
        """Move a peer's streams from the strangers' slots to the members' slots."""
        for protocol, at_most in _MAX_STREAMS.items():
            for slot in self._strangers.of((peer, protocol)):
                self._strangers.close(slot)
                if not self._slots.enter(slot, at_most=at_most):
                    slot.hang_up()

    @override
    def _on_cut_off(self, peer: PeerId) -> None:
        """Also close the streams to the peer and, after a delay, the streams from it."""
        super()._on_cut_off(peer)
        self._calls.hang_up(peer)
        self._pool.hang_up(peer)
        asyncio.get_running_loop().call_later(_FAREWELL_S, self._hang_up_on, peer, self._gate)

    def _hang_up_on(self, peer: PeerId, gate: Gatekeeper | None) -> None:
        if gate is None or gate is not self._gate or gate.is_certified(peer):  # new credentials, or a lifted ban
            return
        for slot in [slot for protocol in _MAX_STREAMS for slot in self._slots.of((peer, protocol))]:
            self._slots.close(slot)
            slot.hang_up()
