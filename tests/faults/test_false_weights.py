"""In an audited run, false weights of batches that a trainer sends to auditors convict no honest server."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_swarm.client.audit import sender
from lightning_swarm.protocol.messages.audits import AuditRequest
from tests.faults.test_audited import KEEPER, SINCE, audited, events_of

SWARM: dict[str, Any] = {"num_stages": 2, "microbatch_size": 4}


@pytest.mark.thorough
@pytest.mark.parametrize("is_first", [True, False])
def test_a_false_weight_of_a_batch_convicts_nobody(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    expected, _ = audited(6, **SWARM)
    lies = []
    audited_peers = set[str]()

    def ask(**fields: Any) -> AuditRequest:
        request = AuditRequest(**fields)
        if request.key.step != SINCE or (request.place == 0) != is_first or audited_peers - {request.audited}:
            return request
        audited_peers.add(request.audited)
        lies.append(request)
        return AuditRequest(**{**fields, "weight": 2.0 * request.weight})

    monkeypatch.setattr(sender, "AuditRequest", ask)
    weights, strategy = audited(6, **SWARM)
    assert lies
    assert not events_of(strategy, "convicted")
    # The coordinator's own server was told the false weight, too: it may have been the first auditor.
    assert audited_peers <= events_of(strategy, "disputed")
    assert KEEPER not in events_of(strategy, "gone")
    assert torch.equal(weights, expected)
