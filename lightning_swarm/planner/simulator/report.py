"""Results of simulated swarms as a table and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lightning_swarm.planner.report import HOUR_S, new_figure, save_figure, table_lines
from lightning_swarm.planner.simulator.fluid import Span, share_of_best
from lightning_swarm.protocol.settings import Rebalancing

_POINTS: Final = 400
"""Points of a curve, each an average."""

_HEAD: Final = ("rule", "samples/s", "% of best", "first hour", "last hour", "moves/hour", "hours below half of best")
_MICROBATCH_HEAD: Final = ("queued", "MB a sample")
_MICROBATCH_CURVES: Final = MappingProxyType({"queued": "jobs that wait\nat a peer", "sent_mb_per_s": "MB/s sent"})
"""Fields of a span, and their labels."""


def table(results: Mapping[Rebalancing, Sequence[Sequence[Span]]]) -> str:
    """Write a table of means over the seeds, from the spans of each rule and seed."""
    rows: list[tuple[str, ...]] = [_HEAD, *((rule, *_cells(runs)) for rule, runs in results.items())]
    if all(span.sent_bytes is not None for runs in results.values() for spans in runs for span in spans):
        more = [_MICROBATCH_HEAD, *map(_microbatch_cells, results.values())]
        rows = [row + cells for row, cells in zip(rows, more, strict=True)]
    return "\n".join(table_lines(rows, numbers=True))


def _microbatch_cells(runs: Sequence[Sequence[Span]]) -> tuple[str, ...]:
    spans = [span for spans in runs for span in spans]
    queued = statistics.fmean(span.queued or 0.0 for span in spans)
    return f"{queued:.1f}", f"{sum(span.sent_bytes or 0 for span in spans) / _num_samples(spans) / 1e6:.3g}"


def _cells(runs: Sequence[Sequence[Span]]) -> list[str]:
    def mean(digits: int, value_of: Callable[[Sequence[Span]], float]) -> str:
        known = [value for value in map(value_of, runs) if not math.isnan(value)]
        return f"{statistics.fmean(known):.{digits}f}" if known else "-"

    def low_hours(spans: Sequence[Span]) -> float:
        return sum(span.length_s for span in spans if span.samples_per_s < 0.5 * span.best) / HOUR_S

    return [
        mean(2, lambda spans: _num_samples(spans) / _length_s(spans)),
        mean(1, lambda spans: 100.0 * share_of_best(spans)),
        mean(1, lambda spans: 100.0 * share_of_best(spans, spans[0].begin_s, spans[0].begin_s + HOUR_S)),
        mean(1, lambda spans: 100.0 * share_of_best(spans, spans[-1].end_s - HOUR_S, spans[-1].end_s)),
        mean(1, lambda spans: HOUR_S * sum(span.num_moves for span in spans) / _length_s(spans)),
        mean(2, low_hours),
    ]


def _num_samples(spans: Sequence[Span]) -> float:
    return sum(span.length_s * span.samples_per_s for span in spans)


def _length_s(spans: Sequence[Span]) -> float:
    return spans[-1].end_s - spans[0].begin_s


def draw(results: Mapping[Rebalancing, Sequence[Sequence[Span]]], path: Path) -> None:
    """Draw samples/s beside the best, peers per stage, and moves, over the hours of the first seed.

    Where microbatches were simulated, draw also how many wait at a peer, and what all peers send.
    """
    drawn = [curves(runs[0]) for runs in results.values()]
    more = [name for name in _MICROBATCH_CURVES if all(name in lines for _, lines in drawn)]
    figure = new_figure((6 * len(results), 7 + 2 * len(more)))
    panels = figure.subplots(3 + len(more), len(results), sharex=True, sharey="row", squeeze=False)
    for rule, (hours, lines), (rate, peers, moves, *others) in zip(results, drawn, panels.T, strict=True):
        rate.set_title(f"rule: {rule}")
        rate.plot(hours, lines["best"], color="tab:gray", label="best assignment")
        rate.plot(hours, lines["samples_per_s"], color="tab:blue", label="swarm")
        peers.fill_between(hours, lines["fewest"], lines["most"], step="mid", color="tab:blue", alpha=0.4)
        moves.plot(hours, lines["moves"], color="tab:blue")
        for axes, name in zip(others, more, strict=True):
            axes.plot(hours, lines[name], color="tab:blue")
        panels[-1, 0].set_xlabel("hours")
    labels = ["samples/s", "peers a stage,\nfewest to most", "moves so far", *map(_MICROBATCH_CURVES.__getitem__, more)]
    for axes, label in zip(panels[:, 0], labels, strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0.0)
    panels[0, 0].legend(loc="lower left")
    save_figure(figure, path, bbox_inches="tight")


def curves(spans: Sequence[Span]) -> tuple[list[float], dict[str, list[float]]]:
    """Average spans over equal parts of the time, and count the moves up to the end of each part."""
    begin_s, part_s = spans[0].begin_s, (spans[-1].end_s - spans[0].begin_s) / _POINTS
    names = ["best", "samples_per_s", "fewest", "most"]
    if spans[0].sent_bytes is not None:
        names += _MICROBATCH_CURVES
    sums = {name: [0.0] * _POINTS for name in names}
    moves = [0.0] * _POINTS
    for span in spans:
        first = min(int((span.begin_s - begin_s) / part_s), _POINTS - 1)
        last = min(int((span.end_s - begin_s) / part_s), _POINTS - 1)
        moves[first] += span.num_moves
        for part in range(first, last + 1):
            from_s, to_s = begin_s + part * part_s, begin_s + (part + 1) * part_s
            share = max(0.0, min(span.end_s, to_s) - max(span.begin_s, from_s)) / part_s
            for name, values in sums.items():
                values[part] += share * getattr(span, name)
    so_far = [sum(moves[: part + 1]) for part in range(_POINTS)]
    return [(part + 0.5) * part_s / HOUR_S for part in range(_POINTS)], {**sums, "moves": so_far}
