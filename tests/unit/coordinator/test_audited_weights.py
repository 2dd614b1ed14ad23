"""An audited run compares replicas by an unforgeable proof, with the coordinator's server as the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_swarm.model import state_proof
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.step import FreezeRequest
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.rpc import FREEZE
from tests.unit.conftest import MakeSwarm
from tests.unit.model.forged import forged
from tests.unit.swarm import LEAD, Swarm, rows

A, B, C, D = map(PeerId, "abcd")


def forge(swarm: Swarm, peer: PeerId, stage_index: int) -> None:
    """Give a server other weights with the same fingerprint."""
    stage = swarm.servers[peer].steps.stage(stage_index)
    own = stage.weights()
    changed = forged(list(own.values()))
    before = stage.fingerprint()
    assert not all(map(torch.equal, own.values(), changed))
    stage.load_weights(dict(zip(own, changed, strict=True)))
    assert stage.fingerprint() == before


def gone(swarm: Swarm) -> list[str | None]:
    return sorted(event.peer or "" for event in swarm.events(A) if event.kind == "gone")


def test_weights_that_a_forger_made_are_found_before_they_count(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c d", audit_share=0.0, trainers=LEAD)
    swarm.run(swarm.step(rows(0)))
    forge(swarm, D, 1)
    record = swarm.run(swarm.step(rows(1)))
    assert gone(swarm) == ["d"]
    assert swarm.names_after(record) == ["a", "bc"]
    for name, tensor in swarm.servers[B].steps.stage(1).weights().items():
        assert torch.equal(swarm.servers[C].steps.stage(1).weights()[name], tensor)


def test_what_passed_a_server_with_other_weights_counts_nowhere(make_swarm: MakeSwarm) -> None:
    """The previous stage received gradients of other outputs, and added them honestly."""
    swarm = make_swarm("a", "b c d", audit_share=0.0, trainers=LEAD)
    swarm.run(swarm.step(rows(0)))
    forge(swarm, B, 1)

    async def step() -> None:
        await swarm.batch(rows(1))
        await swarm.steps.close()
        assert await swarm.steps.wait_for_record(1) is None

    swarm.run(step())
    assert gone(swarm) == ["b"]
    (strike,) = (event for event in swarm.events(A) if event.kind == "strike")
    assert strike.reason == "the batch at 0 went through a server whose results or weights are in doubt"


def test_the_coordinators_server_is_right_where_most_were_poisoned(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b c", "d", audit_share=0.0, trainers=LEAD)
    swarm.run(swarm.step(rows(0)))
    for liar in (B, C):
        forge(swarm, liar, 0)
    record = swarm.run(swarm.step(rows(1)))
    assert gone(swarm) == ["b", "c"]
    assert swarm.names_after(record) == ["a", "d"]


def test_another_keeper_is_right_where_the_coordinator_does_not_hold_the_stage(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "d b c", audit_share=0.0, trainers=LEAD, keepers="a d")
    swarm.run(swarm.step(rows(0)))
    for liar in (B, C):
        forge(swarm, liar, 1)
    record = swarm.run(swarm.step(rows(1)))
    assert gone(swarm) == ["b", "c"]
    assert swarm.names_after(record) == ["a", "d"]


def test_of_two_servers_that_differ_the_older_stays(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c", audit_share=0.0, trainers=LEAD)
    swarm.run(swarm.step(rows(0)))
    forge(swarm, C, 1)
    record = swarm.run(swarm.step(rows(1)))
    assert gone(swarm) == ["c"]
    assert swarm.names_after(record) == ["a", "b"]


def test_each_tensor_is_hashed_once_a_step_however_often_a_step_closes(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm("a", "b c", audit_share=0.0, trainers=LEAD)
    hashed: list[int] = []
    honest = state_proof.raw_bytes
    monkeypatch.setattr(state_proof, "raw_bytes", lambda tensor: hashed.append(tensor.data_ptr()) or honest(tensor))
    challenges: list[int] = []
    transport: Any = swarm.servers[B]._transport
    freeze = transport._call_handlers[FREEZE.name]

    async def twice(caller: PeerId, body: bytes) -> bytes:
        challenges.append(decode(body, FreezeRequest).challenge)
        await freeze(caller, body)
        answer: bytes = await freeze(caller, body)
        return answer

    transport._call_handlers[FREEZE.name] = twice
    swarm.run(swarm.step(rows(0)))
    hashed.clear()
    swarm.run(swarm.step(rows(1)))
    swarm.settle()
    assert all(challenges)
    assert len(set(challenges)) == len(challenges), "each time another one"
    tensors = 2 + 2  # per stage: weight and bias, and a momentum of each
    assert len(hashed) == 3 * tensors
