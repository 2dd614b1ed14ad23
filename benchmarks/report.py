"""What a benchmark leaves behind: a table, and a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

OUT = Path("runs/bench")
"""Pictures and tables."""


def median(values: Sequence[float]) -> float:
    """NaN where there is none: what was to be compared failed each time."""
    return statistics.median(values or [math.nan])


def table(title: str, rows: Sequence[Sequence[object]]) -> str:
    """Rows in columns, the first row as a head."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def write(name: str, text: str) -> None:
    """Print a table, and keep it."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.txt").write_text(text + "\n")
    print(text, flush=True)


def picture(name: str, title: str, unit: str, found: Mapping[str, Sequence[float]]) -> None:
    """Keep a picture: for each way a bar, the median, and a dot for each value.

    Args:
        name: Of the file.
        title: Over it.
        unit: Of the values.
        found: The values by way; those that begin with ``"swarm"`` stand out; those without any are left out.
    """
    import matplotlib as mpl  # benchmarks without pictures run where it is not installed
    from matplotlib import pyplot as plt

    found = {way: values for way, values in found.items() if values}
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.45 * len(found)))
    for place, (way, values) in enumerate(found.items()):
        axes.barh(place, median(values), color="tab:blue" if way.startswith("swarm") else "tab:gray")
        axes.plot(values, [place] * len(values), ".", color="black", markersize=3)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)
    axes.set_xlim(left=0.0)
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / f"{name}.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
