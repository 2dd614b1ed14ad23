"""Routing to the earliest finish: by rates, by the work under way, and by accounts that cannot be falsified."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from lightning_swarm.client.pipeline.router import (
    FIRST_EJECTION_S,
    FIRST_FORWARDS,
    FIRST_MEASURED,
    LONGEST_EJECTION_S,
    TRIED_AGAIN,
    PeerCharge,
    PeerLoad,
    StageRouter,
)
from lightning_swarm.network import PeerId

A, B, C, D = (PeerId(name) for name in "abcd")


def router(*peers: PeerId, seed: int = 0) -> StageRouter:
    made = StageRouter(random.Random(seed))
    made.set_peers(peers)
    return made


def run(made: StageRouter, rates: dict[PeerId, float], num_microbatches: int, num_samples: int = 4) -> Counter[PeerId]:
    """Route microbatches, each settled before the next; count them by peer."""
    shares: Counter[PeerId] = Counter()
    for _ in range(num_microbatches):
        charge = made.choose(num_samples, now_s=0.0)
        shares[charge.peer] += 1
        made.settle(charge, busy_s=num_samples / rates[charge.peer], queued=0)
    return shares


def measured(rates: dict[PeerId, float], seed: int = 0) -> StageRouter:
    """Return a router of peers with known rates, in samples/s."""
    made = router(*rates, seed=seed)
    for peer, samples_per_s in rates.items():
        for _ in range(FIRST_MEASURED):
            made.settle(made.charge(peer, 1), busy_s=1 / samples_per_s, queued=0)
    return made


def step(made: StageRouter, rates: dict[PeerId, float], num_microbatches: int, num_samples: int = 4) -> float:
    """Send all forwards at once, then all backwards; return the seconds until the last peer is done."""
    made.set_peers(rates)
    charges = [made.choose(num_samples, now_s=0.0) for _ in range(num_microbatches)]
    shares = Counter(charge.peer for charge in charges)
    for charge in charges:
        made.note_forward(charge, busy_s=num_samples / rates[charge.peer] / 3)
    for charge in charges:
        made.settle(charge, busy_s=num_samples / rates[charge.peer], queued=0)
    return max(shares[peer] * num_samples / rates[peer] for peer in rates)


# ---------------------------------------------------------------------- shares


def test_shares_are_proportional_to_rates() -> None:
    made = measured({A: 100.0, B: 300.0, C: 600.0})
    shares = Counter(made.choose(4, now_s=0.0).peer for _ in range(1000))
    assert shares == {A: 100, B: 300, C: 600}


def test_who_is_slow_gets_only_what_it_does_in_time() -> None:
    """Of ten microbatches, the slow peer needs as long for one as the fast one for all."""
    made = measured({A: 10.0, B: 1.0})
    assert {made.choose(4, now_s=0.0).peer for _ in range(10)} == {A}
    assert made.choose(4, now_s=0.0).peer == B, "now it would be through there as soon"


def test_a_step_ends_as_soon_as_it_can() -> None:
    rates = {PeerId(f"peer-{number}"): 1.0 + number for number in range(10)}
    made = measured(rates)
    for num_microbatches in (20, 50, 100):
        ideal_s = 4 * num_microbatches / sum(rates.values())
        assert step(made, rates, num_microbatches) <= ideal_s + 4 / max(rates.values())


def test_shares_follow_a_rate_that_changes() -> None:
    made = measured({A: 100.0, B: 100.0})
    for _ in range(10):
        step(made, {A: 300.0, B: 100.0}, 40)
    assert Counter(made.choose(4, now_s=0.0).peer for _ in range(40))[A] == pytest.approx(30, abs=1)


def test_who_has_become_faster_is_found_out() -> None:
    made = measured({A: 100.0, B: 1.0})
    shares = run(made, {A: 100.0, B: 1000.0}, 10_000)
    assert shares[B] > 5000
    made = measured({A: 100.0, B: 1.0})
    assert 1 <= run(made, {A: 100.0, B: 1.0}, 10_000)[B] <= 10_000 / 100 * 2 / TRIED_AGAIN + 1, "it costs little"


def test_who_is_tried_again_is_not_tried_by_force() -> None:
    made = measured({A: 100.0, B: 1.0})
    assert run(made, {A: 100.0, B: 1.0}, 3000)
    assert {made.choose(1, now_s=0.0, avoid=frozenset({B})).peer for _ in range(10_000)} == {A}


def test_a_forward_that_is_done_makes_room() -> None:
    made = measured({A: 1.0, B: 1.0})
    first, other = made.choose(1, now_s=0.0), made.choose(1, now_s=0.0)
    assert first.peer != other.peer
    made.note_forward(first, busy_s=1 / 3)
    assert made.peers[first.peer].left_s == pytest.approx(2 / 3), "its backward is to come"
    assert made.choose(1, now_s=0.0).peer == first.peer


def test_forwards_tell_before_any_backward_is_done() -> None:
    """A batch's forwards come first, so no account is settled before the last of them."""
    made = router(A, B)
    forwards = {A: 1.0, B: 1 / 9}
    shares: Counter[PeerId] = Counter()
    for _ in range(200):
        charge = made.choose(4, now_s=0.0)
        shares[charge.peer] += 1
        made.note_forward(charge, busy_s=forwards[charge.peer])
    assert shares[B] == pytest.approx(180, abs=3)


def test_what_a_forward_let_expect_is_replaced_by_what_was_measured() -> None:
    made = router(A)
    charge = made.choose(4, now_s=0.0)
    made.note_forward(charge, busy_s=1.0)
    assert charge.expected_s == pytest.approx(3.0)
    made.settle(charge, busy_s=5.0, queued=0)
    assert made.peers[A].left_s == 0.0
    charge = made.choose(4, now_s=0.0)
    made.note_forward(charge, busy_s=1.0)
    assert charge.expected_s == pytest.approx(5.0), "it is learnt"


@pytest.mark.parametrize("busy_s", [None, 0.0, -1.0, math.nan, math.inf, 1e-300])
def test_an_impossible_time_of_a_forward_teaches_nothing(busy_s: float | None) -> None:
    made = router(A)
    charge = made.choose(4, now_s=0.0)
    before_s = made.peers[A].left_s
    made.note_forward(charge, busy_s=busy_s)
    assert (made.peers[A].left_s, charge.expected_s) == (before_s, before_s)
    assert made.peers[A].samples_per_s is None
    assert made.peers[A].num_forwards == 0, "but it is done"


def test_large_microbatches_cost_more() -> None:
    made = measured({A: 1.0, B: 1.0})
    first = made.choose(30, now_s=0.0)
    others = [made.choose(10, now_s=0.0).peer for _ in range(3)]
    assert first.peer not in others


def test_another_size_of_microbatches_is_routed_by_its_own_time() -> None:
    made = measured({A: 100.0, B: 10.0})
    for _ in range(2):
        made.release(made.choose(1, now_s=0.0))
    made.charge(A, 50)  # half a second
    assert made.choose(1, now_s=0.0).peer == B, "a tenth of a second"
    made.set_peers([A, B])
    made.release(made.choose(100, now_s=0.0))
    made.release(made.choose(100, now_s=0.0))
    made.charge(A, 50)
    assert made.choose(100, now_s=0.0).peer == A, "1.5 s, and 10 s there"


def test_where_others_wait_it_takes_longer() -> None:
    made = measured({A: 100.0, B: 50.0})
    for _ in range(20):
        made.settle(made.charge(A, 1), busy_s=0.01, queued=3)
    assert made.choose(1, now_s=0.0).peer == B
    made = measured({A: 100.0, B: 50.0})
    own = [made.charge(A, 1) for _ in range(4)]
    made.settle(own[0], busy_s=0.01, queued=3)
    for charge in own[1:]:
        made.release(charge)
    assert made.choose(1, now_s=0.0).peer == A, "those that waited there were its own"


@pytest.mark.parametrize("queued", [-1, -(2**60), 2**60])
def test_an_impossible_queue_is_forgotten_soon(queued: int) -> None:
    made = measured({A: 100.0, B: 50.0})
    made.settle(made.charge(A, 1), busy_s=0.01, queued=queued)
    for _ in range(60):
        made.settle(made.charge(A, 1), busy_s=0.01, queued=0)
    assert made.choose(1, now_s=0.0).peer == A


# ---------------------------------------------------------------------- who is new


def test_where_nobody_is_known_each_gets_a_few_until_it_shows_who_is_fast() -> None:
    made = router(A, B, C)
    charges = [made.choose(4, now_s=0.0) for _ in range(3 * FIRST_FORWARDS)]
    assert Counter(charge.peer for charge in charges) == dict.fromkeys((A, B, C), FIRST_FORWARDS)
    assert made.is_full
    ahead = [charge for charge in charges if charge.peer == A]
    made.note_forward(ahead[0], busy_s=1.0)
    assert not made.is_full
    assert made.choose(4, now_s=0.0).peer == A, "it has room"
    assert made.is_full
    for _ in range(4):
        made.note_forward(made.charge(A, 4), busy_s=1.0)
    assert not made.is_full, "the others are slow"
    assert {made.choose(4, now_s=0.0).peer for _ in range(20)} == {A}
    for charge in charges:
        if charge.peer == B:
            made.note_forward(charge, busy_s=1.0)
    assert B in {made.choose(4, now_s=0.0).peer for _ in range(20)}, "now it is known"


def test_equal_peers_are_known_when_all_have_done_something() -> None:
    made = router(A, B)
    charges = [made.choose(4, now_s=0.0) for _ in range(2 * FIRST_FORWARDS)]
    for charge in charges[:2]:
        made.note_forward(charge, busy_s=1.0)
    assert not made.is_full
    assert Counter(made.choose(4, now_s=0.0).peer for _ in range(20)) == {A: 10, B: 10}


@pytest.mark.parametrize("how", ["refund", "release", "note_forward", "ban", "leave"])
def test_nobody_waits_for_what_will_not_come(how: str) -> None:
    made = router(A, B)
    charges = [made.choose(4, now_s=0.0) for _ in range(2 * FIRST_FORWARDS)]
    assert made.is_full
    match how:
        case "ban":
            made.eject(A, now_s=0.0)
        case "leave":
            made.set_peers([B])
        case "note_forward":
            made.note_forward(charges[0], busy_s=None)
        case _:
            getattr(made, how)(charges[0])
    assert not made.is_full


def test_an_only_peer_is_never_full() -> None:
    made = router(A)
    assert {made.choose(4, now_s=0.0).peer for _ in range(20)} == {A}
    assert not made.is_full


def test_a_newcomer_is_tried_next_and_not_flooded() -> None:
    made = measured({A: 100.0, B: 100.0})
    made.set_peers([A, B, C])
    first = made.choose(4, now_s=0.0)
    assert first.peer == C
    assert not made.is_full
    assert C not in {made.choose(4, now_s=0.0).peer for _ in range(20)}, "nothing is known of it yet"
    made.note_forward(first, busy_s=4 / 100 / 3)
    shares = Counter(made.choose(4, now_s=0.0).peer for _ in range(40))
    assert shares[C] == pytest.approx(20, abs=1), "it catches up in the step, and no more"


def test_a_slow_beginning_is_not_held_against_a_newcomer() -> None:
    """A newcomer compiles in its first microbatch."""
    made = measured({A: 10.0, B: 10.0})
    rates = {A: 10.0, B: 10.0, C: 0.01}
    step(made, rates, 10)
    assert made.choose(4, now_s=0.0).peer == C, "it has had one"
    rates[C] = 10.0
    for _ in range(FIRST_MEASURED):
        step(made, rates, 10)
    made.set_peers(rates)
    assert Counter(made.choose(4, now_s=0.0).peer for _ in range(30))[C] >= 7


def test_who_is_slow_from_the_beginning_is_soon_known_to_be() -> None:
    made = measured({A: 10.0, B: 10.0})
    rates = {A: 10.0, B: 10.0, C: 0.01}
    for _ in range(FIRST_MEASURED):
        assert step(made, rates, 10) == 400.0
    assert step(made, rates, 10) == pytest.approx(2.0)


def test_a_peer_that_left_is_not_chosen_and_its_charges_are_forgotten() -> None:
    made = router(A, B)
    charges = [made.choose(4, now_s=0.0) for _ in range(4)]
    made.set_peers([B])
    for charge in charges:
        if charge.peer == A:
            made.note_forward(charge, busy_s=1.0)
            made.refund(charge)
            made.settle(charge, busy_s=1.0, queued=0)
    assert made.peers[B].left_s == 0.0
    assert {made.choose(1, now_s=0.0).peer for _ in range(5)} == {B}


def test_with_a_step_begins_a_new_account() -> None:
    made = measured({A: 1.0, B: 1.0})
    given_up, late = made.charge(A, 4), made.charge(B, 4)
    made.note_forward(late, busy_s=1.0)
    made.set_peers([A, B])
    assert [load.left_s for load in made.peers.values()] == [0.0, 0.0]
    now = made.charge(A, 4)
    made.release(given_up)
    made.settle(late, busy_s=4.0, queued=0)
    assert made.peers[A].left_s == now.expected_s, "what is of an earlier step does not change it"
    assert made.peers[B].left_s == 0.0
    assert (made.peers[A].num_under_way, made.peers[B].num_under_way) == (1, 0)


def test_whatever_becomes_of_microbatches_nothing_stays_on_the_accounts() -> None:
    rng = random.Random(0)
    made = router(A, B, C)
    under_way: list[PeerCharge] = []
    for _ in range(5000):
        if rng.random() < 0.5 or not under_way:
            under_way.append(made.choose(rng.randint(1, 9), now_s=0.0))
            continue
        charge = rng.choice(under_way)
        match rng.randrange(5):
            case 0:
                made.note_forward(charge, busy_s=rng.choice([None, rng.uniform(0.1, 1.0)]))
                continue
            case 1:
                made.refund(charge)
            case 2:
                made.release(charge)
            case 3:
                made.settle(charge, busy_s=rng.choice([math.nan, rng.uniform(0.1, 3.0)]), queued=rng.randrange(9))
            case 4:
                made.eject(charge.peer, now_s=0.0)
                made.release(charge)
                made.release(charge)
        under_way.remove(charge)
    for charge in under_way:
        made.release(charge)
    for load in made.peers.values():
        assert (load.left_s, load.num_under_way, load.num_forwards) == (0.0, 0, 0)


# ---------------------------------------------------------------------- accounts


def test_a_refund_is_as_if_it_had_not_been_chosen() -> None:
    made = measured({A: 64.0, B: 32.0})
    made.refund(made.choose(4, now_s=0.0))
    before = {peer: (load.left_s, load.num_microbatches, load.key) for peer, load in made.peers.items()}
    charge = made.choose(4, now_s=0.0)
    for _ in range(2):
        made.refund(charge)
    after = {peer: (load.left_s, load.num_microbatches, load.key) for peer, load in made.peers.items()}
    assert after == before


def test_what_was_measured_is_known() -> None:
    made = router(A)
    charge = made.choose(4, now_s=0.0)
    made.settle(charge, busy_s=0.25, queued=3)
    load = made.peers[A]
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
    assert {made.choose(1, now_s=0.0, avoid=frozenset({A, B})).peer for _ in range(4)} == {A}, "it has less to do"
    assert router(A).choose(1, now_s=0.0, avoid=frozenset({A})).peer == A


def test_an_unmeasured_peer_counts_as_an_average_one() -> None:
    made = measured({A: 50.0, B: 100.0})
    made.set_peers([A, B, C])
    assert made.choose(10, now_s=0.0).expected_s == pytest.approx(10 / 75.0)


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
    """Counts how often any peer is looked up or compared."""

    num_looks = 0

    def __hash__(self) -> int:
        CountedPeer.num_looks += 1
        return super().__hash__()

    def __lt__(self, other: str) -> bool:
        CountedPeer.num_looks += 1
        return super().__lt__(other)


@pytest.mark.parametrize(("num_before", "num_avoided"), [(1, 0), (2000, 0), (2000, 3)])
def test_a_decision_looks_at_few_of_many_peers(num_before: int, num_avoided: int) -> None:
    peers = [PeerId(CountedPeer(f"peer-{number}")) for number in range(1000)]
    made = router(*peers)
    run(made, {peer: 1.0 + 1e-3 * number for number, peer in enumerate(peers)}, num_before)
    avoid = frozenset(peers[:num_avoided])
    CountedPeer.num_looks = 0
    charge = made.choose(4, now_s=0.0, avoid=avoid)
    made.note_forward(charge, busy_s=0.3)
    made.refund(charge)
    made.settle(made.choose(4, now_s=0.0), busy_s=1.0, queued=0)
    made.eject(peers[0], now_s=0.0)
    assert made.has_other_peer(peers[1], now_s=FIRST_EJECTION_S)
    assert CountedPeer.num_looks < 200


def test_equal_accounts_are_chosen_among_evenly() -> None:
    made = router(*(PeerId(f"peer-{number}") for number in range(10)))
    taken: Counter[PeerId] = Counter()
    for _ in range(10_000):
        charge = made.choose(1, now_s=0.0, avoid=frozenset({PeerId("peer-3")}))
        taken[charge.peer] += 1
        made.refund(charge)
    assert len(taken) == 9
    assert set(taken.values()) <= set(range(950, 1280))  # five standard deviations around 1111


def test_ties_are_broken_by_the_seed_alone() -> None:
    def wiring(seed: int) -> list[PeerId]:
        made = router(A, B, C, seed=seed)
        return [made.choose(1, now_s=0.0).peer for _ in range(30)]

    assert wiring(1) == wiring(1)
    assert len({tuple(wiring(seed)) for seed in range(10)}) > 5


# ---------------------------------------------------------------------- bans


def chosen(made: StageRouter, now_s: float, times: int = 20) -> set[PeerId]:
    found = set()
    for _ in range(times):
        charge = made.choose(1, now_s=now_s)
        found.add(charge.peer)
        made.release(charge)
    return found


def test_a_banned_peer_is_chosen_again_when_its_ban_is_over() -> None:
    made = router(A, B)
    assert made.eject(A, now_s=100.0)
    assert chosen(made, 100.0) == chosen(made, 100.0 + FIRST_EJECTION_S - 0.1) == {B}
    assert chosen(made, 100.0 + FIRST_EJECTION_S) == {A, B}


def test_bans_grow_and_end() -> None:
    made, now_s, lengths = router(A, B), 0.0, []
    for _ in range(12):
        assert made.eject(A, now_s=now_s)
        until_s = made.peers[A].ejected_until_s
        assert until_s is not None
        lengths.append(until_s - now_s)
        now_s = until_s
    assert lengths[:4] == [FIRST_EJECTION_S * factor for factor in (1, 2, 4, 8)]
    assert lengths[-1] == LONGEST_EJECTION_S


def test_a_peer_that_finishes_something_is_free_at_once_and_forgiven() -> None:
    made = router(A, B)
    charge = made.charge(A, 1)
    made.eject(A, now_s=0.0)
    made.settle(charge, busy_s=1e-6, queued=0)
    assert A in chosen(made, 1.0)
    made.eject(A, now_s=2.0)
    assert made.peers[A].ejected_until_s == 2.0 + FIRST_EJECTION_S


def test_many_calls_that_fail_together_are_one_failure() -> None:
    made = router(A, B)
    assert [made.eject(A, now_s=1.0) for _ in range(64)] == [True] + [False] * 63
    assert made.peers[A].num_failures == 1


def test_bans_are_ignored_when_all_are_banned() -> None:
    made = router(A, B)
    made.eject(A, now_s=0.0)
    made.eject(B, now_s=0.0)
    assert chosen(made, 1.0) == {A, B}


def test_a_banned_peer_comes_before_one_that_shall_be_avoided() -> None:
    made = router(A, B)
    made.eject(B, now_s=0.0)
    assert made.choose(1, now_s=1.0, avoid=frozenset({A})).peer == B


def test_who_is_readmitted_is_tried_next_and_not_flooded() -> None:
    made = measured({A: 1.0, B: 1.0, C: 100.0})
    made.eject(A, now_s=0.0)
    assert {made.choose(1, now_s=1.0).peer for _ in range(10)} == {C}
    found = [made.choose(1, now_s=FIRST_EJECTION_S).peer for _ in range(10)]
    assert found == [A, *[C] * 9]


def test_nobody_who_left_is_banned_or_charged() -> None:
    made = router(A)
    assert not made.eject(B, now_s=0.0)
    assert made.charge(B, 10).expected_s == 0.0
    assert not made.has_other_peer(A, now_s=0.0)
    made.set_peers([A, B])
    assert made.has_other_peer(A, now_s=0.0)
    made.eject(B, now_s=0.0)
    assert not made.has_other_peer(A, now_s=1.0)


def test_few_false_reports_move_no_median() -> None:
    made = router(A, B, C)
    assert made.median_rate() is None
    for peer, busy_s in ((A, 2.0), (B, 1e-6), (C, 4.0)):
        made.settle(made.charge(peer, 4), busy_s=busy_s, queued=1000 if peer == B else 1)
    assert made.median_rate() == 2.0
    assert made.median_queued() == 1
