"""Chooses the stages of a served model that a new server takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
