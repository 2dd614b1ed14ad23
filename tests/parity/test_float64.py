"""In float64, over 50 steps, a swarm trains as one machine does.

Models, cuts, servers, optimizers, schedules, clipping and windows are combined pairwise: any two values meet in some
cell of the table. Each value has a cell of all 50 steps; the other cells test combinations, and run a third of them.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass, fields
from functools import partial
from typing import Any, Literal

import pytest
import torch
from typing_extensions import override

from tests.parity.harness import (
    Run,
    SwarmRun,
    assert_exact,
    run_plain,
    run_plain_loop,
    run_swarm,
)
from tests.parity.models import MODELS, NUM_STEPS, DigitsMLP, Net, Recipe, digits, loader

NUM_STEPS_OF_OTHERS = 18

CLIP_NORMS = {"digits": 1.0, "gpt": 0.5, "gpt-losses": 0.5, "trees": 0.25}


@dataclass(frozen=True)
class Window:
    """Ends a step after a number of batches, or of samples."""

    num_batches: int = 1
    target_batch_size: int | None = None

    def __str__(self) -> str:
        return f"{self.target_batch_size}samples" if self.target_batch_size else f"{self.num_batches}batches"


def batches(number: int) -> Window:
    return Window(num_batches=number)


def samples(number: int) -> Window:
    return Window(target_batch_size=number)


@dataclass(frozen=True)
class Cell:
    model: str
    num_stages: int
    num_servers: int
    optimizer: Literal["sgd", "adamw"]
    schedule: Literal["constant", "onecycle", "cosine"]
    clip: bool
    window: Window
    num_steps: int = NUM_STEPS_OF_OTHERS

    def __str__(self) -> str:
        clip = "clip" if self.clip else "free"
        wiring = f"{self.num_stages}stages-{self.num_servers}servers"
        return f"{self.model}-{wiring}-{self.optimizer}-{self.schedule}-{clip}-{self.window}"


TABLE = [
    # model, stages, servers, optimizer, schedule, clip, window, steps
    Cell("digits", 1, 1, "adamw", "constant", False, batches(3)),
    Cell("gpt", 1, 1, "sgd", "onecycle", True, batches(1), NUM_STEPS),
    Cell("gpt-losses", 1, 1, "adamw", "cosine", True, samples(20)),
    Cell("trees", 1, 1, "sgd", "cosine", False, batches(2)),
    Cell("digits", 1, 2, "adamw", "onecycle", False, batches(1)),
    Cell("gpt", 1, 2, "adamw", "constant", True, batches(2)),
    Cell("gpt-losses", 1, 2, "sgd", "constant", False, samples(20)),
    Cell("trees", 1, 2, "adamw", "cosine", True, batches(3), NUM_STEPS),
    Cell("digits", 1, 4, "sgd", "cosine", True, batches(3)),
    Cell("gpt", 1, 4, "adamw", "onecycle", False, samples(20)),
    Cell("gpt-losses", 1, 4, "adamw", "onecycle", True, batches(2)),
    Cell("trees", 1, 4, "sgd", "constant", True, batches(1), NUM_STEPS),
    Cell("digits", 2, 1, "sgd", "cosine", True, batches(1)),
    Cell("gpt", 2, 1, "adamw", "onecycle", False, batches(2)),
    Cell("gpt-losses", 2, 1, "sgd", "constant", False, batches(3)),
    Cell("trees", 2, 1, "adamw", "onecycle", False, samples(20), NUM_STEPS),
    Cell("digits", 2, 3, "adamw", "onecycle", False, samples(20)),
    Cell("gpt", 2, 3, "sgd", "cosine", True, batches(3)),
    Cell("gpt-losses", 2, 3, "adamw", "constant", True, batches(2)),
    Cell("trees", 2, 3, "adamw", "onecycle", False, batches(1), NUM_STEPS),
    Cell("digits", 3, 2, "adamw", "onecycle", True, batches(1), NUM_STEPS),
    Cell("gpt", 3, 2, "sgd", "cosine", False, batches(2)),
    Cell("gpt-losses", 3, 2, "adamw", "constant", False, samples(20)),
    Cell("trees", 3, 2, "sgd", "onecycle", False, batches(3)),
    Cell("digits", 3, 4, "adamw", "constant", False, batches(2)),
    Cell("gpt", 3, 4, "sgd", "cosine", True, batches(1), NUM_STEPS),
    Cell("gpt-losses", 3, 4, "adamw", "onecycle", False, batches(3)),
    Cell("trees", 3, 4, "adamw", "constant", False, samples(20)),
    Cell("digits", 4, 3, "sgd", "constant", True, batches(2)),
    Cell("gpt", 4, 3, "adamw", "cosine", False, samples(20)),
    Cell("gpt-losses", 4, 3, "adamw", "onecycle", False, batches(1), NUM_STEPS),
    Cell("trees", 4, 3, "sgd", "onecycle", True, batches(3)),
    Cell("digits", 4, 4, "sgd", "onecycle", False, samples(20)),
    Cell("gpt", 4, 4, "adamw", "constant", True, batches(1)),
    Cell("gpt-losses", 4, 4, "adamw", "cosine", True, batches(3)),
    Cell("trees", 4, 4, "sgd", "onecycle", False, batches(2), NUM_STEPS),
]


def _thorough(cell: Cell) -> list[pytest.MarkDecorator]:
    return [] if cell.num_steps == NUM_STEPS else [pytest.mark.thorough]


@pytest.mark.first_cells(5)
@pytest.mark.parametrize("cell", [pytest.param(cell, marks=_thorough(cell)) for cell in TABLE], ids=str)
def test_a_swarm_trains_as_one_machine_does(cell: Cell) -> None:
    plain, swarm = _run_both(cell)
    assert_exact(swarm, plain)
    assert swarm.learning_rates == plain.learning_rates
    assert (len(set(plain.learning_rates)) > 1) == (cell.schedule != "constant")
    assert max(plain.losses) - min(plain.losses) > 0.01 * plain.losses[0], "nothing was learned"
    assert (swarm.num_clipped > 0) == cell.clip
    assert len(swarm.records) == plain.global_steps[-1] >= cell.num_steps
    assert [record.squared_norm**0.5 for record in swarm.records] == pytest.approx(plain.norms, rel=1e-10)
    assert all(record.outcome == "apply" for record in swarm.records)
    assert not swarm.rerouted, "something was done twice, or found a busy peer"


def _run_both(cell: Cell) -> tuple[Run, SwarmRun]:
    recipe = Recipe(optimizer=cell.optimizer, schedule=cell.schedule, total_steps=cell.num_steps + 10)
    model, data = MODELS[cell.model]
    clip = CLIP_NORMS[cell.model] if cell.clip else None

    def make_module() -> Net:
        return model(recipe)

    def swarm(**trainer: Any) -> SwarmRun:
        return run_swarm(
            make_module,
            loader(data()),
            num_stages=cell.num_stages,
            num_servers=cell.num_servers,
            microbatch_size=3 if cell.window == batches(1) else 5,
            target_batch_size=target,
            gradient_clip_val=clip,
            **trainer,
        )

    target = cell.window.target_batch_size
    if target is None:
        limits: dict[str, Any] = {"max_steps": cell.num_steps, "accumulate_grad_batches": cell.window.num_batches}
        return run_plain(make_module, loader(data()), gradient_clip_val=clip, **limits), swarm(**limits)
    # With seven batches an epoch and three a step, most epochs leave a remainder, and so does the last one.
    max_epochs = cell.num_steps * 3 // 7 + 1
    reference = run_plain_loop(
        make_module, loader(data()), target_batch_size=target, max_epochs=max_epochs, gradient_clip_val=clip
    )
    run = swarm(max_epochs=max_epochs)
    sizes = [record.closing.num_samples for record in run.records]
    assert sum(sizes) == max_epochs * len(data())
    assert min(sizes[:-1]) >= target > sizes[-1]
    return reference, run


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        {"microbatch_size": None, "num_servers": 3},
        {"microbatch_size": 1, "num_servers": 4},
        {"microbatch_size": 7, "num_stages": 3},
        {"latency_s": 0.2, "num_stages": 3, "num_servers": 4},
        {"role": "trainer", "num_servers": 3},
        {"role": "trainer", "num_stages": 4, "num_servers": 1},
        {"split": ["0", "5"]},
    ],
    ids=str,
)
def test_other_wirings(options: dict[str, Any]) -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=9)
    assert_exact(run_swarm(DigitsMLP, loader(digits()), max_steps=9, **options), plain)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
        partial(torch.optim.AdamW, lr=1e-2, fused=True),
        partial(torch.optim.NAdam, lr=1e-2),
        partial(torch.optim.RMSprop, lr=1e-3, centered=True, momentum=0.5),
        partial(torch.optim.Adafactor, lr=1e-2),
        partial(torch.optim.Rprop, lr=1e-3),
        partial(torch.optim.SGD, lr=torch.tensor(1e-2), momentum=0.9, nesterov=True),
    ],
    ids=lambda make: make.func.__name__,
)
def test_other_optimizers(make_optimizer: Any) -> None:
    class Digits(DigitsMLP):
        @override
        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    plain = run_plain(Digits, loader(digits()), max_steps=15)
    assert_exact(run_swarm(Digits, loader(digits()), max_steps=15, num_servers=4), plain)


def test_any_two_values_meet_in_the_table() -> None:
    def values(cell: Cell) -> list[object]:
        model, num_stages, num_servers, *rest, _ = (getattr(cell, field.name) for field in fields(cell))
        return [model, (num_stages, num_servers), *rest]

    rows = [values(cell) for cell in TABLE]
    assert len({astuple(cell) for cell in TABLE}) == len(TABLE) <= 37
    for first, second in itertools.combinations(range(len(rows[0])), 2):
        wanted = set(itertools.product({row[first] for row in rows}, {row[second] for row in rows}))
        assert {(row[first], row[second]) for row in rows} == wanted
    for column in range(len(rows[0])):
        whole = {row[column] for row, cell in zip(rows, TABLE, strict=True) if cell.num_steps == NUM_STEPS}
        assert whole == {row[column] for row in rows}, "none of those with this value goes the whole way"
    wirings = {(cell.num_stages, cell.num_servers) for cell in TABLE}
    assert {stages for stages, _ in wirings} == {servers for _, servers in wirings} == {1, 2, 3, 4}
    assert any(servers < stages for stages, servers in wirings), "no server has two stages"
    assert any(servers > stages > 1 for stages, servers in wirings), "no stage of several has two servers"
