"""The status of a swarm, combined from its peers' reports: an object for programs, and a table for people. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mode
from typing import Final

from msgspec import UnsetType

from lightning_swarm.core.readable import printable, short_name, table_lines
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.reports import PeerReport, ServerReport

JSON_HELP: Final = """\
Rates are averages since a peer began or, with --watch, since the previous report. The object has `run_id`, `step` (null
if no coordinator answers), `steps_per_minute`, `stages` (a list of peer ids for each), `trainers_stage` (the index of
the stage that the trainers compute: the layers around the pipeline or, if it is the only stage, a model that is not
cut; or null), `portable` (the stages that took the newest step by portable arithmetic) and `peers`. Each peer has
`peer_id`, `place`, `problem` (why it did not answer, or null), `stages`, `lead`, `coordinator`, `step` (null while it
waits for a run), `samples_per_s` (forward through each of its stages except the trainers'), `queued` (jobs),
`sent_gb_per_hour`, `received_gb_per_hour`, `age_s`, `role` (of its certificate; null in a run that takes any peer),
`refused` (requests of peers whose certificates do not permit them), `peak_gb` and `arithmetic` (the kind of machine;
machines of one kind compute the same bits). `logged` has the newest number of each name that the lead logs, with
`name`, `value`, `step` (the Trainer's `global_step`) and `age_s`.
"""
"""The fields of `SwarmReport`, `ObservedPeer` and `ObservedNumber`, for the help of `status --json`."""

_DIGEST: Final = re.compile(r"(?<=\bcpu )[0-9a-f]{8}, ")  # see `arithmetic_of`

_MAX_RATE: Final = 1e15  # keeps sums of rates finite, whatever times and counts a peer reports

_EMPTY_REPORT: Final = PeerReport(run_id="", age_s=0.0, sent_bytes=0, received_bytes=0, server=None)
# The report of a server that is in no run.
_EMPTY_SERVER_REPORT: Final = ServerReport(
    lead="", coordinator="", num_stages=0, stages=[], trainers_stage=None,
    first_step=0, step=0, age_s=0.0, num_samples=0, queued=0,
)  # fmt: skip


@dataclass(frozen=True)
class Sighting:
    """One peer's answer to a survey, or the reason why it gave none."""

    peer_id: PeerId
    place: str  # host and port
    report: PeerReport | None  # None: the peer did not answer
    problem: str | None = None

    @property
    def role(self) -> str | None:
        """The role in the peer's certificate; None: its run has no invitations, or the peer did not answer."""
        if self.report is None or isinstance(self.report.role, UnsetType):
            return None
        return printable(self.report.role)


@dataclass(frozen=True, kw_only=True)
class ObservedPeer:
    """One peer of a swarm, with average rates since the previous survey or, without one, since the peer began."""

    peer_id: str
    place: str  # host and port
    problem: str | None = None
    stages: tuple[int, ...] = ()  # empty while it waits for a run
    lead: bool = False
    coordinator: bool = False
    role: str | None = None
    refused: int = 0
    step: int | None = None
    samples_per_s: float = 0.0
    queued: int = 0  # jobs that wait for the peer's compute thread
    sent_gb_per_hour: float = 0.0  # in 1e9 bytes
    received_gb_per_hour: float = 0.0
    peak_gb: float | None = None
    arithmetic: str = ""  # empty: unknown
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ObservedNumber:
    """The newest number that the lead logged under a name."""

    name: str  # printable
    value: float
    step: int  # the Trainer's `global_step`
    age_s: float


@dataclass(frozen=True, kw_only=True)
class SwarmReport:
    """A swarm at one moment."""

    run_id: str
    step: int | None  # the open step
    steps_per_minute: float
    stages: tuple[tuple[str, ...], ...]
    trainers_stage: int | None = None
    portable: tuple[int, ...] = ()
    peers: tuple[ObservedPeer, ...]
    logged: tuple[ObservedNumber, ...] = ()  # each name once

    @property
    def is_whole(self) -> bool:
        """True if the model is not cut: each trainer holds and computes all of it."""
        return self.trainers_stage is not None and len(self.stages) == 1


def summarize(sightings: Sequence[Sighting], before: Sequence[Sighting] = ()) -> SwarmReport:
    """Combine the answers of a survey into a report, with rates since the survey `before`, if any."""
    reports, earlier = _reports(sightings), _reports(before)
    servers = {peer: report.server for peer, report in reports.items() if report.server}
    past = {peer: _earlier_report(report, earlier.get(peer)) for peer, report in reports.items()}
    # A single false report must not change the run's shape. A former coordinator that lost its majority still reports
    # itself as coordinator; the peer that most servers name counts.
    num_stages = mode([server.num_stages for server in servers.values()] or [0])
    votes = Counter(server.coordinator for server in servers.values())
    claims = [peer for peer, server in servers.items() if server.coordinator == peer]
    coordinator = max(claims, key=lambda peer: votes[peer], default=None)
    peers = tuple(
        _peer(sighting, past.get(sighting.peer_id, _EMPTY_REPORT), coordinator, num_stages) for sighting in sightings
    )
    newest = servers[coordinator].newest if coordinator else None
    lead = reports.get(PeerId(mode([server.lead for server in servers.values()] or [""])))
    return SwarmReport(
        run_id=next((report.run_id for report in reports.values()), ""),
        step=servers[coordinator].step if coordinator else None,
        steps_per_minute=_rates(servers[coordinator], past[coordinator].server)[1] if coordinator else 0.0,
        stages=tuple(tuple(peer.peer_id for peer in peers if index in peer.stages) for index in range(num_stages)),
        trainers_stage=mode([server.trainers_stage for server in servers.values()] or [None]),
        portable=tuple(newest.portable) if newest else (),
        peers=peers,
        logged=_logged(lead) if lead is not None else (),
    )


def _logged(lead: PeerReport) -> tuple[ObservedNumber, ...]:
    found = {printable(number.name): number for number in lead.logged}
    return tuple(
        ObservedNumber(name=name, value=number.value, step=number.step, age_s=number.age_s)
        for name, number in found.items()
    )


def _reports(sightings: Sequence[Sighting]) -> dict[PeerId, PeerReport]:
    return {sighting.peer_id: sighting.report for sighting in sightings if sighting.report is not None}


def _peer(sighting: Sighting, earlier: PeerReport, coordinator: PeerId | None, num_stages: int) -> ObservedPeer:
    now, peer = sighting.report or _EMPTY_REPORT, sighting.peer_id
    server, elapsed_s = now.server or _EMPTY_SERVER_REPORT, now.age_s - earlier.age_s
    return ObservedPeer(
        peer_id=peer,
        place=sighting.place,
        problem=sighting.problem,
        stages=tuple(sorted({stage for stage in server.stages if stage < num_stages})),
        lead=server.lead == peer,
        coordinator=peer == coordinator,
        role=sighting.role,
        refused=now.refused,
        step=server.step if now.server else None,
        samples_per_s=_rates(server, earlier.server)[0],
        queued=server.queued,
        sent_gb_per_hour=_rate(now.sent_bytes - earlier.sent_bytes, elapsed_s) * 3600 / 1e9,
        received_gb_per_hour=_rate(now.received_bytes - earlier.received_bytes, elapsed_s) * 3600 / 1e9,
        peak_gb=server.peak_bytes / 1e9 if server.peak_bytes is not None else None,
        arithmetic=server.arithmetic,
        age_s=now.age_s,
    )


def _earlier_report(now: PeerReport, before: PeerReport | None) -> PeerReport:
    """Return the same process's earlier report, or an empty one if it has restarted or joined another run since."""
    if before is None or before.age_s >= now.age_s or before.sent_bytes > now.sent_bytes:
        return _EMPTY_REPORT
    if now.server and before.server and before.server.age_s >= now.server.age_s:
        return _EMPTY_REPORT
    return before


def _rates(now: ServerReport, past: ServerReport | None) -> tuple[float, float]:
    """Return samples/s and steps a minute since an earlier report or, without one, since the server joined its run."""
    elapsed_s = now.age_s - (past.age_s if past else 0.0)
    num_samples = now.num_samples - (past.num_samples if past else 0)
    num_steps = now.step - (past.step if past else now.first_step)
    return _rate(num_samples, elapsed_s), 60 * _rate(num_steps, elapsed_s)


def _rate(count: float, elapsed_s: float) -> float:
    return min(max(count, 0) / elapsed_s, _MAX_RATE) if elapsed_s > 0 else 0.0


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 48:
        return f"{hours / 24:.0f} d"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"


_COLUMNS: Final[Mapping[str, Callable[[ObservedPeer], str]]] = {
    "step": lambda peer: "waits" if peer.step is None else str(peer.step),
    "samples/s": lambda peer: f"{peer.samples_per_s:.1f}",
    "queue": lambda peer: str(peer.queued),
    "GB/h out": lambda peer: f"{peer.sent_gb_per_hour:.2f}",
    "GB/h in": lambda peer: f"{peer.received_gb_per_hour:.2f}",
    "peak GB": lambda peer: "-" if peer.peak_gb is None else f"{peer.peak_gb:.2f}",
    "up": lambda peer: _duration(peer.age_s),
}


def table(swarm: SwarmReport) -> str:
    """Format a swarm as a table: a line for each stage of each peer, then the peers without a stage."""
    rows = [
        _row(_stage(swarm, index), peer, is_trainers=index == swarm.trainers_stage)
        for index in range(len(swarm.stages))
        for peer in swarm.peers
        if index in peer.stages
    ]
    rows += [_row("-", peer) for peer in swarm.peers if not peer.stages]
    lines = table_lines([("stage", "peer", "at", *_COLUMNS), *rows])
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
        f"{short_name(peer.peer_id)} refused {peer.refused} requests that their peers' certificates do not permit"
        for peer in swarm.peers
        if peer.refused
    ]
    if swarm.logged:
        step = max(number.step for number in swarm.logged)
        texts = [
            f"{number.name} {number.value:.4g}" + (f" (step {number.step})" if number.step != step else "")
            for number in swarm.logged
        ]
        lines.append(f"logged by step {step}: {', '.join(texts)}")
    return "\n".join([_headline(swarm), "", *lines])


def _mixed_lines(swarm: SwarmReport) -> list[str]:
    """Return a line for each stage that machines of several kinds hold, or that shares tensors with such a stage."""
    lines = []
    for index, members in enumerate(swarm.stages):
        kinds = Counter(peer.arithmetic for peer in swarm.peers if peer.peer_id in members and peer.arithmetic)
        stage = "the model" if swarm.is_whole else f"stage {index}"
        if len(kinds) > 1:
            counts = ", ".join(
                f"{count} x ({kind})" for kind, count in zip(_short_kinds(kinds), kinds.values(), strict=True)
            )
            lines.append(f"{stage}: {len(kinds)} kinds of machines, stepped by portable arithmetic: {counts}")
        elif index in swarm.portable:
            lines.append(
                f"{stage}: stepped by portable arithmetic, because a stage that shares its parameters, or a server "
                "that does not answer, is on another kind of machine"
            )
    return lines


def _short_kinds(kinds: Collection[str]) -> list[str]:
    """Drop the digest of processor and environment from the names of kinds, unless two names would become equal."""
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
    cells = {head: "?" if peer.problem is not None else cell(peer) for head, cell in _COLUMNS.items()}
    if is_trainers and peer.problem is None:
        cells["samples/s"] = "-"  # no microbatch is routed to the trainers' stage
    return (stage, f"{short_name(peer.peer_id)}{roles}", peer.place, *cells.values())
