"""A server with invalid answers is excluded or avoided; the weights equal a run's without it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from lightning_swarm.core.errors import (
    ConfigError,
    LeaseRevoked,
    ProtocolError,
    Replaced,
    RunOver,
    StageError,
    StepError,
    SwarmError,
)
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.step import AverageReply, FreezeReply
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import AVERAGE, BACKWARD, FETCH, FORWARD, FREEZE, WAIT
from lightning_swarm.testing import FaultPlan
from tests.faults.harness import FaultySwarm
from tests.faults.plans import STAGES, TRAINERS, VOTERS

LIAR = PeerId("b")
FIRST_LIE = 1  # step
Answer = Callable[[PeerId, Any], Awaitable[Any]]


class LyingSwarm(FaultySwarm):
    """One server is malicious from the second step on."""

    def __init__(self) -> None:
        super().__init__(*STAGES, plan=FaultPlan(), voters=VOTERS, trainers=TRAINERS)
        self.num_lies = 0

    def lies(self, method: str, lie: Callable[[Any], Any], *, who: PeerId = LIAR) -> None:
        transport: Any = self.servers[who]._transport
        calls, streams = transport._call_handlers, transport._stream_handlers
        if method in calls:
            calls[method] = self._lying(calls[method], lie)
        if method in streams:
            handler, *bounds = streams[method]
            streams[method] = self._lying(handler, lie), *bounds

    def _lying(self, honest: Answer, lie: Callable[[Any], Any]) -> Answer:
        async def answer(caller: PeerId, request: Any) -> Any:
            reply = await honest(caller, request)
            if self.servers[LIAR].steps.version < FIRST_LIE:
                return reply
            self.num_lies += 1
            return lie(reply)

        return answer

    def tell(self) -> None:
        try:
            self.train()
            assert self.num_lies > 0
            self.audit_samples()
            self.audit_state()
        finally:
            self.close()


def test_an_error_of_all_servers_of_a_stage_ends_the_run() -> None:
    """Such an error comes from the model or the user's code, so no server could do better."""
    swarm = LyingSwarm()
    for who in STAGES[1].split():
        swarm.lies(FORWARD.name, refuse(ConfigError("blocks must not do this")), who=PeerId(who))
    try:
        with pytest.raises(ConfigError, match="blocks must not do this"):
            swarm.train()
        assert swarm.num_lies >= len(STAGES[1].split())
    finally:
        swarm.close()


def refuse(error: SwarmError) -> Callable[[Any], Any]:
    def lie(reply: Any) -> Any:
        raise error

    return lie


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (FORWARD.name, ProtocolError("no")),
        (FORWARD.name, RunOver("all done")),
        (BACKWARD.name, Replaced("by me")),
        (BACKWARD.name, ConfigError("wrong")),
        (FORWARD.name, StageError("out of memory")),
        (WAIT.name, StageError("out of memory")),
        (WAIT.name, LeaseRevoked("struck")),
    ],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
def test_an_error_of_one_server_ends_no_run(method: str, error: SwarmError) -> None:
    swarm = LyingSwarm()
    swarm.lies(method, refuse(error))
    swarm.tell()


def freezing(**changes: Any) -> Callable[[bytes], bytes]:
    def lie(body: bytes) -> bytes:
        reply = decode(body, FreezeReply)
        return encode(replaced(reply, ledgers=[replaced(ledger, **changes) for ledger in reply.ledgers]))

    return lie


def averaging(change: Callable[[AverageReply], AverageReply]) -> Callable[[bytes], bytes]:
    return lambda body: encode(change(decode(body, AverageReply)))


def misweighing(body: bytes) -> bytes:
    reply = decode(body, FreezeReply)
    doubled = [
        replaced(ledger, origins=[(2 * weight, trainer, number) for weight, trainer, number in ledger.origins])
        for ledger in reply.ledgers
    ]
    return encode(replaced(reply, ledgers=doubled))


def negative(reply: AverageReply) -> AverageReply:
    return replaced(reply, parts=[replaced(part, squared_norm=-1.0) for part in reply.parts])


LIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no message": (FREEZE.name, lambda _: b"\xc1"),
    "an error": (FREEZE.name, refuse(StepError("lost"))),
    "other weights": (FREEZE.name, freezing(version_hash=7)),
    "flags of more parameters": (FREEZE.name, freezing(touched=b"\x01\x02\x03")),
    "receipts of nothing, for ever": (
        FREEZE.name,
        freezing(held=[(1 << 20, 0, b"\x01")], origins=[(4.0, PeerId("other"), 1)]),
    ),
    "receipts of batches without a weight": (FREEZE.name, freezing(origins=[])),
    "that gradients came with another weight": (FREEZE.name, misweighing),
    "more receipts than a message may name": (FREEZE.name, freezing(held=[(1, 0, b"\xff" * 60_000)])),
    "no mean": (AVERAGE.name, lambda _: b"\xc1"),
    "an error in place of a mean": (AVERAGE.name, refuse(StepError("lost"))),
    "a negative norm": (AVERAGE.name, averaging(negative)),
    "a failure that nobody had": (
        AVERAGE.name,
        averaging(lambda _: AverageReply(parts=[], failure="I did not like it")),
    ),
}


@pytest.mark.first_cells(4)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.replace(" ", "-"))
def test_what_one_server_says_of_a_step_is_its_own_fault(lie: str) -> None:
    swarm = LyingSwarm()
    swarm.lies(*LIES[lie])
    try:
        swarm.train()
        assert swarm.num_lies > 0
        swarm.audit_samples()
        swarm.audit_state()
        assert LIAR not in swarm.survivors()
        assert swarm.count("gone") > 0
        # The batches that passed through a server with other weights run again, through no trainer's fault.
        assert swarm.count("strike") == (lie == "other weights"), "no trainer was blamed"
    finally:
        swarm.close()


def test_a_server_that_hides_what_it_was_sent_has_no_trainer_blamed() -> None:
    swarm = LyingSwarm()
    swarm.lies(FREEZE.name, freezing(held=[], origins=[]))
    try:
        swarm.train()
        assert swarm.num_lies > 0
        assert swarm.count("strike") == 0
        swarm.audit_samples()
        swarm.audit_state()
    finally:
        swarm.close()


def test_what_a_server_computed_is_no_message() -> None:
    """The reader, a server of the next stage or the trainer, reports it, and the microbatch takes another route."""
    swarm = LyingSwarm()
    for method in (FETCH.name, WAIT.name):
        swarm.lies(method, lambda message: Message(b"\xc1", message.tensors))
    swarm.tell()
