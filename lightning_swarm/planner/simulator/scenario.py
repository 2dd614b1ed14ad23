"""A scenario as a file: of what a simulated swarm consists, and what happens to it."""

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
from lightning_swarm.planner.simulator.fluid import Change, Scenario
from lightning_swarm.planner.simulator.microbatches import Work
from lightning_swarm.protocol.settings import Rebalancing

_HOUR_S: Final = 3600.0
_MOST: Final = 1e12

_Range: TypeAlias = float | tuple[float, float]
_MB: Final = 1e6
_BITS_PER_MBIT: Final = 1e6


class Peers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Made-up peers, which come and go by chance.

    Args:
        number: At the beginning, and of places that are taken again.
        samples_per_s: Of each; or of the slowest and the fastest, and the others anywhere between, in ratio.
        stay_hours: Each, on the average; 0: for good.
        back_minutes: After a peer has gone another takes its place, on the average.
    """

    number: int
    samples_per_s: _Range = 1.0
    stay_hours: float = 0.0
    back_minutes: float = 10.0


class Microbatches(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What peers compute and send, where that is simulated one by one.

    Args:
        per_step: Of a step.
        size: Samples of each.
        boundary_mb: Of a sample, from a stage to the next.
        stage_mb: Of a stage's weights; its optimizer has twice as many.
        mbit: Of each peer's line, in Mb/s and each way; 0: no limit. Or of the slowest and the fastest, and the others
            anywhere between, in ratio.
        latency_ms: Of each peer's line.
    """

    per_step: int
    size: int = 1
    boundary_mb: float = 0.004
    stage_mb: float = 0.004
    mbit: _Range = 0.0
    latency_ms: float = 0.0


class ScenarioFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a scenario's file says.

    Args:
        stages: Of the pipeline.
        peers: Made-up ones; or
        trace: a file of lines `seconds,peer,samples_per_s`, in order: from then on a peer does so much, 0: it is gone.
            Its place is beside the scenario.
        hours: For how long; of a trace, to its last line by default.
        rules: Who moves, one after the other: `none`, `paper`, `gain`.
        interval_s: Between two looks, at the latest.
        move_s: For how long who moves computes nothing.
        join_s: Likewise for who comes.
        seeds: How often, each time by other chances.
        microbatches: They are simulated one by one, and who moves or comes downloads its stage, so that `move_s` and
            `join_s` mean nothing. None: the swarm is simulated as rates.
    """

    stages: int
    peers: Peers | None = None
    trace: str | None = None
    hours: float = 0.0
    rules: tuple[Rebalancing, ...] = get_args(Rebalancing)
    interval_s: float = 300.0
    move_s: float = 30.0
    join_s: float = 30.0
    seeds: int = 3
    microbatches: Microbatches | None = None


class ScenarioRuns:
    """Those of a scenario's file.

    Args:
        path: Of it.

    Raises:
        ConfigError: It is not there, or says what cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.plan = _read(path)
        self._trace = _read_trace(path.parent / self.plan.trace) if self.plan.trace else []

    def of_seed(self, seed: int) -> Iterator[tuple[Rebalancing, Scenario]]:
        """By each rule, on the same peers."""
        plan = self.plan
        changes = self._changes(seed)
        end_s = changes[0].at_s + plan.hours * _HOUR_S if plan.hours else changes[-1].at_s
        offset_s = random.Random(seed).uniform(0.0, plan.interval_s)
        for rule in plan.rules:
            yield (
                rule,
                Scenario(plan.stages, changes, end_s, rule, plan.interval_s, offset_s, plan.move_s, plan.join_s),
            )

    def work(self, seed: int) -> Work | None:
        """What the peers do. None: they are rates."""
        told = self.plan.microbatches
        if told is None:
            return None
        rng = random.Random(seed)
        lines = {peer: _line(told, rng) for peer in dict.fromkeys(change.peer for change in self._changes(seed))}
        return Work(told.per_step, told.size, int(told.boundary_mb * _MB), int(told.stage_mb * _MB), lines)

    def _changes(self, seed: int) -> Sequence[Change]:
        return self._trace or _made_up(self.plan.peers, self.plan.hours, seed)


def _line(told: Microbatches, rng: random.Random) -> Callable[[], SimulatedLink]:
    mbit = _between(told.mbit, rng)
    bytes_per_s = mbit * _BITS_PER_MBIT / 8 if mbit else math.inf
    return lambda: SimulatedLink(Direction(bytes_per_s), Direction(bytes_per_s), told.latency_ms / 1e3)


def _read(path: Path) -> ScenarioFile:
    try:
        content: Any = yaml.safe_load(path.read_text())
        plan = msgspec.convert(content, ScenarioFile)
    except OSError as error:
        raise ConfigError(
            f"A scenario is a file, and {path} cannot be read: {error.strerror}. Name another."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        fields = ", ".join(ScenarioFile.__struct_fields__)
        of_peers, of_microbatches = (", ".join(kind.__struct_fields__) for kind in (Peers, Microbatches))
        raise ConfigError(
            f"{path} is no scenario: {error}. It is YAML and has {fields}; `peers` has {of_peers}; `microbatches` has "
            f"{of_microbatches}."
        ) from error
    _check(plan, path)
    return plan


def _check(plan: ScenarioFile, path: Path) -> None:
    if (plan.peers is None) == (plan.trace is None):
        raise ConfigError(f"{path}: a scenario has either `peers` or `trace`. Name one of them.")
    if plan.peers is not None and not plan.hours:
        raise ConfigError(f"{path}: `hours` must be more than 0 where `peers` are made up. Say for how long they run.")
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
    for name, value, least in limits:
        if not least <= value <= _MOST:
            rule = f"at most {_MOST:g}" if least <= value < math.inf else f"{least:g} or more"
            raise ConfigError(f"{path}: `{name}` must be {rule}, got {value:g}. Change it in the file.")


def _range(told: _Range) -> tuple[float, float]:
    return told if isinstance(told, tuple) else (told, told)


def _between(told: _Range, rng: random.Random) -> float:
    slowest, fastest = _range(told)
    return slowest * (fastest / slowest) ** rng.random() if slowest else 0.0


def _made_up(peers: Peers | None, hours: float, seed: int) -> list[Change]:
    assert peers is not None
    rng = random.Random(seed)
    changes: list[Change] = []
    for _ in range(peers.number):
        comes_s = 0.0
        while comes_s < hours * _HOUR_S:
            peer = PeerId(f"peer-{len(changes)}")
            changes.append(Change(comes_s, peer, _between(peers.samples_per_s, rng)))
            if not peers.stay_hours:
                break
            goes_s = comes_s + rng.expovariate(1.0 / (peers.stay_hours * _HOUR_S))
            changes.append(Change(goes_s, peer, 0.0))
            comes_s = goes_s + rng.expovariate(1.0 / (60.0 * peers.back_minutes))
    return sorted(changes, key=lambda one: one.at_s)


def _read_trace(path: Path) -> Sequence[Change]:
    changes: list[Change] = []
    try:
        with path.open() as file:
            for row in csv.reader(file):
                at_s, peer, samples_per_s = row
                changes.append(Change(float(at_s), PeerId(peer.strip()), float(samples_per_s)))
    except OSError as error:
        raise ConfigError(f"A trace is a file, and {path} cannot be read: {error.strerror}. Name another.") from error
    except ValueError as error:
        raise ConfigError(
            f"{path}, line {len(changes) + 1}: a trace has lines `seconds,peer,samples_per_s`: {error}. Mend that line."
        ) from error
    before_s = -math.inf
    for number, change in enumerate(changes, start=1):
        if not (before_s <= change.at_s <= _MOST and 0.0 <= change.samples_per_s <= _MOST):
            raise ConfigError(
                f"{path}, line {number}: times must not go back, and rates be from 0 to {_MOST:g}, got "
                f"{change.at_s:g} and {change.samples_per_s:g}. Mend that line."
            )
        before_s = change.at_s
    if not changes or changes[0].at_s == changes[-1].at_s:
        raise ConfigError(f"{path}: a trace has lines of two times at least, got {len(changes)} lines. Add some.")
    return changes
