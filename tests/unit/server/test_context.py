"""A server's current run, and the peers that may end it."""

from __future__ import annotations

import pytest

from lightning_swarm.core.errors import NotMember, ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server.context import RunMembership
from tests.unit.conftest import MakeSwarm

HOST, STRANGER = PeerId("host"), PeerId("stranger")


def test_without_a_run_a_call_is_sent_elsewhere_or_refused(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    membership = RunMembership(swarm.members[PeerId("a")])
    assert not membership.has_run
    assert membership.run_or_none is None
    with pytest.raises(NotMember):
        _ = membership.run
    with pytest.raises(ProtocolError) as refused:
        _ = membership.running
    assert not isinstance(refused.value, NotMember)


def test_only_peers_of_its_run_end_a_server(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    manifest = swarm.manifest
    membership = RunMembership(swarm.members[PeerId("b")], {HOST})

    def enders() -> set[PeerId]:
        found = set()
        for peer in (HOST, STRANGER, manifest.lead, PeerId(manifest.coordinator)):
            try:
                membership.check_ended_by(peer)
                found.add(peer)
            except ProtocolError:
                pass
        return found

    assert enders() == {HOST}
    membership.joining = PeerId(manifest.coordinator)
    assert enders() == {manifest.coordinator}
    membership.enter_run(RunState(manifest), {1})
    assert membership.is_member
    assert enders() == {manifest.lead, manifest.coordinator}
    membership.leave_run()
    assert not membership.loaded
    assert enders() == {HOST, manifest.lead}, "the lead of the run that it was in ends it, too"
    membership.check_released_by(manifest.lead)
    started_again = RunMembership(membership.me)
    with pytest.raises(ProtocolError, match="was released by None"):
        started_again.check_released_by(manifest.lead)
    with pytest.raises(ProtocolError, match="was released by"):
        membership.check_released_by(STRANGER)
