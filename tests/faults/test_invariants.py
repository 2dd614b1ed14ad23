"""The twelve invariants that hold under all faults, each with a test that tries to break it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import CallKey
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.server.gradient_buffer import GradientSum
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.stage import Stage
from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.faults import MessagePoint
from tests.faults.harness import NUM_STEPS, TOLERANCE, FaultySwarm
from tests.faults.plans import COMPUTING, STAGES, TRAINERS, VOTERS
from tests.unit.swarm import make_module

EVERYONE = (*" ".join(STAGES).split(), *TRAINERS.split())
NUM_RECEIPTS = 4  # per step


@contextmanager
def trained(plan: FaultPlan, *, audited: bool = True, **options: Any) -> Iterator[FaultySwarm]:
    """A run that ended under a plan; `made` is called with it before it begins."""
    made = options.pop("made", lambda _: None)
    swarm = FaultySwarm(*STAGES, plan=plan, **{"trainers": TRAINERS, "voters": VOTERS, **options})
    try:
        made(swarm)
        swarm.train()
        if audited:
            swarm.audit()
        yield swarm
    finally:
        swarm.close()


def test_1_one_record_for_a_step_and_applied_in_order() -> None:
    """The coordinator is cut off after voters accepted, and returns after its successor decided, which then dies."""
    others = [one for one in EVERYONE if one != "a"]
    plan = FaultPlan().partition(["a"], others, for_s=40.0, at=Phase.DECIDE_DONE, of="a", step=1)
    plan.kill("b", at=Phase.DECIDE, step=2)
    with trained(plan) as swarm:  # the books check that all peers apply the same bytes
        assert swarm.count("takeover") == 2
        for steps in swarm.applied.values():
            assert steps == sorted(set(steps))


def test_2_deciding_takes_a_majority_and_membership_changes_only_by_records() -> None:
    """For a minute no two voters reach each other: no record is decided, though all stages and trainers are there."""
    apart_s = 60.0
    plan = FaultPlan().partition(*VOTERS.split(), for_s=apart_s, at=Phase.DECIDE, step=1)
    seen: dict[int, list[list[Member]]] = {}
    swarms: list[FaultySwarm] = []

    def look(_: MessagePoint) -> None:
        for swarm in swarms:
            for name in swarm.servers:
                run = swarm.servers[name].membership.run
                assert seen.setdefault(run.version, run.rosters) == run.rosters

    with trained(plan, look=look, made=swarms.append) as swarm:
        assert swarm.books.decided_s[1] >= swarm.struck_s[0] + apart_s
        for version, rosters in seen.items():
            if version:
                assert rosters == swarm.books.rosters[version - 1]
        assert len(seen) == NUM_STEPS + 1


def test_3_a_record_counts_what_has_one_holder_in_each_stage() -> None:
    """Receipts do not reach the trainers, which have another server add the same microbatches."""
    plan = FaultPlan()
    for peer in ("b", "e"):
        others = [one for one in EVERYONE if one != peer]
        plan.partition([peer], others, for_s=15.0, at=Phase.BACKWARD_DONE, of=peer, nth=2)
    with trained(plan) as swarm:
        assert swarm.count("discard"), "nobody had added what another one's receipt names"


def test_4_what_is_averaged_is_exactly_the_named_receipts() -> None:
    """A backward arrives after its batch has counted with another peer's receipt: late, or while sums are averaged."""
    plan = FaultPlan()
    for by_s in (8.0, 14.0, 20.0):
        plan.delay(None, by_s=by_s, at=Phase.BACKWARD, step=1)
        plan.delay(None, by_s=by_s, at=Phase.AVERAGE, step=1)
    with trained(plan):  # the norm of the mean equals that of the named samples' gradients
        plan.check()


def test_5_at_most_one_addition_per_key_and_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward calls are repeated, at once and late; no sum contains a microbatch twice."""
    added: Counter[int] = Counter()
    steps: list[int] = []
    enter, add = GradientSums.add, GradientSum.add

    def entering(sums: GradientSums, stage: Stage, key: CallKey, *rest: Any) -> bool:
        steps.append(key.step)
        return enter(sums, stage, key, *rest)

    def counting(sum_: GradientSum, gradients: Sequence[Tensor | None], weight: float) -> None:
        added[steps[-1]] += 1
        add(sum_, gradients, weight)

    monkeypatch.setattr(GradientSums, "add", entering)
    monkeypatch.setattr(GradientSum, "add", counting)
    plan = FaultPlan()
    for again_after_s in (0.0, 0.5, 5.0):
        plan.duplicate(None, at=Phase.BACKWARD, again_after_s=again_after_s, times=None)
        plan.duplicate(None, at=Phase.FORWARD, again_after_s=again_after_s, times=None)
    with trained(plan) as swarm:
        assert plan.fired > 100
        assert added == {step: NUM_RECEIPTS * len(STAGES) for step in swarm.books.records}


class Dropping(nn.Module):
    """A block that draws random numbers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.block(x), 0.5, self.training)


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.BACKWARD_DONE, Phase.CLOSE], ids=lambda phase: phase.name)
def test_6_forward_and_backward_share_version_and_random_key(phase: Phase) -> None:
    """The server that computed the forward dies; another server draws the same numbers for the backward."""
    weights = []
    for plan in (FaultPlan(), FaultPlan().kill("b", at=phase, nth=2).kill("e", at=phase, nth=2)):
        module = nn.Sequential(*map(Dropping, make_module(len(STAGES))))
        with trained(plan, audited=False, trainers="trainer", module=module) as swarm:
            swarm.audit_samples()
            swarm.audit_leftovers()
            assert bool(swarm.count("ban") + swarm.count("replay")) == bool(plan.faults), "nothing was computed again"
            weights.append(swarm.final_state())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def test_7_weights_change_only_by_applying_a_decided_record() -> None:
    """At every message, all servers with a version of a stage have the same bytes of it, optimizer state included."""
    seen: dict[tuple[int, int], int] = {}
    swarms: list[FaultySwarm] = []

    def look(_: MessagePoint) -> None:
        for swarm in swarms:
            for name in swarm.servers.keys() - swarm.dead:
                handlers = swarm.servers[name].steps
                for index in handlers.stages:
                    stage = handlers.stage(index)
                    found = stage.fingerprint()
                    assert seen.setdefault((index, stage.version), found) == found
                    assert stage.version <= max(swarm.books.records, default=-1) + 2

    plan = FaultPlan().kill("b", at=Phase.APPLY, step=1).freeze("e", for_s=40.0, at=Phase.APPLY, step=1)
    plan.delay("c", by_s=5.0, at=Phase.APPLY, step=1).kill("d", at=Phase.AVERAGE_SEND, step=2)
    with trained(plan, look=look, made=swarms.append):
        assert len(seen) == len(STAGES) * (NUM_STEPS + 1)


def test_8_a_microbatch_can_be_computed_again_until_its_step_is_decided() -> None:
    """All receipts have been seen when most of their servers die."""
    plan = FaultPlan()
    for peer in ("b", "d", "e"):
        plan.kill(peer, at=Phase.CLOSE, step=1)
    with trained(plan, voters="a c f", seed=3) as swarm:  # a, c and f are left of step 1's five voters
        assert swarm.count("replay") >= NUM_RECEIPTS


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD_ACCEPTED], ids=lambda phase: phase.name)
def test_9_each_granted_sample_is_in_one_record_or_granted_again(phase: Phase) -> None:
    """A trainer dies during a batch; another one freezes, and returns when its batch was struck."""
    plan = FaultPlan().kill("other", at=phase).freeze("second", for_s=15.0, at=phase)
    plan.delay("trainer", by_s=4.0, at=Phase.GRANT, times=None)  # keeps the run going until it returns
    with trained(plan, trainers="trainer other second") as swarm:  # the audit knows every sample that was drawn
        assert swarm.count("strike")
        assert swarm.trainers[PeerId("second")].num_revoked
        last = swarm.trainers[PeerId("second")].num_batches
        assert last > 1, "it came back to nothing"


def test_10_every_wait_has_a_deadline_and_holds_nothing_its_completion_needs() -> None:
    """Messages are lost one after the other, in each phase of computing and closing, for each stage."""
    plan = FaultPlan()
    for phase in (*COMPUTING, Phase.CLOSE, Phase.AVERAGE, Phase.AVERAGE_SEND, Phase.AVERAGE_REDUCE, Phase.APPLY):
        plan.drop(None, at=phase, nth=3)
    with trained(plan) as swarm:  # under the virtual clock an endless wait raises `Deadlock`
        assert plan.fired == len(plan.faults)
        assert swarm.loop.time() < 1000.0


def test_11_one_microbatch_can_always_finish() -> None:
    """Servers accept one call at a time and cache nothing, and sums are lost twice."""
    plan = FaultPlan().kill("b", at=Phase.CLOSE, step=1).kill("e", at=Phase.CLOSE, step=2)
    limits = Limits(call_timeout=30.0, max_pending_calls=1, cache_bytes=0, max_in_flight=1)
    with trained(plan, limits=limits) as swarm:
        busy = sum(trainer.link.fault_counts["busy"] for trainer in swarm.trainers.values())
        assert busy > 0, "nobody was ever refused"
        assert swarm.count("replay")


def test_12_every_stage_of_a_roster_has_a_verified_copy_or_the_swarm_pauses_and_says_so() -> None:
    """All servers of a stage die with its weights: no record is decided without it, and no fresh weights replace it."""
    plan = FaultPlan()
    for peer in STAGES[1].split():
        plan.kill(peer, at=Phase.CLOSE, step=1)
    limits = Limits(call_timeout=30.0, stage_timeout=120.0)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, limits=limits)
    try:
        with pytest.raises(StepError, match="stage 1"):
            swarm.train()
        plan.check()
        assert sorted(swarm.books.records) == [0]
        assert all(swarm.books.rosters[0])
        assert swarm.count("pause")
        assert swarm.loop.time() >= limits.stage_timeout
        assert {server.steps.version for name, server in swarm.servers.items() if name not in swarm.dead} == {1}
    finally:
        swarm.close()
