"""A peer that the owner bans is out of the run under any coordinator and after any rollback."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace as replaced

from lightning_swarm.core.errors import AccessDenied, ProtocolError, SwarmError, Unreachable
from lightning_swarm.network import MAX_CALL_BYTES, PeerId
from lightning_swarm.network.access import Role
from lightning_swarm.network.identity import Identity
from lightning_swarm.network.memory import MemoryTransport
from lightning_swarm.protocol import bans
from lightning_swarm.protocol.bans import MAX_BANS, active_bans, banned_among, bans_after
from lightning_swarm.protocol.invitations import MAX_COUNTED
from lightning_swarm.protocol.messages.run import MAX_CONVICTED, MAX_KEEPERS, Conviction, UsedInvitation
from lightning_swarm.protocol.messages.run import MAX_REASON as MAX_WHY
from lightning_swarm.protocol.messages.wire import encode as wire_bytes
from lightning_swarm.protocol.rpc import BAN, VIEW
from lightning_swarm.trust.certificates import MAX_REASON, MAX_USES
from lightning_swarm.trust.certificates import encode as signed_bytes
from lightning_swarm.trust.owner import Owner
from tests.access import OWNER, OwnedNetwork
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.membership.test_invitations import step_on
from tests.unit.coordinator.membership.test_trainers import NEW, Run
from tests.unit.coordinator.test_rollback import go_back
from tests.unit.coordinator.test_rollback import step as restart_step
from tests.unit.swarm import LEAD, Swarm, rows

A, B, C, G = map(PeerId, "abcg")
REASON = "it sends nonsense"
_numbers = itertools.count(1)


def word(subject: str, *, is_lifted: bool = False, number: int | None = None, owner: Owner = OWNER) -> bytes:
    """Return a ban or its end, signed by the owner; each is newer than all before."""
    now_ns = next(_numbers) if number is None else number
    return signed_bytes(owner.ban(subject, REASON, is_lifted=is_lifted, now_ns=now_ns))


def owned_swarm(make_swarm: MakeSwarm, *rosters: str, **options: Any) -> Swarm:
    """Return a swarm whose peers have invitations of one owner; joiners share one."""
    network = OwnedNetwork(
        role_of=lambda peer: Role.TRAINER if peer in (LEAD, NEW) else Role.SERVER,
        invitation_of=lambda peer: "of joiners" if peer in "gh" else peer,
    )
    members = {name for roster in rosters for name in roster.split()} | {LEAD}
    return make_swarm(*rosters, network=network, invitations=network.used_by(sorted(members)), **options)


def server_transport(swarm: Swarm, peer: PeerId) -> Any:
    return swarm.network.transports[peer]


async def tell(swarm: Swarm, signed: bytes, *peers: PeerId) -> None:
    for peer in peers:
        await swarm.trainer.call(peer, BAN.name, signed, timeout=5.0)


def told(swarm: Swarm) -> list[str]:
    """Return the bans in force, on which all servers of the run must agree."""
    servers = [swarm.servers[PeerId(name)] for name in holders(swarm)]
    states = [server.membership.run.bans for server in servers]
    assert all(state == states[0] for state in states)
    return [ban.subject for ban in active_bans(states[0])]


def holders(swarm: Swarm) -> set[str]:
    return {member.peer_id for roster in swarm.rosters_now for member in roster}


def test_the_next_record_drops_whom_the_owner_bans_wherever_it_is_told(make_swarm: MakeSwarm) -> None:
    swarm = owned_swarm(make_swarm, "a b c", "d b c", voters="a b c", trainers=LEAD)

    async def go() -> None:
        await swarm.step(rows(0))
        await tell(swarm, word(B), C)  # C does not coordinate
        record = await swarm.step(rows(1))
        assert [ban.subject for ban in active_bans(record.bans)] == [B]
        assert {one.member.peer_id for one in record.left} == {B}
        assert holders(swarm) == {"a", "c", "d"}
        next_one = await swarm.step(rows(2))
        assert next_one.bans is UNSET, "it is told once"
        transport = server_transport(swarm, B)
        for peer in (A, C):
            with pytest.raises(AccessDenied, match=rf"b was banned from this run by its owner.*{REASON}"):
                await transport.call(peer, "peer.hello", b"", timeout=5.0)
            with pytest.raises(Unreachable, match="not asked any more"):
                await server_transport(swarm, peer).ping(B)

        swarm.network.kill(A)
        await swarm.servers.pop(A).close()
        await step_on(swarm, rows(3), [C, PeerId("d")])
        coordinator = swarm.steps.run.coordinator
        assert coordinator in (C, "d"), "the first one is dead"
        with pytest.raises(AccessDenied, match="b was banned from this run by its owner"):
            await transport.call(coordinator, "peer.hello", b"", timeout=5.0)

    swarm.run(go())
    assert told(swarm) == [B]


def test_a_banned_coordinator_is_replaced_and_the_next_one_knows_of_it(make_swarm: MakeSwarm) -> None:
    swarm = owned_swarm(make_swarm, "a b c", "d b c", voters="a b c", trainers=LEAD)

    async def go() -> None:
        await swarm.step(rows(0))
        await tell(swarm, word(A), B, C, PeerId("d"))  # the banned peer itself is not notified
        swarm.trainer.ban(word(A))
        record = await step_on(swarm, rows(1), swarm.route(1))
        assert swarm.steps.run.coordinator in (B, C)
        assert "a" in {one.member.peer_id for one in record.left}
        assert [ban.subject for ban in active_bans(record.bans)] == [A]

    swarm.run(go())
    assert holders(swarm) == {"b", "c", "d"}


def test_a_banned_coordinator_keeps_nobody_from_hearing_of_it(make_swarm: MakeSwarm) -> None:
    """The owner reaches one member only, which the coordinator would drop as gone if it did not pass the ban on."""
    swarm = owned_swarm(make_swarm, "a b c", "d b c", voters="a b c", trainers=LEAD)
    network: Any = swarm.network
    network.members = [PeerId(name) for name in ("a", "b", "c", "d", LEAD)]

    async def go() -> None:
        await swarm.step(rows(0))
        await tell(swarm, word(A), C)
        await asyncio.sleep(1.0)
        assert all(network.transports[PeerId(name)].bans for name in ("b", "d", LEAD))
        assert not server_transport(swarm, A).bans, "nobody speaks to it any more"
        record = await step_on(swarm, rows(1), [C, PeerId("d")])
        assert "a" in {one.member.peer_id for one in record.left}

    swarm.run(go())
    assert holders(swarm) == {"b", "c", "d"}


def test_going_back_forgives_nobody(make_swarm: MakeSwarm) -> None:
    swarm = owned_swarm(make_swarm, "a b", "d b")

    async def go() -> None:
        await tell(swarm, word(B), A)
        await swarm.step(rows(0))

    swarm.run(go())
    go_back(swarm)
    swarm.run(restart_step(swarm, 0))
    assert told(swarm) == [B]


def test_whom_the_owner_bans_does_not_come_back_until_that_is_lifted(make_swarm: MakeSwarm) -> None:
    swarm = owned_swarm(make_swarm, "a", "b")
    invitation = swarm.network.invitation(G).invitation.number.hex()
    swarm.network.transport("g")

    async def go() -> None:
        await tell(swarm, word(invitation), A)
        await swarm.step(rows(0))
        assert told(swarm) == [invitation]
        for peer in (A, B):
            with pytest.raises(AccessDenied, match="g came by an invitation that was banned from this run"):
                await server_transport(swarm, G).call(peer, VIEW.name, b"", timeout=5.0)
        await tell(swarm, word(invitation, is_lifted=True), B)
        await swarm.step(rows(1))
        assert told(swarm) == []

    swarm.run(go())
    back = swarm.join("h")
    swarm.run(swarm.step(rows(2)))
    assert back.membership.is_member


def test_a_banned_trainer_trains_no_more(make_swarm: MakeSwarm) -> None:
    run = Run(lambda *rosters, **options: owned_swarm(make_swarm, *rosters, **options))
    swarm = run.swarm

    async def go() -> None:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        await run.step(run.lead, run.lead)
        new = await coming
        await run.step(run.lead, new)
        await tell(swarm, word(NEW), A)
        with pytest.raises(AccessDenied, match="was banned"):
            await new.grant(2)
        record = await run.step(run.lead, run.lead)
        assert record.retired == [NEW], "it is not waited for"

    swarm.run(go())


def test_a_trainer_that_is_banned_while_it_waits_does_not_get_in(make_swarm: MakeSwarm) -> None:
    run = Run(lambda *rosters, **options: owned_swarm(make_swarm, *rosters, **options))
    swarm = run.swarm

    async def go() -> None:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        await tell(swarm, word(NEW), A)
        record = await run.step(run.lead, run.lead)
        assert [ban.subject for ban in active_bans(record.bans)] == [NEW]
        assert record.enlisted == []
        coming.cancel()

    swarm.run(go())


def test_who_came_by_another_invitation_stays_when_one_is_banned() -> None:
    first, second = bytes(16), bytes(15) + b"2"
    used = [UsedInvitation(number=first, uses=2, peers=[A, B]), UsedInvitation(number=second, uses=2, peers=[B])]
    assert banned_among([A, B, C], [word(first.hex())], used) == {A}
    assert banned_among([A, B, C], [word(first.hex()), word(second.hex())], used) == {A, B}
    assert banned_among([A, B, C], [word(first.hex()), word(B)], used) == {A, B}
    assert banned_among([A, B, C], UNSET, used) == set()
    assert banned_among([A, B, C], [word(C)], UNSET) == {C}


def test_an_older_word_of_the_owner_is_refused_aloud(make_swarm: MakeSwarm) -> None:
    """This happens if the owner's clock was set back between a ban and its end."""
    swarm = owned_swarm(make_swarm, "a", "b")
    lifted, banned = word(B, is_lifted=True), word(B)

    async def go() -> None:
        await tell(swarm, banned, A)
        await tell(swarm, banned, A)
        with pytest.raises(AccessDenied, match=r"a newer one is known here.*Set the clock"):
            await tell(swarm, lifted, A)

    swarm.run(go())


def test_whose_ban_is_lifted_counts_as_gone_no_more(make_swarm: MakeSwarm) -> None:
    swarm = owned_swarm(make_swarm, "a", "b")
    swarm.network.transport("g")
    transport = server_transport(swarm, A)

    async def go() -> None:
        await transport.certify(G)
        for subject in (G, swarm.network.invitation(G).invitation.number.hex()):
            await tell(swarm, word(subject), A)
            with pytest.raises(Unreachable, match=r"is not asked any more: it .*banned"):
                await transport.ping(G)
            await tell(swarm, word(subject, is_lifted=True), A)
            await transport.ping(G)
            await transport.certify(G)

    swarm.run(go())


def test_the_longest_bans_and_all_invitations_fit_a_view(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    run_id, reason = "r" * 100, "\N{GRINNING FACE}" * MAX_REASON
    longest = signed_bytes(Owner(run_id, OWNER.key).ban(OWNER.key.peer_id, reason, is_lifted=True, now_ns=1 << 62))
    all_bans = MAX_BANS * [longest]
    used = [
        UsedInvitation(number=bytes(16), uses=MAX_USES, peers=[PeerId(OWNER.key.peer_id)]) for _ in range(MAX_COUNTED)
    ]
    view = swarm.servers[A].membership.run.view()
    keepers = MAX_KEEPERS * [PeerId(OWNER.key.peer_id)]
    convicted = MAX_CONVICTED * [Conviction(peer=PeerId(OWNER.key.peer_id), reason="x" * MAX_WHY)]
    counted: dict[str, Any] = {"invitations": used, "bans": all_bans, "keepers": keepers, "convicted": convicted}
    full = replaced(view, manifest=replaced(view.manifest, **counted), seats=replaced(view.seats, **counted))
    assert len(wire_bytes(full)) < 0.95 * MAX_CALL_BYTES, "the rest is for servers, stages and trainers"


def test_what_the_owner_has_not_signed_changes_nothing(make_swarm: MakeSwarm) -> None:
    """A member forges a ban; a coordinator does so in a record."""
    swarm = owned_swarm(make_swarm, "a b c", "d b")
    forged = word(B, owner=Owner("run", Identity.generate()))
    elsewhere = word(B, owner=Owner("another", OWNER.key))
    changed = bytearray(word(B))
    changed[-1] ^= 1

    async def go() -> None:
        await swarm.step(rows(0))
        run, voter = swarm.servers[C].membership.run, swarm.servers[C].admission.election
        assert run.newest is not None
        for signed in (forged, elsewhere, bytes(changed), b"", b"\x00" * 2000):
            with pytest.raises(SwarmError, match="owner"):
                await server_transport(swarm, C).call(A, BAN.name, signed, timeout=5.0)
            record = replaced(run.newest, closing=replaced(run.newest.closing, step=1), bans=[signed])
            with pytest.raises((AccessDenied, ProtocolError), match="owner"):
                voter._check_record(record)
        record = await swarm.step(rows(1))
        assert record.bans is UNSET
        assert not record.left

    swarm.run(go())
    assert told(swarm) == []


def test_the_newest_word_counts_in_whatever_order_it_comes() -> None:
    first, lifted, again = word(A), word(A, is_lifted=True), word(A)
    other = word(B)
    for order in itertools.permutations((first, lifted, again)):
        known: Any = UNSET
        for signed in order:
            known = bans_after(known, [signed])
        assert known == [again]
    assert active_bans(bans_after([first, other], [lifted])) == active_bans([other])
    assert bans_after([first], UNSET) == [first]
    with pytest.raises(ProtocolError, match="a ban must be a record that the run's owner signed"):
        bans_after(UNSET, [b"nothing"])


def test_a_run_keeps_no_more_bans_than_its_messages_hold(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bans, "MAX_BANS", 2)
    swarm = owned_swarm(make_swarm, "a", "b")

    async def go() -> None:
        await tell(swarm, word("x"), A)
        await tell(swarm, word("y"), A)
        with pytest.raises(AccessDenied, match="a run keeps at most 2 bans"):
            await tell(swarm, word("z"), A)
        await tell(swarm, word("y", is_lifted=True), A)
        await swarm.step(rows(0))
        assert told(swarm) == ["x"]

    swarm.run(go())


def test_a_peer_that_is_banned_itself_ends(make_swarm: MakeSwarm) -> None:
    network = OwnedNetwork()
    transport: MemoryTransport = network.transport("a")
    transport.ban(word(B))
    assert not transport.cut_off.is_set()
    transport.ban(word(A))
    assert transport.cut_off.is_set()
    assert "This peer was banned from this run by its owner" in transport.cut_off.reason
    assert REASON in transport.cut_off.reason
