"""Conclusions from audits: compared to the bit or within a tolerance, and from auditors that accuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_swarm.coordinator.audit.disputes import (
    Accusation,
    AuditResult,
    ClaimedWork,
    SameKind,
    WorkTolerance,
    compare,
    resolve_accusation,
)
from lightning_swarm.coordinator.audit.policy import StageProjection, Tolerance, WorkClaim
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Origin, Receipt
from lightning_swarm.protocol.messages.step import pack_order, unpack_order

RECEIPTS: list[Receipt] = [(0, 0, 0), (0, 1, 0), (4, 0, 0)]
CLAIMS = {receipt: WorkClaim(b"in", b"out", b"dout", b"din") for receipt in RECEIPTS}
ORIGINS = {0: Origin(1.0, PeerId("trainer")), 4: Origin(2.0, PeerId("trainer"))}
SAID = ClaimedWork(CLAIMS, ORIGINS, b"sum", b"touched")
TOLD = StageProjection((1.0, 2.0))
WITHIN = WorkTolerance(results=0.1, sum=Tolerance(0.1))
ONE_KIND, OTHER_AUDITOR, OTHER_JUDGE, OTHERS = (
    SameKind(auditor=auditor, referee=judge) for judge in (True, False) for auditor in (True, False)
)
TRUE = AuditResult(
    claims=CLAIMS,
    origins=ORIGINS,
    refused=frozenset(),
    unheard=frozenset(),
    sum_digest=b"sum",
    projection=TOLD,
    magnitude=1.0,
    precision="float32",
    touched=b"touched",
    distance=0.0,
)


def found(**changes: Any) -> AuditResult:
    return replace(TRUE, **changes)


def claimed(receipt: Receipt, **changes: bytes) -> dict[Receipt, WorkClaim]:
    return {**CLAIMS, receipt: CLAIMS[receipt]._replace(**changes)}


NEAR, FAR = StageProjection((1.0, 2.04)), StageProjection((1.0, 3.0))


# ------------------------------------------------------------------ claims


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, set()),
        ({"sum_digest": b"another"}, {"sum"}),
        ({"claims": claimed(RECEIPTS[1], output=b"another")}, {"output"}),
        ({"claims": claimed(RECEIPTS[1], input_gradient=b"another")}, {"input_gradient"}),
        ({"touched": b"more"}, {"list of parameters with gradients"}),
        ({"refused": frozenset(RECEIPTS[:1])}, {"refused"}),
    ],
)
def test_on_machines_of_one_kind_all_bits_count(changes: dict[str, Any], wrong: set[str]) -> None:
    assert compare(SAID, found(**changes), TOLD, tolerance=None).wrong == wrong


def test_between_kinds_sums_and_results_may_be_apart() -> None:
    assert compare(SAID, found(sum_digest=b"another", projection=NEAR), TOLD, tolerance=WITHIN).is_equal
    assert compare(SAID, found(projection=FAR), TOLD, tolerance=WITHIN).wrong == {"sum"}
    assert compare(SAID, found(distance=0.2), TOLD, tolerance=WITHIN).wrong == {"output"}


def test_what_was_computed_in_part_shows_nothing() -> None:
    part = {receipt: CLAIMS[receipt] for receipt in RECEIPTS[:2]}
    comparison = compare(SAID, found(claims=part, sum_digest=b"another"), TOLD, tolerance=None)
    assert not comparison.is_whole
    assert not comparison.wrong


@pytest.mark.parametrize("origin", [Origin(3.0, PeerId("trainer")), Origin(2.0, PeerId("another"))])
def test_a_finding_of_another_weight_or_trainer_shows_nothing(origin: Origin) -> None:
    its = found(origins={**ORIGINS, 4: origin}, sum_digest=b"another", projection=FAR)
    comparison = compare(SAID, its, TOLD, tolerance=None)
    assert comparison.is_misweighed
    assert not comparison.wrong
    assert not comparison.is_equal
    assert SAID.with_claimed_inputs(its) == RECEIPTS[:2]
    assert resolve_accusation(SAID, TOLD, its, TRUE, tolerance=WITHIN, same_kind=ONE_KIND) is Accusation.UNPROVEN


def test_an_order_names_each_microbatch_once() -> None:
    order = [RECEIPTS[2], RECEIPTS[0], RECEIPTS[1]]
    packed = pack_order(order)
    assert unpack_order(packed, RECEIPTS) == order
    for wrong in (packed[:-1], packed[:-4], packed + packed[:4], packed[:8] + packed[:4], b"\xff" * 12):
        with pytest.raises(ProtocolError, match="must name each of their indices once"):
            unpack_order(wrong, RECEIPTS)


# ------------------------------------------------------------------ accusations


@pytest.mark.parametrize("kinds", [ONE_KIND, OTHER_AUDITOR, OTHER_JUDGE, OTHERS])
@pytest.mark.parametrize(
    "changes",
    [
        {"claims": claimed(RECEIPTS[1], input=b"another"), "sum_digest": b"another"},
        {"claims": claimed(RECEIPTS[1], output_gradient=b"another")},
        {"claims": {}, "refused": frozenset(RECEIPTS)},
    ],
)
def test_an_auditor_that_says_it_was_given_something_else_may_be_right(
    kinds: SameKind, changes: dict[str, Any]
) -> None:
    shown = resolve_accusation(SAID, TOLD, found(**changes), TRUE, tolerance=WITHIN, same_kind=kinds)
    assert shown is Accusation.UNPROVEN


@pytest.mark.parametrize(
    ("kinds", "changes", "expected"),
    [
        # Machines of one kind have equal results for equal inputs, and equal sums of equal results.
        (ONE_KIND, {"claims": claimed(RECEIPTS[1], output=b"another")}, Accusation.FALSE),
        (ONE_KIND, {"projection": FAR, "sum_digest": b"another"}, Accusation.FALSE),
        (ONE_KIND, {"touched": b"more"}, Accusation.FALSE),
        (ONE_KIND, {"sum_digest": b"another"}, Accusation.REFUTED),
        # A machine of another kind may have sent other results, but sums are its own.
        (OTHER_AUDITOR, {"claims": claimed(RECEIPTS[1], output=b"another")}, Accusation.UNPROVEN),
        (OTHER_AUDITOR, {"projection": FAR}, Accusation.REFUTED),
        (OTHER_AUDITOR, {"distance": 0.5}, Accusation.REFUTED),
        (OTHERS, {"projection": FAR}, Accusation.REFUTED),
        (OTHERS, {"distance": 0.5}, Accusation.REFUTED),
        # A judge of another kind cannot compare bits.
        (OTHER_JUDGE, {"sum_digest": b"another"}, Accusation.UNPROVEN),
        (OTHER_JUDGE, {"claims": claimed(RECEIPTS[1], output=b"another")}, Accusation.UNPROVEN),
        (OTHER_JUDGE, {"projection": FAR}, Accusation.REFUTED),
    ],
)
def test_accusations(kinds: SameKind, changes: dict[str, Any], expected: Accusation) -> None:
    assert resolve_accusation(SAID, TOLD, found(**changes), TRUE, tolerance=WITHIN, same_kind=kinds) is expected


def test_the_accused_may_be_far_from_one_machine_alone() -> None:
    """It is within the tolerance of the judge and beyond that of the honest auditor."""
    its = found(distance=0.11)
    for distance, expected in ((0.04, Accusation.REFUTED), (0.09, Accusation.UNPROVEN)):
        true = found(distance=distance)
        assert resolve_accusation(SAID, TOLD, its, true, tolerance=WITHIN, same_kind=OTHERS) is expected
