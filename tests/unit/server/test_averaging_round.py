"""Averaging that begins with the freeze, against whatever comes between that and the round's record."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.step import Closing, FreezeRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.methods import FREEZE
from lightning_swarm.server.averaging_round import AveragingRounds
from lightning_swarm.server.executor import InlineExecutor, Priority
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import Swarm, key, rows

T = TypeVar("T")

A, B = PeerId("a"), PeerId("b")


def closing(**changes: Any) -> Closing:
    """Of a step with one microbatch of two samples."""
    fields: dict[str, Any] = {
        "generation": 0,
        "step": 0,
        "round": 0,
        "batches": [(0, 1, 1)],
        "num_samples": 2,
        "total_weight": 2.0,
        "absent": [],
    }
    return Closing(**{**fields, **changes})


def freeze(swarm: Swarm, peer: PeerId, expected: Closing) -> None:
    request = FreezeRequest(generation=expected.generation, step=expected.step, round=expected.round, expected=expected)
    swarm.run(swarm.servers[A]._transport.call(peer, FREEZE, encode(request), timeout=1.0))


def tickets(swarm: Swarm, peer: PeerId) -> list[str]:
    """Of rounds of averaging."""
    return [name for name in swarm.servers[peer]._tickets._entries if "/average/" in name]


class OnAThread(InlineExecutor):
    """The loop waits, but each job has a thread without a loop."""

    @override
    def submit(self, priority: Priority, run: Callable[[], T]) -> asyncio.Future[tuple[T, float]]:
        def on_a_thread() -> T:
            with ThreadPoolExecutor(1) as pool:
                done: Future[T] = pool.submit(run)
                return done.result()

        return super().submit(priority, on_a_thread)


def test_who_leaves_during_a_round_ends_it_on_the_loop_and_keeps_nothing(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run may have a round of the same name: whoever fetched its parts would have those of this one."""
    monkeypatch.setattr("tests.unit.swarm.InlineExecutor", OnAThread)
    swarm = make_swarm("a", "b c")
    threads: list[threading.Thread] = []
    begin = AveragingRounds.begin

    def begun(rounds: AveragingRounds, of: Closing | None, *, late: bool = False) -> None:
        threads.append(threading.current_thread())
        begin(rounds, of, late=late)

    monkeypatch.setattr(AveragingRounds, "begin", begun)
    swarm.run(swarm.through(key(), rows(1), route=[A, B]))
    freeze(swarm, B, closing())
    swarm.run(asyncio.sleep(0.5))
    assert tickets(swarm, B), "it waits for the part of the other one"
    swarm.run(swarm.servers[B].step_out())
    swarm.run(asyncio.sleep(0.0))
    assert set(threads) == {threading.current_thread()}, "no other thread may cancel a task"
    assert not tickets(swarm, B)
    assert not [task for task in asyncio.all_tasks(swarm.loop) if "_average_round" in repr(task)]
