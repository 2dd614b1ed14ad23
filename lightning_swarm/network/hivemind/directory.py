"""`HivemindDirectory`: announcements in a Kademlia DHT."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from lightning_swarm.core.errors import DeadlineExceeded, Unreachable
from lightning_swarm.network import Directory, PeerId, check_record
from lightning_swarm.network.hivemind._engine import DHTID, P2P, DHTNode, ValidationError
from lightning_swarm.network.hivemind.kademlia import BoundedNode
from lightning_swarm.network.hivemind.records import GuardedSerializer, OwnRecordsOnly, pack, unpack
from lightning_swarm.network.identity import Identity
from lightning_swarm.network.transport import BaseTransport

_TIMEOUT_S: Final = 15.0
_LEAVE_TIMEOUT_S: Final = 1.0
_NEWER_S: Final = 0.001  # hivemind orders records by expiry, so a newer record must expire at least this much later
_NODE_ID_BITS: Final = 160


class HivemindDirectory(Directory):
    """A peer's directory in a Kademlia DHT, made by `lightning_swarm.network.hivemind.start`."""

    def __init__(self, transport: BaseTransport, node: DHTNode, identity: Identity) -> None:
        self._transport = transport
        self._identity = identity
        self._node = node
        self._closed = False
        self._stored_until: dict[str, float] = {}  # key -> expiry of this peer's newest record in the DHT

    @classmethod
    async def join(
        cls,
        transport: BaseTransport,
        p2p: P2P,
        initial_peers: Sequence[str],
        identity: Identity,
        *,
        is_local: bool,  # no other machine reaches this peer
    ) -> HivemindDirectory:
        """Become part of the DHT of `initial_peers`, or begin a new one without any."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                node = await BoundedNode.create(
                    p2p,
                    # hivemind would draw the id from `random`, which `seed_everything` seeds equally in all peers.
                    node_id=DHTID(secrets.randbits(_NODE_ID_BITS)),
                    initial_peers=list(initial_peers) or None,
                    record_validator=OwnRecordsOnly(is_local=is_local),
                    cache_locally=False,  # peers read the newest records, and cache none
                    cache_on_store=False,
                    cache_nearest=0,
                )
        except TimeoutError as error:
            raise DeadlineExceeded(f"The initial peers did not answer within {_TIMEOUT_S:g} s.") from error
        except RuntimeError as error:
            raise Unreachable(f"None of the initial peers answers ({', '.join(initial_peers)}): {error}.") from error
        except ValidationError as error:
            raise Unreachable(
                "Peers must reach each other, and their clocks must agree; the initial peers "
                f"({', '.join(initial_peers)}) report: {' '.join(str(error).split())}. "
                "`lightning-swarm doctor --peer ADDRESS` compares clocks; else open this peer's port in its firewall "
                "and set `listen` to an address that others reach."
            ) from error
        return cls(transport, node, identity)

    async def announce(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """See `Directory`."""
        check_record(key, value, ttl_s)
        self._check_open()
        expires_at = time.time() + ttl_s
        # hivemind keeps the record that lives longest, so a new record must outlive its predecessor.
        # The record itself contains the real expiry.
        stored_until = max(expires_at, self._stored_until.get(key, 0.0) + _NEWER_S)
        self._stored_until[key] = stored_until
        key_id = DHTID.generate(source=key)
        record = pack(self._identity, key_id, value, expires_at=expires_at, stored_until=stored_until)
        async with self._deadline(f"announce under {key!r}"):
            knows_others = bool(self._node.protocol.routing_table.uid_to_peer_id)
            if knows_others and not await self._node.store(
                key, record, stored_until, subkey=self._transport.peer_id, exclude_self=True
            ):
                raise Unreachable(
                    f"No other peer stored what {self._transport.peer_id} announced under {key!r}.{self._rsa_hint}"
                )
        # Also stored here, because other peers may leave or not have come yet: joining peers receive this copy.
        self._node.protocol.storage.store(
            key_id, GuardedSerializer.dumps(record), stored_until, subkey=self._transport.peer_id
        )

    async def read(self, key: str) -> Mapping[PeerId, bytes]:
        """See `Directory`. Asks the peers nearest to the key, because no peer caches records."""
        self._check_open()
        async with self._deadline(f"read {key!r}"):
            stored = await self._node.get(key, latest=True)
        if stored is None or not isinstance(stored.value, dict):
            return {}
        now_s = time.time()
        values = {peer: unpack(record.value, now_s) for peer, record in stored.value.items()}
        return {PeerId(peer): value for peer, value in values.items() if isinstance(peer, str) and value is not None}

    async def close(self) -> None:
        """See `Directory`. Announcements stay until they expire."""
        if self._closed:
            return
        self._closed = True
        self._node.is_alive = False
        if (refreshing := self._node.cache_refresh_task) is not None:
            refreshing.cancel()
        # hivemind's shutdown calls the daemon, and would wait forever if the daemon is dead.
        if not self._transport.closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                    await self._node.shutdown()

    @property
    def _rsa_hint(self) -> str:
        if self._identity.can_sign:
            return ""
        return " Its key is RSA, so peers on other machines cannot verify it. Name another file for `identity_path`."

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
