"""`FaultPlan`: the time of faults, and their effect on the in-memory network."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lightning_swarm import Trust
from lightning_swarm.coordinator.audit import step_audits
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ConfigError, Damaged, DeadlineExceeded, SwarmError, Unreachable
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.memory import MemoryNetwork, MemoryTransport
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.calls import CancelRequest, FetchRequest, Ticket, WaitReply, WaitRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import CANCEL, FETCH, FORWARD, WAIT
from lightning_swarm.testing import FaultPlan, FaultySwarmStrategy, Phase
from lightning_swarm.testing.faults import MessagePoint, read_message
from lightning_swarm.testing.sabotage import sabotage, strike_in_process
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import Swarm, key, rows
from tests.unit.testing.linear import NUM_STEPS, Net, run

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
BODY = encode(CancelRequest(key=key(4, 3, step=7), stage_index=2, direction="forward"))


class Wires:
    """Three peers that echo requests, and count them."""

    def __init__(self, loop: VirtualLoop, plan: FaultPlan) -> None:
        self.loop = loop
        self.network = MemoryNetwork(latency_s=0.1)
        self.peers = {name: self.network.transport(name) for name in (A, B, C)}
        self.asked: list[PeerId] = []
        self.killed: list[PeerId] = []
        for transport in self.peers.values():
            self._serve(transport)
        sabotage(self.network, plan, killed=self.killed.append)

    def _serve(self, transport: MemoryTransport) -> None:
        async def on_call(_: PeerId, body: bytes) -> bytes:
            self.asked.append(transport.peer_id)
            return body

        async def on_stream(_: PeerId, message: Message) -> Message:
            self.asked.append(transport.peer_id)
            return message

        transport.handle_call(CANCEL.name, on_call)
        transport.handle_stream(FORWARD.name, on_stream)

    async def call(self, caller: PeerId, peer: PeerId) -> float:
        """Return the seconds of a call."""
        begin_s = self.loop.time()
        assert await self.peers[caller].call(peer, CANCEL.name, BODY, timeout=60.0) == BODY
        return self.loop.time() - begin_s

    async def stream(self, caller: PeerId, peer: PeerId) -> None:
        await self.peers[caller].stream(peer, FORWARD.name, Message(BODY, (rows(0),)), timeout=60.0)

    async def settle(self) -> None:
        await self.peers[C].call(A, CANCEL.name, BODY, timeout=60.0)


def test_what_a_message_says_is_read_off_it() -> None:
    message = read_message(A, B, CANCEL.name, BODY, side="request")
    assert message == MessagePoint(
        phases=(Phase.CANCEL,), caller=A, peer=B, doers=frozenset((A, B)), step=7, stage=2, microbatch=3
    )
    ticket = Ticket(peer_id=B, name=key(4, 3, step=7).name(2, "backward", A), key=None)
    wait = encode(WaitRequest(name=ticket.name, hold_s=1.0))
    there, taken, later = WaitReply(ready=True), WaitReply(ready=True, taken=b""), WaitReply(ready=False)
    for reply, side, phases in (
        (there, "answer", (Phase.BACKWARD_DONE,)),
        (taken, "answer", (Phase.BACKWARD_DONE, Phase.SEND_GRADIENT)),
        (there, "arrived", (Phase.RECEIPT_SEEN,)),
        (taken, "arrived", (Phase.RECEIPT_SEEN,)),
        (later, "answer", ()),
        (later, "arrived", ()),
    ):
        message = read_message(A, B, WAIT.name, wait, side=side, answer=encode(reply))
        assert (message.phases, message.step, message.stage, message.microbatch) == (phases, 7, 2, 3)
    name = "g0.s5.r0.0/average/1/reduced2"
    for method, request, reply in (
        (FETCH.name, FetchRequest(name=name), None),
        (WAIT.name, WaitRequest(name=name, hold_s=1.0, take_bytes=9), taken),
    ):
        answer = b"" if reply is None else encode(reply)
        message = read_message(A, B, method, encode(request), side="answer", answer=answer)
        assert (message.phases, message.doers, message.step, message.stage) == ((Phase.AVERAGE_REDUCE,), {B}, 5, 1)
    assert read_message(A, B, "ping", b"\xc1", side="request").phases == ()


def test_a_fault_strikes_at_its_moment_and_no_other() -> None:
    plan = FaultPlan().kill("b", at=Phase.CANCEL, step=7, microbatch=3, nth=2)
    wrong = FaultPlan().kill("c", at=Phase.CANCEL).kill("b", at=Phase.CANCEL, step=6).kill("b", at=Phase.APPLY)
    wrong.kill("b", at=Phase.CANCEL, of="c").kill("b", at=Phase.CANCEL, stage=1)
    message = read_message(A, B, CANCEL.name, BODY, side="request")
    assert [len(plan.strike(message, ("kill",))) for _ in range(3)] == [0, 1, 0]
    assert plan.fired == 1
    assert not plan.strike(message, ("freeze",))
    plan.check()
    for _ in range(3):
        assert not wrong.strike(message, ("kill",))
    with pytest.raises(AssertionError, match="kill b at CANCEL, step 6"):
        wrong.check()
    other = FaultPlan().freeze("c", for_s=1.0, at=Phase.CANCEL, of="a")
    assert [fault.peer for fault in other.strike(message, ("freeze",))] == [C]


def test_what_cannot_happen_is_refused() -> None:
    with pytest.raises(ConfigError, match="only requests can be duplicated"):
        FaultPlan().duplicate("a", at=Phase.APPLY_DONE)
    with pytest.raises(ConfigError, match="both sides"):
        FaultPlan().partition("a", for_s=1.0, at=Phase.APPLY)
    with pytest.raises(ConfigError, match="count from 1"):
        FaultPlan().kill("a", at=Phase.APPLY, nth=0)


@pytest.mark.parametrize("phase", [Phase.CANCEL, Phase.CANCEL_DONE])
def test_a_killed_peer_answers_nobody(loop: VirtualLoop, phase: Phase) -> None:
    wires = Wires(loop, plan := FaultPlan().kill("b", at=phase))
    with pytest.raises(Unreachable):
        loop.run_until_complete(wires.call(A, B))
    assert wires.asked == ([B] if phase is Phase.CANCEL_DONE else [])
    assert wires.killed == [B]
    assert plan.fired == 1
    with pytest.raises(Unreachable):
        loop.run_until_complete(wires.call(B, C))


def test_who_asks_can_be_killed_too(loop: VirtualLoop) -> None:
    wires = Wires(loop, FaultPlan().kill("a", at=Phase.CANCEL))
    with pytest.raises(Unreachable):
        loop.run_until_complete(wires.call(A, B))
    assert wires.killed == [A]


def test_a_peer_is_killed_as_it_asks_itself(loop: VirtualLoop) -> None:
    wires = Wires(loop, FaultPlan().kill("b", at=Phase.CANCEL))
    with pytest.raises(Unreachable):
        loop.run_until_complete(wires.call(B, B))
    assert wires.asked == []


def test_messages_are_held_back(loop: VirtualLoop) -> None:
    plan = FaultPlan().delay("b", by_s=2.0, at=Phase.CANCEL).delay("c", by_s=1.0, times=None)
    wires = Wires(loop, plan)
    assert loop.run_until_complete(wires.call(A, B)) == pytest.approx(2.2)
    assert loop.run_until_complete(wires.call(A, B)) == pytest.approx(0.2)
    assert loop.run_until_complete(wires.call(A, C)) == pytest.approx(2.2)
    assert loop.run_until_complete(wires.call(C, A)) == pytest.approx(2.2)
    assert loop.run_until_complete(wires.call(A, A)) == 0.0
    assert plan.fired == 5


@pytest.mark.parametrize("phase", [Phase.CANCEL, Phase.CANCEL_DONE])
def test_lost_messages_are_never_answered(loop: VirtualLoop, phase: Phase) -> None:
    wires = Wires(loop, FaultPlan().drop("b", at=phase, times=None))
    with pytest.raises(DeadlineExceeded):
        loop.run_until_complete(wires.call(A, B))
    assert bool(wires.asked) == (phase is Phase.CANCEL_DONE)


@pytest.mark.parametrize("phase", [Phase.CANCEL, Phase.CANCEL_DONE])
def test_a_repeat_makes_up_for_a_lost_message(loop: VirtualLoop, phase: Phase) -> None:
    wires = Wires(loop, FaultPlan().drop("b", at=phase))
    assert loop.run_until_complete(wires.call(A, B)) < 5.0
    assert len(wires.asked) == 1 + (phase is Phase.CANCEL_DONE)


def test_a_request_comes_twice(loop: VirtualLoop) -> None:
    wires = Wires(loop, FaultPlan().duplicate("b", at=Phase.CANCEL, again_after_s=0.5))
    loop.run_until_complete(wires.call(A, B))
    assert wires.asked == [B]
    for _ in range(4):
        loop.run_until_complete(wires.call(A, C))
    assert wires.asked.count(B) == 2


@pytest.mark.parametrize("phase", [Phase.CANCEL, Phase.CANCEL_DONE])
def test_a_damaged_call_is_found_out(loop: VirtualLoop, phase: Phase) -> None:
    wires = Wires(loop, plan := FaultPlan().corrupt("b", at=phase))
    with pytest.raises(Damaged):
        loop.run_until_complete(wires.call(A, B))
    assert plan.fired == 1
    loop.run_until_complete(wires.call(A, B))


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.FORWARD_ACCEPTED])
def test_a_damaged_stream_is_found_out(loop: VirtualLoop, phase: Phase) -> None:
    wires = Wires(loop, plan := FaultPlan().corrupt("b", at=phase))
    with pytest.raises(Damaged):
        loop.run_until_complete(wires.stream(A, B))
    assert wires.asked == ([B] if phase is Phase.FORWARD_ACCEPTED else [])
    assert plan.fired == 1
    loop.run_until_complete(wires.stream(A, B))


def test_a_frozen_peer_goes_on_later(loop: VirtualLoop) -> None:
    wires = Wires(loop, FaultPlan().freeze("b", for_s=5.0, at=Phase.CANCEL))
    assert loop.run_until_complete(wires.call(A, B)) == pytest.approx(5.1, abs=0.2)


def test_a_partition_parts_groups_and_ends(loop: VirtualLoop) -> None:
    wires = Wires(loop, FaultPlan().partition("a", "b", for_s=5.0, at=Phase.CANCEL, of="c"))
    loop.run_until_complete(wires.call(A, C))
    assert loop.run_until_complete(wires.call(C, B)) == pytest.approx(0.2)
    assert loop.run_until_complete(wires.call(A, B)) == pytest.approx(5.0, abs=0.5)
    assert loop.run_until_complete(wires.call(A, B)) == pytest.approx(0.2)


# ---------------------------------------------------------------------- in real processes


def test_a_process_strikes_itself(loop: VirtualLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wires = Wires(loop, FaultPlan())
    signals, woken = [], []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: woken.append(command[-1]))
    plan = FaultPlan().kill("peer-1", at=Phase.CANCEL_DONE).freeze("peer-1", for_s=2.5, at=Phase.CANCEL)
    plan.kill("peer-2", at=Phase.CANCEL).delay("peer-1", by_s=2.0, at=Phase.CANCEL)
    strike_in_process(wires.peers[B], plan, "peer-1", tmp_path / "fired")
    assert loop.run_until_complete(wires.call(A, B)) == pytest.approx(2.2)
    loop.run_until_complete(wires.call(A, B))
    assert signals == [(os.getpid(), signal.SIGSTOP), (os.getpid(), signal.SIGKILL)]
    assert woken == [f"sleep 2.5; kill -CONT {os.getpid()}"]
    assert (tmp_path / "fired").read_text().splitlines() == [
        "freeze peer-1 at CANCEL",
        "delay peer-1 at CANCEL",
        "kill peer-1 at CANCEL_DONE",
    ]


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan().kill(None, at=Phase.CANCEL),
        FaultPlan().kill("peer-1", at=Phase.CANCEL, of="peer-2"),
        FaultPlan().corrupt("peer-1", at=Phase.CANCEL),
        FaultPlan().partition("peer-1", "peer-2", for_s=1.0, at=Phase.CANCEL),
    ],
    ids=lambda plan: str(plan.faults[0]),
)
def test_a_process_cannot_strike_others(loop: VirtualLoop, tmp_path: Path, plan: FaultPlan) -> None:
    with pytest.raises(ConfigError, match="must name the peer that it strikes"):
        strike_in_process(MemoryNetwork().transport(), plan, "peer-1", tmp_path / "fired")


def test_a_process_changes_its_peer_once(tmp_path: Path) -> None:
    """A run that rolls back starts with the same peer."""
    changed: list[tuple[Peer, str]] = []
    strategy = FaultySwarmStrategy(
        faults=FaultPlan(),
        fired=tmp_path / "fired",
        name="peer-1",
        modify_peer=lambda *peer_and_name: changed.append(peer_and_name),
        num_stages=1,
    )
    strategy.peer = peer = cast("Peer", SimpleNamespace(transport=MemoryNetwork().transport()))
    strategy._strike()
    strategy._strike()
    assert changed == [(peer, "peer-1")]


# ---------------------------------------------------------------------- in a swarm

OF_AUDITS = ("SKETCH", "AUDIT", "KEPT_WORK", "FINDINGS")
OF_OTHERS = (
    "CANCEL",
    "REPLAY",
    "PREPARE",
    "DECIDE",
    "JOIN",
    "DONATE",
    "PIECE",
    "FOLLOW",
    "LISTEN",
    "LEAVE",
    "AVERAGE_TIED",
    *OF_AUDITS,
)
"""These phases need a fault, a second voter, a joiner, a tied parameter or audits."""

PHASES_OF_AUDITS = [phase for phase in Phase if phase.name.startswith(OF_AUDITS)]

PHASES_OF_A_STEP = [phase for phase in Phase if not phase.name.startswith(OF_OTHERS)]


@pytest.mark.parametrize("phase", PHASES_OF_A_STEP, ids=lambda phase: phase.name)
def test_every_phase_of_a_step_comes_by(make_swarm: MakeSwarm, phase: Phase) -> None:
    plan = FaultPlan().delay(None, by_s=0.5, at=phase)
    swarm: Swarm = make_swarm("a b", "c d", target_batch_size=4)
    sabotage(swarm.network, plan)
    for seed in range(2):
        swarm.run(swarm.step(rows(2 * seed), rows(2 * seed + 1)))
    assert plan.fired == 1
    swarm.weights()


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("phase", PHASES_OF_AUDITS, ids=lambda phase: phase.name)
def test_every_phase_of_an_audit_comes_by(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_audits, "lots", random.Random(0))  # a seed that draws peer-1
    plan = FaultPlan().kill("peer-1", at=phase)
    net = Net(2)
    run(net, num_peers=6, trust=Trust("audited", audit_share=1.0), faults=plan)
    assert plan.fired == 1
    torch.testing.assert_close(net.weights(), net.clean(NUM_STEPS))


def test_a_killed_server_is_noticed(make_swarm: MakeSwarm) -> None:
    plan = FaultPlan().kill("d", at=Phase.BACKWARD_DONE)
    swarm: Swarm = make_swarm("a b", "c d", target_batch_size=4)
    sabotage(swarm.network, plan)
    with pytest.raises(SwarmError, match="d is gone"):
        swarm.run(swarm.step(rows(0), rows(1)))
    plan.check()
