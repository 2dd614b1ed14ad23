"""Strangers that join an audited run get random stages."""

from __future__ import annotations

from collections import Counter

from lightning_swarm.coordinator.membership.stage_lots import StageLots
from lightning_swarm.network import PeerId

A = PeerId("a")


def test_a_stage_that_needs_servers_most_is_drawn() -> None:
    for _ in range(20):
        assert StageLots().draw(A, [2, 1, 2, 2]) == 1
        assert StageLots().draw(A, [5, 3, 4, 6]) in {1, 2}


def test_a_servers_lot_stays_the_same_whatever_happens_to_the_stages_before_it() -> None:
    lots = StageLots()
    drawn = lots.draw(A, [2, 2, 2, 2])
    assert {lots.draw(A, [2, 2, 2, 2]) for _ in range(20)} == {drawn}
    others = [2 if index == drawn else 3 for index in range(4)]
    assert lots.draw(A, others) == drawn


def test_lots_fall_on_all_stages() -> None:
    lots = StageLots()
    drawn = Counter(lots.draw(PeerId(f"peer-{number}"), [4] * 4) for number in range(400))
    assert sorted(drawn) == [0, 1, 2, 3]
    assert min(drawn.values()) > 50


def test_a_server_asks_only_for_a_stage_that_is_its_own() -> None:
    lots = StageLots()
    assert not lots.may_choose(A, 0)
    lots.record_stage(A, 1)
    assert lots.draw(A, [2, 2, 1]) == 2
    drawn = lots.draw(A, [1, 2, 2])
    assert drawn == 0
    assert [index for index in range(3) if lots.may_choose(A, index)] == [0, 1]
    assert not lots.may_choose(PeerId("b"), 1)


def test_other_names_draw_no_other_lot_from_an_invitation() -> None:
    """Otherwise the holder of an invitation could join under new names until it gets the desired stage."""
    lots, invitation = StageLots(), bytes(16)
    names = [PeerId(f"peer-{number}") for number in range(40)]
    drawn = [lots.draw(name, [2] * 4, invitation=invitation) for name in names]
    assert len(set(drawn)) == 1
    assert [name for name in names if lots.may_choose(name, drawn[0])] == names[-1:], "nothing is kept of those gone"


def test_those_that_wait_or_have_come_keep_their_lots() -> None:
    lots, invitation = StageLots(), bytes(16)
    names = [PeerId(f"peer-{number}") for number in range(40)]
    for name in names[:20]:
        lots.record_stage(name, lots.draw(name, [2] * 4, invitation=invitation))
    drawn = [lots.draw(name, [2] * 4, invitation=invitation, waiting=names[20:]) for name in names]
    assert len(set(drawn[:20])) > 1
    assert len(set(drawn[20:])) > 1
    assert [lots.draw(name, [2] * 4, invitation=invitation) for name in names] == drawn
