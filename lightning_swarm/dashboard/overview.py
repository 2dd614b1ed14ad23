"""The newest report of a run or a served model with the numbers, curves and events derived from reports. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from lightning_swarm.core.curves import Curves
from lightning_swarm.core.readable import printable
from lightning_swarm.monitor.model_report import ModelReport, ObservedServer
from lightning_swarm.monitor.swarm_report import ObservedPeer, SwarmReport

MAX_BOXES: Final = 200  # peers of one stage that a page draws
MAX_BOXES_IN_ALL: Final = 1000

Observed: TypeAlias = ObservedPeer | ObservedServer
Report: TypeAlias = SwarmReport | ModelReport

NUMBERS: Final[Mapping[str, str]] = {
    "peers": "Listed peers.",
    "answering_peers": "Listed peers that answer.",
    "silent_peers": "Listed peers that do not answer.",
    "step": "The open step.",
    "steps_per_minute": "Steps per minute, over the last minute.",
    "samples_per_second": "Samples per second through the median stage.",
    "tokens_per_second": "Tokens per second.",
    "sent_gigabytes_per_hour": "Traffic that all peers send, in 1e9 bytes.",
    "texts": "Open texts.",
}
"""Meanings of the numbers of an overview. Page, JSON, curves and gauges use these names."""


class StageOverview(Struct, frozen=True, kw_only=True):
    """One stage, summed over the peers that answer."""

    num_peers: int = 0
    rate: float | None = None  # samples/s or tokens/s; None: not measured, because trainers compute this stage
    load: int = 0  # jobs in the queues, or texts
    num_kinds: int = 0  # kinds of machines
    is_portable: bool = False  # the newest step was taken by portable arithmetic


class RunChange(Struct, frozen=True, kw_only=True):
    """A change between two surveys."""

    at_s: float  # Unix time of the survey that found it
    kind: str
    text: str
    resumed_s: float | None = None  # after a loss: from the last survey before it to the first with a later step


class Overview(Struct, frozen=True, kw_only=True):
    """A run or a served model at one moment."""

    kind: Literal["run", "model"]
    name: str  # the run's id, or the model
    coordinator: str | None = None
    at_s: float  # Unix time of the survey
    problem: str | None = None  # why the latest survey failed; all other fields are of the last one that worked
    report: Report  # as in `status --json`; a silent peer has its last known stages
    numbers: dict[str, float | None]  # see `NUMBERS`; None: unknown now
    stages: tuple[StageOverview, ...]
    curves: Curves = Curves()  # of the numbers, over Unix time
    logged: Curves = Curves()  # of the numbers that the lead logs, over steps
    logged_at_s: tuple[float, ...] = ()  # Unix time of each interval of `logged`
    events: tuple[RunChange, ...] = ()  # newest last
    join: tuple[str, ...] = ()  # commands for other machines

    def shown(self) -> Overview:
        """Return the overview with at most as many peers of a stage as a page draws; silent and leading peers first."""
        most = min(MAX_BOXES, max(4, MAX_BOXES_IN_ALL // max(1, len(self.stages))))
        drawn, peers = Counter[int](), list[Any]()
        for peer in sorted(self.report.peers, key=_is_ordinary):
            stages = peer.stages or (-1,)
            if any(drawn[stage] < most for stage in stages):
                drawn.update(stages)
                peers.append(peer)
        if isinstance(self.report, ModelReport):
            return replace(self, report=dataclasses.replace(self.report, servers=tuple(peers)))
        # The page groups the peers itself, and the lists of all ids would be long.
        return replace(self, report=dataclasses.replace(self.report, peers=tuple(peers), stages=()))


def _is_ordinary(peer: Observed) -> bool:
    return isinstance(peer, ObservedServer) or not (peer.problem or peer.lead or peer.coordinator)


def overview_of(report: Report, address: str, now_s: float, steps_per_minute: float | None = None) -> Overview:
    """Derive an overview from a report. `address`: a peer that other machines join."""
    num_peers, num_silent = len(report.peers), sum(peer.problem is not None for peer in report.peers)
    numbers: dict[str, float | None] = {"peers": num_peers, "silent_peers": num_silent}
    numbers["answering_peers"] = num_peers - num_silent
    if isinstance(report, ModelReport):
        stages = [_stage(holders) for holders in _holders(report.servers, len(report.stage_bytes))]
        numbers |= {"tokens_per_second": report.tokens_per_s, "texts": report.num_texts}
        join = (
            f"lightning-swarm serve --listen 0.0.0.0:31337 --join {address}",
            f'lightning-swarm generate {address} --prompt "Once upon a time"',
        )
        return Overview(
            kind="model", name=report.name, at_s=now_s, report=report, numbers=numbers, stages=tuple(stages), join=join
        )
    stages = [
        _stage(holders, is_portable=index in report.portable, is_measured=index != report.trainers_stage)
        for index, holders in enumerate(_holders(report.peers, len(report.stages)))
    ]
    # Each sample passes each stage. The median hardly depends on one stage that repeats samples, or has a silent peer.
    rates = [stage.rate for stage in stages if stage.rate is not None]
    invite = "--invite swarm.invite " if any(peer.role for peer in report.peers) else ""
    return Overview(
        kind="run",
        name=printable(report.run_id),
        coordinator=next((peer.peer_id for peer in report.peers if peer.coordinator and not peer.problem), None),
        at_s=now_s,
        report=report,
        numbers=numbers
        | {
            "step": report.step,
            "steps_per_minute": steps_per_minute,
            "samples_per_second": statistics.median(rates) if rates else None,
            "sent_gigabytes_per_hour": sum(peer.sent_gb_per_hour for peer in report.peers),
        },
        stages=tuple(stages),
        join=(f"lightning-swarm join {address} {invite}train.py",),
    )


def _holders(peers: Sequence[Observed], num_stages: int) -> list[list[Observed]]:
    """Return the answering peers of each stage."""
    found = defaultdict[int, list[Observed]](list)
    for peer in peers:
        for stage in peer.stages if peer.problem is None else ():
            found[stage].append(peer)
    return [found[stage] for stage in range(num_stages)]


def _stage(peers: Sequence[Observed], *, is_portable: bool = False, is_measured: bool = True) -> StageOverview:
    rates = [peer.tokens_per_s if isinstance(peer, ObservedServer) else peer.samples_per_s for peer in peers]
    return StageOverview(
        num_peers=len(peers),
        rate=sum(rates) if is_measured else None,
        load=sum(peer.num_texts if isinstance(peer, ObservedServer) else peer.queued for peer in peers),
        num_kinds=len({peer.arithmetic for peer in peers if isinstance(peer, ObservedPeer)} - {""}),
        is_portable=is_portable,
    )


def completed(peer: ObservedPeer, before: Observed | None) -> ObservedPeer:
    """Add the last known stages, role and kind of machine to a peer that does not answer."""
    if peer.problem is None or not isinstance(before, ObservedPeer):
        return peer
    known = {name: getattr(before, name) for name in ("stages", "role", "arithmetic")}
    return dataclasses.replace(peer, **known)
