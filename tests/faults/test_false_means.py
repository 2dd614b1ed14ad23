"""In audited runs a server with a false mean changes no weight, and is convicted if it can be proved.

It may compute a false mean, send other parts than it committed to, or report a false mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace as replaced
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.coordinator.audit.mean_audit import MeanAudit
from lightning_swarm.coordinator.step.oversight import CheckedMeans
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.compression import from_message, to_message
from lightning_swarm.protocol.messages.parts import PartProjections, ProjectReply
from lightning_swarm.protocol.messages.step import FreezeReply
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import FETCH, FREEZE, PROJECT, VECTOR, WAIT
from lightning_swarm.server.audit.mean_checks import AuditedRoundLog
from lightning_swarm.server.averaging.all_reduce import Group
from lightning_swarm.testing import FaultPlan
from tests.faults import harness
from tests.faults.harness import FaultySwarm
from tests.faults.plans import JOINER, SMALL_STAGES, STAGES, VOTERS
from tests.faults.test_liars import Answer
from tests.unit.swarm import make_module

LIAR = PeerId("e")
FIRST_LIE = 1  # step
LIE = 1.0 + 1e-3

Change = Callable[[Tensor], Tensor]


def one_element(part: Tensor) -> Tensor:
    changed = part.clone()
    changed[0] *= LIE
    return changed


def all_elements(part: Tensor) -> Tensor:
    return part * LIE


def nothing_there(part: Tensor) -> Tensor:
    return torch.zeros_like(part)


def no_number(part: Tensor) -> Tensor:
    return torch.full_like(part, float("nan"))


CHANGES = (one_element, all_elements, nothing_there, no_number)


@dataclass(frozen=True)
class LyingGroup(Group):
    """Sends changed messages."""

    lie: Callable[[str, Message], Message] = lambda _, message: message

    @override
    def offer(self, name: str, message: Message | Callable[[], Message], to: int | None = None) -> None:
        given = message() if callable(message) else message
        super().offer(name, self.lie(name, given), to)


class Single(nn.Module):
    """A block with weights in float32 between activations in float64."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block.float()

    @override
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x.float())
        return output.double()


KINDS: dict[str, dict[str, Any]] = {
    "float64": {},
    "float32": {"module": True},
    "deterministic": {"microbatch_size": harness.ROWS},
}


class FalseMeanSwarm(FaultySwarm):
    """One server of an audited run is malicious from the second step on."""

    def __init__(self, kind: str = "float64", *, share: float | None = 0.0, joiners: str = "") -> None:
        kinds = dict(KINDS[kind])
        if kinds.get("module"):
            kinds["module"] = nn.Sequential(*(Single(block) for block in make_module(len(STAGES))))
        stages = SMALL_STAGES if joiners else STAGES
        super().__init__(*stages, plan=FaultPlan(), voters=VOTERS, audit_share=share, joiners=joiners, **kinds)
        self.num_lies = 0

    @property
    def lies_now(self) -> bool:
        if self.servers[LIAR].steps.version < FIRST_LIE:
            return False
        self.num_lies += 1
        return True

    # ------------------------------------------------------------------ lies

    def makes_another_mean(self, change: Change) -> None:
        """Falsify the mean of its part, also for itself."""
        rounds: Any = self.servers[LIAR].steps.rounds

        def lie(name: str, message: Message) -> Message:
            return changed(message, change) if name.startswith("reduced") and self.lies_now else message

        self._gives(lie)
        average = rounds._average_stage

        async def averaged(closing: Any, stage: Any, group: Group, place: int) -> Any:
            found = await average(closing, stage, group, place)
            if self.servers[LIAR].steps.version >= FIRST_LIE:
                mean, part = found.mean.clone(), group.bounds(len(found.mean))[place]
                mean[part] = change(mean[part])
                found = found._replace(mean=mean)
            return found

        rounds._average_stage = averaged

    def gives_other_parts(self, change: Change) -> None:
        """Falsify the parts of its sum that it sends to other reducers."""

        def lie(name: str, message: Message) -> Message:
            return changed(message, change) if name.startswith("part") and self.lies_now else message

        self._gives(lie)

    def _gives(self, lie: Callable[[str, Message], Message]) -> None:
        rounds: Any = self.servers[LIAR].steps.rounds
        group = rounds._group
        own = [field.name for field in fields(Group)]
        rounds._group = lambda *args: LyingGroup(**{name: getattr(group(*args), name) for name in own}, lie=lie)

    def gives_one_member_another_mean(self, whom: PeerId, change: Change) -> None:
        def lie(caller: PeerId, message: Message, answer: Message) -> Message:
            if (
                caller == whom
                and (b"/reduced" in message.body or b"/mean" in message.body)
                and answer.tensors
                and self.lies_now
            ):
                return Message(answer.body, tuple(map(change, answer.tensors)))
            return answer

        for method in (WAIT.name, FETCH.name):
            self.answers(method, lie)

    def answers(self, method: str, lie: Callable[[PeerId, Any, Any], Any]) -> None:
        transport: Any = self.servers[LIAR]._transport
        calls, streams = transport._call_handlers, transport._stream_handlers
        if method in calls:
            calls[method] = self._lying(calls[method], lie)
        else:
            handler, *bounds = streams[method]
            streams[method] = self._lying(handler, lie), *bounds

    @staticmethod
    def _lying(honest: Answer, lie: Callable[[PeerId, Any, Any], Any]) -> Callable[[PeerId, Any], Any]:
        async def answer(caller: PeerId, request: Any) -> Any:
            return lie(caller, request, await honest(caller, request))

        return answer

    def projects(self, change: Callable[[PartProjections], PartProjections]) -> None:
        def lie(_caller: PeerId, _request: bytes, body: bytes) -> bytes:
            if not self.lies_now:
                return body
            return encode(ProjectReply(stages=[change(stage) for stage in decode(body, ProjectReply).stages]))

        self.answers(PROJECT.name, lie)

    def held_weight(self) -> float:
        """Return the divisor of the sums in the malicious server's round."""
        held: Any = self.servers[LIAR].steps.rounds._held
        return float(held.closing.total_weight * held.closing.gradient_scale)

    # ------------------------------------------------------------------ what came of it

    def finish(self) -> None:
        self.train()
        assert self.num_lies > 0
        self.audit_samples()
        self.audit_state()

    def reasons(self) -> list[str]:
        """Return the reasons for the malicious server's exclusion."""
        events = self.servers[PeerId("a")].events.newest
        return [event.reason for event in events if event.kind == "gone" and event.peer == LIAR]

    def check_left_out(self, text: str, *, proven: bool = True) -> None:
        assert LIAR not in self.survivors()
        (reason,) = self.reasons()
        assert text in reason
        assert self.count("gone") == 1
        assert set(CONVICTED) == ({LIAR} if proven else set())
        assert self.count("round_repeated") == 1
        assert self.count("disputed") == 0


def changed(message: Message, change: Change) -> Message:
    tree: Any = from_message(message)[0]
    if isinstance(tree, Tensor):
        return to_message(change(tree))
    return to_message((tree[0] + 1, *tree[1:]))  # a sum in fixed point


CONVICTED: list[PeerId] = []
"""Convictions by the coordinators of a test."""


@pytest.fixture(autouse=True)
def convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    CONVICTED.clear()
    check = MeanAudit.check

    async def checked(*args: Any) -> CheckedMeans:
        found = await check(*args)
        CONVICTED.extend(found.convicted)
        return found

    monkeypatch.setattr(MeanAudit, "check", checked)


@pytest.fixture(autouse=True)
def tolerance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "float32" in request.node.name:
        monkeypatch.setattr(harness, "TOLERANCE", 1e-5)


def clean_bits() -> dict[str, Tensor]:
    swarm = FalseMeanSwarm("deterministic")
    try:
        swarm.train()
        return swarm.final_state()
    finally:
        swarm.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reducer_that_makes_another_mean_is_convicted(kind: str, change: Change) -> None:
    swarm = FalseMeanSwarm(kind)
    swarm.makes_another_mean(change)
    try:
        swarm.finish()
        swarm.check_left_out("computed a mean that is not the mean of the sums that it received")
        if kind == "deterministic":
            found, expected = swarm.final_state(), clean_bits()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    finally:
        swarm.close()


def test_without_audits_such_a_mean_counts() -> None:
    """The false mean does change the weights without audits, so the tests above can fail."""
    swarm = FalseMeanSwarm(share=None)
    swarm.makes_another_mean(all_elements)
    try:
        swarm.train()
        assert LIAR in swarm.survivors()
        with pytest.raises(AssertionError):
            swarm.audit_state()
    finally:
        swarm.close()


PROJECTIONS: dict[str, tuple[Callable[[PartProjections], PartProjections], str]] = {
    "another norm": (
        lambda stage: replaced(stage, squared_norm=4.0 * stage.squared_norm),
        "or a false norm, of its mean",
    ),
    "no norm": (lambda stage: replaced(stage, squared_norm=float("inf")), "or a false norm, of its mean"),
    "projections of another sum": (
        lambda stage: replaced(stage, sums=[LIE * number for number in stage.sums]),
        "false projections of its sum",
    ),
    "elements without a size": (
        lambda stage: replaced(stage, norms=[0.0] * len(stage.norms)),
        "",
    ),
    "projections of another mean": (
        lambda stage: replaced(stage, means=[LIE * number for number in stage.means]),
        "false projections, or a false norm, of its mean",
    ),
    "digests of another mean": (
        lambda stage: replaced(stage, parts=[bytes(32)] * len(stage.parts)),
        "sent a mean that differs from its digests",
    ),
    "too few numbers": (lambda stage: replaced(stage, sums=stage.sums[1:]), "has 768 numbers of each kind"),
    "negative sizes": (lambda stage: replaced(stage, norms=[-1.0] * len(stage.norms)), "norms must not be negative"),
    "another stage": (lambda stage: replaced(stage, stage_index=0), "answered about others"),
}


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("lie", PROJECTIONS)
def test_false_answers_are_their_servers_own_fault(lie: str) -> None:
    swarm = FalseMeanSwarm(share=float(lie == "elements without a size"))
    change, reason = PROJECTIONS[lie]
    swarm.projects(change)
    try:
        swarm.finish()
        swarm.check_left_out(reason, proven=not lie.endswith(("numbers", "sizes", "stage")))
    finally:
        swarm.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_member_that_gives_another_part_than_it_committed_to_changes_nothing(kind: str) -> None:
    """Each reducer contradicts it. Most contradict it, so it is excluded, and the mean is that of the sums."""
    swarm = FalseMeanSwarm(kind)
    swarm.gives_other_parts(all_elements)
    try:
        swarm.finish()
        assert LIAR not in swarm.survivors()
        assert swarm.count("gone") == 1
        assert swarm.count("disputed") == 2 * (len(STAGES[1].split()) - 1)
        assert swarm.count("round_repeated") == 0
        assert CONVICTED == []
        if kind == "deterministic":
            found, expected = swarm.final_state(), clean_bits()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    finally:
        swarm.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reducer_that_gives_one_member_another_mean_changes_nothing(kind: str) -> None:
    """Reducer or member may be malicious, so both stay; each step repeats the mean at the coordinator's server."""
    swarm = FalseMeanSwarm(kind)
    swarm.gives_one_member_another_mean(PeerId("d"), one_element)
    try:
        swarm.finish()
        assert LIAR in swarm.survivors()
        assert swarm.count("disputed") == 2 * swarm.num_lies == 4
        assert swarm.count("gone") == swarm.count("round_repeated") == 0
        assert CONVICTED == []
    finally:
        swarm.close()


def test_who_fits_its_projections_to_its_false_mean_is_found_when_it_is_drawn() -> None:
    """Only its own sum disproves it, so the sums of servers that are drawn, or whose work was audited, are fetched."""
    swarm = FalseMeanSwarm(share=1.0)
    swarm.makes_another_mean(all_elements)
    place = STAGES[1].split().index(LIAR)

    def fit(stage: PartProjections) -> PartProjections:
        size = len(stage.sums) // 3
        own = slice(place * size, (place + 1) * size)
        weight = swarm.held_weight()
        added = [number * weight * (1 - 1 / LIE) for number in stage.means[own]]
        sums = [*stage.sums]
        sums[own] = [number + more for number, more in zip(sums[own], added, strict=True)]
        return replaced(stage, sums=sums)

    swarm.projects(fit)
    try:
        swarm.train()
        assert swarm.num_lies > 0
        swarm.audit_state()
        swarm.check_left_out("false projections of its sum")
    finally:
        swarm.close()


VECTORS: dict[str, Callable[[PeerId, Message, Message], Message]] = {
    "another sum": lambda _caller, _request, answer: Message(answer.body, (answer.tensors[0] * 2.0,)),
    "a sum of another shape": lambda _caller, _request, answer: Message(answer.body, (answer.tensors[0][1:],)),
    "nothing": lambda _caller, _request, answer: Message(answer.body),
}


@pytest.mark.parametrize("lie", VECTORS)
def test_who_shows_another_sum_than_it_committed_to_is_convicted(lie: str) -> None:
    swarm = FalseMeanSwarm(share=1.0)

    def show(caller: PeerId, request: Message, answer: Message) -> Message:
        return VECTORS[lie](caller, request, answer) if swarm.lies_now else answer

    swarm.answers(VECTOR.name, show)
    try:
        swarm.finish()
        swarm.check_left_out("sent a sum of gradients that differs from its commitment")
    finally:
        swarm.close()


def test_who_commits_to_no_sum_is_left_out() -> None:
    swarm = FalseMeanSwarm()

    def lie(_caller: PeerId, _request: bytes, body: bytes) -> bytes:
        reply = decode(body, FreezeReply)
        if not swarm.lies_now:
            return body
        return encode(replaced(reply, ledgers=[replaced(ledger, sum_digest=UNSET) for ledger in reply.ledgers]))

    swarm.answers(FREEZE.name, lie)
    try:
        swarm.finish()
        assert LIAR not in swarm.survivors()
        assert "does not commit to its sum" in swarm.reasons()[0]
    finally:
        swarm.close()


def test_who_shows_no_sum_is_left_out() -> None:
    """It counts as slow. It is not excluded the first time, because a message may have been lost."""
    swarm = FalseMeanSwarm(share=1.0)

    def refuse(_caller: PeerId, _request: Message, answer: Message) -> Message:
        if swarm.lies_now:
            raise ProtocolError("no")
        return answer

    swarm.answers(VECTOR.name, refuse)
    try:
        swarm.finish()
        assert LIAR not in swarm.survivors()
        assert swarm.num_lies == 2
        assert CONVICTED == []
    finally:
        swarm.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_honest_servers_are_not_suspected(kind: str, share: float) -> None:
    swarm = FalseMeanSwarm(kind, share=share)
    try:
        swarm.train()
        swarm.audit()
        assert not any(server.events.counts for server in swarm.servers.values())
    finally:
        swarm.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_joiner_that_a_reducer_gives_another_mean_takes_the_coordinator_s(kind: str) -> None:
    swarm = FalseMeanSwarm(kind, joiners=JOINER)
    swarm.gives_one_member_another_mean(PeerId(JOINER), one_element)
    try:
        swarm.finish()
        assert JOINER in swarm.survivors()
        assert swarm.count("gone") == 0
    finally:
        swarm.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_joiner_that_was_given_another_mean_does_not_come_in_with_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AuditedRoundLog, "_rank_to_ask", lambda _self, _closing, roster: roster.index(LIAR))
    swarm = FalseMeanSwarm(kind, joiners=JOINER)
    swarm.gives_one_member_another_mean(PeerId(JOINER), one_element)
    try:
        swarm.finish()
        assert JOINER not in swarm.survivors()
        assert swarm.count("gone") == swarm.count("disputed") == 0, "its weights were never compared with others'"
    finally:
        swarm.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_joiner_comes_in_with_the_mean_of_the_members(kind: str) -> None:
    swarm = FalseMeanSwarm(kind, share=1.0, joiners=JOINER)
    try:
        swarm.train()
        swarm.audit()
        assert JOINER in swarm.survivors()
    finally:
        swarm.close()


def test_a_joiner_does_not_come_in_with_a_mean_that_was_replaced() -> None:
    """It has received the mean from the reducers, while all members have another mean."""
    swarm = FalseMeanSwarm(joiners=JOINER)
    swarm.gives_one_member_another_mean(PeerId("d"), one_element)
    try:
        swarm.finish()
        assert JOINER not in swarm.survivors()
        assert swarm.count("gone") == 0
        assert swarm.count("disputed") == 2 * swarm.num_lies > 0
    finally:
        swarm.close()


def test_who_does_not_project_is_left_out() -> None:
    swarm = FalseMeanSwarm()

    def refuse(_caller: PeerId, _request: bytes, body: bytes) -> bytes:
        if swarm.lies_now:
            raise ProtocolError("no")
        return body

    swarm.answers(PROJECT.name, refuse)
    try:
        swarm.finish()
        swarm.check_left_out("no", proven=False)
    finally:
        swarm.close()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("method", [PROJECT.name, VECTOR.name])
@pytest.mark.parametrize("whom", ["a", LIAR])
def test_who_dies_while_means_are_checked_is_done_without(whom: str, method: str) -> None:
    """The server that is asked dies, or the coordinator, which is then replaced."""
    swarm = FalseMeanSwarm(share=1.0)

    def die(_caller: PeerId, _request: Any, answer: Any) -> Any:
        if swarm.lies_now and not swarm.dead:
            swarm.network.kill(PeerId(whom))
            swarm._bury(PeerId(whom))
        return answer

    swarm.answers(method, die)
    try:
        swarm.finish()
        assert swarm.dead == {whom}
        assert whom not in swarm.survivors()
        assert CONVICTED == []
    finally:
        swarm.close()
