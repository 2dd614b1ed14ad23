"""In an audited run only keepers vote, coordinate and lead, even after deaths and requests of other peers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.record_check import check_record
from lightning_swarm.coordinator.takeover import seniority
from lightning_swarm.core.errors import Busy, NotCoordinator, PeerError, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Role
from lightning_swarm.peer import failover
from lightning_swarm.peer.lifecycle import MembershipLifecycle, RunContacts
from lightning_swarm.protocol.messages.run import CoordinatorTerm, InheritRequest, Manifest, Member, RunView, WatchReply
from lightning_swarm.protocol.messages.step import Candidate, Prepare, Proposal, Vacancy
from lightning_swarm.protocol.messages.wire import WireMessage, decode, encode
from lightning_swarm.protocol.rpc import ANNOUNCE_TERM, INHERIT, PREPARE, PROPOSE, TAKE_OVER, VIEW, WATCH
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.context import RunMembership
from tests.access import InvitedNetwork
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.membership.test_invitations import step_on
from tests.unit.coordinator.test_rollback import go_back, step
from tests.unit.swarm import LEAD as TRAINER
from tests.unit.swarm import TIMEOUTS, Swarm, rows

A, B, C, D, K = map(PeerId, "abcdk")
ONLY = "in a run with strangers only keepers vote, coordinate and lead"
REMEDY = rf"{ONLY}, and a majority of the voters must be alive.*lightning-swarm invite --role keeper"
LIMITS = Limits(call_timeout=30.0, silence_timeout=10.0, stage_timeout=600.0)


def audited(make_swarm: MakeSwarm, keepers: str, *rosters: str, **options: Any) -> Swarm:
    """Return an audited swarm, coordinated by the first server of the first roster."""
    rosters = rosters or ("a b c", "d b c")
    return make_swarm(*rosters, keepers=keepers, trainers=TRAINER, limits=LIMITS, **options)


def call(swarm: Swarm, caller: PeerId, peer: PeerId, method: str, message: WireMessage) -> bytes:
    return swarm.run(swarm.servers[caller]._transport.call(peer, method, encode(message), timeout=30.0))


def kill(swarm: Swarm, peer: PeerId) -> None:
    swarm.network.kill(peer)
    swarm.run(swarm.servers.pop(peer).close())


def voters(swarm: Swarm) -> list[PeerId]:
    return [voter.peer_id for voter in swarm.steps.run.voters]


def coordinators(swarm: Swarm) -> set[PeerId]:
    return {name for name, server in swarm.servers.items() if server.admission.election.coordinator is not None}


def test_only_keepers_come_to_vote(make_swarm: MakeSwarm) -> None:
    """Without keepers three of the four servers would vote."""
    swarm = audited(make_swarm, "a c")
    for seed in range(3):
        swarm.run(step(swarm, seed))
    assert voters(swarm) == [A]
    assert {*swarm.servers} > {A, C}


def test_all_three_vote_if_all_keep(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a b c")
    swarm.run(step(swarm, 0))
    assert voters(swarm) == [A, B, C]


def test_a_second_keeper_takes_over_and_nobody_else_does(make_swarm: MakeSwarm) -> None:
    """There are three keepers, because the single vote of two would be lost with its voter."""
    swarm = audited(make_swarm, "a c e", "a b c e", "d b c e")
    swarm.run(step(swarm, 0))
    assert voters(swarm) == [A, C, PeerId("e")]
    kill(swarm, A)
    swarm.run(step_on(swarm, rows(1), [B, D]))
    assert swarm.steps.run.coordinator in (C, "e")
    assert coordinators(swarm) == {swarm.steps.run.coordinator}
    assert voters(swarm) in ([C], [PeerId("e")])
    assert swarm.steps.run.seats.keepers == [TRAINER, A, C, "e"], "the one that died may come again"


def test_without_another_keeper_the_run_ends_and_says_so(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a", voters="a")
    swarm.run(step(swarm, 0))
    kill(swarm, A)
    with pytest.raises(PeerError, match=rf"no other peer took its place within 600 s.*{REMEDY}"):
        swarm.run(step_on(swarm, rows(1), [B, D]))
    assert coordinators(swarm) == set()
    for server in swarm.servers.values():
        assert server.membership.run.coordinator == A
        assert server.voter.term[1] == A, "nobody stood for election"
    assert swarm.loop.time() > TIMEOUTS.successor_s


def test_a_lead_that_lacks_a_majority_of_keepers_says_so(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a b c")
    swarm.run(step(swarm, 0))
    run = swarm.steps.run
    assert failover.why_lost(run, [A, B, D]) == ""
    assert re.match(rf"only 1 of 3 voters answer; {REMEDY}", failover.why_lost(run, [B, D]))


@pytest.mark.parametrize("is_gone", [False, True], ids=["while-the-coordinator-is-there", "when-it-is-gone"])
def test_what_another_server_asks_of_keepers_is_refused_and_changes_nothing(
    make_swarm: MakeSwarm, is_gone: bool
) -> None:
    swarm = audited(make_swarm, "a c")
    newest = swarm.run(step(swarm, 0))
    asked = [C] if is_gone else [A, C]
    boots = {peer: swarm.members[peer].boot_id for peer in (A, B, C, D)}
    if is_gone:
        kill(swarm, A)
    before = swarm.state()
    term = (2, B, boots[B])
    announced = CoordinatorTerm(term=term, generation=0, version=1)
    record = replaced(newest, closing=replaced(newest.closing, step=1), next_voters=None)
    for peer in asked:
        prepare = Prepare(term=term, boot_id=boots[peer], generation=0, step=1)
        proposal = Proposal(term=term, boot_id=boots[peer], record=record)
        for method, message in (
            (PREPARE.name, prepare),
            (PREPARE.name, replaced(prepare, fence=True)),
            (PROPOSE.name, proposal),
        ):
            with pytest.raises(ProtocolError, match="or its keepers in a run with strangers, not b"):
                call(swarm, B, peer, method, message)
        with pytest.raises(ProtocolError, match=f"{ONLY}: b is no keeper, so it must not coordinate"):
            call(swarm, B, peer, ANNOUNCE_TERM.name, announced)
        with pytest.raises(NotCoordinator, match="coordinated by a"):
            call(swarm, B, peer, TAKE_OVER.name, announced)
        with pytest.raises(NotCoordinator, match="coordinated by a"):
            call(swarm, B, peer, INHERIT.name, InheritRequest(generation=0, new_lead=B, first_step=0))
    assert swarm.state() == before


def test_a_server_that_keeps_nothing_does_not_take_over_though_the_coordinator_asks(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a")
    swarm.run(step(swarm, 0))
    run = swarm.steps.run
    with pytest.raises(ProtocolError, match=f"{ONLY}: b is no keeper, so it must not coordinate"):
        call(swarm, A, B, TAKE_OVER.name, CoordinatorTerm(term=run.term, generation=0, version=run.version))
    with pytest.raises(Busy, match=rf"none of \[\] took over from a as coordinator; {REMEDY}"):
        swarm.run(swarm.servers[A].admission.election.abdicate())
    assert coordinators(swarm) == {A}


def test_a_keeper_takes_over_from_one_that_leaves(make_swarm: MakeSwarm) -> None:
    """It takes over without a vote, as one of two keepers."""
    swarm = audited(make_swarm, "a c")
    swarm.run(step(swarm, 0))
    swarm.run(swarm.servers[A].admission.election.abdicate())
    assert coordinators(swarm) == {C}


def test_only_a_keeper_is_named_to_lead(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a c")
    assert seniority(swarm.steps.run) == [A, C]
    swarm.trainer.die()
    for peer in (B, C, D):
        with pytest.raises(ProtocolError, match=f"{ONLY}: b is no keeper, so it must not lead"):
            call(swarm, A, peer, INHERIT.name, InheritRequest(generation=0, new_lead=B, first_step=0))
        assert swarm.servers[peer].membership.run.manifest.lead == TRAINER


@pytest.mark.thorough
def test_a_term_of_another_server_is_not_followed_whoever_says_that_voters_promised_it(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a c")
    swarm.run(step(swarm, 0))
    term = (2, B, swarm.members[B].boot_id)

    async def lie(caller: PeerId, body: bytes) -> bytes:
        return encode(WatchReply(term=term, version=1, coordinates=True, promised=term))

    for name in (A, B, C, D):
        swarm.servers[name]._transport._call_handlers[WATCH.name] = lie  # type: ignore[attr-defined]
    swarm.run(swarm.steps._coordinator.find_coordinator())
    assert swarm.steps.run.coordinator == A
    swarm.run(asyncio.sleep(60.0))
    assert {server.membership.run.coordinator for server in swarm.servers.values()} == {A}


@pytest.mark.parametrize(("liar", "is_believed"), [(B, False), (C, True)])
def test_a_view_of_another_server_tells_nobody_that_the_run_went_on_without_it(
    make_swarm: MakeSwarm, liar: PeerId, is_believed: bool
) -> None:
    """A keeper's view counts, another server's does not: neither the lead nor a server gives up."""
    swarm = audited(make_swarm, "a c")
    swarm.run(step(swarm, 0))
    run = swarm.steps.run
    view = run.view()
    later = replaced(view.manifest, generation=5, lead=liar)
    seats = replaced(view.seats, rosters=[[one for one in held if one.peer_id != D] for held in view.seats.rosters])
    forged = encode(replaced(view, manifest=later, seats=seats))

    async def lie(caller: PeerId, body: bytes) -> bytes:
        return forged

    async def fail(caller: PeerId, body: bytes) -> bytes:
        raise Busy("it is not there")

    for name, server in swarm.servers.items():
        server._transport._call_handlers[VIEW.name] = lie if name == liar else fail  # type: ignore[attr-defined]

    async def find() -> Sequence[PeerId]:
        return []

    other = swarm.servers[D]
    contacts = RunContacts(run_id="run", find_runs=find)
    life = MembershipLifecycle(other._transport, other, contacts, LIMITS, other.events)

    async def look() -> list[bool]:
        newer = await failover.newer_run(swarm.trainer, run, timeout=5.0)
        return [newer is not None, await life._ask_whether_left_out()]

    assert swarm.run(look()) == [is_believed, is_believed]


# ---------------------------------------------------------------------- records


def test_a_record_whose_voters_are_no_keepers_is_refused(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a b c")
    run = RunState(swarm.manifest)
    record = swarm.run(step(swarm, 0))
    check_record(run, record)
    a, b, c, d = (swarm.members[name] for name in (A, B, C, D))
    assert record.next_voters == [a, b, c]
    for wrong in ([a, b, d], [a], [a, b, c, d], []):
        with pytest.raises(ProtocolError, match="3 members vote"):
            check_record(run, replaced(record, next_voters=wrong))


def test_a_record_without_any_keeper_is_refused(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a")
    run = RunState(swarm.manifest)
    record = swarm.run(step(swarm, 0))
    with pytest.raises(ProtocolError, match="a keeper must stay in the rosters, because only keepers vote"):
        check_record(run, replaced(record, left=[Vacancy(member=swarm.members[A], stage_index=0)]))


def test_a_record_names_newcomers_alone_as_keepers_and_only_where_they_decide(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a")
    record = swarm.run(step(swarm, 0))
    newcomer = Candidate(member=Member(peer_id=K, boot_id=9), stage_index=0, addresses=["/x/p2p/k"])
    named = replaced(record, newcomers=[newcomer], keepers=[K])
    run = RunState(swarm.manifest)
    check_record(run, named)
    assert run.members_after(named).keepers == [TRAINER, A, K]
    for wrong in (replaced(named, keepers=[B]), replaced(named, keepers=[K, K]), replaced(named, newcomers=[])):
        with pytest.raises(ProtocolError, match="a record may name as keepers only its newcomers"):
            check_record(run, wrong)
    swarm = make_swarm("a b c", "d b c")
    record = swarm.run(step(swarm, 0))
    with pytest.raises(ProtocolError, match="only in a run with strangers"):
        check_record(RunState(swarm.manifest), replaced(record, newcomers=[newcomer], keepers=[K]))


def test_a_run_is_begun_by_keepers_or_refused(make_swarm: MakeSwarm) -> None:
    swarm = audited(make_swarm, "a c", admit=False)
    plain = make_swarm("a", admit=False).manifest
    manifest = swarm.manifest
    me = RunMembership(swarm.members[B])
    me.check_admits(TRAINER, manifest)
    wrong: list[tuple[Manifest, PeerId]] = [
        (replaced(manifest, keepers=UNSET), TRAINER),
        (replaced(manifest, keepers=[A, C]), TRAINER),  # without its lead
        (replaced(manifest, coordinator=B), TRAINER),
        (replaced(manifest, voters=[swarm.members[B]]), TRAINER),
        (replaced(plain, keepers=[TRAINER, A]), TRAINER),  # not audited
    ]
    for one, caller in wrong:
        with pytest.raises(ProtocolError, match="a run with strangers must name its keepers, and only they may"):
            me.check_admits(caller, one)


# ---------------------------------------------------------------------- who comes later


def certified(make_swarm: MakeSwarm, **options: Any) -> Swarm:
    """Return a swarm whose keepers are the lead, `a`, and joiners called `k`."""
    network = InvitedNetwork(role_of=lambda peer: Role.KEEPER if peer in (TRAINER, A, K) else Role.SERVER)
    names = ["a", "b", "c", "d", TRAINER]
    return audited(make_swarm, "a", network=network, invitations=network.used_by(names), **options)


def test_a_newcomer_with_a_keeper_s_certificate_decides_from_its_record_on(make_swarm: MakeSwarm) -> None:
    """This also holds after a rollback. A newcomer with another certificate does not vote."""
    swarm = certified(make_swarm)
    swarm.join("k")
    swarm.join("j")
    record = swarm.run(step(swarm, 0))
    assert {one.member.peer_id for one in record.newcomers} == {K, "j"}
    assert record.keepers == [K]
    keepers = [TRAINER, A, K]
    go_back(swarm)
    swarm.run(step(swarm, 1))
    for server in swarm.servers.values():
        assert server.membership.run.electorate.keepers == keepers
        assert server.membership.run.view().seats.keepers == keepers
    swarm.run(swarm.servers[A].admission.election.abdicate())
    assert coordinators(swarm) == {K}


def test_a_voter_refuses_a_keeper_whose_certificate_says_otherwise(make_swarm: MakeSwarm) -> None:
    swarm = certified(make_swarm)
    swarm.join("j")
    record = swarm.run(step(swarm, 0))
    election = swarm.servers[A].admission.election
    false = replaced(record, closing=replaced(record.closing, step=1), keepers=["j"], next_voters=None, left=[])
    newcomers = [replaced(record.newcomers[0], member=Member(peer_id=PeerId("j"), boot_id=9))]
    with pytest.raises(ProtocolError, match="names j as a keeper, and its certificate does not"):
        election._check_record(replaced(false, newcomers=newcomers, invited={PeerId("j"): record.invited["j"]}))


def test_a_joiner_believes_keepers_alone(make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """A member that claims the run for itself gets no request to join."""
    swarm = certified(make_swarm)
    swarm.run(step(swarm, 0))
    server = swarm.add_server("j")
    handlers = swarm.servers[B]._transport._call_handlers  # type: ignore[attr-defined]
    honest = handlers[VIEW.name]

    async def lie(caller: PeerId, body: bytes) -> bytes:
        return encode(replaced(decode(await honest(caller, body), RunView), term=(9, B, 1)))

    handlers[VIEW.name] = lie
    found = [B]

    async def find() -> Sequence[PeerId]:
        return found

    async def enter() -> None:
        entering = asyncio.create_task(server.joiner.enter(find))
        await asyncio.sleep(60.0)
        assert server.membership.joining is None
        found.append(A)
        await asyncio.sleep(10.0)
        assert server.membership.joining == A
        await step(swarm, 1)
        await entering

    with caplog.at_level(logging.INFO):
        swarm.run(enter())
    assert (
        "only a keeper may show a run with strangers to joining peers, and b is not among the run's keepers"
        in caplog.text
    )
    assert server.membership.is_member


def test_a_joiner_takes_the_members_from_the_coordinator_not_from_its_donor(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = certified(make_swarm)
    swarm.run(step(swarm, 0))
    server = swarm.add_server("j")
    seen = []
    seat = server.joiner._adopt_members

    def lied(version: int, seats: Any) -> bool:
        if not seen:  # the donor's statement comes first
            seats = replaced(seats, keepers=[*seats.keepers, B])
        seen.append(seats.keepers)
        return seat(version, seats)

    monkeypatch.setattr(server.joiner, "_adopt_members", lied)

    async def find() -> Sequence[PeerId]:
        return [A]

    swarm.joining.append(swarm.loop.create_task(server.joiner.enter(find)))
    swarm.run(asyncio.sleep(5.0))
    assert seen[:2] == [[TRAINER, A, B], [TRAINER, A]]
    swarm.run(step(swarm, 1))
    assert server.membership.is_member
    assert server.membership.run.electorate.keepers == [TRAINER, A]
