"""A client replaces a server of its text that answers, or reports, what no server should: no token changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm.core.errors import LeaseRevoked, ProtocolError, StageError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.inference import FailureKind
from lightning_swarm.server.inference.handlers import SessionHandlers
from tests.parity.test_served import PROMPTS, write
from tests.served import ServedSwarm, calling, make_model


def reporting(kind: FailureKind, at: int) -> Callable[..., Any]:
    async def report(own: SessionHandlers, held: Any, stage: Any, step: Any, *_: Any) -> None:
        await own._report_failure(held, step, kind, "false", stage_index=step.stage_index + at)

    return report


def refusing(error: Exception) -> Callable[..., Any]:
    async def refuse(own: SessionHandlers, *_: Any, **__: Any) -> Any:
        raise error

    return refuse


async def nothing(own: SessionHandlers, *_: Any) -> None:
    """Accept steps, and neither compute nor report them."""


GIVE = SessionHandlers._send_to_client


async def give_more(own: SessionHandlers, held: Any, kept: Any) -> None:
    """Send an output with a row more than the step has."""
    rows = tuple(torch.cat([one, one[:1]]) for one in kept.tensors)
    await GIVE(own, held, replace(kept, tensors=rows))


# Fault -> the method that the hostile server replaces, and its own.
FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "its steps were struck": ("_accept", refusing(LeaseRevoked("struck"))),
    "no step is right": ("_accept", refusing(StageError("no"))),
    "its replay was struck": ("_handle_replay", refusing(LeaseRevoked("struck"))),
    "no replay is right": ("_handle_replay", refusing(ProtocolError("no"))),
    "it refuses a step": ("_advance", reporting("refused", 0)),
    "the next server refuses": ("_advance", reporting("refused", 1)),
    "the next server is gone": ("_advance", reporting("unreachable", 1)),
    "nothing follows": ("_send_output", nothing),
    "a row too many": ("_send_to_client", give_more),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_answer_of_a_hostile_server_ends_a_text(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hostile server holds the first half of the stages, or the last one if it is to send the output."""
    name, own = FAULTS[fault]
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    hostile, num_faults = set[PeerId](), 0
    honest = getattr(SessionHandlers, name)

    async def act(handlers: SessionHandlers, *given: Any, **options: Any) -> Any:
        nonlocal num_faults
        if handlers._transport.peer_id not in hostile:
            return await honest(handlers, *given, **options)
        num_faults += 1
        return await own(handlers, *given, **options)

    monkeypatch.setattr(SessionHandlers, name, act)
    swarm = ServedSwarm(tmp_path, num_stages=2)
    try:
        swarm.serve("a")
        for other in "bcde":
            swarm.serve(other, join="a", share=0.5)
        swarm.leave("a")
        remote = swarm.connect(host="b")

        def turn() -> None:
            assert swarm.client is not None
            sessions = swarm.client._forwards._sessions
            assert sessions is not None
            (session,) = sessions._open.values()
            first, last = session.route
            hostile.add(last if name == "_send_to_client" else first)
            if name == "_handle_replay":
                swarm.network.kill(last)

        found = write(remote, "greedy", stopping_criteria=[calling(turn, at=PROMPTS.shape[1] + 3)])
        assert torch.equal(found, write(model, "greedy"))
        assert num_faults
        assert swarm.loop.time() < 70.0
    finally:
        swarm.close()
