"""Adversaries in audited runs: false auditors, and servers with every other attack."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from lightning_swarm import Trust
from lightning_swarm.coordinator.audit import step_audits
from lightning_swarm.testing import DidNotHappen
from tests.adversaries.adversary import Adversary
from tests.unit.testing.linear import NUM_STEPS, Net, run


@pytest.fixture(autouse=True)
def same_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same auditors each time, and the coordinator itself only if no other server holds the stage."""
    monkeypatch.setattr(step_audits, "lots", random.Random(0))
    monkeypatch.setattr(step_audits, "_OWN_SHARE", 0.0)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cover_up_agrees_with_a_fellow_liar(deterministic: bool) -> None:
    """All servers of the first stage collude, so the findings of any two auditors add up to the false sum."""
    liar = Adversary("peer-1", "sign_flip", since=1)
    fellows = [Adversary(f"peer-{i}", "cover_up", until=3) for i in (3, 5)]
    net = Net(2)
    with contextlib.suppress(DidNotHappen):  # one of them may never be drawn
        run(net, liar, *fellows, num_peers=6, trust=Trust("audited", audit_share=1.0), deterministic=deterministic)
    assert sorted(set().union(*(fellow.lies for fellow in fellows))) == [1, 2]
    assert liar.lies == {1: 1, 2: 1, 3: 1}, "it is caught as soon as nobody covers it"
    undefended = Net(2)
    run(undefended, Adversary("peer-1", "sign_flip", since=1, until=3), num_peers=6, deterministic=deterministic)
    torch.testing.assert_close(net.weights(), undefended.weights(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_false_accusation_is_made(deterministic: bool) -> None:
    net, liar = Net(2), Adversary("peer-3", "false_accusation", since=1)
    run(net, liar, num_peers=6, trust=Trust("audited", audit_share=1.0), deterministic=deterministic)
    assert liar.struck == 1, "then it is gone"
    assert min(liar.lies) >= 1
    torch.testing.assert_close(net.weights(), net.clean(NUM_STEPS))


@pytest.mark.parametrize("attack", ["sign_flip", "inner_product", "no_compute", "noisy_output", "not_a_number"])
def test_the_lie_is_what_a_server_commits_to(attack: str) -> None:
    """It is convicted for its attack, in the first step with it, not for a wrong hash."""
    net, liar = Net(), Adversary("peer-2", attack, since=1)
    run(net, liar, num_peers=5, trust=Trust("audited", audit_share=1.0))
    assert set(liar.lies) == {1}
    torch.testing.assert_close(net.weights(), net.clean(NUM_STEPS))
