"""Errors that count as running out of memory, the memory freed then, and that sums contain nothing of a failed call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.core.errors import OutOfMemory
from lightning_swarm.network import PeerId
from lightning_swarm.server.activation_cache import CachedForward
from lightning_swarm.server.compute import ForwardCall, SavedGraph
from lightning_swarm.server.gradient_buffer import ExactSum, GradientSum
from lightning_swarm.server.kept_graphs import GraphLimit, KeptGraphs
from lightning_swarm.server.out_of_memory import is_out_of_memory
from tests.unit.conftest import MakeSwarm
from tests.unit.server.test_server import parameter_gradients, sums
from tests.unit.swarm import MODE, key, rows

A, B = PeerId("a"), PeerId("b")
IMPOSSIBLE = 1 << 50  # elements


def raised(run: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as found:  # noqa: PT011 - which one is the question
        run()
    return found.value


@pytest.mark.parametrize("run", [lambda: torch.empty(IMPOSSIBLE), lambda: bytearray(IMPOSSIBLE)])
def test_errors_of_allocators_are_known(run: Callable[[], Any]) -> None:
    assert is_out_of_memory(raised(run))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_errors_of_memory_are_taken_for_some(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected
    wrapped = KeyError("of the user's block")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) == expected


def test_fewer_graphs_are_kept_after_each_failure_and_slowly_more_again() -> None:
    limit = GraphLimit()
    assert limit.allows(10_000)
    limit.halve(5)
    assert (limit.allows(1), limit.allows(2)) == (True, False)
    limit.halve(0)
    assert limit.most == 2, "no graph was in the way"
    for _ in range(63):
        limit.note_backward()
    assert not limit.allows(2)
    limit.note_backward()
    assert limit.allows(2)


def kept() -> CachedForward:
    call = ForwardCall((), {}, [], MODE, seed=0)
    return CachedForward(call, graph=SavedGraph([], [], False, None, call), graph_bytes=8)


def test_all_graphs_are_dropped_whoever_holds_their_forwards() -> None:
    graphs, forwards = KeptGraphs(), [kept() for _ in range(3)]
    for forward in forwards:
        graphs.enter(forward)
    assert forwards[0].take_graph() is not None, "a backward has begun with it"
    graphs.drop_all(0, MemoryError())
    assert [forward.graph for forward in forwards] == [None] * 3
    assert (graphs.num_dropped, graphs.limit.most) == (2, 1)
    one, two = kept(), kept()
    graphs.enter(one)
    graphs.enter(two)
    assert one.graph is not None
    assert (two.graph, two.graph_bytes) == (None, 0)


def fails(honest: Callable[..., Any], times: int, *, after: bool) -> tuple[Callable[..., Any], list[int]]:
    """Return a function whose first calls run out of memory: at their beginning, or after their work."""
    left = [times]

    def fail(*arguments: Any) -> Any:
        found = honest(*arguments) if after or not left[0] else None
        if left[0]:
            left[0] -= 1
            torch.empty(IMPOSSIBLE)
        return found

    return fail, left


@pytest.mark.parametrize(
    ("method", "after"),
    [("converted", False), ("add", False), ("add", True)],
)
def test_a_backward_that_finds_no_memory_adds_nothing_and_then_once(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    """If a part of it was in the sum already, the server discards the sum and computes it again."""
    swarm, x = make_swarm("a", "b"), rows(1)
    failing, left = fails(getattr(GradientSum, method), 1, after=after)
    monkeypatch.setattr(GradientSum, method, failing)
    swarm.run(swarm.through(key(), x))
    assert left == [0]
    for found, wanted in zip(sums(swarm, [A, B]), parameter_gradients(swarm, x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_finds_no_memory_twice_is_refused_with_the_remedy(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    swarm, x = make_swarm("a"), rows(1)
    stage = swarm.servers[A].steps.stage(0)
    failing, left = fails(getattr(stage.computation, direction), 2, after=True)
    monkeypatch.setattr(stage.computation, direction, failing)
    with pytest.raises(OutOfMemory, match=r"one microbatch of its stage, and a .*stage 0.*tried to.*microbatch_size"):
        swarm.run(swarm.through(key(), x))
    assert left == [0]
    assert swarm.servers[A].events.counts["out_of_memory"] == 1
    assert not stage.next_sum.values.any()
    swarm.run(swarm.through(key(index=1), x))  # a repeat, for which there is memory
    assert not stage.load.lacks_memory
    torch.testing.assert_close(stage.next_sum.values, parameter_gradients(swarm, x)[0], rtol=0.0, atol=1e-12)


def test_three_microbatches_in_a_row_show_that_a_stage_is_too_large(make_swarm: MakeSwarm) -> None:
    load = make_swarm("a").servers[A].steps.stage(0).load
    seen = []
    for _ in range(3):
        load.count_refusal()
        seen.append(load.lacks_memory)
    assert seen == [False, False, True]
    load.count_samples(1, busy_s=1.0, queued=0)
    assert not load.lacks_memory


def test_whole_numbers_are_added_as_they_come() -> None:
    parameters: list[Tensor] = [torch.zeros(3, dtype=torch.float64)]
    for kind in (GradientSum, ExactSum):
        total = kind(parameters, torch.device("cpu"))
        total.add(total.converted([torch.ones(3)]), 2.0)
        assert total.touched == [True]
        assert total.values.any()
