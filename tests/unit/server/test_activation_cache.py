"""A server's cache for backward never exceeds its budget, and loses entries without harm."""

from __future__ import annotations

from lightning_swarm.server.activation_cache import ActivationCache, CachedForward
from lightning_swarm.server.compute import ForwardCall, SavedGraph
from tests.unit.swarm import MODE

CALL = ForwardCall((), {}, [], MODE, 0)
GRAPH = SavedGraph([], [], has_drawn=False, batch_statistics=None, call=CALL)


def kept(input_bytes: int, graph_bytes: int) -> CachedForward:
    return CachedForward(CALL, graph=GRAPH, graph_bytes=graph_bytes, input_bytes=input_bytes)


def test_what_is_kept_is_counted_and_taken_once() -> None:
    cache = ActivationCache(100)
    one = kept(10, 20)
    cache.keep("x", one)
    assert cache.used_bytes == 30
    assert cache.pop("x") is one
    assert cache.pop("x") is None
    assert cache.used_bytes == 0


def test_the_same_name_is_kept_once() -> None:
    cache = ActivationCache(100)
    cache.keep("x", kept(10, 20))
    again = kept(5, 5)
    cache.keep("x", again)
    assert cache.used_bytes == 10
    assert cache.pop("x") is again


def test_the_graph_goes_before_the_input() -> None:
    cache = ActivationCache(100)
    cache.keep("x", kept(40, 60))
    assert cache.full
    cache.pop("x")
    cache.keep("x", kept(40, 61))
    without_graph = cache.pop("x")
    assert without_graph is not None
    assert (without_graph.graph, without_graph.graph_bytes) == (None, 0)
    assert (cache.num_dropped_graphs, cache.used_bytes) == (1, 0)


def test_what_does_not_fit_pushes_out_nothing() -> None:
    cache = ActivationCache(100)
    oldest = kept(60, 0)
    cache.keep("oldest", oldest)
    cache.keep("new", kept(41, 0))
    assert cache.pop("new") is None
    assert cache.pop("oldest") is oldest
    assert not cache.full


def test_a_cache_without_room_keeps_nothing() -> None:
    cache = ActivationCache(0)
    assert cache.full
    cache.keep("x", kept(1, 1))
    assert cache.pop("x") is None
    assert cache.used_bytes == 0


def test_a_step_is_dropped_by_its_prefix() -> None:
    cache = ActivationCache(100)
    for name in ("s1.a", "s1.b", "s10.a"):
        cache.keep(name, kept(10, 0))
    cache.drop("s1.")
    assert cache.used_bytes == 10
    assert cache.pop("s10.a") is not None
