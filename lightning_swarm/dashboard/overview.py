"""The state of a run or a served model at one moment, from which page, JSON and metrics are made. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from typing import Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from lightning_swarm.core.readable import printable
from lightning_swarm.dashboard.history import Curves
from lightning_swarm.monitor.model_report import ModelReport, ObservedServer
from lightning_swarm.monitor.swarm_report import ObservedPeer, SwarmReport

MAX_BOXES: Final = 200  # peers of one stage that a page draws
MAX_BOXES_IN_ALL: Final = 1000

Observed: TypeAlias = ObservedPeer | ObservedServer


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
    """A run or a served model at one moment. Fields of `peers` are those of `status --json`."""

    kind: Literal["run", "model"]
    name: str  # the run's id, or the model
    at_s: float  # Unix time of the survey
    problem: str | None = None  # why the latest survey failed; all other fields are of the last one that worked
    step: int | None = None  # the open step; None: no coordinator answers
    steps_per_minute: float | None = None  # over the last minute
    rate: float | None = None  # samples/s of the median stage, or the model's tokens/s
    texts: int | None = None  # open texts of a served model
    gb_per_hour: float | None = None  # sent by all peers
    num_peers: int
    num_silent: int = 0
    coordinator: str | None = None
    trainers_stage: int | None = None
    stages: tuple[StageOverview, ...]
    peers: tuple[Observed, ...]  # a silent peer with its last known stages
    curves: Curves = Curves()
    events: tuple[RunChange, ...] = ()  # newest last
    join: tuple[str, ...] = ()  # commands for other machines

    def shown(self) -> Overview:
        """Return the overview with at most as many peers of a stage as a page draws; silent and leading peers first."""
        most = min(MAX_BOXES, max(4, MAX_BOXES_IN_ALL // max(1, len(self.stages))))
        drawn, peers = Counter[int](), []
        for peer in sorted(self.peers, key=_is_ordinary):
            stages = peer.stages or (-1,)
            if any(drawn[stage] < most for stage in stages):
                drawn.update(stages)
                peers.append(peer)
        return replace(self, peers=tuple(peers))


def problem_of(peer: Observed) -> str | None:
    """Return why a peer did not answer. Servers of a model are listed by their announcements."""
    return None if isinstance(peer, ObservedServer) else peer.problem


def _is_ordinary(peer: Observed) -> bool:
    return isinstance(peer, ObservedServer) or not (peer.problem or peer.lead or peer.coordinator)


def overview_of_run(report: SwarmReport, address: str, now_s: float) -> Overview:
    """Convert a run's report. `address`: a peer that other machines join."""
    invite = "--invite swarm.invite " if any(peer.role for peer in report.peers) else ""
    stages = [
        _stage(holders, is_portable=index in report.portable, is_measured=index != report.trainers_stage)
        for index, holders in enumerate(_holders(report.peers, len(report.stages)))
    ]
    # Each sample passes each stage. The median hardly depends on one stage that repeats samples, or has a silent peer.
    rates = [stage.rate for stage in stages if stage.rate is not None]
    return Overview(
        kind="run",
        name=printable(report.run_id),
        at_s=now_s,
        step=report.step,
        rate=statistics.median(rates) if rates else None,
        gb_per_hour=sum(peer.sent_gb_per_hour for peer in report.peers),
        num_peers=len(report.peers),
        num_silent=sum(peer.problem is not None for peer in report.peers),
        coordinator=next((peer.peer_id for peer in report.peers if peer.coordinator and not peer.problem), None),
        trainers_stage=report.trainers_stage,
        stages=tuple(stages),
        peers=report.peers,
        join=(f"lightning-swarm join {address} {invite}train.py",),
    )


def overview_of_model(report: ModelReport, address: str, now_s: float) -> Overview:
    """Convert a served model's report."""
    stages = [_stage(holders) for holders in _holders(report.servers, len(report.stage_bytes))]
    return Overview(
        kind="model",
        name=f"{report.kind} {report.model[:12]}, {report.weights}",
        at_s=now_s,
        rate=report.tokens_per_s,
        texts=max(stage.load for stage in stages),  # a text has a session at a server of each stage
        num_peers=len(report.servers),
        stages=tuple(stages),
        peers=report.servers,
        join=(
            f"lightning-swarm serve --listen 0.0.0.0:31337 --join {address}",
            f'lightning-swarm generate {address} --prompt "Once upon a time"',
        ),
    )


def _holders(peers: tuple[Observed, ...], num_stages: int) -> list[list[Observed]]:
    """Return the answering peers of each stage."""
    found = defaultdict[int, list[Observed]](list)
    for peer in peers:
        for stage in peer.stages if problem_of(peer) is None else ():
            found[stage].append(peer)
    return [found[stage] for stage in range(num_stages)]


def _stage(peers: list[Observed], *, is_portable: bool = False, is_measured: bool = True) -> StageOverview:
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
