"""Counts convictions in audits of servers that are all honest; for `benchmarks.liars`. There must be none."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.liar_swarms import Task, digits, dropped, run, text
from benchmarks.report import table, write
from lightning_swarm import Compression, Trust
from lightning_swarm.testing import FaultPlan, Phase

NUM_STEPS: Final = 60
ALL: Final = {"trust": Trust("audited", audit_share=1.0)}


@dataclass(frozen=True)
class Conditions:
    """Conditions under which servers compute.

    Args:
        task: The training.
        num_threads: Of torch.
        precision: Of the Trainer.
        settings: Of the strategy.
        faults: Planned faults, made anew for each run.
    """

    task: Callable[[], Task]
    num_threads: int = 1
    precision: str = "32-true"
    settings: dict[str, Any] = field(default_factory=dict)
    faults: Callable[[], FaultPlan] = FaultPlan


def deaths() -> FaultPlan:
    """Plan deaths of servers in the middle of audits, as auditors and as the audited."""
    plan = FaultPlan()
    phases = [phase for phase in Phase if phase.name.startswith(("SKETCH", "AUDIT", "KEPT_WORK", "FINDINGS"))]
    for number, phase in enumerate(phases):
        plan.kill(f"peer-{number + 3}", at=phase, nth=3 * number + 2)
    return plan


FLOATING: Final = {"deterministic": False}
CONDITIONS: Final[dict[str, Conditions]] = {
    "digits, float32, fixed-point sums": Conditions(digits),
    "digits, float32, 2 threads": Conditions(digits, 2, settings=FLOATING),
    "text, float32": Conditions(text, settings=FLOATING),
    "text, bfloat16 autocast": Conditions(text, precision="bf16-mixed", settings=FLOATING),
    "text, bfloat16 autocast, fixed-point sums": Conditions(text, precision="bf16-mixed"),
    "text, float64": Conditions(text, precision="64-true", settings=FLOATING),
    "text, dropout, also of attention": Conditions(dropped, settings=FLOATING),
    "text, dropout, 8-bit activations and gradients": Conditions(
        dropped, settings={**FLOATING, "compression": Compression(activations="8bit", gradients="8bit")}
    ),
    "text, dropout, eight servers die in audits": Conditions(dropped, settings=FLOATING, faults=deaths),
}


def count_honest_audits(number: int) -> None:
    """Run swarms until so many server-steps were audited, and print what came of them."""
    rows: list[list[object]] = [["conditions", "audits", "convictions", "disputes", "deaths", "seconds"]]
    total, convictions, seed = 0, 0, 0
    counts: dict[str, list[float]] = {name: [0, 0, 0, 0, 0.0] for name in CONDITIONS}
    while total < number:
        for name, under in CONDITIONS.items():
            began_s, faults = time.monotonic(), under.faults()
            found = run(
                under.task(),
                NUM_STEPS,
                seed,
                faults=faults,
                num_threads=under.num_threads,
                arguments={"precision": under.precision},
                **{**ALL, **under.settings},
            )
            took = [found.audits, len(found.convicted), found.disputes, faults.fired, time.monotonic() - began_s]
            print(name, took, found.convicted, flush=True)
            counts[name] = [one + other for one, other in zip(counts[name], took, strict=True)]
            total, convictions = total + found.audits, convictions + len(found.convicted)
            if total >= number:
                break
        seed += 1
    rows += [[name, *(f"{one:.0f}" for one in its)] for name, its in counts.items() if its[0]]
    rows.append(["all", total, convictions, "", "", ""])
    write("honest-audits", table(f"Audits of honest servers: {total} server-steps, {convictions} convictions", rows))
