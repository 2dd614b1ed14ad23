"""The start of a run: each server's stage, the search for servers, and wrong announcements."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from lightning_swarm.coordinator import server_calls
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ConfigError, DeadlineExceeded, PeerError, Unreachable
from lightning_swarm.monitor import survey
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.peer.arrivals import Arrivals
from lightning_swarm.peer.discovery import RunDirectory, ServerAnnouncement, WantedServers, assign
from lightning_swarm.protocol.messages.reports import PeerReport
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import LEAVE
from tests.unit.conftest import MakeSwarm

RUN = "run"
REPORT = PeerReport(run_id=RUN, age_s=1.0, sent_bytes=0, received_bytes=0, server=None)


def servers(count: int) -> list[Member]:
    return [Member(peer_id=PeerId(f"peer-{i}"), boot_id=i) for i in range(count)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_servers", [1, 2, 3, 4, 7, 16])
def test_the_assignment_is_balanced(num_stages: int, num_servers: int) -> None:
    members = servers(num_servers)
    rosters = assign(num_stages, members)

    assert len(rosters) == num_stages
    assert all(rosters)
    loads = Counter(member.peer_id for roster in rosters for member in roster)
    assert len(loads) == num_servers or num_servers > num_stages
    if num_servers >= num_stages:
        assert set(loads.values()) == {1}
        sizes = [len(roster) for roster in rosters]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == num_servers, "nobody idles"
    else:
        assert max(loads.values()) - min(loads.values()) <= 1
        holders = [members.index(member) for (member,) in rosters]
        assert holders == sorted(holders, reverse=True), "neighbouring stages are together"
    assert rosters[-1][0] == members[0], "what goes to the starter's trainer stays on its machine"


class Town:
    """A directory, and peers that use it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.network = MemoryNetwork(latency_s=0.01)
        self.seeker = self.network.transport("seeker")
        self.checks = 0

    def directory(self, transport: MemoryTransport) -> RunDirectory:
        return RunDirectory(self.network.directory(transport), transport, RUN)

    def announce(self, name: str, boot_id: int = 7, *, trains: bool = False) -> MemoryTransport:
        transport = self.network.transport(name)
        self.loop.run_until_complete(self.directory(transport).announce(boot_id, trains=trains, timeout=1.0))
        return transport

    def announce_raw(self, name: str, value: bytes) -> None:
        transport = self.network.transport(name)
        directory = self.network.directory(transport)
        self.loop.run_until_complete(directory.announce(f"{RUN}.servers", value, ttl_s=100.0))

    def find(
        self, count: int, timeout: float = 60.0, check: Callable[[], None] | None = None, *, num_trainers: int = 0
    ) -> Any:
        check = check or self._check
        wanted = WantedServers(num_servers=count, num_trainers=num_trainers)
        invited = Arrivals(self.seeker).invited
        return self.directory(self.seeker).find_servers(wanted, timeout=timeout, check=check, invited=invited)

    def _check(self) -> None:
        self.checks += 1


@pytest.fixture
def town(loop: VirtualLoop) -> Town:
    return Town(loop)


def test_whoever_announces_is_found(town: Town) -> None:
    for name in ("c", "a", "b"):
        town.announce(name, boot_id=ord(name))
    found = town.loop.run_until_complete(town.find(3))
    assert found == [Member(peer_id=PeerId(name), boot_id=ord(name)) for name in "abc"]
    assert town.loop.run_until_complete(town.find(2)) == found, "nobody is left out"


def test_it_waits_until_enough_have_come(town: Town) -> None:
    town.announce("a")
    finding = town.loop.create_task(town.find(2))
    town.loop.run_until_complete(asyncio.sleep(30.0))
    assert not finding.done()
    assert town.checks > 10, "it looks after those who were to come"
    town.announce("b")
    assert len(town.loop.run_until_complete(finding)) == 2


def test_it_gives_up_and_says_how_many_came(town: Town) -> None:
    town.announce("a")
    with pytest.raises(DeadlineExceeded, match=r"1 of 2 servers came within 60 s.*start_timeout"):
        town.loop.run_until_complete(town.find(2))
    assert 60.0 <= town.loop.time() <= 62.0


def test_a_server_that_waits_is_not_taken_for_a_trainer(town: Town) -> None:
    town.announce("a", trains=True)
    town.announce("b")
    with pytest.raises(DeadlineExceeded, match=r"2 of 2 servers and 1 of 2 trainers came within 60 s"):
        town.loop.run_until_complete(town.find(2, num_trainers=2))
    town.announce("c", trains=True)
    assert len(town.loop.run_until_complete(town.find(2, num_trainers=2))) == 3


def test_it_stops_when_waiting_has_become_pointless(town: Town) -> None:
    def check() -> None:
        if town.loop.time() > 5.0:
            raise ConfigError("a child died")

    with pytest.raises(ConfigError, match="a child died"):
        town.loop.run_until_complete(town.find(1, check=check))
    assert town.loop.time() < 6.0


@pytest.mark.parametrize(
    "value",
    [b"", b"\xff", b"nonsense", encode(ServerAnnouncement(boot_id=1, addresses=[]))[:-1], encode(servers(1)[0])],
    ids=["empty", "reserved", "text", "truncated", "another record"],
)
def test_malformed_announcements_are_left_out(town: Town, value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    town.announce_raw("0-malformed", value)
    town.announce("a")
    assert [member.peer_id for member in town.loop.run_until_complete(town.find(1))] == ["a"]
    assert "0-malformed" in caplog.text
    with pytest.raises(DeadlineExceeded, match="1 of 2"):
        town.loop.run_until_complete(town.find(2))


@pytest.mark.parametrize("address", ["/ip4/127.0.0.1/tcp/9/p2p/nobody", "nonsense", ""])
def test_servers_that_cannot_be_reached_are_no_servers(town: Town, address: str) -> None:
    """Remains of a dead run, or a stranger's announcement, do not keep a run from beginning."""
    town.announce_raw("0-gone", encode(ServerAnnouncement(boot_id=1, addresses=[address])))
    town.announce("a")
    assert [member.peer_id for member in town.loop.run_until_complete(town.find(1))] == ["a"]
    town.loop.run_until_complete(town.directory(town.seeker).connect_all())


def test_a_peer_that_announces_addresses_of_another_is_left_out(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    other = town.announce("b")
    (address,) = town.loop.run_until_complete(other.addresses())
    town.announce_raw("a", encode(ServerAnnouncement(boot_id=1, addresses=["/ip4/127.0.0.1/tcp/9/p2p/a", address])))
    assert [member.peer_id for member in town.loop.run_until_complete(town.find(1))] == ["b"]
    assert "Ignored the announcement of a: a peer may announce only its own addresses, got one of b" in caplog.text


def test_what_is_wrong_with_an_announcement_is_said_once_in_a_life(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    directory, gone = town.directory(town.seeker), PeerId("0-gone")
    town.announce_raw("0-malformed\x1b[2J", b"nonsense")
    for boot_id, num_looks in ((1, 3), (2, 2)):
        town.announce_raw(gone, encode(ServerAnnouncement(boot_id=boot_id, addresses=["nonsense"])))
        for _ in range(num_looks):
            town.loop.run_until_complete(directory.connect_all())  # warns of no peer that may be long dead
            town.loop.run_until_complete(directory._connect(town.loop.run_until_complete(directory.announced())))
        town.network.kill(gone)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.split(",")[0] for text in warned if "reach" in text] == ["Cannot reach server 0-gone"] * 2
    assert len(warned) == 3
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_an_announcement_is_repeated_until_somebody_takes_it(town: Town) -> None:
    transport = town.network.transport("a")
    directory = town.directory(transport)
    town.network.freeze(PeerId("a"))
    announcing = town.loop.create_task(directory.announce(7, timeout=60.0))
    town.loop.run_until_complete(asyncio.sleep(10.0))
    town.network.thaw(PeerId("a"))
    town.loop.run_until_complete(announcing)
    assert len(town.loop.run_until_complete(town.find(1))) == 1

    town.network.freeze(PeerId("a"))
    with pytest.raises(Unreachable):
        town.loop.run_until_complete(directory.announce(7, timeout=5.0))


def test_what_a_peer_announced_is_there_for_as_long_as_the_peer(town: Town) -> None:
    transport = town.network.transport("a")
    directory = town.directory(transport)
    town.announce("gone")
    town.loop.run_until_complete(directory.announce(7, timeout=5.0))
    town.loop.run_until_complete(directory.announce_run(PeerId("a")))
    renewing = town.loop.create_task(directory.renew())
    seeker = town.directory(town.seeker)
    for _ in range(5):
        town.loop.run_until_complete(asyncio.sleep(3600.0))
        town.network.freeze(PeerId("a"))  # a failed renewal is repeated
        town.loop.run_until_complete(asyncio.sleep(900.0))
        town.network.thaw(PeerId("a"))
        town.loop.run_until_complete(asyncio.sleep(900.0))
        assert [*town.loop.run_until_complete(seeker.announced())] == ["a"]
        assert town.loop.run_until_complete(seeker.find_runs()) == ["a"]
    renewing.cancel()
    town.loop.run_until_complete(asyncio.sleep(2 * 3600.0))
    assert not town.loop.run_until_complete(seeker.announced())
    assert not town.loop.run_until_complete(seeker.find_runs())


def test_a_joiner_waits_for_no_dead_server_and_hears_of_none(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    names = "coordinator", "living", "dead"
    transports = {name: town.announce(name) for name in names}
    town.loop.run_until_complete(town.directory(transports["coordinator"]).announce_run(PeerId("coordinator")))
    town.network.kill(PeerId("dead"))
    lists = 0

    async def living() -> Mapping[PeerId, Sequence[str]]:
        nonlocal lists
        lists += 1
        return {PeerId(name): await transports[name].addresses() for name in names[:2]}

    survey.answer(transports["coordinator"], lambda: REPORT, living)
    dialed: list[str] = []

    async def connect(addresses: Sequence[str]) -> None:
        dialed.extend(address.rpartition("/")[2] for address in addresses)

    town.seeker.connect = connect  # type: ignore[method-assign]
    seeker = town.directory(town.seeker)
    assert town.loop.run_until_complete(seeker.find_runs()) == ["coordinator"]
    assert (lists, dialed) == (1, ["coordinator", "living"])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]

    town.network.kill(PeerId("coordinator"))  # without a living peer to ask, each may be alive
    dialed.clear()
    town.loop.run_until_complete(seeker.find_runs())
    assert sorted(dialed) == sorted(names)


def test_a_server_that_left_is_announced_no_more(town: Town) -> None:
    directory = town.directory(town.network.transport("a"))
    town.announce("b")
    town.loop.run_until_complete(directory.announce(7, timeout=5.0))
    seeker = town.directory(town.seeker)
    assert sorted(town.loop.run_until_complete(seeker.announced())) == ["a", "b"]
    town.loop.run_until_complete(directory.withdraw())
    town.loop.run_until_complete(asyncio.sleep(0.1))
    assert [*town.loop.run_until_complete(seeker.announced())] == ["b"]


def test_a_renewal_in_flight_brings_back_nothing_that_was_withdrawn_or_replaced(town: Town) -> None:
    transport = town.network.transport("a")
    directory, seeker, run = town.directory(transport), town.directory(town.seeker), town.loop.run_until_complete
    run(directory.announce(7, timeout=5.0))
    run(directory.announce_run(PeerId("a")))
    published = []
    in_flight, landed = asyncio.Event(), asyncio.Event()
    announce = directory.directory.announce

    async def hold_the_first(key: str, value: bytes, *, ttl_s: float) -> None:
        published.append(key)
        if len(published) == 1:
            in_flight.set()
            await landed.wait()
        await announce(key, value, ttl_s=ttl_s)

    directory.directory.announce = hold_the_first  # type: ignore[method-assign]
    renewing = town.loop.create_task(directory.renew())
    run(in_flight.wait())
    run(directory.announce_run(PeerId("b")))
    landed.set()
    run(asyncio.sleep(1.0))
    assert published == [f"{RUN}.servers", f"{RUN}.run", f"{RUN}.run"]
    assert run(seeker.find_runs()) == ["b"]

    published.clear()
    in_flight.clear()
    landed.clear()
    run(in_flight.wait())
    assert sorted(run(seeker.announced())) == ["a"]
    landed.set()
    run(directory.withdraw())
    run(asyncio.sleep(1.0))
    assert published == [f"{RUN}.servers", f"{RUN}.servers", f"{RUN}.run"], "no more than the two withdrawals"
    assert not run(seeker.announced())
    assert not run(seeker.find_runs())
    renewing.cancel()


def test_trainers_wait_for_the_data_of_their_own_launch(town: Town) -> None:
    """They ignore the data of an earlier run under the same id, which the directory still has."""
    directory = town.directory(town.seeker)
    run = town.loop.run_until_complete
    run(directory.announce_event("first", "prepare_data", b"yes", timeout=1.0))
    assert run(directory.await_event("first", "prepare_data", timeout=1.0)) == b"yes"
    with pytest.raises(DeadlineExceeded, match=r"did not announce `prepare_data` within 60 s"):
        run(directory.await_event("second", "prepare_data", timeout=60.0))


def test_the_end_reaches_all_who_can_be_reached(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", "c")
    swarm.network.kill(PeerId("b"))
    swarm.run(server_calls.dismiss(swarm.trainer, swarm.steps.run.servers, timeout=1.0))
    assert [server.admission.left.is_set() for server in swarm.servers.values()] == [True, False, True]


def test_the_end_is_told_again_where_it_was_lost_and_to_those_that_missed_the_last_generation(
    make_swarm: MakeSwarm,
) -> None:
    swarm = make_swarm("a", "b", "c")
    handlers = swarm.servers[PeerId("a")]._transport._call_handlers
    answer = handlers[LEAVE.name]
    heard = []

    async def lose(caller: PeerId, body: bytes) -> bytes:
        heard.append(caller)
        if len(heard) == 1:
            await asyncio.sleep(5.0)
        return await answer(caller, body)

    handlers[LEAVE.name] = lose
    swarm.run(swarm.servers[PeerId("c")].release())
    for stage in swarm.steps.run.rosters:
        stage[:] = [member for member in stage if member.peer_id != "c"]
    assert PeerId("c") not in swarm.steps.run.servers
    swarm.run(server_calls.dismiss(swarm.trainer, [*swarm.steps.run.servers, PeerId("c")], timeout=1.0))
    assert heard == [swarm.trainer.peer_id] * 2
    assert [server.admission.left.is_set() for server in swarm.servers.values()] == [True, True, True]


def test_a_server_that_is_gone_fails_the_admission(make_swarm: MakeSwarm) -> None:
    from lightning_swarm.peer.discovery import admit

    swarm = make_swarm("a", "b", admit=False)
    swarm.network.kill(PeerId("b"))
    with pytest.raises(PeerError):
        swarm.run(admit(swarm.trainer, swarm.manifest, swarm.stages, timeout=1.0))
