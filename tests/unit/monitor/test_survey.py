"""A swarm observed from outside combines its peers' reports; silent or false reports do no harm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import lightning as L
import msgspec
import pytest
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ConfigError, PeerError, ProtocolError, Uncertified, Untrusted
from lightning_swarm.core.event_loop import InlineRuntime
from lightning_swarm.monitor import survey
from lightning_swarm.monitor.swarm_report import Sighting, summarize, table
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Role
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.peer import lead
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.reports import (
    MAX_LOGGED,
    CarriedReport,
    HeldStage,
    LinkReport,
    LoggedNumber,
    MachineReport,
    OtherPeer,
    OtherPeers,
    PeerReport,
    SampleCosts,
    ServerReport,
    StepReport,
)
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import OTHERS, PEER_REPORT
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.testing import InMemoryStrategy
from tests.access import InvitedNetwork
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, NanoGPT, digits, loader, sentences

SERVING = ServerReport(
    lead="a",
    coordinator="a",
    num_stages=2,
    stages=[0],
    trainers_stage=None,
    first_step=10,
    step=40,
    age_s=60.0,
    num_samples=1200,
    queued=3,
    peak_bytes=1_230_000_000,
)
REPORT = PeerReport(run_id="x", age_s=3600.0, sent_bytes=2_000_000_000, received_bytes=500_000_000, server=SERVING)

COSTS = SampleCosts(flop=1e9, input_bytes=1, extra_bytes=0, gradient_bytes=0, output_bytes=1, graph_bytes=1)
LOSS = LoggedNumber(name="train_loss", value=2.5, step=12, age_s=1.5)
HELD = HeldStage(index=0, num_blocks=1, num_parameters=1, weight_bytes=4, costs=COSTS)


def said(report: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(report, **changes)


def seen(peer: str, report: PeerReport | None = REPORT, problem: str | None = None) -> Sighting:
    return Sighting(PeerId(peer), f"{peer}:1", report, problem)


# ---------------------------------------------------------------------- the picture


def test_rates_are_since_the_peers_began() -> None:
    found = summarize([seen("a")])
    assert (found.run_id, found.step, found.steps_per_minute) == ("x", 40, 30.0)
    assert found.stages == (("a",), ())
    [peer] = found.peers
    assert (peer.lead, peer.coordinator, peer.queued, peer.stages) == (True, True, 3, (0,))
    assert (peer.samples_per_s, peer.sent_gb_per_hour, peer.received_gb_per_hour) == pytest.approx((20.0, 2.0, 0.5))


def test_rates_are_since_the_look_before() -> None:
    later = said(
        REPORT, age_s=3610.0, sent_bytes=REPORT.sent_bytes + 10_000_000,
        server=said(SERVING, age_s=70.0, step=50, num_samples=1300),
    )  # fmt: skip
    found = summarize([seen("a", later)], [seen("a")])
    assert found.steps_per_minute == 60.0
    assert found.peers[0].samples_per_s == 10.0
    assert found.peers[0].sent_gb_per_hour == pytest.approx(3.6)


@pytest.mark.parametrize(
    "before",
    [
        said(REPORT, age_s=9999.0),
        said(REPORT, age_s=3599.0, sent_bytes=1 << 40),
        said(REPORT, age_s=3599.0, server=said(SERVING, age_s=9999.0)),
    ],
    ids=["started again", "another process", "another run"],
)
def test_a_peer_in_another_life_begins_anew(before: PeerReport) -> None:
    assert summarize([seen("a")], [seen("a", before)]) == summarize([seen("a")])


def test_one_false_report_changes_neither_the_runs_shape_nor_its_coordinator() -> None:
    false = said(
        SERVING, num_stages=1024, stages=[1, 0, 1, 900], trainers_stage=1, coordinator="0", step=7,
        age_s=5e-324, num_samples=1 << 60,
    )  # fmt: skip
    found = summarize([seen("0", said(REPORT, server=false)), *map(seen, "abc")])
    assert (found.step, found.trainers_stage, found.stages) == (40, None, (("0", "a", "b", "c"), ("0",)))
    assert [peer.peer_id for peer in found.peers if peer.coordinator] == ["a"]
    assert found.peers[0].stages == (0, 1)
    assert math.isfinite(found.peers[0].samples_per_s)


def test_the_very_first_moment_has_no_rates() -> None:
    young = said(REPORT, age_s=0.0, server=said(SERVING, age_s=0.0))
    found = summarize([seen("a", young)])
    assert (found.steps_per_minute, found.peers[0].samples_per_s, found.peers[0].sent_gb_per_hour) == (0.0, 0.0, 0.0)


def test_a_stage_on_machines_of_several_kinds_has_a_line() -> None:
    def on(peer: str, arithmetic: str, stage: int = 0) -> Sighting:
        return seen(peer, said(REPORT, server=said(SERVING, stages=[stage], arithmetic=arithmetic)))

    fast, plain = "x86_64 AVX2, 1 threads, torch 2.13.0", "x86_64 DEFAULT, 1 threads, torch 2.13.0"
    other, hostile = on("x", f"cpu 99999999, {fast}", 1), on("y", "cpu\x1b[2J\nok", 1)
    mixed = [on("a", f"cpu 11111111, {fast}"), on("b", f"cpu 22222222, {plain}"), on("c", f"cpu 11111111, {fast}")]
    lines = table(summarize([*mixed, other, hostile])).splitlines()
    assert f"stage 0: 2 kinds of machines, stepped by portable arithmetic: 2 x (cpu {fast}), 1 x (cpu {plain})" in lines
    assert f"stage 1: 2 kinds of machines, stepped by portable arithmetic: 1 x (cpu {fast}), 1 x (cpu?[2J ok)" in lines
    same = table(summarize([on("a", f"cpu 11111111, {fast}"), on("b", f"cpu 33333333, {fast}"), on("c", "")]))
    assert f"1 x (cpu 11111111, {fast}), 1 x (cpu 33333333, {fast})" in same, "nothing else tells them apart"
    assert "kinds" not in table(summarize([mixed[0], mixed[2], on("d", "")])), "one kind, and one unknown"


def test_a_stage_that_shares_parameters_with_a_mixed_one_has_a_line() -> None:
    newest = StepReport(num_samples=4, num_batches=1, portable=[0])
    pure = [seen(name, said(REPORT, server=said(SERVING, arithmetic="cpu", newest=newest))) for name in "ab"]
    assert "stage 0: stepped by portable arithmetic, because a stage that shares its parameters" in table(
        summarize(pure)
    )
    assert "portable" not in table(summarize([seen("b", pure[1].report), seen("a")])), "the coordinator's word counts"


def test_table_of_a_run_with_a_silent_and_a_waiting_peer() -> None:
    waiting = said(REPORT, age_s=30.0, server=None)
    found = summarize(
        [
            seen("a"),
            seen("12D3KooWBTrNL8qKG3", said(REPORT, age_s=200_000.0, server=said(SERVING, stages=[0, 1]))),
            seen("w", waiting),
            seen("d", None, "hung up"),
        ]
    )
    assert table(found).splitlines() == [
        "run 'x': step 40, 30.0 steps/min, 2 stages, 4 peers, 1 of them silent",
        "",
        "stage  peer                at                    step   samples/s  queue  GB/h out  GB/h in  peak GB  up",
        "0      a lead coordinator  a:1                   40     20.0       3      2.00      0.50     1.23     1.0 h",
        "0      L8qKG3              12D3KooWBTrNL8qKG3:1  40     20.0       3      0.04      0.01     1.23     2 d",
        "1      L8qKG3              12D3KooWBTrNL8qKG3:1  40     20.0       3      0.04      0.01     1.23     2 d",
        "-      w                   w:1                   waits  0.0        0      240.00    60.00    -        30 s",
        "-      d                   d:1                   ?      ?          ?      ?         ?        ?        ?",
        "d at d:1 does not answer: hung up",
    ]


def test_the_trainers_own_stage_is_marked() -> None:
    trainer = said(REPORT, server=said(SERVING, num_stages=3, stages=[1, 2], trainers_stage=2))
    found = summarize(
        [seen("b", said(REPORT, server=said(SERVING, num_stages=3, trainers_stage=2))), seen("a", trainer)]
    )
    assert found.trainers_stage == 2
    assert [line.split()[:6] for line in table(found).splitlines()[2:]] == [
        ["stage", "peer", "at", "step", "samples/s", "queue"],
        ["0", "b", "b:1", "40", "20.0", "3"],
        ["1", "a", "lead", "coordinator", "a:1", "40"],
        ["2", "trainers'", "a", "lead", "coordinator", "a:1"],
    ]
    assert table(found).splitlines()[-1].split()[7] == "-"  # no microbatch goes there


def test_a_model_that_is_not_cut_is_no_stage() -> None:
    server = said(SERVING, num_stages=1, stages=[0], trainers_stage=0)
    found = summarize([seen("a", said(REPORT, server=server)), seen("b", said(REPORT, server=server))])
    assert found.is_whole
    headline, _, *lines = table(found).splitlines()
    assert headline == "run 'x': step 40, 30.0 steps/min, a model that is not cut, 2 peers"
    assert [line.split()[0] for line in lines] == ["stage", "model", "model"]
    assert all("  -  " in line for line in lines[1:]), "nothing is routed to them"


def test_what_is_missing_is_said() -> None:
    assert "no run is under way yet, 1 peer" in table(summarize([seen("w", said(REPORT, server=None))]))
    orphan = said(REPORT, server=said(SERVING, coordinator="gone"))
    found = summarize([seen("a", orphan)])
    assert found.step is None
    assert "no coordinator answers" in table(found)
    assert "stage 1: no answering peer holds it" in table(found)
    assert summarize([seen("a", None, "gone")]).run_id == ""


def test_the_leads_numbers_are_shown_and_those_of_another_peer_are_not() -> None:
    renamed, earlier = said(LOSS, name="\x1b[2J\u202eacc\n"), said(LOSS, name="val_loss", step=8, value=1 / 3)
    lead = said(REPORT, logged=[said(LOSS, name="train_loss", value=9.0), renamed, earlier, LOSS])
    false = said(REPORT, server=said(SERVING, lead="c"), logged=[said(LOSS, value=0.1)])
    found = summarize([seen("a", lead), seen("b"), seen("c", false)])
    numbers = [(number.name, number.value, number.step) for number in found.logged]
    assert numbers == [("train_loss", 2.5, 12), ("?[2J?acc ", 2.5, 12), ("val_loss", 1 / 3, 8)]
    assert table(found).splitlines()[-1] == "logged by step 12: train_loss 2.5, ?[2J?acc  2.5, val_loss 0.3333 (step 8)"
    assert summarize([seen("a", None, "gone"), seen("b")]).logged == ()


# ---------------------------------------------------------------------- asking


def test_roles_and_refusals_are_shown() -> None:
    found = summarize([seen("a", said(REPORT, role="keeper", refused=3)), seen("b", said(REPORT, role="server"))])
    assert [(peer.role, peer.refused) for peer in found.peers] == [("keeper", 3), ("server", 0)]
    text = table(found)
    assert "a keeper lead coordinator" in text
    assert "a refused 3 requests that their peers' certificates do not permit" in text
    assert "b server" in text
    assert "b refused" not in text


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


def test_a_running_swarm_is_seen_by_a_stranger() -> None:
    """An observer that asks any peer sees all peers, and their progress since."""
    pictures = []

    class Onlooker(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            assert strategy.network is not None
            transport = strategy.network.transport("stranger") if not pictures else strategy.network.find("stranger")
            sightings = strategy.peers[0].runtime.run(
                survey.ask_all(transport, PeerId("peer-2"), "peer-2", timeout=9.0)
            )
            pictures.append(summarize(sightings))

    strategy = InMemoryStrategy(num_stages=2, run_id="seen")
    trainer = L.Trainer(**{**QUIET, "devices": 3, "max_steps": 2}, strategy=strategy, callbacks=[Onlooker()])
    trainer.fit(DigitsMLP(), loader(digits()))
    first, second = pictures
    assert (first.run_id, first.step, second.step) == ("seen", 1, 2)
    assert {peer.peer_id: (peer.lead, peer.coordinator) for peer in second.peers} == {
        "peer-0": (True, True),
        "peer-1": (False, False),
        "peer-2": (False, False),
    }
    assert sorted(peer for peers in second.stages for peer in peers) == ["peer-0", "peer-1", "peer-2"]
    assert all(peers for peers in second.stages)
    assert all(peer.problem is None and peer.samples_per_s > 0 for peer in second.peers)
    assert all(peer.sent_gb_per_hour > 0 for peer in second.peers)


def test_trainers_report_which_stage_is_theirs() -> None:
    """They also report the rate of samples through their other stages."""
    reports = []

    class Onlooker(L.Callback):
        @override
        def on_train_batch_end(self, *_: Any) -> None:
            reports.extend(peer.server.report() for peer in strategy.peers if peer.server is not None)

    strategy = InMemoryStrategy(num_stages=2, pipeline="transformer.h")
    trainer = L.Trainer(**{**QUIET, "devices": 2, "max_steps": 1}, strategy=strategy, callbacks=[Onlooker()])
    trainer.fit(NanoGPT(), loader(sentences()))
    assert sorted(stage for report in reports for stage in report.stages) == [0, 1, 2]
    assert [report.trainers_stage for report in reports] == [2, 2]
    first, second = (report.num_samples for report in reports)
    assert first == second > 0


def test_peers_that_are_gone_or_frozen_are_shown_as_such(loop: VirtualLoop) -> None:
    network = MemoryNetwork()
    asking, asked, frozen = (network.transport(name) for name in ("asking", "asked", "frozen"))

    async def others() -> dict[PeerId, list[str]]:
        dead = network.transport("dead")
        places = {one.peer_id: list(await one.addresses()) for one in (asked, frozen, dead)}
        network.kill(dead.peer_id)
        return {**places, PeerId("nowhere"): []}

    for transport in (asked, frozen):
        survey.answer(transport, lambda: REPORT, others)
    network.freeze(frozen.peer_id)
    found = loop.run_until_complete(survey.ask_all(asking, asked.peer_id, "asked", timeout=7.0))
    assert loop.time() <= 15.0
    assert [one.peer_id for one in found] == ["asked", "dead", "frozen", "nowhere"]
    assert found[0].report == REPORT
    assert all(one.report is None and one.problem for one in found[1:])


def test_nobody_there_is_an_error(loop: VirtualLoop) -> None:
    with pytest.raises(PeerError):
        loop.run_until_complete(survey.ask_all(MemoryNetwork().transport(), PeerId("x"), "x", timeout=7.0))


LIES = {
    "nothing": b"",
    "negative": encode(said(REPORT, sent_bytes=-1)),
    "no number": encode(said(REPORT, age_s=float("nan"))),
    "long name": encode(said(REPORT, run_id="x" * 101)),
    "absurd": encode(said(REPORT, server=said(SERVING, num_stages=1 << 60))),
    "no such stage": encode(said(REPORT, server=said(SERVING, stages=[1 << 59]))),
    "many stages": encode(said(REPORT, server=said(SERVING, stages=[0] * 1025))),
    "many held": encode(said(REPORT, server=said(SERVING, held=[HELD] * 1025))),
    "no blocks": encode(said(REPORT, server=said(SERVING, held=[said(HELD, num_blocks=0)]))),
    "wide weights": encode(said(REPORT, server=said(SERVING, held=[said(HELD, weight_bytes=1 << 20)]))),
    "no rate": encode(said(REPORT, server=said(SERVING, held=[said(HELD, samples_per_s=0.0)]))),
    "endless work": encode(said(REPORT, server=said(SERVING, held=[said(HELD, costs=said(COSTS, flop=1e300))]))),
    "long output": encode(
        said(REPORT, server=said(SERVING, held=[said(HELD, costs=said(COSTS, output_bytes=1 << 60))]))
    ),
    "huge memory": encode(
        said(REPORT, server=said(SERVING, machine=MachineReport(processor="cpu", memory_bytes=1 << 60)))
    ),
    "an empty step": encode(said(REPORT, server=said(SERVING, newest=StepReport(num_samples=0, num_batches=1)))),
    "many links": encode(said(REPORT, links=[LinkReport(peer_id="x")] * 1025)),
    "a way back in time": encode(said(REPORT, links=[LinkReport(peer_id="x", round_trip_s=-1.0)])),
    "many numbers": encode(said(REPORT, logged=[LOSS] * (MAX_LOGGED + 1))),
    "no finite number": encode(said(REPORT, logged=[said(LOSS, value=float("nan"))])),
    "an endless number": encode(said(REPORT, logged=[said(LOSS, value=float("-inf"))])),
    "a number without a name": encode(said(REPORT, logged=[said(LOSS, name="")])),
    "a number with a long name": encode(said(REPORT, logged=[said(LOSS, name="x" * 101)])),
    "a number of the future": encode(said(REPORT, logged=[said(LOSS, age_s=-1.0)])),
    "a number before the first step": encode(said(REPORT, logged=[said(LOSS, step=-1)])),
    "an endless message": encode(
        said(REPORT, links=[LinkReport(peer_id="x", sent=CarriedReport(num_bytes=1 << 60, took_s=1.0))])
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_malformed_report_is_shown_as_a_problem(loop: VirtualLoop, lie: str) -> None:
    network = MemoryNetwork()
    asking, asked = network.transport(), network.transport()

    async def answer(caller: PeerId, body: bytes) -> bytes:
        return LIES[lie]

    async def others(caller: PeerId, body: bytes) -> bytes:
        return encode(OtherPeers(peers=[]))

    asked.handle_call(PEER_REPORT.name, answer)
    asked.handle_call(OTHERS.name, others)
    [found] = loop.run_until_complete(survey.ask_all(asking, asked.peer_id, "x", timeout=7.0))
    assert found.report is None
    assert "must hold one PeerReport" in str(found.problem)


def test_a_flood_of_others_is_refused(loop: VirtualLoop) -> None:
    network = MemoryNetwork()
    asking, asked = network.transport(), network.transport()

    async def others(caller: PeerId, body: bytes) -> bytes:
        return encode(OtherPeers(peers=[OtherPeer(peer_id="x", addresses=[])] * 1025))

    asked.handle_call(OTHERS.name, others)
    with pytest.raises(ProtocolError, match="must hold one OtherPeers"):
        loop.run_until_complete(survey.ask_all(asking, asked.peer_id, "x", timeout=7.0))


def test_a_peer_says_its_role_and_whom_it_refused(loop: VirtualLoop) -> None:
    network = InvitedNetwork(role_of=lambda peer: Role.OBSERVER if peer == "looks" else Role.SERVER)
    transport = network.transport("asked")
    directory, config = network.directory(transport), SwarmStrategy().config
    peer = Peer(InlineRuntime(loop), transport, directory, executor=InlineExecutor, config=config, rng=Random(0))
    stranger = MemoryNetwork.transport(network, "stranger")
    for _ in range(2):
        with pytest.raises(Uncertified):
            loop.run_until_complete(stranger.call(PeerId("asked"), PEER_REPORT.name, b"", timeout=5.0))
    found = loop.run_until_complete(survey.ask_all(network.transport("looks"), PeerId("asked"), "x", timeout=7.0))
    assert [(one.role, one.report and one.report.refused) for one in found] == [("server", 2)]
    peer.close()


# ---------------------------------------------------------------------- which run


@pytest.mark.parametrize(
    ("there", "fits"),
    [({"a": "mine"}, True), ({"a": "theirs", "b": "mine"}, True), ({"a": None}, True), ({"a": "theirs"}, False)],
    ids=["the run", "one of them", "silence", "another run"],
)
def test_a_server_is_for_the_run_of_the_peer_that_it_was_told_of(
    loop: VirtualLoop, there: dict[str, str | None], fits: bool
) -> None:
    network = MemoryNetwork()

    async def nobody() -> dict[PeerId, list[str]]:
        return {}

    ids = {name: name * 52 for name in there}
    for name, run_id in there.items():
        transport = network.transport(ids[name])
        if run_id is not None:
            report = said(REPORT, run_id=run_id)
            survey.answer(transport, lambda report=report: report, nobody)  # type: ignore[misc]
    peers = [f"192.0.2.1:5/{one}" for one in ids.values()]
    config = SwarmStrategy(run_id="mine", initial_peers=peers).config
    work = lead.check_run_id(network.transport("me"), config)
    if fits:
        loop.run_until_complete(work)
        return
    says = rf"`run_id` must be that of the run to join: 'mine' here, and 'theirs' at {peers[0]}\. Set `run_id='theirs'`"
    with pytest.raises(ConfigError, match=says):
        loop.run_until_complete(work)


def test_a_peer_that_refuses_to_say_its_run_is_believed(loop: VirtualLoop) -> None:
    network = MemoryNetwork()
    there = network.transport("a" * 52)

    async def refuse(caller: PeerId, body: bytes) -> bytes:
        raise Uncertified("Join with an invitation.")

    there.handle_call(PEER_REPORT.name, refuse)
    config = SwarmStrategy(initial_peers=f"192.0.2.1:5/{there.peer_id}").config
    me = network.transport("me")
    with pytest.raises(Uncertified, match="Join with an invitation"):
        loop.run_until_complete(lead.check_run_id(me, config))


def test_a_peer_that_refuses_is_no_obstacle_beside_one_that_does_not(
    loop: VirtualLoop, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()
    ids = [name * 52 for name in "ab"]
    refusing, answering = map(network.transport, ids)

    async def refuse(caller: PeerId, body: bytes) -> bytes:
        raise Untrusted("its certificate has expired")

    async def nobody() -> dict[PeerId, list[str]]:
        return {}

    refusing.handle_call(PEER_REPORT.name, refuse)
    survey.answer(answering, lambda: said(REPORT, run_id="mine"), nobody)
    config = SwarmStrategy(run_id="mine", initial_peers=[f"192.0.2.1:5/{one}" for one in ids]).config
    loop.run_until_complete(lead.check_run_id(network.transport("me"), config))
    assert "One of the `initial_peers` cannot be used: its certificate has expired" in caplog.text
