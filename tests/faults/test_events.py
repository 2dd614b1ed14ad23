"""Counts of faults and recoveries."""

from __future__ import annotations

from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.reports import EVENT_KINDS
from lightning_swarm.protocol.messages.step import ReplayRequest
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.rpc import REPLAY
from lightning_swarm.testing import FaultPlan, Phase
from tests.faults.harness import FaultySwarm
from tests.faults.plans import LEAD, STAGES, VOTERS


def test_a_replay_is_noted_once_though_two_peers_have_to_do_with_it() -> None:
    """The coordinator reports it, whose counts go to the lead's loggers; the trainer only computes it."""
    plan = FaultPlan().kill("e", at=Phase.CLOSE, step=1).kill("f", at=Phase.CLOSE, step=1)
    swarm = FaultySwarm(*STAGES, plan=plan, voters=VOTERS)
    handler = swarm.trainer._call_handlers[REPLAY.name]
    asked: set[tuple[object, int]] = set()

    async def counting(caller: PeerId, body: bytes) -> bytes:
        asked.update((one.receipt, stage) for one in decode(body, ReplayRequest).work for stage in one.holders)
        return await handler(caller, body)

    swarm.trainer._call_handlers[REPLAY.name] = counting
    try:
        swarm.train()
        plan.check()
        assert swarm.count("replay") == len(asked) > 0
    finally:
        swarm.close()


def test_what_every_peer_met_with_comes_to_the_lead() -> None:
    """The lead logs another trainer's retries too, and the counts of a coordinator that was replaced."""
    plan = FaultPlan().drop("d", at=Phase.FORWARD, of="second", step=1)
    plan.kill("e", at=Phase.BACKWARD, step=1).freeze("a", for_s=16.0, at=Phase.CLOSE, step=1, nth=2)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=f"{LEAD} second", voters=VOTERS)
    try:
        swarm.train()
        lead, second = (swarm.trainers[PeerId(name)].events for name in (LEAD, "second"))
        assert second.counts["retry"]
        assert swarm.count("takeover")
        assert swarm.servers[PeerId("a")].events.counts
        kinds = [kind for kind in EVENT_KINDS if swarm.count(kind)]
        taken = lead.drain()
        assert {kind: taken[kind] for kind in kinds} == {kind: swarm.count(kind) for kind in kinds}
    finally:
        swarm.close()
