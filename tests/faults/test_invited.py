"""A run by invitation, while its coordinator dies and a server joins; audited like the matrix."""

from __future__ import annotations

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import CERTIFY, Role
from lightning_swarm.protocol.rpc import RPCS
from lightning_swarm.testing import FaultPlan, Phase
from tests.access import Gullible, InvitedNetwork, certificate_of
from tests.faults.harness import FaultySwarm
from tests.faults.plans import COORDINATOR, JOINER, SMALL_STAGES, TRAINERS, VOTERS


def test_everybody_has_a_certificate_of_the_least_role_that_will_do() -> None:
    """Also, a joiner that finds a forged run first sends it no request, and joins the true one."""
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
    forged, asked = network.transport("forged"), []
    forged.set_credentials(Gullible(certificate_of(forged.peer_id, run=b"another owner's")), RPCS)

    async def ask(caller: PeerId, body: bytes) -> bytes:
        asked.append(caller)
        raise ProtocolError("it would let anybody in")

    for rpc in RPCS:
        forged.handle_call(rpc.name, ask)
    swarm.announced.append(forged.peer_id)
    try:
        swarm.train()
        swarm.audit()
        assert swarm.count("takeover") > 0
        shown = swarm.servers[PeerId(JOINER)]._transport.traffic.sent_bytes
        assert {method for peer, method in shown if peer == forged.peer_id} == {CERTIFY}
        assert asked == []
        assert JOINER in swarm.survivors()
        for server in swarm.survivors().values():
            (used,) = server.membership.run.invitations or ()
            assert used.peers == [*members, PeerId(JOINER)]
            sent = server._transport.traffic.sent_bytes
            assert any(method == CERTIFY for _, method in sent)
    finally:
        swarm.close()
