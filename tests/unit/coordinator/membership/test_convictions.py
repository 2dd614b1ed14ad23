"""A convicted peer stays out of the run after any rollback, and learns the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace as replaced

from lightning_swarm.coordinator.record_check import check_record
from lightning_swarm.coordinator.step.reconcile import ReconciledStep, SumReconciliation
from lightning_swarm.core.errors import AccessDenied, NotMember, PeerError, ProtocolError, StepError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.peer.arrivals import Arrivals, known_peers
from lightning_swarm.protocol.keepers import convicted_after
from lightning_swarm.protocol.messages.membership import FollowRequest, JoinRequest, ReadyRequest
from lightning_swarm.protocol.messages.run import MAX_CONVICTED, MAX_REASON, Conviction, Member, StepRequest
from lightning_swarm.protocol.messages.step import Candidate, Record
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, WireMessage, encode
from lightning_swarm.protocol.rpc import FOLLOW, JOIN, MEET, PULL, READY
from lightning_swarm.protocol.run_state import RunState
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.membership.test_invitations import step_on
from tests.unit.coordinator.test_rollback import go_back, step
from tests.unit.swarm import LEAD, Swarm, key, rows

A, B, C, D, G = map(PeerId, "abcdg")
REASON = "its output was not that of its weights"
DENIED = f"a convicted peer may not take part in the run.*b was convicted: {REASON}"


@pytest.fixture
def audits(monkeypatch: pytest.MonkeyPatch) -> dict[PeerId, str]:
    """Peers that the audits of closing steps convict, with the reason."""
    found: dict[PeerId, str] = {}
    close = SumReconciliation.close

    async def closed(self: SumReconciliation) -> ReconciledStep | None:
        for peer, reason in found.items():
            if peer in self.step_servers.peers:
                self.step_servers.exclude(peer, StepError(reason))
        self.convicted.update(found)
        return await close(self)

    monkeypatch.setattr(SumReconciliation, "close", closed)
    return found


def audited(make_swarm: MakeSwarm, *rosters: str, **options: Any) -> Swarm:
    return make_swarm(*(rosters or ("a b c", "d b c")), keepers="a c", trainers=LEAD, **options)


def holders(record: Record, swarm: Swarm) -> set[str]:
    return set("".join(swarm.names_after(record)))


async def convicted(swarm: Swarm, audits: dict[PeerId, str], *peers: PeerId, seed: int = 0) -> Record:
    """Decide a step that sends the peers no microbatch, and convicts them."""
    audits.update(dict.fromkeys(peers, REASON))
    route = [next(peer for peer in roster if peer not in peers) for roster in swarm.rosters]
    grant = await swarm.steps.grant(2)
    k = key(grant.first, step=grant.step, generation=grant.generation)
    await swarm.through(k, rows(seed), route=route, weight=grant.weight)
    await swarm.steps.done(grant.lease, [k.receipt], close=True)
    record = await swarm.record(swarm.steps.version)
    audits.clear()
    return record


def test_its_record_leaves_it_out_of_all_stages_and_everybody_knows(
    make_swarm: MakeSwarm, audits: dict[PeerId, str]
) -> None:
    swarm = audited(make_swarm)
    swarm.run(step(swarm, 0))
    record = swarm.run(convicted(swarm, audits, B))
    assert record.convicted == [Conviction(peer=B, reason=REASON)]
    assert [(one.member.peer_id, one.stage_index) for one in record.left] == [(B, 0), (B, 1)]
    assert holders(record, swarm) == {"a", "c", "d"}
    for name in (A, C, D):
        assert swarm.servers[name].membership.run.electorate.convicted == {B: REASON}
        (event,) = [one for one in swarm.events(name) if one.kind == "convicted"]
        assert (event.peer, event.step, event.reason) == (B, 1, REASON)
    after = swarm.run(step_on(swarm, rows(5), [A, D]))
    assert after.convicted is UNSET, "it is told once"
    assert swarm.steps.run.electorate.convicted == {B: REASON}


def call(swarm: Swarm, peer: PeerId, method: str, message: WireMessage) -> bytes:
    return swarm.run(swarm.servers[B]._transport.call(peer, method, encode(message), timeout=30.0))


def asks_to_join(swarm: Swarm) -> None:
    join = JoinRequest(
        protocol_version=PROTOCOL_VERSION, boot_id=77, addresses=[f"/ip4/1.1.1.1/tcp/1/p2p/{B}"], stage_index=None
    )
    for method, message in ((JOIN.name, join), (READY.name, ReadyRequest(generation=0, version=1))):
        with pytest.raises(AccessDenied, match=DENIED):
            call(swarm, A, method, message)


@pytest.mark.parametrize("goes_back", [False, True], ids=["at-once", "after-a-rollback"])
def test_it_is_refused_when_it_joins_again(make_swarm: MakeSwarm, audits: dict[PeerId, str], goes_back: bool) -> None:
    swarm = audited(make_swarm)
    swarm.run(step(swarm, 0))
    swarm.run(convicted(swarm, audits, B))
    if goes_back:
        go_back(swarm)
        for name in (A, C, D):
            assert swarm.servers[name].membership.run.electorate.convicted == {B: REASON}
    before = swarm.state()
    asks_to_join(swarm)
    assert swarm.state() == before
    server = swarm.servers[B]

    async def find() -> Sequence[PeerId]:
        return [A]

    async def again() -> None:
        await server.step_out()
        await server.joiner.enter(find)

    with pytest.raises(AccessDenied, match=DENIED):
        swarm.run(again())


def test_another_coordinator_knows_of_it(make_swarm: MakeSwarm, audits: dict[PeerId, str]) -> None:
    swarm = audited(make_swarm)
    swarm.run(step(swarm, 0))
    swarm.run(convicted(swarm, audits, B))
    swarm.run(swarm.servers[A].admission.election.abdicate())
    assert swarm.servers[C].admission.election.coordinator is not None
    join = JoinRequest(protocol_version=PROTOCOL_VERSION, boot_id=77, addresses=["/x/p2p/b"], stage_index=0)
    with pytest.raises(AccessDenied, match=DENIED):
        call(swarm, C, JOIN.name, join)


def test_servers_answer_it_as_one_of_no_run(make_swarm: MakeSwarm, audits: dict[PeerId, str]) -> None:
    swarm = audited(make_swarm)
    swarm.run(step(swarm, 0))
    swarm.run(convicted(swarm, audits, B))
    for peer in (A, C, D):
        with pytest.raises(ProtocolError, match="records are sent only to the run's servers, got a call of b"):
            call(swarm, peer, PULL.name, StepRequest(generation=0, step=1))
        assert not swarm.servers[peer].membership.knows_server(B)


def test_one_that_comes_back_meanwhile_is_forgotten(make_swarm: MakeSwarm, audits: dict[PeerId, str]) -> None:
    """It has joined anew before its false work was found."""
    swarm = audited(make_swarm)
    swarm.join("g")
    assert swarm.servers[C].membership.knows_server(G)
    record = swarm.run(convicted(swarm, audits, G))
    assert record.newcomers == []
    assert record.convicted == [Conviction(peer=G, reason=REASON)], "late, for one that is absent"
    assert G not in swarm.coordinator.generation.server_membership.waiting
    for name in (A, C, D):
        assert not swarm.servers[name].membership.knows_server(G)
    transport = swarm.servers[G]._transport
    follow = FollowRequest(stage_index=0, version=None, hold_s=0.0)
    with pytest.raises((ProtocolError, NotMember, PeerError), match="did not introduce"):
        swarm.run(transport.stream(C, FOLLOW.name, Message(encode(follow)), timeout=30.0))
    candidate = Candidate(member=Member(peer_id=G, boot_id=1), stage_index=0, addresses=["/x/p2p/g"])
    with pytest.raises(ProtocolError, match="introduced by the coordinator"):
        swarm.run(transport.call(C, MEET.name, encode(candidate), timeout=30.0))


def test_a_keeper_whose_work_is_false_goes_and_is_not_convicted(
    make_swarm: MakeSwarm, audits: dict[PeerId, str]
) -> None:
    swarm = audited(make_swarm)
    record = swarm.run(convicted(swarm, audits, C))
    assert record.convicted is UNSET
    assert {one.member.peer_id for one in record.left} == {C}


def test_a_long_reason_is_cut(make_swarm: MakeSwarm, audits: dict[PeerId, str]) -> None:
    swarm = audited(make_swarm)
    audits[B] = "x" * 1000
    record = swarm.run(step_on(swarm, rows(0), [A, D]))
    assert record.convicted == [Conviction(peer=B, reason="x" * MAX_REASON)]


# ---------------------------------------------------------------------- records


def test_what_no_record_may_say_of_convictions_is_refused(make_swarm: MakeSwarm, audits: dict[PeerId, str]) -> None:
    swarm = audited(make_swarm)
    before = swarm.steps.run.seats
    record = swarm.run(convicted(swarm, audits, B))
    run = RunState(swarm.manifest)
    run.set_members(before)
    check_record(run, record)
    one = Conviction(peer=B, reason=REASON)
    back = Candidate(member=Member(peer_id=B, boot_id=9), stage_index=0, addresses=["/x/p2p/b"])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"left": []}, "must not be convicted, got \\['b'\\]"),
        ({"left": record.left[:1]}, "must not be convicted, got \\['b'\\]"),
        ({"newcomers": [back]}, "must not be convicted, got \\['b'\\]"),
        ({"convicted": [one, one]}, "must convict each peer once"),
        ({"convicted": [replaced(one, peer=C)]}, "keepers must not be convicted, got \\['c'\\]"),
        ({"convicted": [replaced(one, peer=LEAD)]}, "keepers must not be convicted"),
    ]
    for changes, match in wrong:
        with pytest.raises(ProtocolError, match=match):
            check_record(run, replaced(record, **changes))
    run.apply(record)
    later = replaced(record, closing=replaced(record.closing, step=1, absent=[]), left=[], convicted=UNSET)
    check_record(run, replaced(later, next_voters=None))
    with pytest.raises(ProtocolError, match="must not be convicted, got \\['b'\\]"):
        check_record(run, replaced(later, newcomers=[back], next_voters=None))
    with pytest.raises(ProtocolError, match="must not be convicted, got \\['b'\\]"):
        check_record(run, replaced(later, enlisted=[B], next_voters=None))


def test_where_nothing_is_audited_nobody_is_convicted(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b c", "d b c")
    record = swarm.run(step(swarm, 0))
    with pytest.raises(ProtocolError, match="only a run with strangers may convict peers"):
        check_record(
            RunState(swarm.manifest), replaced(record, convicted=[Conviction(peer=PeerId("z"), reason=REASON)])
        )


# ---------------------------------------------------------------------- checkpoints


def test_a_checkpoint_remembers_who_was_convicted(make_swarm: MakeSwarm, audits: dict[PeerId, str]) -> None:
    """This also holds for a run without invitations."""
    swarm = audited(make_swarm)
    swarm.run(convicted(swarm, audits, B))
    known = known_peers(swarm.steps.run, [])
    assert known is not None
    arrivals = Arrivals(swarm.trainer)
    arrivals.restore(known)
    assert arrivals.convicted == {B: REASON}
    assert arrivals.used is UNSET
    announced: dict[PeerId, Any] = dict.fromkeys((A, B, C))
    assert list(swarm.run(arrivals.invited(announced))) == [A, C]


def test_the_oldest_convictions_make_room_for_new_ones() -> None:
    known = {PeerId(str(number)): REASON for number in range(MAX_CONVICTED)}
    again = Conviction(peer=PeerId("7"), reason="once more")
    found = convicted_after(known, [Conviction(peer=B, reason=REASON), again])
    assert list(found) == [*list(known)[1:], B]
    assert found[PeerId("7")] == REASON


def test_a_rollback_before_the_record_forgets_nobody(make_swarm: MakeSwarm) -> None:
    """The next generation begins with it in its seat, and the first record excludes it."""
    swarm = audited(make_swarm)
    swarm.run(step(swarm, 0))
    coordinator = swarm.servers[A].admission.election.coordinator
    assert coordinator is not None
    coordinator.generation.context.oversight.memory.convicted[B] = REASON
    go_back(swarm)
    assert B in swarm.steps.run.servers
    record = swarm.run(convicted(swarm, {}))
    assert record.convicted == [Conviction(peer=B, reason=REASON)]
    assert holders(record, swarm) == {"a", "c", "d"}


def test_whoever_takes_the_run_over_knows_since_when_false_work_may_have_counted(
    make_swarm: MakeSwarm, audits: dict[PeerId, str]
) -> None:
    """The lead, which is to roll the run back, may die first."""
    swarm = audited(make_swarm, audit_share=0.75)
    for number in range(6):
        swarm.run(step(swarm, number))
    coordinator = swarm.servers[A].admission.election.coordinator
    assert coordinator is not None
    coordinator.generation.context.oversight.memory.standing.note_counted(B, 5, None)
    record = swarm.run(convicted(swarm, audits, B))
    assert record.goes_back is True
    swarm.run(step(swarm, 7))
    found = [server.membership.run.sound_version for name, server in swarm.servers.items() if name != B]
    assert found == [7 - 4] * 3, "found within 3 / 0.75 steps, mostly"
