"""Little memory makes a swarm slower but no different: dropped tensors are recomputed with the same random draws."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightning_swarm.core.limits import Limits
from tests.parity.harness import SwarmRun, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, TinyGPTWithLosses, Trees, digits, loader, records, sentences

STEPS = 9
MIDDLING_BYTES = 3_000
"""Some of a server's pending inputs and graphs fit, but not all."""

DATA: dict[Callable[..., Net], Callable[[], TensorDataset]] = {
    DigitsMLP: digits,
    TinyGPTWithLosses: sentences,
    Trees: records,
}


def train(model: Callable[..., Net], limits: Limits | None = None, dropout: float = 0.0, **options: Any) -> SwarmRun:
    def make_module() -> Net:
        return DigitsMLP(dropout=dropout) if dropout else model(Recipe())

    return run_swarm(
        make_module,
        loader(DATA[model]()),
        **{"num_stages": 3, "num_servers": 4, **options},
        limits=limits or Limits(),
        max_steps=STEPS,
    )


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("cache_bytes", [0, MIDDLING_BYTES])
@pytest.mark.parametrize("model", DATA)
def test_what_was_dropped_is_computed_again(model: Callable[..., Net], cache_bytes: int) -> None:
    plain = run_plain(lambda: model(Recipe()), loader(DATA[model]()), max_steps=STEPS)
    swarm = train(model, Limits(cache_bytes=cache_bytes))
    assert_exact(swarm, plain)
    assert_recomputed(swarm, everything=cache_bytes == 0)


@pytest.mark.thorough
@pytest.mark.parametrize("cache_bytes", [0, MIDDLING_BYTES])
def test_it_meets_the_same_dropout_masks(cache_bytes: int) -> None:
    ample = train(DigitsMLP, dropout=0.3)
    assert not ample.rerouted
    assert ample.num_dropped_graphs == 0
    swarm = train(DigitsMLP, Limits(cache_bytes=cache_bytes), dropout=0.3)
    assert_exact(swarm, ample)
    assert_recomputed(swarm, everything=cache_bytes == 0)


def assert_recomputed(swarm: SwarmRun, *, everything: bool) -> None:
    num_calls = 3 * swarm.num_microbatches
    if everything:
        assert swarm.rerouted["repeated"] >= num_calls, "inputs were kept"
        assert swarm.num_dropped_graphs >= num_calls
    else:
        assert 0 < swarm.num_dropped_graphs < num_calls


def test_outputs_are_freed_with_their_graph() -> None:
    """No cycle of references holds them until garbage is collected."""
    outputs: list[weakref.ref[Tensor]] = []

    class Watched(DigitsMLP):
        @override
        def training_step(self, *args: Any) -> Tensor:
            hook = self.net.register_forward_hook(lambda *found: outputs.append(weakref.ref(found[2])))
            loss: Tensor = super().training_step(*args)
            hook.remove()
            return loss

    gc.collect()
    gc.disable()
    try:
        run_swarm(Watched, loader(digits()), num_stages=2, num_servers=2, max_steps=3)
    finally:
        gc.enable()
    assert len(outputs) == 3
    assert [output for output in outputs if output() is not None] == []


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("max_pending_calls", [1, 3])
@pytest.mark.parametrize("num_servers", [2, 4])
def test_a_busy_server_is_no_fault(num_servers: int, max_pending_calls: int) -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=STEPS)
    limits = Limits(max_pending_calls=max_pending_calls)
    swarm = train(DigitsMLP, limits, num_stages=2, num_servers=num_servers, microbatch_size=1)
    assert_exact(swarm, plain)
    assert swarm.rerouted["busy"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("max_pending_calls", [1, 3])
def test_what_was_dropped_is_computed_again_by_the_same_peer_even_if_it_is_busy(max_pending_calls: int) -> None:
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=STEPS)
    limits = Limits(cache_bytes=0, max_pending_calls=max_pending_calls)
    swarm = train(DigitsMLP, limits, num_servers=6, microbatch_size=1)
    assert_exact(swarm, plain)
    assert swarm.rerouted["busy"] > 0
    assert_recomputed(swarm, everything=True)
