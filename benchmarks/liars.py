"""Liars in real swarms: what their attacks do to a training, undefended and audited, and when they are banned.

    python -m benchmarks.liars [--task digits|text] [--attack NAME ...] [--seeds N] [--one-at-a-time] [--json FILE]
    python -m benchmarks.liars --honest 10000
    python -m benchmarks.liars --overhead

All swarms are in memory, on a virtual clock: 16 peers, of which one, the keeper, trains, coordinates and serves. A
liar is honest for the first 30 steps: in the first 20 audits of a server all of its work is looked into, and what is
to be tested is the share of 1/16 after them. `benchmarks.liar_swarms` has the trainings.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import lightning as L
from typing_extensions import override

from benchmarks.audit_costs import measure_costs
from benchmarks.honest_audits import count_honest_audits
from benchmarks.liar_swarms import KEEPER, NUM_PEERS, TASKS, Outcome, Task, out, run, stages_of
from benchmarks.report import table, write
from lightning_swarm import Trust
from lightning_swarm.testing import InMemoryStrategy
from tests.adversaries.adversary import Adversary

SINCE: Final = 30  # the first step with lies
NUM_STEPS: Final = 80
_ROUNDING: Final = 1e-5  # more than two honest runs differ that add up in different orders
MANY_STEPS: Final = 400  # where one lies after the other
NUM_LIARS: Final = 7
DEFENCES: Final[dict[str, dict[str, Any]]] = {
    "none": {},
    "clipping": {"trust": Trust(robust_averaging="centered_clip"), "deterministic": False},
    "audits": {"trust": "audited"},
    "audits, going on": {"trust": Trust("audited", on_conviction="go_on")},
}
BARS: Final = """Bars:
  gross attacks, audited: the final weights are those of the clean run to the bit (off = 0)
  others, 7 at once: all are out by step +40, and by +10 in the median of all runs; where the run goes back, the
    weights are those of the clean run up to rounding (off at most 1e-5)
  others, one at a time: at most 150 server-steps of liars count (median of seeds)
  always: no honest server is banned
off: the distance of the final weights from the clean run's, relative to the way of that one from the initial ones.
lies: server-steps in which a liar lied and was not found out; they counted, unless the run went back.
out: liars that were banned, or that the step does without because of false parts; of those that lied."""


@dataclass(frozen=True)
class Case:
    """An attack as it is tried: each liar gets all of these lies.

    Args:
        lies: Names of attacks, and their options.
        is_gross: No lie may have any effect.
        tasks: For which it makes a difference.
        joins: Servers join during the attack.
    """

    lies: Sequence[tuple[str, dict[str, Any]]]
    is_gross: bool = False
    tasks: Sequence[str] = ("digits", "text")
    joins: bool = False

    def adversaries(self, peers: Sequence[str], seed: int, *, in_turn: bool) -> list[Adversary]:
        """Make the liars."""
        return [
            LiesInTurn(peers[:place] if in_turn else (), peer, name, since=SINCE, seed=seed, **options)
            for place, peer in enumerate(peers)
            for name, options in self.lies
        ]


def case(name: str, /, *, is_gross: bool = False, tasks: Sequence[str] = ("digits", "text"), **options: Any) -> Case:
    """Make a case of one attack."""
    return Case([(name, options)], is_gross, tasks)


TEXT: Final = ("text",)
CASES: Final[dict[str, Case]] = {
    "sign flip x1000": case("sign_flip", strength=1000.0, is_gross=True),
    "random direction x1000": case("random_direction", strength=1000.0, is_gross=True),
    "no numbers": case("not_a_number", is_gross=True),
    "zeros": case("zero_sum", is_gross=True),
    "sign flip": case("sign_flip"),
    "label flip": case("label_flip"),
    "delayed by 20 steps": case("delayed_gradient", delay=20),
    "IPM 0.1": case("inner_product", strength=0.1),
    "IPM 0.6": case("inner_product", strength=0.6),
    "ALIE": case("little_is_enough"),
    "receipts without compute": case("no_compute"),
    "noisy outputs, 1 %": case("noisy_output"),
    "outputs x1.05": case("scaled_output"),
    "outputs of zeros": case("scaled_output", strength=0.0),
    "skipped blocks": case("skipped_blocks", tasks=TEXT),
    "input gradients x-1": case("scaled_input_gradient", tasks=TEXT),
    "noisy input gradients, 1 %": case("noisy_input_gradient", tasks=TEXT),
    "false parts": case("changed_part", strength=1.0),
    "false means": case("changed_reduction", strength=1.0),
    "poisoned downloads": Case([("poisoned_download", {})], joins=True),
    "false accusations": case("false_accusation"),
    "sign flip, covered": Case([("sign_flip", {}), ("cover_up", {})]),
    "ALIE, covered": Case([("little_is_enough", {}), ("cover_up", {})]),
}
"""All attacks, by what the table calls them."""


class LiesInTurn(Adversary):
    """An adversary that does not lie before all of some others are banned.

    Args:
        before: The others.
        arguments: Of an `Adversary`.
        options: Likewise.
    """

    def __init__(self, before: Sequence[str], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._before = frozenset(before)
        self.out: dict[str, int] = {}  # who is out of the run, and since when; kept up by the run

    @override
    def lies_in(self, step: int) -> bool:
        return super().lies_in(step) and all(peer in self.out and self.out[peer] < step for peer in self._before)


def choose_liars(task: Task, number: int, seed: int) -> list[str]:
    """Draw the liars, so that each stage has somebody honest."""
    stages, rng = stages_of(task, seed), random.Random(seed)
    while True:
        liars = rng.sample([peer for peer in sorted(stages) if peer != KEEPER], number)
        if {stages[peer] for peer in stages.keys() - {*liars}} == {*stages.values()}:
            return liars


@dataclass
class Cell:
    """What one attack did to one run."""

    loss: float
    accuracy: float
    off: float
    lies: int
    bans: list[int]  # after how many steps of lies those that lied were out, in order
    num_liars: int  # that lied: not every attack is possible in every stage
    honest_bans: list[str]
    disputes: int
    audits: int
    jobs_ratio: float
    bytes_ratio: float
    took_s: float
    remarks: list[str] = field(default_factory=list)


@cache
def clean(task_name: str, seed: int, num_steps: int) -> Outcome:
    """Run without liars, and without a defence."""
    return run(TASKS[task_name](), num_steps, seed)


def compare(task: Task, seed: int, found: Outcome, liars: Sequence[str], adversaries: Sequence[Adversary]) -> Cell:
    """Compare with the clean run."""
    true = clean(task.name, seed, found.num_steps)
    way = (true.weights - task.model(seed).weights()).norm()
    told: defaultdict[str, set[int]] = defaultdict(set)
    for adversary in adversaries:
        told[str(adversary.peer)].update(adversary.lies)
    never = MANY_STEPS + SINCE
    counted = {peer: [step for step in its if step < found.out.get(peer, never)] for peer, its in told.items()}

    def activation_bytes(outcome: Outcome) -> int:
        return outcome.traffic.tensor_bytes["activations"] + outcome.traffic.tensor_bytes["audits"]

    return Cell(
        loss=found.loss,
        accuracy=found.accuracy,
        off=float((found.weights - true.weights).norm() / way),
        lies=sum(map(len, counted.values())),
        bans=sorted(step - SINCE for peer, step in found.out.items() if told.get(peer)),
        num_liars=sum(map(bool, told.values())),
        honest_bans=sorted(found.convicted.keys() - {*liars}),
        disputes=found.disputes,
        audits=found.audits,
        jobs_ratio=found.traffic.jobs / true.traffic.jobs,
        bytes_ratio=activation_bytes(found) / activation_bytes(true),
        took_s=0.0,
        remarks=[*found.refusals[:1], *([] if any(told.values()) or not liars else ["nobody lied"])],
    )


def attack(task: Task, name: str, defence: str, seed: int, *, num_liars: int, in_turn: bool) -> Cell:
    """Run one attack."""
    began_s, tried = time.monotonic(), CASES[name]
    liars = choose_liars(task, num_liars, seed)
    adversaries = tried.adversaries(liars, seed, in_turn=in_turn)

    def after_step(trainer: L.Trainer, strategy: InMemoryStrategy) -> None:
        gone = out(strategy, "convicted", "gone")
        for one in adversaries:
            if isinstance(one, LiesInTurn):
                one.out = gone
        if in_turn and gone.keys() >= {*liars}:
            trainer.should_stop = True
        if tried.joins and trainer.global_step - SINCE in (2, 6, 10):
            strategy.join()

    num_steps = MANY_STEPS if in_turn else NUM_STEPS
    found = run(task, num_steps, seed, adversaries, each_step=after_step, **DEFENCES[defence])
    cell = compare(task, seed, found, liars, adversaries)
    cell.took_s = time.monotonic() - began_s
    return cell


# ---------------------------------------------------------------------- the table

HEAD: Final = (
    *("attack", "defence", "loss", "accuracy", "off", "lies", "first out", "last out", "out", "honest bans"),
    *("audits", "compute", "bytes", "bar"),
)


def row(name: str, defence: str, cells: Sequence[Cell], bar: str) -> list[object]:
    """Make a row: medians over seeds, the largest last ban in brackets."""

    def median(of: Callable[[Cell], float]) -> float:
        return statistics.median(map(of, cells))

    firsts = [cell.bans[0] for cell in cells if cell.bans]
    lasts = [cell.bans[-1] for cell in cells if len(cell.bans) == cell.num_liars and cell.bans]
    off = max(cell.off for cell in cells)
    return [
        name,
        defence,
        f"{median(lambda cell: cell.loss):.3f}",
        f"{median(lambda cell: cell.accuracy):.3f}",
        "0" if off == 0.0 else f"{median(lambda cell: cell.off):.1e}",
        f"{median(lambda cell: cell.lies):g}",
        f"+{statistics.median(firsts):g}" if firsts else "-",
        (f"+{statistics.median(lasts):g}" + (f" ({max(lasts)})" if len(lasts) > 1 else "")) if lasts else "-",
        f"{median(lambda cell: len(cell.bans)):g}/{cells[0].num_liars}",
        sum(len(cell.honest_bans) for cell in cells),
        f"{median(lambda cell: cell.audits):g}",
        f"{median(lambda cell: cell.jobs_ratio):.2f}",
        f"{median(lambda cell: cell.bytes_ratio):.2f}",
        bar,
    ]


def judged(name: str, defence: str, cells: Sequence[Cell], *, in_turn: bool) -> str:
    """Say which bar a row meets; nothing where there is none."""
    if not defence.startswith("audits"):
        return ""
    if any(cell.honest_bans for cell in cells):
        return "missed: honest bans"
    if CASES[name].joins:
        return ""
    if in_turn:
        lies = statistics.median(cell.lies for cell in cells)
        return "met" if lies <= 150 else f"missed: {lies:g} lies"
    if CASES[name].is_gross:
        return "met" if all(cell.off == 0.0 for cell in cells) else "missed: other weights"
    if defence == "audits" and any(cell.off > _ROUNDING for cell in cells):
        return "missed: other weights"
    return "met" if max(map(last_out, cells)) <= 40 else "missed"


def last_out(cell: Cell) -> int:
    """Return after how many steps the last liar was out; 0 if nobody lied."""
    return max(cell.bans, default=0) if len(cell.bans) == cell.num_liars else NUM_STEPS


def summed_up(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Say when liars were out in all audited runs together."""
    lasts = [last_out(Cell(**one)) for name, cells in found.items() if name.endswith("| audits") for one in cells]
    if not lasts:
        return ""
    return f"All {len(lasts)} audited runs: the last liar was out by +{statistics.median(lasts):g} (median).\n\n"


def baselines(task: Task, seeds: Sequence[int]) -> list[list[object]]:
    """Rows of runs without liars."""
    wirings: dict[str, dict[str, Any]] = {
        "": {},
        ", deterministic=False": {"deterministic": False},
        ", deterministic=False, other routes": {"deterministic": False, "wiring": 1000},
    }
    rows = []
    for what, settings in wirings.items():
        cells = [compare(task, seed, run(task, NUM_STEPS, seed, **settings), [], []) for seed in seeds]
        rows.append(row(f"nobody lies{what}", "none", cells, ""))
    cells = [compare(task, seed, run(task, NUM_STEPS, seed, **DEFENCES["audits"]), [], []) for seed in seeds]
    rows.append(row("nobody lies", "audits", cells, "met" if all(cell.off == 0 for cell in cells) else "missed"))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Run the experiment, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=sorted(TASKS), default="digits")
    parser.add_argument("--attack", choices=[*CASES, "nobody lies"], nargs="*", help="default: all that the task has")
    parser.add_argument("--defence", choices=sorted(DEFENCES), nargs="*", default=[*DEFENCES])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--liars", type=int, default=NUM_LIARS, help=f"of {NUM_PEERS} peers")
    parser.add_argument("--one-at-a-time", action="store_true", help="a liar begins when the one before is banned")
    parser.add_argument("--json", type=Path, help="a file to write all numbers to")
    parser.add_argument("--honest", type=int, help="instead: count convictions in so many audits of honest servers")
    parser.add_argument("--overhead", action="store_true", help="instead: what audits cost where nobody lies")
    chosen = parser.parse_args(words)
    if chosen.honest is not None:
        count_honest_audits(chosen.honest)
        return
    if chosen.overhead:
        measure_costs()
        return
    task, seeds = TASKS[chosen.task](), range(chosen.seeds)
    names = chosen.attack or ["nobody lies", *(name for name, one in CASES.items() if chosen.task in one.tasks)]
    rows: list[list[object]] = [[*HEAD]]
    found: dict[str, Any] = {}
    for name in names:
        if name == "nobody lies":
            rows += baselines(task, seeds)
            continue
        for defence in chosen.defence:
            cells = []
            for seed in seeds:
                cell = attack(task, name, defence, seed, num_liars=chosen.liars, in_turn=chosen.one_at_a_time)
                print(name, defence, seed, vars(cell), flush=True)
                cells.append(cell)
            found[f"{name} | {defence}"] = [vars(cell) for cell in cells]
            rows.append(row(name, defence, cells, judged(name, defence, cells, in_turn=chosen.one_at_a_time)))
            if chosen.json:
                chosen.json.write_text(json.dumps(found, indent=1))
    how = "one after the other" if chosen.one_at_a_time else "at once"
    title = f"{task.name}: {chosen.liars} of {NUM_PEERS} peers lie {how} from step {SINCE} on, {chosen.seeds} seeds"
    write(
        f"liars-{task.name}{'-in-turn' * chosen.one_at_a_time}-{chosen.liars}",
        f"{table(title, rows)}\n\n{summed_up(found)}{BARS}",
    )


if __name__ == "__main__":
    main()
