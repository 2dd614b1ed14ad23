"""Steps of inference sessions at servers: each once and in order, for authorized callers, within the memory limit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import DynamicCache
from typing_extensions import override

from lightning_swarm.core.errors import Busy, PeerError, ProtocolError, SessionLost, SwarmError, from_wire
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.inference.attention_cache import IN_SESSION
from lightning_swarm.model.partition import CALLS
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import (
    MAX_TOGETHER,
    WINDOW,
    CacheLayer,
    CacheOperation,
    CacheRecipe,
    SessionClose,
    SessionFailed,
    SessionOutputs,
    SessionReplay,
    SessionStep,
    SessionSteps,
    SessionStepsReply,
)
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import SESSION_CLOSE, SESSION_FAILED, SESSION_OUTPUTS, SESSION_REPLAY, SESSION_STEPS
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, WIDTH, Swarm

A, B, C, D = map(PeerId, "abcd")
SESSION = "5" * 32
MODE = ComputeMode(training=False, grad=False, default_dtype="float64")
RECIPE = CacheRecipe(layers=[CacheLayer(kind="full"), CacheLayer(kind="full")], records_past=False)


class Remembering(nn.Module):
    """A block that sees all tokens so far."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    @override
    def forward(self, x: Tensor, cache: Any) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("the block does not like this")
        known = len(cache.layers) > self.index
        own = cache.layers[self.index].get_seq_length() if known else 0
        assert cache.get_seq_length() == own + (x.shape[1] if self.index else 0), "the first block's length"
        keys, _ = cache.update(x[:, None], x[:, None], self.index)
        output: Tensor = self.linear(x + keys.sum(-2))
        return output


def begun(make_swarm: MakeSwarm, limits: Limits | None = None) -> Swarm:
    torch.manual_seed(0)
    module = nn.Sequential(Remembering(0), Remembering(1))
    return make_swarm("a b", "c d", module=module, limits=limits)


class Client:
    """Collects outputs and failures."""

    def __init__(self, transport: Transport) -> None:
        self.outputs: dict[int, Tensor] = {}
        self.failures: list[SessionFailed] = []
        transport.handle_stream(SESSION_OUTPUTS.name, self._take)
        transport.handle_call(SESSION_FAILED.name, self._fail)

    async def _take(self, caller: PeerId, message: Message) -> Message:
        tensors = list(message.tensors)
        for said in decode(message.body, SessionOutputs).outputs:
            own, tensors = tensors[: said.num_tensors], tensors[said.num_tensors :]
            self.outputs[said.number] = serialization.unflatten(said.structure, own)
        return Message()

    async def _fail(self, caller: PeerId, body: bytes) -> bytes:
        self.failures.append(decode(body, SessionFailed))
        return b""


def tokens(number: int, length: int = 1, rows: int = 2) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def message(hidden: Any, *route: PeerId, **changes: Any) -> Message:
    names = ["0", "1"]
    extras = {"cache": IN_SESSION, CALLS: {name: ({"cache": "cache"}, ()) for name in names}}
    structure, tensors = serialization.flatten((hidden, changes.pop("extras", extras)))
    fields: dict[str, Any] = {
        "session": SESSION,
        "client": LEAD,
        "attempt": 0,
        "generation": 0,
        "version": 0,
        "weights": 0,
        "number": 1,
        "resume": changes.get("number", 1),
        "stage_index": 0,
        "route": list(route),
        "modes": [MODE] * len(route),
        "adapters": [],
        "drops": [],
        "seed": None,
        "recipe": RECIPE,
        "operations": [],
        "structure": structure,
    }
    fields |= {"exact": False, "num_tensors": len(tensors), **changes}
    return Message(encode(SessionSteps(steps=[SessionStep(**fields)])), tuple(tensors))


def together(*sent: Message) -> Message:
    """Join messages with steps to one."""
    steps = [step for one in sent for step in decode(one.body, SessionSteps).steps]
    return Message(encode(SessionSteps(steps=steps)), tuple(tensor for one in sent for tensor in one.tensors))


async def ask(transport: Transport, peer: PeerId, sent: Message, *, timeout: float = 5.0) -> None:
    """Send a message; raise the error of its first step that is refused."""
    answer = await transport.stream(peer, SESSION_STEPS.name, sent, timeout=timeout, max_bytes=0)
    for refusal in decode(answer.body, SessionStepsReply).refused:
        raise from_wire(refusal.error, refusal.reason)


def send(swarm: Swarm, sent: Message, *, by: Transport | None = None, to: PeerId | None = None) -> None:
    peer = to or decode(sent.body, SessionSteps).steps[0].route[0]
    swarm.run(ask(by or swarm.trainer, peer, sent))
    swarm.run(asyncio.sleep(1.0))


def expected(swarm: Swarm, steps: Sequence[Tensor], between: Callable[[Any], None] = lambda _: None) -> list[Tensor]:
    """Compute the outputs on one machine."""
    cache, module, found = DynamicCache(), swarm.module, []
    with torch.no_grad():
        for number, one in enumerate(steps):
            if number:
                between(cache)
            found.append(module[1](module[0](one, cache), cache))  # type: ignore[index]
    return found


def count(swarm: Swarm, peer: PeerId) -> int:
    return swarm.servers[peer].sessions.num_steps


def test_steps_go_from_server_to_server_and_each_counts_once(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    given = [tokens(1, 3), tokens(2), tokens(3)]
    for number, hidden in enumerate(given, 1):
        for _ in range(2):  # the second call repeats the first, whose answer may be lost
            send(swarm, message(hidden, A, C, number=number))
    for number, output in enumerate(expected(swarm, given), 1):
        torch.testing.assert_close(client.outputs[number], output, rtol=0.0, atol=1e-14)
    assert (count(swarm, A), count(swarm, C)) == (3, 3)
    assert not client.failures


def test_operations_come_before_their_step(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    send(swarm, message(tokens(1, 4), A, C))
    crop = [CacheOperation(kind="crop", values=[2]), CacheOperation(kind="reorder", values=[1, 1])]
    send(swarm, message(tokens(2), A, C, number=2, operations=crop))

    def change(cache: Any) -> None:
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([1, 1]))

    wanted = expected(swarm, [tokens(1, 4), tokens(2)], change)[1]
    torch.testing.assert_close(client.outputs[2], wanted, rtol=0.0, atol=1e-14)


def test_a_server_that_comes_later_gets_all_steps(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    given = [tokens(1, 3), tokens(2), tokens(3)]
    for number in (1, 2):
        send(swarm, message(given[number - 1], A, C, number=number))
    request = SessionReplay(session=SESSION, stage_index=0, attempt=1, resume=3, route=[A, D])
    swarm.run(swarm.trainer.call(A, SESSION_REPLAY.name, encode(request), timeout=5.0))
    swarm.run(asyncio.sleep(1.0))
    assert count(swarm, D) == 2
    send(swarm, message(given[2], A, D, number=3, attempt=1))
    torch.testing.assert_close(client.outputs[3], expected(swarm, given)[2], rtol=0.0, atol=1e-14)
    # A late message of the former route does not change the route back.
    send(swarm, message(tokens(9), A, C, number=3))
    assert count(swarm, C) == 2


def test_a_server_that_is_gone_is_told_of(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    swarm.network.kill(C)
    send(swarm, message(tokens(1, 3), A, C))
    assert [(one.kind, one.stage_index, one.number) for one in client.failures] == [("unreachable", 1, 1)]


def test_a_server_without_the_steps_before_is_told_of(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    send(swarm, message(tokens(1, 3), A, C))
    swarm.servers[C].sessions.discard()
    send(swarm, message(tokens(2), A, C, number=2))
    assert [(one.kind, one.stage_index, one.number) for one in client.failures] == [("lost", 1, 2)]


def test_what_a_block_raises_ends_the_session(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    send(swarm, message(torch.full((1, 2, WIDTH), torch.nan, dtype=torch.float64), A, C))
    (failure,) = client.failures
    assert (failure.kind, failure.stage_index) == ("refused", 0)
    assert "the block does not like this" in failure.reason
    assert swarm.servers[A].sessions.num_open == 0


def test_weights_of_another_version_are_waited_for_and_then_refused(make_swarm: MakeSwarm) -> None:
    """The record may arrive here after the client's step."""
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C, version=3))
    assert not client.failures
    swarm.run(asyncio.sleep(400.0))
    (failure,) = client.failures
    assert failure.kind == "refused"
    assert "must reach version 3" in failure.reason


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"number": 2}, "has no steps of this session"),
        ({"generation": 1}, "run generation is 0"),
        ({"client": PeerId("stranger")}, "stranger"),
        ({"client": PeerId("other")}, "a step must come from its client other"),
        ({"route": [B, C], "to": A}, "route must begin with the server"),
        ({"adapters": [bytes(32), None]}, "no client's adapter"),
        ({"modes": [replace(MODE, grad=True), MODE]}, "without gradients"),
        ({"stage_index": 1}, "stage 1"),
        ({"stage_index": 7}, "stage 7"),
        ({"weights": 3}, "evaluation weights 3"),
        ({"hidden": ()}, r"must be \[rows, tokens"),
        ({"hidden": torch.zeros(3)}, r"must be \[rows, tokens"),
        ({"hidden": torch.zeros(0, 1, WIDTH)}, r"must be \[rows, tokens"),
        ({"recipe": None}, "must pass no cache"),
        ({"extras": []}, "must have a hidden state"),
    ],
)
def test_what_is_refused_changes_nothing(make_swarm: MakeSwarm, changes: dict[str, Any], refusal: str) -> None:
    swarm = begun(make_swarm)
    hidden, to = changes.pop("hidden", tokens(1)), changes.pop("to", A)
    with pytest.raises(SwarmError, match=refusal):
        send(swarm, message(hidden, *changes.pop("route", [A, C]), **changes), to=to)
    assert swarm.servers[A].sessions.num_open == 0


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"modes": [MODE]}, "for each of its 2 servers"),
        ({"adapters": [None]}, "for each of its 2 servers"),
        ({"modes": [replace(MODE, training=True), MODE]}, "a step in train mode must have a seed"),
        ({"adapters": [None, None], "drops": [True, False]}, "a step in train mode must have a seed"),
        ({"drops": [True, False], "seed": 1}, "must have as many dropout flags"),
    ],
)
def test_each_server_has_its_mode_and_its_adapter(make_swarm: MakeSwarm, changes: dict[str, Any], refusal: str) -> None:
    swarm = begun(make_swarm)
    sent = message(tokens(1), A, C)
    fields = {"steps": [{**msgspec.msgpack.decode(sent.body)["steps"][0], **changes}]}
    with pytest.raises(ProtocolError, match=refusal):
        send(swarm, Message(msgspec.msgpack.encode(fields), sent.tensors), to=A)
    assert swarm.servers[A].sessions.num_open == 0


def test_all_steps_have_one_adapter(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = begun(make_swarm)
    Client(swarm.trainer)
    host = swarm.servers[A].sessions._host
    found = host.stage_of
    monkeypatch.setattr(type(host), "stage_of", lambda self, step: found(replace(step, adapters=[])))
    send(swarm, message(tokens(1), A, C))
    with pytest.raises(ProtocolError, match="must have the same adapter"):
        send(swarm, message(tokens(2), A, C, number=2, adapters=[bytes(32), None]))


def test_nobody_continues_reads_or_ends_the_session_of_another_one(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C))
    other = swarm.network.transport("other")
    with pytest.raises(ProtocolError, match="this session belongs to trainer, not to other"):
        send(swarm, message(tokens(2), A, C, number=2, client=PeerId("other")), by=other)
    request = SessionReplay(session=SESSION, stage_index=0, attempt=9, resume=2, route=[A, D])
    with pytest.raises(SessionLost, match="no session of other with this id"):
        swarm.run(other.call(A, SESSION_REPLAY.name, encode(request), timeout=5.0))
    swarm.run(other.call(A, SESSION_CLOSE.name, encode(SessionClose(session=SESSION, keeps=False)), timeout=5.0))
    assert swarm.servers[A].sessions.num_open == 1
    stranger = swarm.network.transport("stranger")
    with pytest.raises(PeerError):
        send(swarm, message(tokens(1), A, C), by=stranger)
    swarm.run(
        swarm.trainer.call(A, SESSION_CLOSE.name, encode(SessionClose(session=SESSION, keeps=False)), timeout=5.0)
    )
    assert swarm.servers[A].sessions.num_open == 0
    swarm.run(other.close())
    swarm.run(stranger.close())


def test_sessions_that_nobody_continues_are_forgotten(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm, Limits(call_timeout=30.0, session_idle=60.0))
    Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C))
    swarm.run(asyncio.sleep(40.0))
    send(swarm, message(tokens(2), A, C, number=2))
    swarm.run(asyncio.sleep(40.0))
    assert swarm.servers[A].sessions.num_open == 1
    swarm.run(asyncio.sleep(60.0))
    assert swarm.servers[A].sessions.num_open == swarm.servers[C].sessions.num_open == 0
    with pytest.raises(SessionLost):
        send(swarm, message(tokens(3), A, C, number=3))


def test_memory_is_bounded_and_costs_time_alone(make_swarm: MakeSwarm) -> None:
    limit = 6 * 50 * WIDTH * 8
    swarm = begun(make_swarm, Limits(call_timeout=30.0, session_bytes=limit))
    client = Client(swarm.trainer)
    for number in range(40):
        send(swarm, message(tokens(number, 50, 1), A, C, session=f"{number:032}"))
        swarm.run(asyncio.sleep(6.0))  # a session that continues keeps its memory
        assert swarm.servers[A].sessions._used_bytes() <= 1.1 * limit
    assert 1 <= swarm.servers[A].sessions.num_open < 40
    assert not client.failures
    with pytest.raises(SessionLost):
        send(swarm, message(tokens(1, 1, 1), A, C, number=2, session=f"{0:032}"))
    newest = f"{39:032}"
    send(swarm, message(tokens(1, 1, 1), A, C, number=2, session=newest))
    wanted = expected(swarm, [tokens(39, 50, 1), tokens(1, 1, 1)])[1]
    torch.testing.assert_close(client.outputs[2], wanted, rtol=0.0, atol=1e-13)


def test_a_text_that_does_not_fit_is_refused(make_swarm: MakeSwarm) -> None:
    limit = 3 * 50 * WIDTH * 8
    swarm = begun(make_swarm, Limits(call_timeout=30.0, session_bytes=limit))
    client = Client(swarm.trainer)
    for number in (1, 2):
        send(swarm, message(tokens(number, 50, 1), A, C, number=number))
    (failure,) = client.failures
    assert failure.kind == "refused"
    assert f"may have {limit} bytes" in failure.reason
    assert swarm.servers[A].sessions.num_open == 0


def test_texts_that_all_go_on_do_not_drive_each_other_out(make_swarm: MakeSwarm) -> None:
    """Otherwise each would be computed again from its beginning for every token of the other."""
    limit = 23 * 50 * WIDTH * 4  # fits both steps of one text, and the first step of the other
    swarm = begun(make_swarm, Limits(call_timeout=30.0, session_bytes=limit))
    client = Client(swarm.trainer)
    sessions = [f"{number:032}" for number in range(2)]
    for number in (1, 2):
        for session in sessions:
            sent = message(tokens(number, 50, 1), A, C, number=number, session=session)
            swarm.run(ask(swarm.trainer, A, sent))
        swarm.run(asyncio.sleep(0.1))
    (failure,) = [one for one in client.failures if one.stage_index == 0]
    assert failure.kind == "busy"
    assert swarm.servers[A].sessions.num_open == 1
    others = [one for one in sessions if one != failure.session]
    swarm.run(asyncio.sleep(0.1))
    send(swarm, message(tokens(9, 1, 1), A, C, number=3, session=others[0]))
    assert 3 in client.outputs, "the other one goes on"


def test_a_text_that_found_no_room_begins_again_only_with_as_much_as_it_had(make_swarm: MakeSwarm) -> None:
    """Otherwise its client computes it whole again and again, and each time it is dropped at the same step."""
    swarm = begun(make_swarm, Limits(call_timeout=30.0, session_bytes=64 * 50 * WIDTH * 4))
    client = Client(swarm.trainer)
    small, large = f"{1:032}", f"{2:032}"
    swarm.run(ask(swarm.trainer, A, message(tokens(1, 50), A, C, session=small)))
    number = 0
    while not client.failures:
        number += 1
        swarm.run(ask(swarm.trainer, A, message(tokens(number, 50), A, C, number=number, session=large)))
        swarm.run(asyncio.sleep(0.1))
    failure, before = client.failures[0], count(swarm, A)
    assert (number > 2, failure.kind, failure.session) == (True, "busy", large)
    again = message(tokens(1, 50), A, C, session=large, attempt=1)
    with pytest.raises(Busy):
        swarm.run(ask(swarm.trainer, A, again))
    assert count(swarm, A) == before, "it computed nothing"
    swarm.run(asyncio.sleep(6.0))  # the small text does not continue, and gives way
    send(swarm, again)
    assert count(swarm, A) == before + 1


def test_steps_that_overtake_each_other_are_put_in_order(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    given = [tokens(number) for number in range(1, 9)]
    send(swarm, message(given[0], A, C))

    async def go() -> None:
        later = [ask(swarm.trainer, A, message(given[number - 1], A, C, number=number)) for number in range(8, 1, -1)]
        await asyncio.gather(*later)
        await asyncio.sleep(1.0)

    swarm.run(go())
    torch.testing.assert_close(client.outputs[8], expected(swarm, given)[-1], rtol=0.0, atol=1e-13)
    with pytest.raises(SessionLost, match="has steps 1 to 8 of this session, got step 10"):
        swarm.run(ask(swarm.trainer, A, message(given[0], A, C, number=10), timeout=30.0))
    with pytest.raises(SessionLost, match="has steps 1 to 8 of this session, got step 90"):
        send(swarm, message(given[0], A, C, number=90))


def test_a_step_that_is_refused_or_early_concerns_no_other_session(make_swarm: MakeSwarm) -> None:
    """An early step is refused at once, because waiting for earlier steps would delay the others' next messages."""
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    sessions = [f"{number:032}" for number in range(4)]
    for session in sessions:
        send(swarm, message(tokens(1), A, C, session=session))
    client.outputs.clear()
    changes: list[dict[str, Any]] = [{"number": 2}, {"number": 3}, {"number": 2, "generation": 1}, {"number": 2}]
    given = [tokens(2 + number) for number in range(4)]
    sent = [
        message(hidden, A, C, session=session, **own)
        for hidden, session, own in zip(given, sessions, changes, strict=True)
    ]

    async def go() -> SessionStepsReply:
        began_s = asyncio.get_running_loop().time()
        stream = swarm.trainer.stream(A, SESSION_STEPS.name, together(*sent), timeout=5.0, max_bytes=0)
        answer = decode((await stream).body, SessionStepsReply)
        assert asyncio.get_running_loop().time() - began_s < 1.0
        await asyncio.sleep(1.0)
        return answer

    early, refused = swarm.run(go()).refused
    assert (early.index, early.is_early) == (1, True)
    assert (refused.index, refused.is_early, refused.error) == (2, False, "ProtocolError")
    assert [swarm.servers[C].sessions._sessions[session, 1].computed for session in sessions] == [2, 1, 1, 2]
    torch.testing.assert_close(client.outputs[2], expected(swarm, [tokens(1), given[3]])[1], rtol=0.0, atol=1e-13)


def test_the_longest_refusals_fit_into_one_answer(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = begun(make_swarm)

    async def refuse(*_: Any, **__: Any) -> bool:
        raise ProtocolError("\U0001f600" * 10_000)

    monkeypatch.setattr(swarm.servers[A].sessions, "_accept", refuse)
    steps = [message(tokens(1), A, C, session=f"{number:032}") for number in range(MAX_TOGETHER)]
    sent = swarm.trainer.stream(A, SESSION_STEPS.name, together(*steps), timeout=5.0, max_bytes=0)
    refused = decode(swarm.run(sent).body, SessionStepsReply).refused
    assert [len(one.reason) >= 1000 for one in refused] == [True] * MAX_TOGETHER


def test_tensors_without_a_step_are_refused(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    sent = message(tokens(1), A, C)
    with pytest.raises(ProtocolError, match="must have 1 tensors in all, got 2"):
        send(swarm, Message(sent.body, (*sent.tensors, tokens(1))))
    assert swarm.servers[A].sessions.num_open == 0


def test_a_server_takes_few_steps_before_it_has_computed_them(make_swarm: MakeSwarm) -> None:
    """Otherwise one client could fill its memory."""
    swarm = begun(make_swarm)
    Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C))
    held = swarm.servers[A].sessions._sessions[SESSION, 0]
    answered = []

    async def one(number: int) -> None:
        sent = message(tokens(number), A, C, number=number)
        await ask(swarm.trainer, A, sent, timeout=30.0)
        answered.append(number)

    async def go() -> None:
        async with held.computing:
            await asyncio.gather(*(one(number) for number in range(2, WINDOW + 2)))
            waiting = [asyncio.ensure_future(one(WINDOW + 2)) for _ in range(2 * WINDOW)]
            await asyncio.sleep(20.0)
            assert held.accepted - held.computed == WINDOW
            # A step that is repeated without end waits no more than twice.
            assert answered[WINDOW:] == [WINDOW + 2] * (2 * WINDOW - 2)
            assert held.waiting == {WINDOW + 2: 2}
        await asyncio.gather(*waiting)

    swarm.run(go())
    assert (held.accepted, held.waiting) == (WINDOW + 2, {})


def test_steps_under_way_do_not_wait_for_the_answers_to_others(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    given = [tokens(number) for number in range(1, 6)]
    send(swarm, message(given[0], A, C))
    swarm.network._latency_s = 1.0  # three trips lead to the client

    async def go() -> None:
        sent = [message(given[number - 1], A, C, number=number, resume=2) for number in range(2, 6)]
        await asyncio.gather(*(ask(swarm.trainer, A, one) for one in sent), asyncio.sleep(3.5))

    swarm.run(go())
    assert sorted(client.outputs) == [1, 2, 3, 4, 5]
    torch.testing.assert_close(client.outputs[5], expected(swarm, given)[-1], rtol=0.0, atol=1e-13)


def test_a_client_gets_each_output_again_that_it_may_lack(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    given = [tokens(number) for number in range(1, 5)]
    for number in range(1, 5):
        send(swarm, message(given[number - 1], A, C, number=number, resume=min(number, 2)))
    assert [*swarm.servers[C].sessions._sessions[SESSION, 1].kept] == [2, 3, 4]
    client.outputs.clear()
    for number in (1, 2, 3):
        send(swarm, message(given[number - 1], A, C, number=number, resume=2))
    assert sorted(client.outputs) == [2, 3]
    assert (count(swarm, A), count(swarm, C)) == (4, 4)


def test_a_step_that_a_client_repeats_without_end_is_sent_on_few_times(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C))
    held = swarm.servers[A].sessions._sessions[SESSION, 0]

    async def go() -> None:
        async with held.replaying:
            for _ in range(3 * WINDOW):
                await ask(swarm.trainer, A, message(tokens(1), A, C))
            assert held.num_repeated == 2 * WINDOW
        await asyncio.sleep(5.0)

    swarm.run(go())
    assert held.num_repeated == 0


def test_what_a_block_returns_besides_tensors_is_no_ones_end(make_swarm: MakeSwarm) -> None:
    """It cannot be sent. The session ends with the reason, and the server goes on."""

    class Odd(Remembering):
        @override
        def forward(self, x: Tensor, cache: Any) -> Any:
            return super().forward(x, cache), {1, 2}

    torch.manual_seed(0)
    swarm = make_swarm("a b", "c d", module=nn.Sequential(Odd(0), Remembering(1)))
    client = Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C))
    (failure,) = client.failures
    assert (failure.kind, failure.stage_index) == ("refused", 0)
    assert "set" in failure.reason
    with pytest.raises(SessionLost):  # the server answers
        send(swarm, message(tokens(1), A, C, number=2))


@pytest.mark.parametrize("calls", ["{", "[" * 9999, "7", '{"0": 7}', '["tensor", 0]'])
def test_calls_of_blocks_that_cannot_be_read_end_only_their_session(make_swarm: MakeSwarm, calls: str) -> None:
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C, extras={"cache": IN_SESSION, CALLS: calls}))
    (failure,) = client.failures
    assert (failure.kind, failure.stage_index) == ("refused", 0)
    assert swarm.servers[A].sessions.num_open == 0
    send(swarm, message(tokens(1), A, C, session="7" * 32))
    assert client.outputs


def test_a_forward_without_a_cache_is_a_session_of_one_step(make_swarm: MakeSwarm) -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH).double() for _ in range(2)))
    swarm = make_swarm("a b", "c d", module=module)
    client = Client(swarm.trainer)
    extras = {CALLS: {name: ({}, ()) for name in ("0", "1")}}
    send(swarm, message(tokens(1), A, C, recipe=None, extras=extras))
    with torch.no_grad():
        torch.testing.assert_close(client.outputs[1], swarm.module(tokens(1)), rtol=0.0, atol=0.0)
    with pytest.raises(ProtocolError, match="must have exactly one step"):
        send(swarm, message(tokens(1), A, C, recipe=None, extras=extras, number=2))
    operations = [CacheOperation(kind="reset", values=[])]
    with pytest.raises(ProtocolError, match="must have exactly one step"):
        send(swarm, message(tokens(1), A, C, recipe=None, extras=extras, operations=operations, session="8" * 32))


def test_there_are_not_too_many_sessions(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_swarm.server.inference.handlers._MAX_SESSIONS", 5)
    swarm = begun(make_swarm)
    client = Client(swarm.trainer)
    for number in range(20):
        send(swarm, message(tokens(number), A, C, session=f"{number:032}"))
        swarm.run(asyncio.sleep(1.0))
        assert swarm.servers[A].sessions.num_open <= 5
    assert not client.failures


@pytest.mark.parametrize("num_bytes", [0, 40 * 50 * WIDTH * 8])  # the first limit is that of the number of sessions
def test_sessions_of_one_client_drive_out_none_of_another(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr("lightning_swarm.server.inference.handlers._MAX_SESSIONS", 40 if num_bytes else 5)
    swarm = begun(make_swarm, Limits(call_timeout=30.0, **({"session_bytes": num_bytes} if num_bytes else {})))
    client, other = Client(swarm.trainer), swarm.network.transport("other")
    Client(other)
    send(swarm, message(tokens(0, 50), A, C))
    for number in range(20):
        swarm.run(asyncio.sleep(10.0))  # all sessions are idle, and the first for longest
        hidden = tokens(number, 200)
        send(swarm, message(hidden, A, C, session=f"{number:032}", client=PeerId("other")), by=other)
        assert (SESSION, 0) in swarm.servers[A].sessions._sessions
    assert swarm.servers[A].sessions.num_open < 20
    send(swarm, message(tokens(1), A, C, number=2))
    assert not client.failures
    assert {*client.outputs} == {1, 2}
    swarm.run(other.close())


@pytest.mark.parametrize(
    "operation", [CacheOperation(kind="repeat", values=[1 << 30]), CacheOperation(kind="select", values=[0] * 60_000)]
)
def test_a_cache_is_not_blown_up(make_swarm: MakeSwarm, operation: CacheOperation) -> None:
    swarm = begun(make_swarm, Limits(call_timeout=30.0, session_bytes=1 << 20))
    client = Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C))
    send(swarm, message(tokens(2), A, C, number=2, operations=[operation]))
    (failure,) = client.failures
    assert failure.kind == "refused"
    assert "a cache may have 1048576 bytes" in failure.reason


@pytest.mark.parametrize("method", [SESSION_REPLAY.name, SESSION_CLOSE.name])
def test_garbage_is_refused(make_swarm: MakeSwarm, method: str) -> None:
    swarm = begun(make_swarm)
    rng = random.Random(0)
    for _ in range(50):
        with pytest.raises(ProtocolError):
            swarm.run(swarm.trainer.call(A, method, rng.randbytes(rng.randrange(40)), timeout=5.0))


def test_mutated_steps_crash_nothing(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    Client(swarm.trainer)
    send(swarm, message(tokens(1), A, C))
    rng, good = random.Random(0), message(tokens(2), A, C, number=2)
    refused = 0
    for _ in range(2000):
        body = bytearray(good.body)
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        try:
            swarm.run(ask(swarm.trainer, A, Message(bytes(body), good.tensors)))
        except SwarmError:
            refused += 1
    swarm.run(asyncio.sleep(1.0))
    assert refused > 1000
    # The servers live, and a new session works.
    client_steps = count(swarm, A)
    send(swarm, message(tokens(1), A, C, session="7" * 32))
    assert count(swarm, A) == client_steps + 1
