"""Servers that leave a stage too large for their memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from lightning_swarm.coordinator.rebalancing.balancer import Balancer, ReportedLoad
from lightning_swarm.coordinator.rebalancing.policy import Move, StageRelease
from lightning_swarm.coordinator.rebalancing.relief import plan_relief
from lightning_swarm.network import PeerId

A, B, C = map(PeerId, "abc")


def planned(
    rosters: Sequence[str], too_large: Mapping[str, Collection[int]], state_bytes: Sequence[int], fixed: str = ""
) -> tuple[list[Move], list[StageRelease]]:
    return plan_relief(
        [[PeerId(peer) for peer in roster] for roster in rosters],
        {PeerId(peer): stages for peer, stages in too_large.items()},
        state_bytes,
        fixed=[PeerId(peer) for peer in fixed],
    )


def test_a_server_moves_to_the_smallest_stage_that_is_not_larger() -> None:
    assert planned(["ab", "c", "d"], {"a": {0}}, [9, 9, 5]) == ([Move(A, 0, 2)], [])
    assert planned(["ab", "c"], {"a": {0}}, [5, 9]) == ([], []), "its weights may not fit there"


def test_a_server_of_several_stages_gives_one_up() -> None:
    assert planned(["ab", "a"], {"a": {0}}, [1, 1]) == ([], [StageRelease(A, 0)])


@pytest.mark.parametrize(
    ("rosters", "too_large", "fixed"),
    [
        (["a", "b"], {"a": {0}}, ""),  # no other server holds the stage
        (["ab", "c"], {"a": {0}, "b": {0}}, ""),  # no server there has memory for it
        (["ab", "c"], {"a": {0}}, "a"),
        (["ab", "c"], {"a": {1}}, ""),  # too large for the other stage only
        (["ab", "c", "d"], {"a": {0, 1}}, ""),  # all its stages were too large
    ],
)
def test_who_stays(rosters: Sequence[str], too_large: Mapping[str, Collection[int]], fixed: str) -> None:
    assert planned(rosters, too_large, [1] * len(rosters), fixed) == ([], [])


def test_a_server_that_moved_does_not_come_back() -> None:
    def loads(at: int, *, lacks_memory: bool) -> dict[PeerId, dict[int, ReportedLoad]]:
        of_a = ReportedLoad.from_report(None, 0.0, None, lacks_memory=lacks_memory)
        return {A: {at: of_a}, B: {0: ReportedLoad(4.0, busy_share=1.0)}, C: {1: ReportedLoad(4.0, busy_share=1.0)}}

    balance = Balancer("gain", 60.0, [1, 1], now_s=0.0)
    balance.take_loads(loads(0, lacks_memory=True))
    assert balance.moves([[A, B], [C]], fixed=[], joining={}, now_s=1.0) == [Move(A, 0, 1)]
    balance.note_left(A, 0, 1, now_s=1.0)
    for at_s in range(2, 99):  # servers join and leave meanwhile
        balance.take_loads(loads(1, lacks_memory=at_s > 50))
        newcomers = [PeerId(str(at_s))]
        moves = balance.moves([[B], [A, C, *newcomers]], fixed=[], joining={}, now_s=float(at_s))
        assert A not in [move.peer for move in moves]


def test_where_servers_stay_nobody_is_moved() -> None:
    balance = Balancer("none", 60.0, [1, 1], now_s=0.0)
    balance.take_loads({A: {0: ReportedLoad(None, lacks_memory=True)}, B: {0: ReportedLoad(1.0)}})
    assert balance.moves([[A, B], [C]], fixed=[], joining={}, now_s=1.0) == []
    assert balance.releases([[A, B], [A]], leaving=[], joining={}, now_s=1.0) == []
