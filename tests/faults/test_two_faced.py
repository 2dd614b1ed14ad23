"""Servers that send the trainer, or each other, tensors that contradict their claims, beside honest servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.coordinator.audit import policy, step_audits
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.core.errors import DeadlineExceeded, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.audits import AuditRequest
from lightning_swarm.protocol.messages.calls import (
    BackwardRequest,
    CallKey,
    ForwardRequest,
    Origin,
    Receipt,
    WaitRequest,
    pack,
    pack_origins,
)
from lightning_swarm.protocol.messages.step import FreezeRequest
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.audit.handlers import AuditHandlers
from lightning_swarm.server.compute import ForwardCall
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.handlers import ComputeHandlers
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase
from tests.adversaries.adversary import Adversary
from tests.faults.test_audited import SINCE, WIDTH, Model, audited, events_of, honest_weights

# The last stage has peer-0, peer-2 and peer-4, the first has peer-1, peer-3 and peer-5.
LAST, FIRST = "peer-2", "peer-3"

ROUNDING = 1e-14
"""Tolerance between native and portable arithmetic; a stage with several kinds of machines steps with the latter."""


class Around(Model):
    """The first layer is the trainer's own, so the first stage sends it gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    @override
    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.net(self.first(inputs)) - targets).square().mean()


def give_other(monkeypatch: pytest.MonkeyPatch, liar: str, direction: str) -> list[str]:
    """Make a server send other tensors than it computed and claims; return their names."""
    fulfil, given = TicketStore.fulfil, list[str]()

    def lying(self: TicketStore, name: str, message: Any, *rest: Any, **more: Any) -> None:
        if self._transport.peer_id == liar and f"/{direction}" in name and ".t" in name:
            given.append(name)
            message = Message(message.body, tuple(2 * tensor for tensor in message.tensors))
        fulfil(self, name, message, *rest, **more)

    monkeypatch.setattr(TicketStore, "fulfil", lying)
    return given


def refuse_backwards(monkeypatch: pytest.MonkeyPatch, liar: str) -> list[int]:
    """Make a server refuse all backwards, so that other servers compute them; return the steps."""
    backward, refused = ComputeHandlers._backward, list[int]()

    async def refusing(self: ComputeHandlers, trainer: Any, stage: Any, request: BackwardRequest, *rest: Any) -> None:
        if self._transport.peer_id == liar and not request.key.evaluation:
            refused.append(request.key.step)
            raise ProtocolError("it will not")
        await backward(self, trainer, stage, request, *rest)

    monkeypatch.setattr(ComputeHandlers, "_backward", refusing)
    return refused


def strikes(strategy: InMemoryStrategy) -> list[int | None]:
    return [one.step for one in strategy.servers[0].events.newest if one.kind == "strike"]


# ------------------------------------------------------------------ what the trainer gets


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "liar", "direction"), [(Model, LAST, "forward"), (Around, FIRST, "backward")])
def test_what_is_claimed_otherwise_counts_in_no_step(
    monkeypatch: pytest.MonkeyPatch, model: type[Model], liar: str, direction: str
) -> None:
    """No audit detects it, because its claim is true. The third time the server is excluded."""
    expected = honest_weights(6, num_stages=2, model=model, pipeline="net")
    given = give_other(monkeypatch, liar, direction)
    found, strategy = audited(6, num_stages=2, model=model(), share=0.0, pipeline="net")
    assert given
    assert strikes(strategy) == [0, 1, 2]
    assert events_of(strategy, "gone") == {liar}
    assert not events_of(strategy, "convicted")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("arithmetic", [None, "abacus"])
def test_who_leaves_backwards_to_others_makes_few_steps_run_again(
    monkeypatch: pytest.MonkeyPatch, arithmetic: str | None
) -> None:
    """Other servers then claim its outputs; also tested with a false report of its kind of machine."""
    expected = honest_weights(6, num_stages=2)
    given, refused = give_other(monkeypatch, LAST, "forward"), refuse_backwards(monkeypatch, LAST)
    true = GradientSums.arithmetic.fget
    assert true is not None
    said = property(lambda self: arithmetic if arithmetic and self._me.peer_id == LAST else true(self))
    monkeypatch.setattr(GradientSums, "arithmetic", said)
    found, strategy = audited(6, num_stages=2)
    assert given
    assert refused
    assert strikes(strategy) == [0, 1, 2]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=ROUNDING if arithmetic else 0.0)


@pytest.mark.thorough
def test_who_is_gone_before_it_has_claimed_anything_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = honest_weights(6, num_stages=2)
    given = give_other(monkeypatch, LAST, "forward")
    found, strategy = audited(6, num_stages=2, faults=FaultPlan().kill(LAST, at=Phase.CLOSE))
    assert given
    assert strikes(strategy)
    assert not events_of(strategy, "convicted")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_where_a_step_closes_again_lots_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that causes a repeat knows the first draw's servers, and would cheat only then."""
    for name in ("PROBATION", "_WARM_UP"):
        monkeypatch.setattr(policy, name, 0)
    monkeypatch.setattr(step_audits, "share_of_step", lambda *_, **__: 0.0)
    expected = honest_weights(6, num_stages=2)
    strike, struck = OpenStep.strike, set[int]()

    def striking(self: OpenStep, firsts: Any) -> Any:
        struck.add(self.step)
        return strike(self, firsts)

    monkeypatch.setattr(OpenStep, "strike", striking)
    give_other(monkeypatch, LAST, "forward")
    refuse_backwards(monkeypatch, LAST)
    liar = Adversary("peer-3", "scaled_sum", strength=1.0001)
    liar.lies_in = lambda step: step in struck  # type: ignore[method-assign]
    found, strategy = audited(6, liar, num_stages=2)
    assert liar.struck
    assert events_of(strategy, "convicted") == {"peer-3"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


# ------------------------------------------------------------------ what servers get from each other


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Model, Around])
def test_who_gives_others_something_false_and_leaves_the_backward_to_others_is_left_out(
    monkeypatch: pytest.MonkeyPatch, model: type[Model]
) -> None:
    """Its replacements contradict the servers that computed with its outputs, and all of these are honest."""
    expected = honest_weights(6, num_stages=2, model=model, pipeline="net")
    given, refused = give_other(monkeypatch, FIRST, "forward"), refuse_backwards(monkeypatch, FIRST)
    found, strategy = audited(6, num_stages=2, model=model(), share=0.0, pipeline="net")
    assert given
    assert refused
    assert strikes(strategy) == [0, 1, 2]
    assert events_of(strategy, "gone") == {FIRST}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def claim_other_inputs(monkeypatch: pytest.MonkeyPatch, liar: str, steps: set[int]) -> list[int]:
    """Make a server compute, in some steps, with another input than it received; return the steps."""
    forward_call, lies = ComputeHandlers._forward_call, list[int]()

    async def lying(
        self: ComputeHandlers, stage: Any, request: ForwardRequest | BackwardRequest, source: Any, given: Any
    ) -> tuple[ForwardCall, Any]:
        call, reports = await forward_call(self, stage, request, source, given)
        key = request.key
        if self._transport.peer_id == liar and source is not None and not key.evaluation and key.step in steps:
            lies.append(key.step)
            call = replace(call, inputs=(2 * call.inputs[0],))
        return call, reports

    monkeypatch.setattr(ComputeHandlers, "_forward_call", lying)
    return lies


def test_two_liars_that_leave_a_stage_only_one_of_them_end_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one contradicts the stage's honest server, which is then avoided; the second one refuses all calls."""
    expected = honest_weights(4, num_stages=2)
    lies = claim_other_inputs(monkeypatch, LAST, {0})
    strike, forward, struck, refused = OpenStep.strike, ComputeHandlers._forward, set[int](), list[int]()

    def striking(self: OpenStep, firsts: Any) -> Any:
        struck.add(self.step)
        return strike(self, firsts)

    async def refusing(self: ComputeHandlers, name: str, stage: Any, request: ForwardRequest, given: Any) -> None:
        if self._transport.peer_id == FIRST and request.key.step in struck:
            refused.append(request.key.step)
            raise ProtocolError("it will not")
        await forward(self, name, stage, request, given)

    monkeypatch.setattr(OpenStep, "strike", striking)
    monkeypatch.setattr(ComputeHandlers, "_forward", refusing)
    found, strategy = audited(4, num_stages=2)
    assert lies
    assert refused
    assert strikes(strategy) == [0]
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


# ------------------------------------------------------------------ honest servers


@pytest.mark.thorough
@pytest.mark.parametrize("cache_bytes", [1 << 20, 1])
@pytest.mark.parametrize("phase", [Phase.CLOSE, Phase.BACKWARD, Phase.BACKWARD_DONE, Phase.SEND_GRADIENT])
@pytest.mark.parametrize("model", [Model, Around])
def test_what_honest_servers_give_is_what_they_claim(model: type[Model], phase: Phase, cache_bytes: int) -> None:
    expected = honest_weights(6, num_stages=2, model=model, pipeline="net")
    # The first stage of `Model` sends no gradient.
    also = Phase.BACKWARD if (model, phase) == (Model, Phase.SEND_GRADIENT) else phase
    faults = FaultPlan().kill(LAST, at=phase, nth=2).kill(FIRST, at=also, nth=3)
    limits = Limits(cache_bytes=cache_bytes)
    found, strategy = audited(6, num_stages=2, model=model(), faults=faults, pipeline="net", limits=limits)
    assert not events_of(strategy, "convicted") | events_of(strategy, "disputed")
    assert not strikes(strategy)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("factor", [2.0, 1.0 + 1e-12])  # the second is within the rounding of another kind of machine
def test_a_first_server_that_is_asked_twice_is_honest(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The last stage's server sends it a gradient, but the trainer no receipt, so another server takes its place."""
    expected = honest_weights(6, num_stages=2, model=Around, pipeline="net")
    fulfil, add, wait = TicketStore.fulfil, GradientSums.add, TicketStore._handle_wait
    given: list[str] = []

    def giving(self: TicketStore, name: str, message: Any, *rest: Any, **more: Any) -> None:
        if self._transport.peer_id == LAST and "/1/backward" in name and f".s{SINCE}." in name:
            given.append(name)
            message = Message(message.body, tuple(factor * tensor for tensor in message.tensors))
        fulfil(self, name, message, *rest, **more)

    def adding(self: GradientSums, stage: Any, key: CallKey, *rest: Any) -> bool:
        return not (self._me.peer_id == LAST and key.step == SINCE) and add(self, stage, key, *rest)

    async def waiting(self: TicketStore, caller: PeerId, request: WaitRequest) -> Any:
        name = request.name
        if self._transport.peer_id == LAST and caller == "peer-0" and "/1/backward" in name and f".s{SINCE}." in name:
            raise ProtocolError("silence")
        return await wait(self, caller, request)

    monkeypatch.setattr(TicketStore, "fulfil", giving)
    monkeypatch.setattr(GradientSums, "add", adding)
    monkeypatch.setattr(TicketStore, "_handle_wait", waiting)
    found, strategy = audited(6, num_stages=2, model=Around(), pipeline="net")
    assert given
    assert events_of(strategy, "convicted") <= {LAST}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_a_last_server_that_had_no_room_is_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage's server sends a false output and dies; the backward starts from a replacement's output."""
    expected = honest_weights(6, num_stages=2)
    given = give_other(monkeypatch, FIRST, "forward")
    faults = FaultPlan().kill(FIRST, at=Phase.BACKWARD)
    found, strategy = audited(6, num_stages=2, limits=Limits(cache_bytes=1), faults=faults)
    assert given
    assert events_of(strategy, "disputed") == {FIRST}
    assert not events_of(strategy, "convicted")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_a_last_server_whose_sum_begins_anew_is_honest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server sends a false output and dies; another one first claims all receipts, so honest sums begin anew."""
    expected = honest_weights(6, num_stages=2)
    given = give_other(monkeypatch, FIRST, "forward")
    add, freeze = GradientSums.add, GradientSums.freeze
    known: dict[Receipt, Origin] = {}
    claimed: list[int] = []

    def adding(self: GradientSums, stage: Any, key: CallKey, gradients: Any, origin: Origin, *rest: Any) -> bool:
        if stage.index == 1 and key.step == 0:
            known[key.receipt] = origin
        return add(self, stage, key, gradients, origin, *rest)

    def freezing(self: GradientSums, request: FreezeRequest, term: Any, **more: Any) -> Any:
        reports, stale = freeze(self, request, term, **more)
        if self._me.peer_id == LAST and request.step == 0 and not claimed:
            claimed.append(request.round)
            origins = pack_origins({first: origin for (first, _, _), origin in known.items()})
            reports = [replaced(one, held=pack({*known}), origins=origins) for one in reports]
        return reports, stale

    monkeypatch.setattr(GradientSums, "add", adding)
    monkeypatch.setattr(GradientSums, "freeze", freezing)
    found, strategy = audited(6, num_stages=2, faults=FaultPlan().kill(FIRST, at=Phase.CLOSE))
    assert given
    assert claimed
    assert events_of(strategy, "convicted") <= {LAST}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_who_gives_no_receipt_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = honest_weights(6, num_stages=2)
    add, refused = GradientSums.add, list[Receipt]()

    def adding(self: GradientSums, stage: Any, key: CallKey, *rest: Any) -> bool:
        if self._me.peer_id == LAST and key.step == SINCE:
            refused.append(key.receipt)
            return False
        return add(self, stage, key, *rest)

    monkeypatch.setattr(GradientSums, "add", adding)
    found, _ = audited(6, num_stages=2)
    assert refused
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize(("arithmetic", "num_allowed"), [(None, 5), ("abacus", 5), (None, 0)])
def test_who_cannot_be_reached_while_it_is_audited_is_convicted_the_sixth_time(
    monkeypatch: pytest.MonkeyPatch, arithmetic: str | None, num_allowed: int
) -> None:
    monkeypatch.setattr(step_audits, "MAX_SILENCES", num_allowed)
    true, ask = GradientSums.arithmetic.fget, AuditHandlers._ask_kept
    assert true is not None
    said = property(lambda self: arithmetic if arithmetic and self._me.peer_id == FIRST else true(self))
    monkeypatch.setattr(GradientSums, "arithmetic", said)
    slow: list[Receipt] = []

    async def asking(self: AuditHandlers, request: AuditRequest, **wanted: bool) -> Any:
        if request.audited == FIRST and request.key.step == SINCE:
            slow.append(request.key.receipt)
            raise DeadlineExceeded("the link is slow")
        return await ask(self, request, **wanted)

    monkeypatch.setattr(AuditHandlers, "_ask_kept", asking)
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(6, num_stages=2)
    assert slow
    assert events_of(strategy, "convicted") == (set() if num_allowed else {FIRST})
    assert events_of(strategy, "gone") == {FIRST}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=ROUNDING if arithmetic else 0.0)
