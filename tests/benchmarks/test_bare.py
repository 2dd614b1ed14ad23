"""The steps without safeguards, with which `benchmarks.overhead` compares ordinary steps."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.bare import BLOCK, is_bare, taking_turns
from benchmarks.overhead import ratios
from benchmarks.runs import Steps
from benchmarks.train import Blocks, Noise, Nop
from lightning_swarm.client.pipeline.replay_buffer import ReplayBuffer, ReplayCopy
from lightning_swarm.network.access import PING
from lightning_swarm.testing import InMemoryStrategy, local_swarm

NUM_STEPS = 2 * BLOCK + 1
NUM_MICROBATCHES = 4


class Safeguards(L.Callback):
    """Counts each step's voters and pings."""

    def __init__(self, strategy: InMemoryStrategy) -> None:
        self._strategy = strategy
        self.num_voters: list[int] = []
        self.num_pings: list[int] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.num_voters.append(len(self._strategy.servers[0].membership.run.voters))
        self._before = self._pings()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.num_pings.append(self._pings() - self._before)

    def _pings(self) -> int:
        """Return the bytes of pings so far."""
        traffic = [peer.transport.traffic for peer in self._strategy.peers]
        return sum(number for one in traffic for (_, name), number in one.sent_bytes.items() if name == PING)


def test_bare_steps_do_without_safeguards_and_the_others_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [0] * NUM_STEPS
    keep = ReplayBuffer.keep

    async def counted(self: ReplayBuffer, copy: ReplayCopy) -> None:
        kept[copy.microbatch.key.step] += 1
        await keep(self, copy)

    monkeypatch.setattr(ReplayBuffer, "keep", counted)
    # A microbatch takes longer than the silence timeout, so that peers ping each other.
    options: dict[str, Any] = {"microbatch_size": 1, "microbatch_s": [4.0], "latency_s": 0.01}
    with taking_turns(), local_swarm(5, num_stages=2, role="trainer", **options) as swarm:
        trainer = swarm.trainer(max_steps=NUM_STEPS)
        seen = Safeguards(swarm.strategies[0])
        trainer.callbacks.append(seen)  # type: ignore[attr-defined]
        trainer.fit(Blocks(8, 2, Nop), DataLoader(Noise(8, NUM_STEPS * NUM_MICROBATCHES, 1), NUM_MICROBATCHES))
    bare = [is_bare(step) for step in range(NUM_STEPS)]
    assert trainer.global_step == NUM_STEPS
    assert sum(bare) == BLOCK
    assert seen.num_voters == [1 if alone else 3 for alone in bare]
    assert kept == [0 if alone else NUM_MICROBATCHES for alone in bare]
    # Peers still monitor an exchange of the previous step, so a block's first step has an untypical number of pings.
    inside = [step for step in range(1, NUM_STEPS) if bare[step] == bare[step - 1]]
    assert max(seen.num_pings[step] for step in inside if bare[step]) < min(
        seen.num_pings[step] for step in inside if not bare[step]
    )


def test_the_package_is_as_before_afterwards() -> None:
    keep = ReplayBuffer.keep
    with taking_turns():
        assert ReplayBuffer.keep is not keep
    assert ReplayBuffer.keep is keep


def test_each_bare_block_is_compared_with_its_neighbours() -> None:
    """Safe steps take 2 s and bare steps 1 s; the run's first step is excluded."""
    at_s = [0.0]
    for step in range(2, 3 * BLOCK + 1):
        at_s.append(at_s[-1] + (1.0 if is_bare(step) else 2.0))
    assert ratios(Steps(at_s, [1] * len(at_s))) == [0.5]
