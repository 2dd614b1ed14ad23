"""With each codec each sample counts once and replicas have the same bytes, in spite of deaths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from lightning_swarm.protocol import compression as wire_compression
from lightning_swarm.protocol.compression import CODECS
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.server.gradient_buffer import GradientSum
from lightning_swarm.testing import FaultPlan, Phase
from tests.faults.harness import FaultySwarm
from tests.faults.plans import STAGES, STEP, TRAINERS, VOTERS

WAYS = [*CODECS, "powersgd"]
PLANS: dict[str, Callable[[], FaultPlan]] = {
    "nothing": FaultPlan,
    "a server dies in a forward": lambda: FaultPlan().kill("b", at=Phase.FORWARD, step=STEP),
    "a server dies with what it added": lambda: FaultPlan().kill("d", at=Phase.CLOSE, of="d", step=STEP),
    "the coordinator dies as it averages": lambda: FaultPlan().kill("a", at=Phase.AVERAGE, of="a", step=STEP),
    "a server freezes as it averages": lambda: FaultPlan().freeze(
        "e", for_s=60.0, at=Phase.AVERAGE_SEND, of="e", step=STEP
    ),
    "a trainer dies": lambda: FaultPlan().kill("other", at=Phase.BACKWARD, step=STEP),
    "an output is lost": lambda: FaultPlan().drop("b", at=Phase.SEND_OUTPUT, step=STEP),
}

HALVES: dict[str, Callable[[], FaultPlan]] = {
    "a server dies with what it reduced": lambda: FaultPlan().kill("d", at=Phase.AVERAGE_REDUCE, of="d", step=STEP),
    "a server freezes with what it reduced": lambda: FaultPlan().freeze(
        "e", for_s=60.0, at=Phase.AVERAGE_REDUCE, of="e", step=STEP
    ),
}
"""Faults between the halves of a PowerSGD round."""


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size from which tensors are encoded, because these models' tensors are small."""
    monkeypatch.setattr(wire_compression, "MIN_ELEMENTS", 1)


def audited(compression: Compression, plan: FaultPlan, **others: str) -> None:
    swarm = FaultySwarm(*STAGES, plan=plan, trainers=TRAINERS, voters=VOTERS, compression=compression, **others)  # type: ignore[arg-type]
    try:
        swarm.train()
        swarm.audit()
    finally:
        swarm.close()


def all_by(codec: str, *, feedback: bool = False) -> Compression:
    """Compress all tensors with a codec, or averaging with PowerSGD."""
    hidden = "none" if codec == "powersgd" else codec
    return Compression(activations=hidden, gradients=hidden, averaging=codec, rank=1, error_feedback=feedback)  # type: ignore[arg-type]


@pytest.mark.first_cells(3)
@pytest.mark.each_value
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("codec", ["none", *WAYS])
def test_all_that_counts_counts_once(codec: str, plan: Callable[[], FaultPlan]) -> None:
    audited(all_by(codec), plan())


@pytest.mark.first_cells(4)
@pytest.mark.parametrize("plan", [*PLANS.values(), *HALVES.values()], ids=[*PLANS, *HALVES])
@pytest.mark.parametrize("codec", ["4bit", "powersgd"])
def test_what_is_carried_counts_once(codec: str, plan: Callable[[], FaultPlan]) -> None:
    """Error feedback is applied once per record, also if a round is repeated. A dead server's feedback is lost."""
    audited(all_by(codec, feedback=True), plan())


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("codec", WAYS)
def test_one_that_is_added_twice_is_found(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[GradientSum] = []
    add = GradientSum.add

    def adding(sum_: GradientSum, gradients: list[Tensor | None], weight: float) -> None:
        for _ in range(1 if added else 2):
            add(sum_, gradients, weight)
        added.append(sum_)

    monkeypatch.setattr(GradientSum, "add", adding)
    with pytest.raises(AssertionError):
        audited(all_by(codec), FaultPlan())


@pytest.mark.first_cells(3)
@pytest.mark.parametrize("codec", WAYS)
def test_who_joins_and_who_leaves_has_the_same_bytes(codec: str) -> None:
    audited(all_by(codec), FaultPlan(), joiners="j", leavers="e")
