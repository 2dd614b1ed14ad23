"""Servers that contradict each other: rules for exclusion if the false one cannot be identified."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swarm.coordinator.audit.audit_orders import AuditResults
from lightning_swarm.coordinator.audit.examined_step import ExaminedStep
from lightning_swarm.coordinator.audit.policy import AuditMemory, Silences, Unit
from lightning_swarm.coordinator.audit.step_audits import StepAudits
from lightning_swarm.coordinator.step.oversight import Verdict
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.calls import Receipt

OWN, A, B, C, Z = map(PeerId, ("own", "a", "b", "c", "z"))
UNITS = [Unit(0, A), Unit(0, B), Unit(0, C), Unit(1, OWN), Unit(1, Z)]


def receipt(number: int) -> Receipt:
    return number, 0, 0


class Step:
    """Closings of steps in which servers of stage 0 contradict servers of stage 1."""

    def __init__(self) -> None:
        self.audits: Any = object.__new__(StepAudits)
        memory = AuditMemory()
        self.audits._own, self.audits._events, self.audits._step = OWN, EventLog(), SimpleNamespace(step=0)
        self.audits._num_disputes, self.audits._contested = memory.disputes, memory.contested
        self.audits._standing = memory.standing

    def close(self, *pairs: tuple[PeerId, PeerId], failed: dict[int, set[Unit]] | None = None) -> Verdict:
        verdict = Verdict()
        examined = ExaminedStep(dict.fromkeys(UNITS), {unit: {} for unit in UNITS}, {}, 0)  # type: ignore[arg-type]
        units = {receipt(number): {Unit(0, one), Unit(1, other)} for number, (one, other) in enumerate(pairs)}
        replaced = {receipt(number): units for number, units in (failed or {}).items()}
        self.audits._strike_disagreements(examined, units, replaced, verdict)
        return verdict


def test_who_contradicts_all_servers_of_a_stage_leaves_it_all_but_one() -> None:
    step = Step()
    assert not step.close((A, Z), (B, Z), (C, Z)).failed
    verdict = step.close((A, Z), (B, Z), (C, Z))
    assert verdict.failed.keys() == {A, Z}
    assert verdict.tainted == {0, 1, 2}


def test_a_stage_keeps_its_last_server() -> None:
    step = Step()
    for _ in range(2):
        verdict = step.close((A, OWN), (B, OWN), (C, OWN))
    assert len(verdict.failed) == 2


def test_who_failed_between_two_servers_is_to_blame() -> None:
    step = Step()
    for number in range(3):
        verdict = step.close((A, Z), failed={0: {Unit(0, B)}})
        assert verdict.avoided == {B}
        assert verdict.failed.keys() == ({B} if number == 2 else set())
    assert not step.audits._num_disputes


class Audits:
    """Audits without findings, but with answers."""

    def __init__(self, *silent: PeerId) -> None:
        self.failed = {peer: ProtocolError("it is gone") for peer in silent}

    async def audit(self, assignments: Any, round_: int) -> AuditResults:
        return AuditResults(0, 0, failed=dict(self.failed))


@pytest.mark.parametrize("silent", [True, False])
def test_who_is_left_out_and_answers_is_not_silent(silent: bool) -> None:
    audits = Step().audits
    audits._orders, audits._silent, audits._silences = Audits(*[A] * silent), set(), Silences()
    audits.sum_sketches, audits.audited = defaultdict(list), set()
    verdict = Verdict(failed={A: ProtocolError("its neighbour may have had it say two things")})
    claims: Any = {unit: {receipt(0): None} for unit in UNITS}
    examined = ExaminedStep(dict.fromkeys(UNITS), claims, {}, 0)  # type: ignore[arg-type]
    asyncio.run(audits._audit(examined, [Unit(0, A)], verdict))
    assert list(audits._silences.noted) == [A] * silent
    assert list(audits._standing.watched) == [A] * silent, "all of its work is audited for a while"
