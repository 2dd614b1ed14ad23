"""A run by invitation, while its coordinator dies and a server joins: audited like the matrix."""

from __future__ import annotations

from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Role
from lightning_swarm.network.certification import CERTIFY
from lightning_swarm.testing import FaultPlan, Phase
from tests.access import InvitedNetwork
from tests.faults.harness import FaultySwarm
from tests.faults.plans import COORDINATOR, JOINER, SMALL_STAGES, TRAINERS, VOTERS


def test_everybody_has_a_certificate_of_the_least_role_that_will_do() -> None:
    plan = FaultPlan().kill(COORDINATOR, at=Phase.DECIDE, step=1).corrupt(None, at=Phase.BACKWARD, step=2)
    network = InvitedNetwork(role_of=lambda peer: Role.TRAINER if peer in TRAINERS.split() else Role.SERVER)
    members = [*" ".join(SMALL_STAGES).split(), *TRAINERS.split()]
    invitations = network.used_by(members)
    swarm = FaultySwarm(
        *SMALL_STAGES,
        plan=plan,
        trainers=TRAINERS,
        voters=VOTERS,
        joiners=JOINER,
        network=network,
        invitations=invitations,
    )
    try:
        swarm.train()
        swarm.audit()
        assert swarm.count("takeover") > 0
        assert JOINER in swarm.survivors()
        for server in swarm.survivors().values():
            (used,) = server.membership.run.invitations or ()
            assert used.peers == [*members, PeerId(JOINER)]
            sent = server._transport.traffic.sent_bytes
            assert any(method == CERTIFY for _, method in sent)
    finally:
        swarm.close()
