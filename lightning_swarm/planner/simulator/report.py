"""What became of simulated swarms: a table, and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.planner.simulator.fluid import Span, share_of_best
from lightning_swarm.protocol.settings import Rebalancing

_HOUR_S: Final = 3600.0
_POINTS: Final = 400
"""Of a curve: each is an average."""

_HEAD: Final = ("rule", "samples/s", "% of best", "first hour", "last hour", "moves/hour", "hours below half of best")
_HEAD_OF_MICROBATCHES: Final = ("queued", "MB a sample")
_OF_MICROBATCHES: Final = MappingProxyType({"queued": "jobs that wait\nat a peer", "sent_mb_per_s": "MB/s sent"})
"""Curves, and what they are called."""


def table(found: Mapping[Rebalancing, Sequence[Sequence[Span]]]) -> str:
    """Means over the seeds.

    Args:
        found: By rule, of each seed the spans.
    """
    rows: list[tuple[str, ...]] = [_HEAD, *((rule, *_cells(runs)) for rule, runs in found.items())]
    if all(span.sent_bytes is not None for runs in found.values() for spans in runs for span in spans):
        more = [_HEAD_OF_MICROBATCHES, *map(_cells_of_microbatches, found.values())]
        rows = [row + cells for row, cells in zip(rows, more, strict=True)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _cells_of_microbatches(runs: Sequence[Sequence[Span]]) -> tuple[str, ...]:
    spans = [span for spans in runs for span in spans]
    num_samples = sum((span.end_s - span.begin_s) * span.samples_per_s for span in spans)
    queued = statistics.fmean(span.queued or 0.0 for span in spans)
    return f"{queued:.1f}", f"{sum(span.sent_bytes or 0 for span in spans) / num_samples / 1e6:.3g}"


def _cells(runs: Sequence[Sequence[Span]]) -> list[str]:
    def mean(values: list[float], digits: int) -> str:
        known = [value for value in values if not math.isnan(value)]
        return f"{statistics.fmean(known):.{digits}f}" if known else "-"

    ends = [(spans[0].begin_s, spans[-1].end_s) for spans in runs]
    lengths_s = [end_s - begin_s for begin_s, end_s in ends]
    done = [sum((span.end_s - span.begin_s) * span.samples_per_s for span in spans) for spans in runs]
    low = [
        sum(span.end_s - span.begin_s for span in spans if span.samples_per_s < 0.5 * span.best) / _HOUR_S
        for spans in runs
    ]
    both = list(zip(runs, ends, strict=True))
    return [
        mean([samples / length_s for samples, length_s in zip(done, lengths_s, strict=True)], 2),
        mean([100.0 * share_of_best(spans) for spans in runs], 1),
        mean([100.0 * share_of_best(spans, begin_s, begin_s + _HOUR_S) for spans, (begin_s, _) in both], 1),
        mean([100.0 * share_of_best(spans, end_s - _HOUR_S, end_s) for spans, (_, end_s) in both], 1),
        mean(
            [_HOUR_S * sum(span.num_moves for span in spans) / (end_s - begin_s) for spans, (begin_s, end_s) in both], 1
        ),
        mean(low, 2),
    ]


def draw(found: Mapping[Rebalancing, Sequence[Sequence[Span]]], path: Path) -> None:
    """Samples/s beside the best, how many peers serve a stage, and moves, over the hours of the first seed.

    Where microbatches were simulated, how many wait at a peer, and what all send, too.

    Raises:
        ConfigError: Matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib as mpl  # an extra

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ConfigError(
            "A picture needs matplotlib, which is not installed. Install it: pip install 'lightning-swarm[demo]'"
        ) from error
    drawn = [curves(runs[0]) for runs in found.values()]
    more = [name for name in _OF_MICROBATCHES if all(name in lines for _, lines in drawn)]
    size = (6 * len(found), 7 + 2 * len(more))
    figure, panels = plt.subplots(3 + len(more), len(found), figsize=size, sharex=True, sharey="row", squeeze=False)
    for rule, (hours, lines), (rate, peers, moves, *others) in zip(found, drawn, panels.T, strict=True):
        rate.set_title(f"rule: {rule}")
        rate.plot(hours, lines["best"], color="tab:gray", label="best assignment")
        rate.plot(hours, lines["samples_per_s"], color="tab:blue", label="swarm")
        peers.fill_between(hours, lines["fewest"], lines["most"], step="mid", color="tab:blue", alpha=0.4)
        moves.plot(hours, lines["moves"], color="tab:blue")
        for axes, name in zip(others, more, strict=True):
            axes.plot(hours, lines[name], color="tab:blue")
        panels[-1, 0].set_xlabel("hours")
    labels = ["samples/s", "peers a stage,\nfewest to most", "moves so far", *map(_OF_MICROBATCHES.__getitem__, more)]
    for axes, label in zip(panels[:, 0], labels, strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0.0)
    panels[0, 0].legend(loc="lower left")
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"A picture is written to a file such as out.png, got {path}: {error}. Name another."
        ) from error
    finally:
        plt.close(figure)


def curves(spans: Sequence[Span]) -> tuple[list[float], dict[str, list[float]]]:
    """Averages over equal parts of the time, and moves up to each part's end."""
    begin_s, part_s = spans[0].begin_s, (spans[-1].end_s - spans[0].begin_s) / _POINTS
    names = ["best", "samples_per_s", "fewest", "most"]
    if spans[0].sent_bytes is not None:
        names += _OF_MICROBATCHES
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
    return [(part + 0.5) * part_s / _HOUR_S for part in range(_POINTS)], {**sums, "moves": so_far}
