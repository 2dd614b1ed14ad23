"""Peers that move, against peers that stay and against the paper's rule: simulated, on real preemption traces.

Each figure is a share of what the best assignment of the peers alive would do at each moment.
Source: SWARM, arXiv:2301.11913, section 4.3 and appendix D.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.report import picture, table, write
from benchmarks.spot import TRACES, times
from lightning_swarm.simulator.fluid import Rule, Scenario, share_of_best, simulate

HOUR_S = 3600.0
SIZES = {4: 1, 8: 1, 16: 1, 32: 6}
"""Stages, and for how many peers an instance of the trace stands."""
RULES: dict[str, tuple[Rule, float]] = {
    "none": ("none", 300.0),
    "paper, 300 s": ("paper", 300.0),
    "paper, 60 s": ("paper", 60.0),
    "swarm, 300 s": ("gain", 300.0),
    "swarm, 60 s": ("gain", 60.0),
}


def shares(trace: str, num_stages: int, name: str, seed: int, join_s: float) -> tuple[float, float, float]:
    """Percent of the optimum: of the whole run, its first hour, its last hour."""
    rule, interval_s = RULES[name]
    changes = times(TRACES[trace](seed), SIZES[num_stages])
    begin_s, end_s = changes[0].at_s, changes[-1].at_s
    spans = simulate(Scenario(num_stages, changes, end_s, rule=rule, interval_s=interval_s, join_s=join_s))
    parts = [(begin_s, end_s), (begin_s, begin_s + HOUR_S), (end_s - HOUR_S, end_s)]
    whole, first, last = (100.0 * share_of_best(spans, *part) for part in parts)
    return whole, first, last


def main() -> None:
    """Simulate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--join-s", type=float, default=0.0, help="for how long a newcomer computes nothing")
    arguments = parser.parse_args()
    rows: list[list[object]] = [["trace", "stages", *RULES]]
    drawn: dict[str, list[float]] = {}
    for trace in TRACES:
        for num_stages in SIZES:
            row: list[object] = [trace, num_stages]
            for name in RULES:
                found = [shares(trace, num_stages, name, seed, arguments.join_s) for seed in range(arguments.seeds)]
                row.append(" / ".join(f"{statistics.mean(part):.1f}" for part in zip(*found, strict=True)))
                drawn[f"{name}: {trace}, {num_stages} stages"] = [whole for whole, _, _ in found]
            rows.append(row)
    title = "Percent of the best assignment's rate: whole run / first hour / last hour"
    write("rebalancing", table(title, rows))
    picture("rebalancing", "Simulated on preemption traces", "% of the best assignment", drawn)


if __name__ == "__main__":
    main()
