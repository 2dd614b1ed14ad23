"""Servers that go at any time between a microbatch's receipt and the record: the weights equal one machine's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import NotMember, ProtocolError, StageLost
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import Origins
from lightning_swarm.protocol.messages.run import StepChange
from lightning_swarm.protocol.messages.step import FreezeReply, FreezeRequest, NamedReceipts, Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import APPLY, AVERAGE, FREEZE
from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.sabotage import sabotage
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.replays import Replayer, batch_of
from tests.unit.swarm import LEAD, Swarm, key, make_optimizer, plain_steps, rows

A, B, C, D = PeerId("a"), PeerId("b"), PeerId("c"), PeerId("d")
NUM_MICROBATCHES = 6
LONG_S = 1e6


class Trial:
    """A swarm, a trainer that answers REPLAY, and faults."""

    def __init__(self, make_swarm: MakeSwarm, plan: FaultPlan, *rosters: str, **settings: Any) -> None:
        network = MemoryNetwork(latency_s=0.001)
        self.plan = plan
        self.swarm: Swarm = make_swarm(
            *rosters, network=network, limits=Limits(call_timeout=30.0, stage_timeout=600.0), **settings
        )
        self.trainer = Replayer(self.swarm)
        sabotage(network, plan)
        self.records: list[Record] = []

    def train(self, num_steps: int, *, avoid: Sequence[PeerId] = ()) -> None:
        """Run steps; servers in `avoid` get no microbatch after the first step."""
        for _ in range(num_steps):
            step = len(self.records)
            self.records.append(self.swarm.run(self.trainer.step(*batch_of(step, NUM_MICROBATCHES))))
            self.trainer.avoid |= set(avoid)

    @property
    def events(self) -> dict[str, int]:
        return dict(self.swarm.servers[self.swarm.manifest.coordinator].events.counts)

    def members(self) -> list[list[PeerId]]:
        return [[member.peer_id for member in roster] for roster in self.swarm.rosters_now]

    def check(self) -> None:
        """Check faults, the weights of one machine, that each microbatch counts once, and that replicas are equal."""
        self.plan.check()
        batches = [batch_of(step, NUM_MICROBATCHES) for step in range(len(self.records))]
        for record in self.records:
            assert self.swarm.counted(record) == [(0, i, 0) for i in range(NUM_MICROBATCHES)]
        plain_steps(self.swarm.module, batches, divisors=[1.0] * len(batches))
        self.check_weights(self.records[-1])

    def check_weights(self, record: Record) -> None:
        """Check the weights of all members of the next step."""
        expected = self.swarm.module.state_dict()
        seen: dict[str, Tensor] = {}
        for index, roster in enumerate(self.swarm.rosters_now):
            for member in roster:
                steps = self.swarm.servers[member.peer_id].steps
                assert steps.version == record.step + 1
                for name, tensor in steps.stage(index).weights().items():
                    assert torch.equal(seen.setdefault(name, tensor), tensor), "replicas are equal to the bit"
                    torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-14)
        assert seen.keys() == expected.keys()


def strike(kind: str, peer: str, phase: Phase, **when: Any) -> FaultPlan:
    plan = FaultPlan()
    moment: dict[str, Any] = {"step": 1, **when}
    if kind == "kill":
        return plan.kill(peer, at=phase, **moment)
    return plan.freeze(peer, for_s=LONG_S, at=phase, **moment)


CLOSING = [
    Phase.CLOSE,
    Phase.CLOSE_DONE,
    Phase.AVERAGE,
    Phase.AVERAGE_SEND,
    Phase.AVERAGE_REDUCE,
]


def test_servers_begin_to_average_when_they_freeze(make_swarm: MakeSwarm) -> None:
    """Only the parts, the means, the answer and the vote lie between freeze and record; no extra round for ledgers."""
    latency_s = 1.0
    swarm = make_swarm("a", "b c", network=MemoryNetwork(latency_s=latency_s))
    at_s: dict[str, float] = {}
    for name in (FREEZE.name, AVERAGE.name, APPLY.name):
        handler = swarm.servers[B]._transport._call_handlers[name]  # type: ignore[attr-defined]

        async def timed(caller: PeerId, body: bytes, name: str = name, handler: Any = handler) -> bytes:
            at_s.setdefault(name, now_s())
            answer: bytes = await handler(caller, body)
            return answer

        swarm.servers[B]._transport._call_handlers[name] = timed  # type: ignore[attr-defined]
    swarm.run(Replayer(swarm).step(*batch_of(0, NUM_MICROBATCHES)))
    assert at_s[AVERAGE.name] - at_s[FREEZE.name] == pytest.approx(2 * latency_s)
    assert at_s[APPLY.name] - at_s[FREEZE.name] == pytest.approx((2 + 2 + 1 + 2 + 1) * latency_s)


@pytest.mark.each_value
@pytest.mark.parametrize("rosters", [("a", "b c"), ("a", "b c d"), ("a b c", "d b c")])
@pytest.mark.parametrize("phase", CLOSING, ids=lambda phase: phase.name)
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_server_that_goes_while_a_step_closes(
    make_swarm: MakeSwarm, kind: str, phase: Phase, rosters: tuple[str, ...]
) -> None:
    trial = Trial(make_swarm, strike(kind, "c", phase), *rosters)
    trial.train(4)
    trial.check()
    assert not any(C in roster for roster in trial.members()), "it is left out by the record"
    assert trial.events["gone"] == 1
    assert trial.events["replay"] == len([1 for one in trial.trainer.replayed for _ in one.holders]) > 0
    if phase is not Phase.AVERAGE_SEND:  # it sends parts as soon as it freezes, so it may die with its answer to that
        assert ("round_repeated" in trial.events) == (phase.name.startswith("AVERAGE"))


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_server_that_goes_between_its_receipts_and_the_closing(make_swarm: MakeSwarm, kind: str) -> None:
    # DONE goes to the coordinator after the batch's last receipt.
    trial = Trial(make_swarm, strike(kind, "c", Phase.DONE, of="trainer"), "a c", "b")
    trial.train(4)
    trial.check()
    assert trial.members() == [[A], [B]]
    assert [one.holders for one in trial.trainer.replayed] == [{0: A}] * (NUM_MICROBATCHES // 2)


@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_server_that_goes_when_it_has_averaged(make_swarm: MakeSwarm, kind: str) -> None:
    """The other servers hold the round's result; whether it does is unknown."""
    trial = Trial(make_swarm, strike(kind, "c", Phase.AVERAGE_DONE), "a", "b c d")
    trial.train(4)
    trial.check()
    assert trial.members() == [[A], [B, D]]
    assert trial.events["round_repeated"] == 1


@pytest.mark.each_value
@pytest.mark.parametrize("phase", [Phase.DECIDE, Phase.DECIDE_DONE, Phase.APPLY, Phase.APPLY_DONE], ids=str)
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_a_server_that_goes_with_the_record(make_swarm: MakeSwarm, kind: str, phase: Phase) -> None:
    """Its round counts; the next record excludes it."""
    plan = strike(kind, "c", phase, of="c")
    trial = Trial(make_swarm, plan, "a", "b c d")
    trial.train(1)
    assert [voter.peer_id for voter in trial.swarm.steps.run.voters] == [A, B, C]
    trial.train(3, avoid="c")
    trial.check()
    assert trial.members() == [[A], [B, D]]
    assert [C in trial.swarm.held.by_stage(record)[1] for record in trial.records] == [
        True,
        True,
        False,
        False,
    ]
    assert not trial.trainer.replayed
    assert [voter.peer_id for voter in trial.swarm.steps.run.voters] == [A, B, D]


def test_a_record_that_a_server_missed_is_told_again(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().drop("c", at=Phase.APPLY, step=1, of="c", times=2)
    trial = Trial(make_swarm, plan, "a", "b c")
    trial.train(2)
    assert plan.fired
    trial.swarm.run(asyncio.sleep(60.0))
    assert trial.swarm.servers[C].steps.version == 2, "before anything else is asked of it"
    trial.train(2)
    trial.check()
    assert trial.members() == [[A], [B, C]]
    assert "gone" not in trial.events


def test_a_record_that_a_server_missed_is_told_before_its_sums_are_frozen(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().corrupt("c", at=Phase.APPLY, step=1, of="c", times=4)
    trial = Trial(make_swarm, plan, "a", "b c")
    trial.train(2)
    assert trial.swarm.servers[C].steps.version == 1
    trial.trainer.avoid.add(C)  # calls to it would wait until it gets the record again
    trial.train(1)
    trial.check()
    assert trial.members() == [[A], [B, C]]


@pytest.mark.parametrize(
    "phase", [Phase.CLOSE, Phase.CLOSE_DONE, Phase.AVERAGE, Phase.APPLY, Phase.APPLY_DONE], ids=str
)
def test_a_damaged_call_is_made_again(make_swarm: MakeSwarm, phase: Phase) -> None:
    trial = Trial(make_swarm, FaultPlan().corrupt("c", at=phase, step=1), "a", "b c")
    trial.train(3)
    trial.check()
    assert not trial.events, "nobody is to blame"


@pytest.mark.parametrize("phase", [Phase.AVERAGE_SEND, Phase.AVERAGE_REDUCE], ids=str)
def test_a_damaged_part_repeats_the_round(make_swarm: MakeSwarm, phase: Phase) -> None:
    trial = Trial(make_swarm, FaultPlan().corrupt("c", at=phase, step=1), "a", "b c")
    trial.train(3)
    trial.check()
    assert trial.events == {"round_repeated": 1}
    assert [record.closing.round for record in trial.records] == [0, 1, 0]
    assert trial.swarm.loop.time() < 1.0, "the other one does not wait for what does not come"


@pytest.mark.parametrize("phase", [*CLOSING, Phase.AVERAGE_DONE], ids=str)
def test_who_lives_is_not_left_out_for_a_lost_message(make_swarm: MakeSwarm, phase: Phase) -> None:
    trial = Trial(make_swarm, FaultPlan().drop("c", at=phase, step=1, of="c"), "a", "b c")
    trial.train(3)
    trial.check()
    assert trial.members() == [[A], [B, C]]
    assert "gone" not in trial.events


def test_nobody_waits_for_a_server_that_refuses_a_round(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(make_swarm, FaultPlan(), "a", "b c d")
    trial.train(1)

    def refuses(*_: Any) -> None:
        raise ProtocolError("its sums may change")

    monkeypatch.setattr(trial.swarm.servers[D].steps.sums, "bind", refuses)
    began_s = trial.swarm.loop.time()
    trial.train(1)
    assert trial.swarm.loop.time() - began_s < 1.0
    assert trial.events["round_repeated"] == 1
    assert trial.members() == [[A], [B, C]]
    trial.train(1)
    trial.check()


def test_two_replicas_that_do_not_reach_each_other(make_swarm: MakeSwarm) -> None:
    """Each accuses the other; the coordinator reaches both, and continues with one."""
    plan = FaultPlan().partition("b", "c", for_s=LONG_S, at=Phase.CLOSE, step=1)
    trial = Trial(make_swarm, plan, "a", "b c")
    trial.train(3)
    trial.check()
    assert trial.members() == [[A], [B]]


def test_who_most_do_not_reach_is_gone(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().partition("b", "cd", for_s=LONG_S, at=Phase.CLOSE, step=1)
    trial = Trial(make_swarm, plan, "a", "b c d")
    trial.train(3)
    trial.check()
    assert trial.members() == [[A], [C, D]]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("other", "phase", "when"),
    [
        ("d", Phase.CLOSE, {}),
        ("e", Phase.CLOSE, {}),
        ("d", Phase.REPLAY, {"of": "trainer"}),
        ("e", Phase.REPLAY, {"of": "trainer"}),
        ("d", Phase.BACKWARD, {"nth": 3}),  # the first backward beyond its own share
        ("e", Phase.FORWARD, {"nth": 4}),  # the first forward beyond its own share
        ("d", Phase.AVERAGE, {}),
        ("e", Phase.AVERAGE_REDUCE, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_two_servers_that_go_in_one_step(
    make_swarm: MakeSwarm, kind: str, other: str, phase: Phase, when: dict[str, Any]
) -> None:
    """The second server, of the same stage or another, goes while the first one's work is repeated."""
    plan = strike(kind, other, phase, **when).kill("c", at=Phase.CLOSE, step=1)
    trial = Trial(make_swarm, plan, "a e", "b c d")
    trial.train(4)
    trial.check()
    assert trial.members() == ([[A, PeerId("e")], [B]] if other == "d" else [[A], [B, D]])


# ---------------------------------------------------------------------- sums that hold what they should not


def test_a_gradient_that_nobody_counts_is_discarded(make_swarm: MakeSwarm) -> None:
    """Its batch was withdrawn, for example. The sums that contain it are recomputed."""
    trial = Trial(make_swarm, FaultPlan(), "a", "b c")
    trial.swarm.run(trial.swarm.through(key(100), rows(9), route=[A, C]))
    trial.train(2)
    trial.check()
    assert trial.events["discard"] == 2
    replayed = [(one.receipt, sorted(one.holders)) for one in trial.trainer.replayed]
    assert replayed == [((0, i, 0), [0, 1] if i % 2 else [0]) for i in range(NUM_MICROBATCHES)]


def test_a_gradient_in_two_sums_stays_in_one(make_swarm: MakeSwarm) -> None:
    trial = Trial(make_swarm, FaultPlan(), "a", "b c")
    # Also send it to c, like a trainer that took b for gone.
    trial.swarm.run(trial.swarm.through(key(0, 0), batch_of(0, 1)[0], route=[A, C]))
    trial.train(2)
    trial.check()
    assert trial.events["discard"] == 1
    assert len(trial.trainer.replayed) == 2, "b held less than c did"


def test_a_late_call_adds_nothing_to_what_was_named_elsewhere(make_swarm: MakeSwarm) -> None:
    """The server named for a replay has computed that microbatch before it gave up its sum."""
    trial = Trial(make_swarm, FaultPlan().kill("c", at=Phase.CLOSE, step=0), "a", "b c")
    trial.swarm.run(trial.swarm.through(key(100), rows(9), route=[A, B]))
    trial.train(2)
    trial.check()
    assert trial.events["discard"] == 2
    assert trial.events["replay"] == 2 * NUM_MICROBATCHES


# ---------------------------------------------------------------------- a stage with nobody


def test_the_swarm_waits_for_a_stage_that_is_silent(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().freeze("b", for_s=300.0, at=Phase.CLOSE, step=1)
    trial = Trial(make_swarm, plan, "a", "b")
    trial.train(3)
    trial.check()
    assert 300.0 < trial.swarm.loop.time() < 400.0
    assert trial.events["resume"] == 1


def test_a_stage_that_stays_silent_ends_the_run(make_swarm: MakeSwarm) -> None:
    trial = Trial(make_swarm, FaultPlan().kill("b", at=Phase.CLOSE, step=1), "a", "b")
    with pytest.raises(StageLost, match=r"step 1 waits for stage 1, which had no server for .* 600 s; b was lost"):
        trial.train(3)
    assert 600.0 <= trial.swarm.loop.time() < 660.0
    trial.plan.check()


def test_a_stage_that_was_restarted_ends_the_run_at_once(make_swarm: MakeSwarm) -> None:
    """No server has its weights any more."""
    trial = Trial(make_swarm, FaultPlan(), "a", "b")
    trial.train(1)

    async def restarted(caller: PeerId, body: bytes) -> bytes:
        raise NotMember("this peer was not admitted to a run yet")

    trial.swarm.servers[B]._transport._call_handlers[FREEZE.name] = restarted  # type: ignore[attr-defined]
    begin_s = trial.swarm.loop.time()
    with pytest.raises(StageLost, match="stage 1 has no server left: this peer was not admitted to a run yet"):
        trial.train(1)
    assert trial.swarm.loop.time() < begin_s + 10.0


# ---------------------------------------------------------------------- others that are about


@pytest.mark.parametrize("how", ["another boot id", "not admitted"])
def test_a_server_that_was_restarted_is_gone(make_swarm: MakeSwarm, how: str) -> None:
    trial = Trial(make_swarm, FaultPlan(), "a", "b c")
    trial.train(1)
    swarm, steps = trial.swarm, trial.swarm.servers[C].steps

    async def restarted(caller: PeerId, body: bytes) -> bytes:
        if how == "not admitted":
            raise NotMember("this peer was not admitted to a run yet")
        reply = decode(await freeze(caller, body), FreezeReply)
        return encode(replaced(reply, boot_id=999, ledgers=[]))

    handlers = swarm.servers[C]._transport._call_handlers  # type: ignore[attr-defined]
    freeze = handlers[FREEZE.name]
    handlers[FREEZE.name] = restarted
    trial.train(2)
    trial.check()
    assert steps.version == 1
    assert trial.members() == [[A], [B]]


@pytest.mark.parametrize("phase", [Phase.AVERAGE, Phase.AVERAGE_REDUCE], ids=str)
def test_a_joiner_enters_by_the_record_of_a_repeated_round(make_swarm: MakeSwarm, phase: Phase) -> None:
    trial = Trial(make_swarm, FaultPlan().kill("c", at=phase, step=1), "a", "b c")
    trial.train(1)
    trial.swarm.join("j")
    trial.train(3)
    trial.check()
    assert [one.member.peer_id for one in trial.records[1].newcomers] == ["j"]
    assert trial.records[1].closing.round > 0
    assert trial.members() == [[A, PeerId("j")], [B]]


def test_a_server_that_was_not_told_what_trains_takes_no_part(make_swarm: MakeSwarm) -> None:
    trial = Trial(make_swarm, FaultPlan(), "a", "b c")
    trial.train(1)
    swarm = trial.swarm
    swarm.network.freeze(C)
    assert swarm.manifest.selection is not None
    selection = replaced(swarm.manifest.selection, frozen=["0.0.weight"])
    swarm.run(swarm.steps.change(StepChange(selection=selection)))
    swarm.network.thaw(C)
    swarm.module[0][0].weight.requires_grad_(False)  # type: ignore[index, operator]
    trial.records.append(swarm.run(trial.trainer.step(*batch_of(1, NUM_MICROBATCHES))))
    assert trial.events["replay"] == NUM_MICROBATCHES // 2, "what it computed is not looked at"
    assert trial.members() == [[A], [B]]
    assert trial.records[-1].change.selection == selection


# ---------------------------------------------------------------------- batches that cannot be computed again


def begun(make_swarm: MakeSwarm, plan: FaultPlan, **settings: Any) -> tuple[Trial, Grant]:
    """Start a step in which another trainer's batch is through and the lead's is not."""
    trial = Trial(make_swarm, plan, "a", "b c", **settings)
    swarm = trial.swarm
    other = swarm.client(swarm.network.transport("other"))
    lead = swarm.run(swarm.steps.grant(2))
    theirs = swarm.run(other.grant(2))
    swarm.run(swarm.through(key(theirs.first), rows(7), route=[A, C], weight=theirs.weight))
    swarm.run(other.done(theirs.lease, [key(theirs.first).receipt]))
    swarm.network.kill(PeerId("other"))
    swarm.run(trial.trainer.through(key(lead.first), rows(8), weight=lead.weight, choice=1))
    return trial, lead


def test_a_batch_whose_trainer_is_gone_counts_while_its_receipts_are_there(make_swarm: MakeSwarm) -> None:
    trial, grant = begun(make_swarm, FaultPlan())
    trial.swarm.run(trial.swarm.steps.done(grant.lease, [key().receipt], close=True))
    record = trial.swarm.run(trial.swarm.record(0))
    assert trial.swarm.counted(record) == [(0, 0, 0), (2, 0, 0)]
    plain_steps(trial.swarm.module, [[rows(8), rows(7)]], divisors=[2.0])
    trial.check_weights(record)


def test_a_batch_whose_trainer_and_server_are_gone_is_struck(make_swarm: MakeSwarm) -> None:
    trial, grant = begun(make_swarm, FaultPlan().kill("c", at=Phase.CLOSE))
    trial.swarm.run(trial.swarm.steps.done(grant.lease, [key().receipt], close=True))
    record = trial.swarm.run(trial.swarm.record(0))
    trial.plan.check()
    assert (trial.swarm.counted(record), record.closing.num_samples) == ([(0, 0, 0)], 2)
    assert trial.events["strike"] == 1
    plain_steps(trial.swarm.module, [[rows(8)]], divisors=[1.0])
    trial.check_weights(record)


def test_a_step_that_lost_a_batch_takes_another(make_swarm: MakeSwarm) -> None:
    """The trainer that waits for the record gets a place instead, and the sums accept the new batch."""
    trial, grant = begun(make_swarm, FaultPlan().kill("c", at=Phase.CLOSE), target_batch_size=4)
    swarm = trial.swarm
    swarm.run(swarm.steps.done(grant.lease, [key().receipt]))
    assert swarm.run(swarm.steps.wait_for_record(0)) is None, "there is a place again"
    assert trial.events["strike"] == 1
    again = swarm.run(swarm.steps.grant(2))
    assert (again.step, again.first) == (0, 4), "a key must not come back with other samples"
    swarm.run(trial.trainer.through(key(4), rows(9), weight=again.weight, choice=0))
    assert swarm.run(swarm.steps.done(again.lease, [key(4).receipt]))
    record = swarm.run(swarm.record(0))
    trial.plan.check()
    assert (trial.swarm.counted(record), record.closing.num_samples) == ([(0, 0, 0), (4, 0, 0)], 4)
    optimizer = make_optimizer(swarm.module)
    for x in (rows(8), rows(9)):
        (2 / 4 * swarm.module(x).square().sum() / 2).backward()
    optimizer.step()
    trial.check_weights(record)


def test_a_sum_that_holds_a_struck_batch_begins_anew_when_the_step_takes_others(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b")
    swarm.run(swarm.through(key(), rows(1)))
    coordinator, stage = swarm.servers[A]._transport, swarm.servers[B].steps.stage(1)

    def reopen(round_: int, struck: list[int]) -> None:
        request = FreezeRequest(generation=0, step=0, round=round_, struck=struck)
        swarm.run(coordinator.call(B, FREEZE.name, encode(request), timeout=1.0))

    reopen(1, [2])
    assert stage.next_sum.values.any(), "it counts"
    reopen(2, [0, 2])
    assert not stage.next_sum.values.any()
    swarm.run(swarm.through(key(4), rows(2)))
    assert stage.next_sum.values.any(), "others may be added"


def test_weights_are_hashed_where_somebody_may_compare_them(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a c", "b")
    coordinator = swarm.servers[A]._transport

    def hash_of(peer: PeerId, *, challenge: int = 0) -> int | None:
        request = FreezeRequest(generation=0, step=0, challenge=challenge)
        answer = swarm.run(coordinator.call(peer, FREEZE.name, encode(request), timeout=1.0))
        return decode(answer, FreezeReply).ledgers[0].version_hash

    def fingerprint_of(peer: PeerId, stage: int, challenge: int = 0) -> int:
        return swarm.servers[peer].steps.stage(stage).fingerprint(challenge)

    assert hash_of(A) == hash_of(C) == fingerprint_of(A, 0)
    assert hash_of(B) is None
    assert hash_of(B, challenge=7) == fingerprint_of(B, 1, 7) != fingerprint_of(B, 1)
    assert hash_of(A, challenge=8) == fingerprint_of(C, 0, 8) != fingerprint_of(C, 0, 7)


# ---------------------------------------------------------------------- what comes late


def test_what_was_asked_for_an_earlier_round_is_refused(make_swarm: MakeSwarm) -> None:
    """A delayed request, from before the server was taken for gone, must not open its sums or begin them anew."""
    swarm = make_swarm("a", "b")
    swarm.run(swarm.through(key(), rows(1)))
    coordinator = swarm.servers[A]._transport
    request = FreezeRequest(generation=0, step=0, round=3)

    def freeze(**changes: Any) -> None:
        swarm.run(coordinator.call(B, FREEZE.name, encode(replaced(request, **changes)), timeout=1.0))

    freeze()
    before = swarm.state()
    freeze()
    assert swarm.state() == before, "asked twice"
    nothing = [NamedReceipts(stage_index=1, receipts=[], origins=[])]
    for changes in ({"round": 2, "named": nothing}, {"round": 2, "struck": [0]}, {"round": 2}):
        with pytest.raises(ProtocolError, match=r"step, round \(0, 3\), got"):
            freeze(**changes)
    places, of_all = [(first, 0, b"\xff" * (1 << 14)) for first in range(3)], [(1.0, LEAD, 3)]
    too_many = [NamedReceipts(stage_index=1, receipts=places, origins=of_all)]
    numbers = ([], [2], [1, 1], [1 << 40], [0])
    weighed: list[Origins] = [[(1.0, LEAD, number) for number in one] for one in numbers]
    unweighed = [[NamedReceipts(stage_index=1, receipts=[(0, 0, b"\x01")], origins=one)] for one in weighed]
    for named in ([], 2 * nothing, [NamedReceipts(stage_index=0, receipts=[], origins=[])], too_many, *unweighed):
        with pytest.raises(ProtocolError):
            freeze(round=4, named=named)
    assert swarm.state() == before
    freeze(round=4, named=nothing)
    assert not swarm.servers[B].steps.stage(1).next_sum.values.any()
