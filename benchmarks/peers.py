"""Peers of processes that measure together, the swarm's and hivemind's, so that each can reach each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import hivemind
import torch.multiprocessing
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from benchmarks.together import Together
from lightning_swarm.network import PeerId
from lightning_swarm.network.hivemind import HivemindTransport, start


@asynccontextmanager
async def swarm_peer(
    together: Together, *, neighbours: bool = False
) -> AsyncIterator[tuple[HivemindTransport, Sequence[PeerId]]]:
    """This process's peer, and all peers' ids by rank. It answers until all have left.

    They talk over libp2p, as hivemind's do, unless they are to be `neighbours`.
    """
    transport, directory = await start(neighbours=neighbours)
    found = together.exchange((transport.peer_id, await transport.addresses()))
    for rank, (_, addresses) in enumerate(found):
        if rank != together.rank:
            await transport.connect(addresses)
    together.exchange()
    try:
        yield transport, [peer for peer, _ in found]
        await asyncio.to_thread(together.exchange)
    finally:
        await directory.close()
        await transport.close()


@contextmanager
def hivemind_dht(together: Together) -> Iterator[hivemind.DHT]:
    """This process's part of hivemind's table, which all of them share; it begins at the first one."""
    torch.multiprocessing.set_sharing_strategy("file_system")  # as an import of hivemind alone would have it
    first = hivemind.DHT(start=True) if together.rank == 0 else None
    addresses = together.exchange([str(address) for address in first.get_visible_maddrs()] if first else [])[0]
    dht = first or hivemind.DHT(initial_peers=addresses, start=True)
    try:
        yield dht
    finally:
        dht.shutdown()


@asynccontextmanager
async def hivemind_peer(together: Together) -> AsyncIterator[tuple[P2P, Sequence[PeerID]]]:
    """Likewise for hivemind's own classes."""
    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], auto_nat=False, nat_port_map=False, use_relay=False)
    addresses = [str(address) for address in await p2p.get_visible_maddrs()]
    found = together.exchange((p2p.peer_id.to_base58(), addresses))
    peers = [PeerID.from_base58(peer) for peer, _ in found]
    for rank, (_, addresses) in enumerate(found):
        if rank != together.rank:
            maddrs = [Multiaddr(address.partition("/p2p/")[0]) for address in addresses]
            # hivemind connects to peers of its table alone, and averaging needs no table.
            await p2p._client.connect(peers[rank], maddrs)
    together.exchange()
    try:
        yield p2p, peers
        await asyncio.to_thread(together.exchange)
    finally:
        await p2p.shutdown()
