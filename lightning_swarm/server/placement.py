"""Chooses the stages of a served model that a server takes: a new one, and one that had better move. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_swarm.core.errors import ConfigError


def choose_span(sizes: Sequence[int], capacity: int | None, rates: Sequence[float]) -> range:
    """Return a run of stages that fits, where the model is served worst.

    Args:
        sizes: Bytes of each stage's weights.
        capacity: Bytes that the server has for them; None: as many as there are.
        rates: How well each stage is served by others, as by the sum of its servers' rates.

    Raises:
        ConfigError: No stage fits.
    """
    fitting = [_longest_from(first, sizes, capacity) for first in range(len(sizes))]
    if not any(fitting):
        raise ConfigError(
            f"a server must have room for one stage at least, got {capacity} bytes for weights, and the smallest stage "
            f"has {min(sizes)}. Give it more by `--memory`, or cut the model into more stages where it is first served."
        )

    def served(span: range) -> list[float]:
        found = sorted(rates[stage] for stage in span)
        return found + [math.inf] * (len(sizes) - len(found))  # of those that are alike, the longest, then the first

    return min(filter(None, fitting), key=served)


def _longest_from(first: int, sizes: Sequence[int], capacity: int | None) -> range:
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
        look_s: Seconds between two looks, on average.
        gain: The worst served stage whose rate changes must be served so many times as fast after the move.
        times_away: A server does not return to stages that it left for so many times as long as the move took.
    """

    look_s: float = 60.0
    gain: float = 1.3
    times_away: float = 10.0


@dataclass(frozen=True)
class Placed:
    """A server that takes sessions, and the stages that it serves."""

    stages: range
    rate: float  # tokens/s at one stage, were it the only one; or any numbers of such proportions


def stage_rates(num_stages: int, servers: Iterable[Placed]) -> list[float]:
    """Return how fast each stage is served: a server divides its rate among its stages."""
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
    """Return stages that a server had better serve than its own. None: it stays.

    Args:
        sizes: Bytes of each stage's weights.
        capacity: Bytes that the server has for them; None: as many as there are.
        here: The server itself.
        others: All others that take sessions.
        avoided: Where it does not go.
        gain: As in `MovePolicy`.
    """
    rates = stage_rates(len(sizes), others)
    if not all(rates[stage] for stage in here.stages):
        return None  # nobody else has one of them

    def served(span: range) -> list[float]:
        own = here.rate / len(span)
        return sorted(rate + own * (stage in span) for stage, rate in enumerate(rates))

    spans = [_longest_from(first, sizes, capacity) for first in range(len(sizes))]
    widest = [span for before, span in pairwise([range(0), *spans]) if span and span.stop > before.stop]  # in no other
    best = max((span for span in widest if span not in avoided), key=served, default=here.stages)
    changes = [(old, new) for old, new in zip(served(here.stages), served(best), strict=True) if old != new]
    return best if changes and changes[0][1] >= gain * changes[0][0] and changes[0][1] > changes[0][0] else None
