"""A trainer that finds no coordinator learns of the run's next generation from any server."""

from __future__ import annotations

import pytest
from msgspec import structs

from lightning_swarm.client.coordinator_client import CoordinatorCalls, CoordinatorTimeouts
from lightning_swarm.core.errors import Replaced, StepError, WentBack
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.batches import ReportReply
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import VIEW
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.test_commit import A
from tests.unit.swarm import LEAD

OTHER = PeerId("other")


@pytest.mark.parametrize(
    ("trainer", "new_lead", "expected"),
    [
        pytest.param(LEAD, OTHER, Replaced, id="a former lead"),
        pytest.param(OTHER, LEAD, WentBack, id="a trainer beside the lead"),
    ],
)
def test_the_run_has_gone_back_without_it(
    make_swarm: MakeSwarm, trainer: PeerId, new_lead: PeerId, expected: type[StepError]
) -> None:
    swarm = make_swarm("a", "b", trainers=f"{LEAD} other")
    run = swarm.servers[A].membership.run
    run.manifest = structs.replace(run.manifest, open_to_trainers=True)
    newer = structs.replace(run.view(), manifest=structs.replace(run.manifest, generation=1, lead=new_lead))
    calls = CoordinatorCalls(
        swarm.trainer if trainer == LEAD else swarm.network.transport(trainer),
        run,
        lambda: ReportReply(begun=False, leases=[], closed=[]),
        CoordinatorTimeouts(answer_s=1.0, successor_s=1.0),
    )

    async def shows(caller: PeerId, body: bytes) -> bytes:
        return encode(newer)

    swarm.network.transport("shower").handle_call(VIEW.name, shows)
    with pytest.raises(expected, match="leads run" if expected is Replaced else "without this trainer"):
        swarm.run(calls._check_generation(PeerId("shower")))
