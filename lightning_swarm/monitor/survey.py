"""Surveys a live swarm by the reports of its peers, and answers the surveys of other peers. Changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Final, TypeVar

from lightning_swarm.core.errors import (
    AccessDenied,
    Busy,
    Damaged,
    DeadlineExceeded,
    PeerError,
    ProtocolError,
    SwarmError,
    Unreachable,
)
from lightning_swarm.core.readable import printable, shorten
from lightning_swarm.core.tasks import gather
from lightning_swarm.monitor.checks import Obstacle
from lightning_swarm.monitor.doctor import ANYONE, Visitor, probe_port, visit
from lightning_swarm.monitor.model_report import ModelReport, summarize_model
from lightning_swarm.monitor.swarm_report import Sighting, SwarmReport, summarize
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.addresses import Address, most_reachable
from lightning_swarm.protocol.messages.reports import OtherPeer, OtherPeers, PeerReport
from lightning_swarm.protocol.messages.serving import ModelServers
from lightning_swarm.protocol.rpc import MODEL_SERVERS, OTHERS, PEER_REPORT

_START_TIMEOUT_S: Final = 30.0
_MAX_OTHERS: Final = 1024
_MAX_ADDRESSES: Final = 16

_Answer = TypeVar("_Answer")
KnownServers = Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]  # known servers -> their addresses


def answer(transport: Transport, report: Callable[[], PeerReport], known_servers: KnownServers) -> None:
    """Answer requests of any peer for this peer's report, or for the servers that it knows."""

    async def handle_report(caller: PeerId, _: None) -> PeerReport:
        return report()

    async def handle_others(caller: PeerId, _: None) -> OtherPeers:
        found = [
            OtherPeer(peer_id=peer, addresses=list(addresses)[:_MAX_ADDRESSES])
            for peer, addresses in (await known_servers()).items()
        ]
        return OtherPeers(peers=found[:_MAX_OTHERS])

    PEER_REPORT.serve(transport, handle_report)
    OTHERS.serve(transport, handle_others)


async def ask_all(transport: Transport, first: PeerId, address: str, *, timeout: float) -> list[Sighting]:
    """Ask the connected peer `first`, then all servers that it knows. A silent server is listed with its problem."""
    known = await others_of(transport, first, timeout=timeout)
    own = await _ask(transport, first, (address,), timeout, connected=True)
    rest = {peer: known[peer] for peer in sorted(known) if peer != first}
    return [own, *await gather(_ask(transport, peer, addresses, timeout) for peer, addresses in rest.items())]


async def others_of(transport: Transport, peer: PeerId, *, timeout: float) -> dict[PeerId, list[str]]:
    """Return the servers that a peer knows, with their addresses."""
    known = await OTHERS.ask(transport, peer, None, timeout=timeout)
    return {PeerId(other.peer_id): other.addresses for other in known.peers}


async def run_id_of(transport: Transport, peer: PeerId, *, timeout: float) -> str | None:
    """Return the id of a peer's run; None if the peer does not answer. If it refuses, raise its reason."""
    try:
        return (await PEER_REPORT.ask(transport, peer, None, timeout=timeout)).run_id
    except SwarmError as error:
        if isinstance(error, PeerError) and not isinstance(error, Unreachable | DeadlineExceeded | Busy | Damaged):
            raise
        return None


async def _ask(
    transport: Transport, peer: PeerId, addresses: Sequence[str], timeout: float, *, connected: bool = False
) -> Sighting:
    """Return a peer's report, or the problem if it does not answer."""
    report = problem = None
    try:
        if not connected:
            async with asyncio.timeout(timeout):
                await transport.connect([address for address in addresses if address.endswith(peer)])
        report = await PEER_REPORT.ask(transport, peer, None, timeout=timeout)
    except SwarmError as error:
        problem = shorten(str(error))
    except TimeoutError:
        problem = f"did not answer within {timeout:g} s"
    return Sighting(peer, place_of(addresses) or "an unknown place", report, problem)


def place_of(addresses: Sequence[str]) -> str | None:
    """Return a peer's host and port as printable text, preferably of an address that other machines can use."""
    parsed = Address.parse_all(addresses)
    return printable(str(most_reachable(parsed).host_port)) if parsed else None


def watch_reports(
    address: Address, *, every_s: float | None, timeout: float, visitor: Visitor = ANYONE
) -> Generator[SwarmReport | ModelReport]:
    """Yield reports of the run that a peer belongs to, or of the model that it serves, every `every_s` seconds.

    A run's rates are averages since the previous report; see `watch_sightings` for the arguments.
    """
    before: Sequence[Sighting] = ()
    with contextlib.closing(_watch(_ask_either, address, every_s, timeout, visitor)) as answers:
        for now in answers:
            if isinstance(now, ModelServers):
                yield summarize_model(now)
            else:
                yield summarize(now, before)
                before = now


async def _ask_either(
    transport: Transport, first: PeerId, address: str, *, timeout: float
) -> Sequence[Sighting] | ModelServers:
    """Ask about the connected peer's run, or about the model that it serves."""
    try:
        return await ask_all(transport, first, address, timeout=timeout)
    except ProtocolError as error:  # it has no such method, because it is in no run
        try:
            return await MODEL_SERVERS.ask(transport, first, None, timeout=timeout)
        except ProtocolError:
            raise error from None


def watch_sightings(
    address: Address, *, every_s: float | None, timeout: float, visitor: Visitor = ANYONE
) -> Generator[Sequence[Sighting]]:
    """Yield the answers of a peer and of all servers that it knows, every `every_s` seconds, or once if None."""
    return _watch(ask_all, address, every_s, timeout, visitor)


def _watch(
    ask: Callable[..., Coroutine[Any, Any, _Answer]],
    address: Address,
    every_s: float | None,
    timeout: float,
    visitor: Visitor,
) -> Generator[_Answer]:
    with visit("status", visitor, startup_timeout=_START_TIMEOUT_S) as (runtime, transport):
        while True:
            try:
                runtime.run(transport.connect([address.maddr]))
            except PeerError as error:
                raise Unreachable(_unreachable_text(address, timeout)) from error
            try:
                runtime.run(visitor.introduce(transport, address.peer_id))
                now = runtime.run(ask(transport, address.peer_id, address.maddr, timeout=timeout))
            except AccessDenied:
                raise
            except PeerError as error:
                raise Unreachable(
                    f"{address} does not answer: {shorten(str(error))} Ask another peer of the run, or look for "
                    f"the obstacle: lightning-swarm doctor --peer {address}"
                ) from error
            yield now
            if every_s is None:
                return
            time.sleep(every_s)


def _unreachable_text(address: Address, timeout: float) -> str:
    """Explain why libp2p cannot reach a peer, after trying a plain connection."""
    dialed = probe_port(address, timeout=timeout)
    obstacle = dialed.obstacle or Obstacle.IDENTITY  # libp2p answers there, so the peer has another id
    detail = f" ({dialed.detail})" if dialed.detail else ""
    return f"{address} cannot be reached: {obstacle.text}{detail}. {obstacle.remedy} Or ask another peer of the run."
