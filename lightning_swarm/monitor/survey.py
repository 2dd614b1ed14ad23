"""A live swarm, as anyone can see it who can reach its peers: they are asked, and nothing is changed.

`policy` makes rates and a table of the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_swarm.core.errors import ConfigError, ProtocolError, SwarmError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.addresses import Address, widest
from lightning_swarm.protocol.messages.reports import OtherPeer, OtherPeers, PeerReport
from lightning_swarm.protocol.messages.wire import decode, encode


@dataclass(frozen=True)
class Sighting:
    """One peer, as it was seen.

    Args:
        peer_id: Who.
        place: Host and port.
        report: What it said; None if it did not answer.
        problem: Why not.
    """

    peer_id: PeerId
    place: str
    report: PeerReport | None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class ObservedPeer:
    """One peer. Rates are since the look before or, at the first look, since the peer began.

    Args:
        peer_id: Who.
        place: Host and port.
        problem: Why nothing is known of it; None if it answered.
        stages: That it holds; none while it waits for a run.
        lead: It leads the run.
        coordinator: It coordinates the run.
        step: That is open there; None while it waits.
        samples_per_s: Forward through each of its stages but the trainers'.
        queued: Jobs that wait for its compute thread.
        sent_gb_per_hour: Put on the wire, in 1e9 bytes.
        received_gb_per_hour: Taken off it.
        peak_gb: Of memory that it held at once, in 1e9 bytes; None: that is not known.
        age_s: Seconds since it started.
    """

    peer_id: str
    place: str
    problem: str | None
    stages: tuple[int, ...] = ()
    lead: bool = False
    coordinator: bool = False
    step: int | None = None
    samples_per_s: float = 0.0
    queued: int = 0
    sent_gb_per_hour: float = 0.0
    received_gb_per_hour: float = 0.0
    peak_gb: float | None = None
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SwarmReport:
    """A swarm at one moment.

    Args:
        run_id: Its name.
        step: That is open at the coordinator; None while no run is under way, or the coordinator does not answer.
        steps_per_minute: As the rates of peers.
        stages: For each stage, the peer ids of those that hold it.
        trainers_stage: Which of them is what stands around the pipeline, if there is such a one.
        peers: All of them.
    """

    run_id: str
    step: int | None
    steps_per_minute: float
    stages: tuple[tuple[str, ...], ...]
    trainers_stage: int | None = None
    peers: tuple[ObservedPeer, ...]


def picture(sightings: Sequence[Sighting], before: Sequence[Sighting] = ()) -> SwarmReport:
    """Put together what peers said.

    Args:
        sightings: Now; the peer that was asked first comes first.
        before: At the look before, if there was one.
    """
    reports = {one.peer_id: one.report for one in sightings if one.report is not None}
    earlier = {one.peer_id: one.report for one in before if one.report is not None}
    peers = tuple(_peer(one, earlier) for one in sightings)
    num_stages = max((report.server.num_stages for report in reports.values() if report.server), default=0)
    coordinator = next((peer.peer_id for peer in peers if peer.coordinator), None)
    return SwarmReport(
        run_id=next((report.run_id for report in reports.values()), ""),
        step=next((peer.step for peer in peers if peer.coordinator), None),
        steps_per_minute=_steps_per_minute(coordinator, reports, earlier),
        stages=tuple(tuple(peer.peer_id for peer in peers if index in peer.stages) for index in range(num_stages)),
        trainers_stage=next((report.server.trainers_stage for report in reports.values() if report.server), None),
        peers=peers,
    )


def _peer(sighting: Sighting, earlier: Mapping[PeerId, PeerReport]) -> ObservedPeer:
    report, peer = sighting.report, sighting.peer_id
    if report is None:
        return ObservedPeer(peer_id=peer, place=sighting.place, problem=sighting.problem)
    old = _same_life(report, earlier.get(peer))
    elapsed_s = report.age_s - (old.age_s if old else 0.0)
    sent_bytes = report.sent_bytes - (old.sent_bytes if old else 0)
    received_bytes = report.received_bytes - (old.received_bytes if old else 0)
    server = report.server
    return ObservedPeer(
        peer_id=peer,
        place=sighting.place,
        problem=None,
        stages=tuple(server.stages) if server else (),
        lead=bool(server and server.lead == peer),
        coordinator=bool(server and server.coordinator == peer),
        step=server.step if server else None,
        samples_per_s=_samples_per_s(report, old),
        queued=server.queued if server else 0,
        sent_gb_per_hour=_per(sent_bytes, elapsed_s) * 3600 / 1e9,
        received_gb_per_hour=_per(received_bytes, elapsed_s) * 3600 / 1e9,
        peak_gb=server.peak_bytes / 1e9 if server and server.peak_bytes is not None else None,
        age_s=report.age_s,
    )


def _same_life(now: PeerReport, before: PeerReport | None) -> PeerReport | None:
    """The earlier report, unless the peer was started again since, or joined another run."""
    if before is None or before.age_s >= now.age_s or before.sent_bytes > now.sent_bytes:
        return None
    if now.server and before.server and before.server.age_s >= now.server.age_s:
        return None
    return before


def _samples_per_s(report: PeerReport, old: PeerReport | None) -> float:
    if report.server is None:
        return 0.0
    past = old.server if old else None
    num_samples = report.server.num_samples - (past.num_samples if past else 0)
    return _per(num_samples, report.server.age_s - (past.age_s if past else 0.0))


def _steps_per_minute(
    coordinator: str | None, reports: Mapping[PeerId, PeerReport], earlier: Mapping[PeerId, PeerReport]
) -> float:
    if coordinator is None:
        return 0.0
    report = reports[PeerId(coordinator)]
    now = report.server
    assert now is not None
    old = _same_life(report, earlier.get(PeerId(coordinator)))
    past = old.server if old else None
    num_steps = now.step - (past.step if past else now.first_step)
    return 60 * _per(num_steps, now.age_s - (past.age_s if past else 0.0))


def _per(count: float, elapsed_s: float) -> float:
    return max(count, 0) / elapsed_s if elapsed_s > 0 else 0.0


_HEADS = ("stage", "peer", "at", "step", "samples/s", "queue", "GB/h out", "GB/h in", "peak GB", "up")


def table(seen: SwarmReport) -> str:
    """The picture for people: a line for each stage of each peer, then those that hold none."""
    rows = [
        _row(index, peer, is_trainers=index == seen.trainers_stage)
        for index in range(len(seen.stages))
        for peer in seen.peers
        if index in peer.stages
    ]
    rows += [_row(None, peer) for peer in seen.peers if not peer.stages]
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (_HEADS, *rows)]
    for index, peers in enumerate(seen.stages):
        if not peers:
            lines.append(f"stage {index}: nobody who answers holds it")
    lines += [
        f"{short_name(peer.peer_id)} at {peer.place} does not answer: {peer.problem}"
        for peer in seen.peers
        if peer.problem
    ]
    return "\n".join([_headline(seen), "", *(line.rstrip() for line in lines)])


def _headline(seen: SwarmReport) -> str:
    num_silent = sum(peer.problem is not None for peer in seen.peers)
    silent = f", {num_silent} of them silent" if num_silent else ""
    who = f"{len(seen.peers)} peer{'s' if len(seen.peers) != 1 else ''}{silent}"
    if seen.step is None:
        state = "no coordinator answers" if seen.stages else "no run is under way yet"
    else:
        state = f"step {seen.step}, {seen.steps_per_minute:.1f} steps/min, {len(seen.stages)} stages"
    return f"run {seen.run_id!r}: {state}, {who}"


def _row(index: int | None, peer: ObservedPeer, *, is_trainers: bool = False) -> tuple[str, ...]:
    stage = "-" if index is None else f"{index} trainers'" if is_trainers else str(index)
    roles = "".join((" lead" if peer.lead else "", " coordinator" if peer.coordinator else ""))
    name = f"{short_name(peer.peer_id)}{roles}"
    if peer.problem is not None:
        return (stage, name, peer.place, *("?" for _ in _HEADS[3:]))
    return (
        stage,
        name,
        peer.place,
        "waits" if peer.step is None else str(peer.step),
        "-" if is_trainers else f"{peer.samples_per_s:.1f}",
        str(peer.queued),
        f"{peer.sent_gb_per_hour:.2f}",
        f"{peer.received_gb_per_hour:.2f}",
        "-" if peer.peak_gb is None else f"{peer.peak_gb:.2f}",
        _duration(peer.age_s),
    )


def short_name(peer_id: str) -> str:
    """The end of an id: they all begin alike."""
    return f"…{peer_id[-6:]}" if len(peer_id) > 12 else peer_id


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.0f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"


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
