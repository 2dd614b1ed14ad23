"""A server's disclosures of its sums and means, and the peers that may request them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced

from lightning_swarm.core.errors import NotCoordinator, NotMember, ProtocolError, SwarmError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.parts import (
    ExamineReply,
    ExamineRequest,
    MeanReplacement,
    PartProjections,
    ProjectReply,
    ProjectRequest,
    VectorRequest,
)
from lightning_swarm.protocol.messages.step import AverageRequest, Closing, FreezeReply, FreezeRequest, NamedReceipts
from lightning_swarm.protocol.messages.wire import WireMessage, decode, encode
from lightning_swarm.protocol.rpc import AVERAGE, EXAMINE, FREEZE, PROJECT, REPLACE_MEAN, VECTOR
from lightning_swarm.server.audit.kept_work import sum_digest
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, Swarm, closing, key, rows

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
CLOSING = closing(absent=[C])
MEAN = torch.full((12,), 0.5, dtype=torch.float64)


def call(swarm: Swarm, caller: PeerId, peer: PeerId, method: str, request: WireMessage) -> bytes:
    transport = swarm.trainer if caller == LEAD else swarm.servers[caller]._transport
    return swarm.run(transport.call(peer, method, encode(request), timeout=5.0))


def stream(swarm: Swarm, caller: PeerId, method: str, request: WireMessage, *tensors: torch.Tensor) -> Message:
    transport = swarm.trainer if caller == LEAD else swarm.servers[caller]._transport
    return swarm.run(transport.stream(B, method, Message(encode(request), tensors), timeout=5.0))


def averaged(swarm: Swarm) -> bytes:
    """Let `b` hold the mean of a round, without `c`; return the digest that it committed to."""
    swarm.run(swarm.through(key(), rows(1), route=[A, B]))
    frozen = call(swarm, A, B, FREEZE.name, FreezeRequest(generation=0, step=0))
    named = NamedReceipts(stage_index=1, receipts=[(0, 0, b"\x01")], origins=[(1.0, LEAD, 1)])
    call(swarm, A, B, AVERAGE.name, AverageRequest(closing=CLOSING, named=[named]))
    (ledger,) = decode(frozen, FreezeReply).ledgers
    digest = ledger.sum_digest
    assert isinstance(digest, bytes)
    return digest


def held(swarm: Swarm) -> torch.Tensor:
    return swarm.servers[B].steps.rounds.held(CLOSING).gradients[1]


@pytest.fixture
def swarm(make_swarm: MakeSwarm) -> Swarm:
    return make_swarm("a", "b c", audit_share=0.0)


def test_a_server_shows_what_it_committed_to(swarm: Swarm) -> None:
    digest = averaged(swarm)
    asked = VectorRequest(closing=CLOSING, stage_index=1, of="sum")
    (values,) = stream(swarm, A, VECTOR.name, asked).tensors
    assert sum_digest(values) == digest
    (mean,) = stream(swarm, A, VECTOR.name, replaced(asked, of="mean")).tensors
    torch.testing.assert_close(mean, values / CLOSING.total_weight)
    (answer,) = decode(call(swarm, A, B, PROJECT.name, ProjectRequest(closing=CLOSING, seed=7)), ProjectReply).stages
    assert answer.squared_norm == pytest.approx(float(mean.square().sum()))
    assert sum(norm**2 for norm in answer.norms) == pytest.approx(float(values.square().sum()))


def test_without_audits_a_server_commits_to_nothing_and_shows_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c")
    with pytest.raises(AssertionError):
        averaged(swarm)
    with pytest.raises(ProtocolError, match="is in no audited run"):
        call(swarm, A, B, PROJECT.name, ProjectRequest(closing=CLOSING, seed=7))
    with pytest.raises(ProtocolError, match="is in no audited run"):
        stream(swarm, A, VECTOR.name, VectorRequest(closing=CLOSING, stage_index=1, of="sum"))


ASKS: dict[str, Callable[[Swarm, PeerId, Closing, int], object]] = {
    "project": lambda swarm, caller, one, _: call(swarm, caller, B, PROJECT.name, ProjectRequest(closing=one, seed=7)),
    "sum": lambda swarm, caller, one, stage: stream(
        swarm, caller, VECTOR.name, VectorRequest(closing=one, stage_index=stage, of="sum")
    ),
    "mean": lambda swarm, caller, one, stage: stream(
        swarm, caller, VECTOR.name, VectorRequest(closing=one, stage_index=stage, of="mean")
    ),
    "replace": lambda swarm, caller, one, stage: stream(
        swarm, caller, REPLACE_MEAN.name, MeanReplacement(closing=one, stage_index=stage), MEAN
    ),
}


@pytest.mark.parametrize("ask", ASKS)
def test_only_the_coordinator_is_shown_anything_and_of_the_round_that_is_held(swarm: Swarm, ask: str) -> None:
    wrong: list[tuple[PeerId, Closing, int, type[SwarmError]]] = [
        (LEAD, CLOSING, 1, ProtocolError),
        (C, CLOSING, 1, NotCoordinator),
        (A, replaced(CLOSING, generation=1), 1, ProtocolError),
        (A, replaced(CLOSING, step=1), 1, ProtocolError),
        (A, replaced(CLOSING, round=1), 1, ProtocolError),
        (A, replaced(CLOSING, absent=[]), 1, ProtocolError),
    ]
    if ask != "project":
        wrong.append((A, CLOSING, 0, NotMember))
    with pytest.raises(ProtocolError):
        ASKS[ask](swarm, A, CLOSING, 1)  # not frozen
    averaged(swarm)
    before, state = held(swarm), swarm.state()
    for caller, one, stage, error in wrong:
        with pytest.raises(error):
            ASKS[ask](swarm, caller, one, stage)
        assert swarm.state() == state
    ASKS[ask](swarm, A, CLOSING, 1)
    assert (held(swarm) is before) == (ask != "replace")


def test_a_mean_is_replaced_by_one_of_its_kind_and_stays_replaced(swarm: Swarm) -> None:
    averaged(swarm)
    state, request = swarm.state(), MeanReplacement(closing=CLOSING, stage_index=1)
    for tensors in ((), (MEAN, MEAN), (MEAN[1:],), (MEAN.float(),), (MEAN.view(1, -1),)):
        with pytest.raises(ProtocolError, match="a mean of stage 1 must be"):
            stream(swarm, A, REPLACE_MEAN.name, request, *tensors)
        assert swarm.state() == state
    stream(swarm, A, REPLACE_MEAN.name, request, MEAN)
    assert torch.equal(held(swarm), MEAN)
    named = NamedReceipts(stage_index=1, receipts=[(0, 0, b"\x01")], origins=[(1.0, LEAD, 1)])
    call(swarm, A, B, AVERAGE.name, AverageRequest(closing=CLOSING, named=[named]))  # a late copy
    assert torch.equal(held(swarm), MEAN)


def examine(swarm: Swarm, **changes: Any) -> ExamineRequest:
    (answer,) = decode(call(swarm, A, B, PROJECT.name, ProjectRequest(closing=CLOSING, seed=7)), ProjectReply).stages
    fields: dict[str, Any] = {
        "closing": CLOSING,
        "seed": 7,
        "stage_index": 1,
        "length": len(MEAN),
        "dtype": "float64",
        "answers": {B: answer},
        "commitments": {B: changes.pop("digest")},
        "drawn": None,
    }
    return ExamineRequest(**fields | changes)


def test_a_server_examines_others_only_for_itself(swarm: Swarm) -> None:
    request = examine(swarm, digest=averaged(swarm))
    for caller, peer in ((A, B), (B, A), (LEAD, A), (B, B)):
        with pytest.raises((ProtocolError, NotCoordinator)):
            call(swarm, caller, peer, EXAMINE.name, request)
    with pytest.raises(ProtocolError, match="answers must come from the members"):
        call(swarm, A, A, EXAMINE.name, replaced(request, answers={}))
    for change in ({"sums": []}, {"norms": [-1.0] * 1024}, {"parts": []}, {"given": []}):
        with pytest.raises(ProtocolError):
            call(swarm, A, A, EXAMINE.name, replaced(request, answers={B: replaced(request.answers[B], **change)}))
    for changes in ({"length": 1 << 50}, {"commitments": {}}):
        reply = decode(call(swarm, A, A, EXAMINE.name, replaced(request, **changes)), ExamineReply)
        assert "sent a sum" in reply.lies[B]
    for changes in ({"length": 0}, {"dtype": "float32"}):  # more bytes than allowed
        reply = decode(call(swarm, A, A, EXAMINE.name, replaced(request, **changes)), ExamineReply)
        assert (reply.lies, [*reply.unreached]) == ({}, [B])
    reply = decode(call(swarm, A, A, EXAMINE.name, request), ExamineReply)
    assert (reply.lies, reply.contradictions, reply.unreached) == ({}, [], {})
    assert reply.squared_norm == pytest.approx(request.answers[B].squared_norm)
    drawn = decode(call(swarm, A, A, EXAMINE.name, replaced(request, drawn=[B])), ExamineReply)
    assert (drawn.lies, drawn.squared_norm) == ({}, None)


def lied(swarm: Swarm, change: Callable[[PartProjections], PartProjections]) -> dict[PeerId, str]:
    request = examine(swarm, digest=averaged(swarm))
    request = replaced(request, answers={B: change(request.answers[B])})
    return decode(call(swarm, A, A, EXAMINE.name, request), ExamineReply).lies


def test_rounding_is_no_lie(swarm: Swarm) -> None:
    def rounded(answer: PartProjections) -> PartProjections:
        sums, means = ([number * (1 + 1e-13) for number in one] for one in (answer.sums, answer.means))
        return replaced(answer, sums=sums, means=means, squared_norm=answer.squared_norm * (1 - 1e-13))

    assert lied(swarm, rounded) == {}


def test_a_commitment_to_another_sum_is_a_lie(swarm: Swarm) -> None:
    averaged(swarm)
    request = examine(swarm, digest=bytes(32))
    for drawn in (None, [B]):
        reply = decode(call(swarm, A, A, EXAMINE.name, replaced(request, drawn=drawn)), ExamineReply)
        assert "sent a sum" in reply.lies[B]
    reply = decode(call(swarm, A, A, EXAMINE.name, replaced(request, drawn=[])), ExamineReply)
    assert reply.lies == {}


def test_who_is_gone_is_told_apart_from_who_lies(swarm: Swarm) -> None:
    request = examine(swarm, digest=averaged(swarm))
    swarm.network.kill(B)
    reply = decode(call(swarm, A, A, EXAMINE.name, request), ExamineReply)
    assert reply.unreached.keys() == {B}
    assert reply.lies == {}


@pytest.mark.parametrize("settings", [{}, {"microbatch_size": 2}], ids=["floats", "fixed-point"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_no_number_skips_the_step_and_convicts_nobody(
    make_swarm: MakeSwarm, settings: dict[str, Any], value: float
) -> None:
    swarm = make_swarm("a", "b c", audit_share=0.0, target_batch_size=4, **settings)
    first = swarm.run(swarm.step(rows(1), torch.full_like(rows(2), value)))
    assert first.outcome == "skip"
    second = swarm.run(swarm.step(rows(3), rows(4)))
    assert second.outcome == "apply"
    for server in swarm.servers.values():
        assert server.events.counts.keys() <= {"disputed"}, "here nobody answers who would have work computed again"
