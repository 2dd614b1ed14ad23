"""In an audited run a trainer accepts a server's data only if other servers confirm it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_swarm.client.model_state import gather_optimizer, gather_weights, write_stages
from lightning_swarm.core.errors import Unconfirmed
from lightning_swarm.model import sharded_format
from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.state import StageState
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.rpc import PROVE, STATE, WRITE
from tests.poisoned import Poison, lies, raised
from tests.unit.conftest import MakeSwarm
from tests.unit.model.forged import forged
from tests.unit.swarm import Swarm, rows

B, C, D = PeerId("b"), PeerId("c"), PeerId("d")


def trained(make_swarm: MakeSwarm, *rosters: str) -> Swarm:
    swarm = make_swarm(*rosters, audit_share=0.0)
    for seed in range(2):
        swarm.run(swarm.step(rows(seed)))
    return swarm


def expected_weights(swarm: Swarm, honest: str) -> dict[str, Tensor]:
    servers = [swarm.servers[PeerId(name)] for name in honest]
    return {
        name: tensor.clone()
        for server in servers
        for index in server.steps.stages
        for name, tensor in server.steps.stage(index).weights().items()
    }


def gathered(swarm: Swarm, events: EventLog) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    options: dict[str, Any] = {"timeout": 5.0, "events": events}
    weights = swarm.run(gather_weights(swarm.trainer, swarm.steps.run, 2, **options))
    return weights, swarm.run(gather_optimizer(swarm.trainer, swarm.steps.run, 2, **options))


def assert_honest(swarm: Swarm, events: EventLog, honest: str) -> None:
    expected = expected_weights(swarm, honest)
    weights, state = gathered(swarm, events)
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor)
    for server in (swarm.servers[PeerId(name)] for name in honest):
        for index in server.steps.stages:
            for name, own in server.steps.stage(index).optimizer.state().items():
                assert torch.equal(state[name]["momentum_buffer"], own["momentum_buffer"])


def told(events: EventLog) -> set[tuple[str, str | None]]:
    return {(event.kind, event.peer) for event in events.newest}


@pytest.mark.parametrize("poison", [raised, forged], ids=["other weights", "the same fingerprint"])
def test_what_most_servers_of_a_stage_do_not_have_is_not_read(make_swarm: MakeSwarm, poison: Poison) -> None:
    swarm, events = trained(make_swarm, "a", "b c d"), EventLog()
    own = list(swarm.servers[B].steps.stage(1).weights().values())
    poisoned = poison([tensor.clone() for tensor in own])
    assert not all(map(torch.equal, poisoned, own))
    assert (fingerprint(poisoned) == fingerprint(own)) == (poison is forged)
    lies(swarm.servers[B], poison)
    assert_honest(swarm, events, "acd")
    assert told(events) == {("unconfirmed", "b")}


def test_what_the_coordinators_server_has_is_right_whatever_most_say(make_swarm: MakeSwarm) -> None:
    swarm, events = trained(make_swarm, "a", "b c a"), EventLog()
    for liar in (B, C):
        lies(swarm.servers[liar], raised)
    assert_honest(swarm, events, "a")
    assert told(events) == {("unconfirmed", "b"), ("unconfirmed", "c")}


def test_where_the_coordinator_does_not_hold_a_stage_another_keeper_is_right(make_swarm: MakeSwarm) -> None:
    swarm, events = make_swarm("a", "b c d", audit_share=0.0, keepers="a d"), EventLog()
    for seed in range(2):
        swarm.run(swarm.step(rows(seed)))
    for liar in (B, C):
        lies(swarm.servers[liar], raised)
    assert_honest(swarm, events, "ad")
    assert told(events) == {("unconfirmed", "b"), ("unconfirmed", "c")}


def test_of_two_that_differ_neither_is_read(make_swarm: MakeSwarm) -> None:
    swarm, events = trained(make_swarm, "a", "b c"), EventLog()
    lies(swarm.servers[B], raised)
    with pytest.raises(Unconfirmed, match="a server's state must equal the state of a keeper's server"):
        gathered(swarm, events)
    assert told(events) == {("unconfirmed", "b"), ("unconfirmed", "c")}


def test_servers_that_are_gone_keep_nobody_from_reading(make_swarm: MakeSwarm) -> None:
    swarm, events = trained(make_swarm, "a", "b c d"), EventLog()
    swarm.network.kill(D)
    assert_honest(swarm, events, "abc")
    swarm.network.kill(C)
    assert_honest(swarm, events, "ab")
    assert told(events) == set()


def test_a_server_that_answers_no_message_is_passed_over(make_swarm: MakeSwarm) -> None:
    swarm, events = trained(make_swarm, "a", "b c d"), EventLog()
    transport: Any = swarm.servers[B]._transport
    handler, *bounds = transport._stream_handlers[STATE.name]

    async def answer(caller: PeerId, message: Message) -> Message:
        reply = await handler(caller, message)
        head = decode(reply.body, StageState)
        return Message(b"\xc1", reply.tensors) if not head.optimizer else Message(reply.body, reply.tensors[:-1])

    transport._stream_handlers[STATE.name] = answer, *bounds
    assert_honest(swarm, events, "acd")


def test_only_servers_that_nobody_doubts_write_into_a_checkpoint(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    swarm, events = trained(make_swarm, "a", "b c d"), EventLog()
    asked: list[str] = []
    for name in "abcd":
        transport: Any = swarm.servers[PeerId(name)]._transport
        handler, *bounds = transport._stream_handlers[WRITE.name]

        async def answer(caller: PeerId, message: Message, name: str = name, handler: Any = handler) -> Message:
            asked.append(name)
            reply: Message = await handler(caller, message)
            return reply

        transport._stream_handlers[WRITE.name] = answer, *bounds
    lies(swarm.servers[B], raised)
    expected = expected_weights(swarm, "acd")
    folder = tmp_path / f".it.{'0' * 32}.partial"
    folder.mkdir()
    names = [set(swarm.servers[PeerId(peer)].steps.stage(index).weights()) for index, peer in enumerate("ac")]
    run = swarm.steps.run
    writing = write_stages(swarm.trainer, run, 2, folder, names, None, limits=swarm.limits, events=events)
    written = swarm.run(writing)
    assert asked == ["a"], "the coordinator's server; the other stage is written by who reads it"
    sharded_format.finish(folder, written, {})
    (folder / sharded_format.REST).write_bytes(b"")
    found = sharded_format.ShardedCheckpoint(folder).read_weights(expected)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
    assert told(events) == {("unconfirmed", "b")}


def test_a_run_that_is_not_audited_asks_nobody(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c d")
    for seed in range(2):
        swarm.run(swarm.step(rows(seed)))
    asked = []
    for server in swarm.servers.values():
        transport: Any = server._transport
        transport._call_handlers[PROVE.name] = lambda *_: asked.append(1)
    gathered(swarm, EventLog())
    assert not asked
