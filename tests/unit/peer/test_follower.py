"""Programs that would begin one run at once: exactly one does."""

from __future__ import annotations

import asyncio

import pytest

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.peer.follower import CLAIM, Claim
from lightning_swarm.protocol.messages.run import RunView
from lightning_swarm.strategy.strategy import SwarmStrategy


def config() -> SwarmConfig:
    return SwarmStrategy(role="both", target_batch_size=4, limits=Limits(start_timeout=30.0)).config


class World:
    """Programs on one network."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.network = MemoryNetwork(latency_s=0.01)
        self.claims: dict[PeerId, Claim] = {}

    def claim(self, name: str) -> Claim:
        transport = self.network.transport(name)
        made = self.claims[PeerId(name)] = Claim(
            RunDirectory(self.network.directory(transport), transport, "swarm"), config()
        )
        return made

    async def settle(self, name: str, *, after_s: float = 0.0) -> RunView | str | None:
        claim = self.claims[PeerId(name)]
        await asyncio.sleep(after_s)
        try:
            await claim.settle()
        except DeadlineExceeded:
            return "gave way"
        return "begins"


@pytest.mark.each_value
@pytest.mark.parametrize("names", ["ab", "ba", "abc", "cba"])
@pytest.mark.parametrize("apart_s", [0.0, 0.005, 0.02, 0.05, 1.0])
def test_exactly_one_of_several_begins(loop: VirtualLoop, names: str, apart_s: float) -> None:
    world = World(loop)
    for name in names:
        world.claim(name)

    async def go() -> list[RunView | str | None]:
        return await asyncio.gather(*(world.settle(one, after_s=i * apart_s) for i, one in enumerate(names)))

    answers = loop.run_until_complete(go())
    assert sorted(map(str, answers)) == ["begins", *["gave way"] * (len(names) - 1)]


def test_one_that_died_keeps_nobody_from_it(loop: VirtualLoop) -> None:
    world = World(loop)
    for name in "ab":
        world.claim(name)
    assert loop.run_until_complete(world.settle("a")) == "begins"
    world.network.kill(PeerId("a"))
    assert loop.run_until_complete(world.settle("b")) == "begins"


def test_a_claim_takes_no_arguments(loop: VirtualLoop) -> None:
    world = World(loop)
    claim = world.claim("b")
    stranger = world.network.transport("a")
    with pytest.raises(ProtocolError, match="takes no arguments"):
        loop.run_until_complete(stranger.call(PeerId("b"), CLAIM, b"x", timeout=1.0))
    assert not claim._gave_way
