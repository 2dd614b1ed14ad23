"""Samples/s of each way, by link."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.report import OUT


def draw(name: str, found: Mapping[str, Mapping[tuple[float, float], Mapping[str, float]]]) -> None:
    """Keep a picture: for each kind of peers and each bandwidth a plot over the round trips.

    Args:
        name: Of the file.
        found: By kind of peers, by Mb/s and round trip in seconds, by way: samples/s.
    """
    mpl.use("Agg")
    mbits = sorted({mbit for links in found.values() for mbit, _ in links})
    figure, grid = plt.subplots(
        len(found), len(mbits), figsize=(3.2 * len(mbits), 2.8 * len(found)), sharey=True, squeeze=False
    )
    for row, (peers, links) in zip(grid, found.items(), strict=True):
        for axes, mbit in zip(row, mbits, strict=True):
            trips_s = sorted(trip for one, trip in links if one == mbit)
            for way in links[mbit, trips_s[0]]:
                width = 2.5 if way == "swarm" else 1.2
                rates = [links[mbit, trip][way] for trip in trips_s]
                axes.plot([1e3 * trip for trip in trips_s], rates, "o-", linewidth=width, markersize=3, label=way)
            axes.set(title=f"{peers} peers, {mbit:g} Mb/s", xlabel="round trip, ms")
        row[0].set_ylabel("samples/s")
    grid[0][0].set_ylim(bottom=0.0)  # of all
    grid[0][-1].legend(fontsize=7)
    figure.tight_layout()
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / f"{name}.png", dpi=120)
    plt.close(figure)
