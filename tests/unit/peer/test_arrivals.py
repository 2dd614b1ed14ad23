"""The starter of a run by invitation admits the invited servers, and counts them."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace

import pytest
from msgspec import UNSET

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Permit, Role
from lightning_swarm.peer import arrivals
from lightning_swarm.peer.arrivals import known_peers
from lightning_swarm.protocol import invitations
from lightning_swarm.protocol.messages.run import UsedInvitation
from lightning_swarm.protocol.rpc import RPCS
from lightning_swarm.protocol.run_state import RunState
from tests.access import INVITATION, FakeCredentials, InvitedNetwork, ban_of, certificate_of
from tests.unit.conftest import MakeSwarm
from tests.unit.peer.test_config import config
from tests.unit.peer.test_lead import Starter
from tests.unit.swarm import LEAD, Swarm

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def starter(make_swarm: MakeSwarm, **options: int) -> Starter:
    """Return a starter that shares one invitation with three servers."""
    network = InvitedNetwork(role_of=lambda peer: Role.KEEPER if peer == LEAD else Role.SERVER, **options)
    return Starter(make_swarm("a b", "c", admit=False, network=network))


def members(swarm: Swarm) -> set[PeerId]:
    return {member.peer_id for stage in swarm.servers[A].membership.run.manifest.stages for member in stage.roster}


def change(swarm: Swarm, peer: PeerId, credentials: FakeCredentials | None) -> None:
    transport = swarm.servers[peer]._transport
    transport.set_credentials(credentials, RPCS)  # type: ignore[attr-defined]


def test_the_first_members_are_counted(make_swarm: MakeSwarm) -> None:
    found = starter(make_swarm, uses=4)
    found.begin()
    for server in found.swarm.servers.values():
        assert server.membership.run.invitations == [
            UsedInvitation(number=INVITATION, uses=4, peers=[A, B, C, PeerId(LEAD)])
        ]


def test_who_is_not_invited_is_left_out(make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    """They announce that they wait for this run, which any peer may do."""
    for credentials, reason in (
        (None, "accepts any peer and has no certificate to show"),
        (FakeCredentials(certificate_of(B, run=b"another"), b"another"), "it is not signed by the owner of this run"),
        (FakeCredentials(certificate_of(B, Role.OBSERVER)), "its certificate is not of the role server"),
    ):
        found = starter(make_swarm)
        change(found.swarm, B, credentials)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger=arrivals.__name__):
            found.begin()
        assert members(found.swarm) == {A, C}
        (message,) = caplog.messages
        assert message.startswith("b announced itself, and the run begins without it: ")
        assert reason in message


def test_who_announces_itself_and_is_silent_holds_nobody_up(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = starter(make_swarm)
    certify = found.swarm.trainer.certify

    async def silent(peer: PeerId) -> Permit | None:
        return await (asyncio.sleep(1e6) if peer == B else certify(peer))  # type: ignore[return-value]

    monkeypatch.setattr(found.swarm.trainer, "certify", silent)
    begun_s = found.swarm.loop.time()
    found.begin()
    assert members(found.swarm) == {A, C}
    assert found.swarm.loop.time() - begun_s < 10.0
    assert "b announced itself, and the run begins without it: it showed no certificate within 3 s" in caplog.text


def test_whom_an_invitation_has_no_use_for_is_left_out(make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    found = starter(make_swarm, uses=3)
    with caplog.at_level(logging.WARNING, logger=arrivals.__name__):
        found.begin()
    assert members(found.swarm) == {A, B}
    (message,) = caplog.messages
    assert message.startswith("c announced itself, and the run begins without it: all uses (3) of its invitation are")


def test_whose_invitation_has_expired_is_left_out_unless_it_came_before(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its certificate is valid for longer, but may have been backdated."""
    found = starter(make_swarm, uses=4)
    came = _came(make_swarm)
    came.invitations = [UsedInvitation(number=INVITATION, uses=4, peers=[B])]
    found.lead.restore_peers(known_peers(came, []))
    certify = found.swarm.trainer.certify

    async def late(peer: PeerId) -> Permit | None:
        permit = await certify(peer)
        return permit if permit is None or peer == A else replace(permit, come_by_s=0.0)

    monkeypatch.setattr(found.swarm.trainer, "certify", late)
    with caplog.at_level(logging.WARNING, logger=arrivals.__name__):
        found.begin()
    assert members(found.swarm) == {A, B}
    (message,) = caplog.messages
    assert message.endswith("it comes for the first time, and its invitation has expired")


def test_whom_a_full_run_leaves_out_is_told_so(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(invitations, "MAX_COUNTED", 3)
    found = starter(make_swarm, uses=4)
    with caplog.at_level(logging.WARNING, logger=arrivals.__name__):
        found.begin()
    assert members(found.swarm) == {A, B}
    (message,) = caplog.messages
    assert message.startswith("c announced itself, and the run begins without it: 4096 invited peers have joined,")


def test_the_next_generation_forgets_nobody(make_swarm: MakeSwarm) -> None:
    found = starter(make_swarm, uses=4)
    found.begin()
    found.swarm.network.kill(C)
    found.lead.end_generation(0, serves=False)
    found.begin()
    run = found.swarm.servers[A].membership.run
    assert run.manifest.generation == 1
    assert members(found.swarm) == {A, B}
    assert run.invitations == [UsedInvitation(number=INVITATION, uses=4, peers=[A, B, C, PeerId(LEAD)])]


def test_a_checkpoint_forgets_nobody(make_swarm: MakeSwarm) -> None:
    """A resumed run continues the count; a checkpoint with an invalid list of peers is refused."""
    known = known_peers(_came(make_swarm), [])
    json.dumps(known)  # plain values, for `weights_only=True`
    found = starter(make_swarm, uses=4)
    found.lead.restore_peers(known)
    found.begin()
    run = found.swarm.servers[A].membership.run
    assert run.invitations == [
        UsedInvitation(number=bytes(16), uses=2, peers=[PeerId("gone")]),
        UsedInvitation(number=INVITATION, uses=4, peers=[A, B, C, PeerId(LEAD)]),
    ]
    twice = {"number": "AAAAAAAAAAAAAAAAAAAAAA==", "uses": 1, "peers": ["a", "b"]}
    for wrong in (None, {}, {"invitations": [twice], "bans": []}, {"invitations": [], "bans": [7]}):
        with pytest.raises(ConfigError, match="the checkpoint's entry `swarm_peers` must be as it was saved"):
            found.lead.restore_peers(wrong)


def test_a_checkpoint_keeps_a_ban_that_no_record_tells_yet(make_swarm: MakeSwarm) -> None:
    found = starter(make_swarm, uses=4)
    found.begin()
    found.lead._transport.ban(ban_of(B))
    known = found.lead.known_peers()
    assert known is not None
    after = starter(make_swarm, uses=4)
    after.lead.restore_peers(known)
    assert after.lead._transport.bans == [ban_of(B)]


def _came(make_swarm: MakeSwarm) -> RunState:
    run = RunState(make_swarm("a").manifest)
    assert known_peers(run, []) is None, "anyone may come"
    run.invitations = [UsedInvitation(number=bytes(16), uses=2, peers=[PeerId("gone")])]
    return run


def test_an_open_run_counts_nobody(make_swarm: MakeSwarm) -> None:
    found = Starter(make_swarm("a b", "c", admit=False))
    found.begin()
    assert found.swarm.servers[A].membership.run.invitations is UNSET


# ---------------------------------------------------------------------- audited runs


def audited(make_swarm: MakeSwarm, *keepers: str) -> Starter:
    """Return an audited run, started by a trainer that holds no stage."""
    network = InvitedNetwork(role_of=lambda peer: Role.KEEPER if peer in keepers else Role.TRAINER)
    swarm = make_swarm("a b", "c", admit=False, network=network)
    return Starter(swarm, config(trust="audited", audit_share=0.0, rebalancing="none", role="trainer"))


def test_the_first_keepers_are_those_whose_certificates_say_so(make_swarm: MakeSwarm) -> None:
    """One of them coordinates. One that died may return."""
    found = audited(make_swarm, LEAD, B, C)
    found.begin()
    run = found.swarm.servers[A].membership.run
    assert run.electorate.keepers == [LEAD, B, C]
    assert (run.coordinator, [voter.peer_id for voter in run.voters]) == (B, [B])
    found.swarm.network.kill(C)
    found.lead.end_generation(0, serves=False)
    found.begin()
    run = found.swarm.servers[A].membership.run
    assert (run.manifest.generation, run.electorate.keepers, run.servers) == (1, [LEAD, B, C], [A, B])


def test_only_a_keeper_begins_an_audited_run(make_swarm: MakeSwarm) -> None:
    found = audited(make_swarm, B)
    with pytest.raises(ConfigError, match=r"must be started by a keeper.*the certificate of trainer has another role"):
        found.begin()


def test_an_audited_run_does_not_begin_without_a_keeper_that_serves(make_swarm: MakeSwarm) -> None:
    found = audited(make_swarm, LEAD)
    with pytest.raises(
        ConfigError, match=r"none of its first 3 servers is a keeper.*lightning-swarm invite --role keeper"
    ):
        found.begin()
    assert not any(server.membership.has_run for server in found.swarm.servers.values())


def test_the_next_generation_and_a_checkpoint_know_who_was_convicted(
    make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    found = audited(make_swarm, LEAD, A)
    found.begin()
    run = found.lead.run
    assert run is not None
    run.electorate.convicted[C], run.rosters = (
        "it lied",
        [[one for one in held if one.peer_id != C] for held in run.rosters],
    )
    known = found.lead.known_peers()
    json.dumps(known)
    found.lead.end_generation(0, serves=False)
    again = audited(make_swarm, LEAD, A)
    again.lead.restore_peers(known)
    for one in (found, again):
        one.begin()
        run = one.swarm.servers[A].membership.run
        assert (run.servers, run.electorate.convicted) == ([A, B], {C: "it lied"})
    assert caplog.messages == ["c announced itself, and the run begins without it: it was convicted: it lied"]
