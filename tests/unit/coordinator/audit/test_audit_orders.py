"""Requested findings of auditors are read, other findings are not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from lightning_swarm.coordinator.audit.audit_orders import AuditOrders
from lightning_swarm.coordinator.audit.policy import Unit
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Rpc
from lightning_swarm.protocol.messages.audits import (
    AuditFinding,
    FindingsReply,
    FindingsRequest,
    SketchReply,
    SketchRequest,
    StageSketch,
)
from lightning_swarm.protocol.messages.calls import Receipt, Receipts
from lightning_swarm.protocol.messages.parts import SKETCH_LENGTH
from lightning_swarm.protocol.messages.step import CLAIM_BYTES, DIGEST_BYTES
from lightning_swarm.protocol.rpc import FINDINGS, SKETCH

A, B = PeerId("a"), PeerId("b")
MANY: Receipts = [(first, 0, b"\xff" * 512) for first in range(100)]


def finding(audited: PeerId, stage_index: int, refused: Receipts) -> AuditFinding:
    return AuditFinding(
        audited=audited,
        stage_index=stage_index,
        receipts=[(0, 0, b"\1")],
        origins=[(1.0, A, 1)],
        claims=bytes(CLAIM_BYTES),
        refused=refused,
        unheard=[],
        sum_digest=bytes(DIGEST_BYTES),
        values=[0.0] * SKETCH_LENGTH,
        magnitude=0.0,
        precision="float32",
        touched=b"",
    )


class Servers:
    """Answer with more findings than requested."""

    async def ask_all(
        self, method: Rpc, peers: Iterable[PeerId], request: FindingsRequest | SketchRequest
    ) -> tuple[dict[PeerId, FindingsReply | SketchReply], dict[PeerId, SwarmError]]:
        told = [finding(A, 0, []), *(finding(A, stage, MANY) for stage in range(1, 5)), finding(B, 0, MANY)]
        stages = [StageSketch(stage_index=index, values=[0.0] * SKETCH_LENGTH) for index in range(3)]
        replies = {FINDINGS: FindingsReply(findings=told), SKETCH: SketchReply(stages=stages)}
        return dict.fromkeys(peers, replies[method]), {}


def run() -> AuditOrders:
    servers, step = Servers(), SimpleNamespace(step=0)
    return AuditOrders(servers, step, 0)  # type: ignore[arg-type]


def test_only_findings_that_were_asked_for_are_read(monkeypatch: Any) -> None:
    """A few bytes can name many microbatches, whose unpacking would occupy the coordinator."""
    read = list[Receipts]()

    def unpack(packed: Receipts) -> set[Receipt]:
        read.append(packed)
        return {(first, 0, 0) for first, _, _ in packed}

    monkeypatch.setattr("lightning_swarm.coordinator.audit.disputes.unpack", unpack)
    found, failed = asyncio.run(run().ask_findings(1, [(Unit(0, A), B)], 1))
    assert found.keys() == {(Unit(0, A), B)}
    assert not failed
    assert MANY not in read


def test_only_sketches_that_were_asked_for_are_taken() -> None:
    sums, failed = asyncio.run(run().sketch([Unit(1, A)], 0, 1))
    assert sums.keys() == {Unit(1, A)}
    assert not failed
