"""Chooses the stages of a served model for a server that is new or should move. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.readable import size_text


def choose_span(sizes: Sequence[int], capacity: int | None, rates: Sequence[float]) -> range:
    """Return consecutive stages that fit into a server, where the model is served worst.

    Args:
        sizes: Bytes of each stage's weights.
        capacity: Bytes that the server has for weights; None: no limit.
        rates: How well other servers serve each stage, for instance the sum of their rates.

    Raises:
        ConfigError: No stage fits.
    """
    fitting = [_longest_from(first, sizes, capacity) for first in range(len(sizes))]
    if not any(fitting):
        assert capacity is not None
        raise ConfigError(
            f"a server must have room for one stage at least, got {size_text(capacity)} for weights. The smallest of "
            f"{len(sizes)} stages has {size_text(min(sizes))}: {size_text(min(sizes) - capacity)} are missing. Give it "
            "more by `--memory`; or, where the model is first served, cut it into more stages by `--stages`, or "
            "quantise it by `--quantize nf4`."
        )

    def served(span: range) -> list[float]:
        found = sorted(rates[stage] for stage in span)
        return found + [math.inf] * (len(sizes) - len(found))  # of equal spans, the longest is least, then the first

    return min(filter(None, fitting), key=served)


def _longest_from(first: int, sizes: Sequence[int], capacity: int | None) -> range:
    """Return as many stages from `first` on as fit; empty if none fits."""
    end, used = first, 0
    while end < len(sizes) and (capacity is None or used + sizes[end] <= capacity):
        used += sizes[end]
        end += 1
    return range(first, end)


# ---------------------------------------------------------------------- moves


@dataclass(frozen=True, kw_only=True)
class MovePolicy:
    """When a server moves to other stages.

    Args:
        look_s: Mean seconds between two checks.
        gain: Minimum factor by which the rate of the worst served stage must rise, among stages whose rate changes.
        times_away: A server avoids stages that it left for this many times the duration of the move.
    """

    look_s: float = 60.0
    gain: float = 1.3
    times_away: float = 10.0


@dataclass(frozen=True)
class Placed:
    """A server that takes sessions, and the stages that it serves."""

    stages: range
    rate: float  # tokens/s if it served a single stage, or any number in proportion


def stage_rates(num_stages: int, servers: Iterable[Placed]) -> list[float]:
    """Return each stage's rate, if a server divides its own rate among its stages."""
    rates = [0.0] * num_stages
    for server in servers:
        for stage in server.stages:
            rates[stage] += server.rate / len(server.stages)
    return rates


def choose_move(
    sizes: Sequence[int],
    capacity: int | None,
    here: Placed,
    others: Collection[Placed],
    *,
    avoided: Collection[range] = (),
    gain: float,
) -> range | None:
    """Return better stages for a server than its own, or None if it should stay.

    Args:
        sizes: Bytes of each stage's weights.
        capacity: Bytes that the server has for weights; None: no limit.
        here: The server itself.
        others: All other servers that accept sessions.
        avoided: Stages to which it must not move.
        gain: As in `MovePolicy`.
    """
    rates = stage_rates(len(sizes), others)
    if not all(rates[stage] for stage in here.stages):
        return None  # one of the stages has no other server

    def served(span: range) -> list[float]:
        own = here.rate / len(span)
        return sorted(rate + own * (stage in span) for stage, rate in enumerate(rates))

    spans = [_longest_from(first, sizes, capacity) for first in range(len(sizes))]
    # Spans that no other span contains.
    widest = [span for before, span in pairwise([range(0), *spans]) if span and span.stop > before.stop]
    best = max((span for span in widest if span not in avoided), key=served, default=here.stages)
    changes = [(old, new) for old, new in zip(served(here.stages), served(best), strict=True) if old != new]
    return best if changes and changes[0][1] >= gain * changes[0][0] and changes[0][1] > changes[0][0] else None
