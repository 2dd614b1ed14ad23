"""Averaging starts with the freeze; events before the round's record must not disturb it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from typing_extensions import override

from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.step import Closing, FreezeRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import AVERAGE, FREEZE
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.server.averaging_round import AveragingRounds
from lightning_swarm.server.executor import InlineExecutor, Priority
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.replays import Replayer, batch_of
from tests.unit.swarm import Swarm, closing, key, rows

T = TypeVar("T")

A, B = PeerId("a"), PeerId("b")


def freeze(swarm: Swarm, peer: PeerId, expected: Closing) -> None:
    request = FreezeRequest(generation=expected.generation, step=expected.step, round=expected.round, expected=expected)
    swarm.run(swarm.servers[A]._transport.call(peer, FREEZE.name, encode(request), timeout=1.0))


def tickets(swarm: Swarm, peer: PeerId) -> list[str]:
    """Return the names of an averaging round's tickets."""
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
    """The next run may have a round of the same name, whose members would fetch parts of this one."""
    monkeypatch.setattr("tests.unit.swarm.InlineExecutor", OnAThread)
    swarm = make_swarm("a", "b c")
    threads: list[threading.Thread] = []
    begin = AveragingRounds.begin

    def begun(rounds: AveragingRounds, of: Closing | None, *, late: bool = False) -> None:
        threads.append(threading.current_thread())
        begin(rounds, of, late=late)

    monkeypatch.setattr(AveragingRounds, "begin", begun)
    swarm.run(swarm.through(key(), rows(1), route=[A, B]))
    freeze(swarm, B, closing(total_weight=2.0))
    swarm.run(asyncio.sleep(0.5))
    assert tickets(swarm, B), "it waits for the part of the other one"
    swarm.run(swarm.servers[B].step_out())
    swarm.run(asyncio.sleep(0.0))
    assert set(threads) == {threading.current_thread()}, "no other thread may cancel a task"
    assert not tickets(swarm, B)
    assert not [task for task in asyncio.all_tasks(swarm.loop) if "_average_round" in repr(task)]


_LATE_S = (0.0, 0.0005, 0.0015, 0.0025, 0.0045, 0.01, 1.0, 31.0)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "settings",
    [{}, {"delays": True}, {"compression": Compression(averaging="powersgd", rank=1)}],
    ids=["plain", "delays", "powersgd"],
)
def test_copies_of_requests_that_come_late_end_no_round(make_swarm: MakeSwarm, settings: dict[str, Any]) -> None:
    """They may come at any point of a step, and leave the step's weights unchanged."""

    def train(*, copies: bool) -> Swarm:
        swarm = make_swarm("a b c", "d b c", **settings)
        tasks, copied = TaskOwner(), set[str]()
        swarm.run(tasks.start())
        for server in swarm.servers.values():
            handlers = server._transport._call_handlers  # type: ignore[attr-defined]
            for name in (FREEZE.name, AVERAGE.name) if copies else ():

                async def again(caller: PeerId, body: bytes, name: str = name, handler: Any = handlers[name]) -> Any:
                    async def later(after_s: float) -> None:
                        await asyncio.sleep(after_s)
                        with contextlib.suppress(SwarmError):  # most are refused
                            await handler(caller, body)
                            copied.add(name)

                    for after_s in _LATE_S:
                        tasks.spawn(later(after_s))
                    return await handler(caller, body)

                handlers[name] = again
        trainer = Replayer(swarm)
        records = [swarm.run(trainer.step(*batch_of(step, 6))) for step in range(4)]
        assert [record.closing.round for record in records] == [0] * 4
        swarm.settle()
        swarm.run(tasks.close())
        assert copied == ({FREEZE.name, AVERAGE.name} if copies else set())
        assert not any(server.events.counts for server in swarm.servers.values())
        assert not [name for peer in swarm.servers for name in tickets(swarm, peer)]
        return swarm

    found, expected = train(copies=True).weights(), train(copies=False).weights()
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
