"""A closing's response to faults, as a pure function."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence

import pytest

from lightning_swarm.coordinator.step.replay_plan import (
    ReplayPlan,
    choose_blamed,
    plan_replays,
)
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt

COUNTED: list[Receipt] = [(0, 0, 0), (0, 1, 0), (4, 0, 0)]
A, B, C, D = map(PeerId, "abcd")


def held(*places: int, unnamed: int = 0) -> set[Receipt]:
    return {COUNTED[place] for place in places} | {(8, index, 0) for index in range(unnamed)}


def plan(
    *stages: Mapping[str, set[Receipt]],
    expected: Sequence[Receipt] = COUNTED,
    first_trained: int = 0,
    replayable: Sequence[bool] | None = None,
    barred: Mapping[int, Collection[PeerId]] | None = None,
    spoilt: Sequence[Collection[PeerId]] | None = None,
) -> ReplayPlan:
    """Plan replays; by default all stages train, and any server can recompute anything."""
    return plan_replays(
        [expected] * len(stages),
        [{PeerId(peer): one for peer, one in stage.items()} for stage in stages],
        first_trained=first_trained,
        replayable=replayable or [True] * len(stages),
        barred=barred or {},
        spoilt=spoilt or [()] * len(stages),
    )


WHOLE = [{"a": held(0, 2), "b": held(1)}, {"c": held(0, 1, 2)}]


def test_sums_that_hold_each_microbatch_once_in_each_stage_are_done() -> None:
    found = plan(*WHOLE)
    assert found.done
    assert found.named == [{A: held(0, 2), B: held(1)}, {C: held(0, 1, 2)}]
    assert plan({"a": held()}, expected=[]).done
    assert plan({"a": held()}, WHOLE[1], first_trained=1).done


def test_what_nobody_holds_goes_to_whoever_has_the_least() -> None:
    found = plan({"a": held(0), "b": held()}, {"c": held(0, 2), "d": held()})
    assert found.holes == {(0, 1, 0): {0: B, 1: D}, (4, 0, 0): {0: A}}
    assert not found.done
    assert not any(found.discards)
    assert found.named[0] == {A: held(0, 2), B: held(1)}


def test_of_two_that_hold_the_same_the_one_with_less_begins_anew() -> None:
    found = plan({"a": held(0), "b": held(0, 1)}, WHOLE[1])
    assert found.discards == [[A], []]
    assert found.holes == {(4, 0, 0): {0: A}}
    assert plan({"a": held(0, 2), "b": held(0, 1)}, WHOLE[1]).discards == [[B], []]


def test_a_sum_with_what_nobody_counts_begins_anew() -> None:
    found = plan({"a": held(0, 2, unnamed=1), "b": held(1)}, WHOLE[1])
    assert found.discards == [[A], []]
    assert {receipt: dict(holders) for receipt, holders in found.holes.items()} == {
        (0, 0, 0): {0: A},
        (4, 0, 0): {0: A},
    }


def test_a_stage_before_the_first_that_trains_holds_nothing() -> None:
    found = plan(*WHOLE, first_trained=1)
    assert found.discards == [[A, B], []]
    assert not found.holes
    assert found.named[0] == {A: held(), B: held()}


def test_what_cannot_be_sent_again_is_lost() -> None:
    found = plan(WHOLE[0], {"c": held(0, 1)}, replayable=[True, False])
    assert found.lost == {4}
    assert not found.holes


def test_who_is_out_of_a_trainers_reach_holds_nothing_of_its_batches() -> None:
    stage = {"a": held(0, 1), "b": held()}
    assert plan(stage, WHOLE[1], barred={4: {B}}).holes == {(4, 0, 0): {0: A}}
    assert plan(stage, WHOLE[1], barred={0: {B}}).holes == {(4, 0, 0): {0: B}}
    assert plan(stage, WHOLE[1], barred={4: {A, B}}).lost == {4}


def done(found: ReplayPlan, sums: Sequence[Mapping[PeerId, set[Receipt]]]) -> list[dict[PeerId, set[Receipt]]]:
    """Return the sums after all peers have carried out the plan."""
    after = []
    for index, stage in enumerate(sums):
        now = {peer: set() if peer in found.discards[index] else set(one) for peer, one in stage.items()}
        for receipt, holders in found.holes.items():
            if index in holders:
                now[holders[index]].add(receipt)
        after.append(now)
    return after


def test_whatever_sums_hold_one_plan_mends_it() -> None:
    rng = random.Random(0)
    counted = [(0, i, 0) for i in range(5)]
    num_mended = 0
    for _ in range(2000):
        sums = [
            {
                PeerId(peer): {one for one in counted if rng.random() < 0.4} | held(unnamed=rng.randint(0, 5) // 5)
                for peer in "abcd"[: rng.randint(1, 4)]
            }
            for _ in range(rng.randint(1, 3))
        ]
        found = plan(*sums, expected=counted)
        num_mended += not found.done
        mended = done(found, sums)
        assert plan(*mended, expected=counted).done
        for index, stage in enumerate(mended):
            for peer, one in stage.items():
                assert one == found.named[index][peer]
                assert peer in found.discards[index] or one >= sums[index][peer]
    assert num_mended > 1000


# ---------------------------------------------------------------------- whom to blame


def test_who_did_not_answer_is_to_blame_and_nobody_else() -> None:
    assert choose_blamed([[A, B, C]], [B], {A: [C]}, spared=A) == [B]
    assert choose_blamed([[A, B, C]], [C, B], {}, spared=A) == [B, C]


def test_else_the_one_that_most_did_not_reach() -> None:
    assert choose_blamed([[A, B, C, D]], [], {A: [C], B: [C], C: [D]}, spared=A) == [C]


def test_of_two_that_do_not_reach_each_other_the_later_one() -> None:
    assert choose_blamed([[A], [C, B]], [], {B: [C], C: [B]}, spared=A) == [B]


def test_who_does_not_reach_the_coordinator_is_out_of_reach_itself() -> None:
    assert choose_blamed([[A, B]], [], {A: [B], B: [A]}, spared=A) == [B]
    assert choose_blamed([[A, B]], [], {B: [A]}, spared=A) == [B]


def test_where_strangers_serve_one_server_s_word_costs_both_their_places() -> None:
    def blamed(*roster: PeerId, **unreached: PeerId) -> list[PeerId]:
        said = {PeerId(peer): [other] for peer, other in unreached.items()}
        return choose_blamed([roster], [], said, spared=D, has_strangers=True)

    assert blamed(A, B, C, b=C) == [B, C]
    assert blamed(A, B, C, b=C, c=B) == [B, C]
    assert blamed(A, B, C, a=C, b=C, c=A) == [C]
    assert blamed(A, B, D, d=B) == blamed(A, B, D, b=D) == [B], "the coordinator's is believed"
    assert blamed(B, C, b=C) == [C], "a stage keeps somebody"


def test_a_keeper_s_word_weighs_more_than_that_of_one_stranger() -> None:
    def blamed(*roster: PeerId, **unreached: PeerId) -> list[PeerId]:
        said = {PeerId(peer): [other] for peer, other in unreached.items()}
        return choose_blamed([roster], [], said, spared=D, has_strangers=True, trusted=[D, A])

    assert blamed(A, B, b=A) == [B], "else a stranger would have a keeper's stage to itself"
    assert blamed(A, B, C, b=A) == blamed(A, B, C, a=B) == blamed(A, B, C, a=B, b=A) == [B]
    assert blamed(A, B, C, b=A, c=A) == [A], "its own link has failed, it seems"
    assert blamed(A, D, a=D) == blamed(A, D, d=A) == [A], "the coordinator's word weighs most"


@pytest.mark.parametrize("unreached", [{}, {A: []}, {A: [A]}, {A: [C]}, {A: [PeerId("stranger")]}])
def test_nobody_is_blamed_by_who_cannot_know(unreached: Mapping[PeerId, Sequence[PeerId]]) -> None:
    """It reports itself, a server of another stage, or a peer outside of the round."""
    assert choose_blamed([[A, B], [C]], [], unreached, spared=A) == []
