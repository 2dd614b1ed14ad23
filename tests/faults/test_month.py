"""A run of a month, in which peers come and go, keeps as much in memory in its last two weeks as in its first two."""

from __future__ import annotations

import asyncio
import gc
import logging
import types
from collections import Counter, deque
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm import network
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import liveness
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol import events, run_state
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET, quiet_warnings
from tests.parity.models import DigitsMLP

DAY_S = 86400.0
NUM_STEPS = 60
TURN = 4  # steps
STEP_S = 31 * DAY_S / (NUM_STEPS - TURN)  # no time passes before the first server has joined
_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
_OUTSIDE = (
    *(
        logging.Handler,
        types.ModuleType,
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.FrameType,
        types.CodeType,
    ),
    *(torch.Tensor, torch.nn.Module, asyncio.AbstractEventLoop, MemoryNetwork, InMemoryStrategy, L.Trainer),
)
"""Objects that are not part of a peer, or whose size does not depend on the run's history."""

LOWERED: list[tuple[Any, str, int]] = [
    (network, "_MAX_COUNTS", 64),
    (network, "_MAX_LINKS", 6),
    (liveness, "_MAX_KNOWN", 6),
    (run_state, "_MAX_REMEMBERED", 4),
    (events, "_MAX_KEPT", 8),
]
"""Bounds that a month of this test would not reach. Without one of them, the peer would still grow."""


def census(peer: Peer) -> Counter[str]:
    """Count the items of all containers that a peer refers to, by the end of the shortest path of types to them."""
    sizes: Counter[str] = Counter()
    seen = {id(peer)}
    todo: deque[tuple[Any, tuple[str, ...]]] = deque([(peer, ("Peer",))])
    while todo:
        owner, path = todo.popleft()
        if isinstance(owner, _CONTAINERS):
            sizes[".".join(path)] += len(owner)
        for value in gc.get_referents(owner):
            if id(value) not in seen and not isinstance(value, (*_OUTSIDE, Peer, str, bytes, int, float)):
                seen.add(id(value))
                todo.append((value, (*path[-2:], type(value).__name__)))
    return sizes


class Month(L.Callback):
    """In turns, a server joins, computes, and dies, and two days pass."""

    def __init__(self) -> None:
        self.largest: list[Counter[str]] = [Counter(), Counter()]  # in the first and the second half of the month
        self.num_joined = self.num_killed = 0
        self.days = 0.0
        self._newest: Any = None

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        run = strategy.peers[0].runtime.run
        run(asyncio.sleep(1.0))
        turn = trainer.global_step % TURN
        if turn == 0:
            gc.collect()
            self.largest[trainer.global_step > NUM_STEPS // 2] |= census(strategy.peers[0])
            self._newest = strategy.join()
        elif turn == TURN - 1 and self._newest is not None:
            self.num_joined += self._newest.membership.is_member
            run(self._kill(strategy))
            run(asyncio.sleep(30.0))  # all calls under way end
            strategy.virtual_loop._jump(TURN * STEP_S)
            run(asyncio.sleep(1.0))
        self.days = strategy.virtual_loop.time() / DAY_S

    async def _kill(self, strategy: InMemoryStrategy) -> None:
        strategy.kill_peer(self._newest.membership.me.peer_id)
        self._newest = None
        self.num_killed += 1


@pytest.mark.thorough
def test_memory_does_not_grow_in_a_month(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in LOWERED:
        assert getattr(module, name) > value
        monkeypatch.setattr(module, name, value)
    month = Month()
    limits = Limits(silence_timeout=5.0, revive_timeout=20.0, call_timeout=60.0, snapshot_interval=2 * STEP_S)
    strategy = InMemoryStrategy(num_stages=2, microbatch_size=2, latency_s=0.01, limits=limits)
    options: dict[str, Any] = {**QUIET, "max_steps": NUM_STEPS, "max_epochs": -1, "devices": 4}
    with quiet_warnings():
        trainer = L.Trainer(**options, strategy=strategy, callbacks=[month])
        trainer.fit(DigitsMLP(), DataLoader(TensorDataset(torch.ones(8, 64), torch.zeros(8, dtype=torch.long)), 2))
    assert month.days >= 30.0
    assert month.num_killed >= NUM_STEPS // TURN - 1
    assert month.num_joined >= NUM_STEPS // TURN - 1
    # What keeps something of each dead peer, or of each step, grows by as many items as peers die in half a month.
    first, last = month.largest
    least = NUM_STEPS // TURN // 2 - 2
    grown = {path: (first[path], size) for path, size in last.items() if size - first[path] >= least}
    assert not grown
