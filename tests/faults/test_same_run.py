"""A plan gives the same run every time, so that a failure can be reproduced."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_swarm.testing import FaultPlan, Phase
from lightning_swarm.testing.faults import MessagePoint
from tests.faults.harness import FaultySwarm
from tests.faults.plans import STAGES, TRAINERS, VOTERS


def messages() -> str:
    """Return a digest of all messages, with their times and order, of a run with many faults."""
    seen: list[tuple[object, ...]] = []

    def look(one: MessagePoint) -> None:
        now_s = asyncio.get_running_loop().time()
        seen.append((now_s, one.phases, one.caller, one.peer, one.step, one.stage, one.microbatch))

    plan = FaultPlan().kill("a", at=Phase.CLOSE, step=1).freeze("e", for_s=40.0, at=Phase.BACKWARD, nth=2)
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, look=look)
    try:
        swarm.train()
        assert swarm.count("takeover")
    finally:
        swarm.close()
    return hashlib.sha256(repr(seen).encode()).hexdigest()


@pytest.mark.thorough
def test_a_plan_is_the_same_run_in_every_process() -> None:
    """Names hash differently in each process, and objects have other addresses."""
    code = "from tests.faults.test_same_run import messages; print(messages())"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    found = [child.communicate(timeout=300.0)[0] for child in children]
    assert all(found)
    assert found[0] == found[1]
