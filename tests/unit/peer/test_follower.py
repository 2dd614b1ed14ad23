"""If several programs would begin one run at the same time, exactly one does."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import AccessDenied, DeadlineExceeded, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Role
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.peer.follower import Claim, find_run
from lightning_swarm.protocol.messages.membership import ClaimReply
from lightning_swarm.protocol.messages.run import RunView, SeatedMembers
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import CLAIM, RPCS, VIEW
from lightning_swarm.strategy.strategy import SwarmStrategy
from tests.access import Gullible, InvitedNetwork, ban_of, certificate_of
from tests.unit.conftest import MakeSwarm


def config() -> SwarmConfig:
    return SwarmStrategy(role="both", target_batch_size=4, limits=Limits(start_timeout=30.0)).config


class World:
    """Programs on one network."""

    def __init__(self, loop: VirtualLoop, network: MemoryNetwork | None = None) -> None:
        self.loop = loop
        self.network = network or MemoryNetwork(latency_s=0.01)
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


def test_who_never_gives_way_is_named_and_banned(loop: VirtualLoop) -> None:
    """It would keep the run from beginning as long as it lives."""
    world = World(loop, InvitedNetwork())
    world.claim("b")
    rival = world.network.transport("a")

    async def never(caller: PeerId, body: bytes) -> bytes:
        return encode(ClaimReply(gives_way=False))

    rival.handle_call(CLAIM.name, never)
    announced = RunDirectory(world.network.directory(rival), rival, "swarm").announce_starter(timeout=1.0)
    loop.run_until_complete(announced)
    begun_s = loop.time()
    with pytest.raises(DeadlineExceeded, match=r"did not begin it within 30 s: one of \['a'\].*lightning-swarm ban"):
        loop.run_until_complete(world.claims[PeerId("b")].settle())
    assert 30.0 <= loop.time() - begun_s < 35.0
    world.claims[PeerId("b")]._transport.ban(ban_of("a"))
    assert loop.run_until_complete(world.settle("b")) == "begins"


def test_a_server_neither_claims_the_run_nor_keeps_a_trainer_from_it(loop: VirtualLoop) -> None:
    roles = {"a": Role.SERVER, "b": Role.TRAINER}
    world = World(loop, InvitedNetwork(role_of=lambda peer: roles[peer]))
    for name in "ab":
        world.claim(name)
    server = world.claims[PeerId("a")]._transport
    announced = RunDirectory(world.network.directory(server), server, "swarm").announce_starter(timeout=1.0)
    loop.run_until_complete(announced)
    with pytest.raises(AccessDenied, match=r"the role trainer may call `run.claim`"):
        loop.run_until_complete(server.call(PeerId("b"), CLAIM.name, b"", timeout=1.0))
    assert loop.run_until_complete(world.settle("b")) == "begins"


def test_a_forged_run_is_none_however_new_it_claims_to_be(loop: VirtualLoop, make_swarm: MakeSwarm) -> None:
    manifest = structs.replace(make_swarm("a").manifest, run_id="swarm")
    seats = SeatedMembers(rosters=[], voters=[], trainers=manifest.trainers)
    network = InvitedNetwork()
    joiner, true, forged = (network.transport(name) for name in ("joiner", "true", "forged"))
    forged.set_credentials(Gullible(certificate_of(forged.peer_id, run=b"another owner's")), RPCS)
    for transport, generation in ((true, 0), (forged, 9)):
        own = structs.replace(manifest, generation=generation, coordinator=transport.peer_id)
        shown = encode(RunView(manifest=own, version=0, seats=seats, term=(0, transport.peer_id, 0)))

        async def show(caller: PeerId, body: bytes, shown: bytes = shown) -> bytes:
            return shown

        transport.handle_call(VIEW.name, show)
        announced = RunDirectory(network.directory(transport), transport, "swarm").announce_run(transport.peer_id)
        loop.run_until_complete(announced)
    directory = RunDirectory(network.directory(joiner), joiner, "swarm")
    assert sorted(loop.run_until_complete(directory.find_runs())) == ["forged", "true"]
    found = loop.run_until_complete(find_run(directory, config()))
    assert found is not None
    assert found.manifest.coordinator == "true"


def test_in_an_audited_run_keepers_alone_are_believed_to_coordinate(
    loop: VirtualLoop, caplog: pytest.LogCaptureFixture
) -> None:
    network = InvitedNetwork(role_of=lambda peer: Role.KEEPER if peer in ("k", "gone") else Role.SERVER)
    transports = {name: network.transport(name) for name in ("joiner", "k", "liar", "gone")}
    for name in ("k", "liar", "gone"):
        transport = transports[name]
        directory = RunDirectory(network.directory(transport), transport, "swarm")
        loop.run_until_complete(directory.announce_run(transport.peer_id))
    network.kill(PeerId("gone"))
    joiner = transports["joiner"]
    seeker = RunDirectory(network.directory(joiner), joiner, "swarm", only_keepers=True)
    assert loop.run_until_complete(seeker.find_runs()) == ["k"]
    (message,) = caplog.messages
    assert message.startswith("Ignored the run that gone is said to coordinate: ")


def test_a_claim_takes_no_arguments(loop: VirtualLoop) -> None:
    world = World(loop)
    claim = world.claim("b")
    stranger = world.network.transport("a")
    with pytest.raises(ProtocolError, match="takes no arguments"):
        loop.run_until_complete(stranger.call(PeerId("b"), CLAIM.name, b"x", timeout=1.0))
    assert not claim._gave_way
