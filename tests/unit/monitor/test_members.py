"""The peers of a run, as a command sees them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from lightning_swarm.monitor.members import Members, members_of, table
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import UsedInvitation
from tests.unit.conftest import MakeSwarm

A, B, C, D = map(PeerId, "abcd")


def test_a_run_has_seen_who_ever_came_and_who_announces_itself(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    came = [UsedInvitation(number=bytes(16), uses=3, peers=[A, B])]
    view = make_swarm("a", invitations=came).servers[A].membership.run.view()
    run = Members.__new__(Members)
    run._roles = {C: None}  # announces itself
    for shown, known in ((view, [A, B, C]), (None, [C])):  # None: no run has begun
        monkeypatch.setattr(Members, "ask_view", Mock(return_value=shown))
        assert [peer for peer in (A, B, C, D) if run.has_seen(peer)] == known


def test_who_was_convicted_is_shown_with_the_reason(make_swarm: MakeSwarm) -> None:
    """The same in runs with and without invitations."""
    came = [UsedInvitation(number=bytes(16), uses=3, peers=[A, B])]
    for options in ({"invitations": came}, {}):
        run = make_swarm("a", **options).servers[A].membership.run
        run.electorate.convicted[B] = "its sum was not that of its gradients"
        shown = table("run", members_of(run.view(), {}))
        (line,) = [line for line in shown.splitlines() if line.startswith("b ")]
        assert line.endswith("convicted: its sum was not that of its gradients")
