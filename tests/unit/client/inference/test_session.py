"""A session with several steps under way: no false order of its outputs hides a step that was lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_swarm.client.inference.session import InferenceSession, SessionInput, SessionWeights
from lightning_swarm.core.clock import VirtualLoop, now_s
from lightning_swarm.core.errors import SessionLost, StageLost
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.inference import SessionFailed, SessionOutput, SessionStep

A, B = map(PeerId, "ab")
HIDDEN = torch.zeros(1, 1, 4)
MODE = ComputeMode(training=False, grad=False, default_dtype="float32")


class Servers:
    """The servers of a route, which note the steps that they get, and answer as a test wants."""

    def __init__(self) -> None:
        routes: Any = SimpleNamespace(
            timeout=60.0,
            transport=SimpleNamespace(peer_id=PeerId("me")),
            begin=lambda *_: [A, B],
            end=lambda _: None,
            replace=lambda stage, route, rows: route[stage],
            servers=lambda stage: [(A, B)[stage]],
            is_ejected=lambda *_: False,
        )
        weights = SessionWeights(generation=0, version=0, number=0)
        self.steps: list[int] = []
        self.lost: set[int] = set()  # steps that the first server refuses
        self.is_full, self.reports_busy = False, False  # step 2 finds no room; the server reports it
        self.session = InferenceSession(routes, self, None, weights)  # type: ignore[arg-type]

    async def send(self, peer: PeerId, step: SessionStep, tensors: Any, *, alone: bool = False) -> None:
        self.steps.append(step.number)
        if step.number == 2 and self.is_full:
            if self.reports_busy:
                failed = SessionFailed(self.session.id, 2, step.attempt, 0, kind="busy", reason="no room")
                self.session.accept_failure(A, failed)
            raise SessionLost("this server has dropped the session")
        if step.number in self.lost:
            raise SessionLost("no such step")
        if alone:
            self.give(step.number)

    def give(self, number: int) -> None:
        structure, tensors = serialization.flatten(HIDDEN)
        said = SessionOutput(
            session=self.session.id, number=number, length=None, structure=structure, num_tensors=len(tensors)
        )
        self.session.accept_output(B, said, tensors)

    def begin(self) -> int:
        return self.session.begin(SessionInput(hidden=HIDDEN, extras={}, operations=[], modes=[MODE] * 2))


@pytest.mark.parametrize("reports", [True, False])
def test_an_output_before_its_turn_hides_no_step_that_was_lost(reports: bool) -> None:
    """The first server reports the loss, or refuses the step."""

    async def go() -> None:
        servers = Servers()
        session = servers.session
        await session.result(servers.begin())
        servers.lost = set() if reports else {2}
        second, third = servers.begin(), servers.begin()
        servers.give(third)
        await asyncio.sleep(0)
        assert servers.steps == [1, 2, 3]
        if reports:
            session.accept_failure(A, SessionFailed(session.id, second, 0, 0, kind="lost", reason=""))
        servers.lost = set()
        await session.result(second)
        assert servers.steps == [1, 2, 3, 1, 2, 3]
        await session.result(third)

    asyncio.run(go())


def test_a_session_that_is_closed_ends_the_step_that_is_waited_for() -> None:
    async def go() -> None:
        servers = Servers()
        session = servers.session
        await session.result(servers.begin())
        waiting = asyncio.ensure_future(session.result(servers.begin()))
        await asyncio.sleep(0)
        session._route = []  # nobody is told
        await session.close()
        with pytest.raises(SessionLost, match="was closed"):
            await waiting

    asyncio.run(go())


@pytest.mark.parametrize("reports_busy", [True, False])
@pytest.mark.parametrize("has_room_at_s", [30.0, None])
def test_a_server_without_room_gets_the_text_again_only_after_pauses(
    reports_busy: bool, has_room_at_s: float | None
) -> None:
    async def go() -> None:
        servers = Servers()
        session = servers.session
        await session.result(servers.begin())
        servers.is_full, servers.reports_busy = True, reports_busy
        if has_room_at_s is not None:
            asyncio.get_running_loop().call_at(has_room_at_s, setattr, servers, "is_full", False)
        begin_s, number = now_s(), servers.begin()
        if has_room_at_s is None:
            with pytest.raises(StageLost, match="no output within 60 s"):
                await session.result(number)
        else:
            await session.result(number)
        took_s = now_s() - begin_s
        assert 10 < took_s < 70
        assert 10 < len(servers.steps) < 4 * took_s + 20, "two steps each 0.5 s"

    loop = VirtualLoop()
    try:
        loop.run_until_complete(go())
    finally:
        loop.close()
