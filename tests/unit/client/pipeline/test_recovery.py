"""A microbatch's pass while peers die, fall silent, are late or cannot reach each other, at any moment."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun
from lightning_swarm.client.pipeline.replay_buffer import Microbatch
from lightning_swarm.client.pipeline.replayer import Replayer
from lightning_swarm.client.pipeline.router import StageRouter
from lightning_swarm.core.errors import ProtocolError, StageLost, StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.calls import ComputeMode, Receipt, StageReport
from lightning_swarm.protocol.messages.step import Replay, ReplayReply, ReplayRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import REPLAY
from lightning_swarm.protocol.run_state import RunState
from lightning_swarm.server import handlers as server_calls
from lightning_swarm.testing.faults import FaultPlan, Phase
from lightning_swarm.testing.sabotage import sabotage
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import MODE, Swarm, key, prefer, rows

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
ROSTERS = ("a a2", "b b2", "c c2")
NUM_MICROBATCHES = 6
LIMITS = Limits(call_timeout=300.0)


class Route:
    """A swarm, a trainer's passes through it, and their results."""

    def __init__(self, swarm: Swarm, plan: FaultPlan | None = None, *, favourite: Collection[str] = "abc") -> None:
        self.swarm = swarm
        self.plan = plan or FaultPlan()
        self.dead: set[PeerId] = set()
        sabotage(swarm.network, self.plan, killed=self.dead.add)
        self.events = EventLog()
        routers = [StageRouter(random.Random(0)) for _ in swarm.rosters]
        for router, roster in zip(routers, swarm.rosters, strict=True):
            router.set_peers(roster)
            prefer(router, favourite)  # all microbatches begin there, so that the fault affects them
        self.context = PipelineContext(swarm.trainer, swarm.tickets, routers, 300.0, self.events)
        Replayer(self.context, RunState(swarm.manifest), max_in_flight=8)
        self.inputs = [rows(i) for i in range(NUM_MICROBATCHES)]
        self.input_gradients: list[torch.Tensor | None] = []

    def passage(self, index: int, mode: ComputeMode = MODE) -> MicrobatchRun:
        x = self.inputs[index]
        extras: list[dict[str, Any]] = [{} for _ in self.context.routers]
        return MicrobatchRun(
            self.context,
            Microbatch(
                key=key(0, index), num_rows=len(x), inputs=(x,), extras=extras, modes=[mode] * len(extras), weight=1.0
            ),
        )

    async def through(self, index: int) -> torch.Tensor:
        passage = self.passage(index)
        output, _ = await passage.forward()
        found = await passage.backward([output])
        assert found is not None
        self.input_gradients.append(found[0])
        return output

    def run(self) -> None:
        """Run all microbatches at once; check for the result of one machine, and that no call is left."""
        outputs = self.swarm.run(gather(self.through(index) for index in range(NUM_MICROBATCHES)))
        self.swarm.settle()
        for x, output in zip(self.inputs, outputs, strict=True):
            torch.testing.assert_close(output, self.swarm.module(x), rtol=1e-12, atol=1e-12)
        for peer in self.alive:
            assert not self.swarm.servers[peer].calls.under_way.tasks, f"calls are left over on {peer}"

    @property
    def alive(self) -> list[PeerId]:
        return [peer for peer in self.swarm.servers if peer not in self.dead]

    def holders(self, stage: int, receipt: Receipt) -> list[PeerId]:
        found = []
        for peer in self.swarm.rosters[stage]:
            if peer not in self.dead and self.swarm.servers[peer].steps.sums.ledgers[stage].holds(receipt):
                found.append(peer)
        return found

    @property
    def receipts(self) -> list[Receipt]:
        return [key(0, index).receipt for index in range(NUM_MICROBATCHES)]

    def holes(self) -> dict[Receipt, list[int]]:
        """Return the receipts that no living peer holds, with their stages."""
        stages = range(len(self.swarm.rosters))
        found = {one: [stage for stage in stages if not self.holders(stage, one)] for one in self.receipts}
        return {one: stages for one, stages in found.items() if stages}

    def replay(
        self, work: Sequence[Replay], avoid: Collection[PeerId] = (), caller: PeerId | None = None
    ) -> ReplayReply:
        request = ReplayRequest(generation=0, step=0, work=list(work), avoid=sorted(avoid))
        transport = self.swarm.servers[caller or self.alive[0]]._transport
        target = self.swarm.trainer.peer_id
        return decode(self.swarm.run(transport.call(target, REPLAY.name, encode(request), timeout=1e4)), ReplayReply)

    def fill(self) -> int:
        """Replay lost gradients at living peers, as the coordinator does; return their number."""
        holes = self.holes()
        work = []
        for receipt, stages in holes.items():
            holders = {i: next(one for one in self.swarm.rosters[i] if one not in self.dead) for i in stages}
            work.append(Replay(receipt=receipt, holders=holders))
        if work:
            assert self.replay(work, self.dead) == ReplayReply(lost=[], unreached=[])
            self.swarm.settle()
        return sum(map(len, holes.values()))

    def assert_sums(self) -> None:
        """Check that each gradient is in exactly one living sum of each stage."""
        for receipt in self.receipts:
            for stage in range(len(self.swarm.rosters)):
                assert len(self.holders(stage, receipt)) == 1, (receipt, stage, self.holders(stage, receipt))
        module = self.swarm.module
        module.zero_grad()
        for x in self.inputs:
            (module(x).square().sum() / 2).backward()
        for index, roster in enumerate(self.swarm.rosters):
            expected = torch.cat([p.grad.flatten() for p in module[index].parameters() if p.grad is not None])  # type: ignore[index]
            sums = [
                self.swarm.servers[peer].steps.stage(index).next_sum.values for peer in roster if peer in self.alive
            ]
            torch.testing.assert_close(sum(sums), expected, rtol=1e-12, atol=1e-12)

    def kill(self, peer: PeerId) -> None:
        self.swarm.network.kill(peer)
        self.dead.add(peer)

    def banned(self) -> set[str | None]:
        return {event.peer for event in self.events.newest if event.kind == "ban"}


DATA_PHASES = [
    Phase.FORWARD,
    Phase.FORWARD_ACCEPTED,
    Phase.FORWARD_DONE,
    Phase.SEND_OUTPUT,
    Phase.BACKWARD,
    Phase.BACKWARD_ACCEPTED,
    Phase.BACKWARD_DONE,
    Phase.RECEIPT_SEEN,
    Phase.SEND_GRADIENT,
]


@pytest.mark.each_value
@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("phase", DATA_PHASES)
def test_a_server_that_dies(make_swarm: MakeSwarm, phase: Phase, victim: str, nth: int) -> None:
    plan = FaultPlan().kill(victim, at=phase, nth=nth)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    route.run()
    assert plan.fired == 1
    assert route.dead == {victim}
    assert route.banned() <= {victim}
    route.fill()
    route.assert_sums()


@pytest.mark.each_value
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.parametrize("phase", DATA_PHASES)
def test_a_server_that_freezes(make_swarm: MakeSwarm, phase: Phase, victim: str) -> None:
    """A frozen server breaks no connection: it is silent, and does not return within the step."""
    plan = FaultPlan().freeze(victim, for_s=1e6, at=phase, nth=2)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    swarm = route.swarm
    outputs = swarm.run(gather(route.through(index) for index in range(NUM_MICROBATCHES)))
    assert swarm.loop.time() < 120.0, "a silent peer was waited for as if it were busy"
    assert plan.fired == 1
    assert route.banned() == {victim}
    for x, output in zip(route.inputs, outputs, strict=True):
        torch.testing.assert_close(output, swarm.module(x), rtol=1e-12, atol=1e-12)
    route.dead = {PeerId(victim)}
    route.fill()
    route.assert_sums()


def test_all_but_one_of_each_stage_die(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().kill("a", at=Phase.FORWARD_ACCEPTED, nth=3)
    plan.kill("b", at=Phase.BACKWARD_DONE, nth=2).kill("c", at=Phase.FORWARD_DONE)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    route.run()
    plan.check()
    route.fill()
    route.assert_sums()
    assert route.banned() <= {"a", "b", "c"}


def test_those_who_take_a_dead_peers_place_die_too(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().kill("b", at=Phase.FORWARD_ACCEPTED).kill("b2", at=Phase.FORWARD_ACCEPTED, nth=2)
    plan.kill("b3", at=Phase.BACKWARD_ACCEPTED)
    route = Route(make_swarm("a", "b b2 b3 b4", "c", limits=LIMITS), plan)
    route.run()
    plan.check()
    route.fill()
    route.assert_sums()


@pytest.mark.each_value
@pytest.mark.parametrize("cache_bytes", [0, 150])
@pytest.mark.parametrize("phase", [Phase.FORWARD_DONE, Phase.BACKWARD_ACCEPTED, Phase.BACKWARD_DONE])
def test_a_death_among_servers_that_keep_nothing(make_swarm: MakeSwarm, phase: Phase, cache_bytes: int) -> None:
    plan = FaultPlan().kill("b", at=phase, nth=2)
    limits = Limits(call_timeout=300.0, cache_bytes=cache_bytes)
    route = Route(make_swarm(*ROSTERS, limits=limits), plan)
    route.run()
    plan.check()
    route.fill()
    route.assert_sums()


def test_a_stage_without_anybody_fails_the_batch_and_says_so(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().kill("b", at=Phase.FORWARD_ACCEPTED)
    route = Route(make_swarm("a", "b", "c", limits=LIMITS), plan)
    with pytest.raises(StepError, match=r"no peer of stage 1 computed .* in \d+ attempts, \d+ s; .*Start more servers"):
        route.swarm.run(route.through(0))
    assert 300.0 <= route.swarm.loop.time() < 400.0
    assert plan.fired == 1


# ---------------------------------------------------------------------- late, and alive


def slow(route: Route, peer: PeerId, direction: str, seconds: float, times: int = 1) -> list[str]:
    """Make the peer's next jobs of a direction take long; return the jobs that were held."""
    executor = route.swarm.servers[peer]._executor
    submit, held = executor.submit, []
    wanted = 1 if direction == "forward" else 0

    def later(priority: tuple[int, ...], run: Any) -> asyncio.Future[Any]:
        if priority[0] != wanted or len(held) >= times:
            return submit(priority, run)
        held.append(direction)
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def finish() -> None:  # like a thread, it finishes even if no caller waits
            result = run()
            if not future.done():
                future.set_result((result, 0.001))

        loop.call_later(seconds, finish)
        return future

    executor.submit = later  # type: ignore[assignment,method-assign]
    return held


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("peer", [A, B, C])
def test_a_late_peer_is_told_to_stop_before_another_one_is_asked(
    make_swarm: MakeSwarm, peer: PeerId, direction: str
) -> None:
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.swarm.run(route.through(0))  # measures times for the next call
    held = slow(route, peer, direction, 200.0)
    route.swarm.run(route.through(1))
    assert held == [direction]
    assert route.swarm.loop.time() < 150.0, "nobody else was asked"
    route.swarm.settle()
    route.inputs = route.inputs[:2]
    receipts = [key(0, index).receipt for index in range(2)]
    stage = "abc".index(peer)
    # The job ran to its end after the cancellation and added its gradient, so two servers may hold it.
    if direction == "backward":
        assert all(len(route.holders(stage, one)) >= 1 for one in receipts)
    else:
        assert [len(route.holders(i, one)) for one in receipts for i in range(3)] == [1] * 6
    assert route.banned() == {peer}


def test_an_only_peer_is_waited_for_however_late(make_swarm: MakeSwarm) -> None:
    route = Route(make_swarm("a", "b", "c", limits=LIMITS))
    route.swarm.run(route.through(0))
    held = slow(route, B, "forward", 200.0)
    route.swarm.run(route.through(1))
    assert held == ["forward"]
    assert 200.0 < route.swarm.loop.time() < 210.0
    assert not route.banned()
    assert route.context.fault_counts["replaced"] == 0


def test_a_late_gradient_that_was_added_counts(make_swarm: MakeSwarm) -> None:
    """The cancellation comes after the addition, and before the answer is sent."""
    plan = FaultPlan().delay("b", by_s=60.0, at=Phase.BACKWARD_DONE, stage=1, microbatch=1)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    route.swarm.run(route.through(0))
    route.swarm.run(route.through(1))
    plan.check()
    route.swarm.settle()
    for index in range(2):
        assert [len(route.holders(stage, key(0, index).receipt)) for stage in range(3)] == [1, 1, 1]


# ---------------------------------------------------------------------- links that are down


@pytest.mark.parametrize("pair", ["ab", "bc"])
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_two_servers_that_cannot_reach_each_other_are_parted(make_swarm: MakeSwarm, phase: Phase, pair: str) -> None:
    """Both live and answer the trainer: neither is banned, and other pairs are used."""
    plan = FaultPlan().partition({pair[0]}, {pair[1]}, for_s=1e6, at=phase)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    route.run()
    plan.check()
    assert not route.banned()
    route.fill()
    for receipt in route.receipts:
        assert all(route.holders(stage, receipt) for stage in range(3))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_two_servers_that_nobody_can_replace_are_waited_for(make_swarm: MakeSwarm, phase: Phase) -> None:
    """Each stage has one server, and two of these cannot reach each other for a while."""
    plan = FaultPlan().partition({"a"}, {"b"}, for_s=200.0, at=phase)
    route = Route(make_swarm("a", "b", "c", limits=LIMITS), plan)
    route.run()
    plan.check()
    route.fill()
    for receipt in route.receipts:
        assert all(route.holders(stage, receipt) for stage in range(3))


def test_a_trainer_that_cannot_reach_a_server_goes_elsewhere(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().partition({"trainer"}, {"b"}, for_s=1e6, at=Phase.FORWARD_ACCEPTED, nth=8)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    route.run()
    plan.check()
    assert route.banned() == {"b"}


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.FORWARD_DONE, Phase.SEND_OUTPUT, Phase.BACKWARD])
def test_a_damaged_message_is_sent_again(make_swarm: MakeSwarm, phase: Phase) -> None:
    plan = FaultPlan().corrupt("b", at=phase)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    route.run()
    plan.check()
    route.fill()
    for receipt in route.receipts:
        assert all(route.holders(stage, receipt) for stage in range(3))


# ---------------------------------------------------------------------- peers that are no members


def test_a_restarted_peer_is_gone(make_swarm: MakeSwarm) -> None:
    """It has the same id but was not admitted, so it gets no call that counts."""
    swarm = make_swarm(*ROSTERS, limits=LIMITS)
    route = Route(swarm)
    old = swarm.servers[B]
    swarm.network.kill(B)
    swarm.servers[B] = swarm._server(B, 999, swarm._optimizer)
    swarm.run(swarm.servers[B].start())
    outputs = swarm.run(gather(route.through(index) for index in range(NUM_MICROBATCHES)))
    assert len(outputs) == NUM_MICROBATCHES
    assert route.banned() == {B}
    swarm.run(swarm.servers[B].close())
    swarm.run(swarm.network.find(B).close())
    swarm.servers[B] = old
    route.dead.add(B)
    assert not route.holes()


# ---------------------------------------------------------------------- when nothing fails


def counted(route: Route, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the trainer's calls from now on, by method."""
    asked: Counter[str] = Counter()
    for name in ("call", "stream"):
        real = getattr(route.swarm.trainer, name)

        async def count(peer: PeerId, method: str, *args: Any, _real: Any = real, **kwargs: Any) -> Any:
            asked[method] += 1
            return await _real(peer, method, *args, **kwargs)

        monkeypatch.setattr(route.swarm.trainer, name, count)
    return asked


def test_nothing_is_asked_that_was_not_asked_before(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per stage: a forward and a backward; then all receipts at once; then the small output and input gradient."""
    route = Route(make_swarm("a", "b", "c", limits=LIMITS))
    asked = counted(route, monkeypatch)
    route.swarm.run(route.through(0))
    assert asked == {"stage.forward": 3, "stage.backward": 3, "ticket.wait": 1 + 2}
    assert not route.events.counts
    assert route.context.num_under_way == 0


@pytest.mark.parametrize("num_told", [0, 1, 3])
def test_receipts_that_do_not_come_at_once_are_asked_for_one_by_one(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, num_told: int
) -> None:
    route = Route(make_swarm("a", "b", "c", limits=LIMITS))
    asked = counted(route, monkeypatch)
    told = (StageReport(busy_s=1.0, queued=0, receipt=True),) * num_told
    monkeypatch.setattr(server_calls, "_reports", lambda _: told)
    route.run()
    route.assert_sums()
    assert asked["ticket.wait"] == NUM_MICROBATCHES * (1 + 3 + 2)
    assert not route.events.counts


# ---------------------------------------------------------------------- replays


def test_a_replay_adds_at_its_holders_and_nowhere_else(make_swarm: MakeSwarm) -> None:
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.run()
    before = {peer: server.steps.sums.ledgers for peer, server in route.swarm.servers.items()}
    work = [Replay(receipt=route.receipts[2], holders={1: PeerId("b2")})]
    assert route.replay(work) == ReplayReply(lost=[], unreached=[])
    assert route.holders(1, route.receipts[2]) == ["b", "b2"]
    assert route.holders(0, route.receipts[2]) == ["a"]
    assert route.holders(2, route.receipts[2]) == ["c"]
    assert before
    num_forwards = route.swarm.servers[A].calls.num_forwards
    assert num_forwards == NUM_MICROBATCHES, "what is there still was computed again"


@pytest.mark.parametrize("victim", [A, B, C])
def test_what_was_added_by_a_server_that_dies_later_is_added_elsewhere(make_swarm: MakeSwarm, victim: PeerId) -> None:
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.run()
    route.kill(victim)
    assert route.fill() == NUM_MICROBATCHES
    route.assert_sums()


@pytest.mark.thorough
def test_one_stage_after_the_other_loses_what_it_had(make_swarm: MakeSwarm) -> None:
    route = Route(make_swarm("a a2 a3", "b b2 b3", "c c2 c3", limits=LIMITS))
    route.run()
    for victim in ("b", "c", "a", "b2", "a2", "c2"):
        route.kill(PeerId(victim))
        assert route.fill() == NUM_MICROBATCHES
        route.assert_sums()


def test_a_server_of_a_stage_above_dies_in_a_replay(make_swarm: MakeSwarm) -> None:
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.run()
    route.kill(A)
    plan = FaultPlan().kill("b", at=Phase.BACKWARD_ACCEPTED, nth=2)
    sabotage(route.swarm.network, plan, killed=route.dead.add)
    assert route.fill() == NUM_MICROBATCHES
    plan.check()
    assert route.fill() == NUM_MICROBATCHES, "those of the second one that died"
    route.assert_sums()


def test_a_replay_again_adds_nothing_again(make_swarm: MakeSwarm) -> None:
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.run()
    for peer in ("a2", "b2", "c2"):
        route.swarm.servers[PeerId(peer)].steps.stage("abc".index(peer[0])).next_sum.values.zero_()
    work = [Replay(receipt=one, holders={0: PeerId("a2"), 2: PeerId("c2")}) for one in route.receipts]
    first = route.swarm.servers[PeerId("a2")].steps.stage(0)
    assert route.replay(work) == ReplayReply(lost=[], unreached=[])
    found = first.next_sum.values.clone()
    assert found.any()
    assert route.replay(work) == ReplayReply(lost=[], unreached=[])
    assert torch.equal(first.next_sum.values, found)
    torch.testing.assert_close(found, route.swarm.servers[A].steps.stage(0).next_sum.values)


def test_who_was_to_add_nothing_may_be_named_later(make_swarm: MakeSwarm) -> None:
    """It computed the gradient in an earlier replay, but no peer fetched it."""
    swarm = make_swarm(*ROSTERS, limits=LIMITS)
    route = Route(swarm)
    route.run()
    receipt = route.receipts[0]
    route.kill(C)
    # c2 computes the gradient for b2, which dies before it receives it.
    plan = FaultPlan().kill("b2", at=Phase.SEND_GRADIENT, of="c2")
    sabotage(swarm.network, plan, killed=route.dead.add)
    reply = route.replay([Replay(receipt=receipt, holders={1: PeerId("b2")})], [C])
    assert reply == ReplayReply(lost=[], unreached=[PeerId("b2")])
    plan.check()
    assert route.holders(2, receipt) == []
    assert route.replay([Replay(receipt=receipt, holders={2: PeerId("c2")})], [C, PeerId("b2")]).unreached == []
    assert route.holders(2, receipt) == ["c2"]


def test_a_holder_that_is_gone_is_named(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(*ROSTERS, limits=LIMITS)
    route = Route(swarm)
    route.run()
    swarm.network.kill(PeerId("b2"))
    work = [Replay(receipt=route.receipts[0], holders={1: PeerId("b2")})]
    assert route.replay(work) == ReplayReply(lost=[], unreached=[PeerId("b2")])


def test_what_a_holder_refuses_as_its_sum_is_frozen_is_not_lost(make_swarm: MakeSwarm) -> None:
    """The sum was frozen meanwhile, so a later freeze reports the missing gradient, and the replay is repeated."""
    swarm = make_swarm(*ROSTERS, limits=LIMITS)
    route = Route(swarm)
    route.run()
    swarm.servers[PeerId("b2")].steps.sums.ledgers[1].freeze(())
    work = [Replay(receipt=route.receipts[0], holders={1: PeerId("b2")})]
    assert route.replay(work) == ReplayReply(lost=[], unreached=[])
    assert "b2" not in route.holders(1, route.receipts[0])
    assert "does not name" in route.events.newest[-1].reason


def test_what_is_not_kept_is_lost(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(*ROSTERS, limits=LIMITS)
    route = Route(swarm)
    route.run()
    swarm.run(route.context.replay_buffer.release(0))
    assert len(route.context.replay_buffer) == 0
    work = [Replay(receipt=one, holders={1: PeerId("b2")}) for one in route.receipts[:2]]
    assert route.replay(work) == ReplayReply(lost=route.receipts[:2], unreached=[])


def test_a_replay_from_disk(make_swarm: MakeSwarm) -> None:
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.context.replay_buffer._max_bytes = 100
    route.run()
    assert route.context.replay_buffer.num_spilled > 0
    route.kill(B)
    assert route.fill() == NUM_MICROBATCHES
    route.assert_sums()
    route.context.replay_buffer.close()


@pytest.mark.parametrize("caller", ["other", "stranger"])
def test_only_servers_of_the_run_ask_for_replays(make_swarm: MakeSwarm, caller: str) -> None:
    swarm = make_swarm(*ROSTERS, limits=LIMITS)
    route = Route(swarm)
    transport = swarm.network.transport(caller)
    request = ReplayRequest(generation=0, step=0, work=[], avoid=[])
    with pytest.raises(ProtocolError, match="only servers of the run"):
        swarm.run(transport.call(swarm.trainer.peer_id, REPLAY.name, encode(request), timeout=1.0))
    assert not route.events.counts


@pytest.mark.parametrize("holders", [{}, {3: A}, {1 << 40: A}])
def test_a_replay_of_other_stages_is_refused(make_swarm: MakeSwarm, holders: dict[int, PeerId]) -> None:
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.run()
    with pytest.raises(ProtocolError, match="must name holders"):
        route.replay([Replay(receipt=route.receipts[0], holders=holders)])


@pytest.mark.parametrize("phase", [Phase.BACKWARD, Phase.BACKWARD_DONE])
@pytest.mark.parametrize("kind", ["drop", "corrupt"])
def test_a_holder_that_lives_is_asked_again(make_swarm: MakeSwarm, kind: str, phase: Phase) -> None:
    """A message was lost. The holder is not gone, and must not be replaced."""
    route = Route(make_swarm(*ROSTERS, limits=LIMITS))
    route.run()
    plan = getattr(FaultPlan(), kind)("b2", at=phase)
    sabotage(route.swarm.network, plan)
    work = [Replay(receipt=one, holders={1: PeerId("b2")}) for one in route.receipts]
    assert route.replay(work) == ReplayReply(lost=[], unreached=[])
    plan.check()
    assert all("b2" in route.holders(1, one) for one in route.receipts)


def test_what_no_way_leads_to_is_lost(make_swarm: MakeSwarm) -> None:
    """The next stage has no server left."""
    route = Route(make_swarm("a a2", "b", "c", limits=LIMITS))
    route.run()
    route.kill(B)
    work = [Replay(receipt=one, holders={0: PeerId("a2")}) for one in route.receipts]
    assert route.replay(work) == ReplayReply(lost=route.receipts, unreached=[])
    assert not any("a2" in route.holders(0, one) for one in route.receipts)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.FORWARD_DONE, Phase.BACKWARD, Phase.BACKWARD_DONE])
def test_a_message_that_is_lost_without_a_word(make_swarm: MakeSwarm, phase: Phase) -> None:
    plan = FaultPlan().drop("b", at=phase)
    route = Route(make_swarm(*ROSTERS, limits=LIMITS), plan)
    route.run()
    plan.check()
    assert all(route.holders(stage, one) for stage in range(3) for one in route.receipts)


# ---------------------------------------------------------------------- a stage with nobody


def alone(make_swarm: MakeSwarm, plan: FaultPlan, *, stage_timeout: float) -> Route:
    """Return a route on which each stage has one server."""
    route = Route(make_swarm("a", "b", "c", limits=LIMITS), plan)
    route.context.stage_timeout = stage_timeout
    route.context.__post_init__()
    return route


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_passages_wait_for_a_stage_of_which_nobody_is_there(make_swarm: MakeSwarm, phase: Phase) -> None:
    plan = FaultPlan().freeze("b", for_s=1000.0, at=phase, microbatch=2)
    route = alone(make_swarm, plan, stage_timeout=5000.0)
    route.run()
    plan.check()
    assert route.swarm.loop.time() > 1000.0
    assert not route.holes()
    assert route.events.counts["pause"] >= 1
    assert route.events.counts["resume"] >= 1


@pytest.mark.thorough
def test_passages_do_not_wait_for_ever(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().kill("b", at=Phase.FORWARD, microbatch=2)
    route = alone(make_swarm, plan, stage_timeout=1000.0)
    with pytest.raises(StageLost, match="step 0 waits for stage 1, which had no server"):
        route.run()
    plan.check()
    assert 1000.0 <= route.swarm.loop.time() < 1100.0


def test_passages_do_not_wait_for_a_run_that_broke_off(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().kill("b", at=Phase.FORWARD, microbatch=2)
    route = alone(make_swarm, plan, stage_timeout=1000.0)

    async def check() -> None:
        if route.swarm.loop.time() > 100.0:
            raise StepError("it broke off")

    route.context.ensure_enlisted = check
    with pytest.raises(StepError, match="it broke off"):
        route.run()
    plan.check()
    assert route.swarm.loop.time() < 150.0
