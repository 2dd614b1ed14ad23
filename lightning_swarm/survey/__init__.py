"""A live swarm, as anyone can see it who can reach its peers: they are asked, and nothing is changed.

`policy` makes rates and a table of the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from lightning_swarm.errors import ConfigError, ProtocolError, SwarmError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.addresses import Address, widest
from lightning_swarm.survey.policy import Sighting
from lightning_swarm.tasks import gather
from lightning_swarm.types.reports import OtherPeer, OtherPeers, PeerReport
from lightning_swarm.types.wire import decode, encode

__all__ = ["REPORT", "Sighting", "answer", "look", "run_id_of"]

REPORT: Final = "peer.report"
OTHERS: Final = "peer.others"

_MAX_OTHERS: Final = 1024
_MAX_ADDRESSES: Final = 16

Others = Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]
"""The servers that a peer has heard of, with their addresses."""


def answer(transport: Transport, report: Callable[[], PeerReport], others: Others) -> None:
    """Tell whoever asks.

    Args:
        transport: Where the questions come in.
        report: Of this peer.
        others: Looks them up.
    """

    async def handle_report(caller: PeerId, body: bytes) -> bytes:
        _check_empty(REPORT, body)
        return encode(report())

    async def handle_others(caller: PeerId, body: bytes) -> bytes:
        _check_empty(OTHERS, body)
        found = [
            OtherPeer(peer_id=peer, addresses=list(addresses)[:_MAX_ADDRESSES])
            for peer, addresses in (await others()).items()
        ]
        return encode(OtherPeers(peers=found[:_MAX_OTHERS]))

    transport.handle_call(REPORT, handle_report)
    transport.handle_call(OTHERS, handle_others)


async def look(transport: Transport, first: PeerId, address: str, *, timeout: float) -> list[Sighting]:
    """Ask a peer, and all servers that it has heard of.

    Args:
        transport: Connected to the first one.
        first: Whom to ask for the others.
        address: Where it is.
        timeout: Seconds for each of them; they are asked at once.

    Returns:
        What each said, or why it did not.

    Raises:
        SwarmError: The first one does not answer.
    """
    body = await transport.call(first, OTHERS, b"", timeout=timeout)
    places = {PeerId(other.peer_id): other.addresses for other in decode(body, OtherPeers).peers}
    own = await _ask(transport, first, (address,), timeout)
    rest = {peer: places[peer] for peer in sorted(places) if peer != first}
    return [own, *await gather(_reach(transport, peer, where, timeout) for peer, where in rest.items())]


async def run_id_of(transport: Transport, peer: PeerId, *, timeout: float) -> str | None:
    """For which run a peer is; None if it does not answer."""
    report = (await _ask(transport, peer, (), timeout)).report
    return report.run_id if report is not None else None


async def _reach(transport: Transport, peer: PeerId, addresses: Sequence[str], timeout: float) -> Sighting:
    """Connect, then ask."""
    try:
        async with asyncio.timeout(timeout):
            await transport.connect([one for one in addresses if one.endswith(peer)])
    except TimeoutError:
        return Sighting(peer, _place(addresses), None, f"did not answer within {timeout:g} s")
    except SwarmError as error:
        return Sighting(peer, _place(addresses), None, _short(error, peer))
    return await _ask(transport, peer, addresses, timeout)


async def _ask(transport: Transport, peer: PeerId, addresses: Sequence[str], timeout: float) -> Sighting:
    try:
        report = decode(await transport.call(peer, REPORT, b"", timeout=timeout), PeerReport)
    except SwarmError as error:
        return Sighting(peer, _place(addresses), None, _short(error, peer))
    return Sighting(peer, _place(addresses), report)


def _short(error: SwarmError, peer: PeerId) -> str:
    """What is said after the peer's id, which libp2p repeats with each word of its own."""
    said = " ".join(str(error).split())
    return said.rpartition(f"{peer}: ")[2] or said


def _place(addresses: Sequence[str]) -> str:
    """Where a peer is, for people."""
    parsed = []
    for text in addresses:
        with contextlib.suppress(ConfigError):
            parsed.append(Address.parse(text))
    return str(widest(parsed).place) if parsed else "an unknown place"


def _check_empty(method: str, body: bytes) -> None:
    if body:
        raise ProtocolError(f"{method} takes no arguments, got {len(body)} bytes")
