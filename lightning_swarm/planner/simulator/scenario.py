"""Reads a scenario's file: the peers of a simulated swarm, and their changes over time."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias, get_args

import msgspec
import yaml

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.network.simulated_link import Direction, SimulatedLink
from lightning_swarm.planner.report import HOUR_S
from lightning_swarm.planner.simulator.fluid import Change, Scenario
from lightning_swarm.planner.simulator.microbatches import Work
from lightning_swarm.protocol.settings import RebalancingRule

_MAX_NUMBER: Final = 1e12  # upper limit of every number

_Range: TypeAlias = float | tuple[float, float]  # a number, or the slowest and the fastest
_MB: Final = 1e6


class Peers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peers that join and leave at random."""

    number: int  # initial number; another peer takes the place of a peer that leaves
    samples_per_s: _Range = 1.0  # rate of each peer; or the slowest and the fastest, with log-uniform rates between
    stay_hours: float = 0.0  # mean stay of a peer; 0: until the end
    back_minutes: float = 10.0  # mean time until the place of a peer that left is taken


class Microbatches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The work and traffic of peers whose microbatches are simulated one by one."""

    per_step: int
    size: int = 1  # samples per microbatch
    boundary_mb: float = 0.004  # per sample, sent from a stage to the next
    stage_mb: float = 0.004  # size of a stage's weights; its optimizer's state is twice as large
    mbit: _Range = 0.0  # Mb/s of each peer's link, each way; 0: no limit; or a range as in `samples_per_s`
    latency_ms: float = 0.0  # latency of each peer's link


class ScenarioFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a scenario's file, which has either `peers` or a `trace`."""

    stages: int
    peers: Peers | None = None
    # A file beside the scenario with lines `seconds,peer,samples_per_s`, ordered by time. The peer has this rate from
    # this time on; 0: it is gone.
    trace: str | None = None
    hours: float = 0.0  # duration; 0: until the last line of the trace
    rules: tuple[RebalancingRule, ...] = get_args(RebalancingRule)  # simulated one after the other
    interval_s: float = 300.0  # maximum time between two decisions about moves
    move_s: float = 30.0  # a peer that moves computes nothing for this time
    join_s: float = 30.0  # a peer that joins computes nothing for this time
    seeds: int = 3
    # Microbatches are simulated one by one, and a peer that moves or joins downloads its stage, so that `move_s` and
    # `join_s` mean nothing. None: the swarm is simulated as rates.
    microbatches: Microbatches | None = None


class ScenarioRuns:
    """The simulations that a scenario's file describes."""

    def __init__(self, path: Path) -> None:
        self.file = _read(path)
        self._trace = _read_trace(path.parent / self.file.trace) if self.file.trace else []

    def scenarios(self, seed: int) -> Iterator[tuple[RebalancingRule, Scenario]]:
        """Make a scenario for each rule, all with the same peers."""
        plan = self.file
        changes = self._changes(seed)
        end_s = changes[0].at_s + plan.hours * HOUR_S if plan.hours else changes[-1].at_s
        offset_s = random.Random(seed).uniform(0.0, plan.interval_s)
        times = (plan.interval_s, offset_s, plan.move_s, plan.join_s)
        for rule in plan.rules:
            yield rule, Scenario(plan.stages, changes, end_s, rule, *times)

    def work(self, seed: int) -> Work | None:
        """Make the work and the links of the peers; None: peers are simulated as rates."""
        microbatches = self.file.microbatches
        if microbatches is None:
            return None
        rng = random.Random(seed)
        peers = dict.fromkeys(change.peer for change in self._changes(seed))
        lines = {peer: _line(microbatches, rng) for peer in peers}
        sizes = (int(microbatches.boundary_mb * _MB), int(microbatches.stage_mb * _MB))
        return Work(microbatches.per_step, microbatches.size, *sizes, lines)

    def _changes(self, seed: int) -> Sequence[Change]:
        return self._trace or _random_changes(self.file.peers, self.file.hours, seed)


def _line(microbatches: Microbatches, rng: random.Random) -> Callable[[], SimulatedLink]:
    """Draw the rate of a peer's link, and return a function that makes the link."""
    mbit = _draw_between(microbatches.mbit, rng)
    bytes_per_s = mbit * 1e6 / 8 if mbit else math.inf
    return lambda: SimulatedLink(Direction(bytes_per_s), Direction(bytes_per_s), microbatches.latency_ms / 1e3)


def _read(path: Path) -> ScenarioFile:
    try:
        content: Any = yaml.safe_load(path.read_text())
        plan = msgspec.convert(content, ScenarioFile)
    except OSError as error:
        raise ConfigError(
            f"a scenario must be a readable file, got {path}: {error.strerror}. Name another file."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        fields = ", ".join(ScenarioFile.__struct_fields__)
        peer_fields, microbatch_fields = (", ".join(kind.__struct_fields__) for kind in (Peers, Microbatches))
        raise ConfigError(
            f"a scenario must be YAML with the keys {fields}, got {path}: {error}. Correct it; `peers` has the keys "
            f"{peer_fields}, and `microbatches` has {microbatch_fields}."
        ) from error
    _check(plan, path)
    return plan


def _check(plan: ScenarioFile, path: Path) -> None:
    if (plan.peers is None) == (plan.trace is None):
        raise ConfigError(f"{path}: a scenario must have either `peers` or `trace`. Set one of them.")
    if plan.peers is not None and not plan.hours:
        raise ConfigError(f"{path}: `hours` must be above 0 with `peers`, got 0. Set the simulated duration.")
    for name, value, least in _lower_limits(plan):
        if not least <= value <= _MAX_NUMBER:
            rule = f"at most {_MAX_NUMBER:g}" if least <= value < math.inf else f"{least:g} or more"
            raise ConfigError(f"{path}: `{name}` must be {rule}, got {value:g}. Change it in the file.")


def _lower_limits(plan: ScenarioFile) -> list[tuple[str, float, float]]:
    """Return the names, values and lower limits of all numbers."""
    limits: list[tuple[str, float, float]] = [
        ("stages", plan.stages, 1),
        ("seeds", plan.seeds, 1),
        ("rules", len(plan.rules), 1),
        ("interval_s", plan.interval_s, 1.0),
        ("hours", plan.hours, 0.0),
        ("move_s", plan.move_s, 0.0),
        ("join_s", plan.join_s, 0.0),
    ]
    if plan.peers is not None:
        slowest, fastest = _range(plan.peers.samples_per_s)
        limits += [
            ("peers.number", plan.peers.number, plan.stages),
            ("peers.samples_per_s", slowest, 1e-6),
            ("peers.samples_per_s[1]", fastest, slowest),
            ("peers.stay_hours", plan.peers.stay_hours, 0.0),
            ("peers.back_minutes", plan.peers.back_minutes, 0.01),
        ]
    if plan.microbatches is not None:
        slowest, fastest = _range(plan.microbatches.mbit)
        limits += [
            ("microbatches.per_step", plan.microbatches.per_step, 1),
            ("microbatches.size", plan.microbatches.size, 1),
            ("microbatches.boundary_mb", plan.microbatches.boundary_mb, 0.0),
            ("microbatches.stage_mb", plan.microbatches.stage_mb, 0.0),
            ("microbatches.mbit", slowest, 0.0 if slowest == fastest == 0.0 else 1e-3),
            ("microbatches.mbit[1]", fastest, slowest),
            ("microbatches.latency_ms", plan.microbatches.latency_ms, 0.0),
        ]
    return limits


def _range(rate: _Range) -> tuple[float, float]:
    return rate if isinstance(rate, tuple) else (rate, rate)


def _draw_between(rate: _Range, rng: random.Random) -> float:
    """Draw a rate, log-uniformly; 0 if the slowest is 0."""
    slowest, fastest = _range(rate)
    return slowest * (fastest / slowest) ** rng.random() if slowest else 0.0


def _random_changes(peers: Peers | None, hours: float, seed: int) -> list[Change]:
    """Draw arrivals and departures for each peer's place, which a new peer takes at each arrival."""
    assert peers is not None
    rng = random.Random(seed)
    changes: list[Change] = []
    for _ in range(peers.number):
        arrival_s = 0.0
        while arrival_s < hours * HOUR_S:
            peer = PeerId(f"peer-{len(changes)}")
            changes.append(Change(arrival_s, peer, _draw_between(peers.samples_per_s, rng)))
            if not peers.stay_hours:
                break
            departure_s = arrival_s + rng.expovariate(1.0 / (peers.stay_hours * HOUR_S))
            changes.append(Change(departure_s, peer, 0.0))
            arrival_s = departure_s + rng.expovariate(1.0 / (60.0 * peers.back_minutes))
    return sorted(changes, key=lambda change: change.at_s)


def _read_trace(path: Path) -> Sequence[Change]:
    changes: list[Change] = []
    try:
        with path.open() as file:
            for row in csv.reader(file):
                at_s, peer, samples_per_s = row
                changes.append(Change(float(at_s), PeerId(peer.strip()), float(samples_per_s)))
    except OSError as error:
        raise ConfigError(f"a trace must be a readable file, got {path}: {error.strerror}. Name another.") from error
    except ValueError as error:
        raise ConfigError(
            f"{path}, line {len(changes) + 1}: a line must be `seconds,peer,samples_per_s`: {error}. Correct that line."
        ) from error
    before_s = -math.inf
    for number, change in enumerate(changes, start=1):
        if not (before_s <= change.at_s <= _MAX_NUMBER and 0.0 <= change.samples_per_s <= _MAX_NUMBER):
            raise ConfigError(
                f"{path}, line {number}: times must not decrease, and rates must be from 0 to {_MAX_NUMBER:g}, got "
                f"{change.at_s:g} and {change.samples_per_s:g}. Correct that line."
            )
        before_s = change.at_s
    if not changes or changes[0].at_s == changes[-1].at_s:
        raise ConfigError(f"{path}: a trace must have lines of at least two times, got {len(changes)} lines. Add some.")
    return changes
