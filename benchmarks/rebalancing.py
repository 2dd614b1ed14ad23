"""Peers that move, against peers that stay and against the paper's rule: simulated, on preemption traces.

Each figure is a share of what the best assignment of the peers alive would do at each moment. `spot.py` has the traces.
Source: SWARM, arXiv:2301.11913, section 4.3 and appendix D.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.report import OUT, table, write
from benchmarks.spot import TRACES, times
from lightning_swarm.planner.simulator.fluid import Change, Scenario, share_of_best, simulate
from lightning_swarm.protocol.settings import RebalancingRule

HOUR_S: Final = 3600.0
MOVE_S: Final = 30.0
REAL: Final = ("g4dn", "a100")
SIZES: Final = {4: 1, 8: 1, 16: 1, 32: 6}
"""Stages, and for how many peers an instance of the trace stands; the last one of real traces only."""
RULES: Final[Mapping[str, tuple[RebalancingRule, float]]] = {
    "none": ("none", 300.0),
    "paper, 300 s": ("paper", 300.0),
    "paper, 60 s": ("paper", 60.0),
    "swarm, 300 s": ("gain", 300.0),
    "swarm, 60 s": ("gain", 60.0),
}
PAIRS: Final = (("swarm, 300 s", "paper, 300 s"), ("swarm, 60 s", "paper, 60 s"))


class Shares(NamedTuple):
    """Percent of the optimum; NaN where too few peers were alive for any."""

    whole: float
    first_hour: float
    last_hour: float

    def __str__(self) -> str:
        return " / ".join("-" if math.isnan(part) else f"{part:.1f}" for part in self)


Found: TypeAlias = dict[tuple[str, int], dict[str, Shares]]
"""Means over the seeds, by trace and number of stages, by rule."""


def shares(changes: Sequence[Change], num_stages: int, name: str, seed: int, join_s: float) -> Shares:
    """Of one run."""
    rule, interval_s = RULES[name]
    # g4dn's times are whole minutes: were looks, too, who looks every minute would see each loss at once.
    offset_s = random.Random(seed).uniform(0.0, interval_s)
    begin_s, end_s = changes[0].at_s, changes[-1].at_s
    spans = simulate(
        Scenario(num_stages, changes, end_s, rule, interval_s, offset_s=offset_s, move_s=MOVE_S, join_s=join_s)
    )
    parts = [(begin_s, end_s), (begin_s, begin_s + HOUR_S), (end_s - HOUR_S, end_s)]
    return Shares(*(100.0 * share_of_best(spans, *part) for part in parts))


def ablation(num_seeds: int, join_s: float) -> Found:
    """All traces and sizes."""
    found: Found = {}
    for trace, made in TRACES.items():
        for num_stages, number in SIZES.items():
            if number > 1 and trace not in REAL:
                continue
            runs: dict[str, list[Shares]] = {name: [] for name in RULES}
            for seed in range(num_seeds):
                changes = times(made(seed), number)
                for name, so_far in runs.items():
                    so_far.append(shares(changes, num_stages, name, seed, join_s))
            found[trace, num_stages] = {name: _mean(of_rule) for name, of_rule in runs.items()}
    return found


def _mean(found: Sequence[Shares]) -> Shares:
    return Shares(*(statistics.fmean(part) for part in zip(*found, strict=True)))


def report(found: Found, title: str) -> str:
    """A table, in how many of its cells the swarm's rule is ahead of the paper's, and its means."""
    rows: list[list[object]] = [["trace", "stages", *RULES]]
    rows += [[*key, *by_rule.values()] for key, by_rule in found.items()]
    lines = [table(f"{title}: whole run / first hour / last hour", rows)]
    cells = [
        (trace, num_stages, ours, part, own, others)
        for (trace, num_stages), by_rule in found.items()
        for ours, paper in PAIRS
        for part, own, others in zip(Shares._fields, by_rule[ours], by_rule[paper], strict=True)
        if not math.isnan(own)
    ]
    same = sum(ours == paper for *_, ours, paper in cells)
    behind = [
        f"{trace}, {size} stages, {name}, {part}" for trace, size, name, part, ours, paper in cells if ours < paper
    ]
    lines.append(
        f"of {len(cells)} cells ahead of the paper's rule in {len(cells) - same - len(behind)}, equal in {same}"
    )
    lines += [f"behind: {cell}" for cell in behind]
    for trace in TRACES:
        sizes = [size for size, number in SIZES.items() if number == 1]
        mean = statistics.fmean(found[trace, size]["swarm, 300 s"].whole for size in sizes)
        lines.append(f"{trace}: {mean:.2f} on average over {', '.join(map(str, sizes))} stages")
    return "\n".join(lines)


def draw(found: Found) -> None:
    """Keep a picture: a panel for each trace, bars of the whole run by number of stages."""
    mpl.use("Agg")
    figure, panels = plt.subplots(1, len(TRACES), figsize=(3 * len(TRACES), 3), sharey=True)
    colours = ["lightgray", "darkgray", "dimgray", "lightblue", "tab:blue"]
    for axes, trace in zip(panels, TRACES, strict=True):
        for place, (name, colour) in enumerate(zip(RULES, colours, strict=True)):
            heights = [100.0 - by_rule[name].whole for (of, _), by_rule in found.items() if of == trace]
            axes.bar([at + (place - 2) * 0.16 for at in range(len(heights))], heights, 0.16, color=colour, label=name)
        axes.set_xticks(range(len(heights)), [str(size) for of, size in found if of == trace])
        axes.set(xlabel="stages", title=trace, yscale="log", yticks=[0.1, 1.0, 10.0], yticklabels=["0.1", "1", "10"])
    panels[0].set_ylabel("% less than the best assignment")
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / "rebalancing.png", dpi=120, bbox_inches="tight")
    plt.close(figure)


def main(words: Sequence[str] | None = None) -> None:
    """Simulate, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args(words)
    titles = {0.0: "Who comes serves at once", MOVE_S: f"Who comes downloads for {MOVE_S:g} s, too"}
    texts = []
    for join_s, title in titles.items():
        found = ablation(arguments.seeds, join_s)
        texts.append(report(found, f"Percent of the best assignment's rate. {title}"))
        if not join_s:
            draw(found)
    write("rebalancing", "\n\n".join(texts))


if __name__ == "__main__":
    main()
