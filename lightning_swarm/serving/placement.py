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
            f"a server needs memory for at least one stage, got {size_text(capacity)} for weights. The smallest of "
            f"{len(sizes)} stages has {size_text(min(sizes))}: {size_text(min(sizes) - capacity)} are missing. Give it "
            "more by `--memory`, or on the model's first server, cut it into more stages by `--stages`, or "
            "quantise it by `--quantize nf4`."
        )

    def sorted_rates(span: range) -> list[float]:
        lowest_first = sorted(rates[stage] for stage in span)
        # Padded with infinity, so that of spans with equal lowest rates, the longest span is chosen.
        return lowest_first + [math.inf] * (len(sizes) - len(lowest_first))

    return min(filter(None, fitting), key=sorted_rates)


def _longest_from(first: int, sizes: Sequence[int], capacity: int | None) -> range:
    """Return the stages from `first` on that fit together; empty if `first` does not fit."""
    end, used = first, 0
    while end < len(sizes) and (capacity is None or used + sizes[end] <= capacity):
        used += sizes[end]
        end += 1
    return range(first, end)


# ---------------------------------------------------------------------- moves


@dataclass(frozen=True, kw_only=True)
class MovePolicy:
    """Conditions under which a server moves to other stages.

    Args:
        look_s: Mean seconds between two checks.
        gain: Minimum factor by which the lowest stage rate that changes must rise.
        times_away: A server avoids stages that it left for this many times the duration of the move.
    """

    look_s: float = 60.0
    gain: float = 1.3
    times_away: float = 10.0


@dataclass(frozen=True)
class Placed:
    """A server that takes sessions, and the stages that it serves."""

    stages: range
    rate: float  # tokens/s if it served a single stage, or any proportional number


def stage_rates(num_stages: int, servers: Iterable[Placed]) -> list[float]:
    """Return the sum of the servers' rates at each stage; a server divides its rate equally among its stages."""
    rates = [0.0] * num_stages
    for server in servers:
        for stage in server.stages:
            rates[stage] += server.rate / len(server.stages)
    return rates


def choose_move(
    sizes: Sequence[int],
    capacity: int | None,
    server: Placed,
    others: Collection[Placed],
    *,
    avoided: Collection[range] = (),
    gain: float,
) -> range | None:
    """Return better stages for a server than its own, or None if it should stay.

    Args:
        sizes: Bytes of each stage's weights.
        capacity: Bytes that the server has for weights; None: no limit.
        server: The server.
        others: All other servers that accept sessions.
        avoided: Stages to which it must not move.
        gain: As in `MovePolicy`.
    """
    rates = stage_rates(len(sizes), others)
    if not all(rates[stage] for stage in server.stages):
        return None  # no other server has one of its stages

    def rates_with(span: range) -> list[float]:
        """Return the rates of all stages, lowest first, if the server serves `span`."""
        own_rate = server.rate / len(span)
        return sorted(rate + own_rate * (stage in span) for stage, rate in enumerate(rates))

    spans = [_longest_from(first, sizes, capacity) for first in range(len(sizes))]
    # Spans that no other span contains.
    widest = [span for previous, span in pairwise([range(0), *spans]) if span and span.stop > previous.stop]
    best = max((span for span in widest if span not in avoided), key=rates_with, default=server.stages)
    changes = zip(rates_with(server.stages), rates_with(best), strict=True)
    old, new = next(((old, new) for old, new in changes if old != new), (0.0, 0.0))
    return best if new >= gain * old and new > old else None
