"""The command `lightning-swarm simulate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_swarm.planner import report
from lightning_swarm.planner.simulator import microbatches
from lightning_swarm.planner.simulator.fluid import Span, simulate
from lightning_swarm.planner.simulator.scenario import ScenarioRuns
from lightning_swarm.protocol.settings import RebalancingRule


def run(arguments: argparse.Namespace) -> int:
    """Simulate a scenario, and print the table; returns the exit status."""
    spans = simulated(ScenarioRuns(arguments.scenario))
    print(report.span_table(spans))  # noqa: T201 - a command
    if arguments.picture is not None:
        report.draw_spans(spans, arguments.picture)
        print(f"{arguments.picture}: curves of the first seed")  # noqa: T201 - a command
    return 0


def simulated(runs: ScenarioRuns) -> dict[RebalancingRule, list[Sequence[Span]]]:
    """Simulate each rule with all seeds; returns each rule's spans of constant throughput, for each seed."""
    spans: dict[RebalancingRule, list[Sequence[Span]]] = {rule: [] for rule in runs.file.rules}
    for seed in range(runs.file.seeds):
        work = runs.work(seed)
        for rule, scenario in runs.scenarios(seed):
            spans[rule].append(simulate(scenario) if work is None else microbatches.simulate(scenario, work, seed=seed))
    return spans
