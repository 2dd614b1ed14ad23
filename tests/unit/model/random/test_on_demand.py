"""The mode that keys random numbers is only entered for computations that draw, and covers all draws."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import build_stages, find_blocks
from lightning_swarm.model.partition.split import parameter_costs
from lightning_swarm.model.partition.stage_ranges import balanced_ranges
from lightning_swarm.model.random import KeyedOnDemand, KeyedRandom, checkpoint_contexts
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.server.compute import ForwardCall
from lightning_swarm.server.optimizer import StageOptimizer
from lightning_swarm.server.stage import Stage

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 64).view(8, 8)


class Draws:
    """A computation that counts its runs, and its runs within the mode; it draws if a test sets `draws`."""

    def __init__(self) -> None:
        self.num_runs = self.num_keyed = 0
        self.draws: Callable[[], Tensor] | None = None

    def __call__(self) -> Tensor:
        self.num_runs += 1
        self.num_keyed += any(isinstance(mode, KeyedRandom) for mode in _get_current_dispatch_mode_stack())
        return X if self.draws is None else self.draws()


@pytest.fixture
def draws() -> Draws:
    return Draws()


def keyed(seed: int) -> Tensor:
    with KeyedRandom(seed):
        return torch.rand(4)


def test_what_draws_nothing_runs_without_the_mode_after_it_was_seen_once(draws: Draws) -> None:
    random = KeyedOnDemand(CPU)
    assert [random.run("forward", 1, draws) for _ in range(3)] == [(X, False)] * 3
    assert (draws.num_runs, draws.num_keyed) == (3, 1)
    random.run("backward", 1, draws)
    assert draws.num_keyed == 2, "another kind"


def test_what_draws_always_runs_in_the_mode(draws: Draws) -> None:
    random, draws.draws = KeyedOnDemand(CPU), lambda: torch.rand(4)
    before = torch.get_rng_state()
    for seed in range(3):
        drawn, has_drawn = random.run("forward", seed, draws)
        assert has_drawn
        assert torch.equal(drawn, keyed(seed))
    assert (draws.num_runs, draws.num_keyed) == (3, 3)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_begins_to_draw_runs_again_in_the_mode(draws: Draws) -> None:
    random = KeyedOnDemand(CPU)
    random.run("forward", 1, draws)
    draws.draws = lambda: torch.rand(4)
    before = torch.get_rng_state()
    drawn, has_drawn = random.run("forward", 7, draws)
    assert has_drawn
    assert torch.equal(drawn, keyed(7))
    assert (draws.num_runs, draws.num_keyed) == (3, 2)
    assert torch.equal(torch.get_rng_state(), before), "generators stand where they stood"
    random.run("forward", 8, draws)
    assert (draws.num_runs, draws.num_keyed) == (4, 3)


def test_who_draws_in_another_thread_costs_little(draws: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    random = KeyedOnDemand(CPU)
    states = iter(range(100))  # never equal: another thread draws all the time
    monkeypatch.setattr(random, "_states", lambda: [torch.tensor(next(states))])
    monkeypatch.setattr(random, "_restore", lambda _: pytest.fail("what others drew is drawn"))
    for _ in range(10):
        assert random.run("forward", 1, draws) == (X, False)
    assert draws.num_runs == 13, "three times twice, then in the mode at once"
    assert draws.num_keyed == 10


def test_on_devices_whose_generators_are_not_known_all_runs_in_the_mode(draws: Draws) -> None:
    random = KeyedOnDemand(torch.device("meta"))
    for _ in range(2):
        random.run("forward", 1, draws)
    assert draws.num_keyed == 2


# ---------------------------------------------------------------------- in a stage


class Block(nn.Module):
    """A linear layer, and an operation of the test's choice."""

    modes: ClassVar[list[int]] = []  # a class attribute, because blocks may keep no list that grows

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.then: Callable[[Tensor], Tensor] = torch.tanh

    @override
    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(sum(isinstance(mode, KeyedRandom) for mode in _get_current_dispatch_mode_stack()))
        return self.then(self.linear(x))


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand(8)


class Trial:
    """A stage of one block."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(block())
        blocks = find_blocks(module, None)
        (spec,) = build_stages(module, blocks, balanced_ranges(parameter_costs(blocks), 1))
        self.block: Any = module[0]
        self.stage = Stage(spec, StageOptimizer(None, {}), CPU)
        self.stage._train(list(module.parameters()))

    def run(self, seed: int = 5, *, training: bool = True) -> tuple[Tensor, list[Tensor | None]]:
        """Return the output, and the gradients of the parameters."""
        mode = ComputeMode(training=training, grad=True)
        done = self.stage.computation.forward(ForwardCall((X,), {}, [False], mode, seed))
        assert done.graph is not None
        return done.output, self.stage.computation.backward(done.graph, [torch.ones(8, 8)], mode)[1]


@pytest.fixture
def trial() -> Trial:
    Block.modes.clear()
    return Trial()


def test_a_stage_that_draws_nothing_computes_without_the_mode(trial: Trial) -> None:
    first, second = trial.run(), trial.run()
    assert trial.block.modes == [1, 0]
    assert torch.equal(first[0], second[0])
    assert all(map(torch.equal, first[1], second[1]))


def test_a_stage_that_draws_in_training_only_is_keyed_there(trial: Trial) -> None:
    trial.block.then = lambda x: F.dropout(x, 0.5, trial.block.training)
    for training in (True, False, True, False):
        trial.run(training=training)
    assert trial.block.modes == [1, 1, 1, 0]


def test_a_backward_that_begins_to_draw_is_found_out(trial: Trial) -> None:
    for _ in range(2):
        trial.run()
    trial.block.then = DrawsInBackward.apply
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ConfigError, match="draw their random numbers in forward"):
            trial.run()
    assert torch.equal(torch.get_rng_state(), before), "generators stand where they stood"


def test_a_thread_that_draws_while_a_backward_runs_changes_nothing(trial: Trial) -> None:
    first = trial.run()

    def draw(_: Tensor) -> None:
        other = threading.Thread(target=lambda: torch.rand(1))
        other.start()
        other.join()

    handle = trial.block.linear.weight.register_hook(draw)
    second = trial.run()
    handle.remove()
    assert torch.equal(first[0], second[0])
    assert all(map(torch.equal, first[1], second[1]))
    assert trial.block.modes == [1, 0, 0], "computed again, for nothing was left of the graph"


def test_a_block_that_recomputes_what_it_drew_is_found_out_each_time(trial: Trial) -> None:
    """It restores the generators, so their state does not reveal its draws."""
    trial.run()
    trial.block.then = lambda x: checkpoint(lambda y: F.dropout(y, 0.5).sin(), x, use_reentrant=False)
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"draw their random numbers in forward.*in backward"):
            trial.run()


def test_a_block_that_recomputes_itself_may_be_given_its_draws(trial: Trial) -> None:
    plain = Trial()
    trial.block.then = lambda x: checkpoint(
        lambda y: F.dropout(y, 0.5).sin(), x, use_reentrant=False, context_fn=checkpoint_contexts
    )
    plain.block.then = lambda x: F.dropout(x, 0.5).sin()
    for seed in range(3):
        output, gradients = trial.run(seed)
        expected, expected_gradients = plain.run(seed)
        assert torch.equal(output, expected)
        assert all(map(torch.equal, gradients, expected_gradients))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_compiled_stage_is_compiled_once(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled once, with and without the mode."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_gpu)
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(graph)
        return graph

    trial = Trial(lambda: nn.Linear(8, 8))
    trial.stage.module.compile_by(lambda function: torch.compile(function, backend=backend))
    for _ in range(3):
        trial.run()
    assert len(compiled) == 1
