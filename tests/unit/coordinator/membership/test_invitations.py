"""An invitation admits as many peers as it has uses, under any coordinator and after any rollback."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import UNSET, UnsetType
from msgspec.structs import replace as replaced
from torch import Tensor

from lightning_swarm.core.errors import AccessDenied, ProtocolError
from lightning_swarm.network import MAX_CALL_BYTES, PeerId
from lightning_swarm.network.access import Permit, Role
from lightning_swarm.network.identity import Identity
from lightning_swarm.protocol import invitations
from lightning_swarm.protocol.invitations import check_invited, check_used, has_room, invited_by, used_after
from lightning_swarm.protocol.messages.run import InvitedBy, UsedInvitation
from lightning_swarm.protocol.messages.step import Proposal, Record, Vote
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import HELLO, PROPOSE
from lightning_swarm.server.server import Server
from lightning_swarm.trust.certificates import MAX_USES
from tests.access import InvitedNetwork, OwnedNetwork
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.membership.test_trainers import NEW, Run
from tests.unit.coordinator.test_rollback import go_back
from tests.unit.coordinator.test_rollback import step as restart_step
from tests.unit.swarm import LEAD, Swarm, key, rows

A, B, C, D, G, H, J = map(PeerId, "abcdghj")
NEWER = PeerId("newer")
FIRST, OURS = b"of the first one", b"of those who com"
MEMBERS = ("a", "b", "c", "d", LEAD)


def invited_swarm(make_swarm: MakeSwarm, *rosters: str, uses: int, **options: Any) -> Swarm:
    """Return a swarm whose first members share one invitation, and all later peers another."""
    network = InvitedNetwork(
        role_of=lambda peer: Role.TRAINER if peer in (LEAD, NEW, NEWER) else Role.SERVER,
        invitation_of=lambda peer: FIRST if peer in MEMBERS else OURS,
        uses=uses,
    )
    members = {name for roster in rosters for name in roster.split()} | {LEAD}
    used_by_members = [replaced(one, uses=100) for one in network.used_by(sorted(members))]
    return make_swarm(*rosters, network=network, invitations=used_by_members, **options)


def used(swarm: Swarm, number: bytes = OURS) -> list[PeerId]:
    """Return the peers that joined with an invitation, on which all servers of the run must agree."""
    servers = [server for server in swarm.servers.values() if server.membership.is_member]
    states = [server.membership.run.invitations for server in servers]
    assert all(state == states[0] for state in states)
    assert not isinstance(states[0], UnsetType)
    return [peer for one in states[0] if one.number == number for peer in one.peers]


def entering(swarm: Swarm, joiner: Server, *coordinators: PeerId) -> asyncio.Task[None]:
    """Start a server that joins."""

    async def find() -> Sequence[PeerId]:
        return coordinators or [swarm.manifest.coordinator]

    return swarm.loop.create_task(joiner.joiner.enter(find))


def test_who_announces_a_run_and_keeps_silent_holds_no_joiner_up(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    strangers = [PeerId(f"stranger {number}") for number in range(3)]

    async def silent(caller: PeerId, body: bytes) -> bytes:
        await asyncio.sleep(1e6)
        return b""

    for stranger in strangers:
        swarm.network.transport(stranger).handle_call(HELLO.name, silent)
    joiner = swarm.add_server("j")
    begun_s = swarm.loop.time()
    entering(swarm, joiner, *strangers, A)
    swarm.run(asyncio.sleep(5.0))
    swarm.run(swarm.step(rows(0)))
    assert joiner.membership.is_member
    assert swarm.loop.time() - begun_s < swarm.limits.call_timeout, "one after the other would have taken three times"


async def step_on(swarm: Swarm, samples: Tensor, route: Sequence[PeerId]) -> Record:
    """Run another step by a route; the coordinator may change meanwhile."""
    grant = await swarm.steps.grant(2)
    k = key(grant.first, step=grant.step)
    await swarm.through(k, samples, route=route, weight=grant.weight)
    await swarm.steps.done(grant.lease, [k.receipt])
    await swarm.steps.close()
    return await swarm.record(swarm.steps.version)


async def denied(joining: asyncio.Task[None]) -> None:
    with pytest.raises(AccessDenied, match=r"all uses \(1\) of the invitation of \w are taken.*lightning-swarm invite"):
        await joining


def test_no_more_servers_join_than_an_invitation_has_uses(make_swarm: MakeSwarm) -> None:
    swarm = invited_swarm(make_swarm, "a", "b", uses=1)
    first = swarm.join("g")
    second = swarm.add_server("h")

    async def go() -> None:
        waits = entering(swarm, second)
        await asyncio.sleep(5.0)
        assert not waits.done(), "the first one waits for a record, and may not come"
        record = await swarm.step(rows(0))
        assert record.invited == {G: InvitedBy(number=OURS, uses=1)}
        await denied(waits)
        await denied(entering(swarm, second))  # the first one has joined

    swarm.run(go())
    assert first.membership.is_member
    assert used(swarm) == [G]
    assert used(swarm, FIRST) == [A, B, LEAD]


def test_a_joiner_that_died_keeps_no_use_of_its_invitation(make_swarm: MakeSwarm) -> None:
    """For example, a joiner without a key of its own is started again."""
    swarm = invited_swarm(make_swarm, "a", "b", uses=1)
    swarm.join("g")
    second = swarm.add_server("h")

    async def go() -> None:
        swarm.network.kill(G)
        await swarm.servers.pop(G).close()
        coming = entering(swarm, second)
        await asyncio.sleep(5.0)
        record = await swarm.step(rows(0))
        assert record.invited == {H: InvitedBy(number=OURS, uses=1)}
        await coming

    swarm.run(go())
    assert second.membership.is_member
    assert used(swarm) == [H]


def test_a_trainer_that_died_before_it_came_keeps_no_use_of_its_invitation(make_swarm: MakeSwarm) -> None:
    run = Run(lambda *rosters, **options: invited_swarm(make_swarm, *rosters, uses=1, **options))
    swarm = run.swarm

    async def go() -> None:
        gone = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        gone.cancel()
        swarm.network.kill(NEW)
        coming = asyncio.create_task(run.enter(run.transport(NEWER)))
        await asyncio.sleep(1.0)
        record = await run.step(run.lead, run.lead)
        assert record.enlisted == [NEWER]
        await coming

    swarm.run(go())
    assert used(swarm) == [NEWER]


def test_who_comes_for_the_first_time_comes_before_the_invitation_expires(make_swarm: MakeSwarm) -> None:
    """A certificate's time of joining is the peer's own claim, so the run's clock decides."""
    network = OwnedNetwork(role_of=lambda peer: Role.TRAINER if peer == LEAD else Role.SERVER)
    swarm = make_swarm("a", "b", network=network, invitations=network.used_by(["a", "b", LEAD]))
    late = swarm.add_server("g")
    expires_at_s = network.invitation(G).invitation.expires_at_s
    at_s = [expires_at_s + 1.0]
    coordinator = swarm.servers[A].admission.election.coordinator
    assert coordinator is not None
    coordinator.generation.context.invitations._wall_s = lambda: at_s[0]

    async def go() -> None:
        with pytest.raises(
            AccessDenied, match="must join before its invitation expires: the invitation of g has expired"
        ):
            await entering(swarm, late)
        at_s[0] = expires_at_s - 1.0

    swarm.run(go())
    joiner = swarm.join("h")
    swarm.run(swarm.step(rows(0)))
    assert joiner.membership.is_member


def test_a_peer_that_comes_back_uses_nothing_more(make_swarm: MakeSwarm) -> None:
    swarm = invited_swarm(make_swarm, "a", "b", uses=1)
    swarm.join("g")

    async def go() -> None:
        await swarm.step(rows(0))
        assert used(swarm) == [G]
        swarm.network.kill(G)
        await swarm.step(rows(1))
        await swarm.step(rows(2))
        assert not any(member.peer_id == G for roster in swarm.rosters_now for member in roster)
        await swarm.servers.pop(G).close()
        await denied(entering(swarm, other))

    other = swarm.add_server("h")
    swarm.run(go())
    back = swarm.join("g")

    async def again() -> None:
        record = await swarm.step(rows(3))
        assert isinstance(record.invited, dict)
        assert record.invited.keys() == {G}

    swarm.run(again())
    assert back.membership.is_member
    assert used(swarm) == [G]


def test_the_next_coordinator_knows_who_came(make_swarm: MakeSwarm) -> None:
    swarm = invited_swarm(make_swarm, "a b c", "d b c", uses=1, voters="a b c", trainers=LEAD)
    first = swarm.join("g")
    second = swarm.add_server("h")

    async def go() -> None:
        await swarm.step(rows(0))
        swarm.network.kill(A)
        await swarm.servers.pop(A).close()
        await step_on(swarm, rows(1), swarm.route(1))
        coordinator = swarm.steps.run.coordinator
        assert coordinator in (B, C)
        await denied(entering(swarm, second, coordinator))

    swarm.run(go())
    assert first.membership.is_member
    assert used(swarm) == [G]


def test_going_back_forgets_nobody(make_swarm: MakeSwarm) -> None:
    swarm = invited_swarm(make_swarm, "a", "b", uses=1)
    swarm.join("g")
    second = swarm.add_server("h")
    swarm.run(swarm.step(rows(0)))
    go_back(swarm)

    async def go() -> None:
        assert used(swarm) == [G]
        await denied(entering(swarm, second))
        await restart_step(swarm, 0)

    swarm.run(go())
    assert used(swarm) == [G]


def test_no_more_trainers_come_than_an_invitation_has_uses(make_swarm: MakeSwarm) -> None:
    """Servers with the same invitation count, too."""
    run = Run(lambda *rosters, **options: invited_swarm(make_swarm, *rosters, uses=1, **options))
    swarm = run.swarm

    async def go() -> None:
        coming = asyncio.create_task(run.enter(run.transport()))
        await asyncio.sleep(1.0)
        waits, newer = entering(swarm, joiner), asyncio.create_task(run.enter(run.transport(NEWER)))
        await asyncio.sleep(1.0)
        record = await run.step(run.lead, run.lead)
        assert record.enlisted == [NEW]
        assert record.invited == {NEW: InvitedBy(number=OURS, uses=1)}
        new = await coming
        await denied(waits)
        with pytest.raises(AccessDenied, match=r"all uses \(1\) of the invitation of newer are taken"):
            await newer
        assert used(swarm) == [NEW]
        await run.step(run.lead, new)
        await denied(entering(swarm, joiner))

    joiner = swarm.add_server("h")
    swarm.run(go())
    run.check()


def test_voters_refuse_a_record_that_lets_in_who_is_not_invited(make_swarm: MakeSwarm) -> None:
    swarm = invited_swarm(make_swarm, "a b c", "d b c", uses=2, voters="a b c", trainers=LEAD)
    swarm.join("g")
    calls = swarm.servers[B]._transport._call_handlers  # type: ignore[attr-defined]
    vote, num_refused = calls[PROPOSE.name], 0

    def forged(record: Record) -> list[Record]:
        assert isinstance(record.invited, dict)
        full = UsedInvitation(number=OURS, uses=1, peers=[H])
        run = swarm.servers[B].membership.run
        assert not isinstance(run.invitations, UnsetType)
        run.invitations = [*run.invitations, full]
        return [
            record,  # no use is left
            replaced(record, invited=UNSET),
            replaced(record, invited={}),
            replaced(record, invited=record.invited | {J: InvitedBy(number=FIRST, uses=100)}),
            replaced(record, invited={J: record.invited[G]}),
        ]

    async def tempted(caller: PeerId, body: bytes) -> bytes:
        nonlocal num_refused
        proposal: Any = decode(body, Proposal)
        if proposal.record.newcomers:
            known = swarm.servers[B].membership.run.invitations
            for record in forged(proposal.record):
                with pytest.raises(ProtocolError):
                    await vote(caller, encode(replaced(proposal, record=record)))
                num_refused += 1
            swarm.servers[B].membership.run.invitations = known
        answer: bytes = await vote(caller, body)
        assert decode(answer, Vote).accepted
        return answer

    calls[PROPOSE.name] = tempted
    swarm.run(swarm.step(rows(0)))
    assert num_refused == 5
    assert used(swarm) == [G]


def test_an_open_run_counts_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.join("g")
    record = swarm.run(swarm.step(rows(0)))
    assert record.newcomers
    assert record.invited is UNSET
    assert b"invit" not in encode(record) + encode(swarm.steps.run.view())
    with pytest.raises(
        ProtocolError, match="each of its 0 new members, and of no other peer; it names those of 1 peers"
    ):
        check_invited(UNSET, replaced(record, invited={G: InvitedBy(number=OURS, uses=1)}))


def test_a_run_counts_no_more_peers_than_it_can_show(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = invited_swarm(make_swarm, "a", "b", uses=100)
    monkeypatch.setattr(invitations, "MAX_COUNTED", 4)  # the members and one more
    first = swarm.join("g")
    second = swarm.add_server("h")

    async def go() -> None:
        waits = entering(swarm, second)  # the first one waits for a record
        await asyncio.sleep(1.0)
        await swarm.step(rows(0))
        with pytest.raises(AccessDenied, match=r"a run counts up to .* a checkpoint without its entry `swarm_peers`"):
            await waits

    swarm.run(go())
    assert first.membership.is_member
    assert used(swarm) == [G]


def test_a_run_that_counted_all_it_may_is_shown_in_one_message(make_swarm: MakeSwarm) -> None:
    name = Identity.generate().peer_id
    # The longest record, because each peer has an invitation of its own.
    counted = [
        UsedInvitation(number=number.to_bytes(16, "big"), uses=1, peers=[name])
        for number in range(invitations.MAX_COUNTED)
    ]
    view = make_swarm("a b", invitations=counted).servers[A].membership.run.view()
    assert view.manifest.invitations == view.seats.invitations == counted
    assert len(encode(view)) < MAX_CALL_BYTES * 3 // 4


# ------------------------------------------------------------------ the rules


def test_each_peer_is_counted_once() -> None:
    by = InvitedBy(number=OURS, uses=2)
    one = used_after([], {A: by})
    assert one == [UsedInvitation(number=OURS, uses=2, peers=[A])]
    assert used_after(one, {A: by}) == one
    both = used_after(one, {B: by})
    assert both == [UsedInvitation(number=OURS, uses=2, peers=[A, B])]
    assert has_room(both, A, by)
    assert not has_room(both, C, by)
    assert has_room(both, C, InvitedBy(number=FIRST, uses=1))
    assert has_room(both, C, by) is has_room(both, C, InvitedBy(number=OURS, uses=9)), "what was counted first holds"
    permit = Permit(Role.SERVER, 0.0, OURS, MAX_USES)
    assert decode(encode(invited_by(permit)), InvitedBy).uses == MAX_USES
    check_used(both)
    check_used(UNSET)
    for wrong in (
        used_after(both, {C: by}),
        [*both, *both],
        [UsedInvitation(number=OURS, uses=3, peers=[A, A])],
    ):
        with pytest.raises(ProtocolError):
            check_used(wrong)
