"""`simulate`: shows what a swarm would do, without one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lightning_swarm.planner import report
from lightning_swarm.planner.simulator import microbatches
from lightning_swarm.planner.simulator.fluid import Span, simulate
from lightning_swarm.planner.simulator.scenario import ScenarioRuns
from lightning_swarm.protocol.settings import Rebalancing

WHAT: Final = "Simulate a swarm whose peers come and go: how fast it would be, by which rule."
DESCRIPTION: Final = """\
{what}
Starts nothing, needs no network. Of 10,000 peers on 100 stages a day takes minutes for each rule and seed.

    lightning-swarm simulate scenario.yaml                          a table
    lightning-swarm simulate scenario.yaml --picture swarm.png      and curves over time

The file says what there is, for example:

    stages: 8              # of the pipeline
    hours: 24
    peers:
      number: 60
      samples_per_s: [1, 10]   # the slowest and the fastest, forward and backward through a stage; or one number
      stay_hours: 4            # each on the average; 0: for good
      back_minutes: 10         # until another takes its place
    rules: [none, paper, gain] # nobody moves; the SWARM paper's rule; what pays
    interval_s: 300        # between two looks, at the latest
    move_s: 30             # for how long who moves computes nothing: download and start
    join_s: 30             # likewise for who comes
    seeds: 3               # how often, each time by other chances

With `microbatches` they are simulated one by one, by the code of real swarms: for hundreds of peers and minutes. Who
moves or comes then downloads its stage, and `move_s` and `join_s` mean nothing.

    microbatches:
      per_step: 256
      size: 1                # samples of each
      boundary_mb: 0.5       # of a sample, from a stage to the next
      stage_mb: 2            # of a stage's weights; its optimizer has twice as many
      mbit: [20, 200]        # of the slowest link and the fastest, each way; or one number; 0: no limit
      latency_ms: 10         # of each link

Instead of `peers`, `trace: file.csv` has what happened, in lines of `seconds,peer,samples_per_s`: from then on a peer
does so much, and 0 is one that is gone. The table's percentages are of what the best assignment of the peers alive at
each moment would do. Numbers are means over the seeds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `simulate`."""
    parser.add_argument("scenario", type=Path, metavar="SCENARIO.yaml", help="what there is, and what happens")
    parser.add_argument("--picture", type=Path, metavar="OUT.png", help="draw throughput, peers per stage and moves")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print, and draw; returns the exit status."""
    found = simulated(ScenarioRuns(arguments.scenario))
    print(report.span_table(found))  # noqa: T201 - a command
    if arguments.picture is not None:
        report.draw_spans(found, arguments.picture)
        print(f"{arguments.picture}: drawn, of the first seed")  # noqa: T201 - a command
    return 0


def simulated(runs: ScenarioRuns) -> dict[Rebalancing, list[Sequence[Span]]]:
    """Simulate all seeds by each rule."""
    found: dict[Rebalancing, list[Sequence[Span]]] = {rule: [] for rule in runs.file.rules}
    for seed in range(runs.file.seeds):
        work = runs.work(seed)
        for rule, scenario in runs.scenarios(seed):
            found[rule].append(simulate(scenario) if work is None else microbatches.simulate(scenario, work, seed=seed))
    return found
