"""Surveys a live swarm by the reports of its peers, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from msgspec import UnsetType

from lightning_swarm.core.errors import (
    AccessDenied,
    Busy,
    ConfigError,
    Damaged,
    DeadlineExceeded,
    PeerError,
    ProtocolError,
    SwarmError,
    Unreachable,
)
from lightning_swarm.core.readable import printable, short_name, shorten, table_lines
from lightning_swarm.core.tasks import gather
from lightning_swarm.monitor.checks import Obstacle
from lightning_swarm.monitor.doctor import ANYONE, Visitor, knock, visit
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.addresses import Address, widest
from lightning_swarm.protocol.messages.reports import OtherPeer, OtherPeers, PeerReport, ServerReport
from lightning_swarm.protocol.messages.wire import decode, encode

REPORT: Final = "peer.report"
OTHERS: Final = "peer.others"

_START_TIMEOUT_S: Final = 30.0
_MAX_OTHERS: Final = 1024
_MAX_ADDRESSES: Final = 16
_HEADS: Final = ("stage", "peer", "at", "step", "samples/s", "queue", "GB/h out", "GB/h in", "peak GB", "up")
_DIGEST: Final = re.compile(r"(?<=\bcpu )[0-9a-f]{8}, ")  # see `arithmetic_of`

_BEGINNING: Final = PeerReport(run_id="", age_s=0.0, sent_bytes=0, received_bytes=0, server=None)

KnownServers = Callable[[], Awaitable[Mapping[PeerId, Sequence[str]]]]  # known servers -> their addresses


@dataclass(frozen=True)
class Sighting:
    """One peer's answer, or the reason why there is none."""

    peer_id: PeerId
    place: str  # host and port
    report: PeerReport | None  # None: it did not answer
    problem: str | None = None

    @property
    def role(self) -> str | None:
        """The role of its certificate; None: its run takes any peer, or it did not answer."""
        if self.report is None or isinstance(self.report.role, UnsetType):
            return None
        return printable(self.report.role)


def answer(transport: Transport, report: Callable[[], PeerReport], others: KnownServers) -> None:
    """Register the answers to any peer that asks for this peer's report, or for the servers that it knows."""

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
    """Ask the connected peer `first`, then all servers that it knows at once; these may be silent."""
    places = await others_of(transport, first, timeout=timeout)
    own = await _ask(transport, first, (address,), timeout, connected=True)
    rest = {peer: places[peer] for peer in sorted(places) if peer != first}
    return [own, *await gather(_ask(transport, peer, where, timeout) for peer, where in rest.items())]


async def others_of(transport: Transport, peer: PeerId, *, timeout: float) -> dict[PeerId, list[str]]:
    """Return the servers that a peer knows, with their addresses."""
    body = await transport.call(peer, OTHERS, b"", timeout=timeout)
    return {PeerId(other.peer_id): other.addresses for other in decode(body, OtherPeers).peers}


async def run_id_of(transport: Transport, peer: PeerId, *, timeout: float) -> str | None:
    """Return the id of a peer's run; None if the peer does not answer. If it refuses, raise its reason."""
    try:
        return decode(await transport.call(peer, REPORT, b"", timeout=timeout), PeerReport).run_id
    except SwarmError as error:
        if isinstance(error, PeerError) and not isinstance(error, Unreachable | DeadlineExceeded | Busy | Damaged):
            raise
        return None


async def _ask(
    transport: Transport, peer: PeerId, addresses: Sequence[str], timeout: float, *, connected: bool = False
) -> Sighting:
    report = problem = None
    try:
        if not connected:
            async with asyncio.timeout(timeout):
                await transport.connect([address for address in addresses if address.endswith(peer)])
        report = decode(await transport.call(peer, REPORT, b"", timeout=timeout), PeerReport)
    except SwarmError as error:
        problem = shorten(str(error))
    except TimeoutError:
        problem = f"did not answer within {timeout:g} s"
    return Sighting(peer, place_of(addresses) or "an unknown place", report, problem)


def place_of(addresses: Sequence[str]) -> str | None:
    """Return the host and port of a peer as printable text, if possible of an address that other machines can use."""
    parsed = Address.parse_all(addresses)
    return printable(str(widest(parsed).place)) if parsed else None


def _check_empty(method: str, body: bytes) -> None:
    if body:
        raise ProtocolError(f"{method} takes no arguments, got {len(body)} bytes")


@dataclass(frozen=True, kw_only=True)
class ObservedPeer:
    """One peer of a swarm; its rates are since the previous look or, at the first one, since the peer began."""

    peer_id: str
    place: str  # host and port
    problem: str | None  # why it did not answer; None if it did
    stages: tuple[int, ...] = ()  # empty while it waits for a run
    lead: bool = False
    coordinator: bool = False
    role: str | None = None  # role of its certificate; None: the run takes any peer, or it did not answer
    refused: int = 0  # requests that it refused, because a certificate was missing or did not permit them
    step: int | None = None  # the open step; None while it waits
    samples_per_s: float = 0.0  # forward, through each of its stages but the trainers'
    queued: int = 0  # jobs that wait for its compute thread
    sent_gb_per_hour: float = 0.0  # on the wire, in 1e9 bytes
    received_gb_per_hour: float = 0.0
    peak_gb: float | None = None  # peak memory in 1e9 bytes; None: unknown
    arithmetic: str = ""  # equal on machines of one kind, which compute the same bits; empty: unknown
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SwarmReport:
    """A swarm at one moment."""

    run_id: str
    step: int | None  # the open step; None while no run is under way, or the coordinator does not answer
    steps_per_minute: float
    stages: tuple[tuple[str, ...], ...]  # stage -> ids of the peers that hold it
    trainers_stage: int | None = None  # the index of the stage that the trainers compute, if there is one
    portable: tuple[int, ...] = ()  # stages that took the newest step by portable arithmetic
    peers: tuple[ObservedPeer, ...]

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut: each trainer holds the model, and computes it itself."""
        return self.trainers_stage is not None and len(self.stages) == 1


def summarize(sightings: Sequence[Sighting], before: Sequence[Sighting] = ()) -> SwarmReport:
    """Combine the peers' answers into a report, with rates since the previous look if there was one."""
    reports, earlier = _reports(sightings), _reports(before)
    servers = {peer: report.server for peer, report in reports.items() if report.server}
    past = {peer: _same_life(report, earlier.get(peer)) for peer, report in reports.items()}
    peers = tuple(_peer(sighting, past.get(sighting.peer_id, _BEGINNING)) for sighting in sightings)
    num_stages = max((server.num_stages for server in servers.values()), default=0)
    coordinator = next((peer for peer, server in servers.items() if server.coordinator == peer), None)
    newest = servers[coordinator].newest if coordinator else None
    return SwarmReport(
        run_id=next((report.run_id for report in reports.values()), ""),
        step=servers[coordinator].step if coordinator else None,
        steps_per_minute=_rates(servers[coordinator], past[coordinator].server)[1] if coordinator else 0.0,
        stages=tuple(tuple(peer.peer_id for peer in peers if index in peer.stages) for index in range(num_stages)),
        trainers_stage=next((server.trainers_stage for server in servers.values()), None),
        portable=tuple(newest.portable) if newest else (),
        peers=peers,
    )


def _reports(sightings: Sequence[Sighting]) -> dict[PeerId, PeerReport]:
    return {sighting.peer_id: sighting.report for sighting in sightings if sighting.report is not None}


def _peer(sighting: Sighting, old: PeerReport) -> ObservedPeer:
    report, peer = sighting.report, sighting.peer_id
    found = ObservedPeer(peer_id=peer, place=sighting.place, problem=sighting.problem)
    if report is None:
        return found
    elapsed_s = report.age_s - old.age_s
    found = replace(
        found,
        sent_gb_per_hour=_per(report.sent_bytes - old.sent_bytes, elapsed_s) * 3600 / 1e9,
        received_gb_per_hour=_per(report.received_bytes - old.received_bytes, elapsed_s) * 3600 / 1e9,
        age_s=report.age_s,
        role=sighting.role,
        refused=report.refused,
    )
    server = report.server
    if server is None:
        return found
    return replace(
        found,
        stages=tuple(server.stages),
        lead=server.lead == peer,
        coordinator=server.coordinator == peer,
        step=server.step,
        samples_per_s=_rates(server, old.server)[0],
        queued=server.queued,
        peak_gb=server.peak_bytes / 1e9 if server.peak_bytes is not None else None,
        arithmetic=server.arithmetic,
    )


def _same_life(now: PeerReport, before: PeerReport | None) -> PeerReport:
    """Return the earlier report, or the peer's beginning if it has restarted or joined another run since."""
    if before is None or before.age_s >= now.age_s or before.sent_bytes > now.sent_bytes:
        return _BEGINNING
    if now.server and before.server and before.server.age_s >= now.server.age_s:
        return _BEGINNING
    return before


def _rates(now: ServerReport, past: ServerReport | None) -> tuple[float, float]:
    """Return samples/s and steps a minute since an earlier report or, without one, since the server joined its run."""
    elapsed_s = now.age_s - (past.age_s if past else 0.0)
    num_samples = now.num_samples - (past.num_samples if past else 0)
    num_steps = now.step - (past.step if past else now.first_step)
    return _per(num_samples, elapsed_s), 60 * _per(num_steps, elapsed_s)


def _per(count: float, elapsed_s: float) -> float:
    return max(count, 0) / elapsed_s if elapsed_s > 0 else 0.0


def table(swarm: SwarmReport) -> str:
    """Format a swarm as a table: a line for each stage of each peer, then the peers that hold none."""
    rows = [
        _row(_stage(swarm, index), peer, is_trainers=index == swarm.trainers_stage)
        for index in range(len(swarm.stages))
        for peer in swarm.peers
        if index in peer.stages
    ]
    rows += [_row("-", peer) for peer in swarm.peers if not peer.stages]
    lines = table_lines([_HEADS, *rows])
    lines += [
        f"{'the model' if swarm.is_whole else f'stage {index}'}: no answering peer holds it"
        for index, peers in enumerate(swarm.stages)
        if not peers
    ]
    lines += _mixed_lines(swarm)
    lines += [
        f"{short_name(peer.peer_id)} at {peer.place} does not answer: {peer.problem}"
        for peer in swarm.peers
        if peer.problem
    ]
    lines += [
        f"{short_name(peer.peer_id)} refused {peer.refused} requests, of peers without a certificate that permits them"
        for peer in swarm.peers
        if peer.refused
    ]
    return "\n".join([_headline(swarm), "", *lines])


def _mixed_lines(swarm: SwarmReport) -> list[str]:
    """Return a line for each stage that machines of several kinds hold, or that has tensors of such a stage."""
    lines = []
    for index, members in enumerate(swarm.stages):
        kinds = Counter(peer.arithmetic for peer in swarm.peers if peer.peer_id in members and peer.arithmetic)
        stage = "the model" if swarm.is_whole else f"stage {index}"
        if len(kinds) > 1:
            counts = ", ".join(
                f"{count} x ({kind})" for kind, count in zip(_readable(kinds), kinds.values(), strict=True)
            )
            lines.append(f"{stage}: {len(kinds)} kinds of machines, stepped by portable arithmetic: {counts}")
        elif index in swarm.portable:
            lines.append(
                f"{stage}: stepped by portable arithmetic, for a stage with which it shares parameters, or a server "
                "that does not answer, is on another kind of machine"
            )
    return lines


def _readable(kinds: Collection[str]) -> list[str]:
    """Shorten the names of kinds by the digest of processor and environment, unless nothing else differs."""
    plain = [_DIGEST.sub("", kind) for kind in kinds]
    return [printable(kind if plain.count(short) > 1 else short) for kind, short in zip(kinds, plain, strict=True)]


def _headline(swarm: SwarmReport) -> str:
    num_silent = sum(peer.problem is not None for peer in swarm.peers)
    silent = f", {num_silent} of them silent" if num_silent else ""
    peers = f"{len(swarm.peers)} peer{'s' if len(swarm.peers) != 1 else ''}{silent}"
    if swarm.step is None:
        state = "no coordinator answers" if swarm.stages else "no run is under way yet"
    else:
        stages = "a model that is not cut" if swarm.is_whole else f"{len(swarm.stages)} stages"
        state = f"step {swarm.step}, {swarm.steps_per_minute:.1f} steps/min, {stages}"
    return f"run {swarm.run_id!r}: {state}, {peers}"


def _stage(swarm: SwarmReport, index: int) -> str:
    if swarm.is_whole:
        return "model"
    return f"{index} trainers'" if index == swarm.trainers_stage else str(index)


def _row(stage: str, peer: ObservedPeer, *, is_trainers: bool = False) -> tuple[str, ...]:
    role = f" {peer.role}" if peer.role is not None else ""
    roles = "".join((role, " lead" if peer.lead else "", " coordinator" if peer.coordinator else ""))
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


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.0f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"


def watch(
    address: Address, *, every_s: float | None, timeout: float, visitor: Visitor = ANYONE
) -> Generator[SwarmReport]:
    """Yield reports of the swarm that a peer belongs to; see `look_repeatedly`."""
    before: Sequence[Sighting] = ()
    with contextlib.closing(look_repeatedly(address, every_s=every_s, timeout=timeout, visitor=visitor)) as sightings:
        for now in sightings:
            yield summarize(now, before)
            before = now


def look_repeatedly(
    address: Address, *, every_s: float | None, timeout: float, visitor: Visitor = ANYONE
) -> Generator[Sequence[Sighting]]:
    """Yield the answers of a peer and of all that it knows, every `every_s` seconds or, if that is None, once."""
    for name, seconds in (("--watch", every_s), ("--timeout", timeout)):
        if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ConfigError(
                f"`{name}` must be a number of seconds above 0, got {seconds}. Leave it out, or raise it."
            )
    with visit("status", visitor, startup_timeout=_START_TIMEOUT_S) as (runtime, transport):
        while True:
            try:
                runtime.run(transport.connect([address.maddr]))
            except PeerError as error:
                raise Unreachable(_explain(address, timeout)) from error
            try:
                runtime.run(visitor.introduce(transport, address.peer_id))
                now = runtime.run(look(transport, address.peer_id, address.maddr, timeout=timeout))
            except AccessDenied:
                raise
            except PeerError as error:
                raise Unreachable(
                    f"{address} does not answer: {shorten(str(error))} Ask another peer of the run, or find out what "
                    f"is in the way: lightning-swarm doctor --peer {address}"
                ) from error
            yield now
            if every_s is None:
                return
            threading.Event().wait(every_s)


def _explain(address: Address, timeout: float) -> str:
    """Explain why libp2p does not reach a peer, by the result of a plain connection."""
    dialed = knock(address, timeout=timeout)
    obstacle = dialed.obstacle or Obstacle.IDENTITY  # libp2p answers there
    detail = f" ({dialed.detail})" if dialed.detail else ""
    return f"{address} cannot be reached: {obstacle.what}{detail}. {obstacle.remedy} Or ask another peer of the run."
