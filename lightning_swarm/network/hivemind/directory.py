"""`HivemindDirectory`: announcements in a Kademlia DHT."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from lightning_swarm.errors import DeadlineExceeded, Unreachable
from lightning_swarm.network import Directory, PeerId
from lightning_swarm.network.announcements import check_record
from lightning_swarm.network.base import BaseTransport
from lightning_swarm.network.hivemind._engine import DHTID, P2P, DHTNode, DHTProtocol, ValidationError
from lightning_swarm.network.hivemind.records import Announcement, GuardedSerializer, PlainRecordsOnly, pack, unpack

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 15.0
_LEAVE_TIMEOUT_S: Final = 1.0
# hivemind tells records apart by their expiry; this much later is a newer one.
_NEWER_S: Final = 0.001
_NODE_ID_BITS: Final = 160

# For the class, not for one node: a node serves others before its creation returns.
DHTProtocol.serializer = GuardedSerializer


class HivemindDirectory(Directory):
    """The directory of one peer. `lightning_swarm.network.hivemind.start` makes it.

    Args:
        transport: Whose announcements these are.
        node: This peer's part of the DHT.
    """

    def __init__(self, transport: BaseTransport, node: DHTNode) -> None:
        self._transport = transport
        self._node = node
        self._closed = False
        self._stored_until: dict[str, float] = {}

    @classmethod
    async def join(cls, transport: BaseTransport, p2p: P2P, initial_peers: Sequence[str]) -> HivemindDirectory:
        """Become part of the DHT of `initial_peers`, or begin a new one.

        Raises:
            Unreachable: None of them answers.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                node = await DHTNode.create(
                    p2p,
                    # hivemind would draw it from `random`, which `seed_everything` makes equal in all peers.
                    node_id=DHTID(secrets.randbits(_NODE_ID_BITS)),
                    initial_peers=list(initial_peers) or None,
                    record_validator=PlainRecordsOnly(),
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"The initial peers did not answer within {_TIMEOUT_S:g} s.") from error
        except RuntimeError as error:
            raise Unreachable(f"None of the initial peers answers ({', '.join(initial_peers)}): {error}.") from error
        except ValidationError as error:
            raise Unreachable(
                "Peers must reach each other, and their clocks must agree; the initial peers "
                f"({', '.join(initial_peers)}) say: {' '.join(str(error).split())}. "
                "`lightning-swarm doctor --peer ADDRESS` compares clocks; else open this peer's port in its firewall "
                "and set `listen` to an address that others reach."
            ) from error
        return cls(transport, node)

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """See `Directory`."""
        check_record(key, value, ttl_s)
        self._check_open()
        expires_at = time.time() + ttl_s
        # hivemind keeps the record that lives longest, so a new one must; its real end is inside.
        stored_until = max(expires_at, self._stored_until.get(key, 0.0) + _NEWER_S)
        self._stored_until[key] = stored_until
        record = pack(Announcement(value, expires_at))
        async with self._deadline(f"announce under {key!r}"):
            if self._knows_others() and not await self._node.store(
                key, record, stored_until, subkey=self._transport.peer_id, exclude_self=True
            ):
                raise Unreachable(f"No other peer stored what {self._transport.peer_id} announced under {key!r}.")
        # Others may leave, or not have come yet; who joins is given what is stored here.
        self._node.protocol.storage.store(
            DHTID.generate(source=key), GuardedSerializer.dumps(record), stored_until, subkey=self._transport.peer_id
        )

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """See `Directory`. Of others' records, those that the nearest peers have now."""
        self._check_open()
        async with self._deadline(f"read {key!r}"):
            found = await self._node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        now_s = time.time()
        values = {peer: unpack(record.value, now_s) for peer, record in found.value.items()}
        return {PeerId(peer): value for peer, value in values.items() if isinstance(peer, str) and value is not None}

    async def close(self) -> None:
        """See `Directory`. What was announced stays until it expires."""
        if self._closed:
            return
        self._closed = True
        self._node.is_alive = False
        if (refreshing := self._node.cache_refresh_task) is not None:
            refreshing.cancel()
        # hivemind tells the daemon, and would wait for ever if that is dead.
        if not self._transport.closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._node.shutdown()

    def _knows_others(self) -> bool:
        return bool(self._node.protocol.routing_table.uid_to_peer_id)

    def _check_open(self) -> None:
        if self._closed:
            raise Unreachable("This peer has left the directory.")

    @asynccontextmanager
    async def _deadline(self, purpose: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(f"Could not {purpose} within {_TIMEOUT_S:g} s.") from error
