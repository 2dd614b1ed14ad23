"""What is counted of what went wrong."""

from __future__ import annotations

from lightning_swarm.network import PeerId
from lightning_swarm.steps import REPLAY
from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.types.steps import ReplayRequest
from lightning_swarm.types.wire import decode
from tests.faults.harness import FaultySwarm
from tests.faults.plans import STAGES, VOTERS


def test_a_replay_is_noted_once_though_two_peers_have_to_do_with_it() -> None:
    """At the coordinator, whose counts go to the lead's loggers; the trainer computes it."""
    plan = FaultPlan().kill("e", at=Phase.CLOSE, step=1).kill("f", at=Phase.CLOSE, step=1)
    swarm = FaultySwarm(*STAGES, plan=plan, voters=VOTERS)
    handler = swarm.trainer._call_handlers[REPLAY]
    asked: set[tuple[object, int]] = set()

    async def counting(caller: PeerId, body: bytes) -> bytes:
        asked.update((one.receipt, stage) for one in decode(body, ReplayRequest).work for stage in one.holders)
        return await handler(caller, body)

    swarm.trainer._call_handlers[REPLAY] = counting
    try:
        swarm.train()
        plan.check()
        assert swarm.count("replay") == len(asked) > 0
    finally:
        swarm.close()
