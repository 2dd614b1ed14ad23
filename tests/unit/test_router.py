"""Interleaved weighted round-robin: shares in proportion to rates, and accounts that cannot be spoilt."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from lightning_swarm.network import PeerId
from lightning_swarm.pipeline.policy import (
    FIRST_BAN_S,
    LATE_FACTOR,
    LONGEST_BAN_S,
    SHORTEST_DEADLINE_S,
    PeerLoad,
    StageRouter,
    deadline_s,
)

A, B, C, D = (PeerId(name) for name in "abcd")


def router(*peers: PeerId, seed: int = 0) -> StageRouter:
    made = StageRouter(random.Random(seed))
    made.set_peers(peers)
    return made


def run(made: StageRouter, rates: dict[PeerId, float], num_microbatches: int, num_samples: int = 4) -> Counter[PeerId]:
    """Microbatches, each settled before the next."""
    shares: Counter[PeerId] = Counter()
    for _ in range(num_microbatches):
        charge = made.choose(num_samples, now_s=0.0)
        shares[charge.peer] += 1
        made.settle(charge, busy_s=num_samples / rates[charge.peer], queued=0)
    return shares


def test_shares_are_proportional_to_rates() -> None:
    shares = run(router(A, B, C), {A: 100.0, B: 300.0, C: 600.0}, 1000)
    assert shares[A] == pytest.approx(100, abs=3)
    assert shares[B] == pytest.approx(300, abs=3)
    assert shares[C] == pytest.approx(600, abs=3)


def test_shares_follow_a_rate_that_changes() -> None:
    made = router(A, B)
    run(made, {A: 100.0, B: 100.0}, 200)
    shares = run(made, {A: 300.0, B: 100.0}, 400)
    assert shares[A] == pytest.approx(300, abs=5)


def test_microbatches_under_way_count_already() -> None:
    made = router(A, B)
    run(made, {A: 100.0, B: 300.0}, 50)
    taken = Counter(made.choose(4, now_s=0.0).peer for _ in range(40))
    assert taken[B] == pytest.approx(30, abs=2)


def test_forwards_tell_before_any_backward_is_done() -> None:
    """A batch's forwards come first: nothing is settled before the last of them."""
    made = router(A, B)
    forwards = {A: 1.0, B: 1 / 9}
    shares: Counter[PeerId] = Counter()
    for _ in range(100):
        charge = made.choose(4, now_s=0.0)
        shares[charge.peer] += 1
        made.note_forward(charge, busy_s=forwards[charge.peer])
    assert shares[B] == pytest.approx(90, abs=2)


def test_what_a_forward_let_expect_is_replaced_by_what_was_measured() -> None:
    made = router(A)
    charge = made.note_forward(made.choose(4, now_s=0.0), busy_s=1.0)
    assert made.peers[A].assigned_s == pytest.approx(3.0)
    made.settle(charge, busy_s=5.0, queued=0)
    assert made.peers[A].assigned_s == pytest.approx(5.0)
    assert made.note_forward(made.choose(4, now_s=0.0), busy_s=1.0).expected_s == pytest.approx(5.0), "it is learnt"


@pytest.mark.parametrize("busy_s", [0.0, -1.0, math.nan, math.inf, 1e-300])
def test_an_impossible_time_of_a_forward_changes_nothing(busy_s: float) -> None:
    made = router(A)
    charge = made.choose(4, now_s=0.0)
    before = made.peers[A].assigned_s
    assert made.note_forward(charge, busy_s=busy_s) == charge
    assert made.peers[A].assigned_s == before
    assert made.peers[A].samples_per_s is None


def test_large_microbatches_cost_more() -> None:
    made = router(A, B)
    first = made.choose(30, now_s=0.0)
    others = [made.choose(10, now_s=0.0).peer for _ in range(3)]
    assert first.peer not in others


def test_a_newcomer_enters_at_the_minimum_and_is_tried_next() -> None:
    made = router(A, B)
    run(made, {A: 100.0, B: 100.0}, 101)
    made.set_peers([A, B, C])
    lowest_s = min(made.peers[peer].assigned_s for peer in (A, B))
    assert made.peers[C].assigned_s == lowest_s
    assert C in {made.choose(4, now_s=0.0).peer for _ in range(3)}
    shares = run(made, {A: 100.0, B: 100.0, C: 100.0}, 300)
    assert shares[C] == pytest.approx(100, abs=3), "it must not be flooded until it has caught up"


def test_a_peer_that_left_is_not_chosen_and_its_charges_are_forgotten() -> None:
    made = router(A, B)
    charges = [made.choose(4, now_s=0.0) for _ in range(4)]
    made.set_peers([B])
    before = made.peers[B].assigned_s
    for charge in charges:
        if charge.peer == A:
            made.refund(charge)
            made.settle(charge, busy_s=1.0, queued=0)
    assert made.peers[B].assigned_s == before
    assert {made.choose(1, now_s=0.0).peer for _ in range(5)} == {B}


def test_a_refund_is_as_if_it_had_not_been_chosen() -> None:
    made = router(A, B)
    run(made, {A: 64.0, B: 32.0}, 30)
    before = {peer: (load.assigned_s, load.num_microbatches) for peer, load in made.peers.items()}
    made.refund(made.choose(4, now_s=0.0))
    assert {peer: (load.assigned_s, load.num_microbatches) for peer, load in made.peers.items()} == before


def test_an_account_holds_what_was_measured() -> None:
    made = router(A)
    charge = made.choose(4, now_s=0.0)
    made.settle(charge, busy_s=0.25, queued=3)
    load = made.peers[A]
    assert load.assigned_s == pytest.approx(0.25)
    assert load.samples_per_s == pytest.approx(16.0)
    assert load.queued == 3


@pytest.mark.parametrize("busy_s", [0.0, -1.0, math.nan, math.inf, 5e-324, 1e-310, 1e300])
def test_an_impossible_time_reaches_no_account(busy_s: float) -> None:
    made = router(A, B)
    charge = made.choose(4, now_s=0.0)
    made.settle(charge, busy_s=busy_s, queued=0)
    assert made.peers[charge.peer].samples_per_s is None
    assert sum(run(made, {A: 10.0, B: 10.0}, 20).values()) == 20


def test_busy_peers_are_avoided_unless_there_is_no_other() -> None:
    made = router(A, B)
    assert {made.choose(1, now_s=0.0, avoid=frozenset({A})).peer for _ in range(20)} == {B}
    assert {made.choose(1, now_s=0.0, avoid=frozenset({A, B})).peer for _ in range(4)} == {A}, "the smaller account"
    assert router(A).choose(1, now_s=0.0, avoid=frozenset({A})).peer == A


def test_an_unmeasured_peer_counts_as_an_average_one() -> None:
    made = router(A, B)
    for _ in range(2):
        made.settle(made.charge(A, 10), busy_s=10 / 50.0, queued=0)
    made.assign(A, 0.0)
    charges = {charge.peer: charge for charge in (made.choose(10, now_s=0.0), made.choose(10, now_s=0.0))}
    assert charges[B].expected_s == pytest.approx(10 / 50.0)


def test_the_average_is_corrected_for_its_empty_start() -> None:
    load = PeerLoad()
    assert load.samples_per_s is None
    load.rate.measure(100.0)
    assert load.samples_per_s == pytest.approx(100.0)
    load.rate.measure(200.0)
    assert load.samples_per_s == pytest.approx((0.8 * 100 + 200) / 1.8)
    for _ in range(100):
        load.rate.measure(300.0)
    assert load.samples_per_s == pytest.approx(300.0)


def test_who_claimed_to_be_fast_leaves_no_trace_in_the_average() -> None:
    made = router(A, B, C)
    made.settle(made.charge(A, 10), busy_s=10 / 50.0, queued=0)
    made.settle(made.charge(B, 10), busy_s=1e-9, queued=0)
    made.settle(made.charge(B, 10), busy_s=2e-9, queued=0)
    made.set_peers([A, C])
    assert made.charge(C, 10).expected_s == 10 / 50.0


class CountedPeer(str):
    """Counts how often any is looked up or compared."""

    num_looks = 0

    def __hash__(self) -> int:
        CountedPeer.num_looks += 1
        return super().__hash__()

    def __lt__(self, other: str) -> bool:
        CountedPeer.num_looks += 1
        return super().__lt__(other)


@pytest.mark.parametrize(("num_before", "num_avoided"), [(0, 0), (2000, 0), (2000, 3)])
def test_a_decision_looks_at_few_of_many_peers(num_before: int, num_avoided: int) -> None:
    peers = [PeerId(CountedPeer(f"peer-{number}")) for number in range(1000)]
    made = router(*peers)
    run(made, {peer: 1.0 + 1e-3 * number for number, peer in enumerate(peers)}, num_before)
    avoid = frozenset(peers[:num_avoided])
    CountedPeer.num_looks = 0
    charge = made.choose(4, now_s=0.0, avoid=avoid)
    made.refund(charge)
    made.settle(made.choose(4, now_s=0.0), busy_s=1.0, queued=0)
    made.ban(peers[0], now_s=0.0)
    assert made.others(peers[1], now_s=FIRST_BAN_S)
    assert CountedPeer.num_looks < 200


def test_equal_accounts_are_chosen_among_evenly() -> None:
    made = router(*(PeerId(f"peer-{number}") for number in range(10)))
    taken: Counter[PeerId] = Counter()
    for _ in range(10_000):
        charge = made.choose(1, now_s=0.0, avoid=frozenset({PeerId("peer-3")}))
        taken[charge.peer] += 1
        made.refund(charge)
    assert len(taken) == 9
    assert set(taken.values()) <= set(range(950, 1280))  # five standard deviations of 1111


def test_ties_are_broken_by_the_seed_alone() -> None:
    def wiring(seed: int) -> list[PeerId]:
        made = router(A, B, C, seed=seed)
        return [made.choose(1, now_s=0.0).peer for _ in range(30)]

    assert wiring(1) == wiring(1)
    assert len({tuple(wiring(seed)) for seed in range(10)}) > 5


# ---------------------------------------------------------------------- bans


def chosen(made: StageRouter, now_s: float, times: int = 20) -> set[PeerId]:
    return {made.choose(1, now_s=now_s).peer for _ in range(times)}


def test_a_banned_peer_is_chosen_again_when_its_ban_is_over() -> None:
    made = router(A, B)
    assert made.ban(A, now_s=100.0)
    assert chosen(made, 100.0) == chosen(made, 100.0 + FIRST_BAN_S - 0.1) == {B}
    assert chosen(made, 100.0 + FIRST_BAN_S) == {A, B}


def test_bans_grow_and_end() -> None:
    made, now_s, lengths = router(A, B), 0.0, []
    for _ in range(12):
        assert made.ban(A, now_s=now_s)
        until_s = made.peers[A].banned_until_s
        assert until_s is not None
        lengths.append(until_s - now_s)
        now_s = until_s
    assert lengths[:4] == [FIRST_BAN_S * factor for factor in (1, 2, 4, 8)]
    assert lengths[-1] == LONGEST_BAN_S


def test_a_peer_that_finishes_something_is_free_at_once_and_forgiven() -> None:
    made = router(A, B)
    charge = made.charge(A, 1)
    made.ban(A, now_s=0.0)
    made.settle(charge, busy_s=1e-6, queued=0)
    assert A in chosen(made, 1.0)
    made.ban(A, now_s=2.0)
    assert made.peers[A].banned_until_s == 2.0 + FIRST_BAN_S


def test_many_calls_that_fail_together_are_one_failure() -> None:
    made = router(A, B)
    assert [made.ban(A, now_s=1.0) for _ in range(64)] == [True] + [False] * 63
    assert made.peers[A].num_failures == 1


def test_bans_are_ignored_when_all_are_banned() -> None:
    made = router(A, B)
    made.ban(A, now_s=0.0)
    made.ban(B, now_s=0.0)
    assert chosen(made, 1.0) == {A, B}


def test_a_banned_peer_comes_before_one_that_shall_be_avoided() -> None:
    made = router(A, B)
    made.ban(B, now_s=0.0)
    assert made.choose(1, now_s=1.0, avoid=frozenset({A})).peer == B


def test_who_is_readmitted_enters_at_the_smallest_account() -> None:
    made = router(A, B, C)
    made.ban(A, now_s=0.0)
    for _ in range(100):
        made.choose(1, now_s=1.0)
    shares = Counter(made.choose(1, now_s=10.0).peer for _ in range(30))
    assert 9 <= shares[A] <= 11, "it must be tried, and not be flooded"
    made.assign(A, 1e9)
    made.ban(A, now_s=20.0)
    assert A in chosen(made, 40.0, times=3)


def test_a_banned_peer_s_account_is_not_what_others_enter_at() -> None:
    made = router(A, B, C)
    made.ban(A, now_s=0.0)
    made.ban(B, now_s=0.0)
    for _ in range(100):
        made.choose(1, now_s=1.0)  # all to C
    made.set_peers([A, B, C, D])
    shares = Counter(made.choose(1, now_s=1.0).peer for _ in range(30))
    assert shares[C] == pytest.approx(15, abs=1), "who comes meanwhile must not be flooded"
    shares = Counter(made.choose(1, now_s=10.0).peer for _ in range(40))
    assert set(shares.values()) <= {9, 10, 11}, "nor those whose bans end together"


def test_nobody_who_left_is_banned_or_charged() -> None:
    made = router(A)
    assert not made.ban(B, now_s=0.0)
    assert made.charge(B, 10).expected_s == 0.0
    assert not made.others(A, now_s=0.0)
    made.set_peers([A, B])
    assert made.others(A, now_s=0.0)
    made.ban(B, now_s=0.0)
    assert not made.others(A, now_s=1.0)


def test_a_deadline_follows_what_was_measured_within_bounds() -> None:
    assert deadline_s(10.0, 0, longest_s=300.0) == 10.0 * LATE_FACTOR
    assert deadline_s(10.0, 2, longest_s=300.0) == 30.0 * LATE_FACTOR
    assert deadline_s(0.001, 3, longest_s=300.0) == SHORTEST_DEADLINE_S
    assert deadline_s(1000.0, 0, longest_s=300.0) == 300.0
    assert deadline_s(0.001, 0, longest_s=5.0) == 5.0
