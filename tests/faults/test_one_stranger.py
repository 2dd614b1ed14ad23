"""A single unknown peer with unsolicited answers or none ends no run, and excludes no other peer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from msgspec.structs import replace as replaced
from typing_extensions import override

from lightning_swarm import Trust
from lightning_swarm.coordinator.audit import step_audits
from lightning_swarm.core.errors import Damaged, PeerError, StageLost, SwarmError, TicketGone
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.audits import KeptWorkRequest, SketchReply, SketchRequest
from lightning_swarm.protocol.messages.calls import Receipt, pack, pack_origins, unpack, unpack_origins
from lightning_swarm.protocol.messages.parts import ProjectReply, VectorRequest
from lightning_swarm.protocol.messages.step import (
    CLAIM_BYTES,
    AverageReply,
    AverageRequest,
    Candidate,
    FreezeRequest,
    StageLedger,
)
from lightning_swarm.protocol.rpc import KEPT_WORK
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.audit import handlers
from lightning_swarm.server.audit.handlers import AuditHandlers
from lightning_swarm.server.audit.mean_checks import MeanChecks
from lightning_swarm.server.averaging_round import AveragingRounds
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.state_transfer.donor import Donor
from lightning_swarm.server.state_transfer.handlers import StateHandlers
from lightning_swarm.testing import local_swarm
from tests.adversaries.adversary import Adversary
from tests.faults.test_audited import NUM_STEPS, SINCE, Model, audited, data, events_of, honest_weights

# The last stage has peer-0, peer-2 and peer-4, the first has peer-1, peer-3 and peer-5.


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 7])
def test_sketches_of_stages_that_it_does_not_hold(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    expected = honest_weights(6, num_stages=2)
    handle = AuditHandlers._handle_sketch

    async def more(self: AuditHandlers, *request: Any) -> SketchReply:
        reply = await handle(self, *request)
        if self._transport.peer_id == "peer-2":
            reply = SketchReply(stages=[*reply.stages, replaced(reply.stages[0], stage_index=stage)])
        return reply

    monkeypatch.setattr(AuditHandlers, "_handle_sketch", more)
    found, _ = audited(6, num_stages=2)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("liar", ["peer-2", "peer-3"])
def test_who_gives_no_part_and_says_that_all_is_well(monkeypatch: pytest.MonkeyPatch, liar: str) -> None:
    expected = honest_weights(6, num_stages=2)
    fetch, handle = TicketStore.fetch, AveragingRounds._handle_average

    async def refused(self: TicketStore, ticket: Any, **more: Any) -> Any:
        if ticket.peer_id == liar and "/average/" in ticket.name and self._transport.peer_id != liar:
            raise TicketGone("it will not")
        return await fetch(self, ticket, **more)

    async def well(self: AveragingRounds, *request: Any) -> AverageReply:
        reply = await handle(self, *request)
        return AverageReply(parts=[]) if self._me.peer_id == liar else reply

    monkeypatch.setattr(TicketStore, "fetch", refused)
    monkeypatch.setattr(AveragingRounds, "_handle_average", well)
    found, strategy = audited(6, num_stages=2)
    assert events_of(strategy, "gone") == {liar}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("names", ["unreached", "refusing", ""])
def test_who_says_that_others_give_it_nothing_does_not_come_to_be_alone(
    monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    expected = honest_weights(6, num_stages=2)
    handle, liar = AveragingRounds._handle_average, "peer-3"

    async def complain(self: AveragingRounds, caller: Any, request: AverageRequest) -> AverageReply:
        reply = await handle(self, caller, request)
        if self._me.peer_id != liar:
            return reply
        roster = [one.peer_id for one in self._sums.run.rosters[0] if one.peer_id != liar]
        absent = request.closing.absent
        others = [peer for peer in roster if peer not in absent][:1]
        return AverageReply(parts=[], failure="nothing came", **({names: others} if names else {}))

    monkeypatch.setattr(AveragingRounds, "_handle_average", complain)
    found, strategy = audited(6, num_stages=2)
    gone = events_of(strategy, "gone")
    assert liar in gone
    assert len(gone) < 3
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize(("liar", "method"), [("peer-1", "_handle_state"), ("peer-3", "_handle_prove")])
def test_who_never_gives_its_weights_has_nobody_left_out(
    monkeypatch: pytest.MonkeyPatch, liar: str, method: str
) -> None:
    """The coordinator holds another stage, and judges with weights that it fetches."""
    expected = honest_weights(6, num_stages=2)
    monkeypatch.setattr(step_audits, "_OWN_SHARE", 1.0)
    handle, slow = getattr(StateHandlers, method), list[str]()

    async def stall(self: StateHandlers, caller: Any, request: Any) -> Any:
        if self._steps.sums._me.peer_id == liar and caller == "peer-0":
            slow.append(method)
            await asyncio.sleep(1e6)
        return await handle(self, caller, request)

    monkeypatch.setattr(StateHandlers, method, stall)
    found, strategy = audited(6, num_stages=2)
    assert slow
    assert not events_of(strategy, "gone")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


async def _tolerant(work: Coroutine[Any, Any, object]) -> None:
    with suppress(SwarmError):
        await work


class Joining(Callback):
    """Starts a server after the first step."""

    @override
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.strategy.join()  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_who_will_not_meet_a_joiner_keeps_it_out_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, refused = Donor._handle_meet, list[str]()

    async def refuse(self: Donor, caller: PeerId, candidate: Candidate) -> None:
        if self._transport.peer_id == "peer-3":
            refused.append(caller)
            raise PeerError("I do not reach it")
        await handle(self, caller, candidate)

    monkeypatch.setattr(Donor, "_handle_meet", refuse)
    settings: dict[str, Any] = {
        "microbatch_size": 2,
        "deterministic": True,
        "num_stages": 2,
        "microbatch_s": (1.0,) * 7,
    }
    with local_swarm(6, trust=Trust("audited", audit_share=1.0), **settings) as swarm:
        swarm.trainer(max_steps=4 * NUM_STEPS, callbacks=[Joining()]).fit(Model(), data())
        (strategy,) = swarm.strategies
    assert refused
    assert events_of(strategy, "joined") == {"peer-6"}
    assert not events_of(strategy, "gone")


def test_who_has_much_shown_to_it_keeps_nobody_from_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the same stage, so it may audit; each of its requests makes another server recompute a microbatch."""
    sketch, victims = AuditHandlers._handle_sketch, dict[int, set[Receipt]]()
    show, waiting, most = AuditHandlers._submit, Counter[str](), Counter[str]()
    tasks = set[asyncio.Task[Any]]()

    async def ask_for_all(self: AuditHandlers, caller: PeerId, request: SketchRequest) -> SketchReply:
        stage = self._sums.stages.get(0)
        if stage is not None and self._transport.peer_id == "peer-5":
            step = self._sums.version
            victims[step] = set(self._sums.ledgers[0].held)
        if self._transport.peer_id == "peer-3":
            for receipt in sorted(victims.get(self._sums.version, ())) * 20:
                asked = KeptWorkRequest(
                    generation=self._membership.run.manifest.generation,
                    step=self._sums.version,
                    stage_index=0,
                    receipt=receipt,
                    input=True,
                    gradients=True,
                    results=True,
                )
                ask = KEPT_WORK.ask(self._transport, PeerId("peer-5"), asked, timeout=60.0)
                tasks.add(asyncio.create_task(_tolerant(ask)))
        return await sketch(self, caller, request)

    async def counted(self: AuditHandlers, *rest: Any) -> Any:
        me = self._transport.peer_id
        waiting[me] += 1
        most[me] = max(most[me], waiting[me])
        try:
            return await show(self, *rest)
        finally:
            waiting[me] -= 1

    monkeypatch.setattr(AuditHandlers, "_handle_sketch", ask_for_all)
    monkeypatch.setattr(AuditHandlers, "_submit", counted)
    audited(6, num_stages=2, microbatch_s=(0.01,) * 6)
    assert len(tasks) > 100
    assert most["peer-5"] < 30


@pytest.mark.thorough
def test_who_says_now_and_then_that_it_holds_all_has_nobody_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch in two sums is recomputed by one of the two. A server that often restarts its sum is excluded."""
    expected = honest_weights(6, num_stages=2)
    freeze, liar = GradientSums.freeze, "peer-3"
    true, number = dict[str, StageLedger](), Counter[int]()

    def boast(self: GradientSums, request: FreezeRequest, *rest: Any, **more: Any) -> Any:
        reports, stale = freeze(self, request, *rest, **more)
        me = self._me.peer_id
        if 0 in self.stages:
            true[me] = reports[0]
        if me != liar or request.named is not None or self.version < 2:
            return reports, stale
        number[self.version] += 1
        if not number[self.version] % 2:
            return reports, stale
        held = set[Receipt]().union(*(unpack(one.held) for one in true.values()))
        origins = unpack_origins(reports[0].origins, {first for first, _, _ in held})
        claims = bytes(CLAIM_BYTES * len(held))
        boasted = replaced(reports[0], held=pack(held), origins=pack_origins(origins), claims=claims)
        return [boasted], stale

    monkeypatch.setattr(GradientSums, "freeze", boast)
    found, strategy = audited(6, num_stages=2)
    assert not events_of(strategy, "gone") - {liar}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("attack", ["sign_flip", "skipped_blocks"])
def test_a_stage_of_liars_alone_is_lost_with_them(attack: str) -> None:
    """The run can therefore roll back to a snapshot, if it has one."""
    liars = ["peer-1", "peer-3", "peer-5"]
    with pytest.raises(StageLost, match="stage 0 has no server left"):
        audited(6, *(Adversary(liar, attack, since=SINCE) for liar in liars), num_stages=2)


@pytest.mark.thorough
def test_who_shows_its_vectors_late_and_damaged_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator waits for its own examination as long as each vector may take."""
    liars = ["peer-1", "peer-3"]
    project, show, late = MeanChecks._handle_project, MeanChecks._handle_vector, Counter[tuple[str, str]]()

    async def another(self: MeanChecks, *request: Any) -> ProjectReply:
        reply = await project(self, *request)
        if self._me in liars and self._sums.version == SINCE:
            (stage,) = reply.stages
            digest = self._me.encode().ljust(32)
            reply = ProjectReply(stages=[replaced(stage, parts=[digest for _ in stage.parts])])
        return reply

    async def damaged(self: MeanChecks, caller: PeerId, request: VectorRequest) -> Message:
        if self._me in liars:
            await asyncio.sleep(0.99 * self._timeout)
            late[self._me, str(request)] += 1
            if late[self._me, str(request)] % 3:
                raise Damaged("on its way, they say")
        return await show(self, caller, request)

    monkeypatch.setattr(MeanChecks, "_handle_project", another)
    monkeypatch.setattr(MeanChecks, "_handle_vector", damaged)
    expected = honest_weights(8, num_stages=2)
    found, strategy = audited(8, num_stages=2, share=0.0)
    assert late
    assert events_of(strategy, "gone") <= {*liars}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_whose_work_does_not_fit_in_the_auditor_s_memory_is_not_convicted(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    recompute, failed = handlers._recompute, list[int]()

    def exhausted(stage: Any, *work: Any) -> Any:
        if stage.index == 0:
            failed.append(stage.index)
            raise error("no room")
        return recompute(stage, *work)

    monkeypatch.setattr(handlers, "_recompute", exhausted)
    monkeypatch.setattr(step_audits, "MAX_SILENCES", 0)
    with pytest.raises(StageLost, match="cannot compute its work again"):
        audited(4, num_stages=2)
    assert failed
