"""Choice of the replicas whose bits a stage keeps, as a pure function."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from msgspec import UNSET

from lightning_swarm.coordinator.step.reference import choose_excluded, replicas_differ
from lightning_swarm.coordinator.step.replay_plan import ServerLedger
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import StageLedger

A, B, C, D, E = map(PeerId, "abcde")
Stage = dict[Member, ServerLedger]


def stage(tied: Mapping[str, int] | None = None, /, **hashes: int | None) -> Stage:
    """Return a stage's replicas, the oldest first, with the hashes of their weights; `tied` has the hashes of "w"."""
    found: Stage = {}
    for peer, own in hashes.items():
        report = StageLedger(
            stage_index=0,
            held=[],
            origins=[],
            touched=b"",
            version_hash=own,
            tied=UNSET if tied is None else {"w": tied[peer]},
            tensors={"x": own or 0, "y": 0},
        )
        found[Member(peer_id=PeerId(peer), boot_id=0)] = ServerLedger.of(report)
    return found


def left_out(*stages: Stage, guests: str = "", right: str = "", tied: bool = False) -> str:
    """Return the names of the excluded servers."""
    found = choose_excluded(list(stages), guests=list(guests), trusted=list(right), tied=tied)  # type: ignore[arg-type]
    assert bool(found) == replicas_differ(list(stages), tied=tied)
    return "".join(sorted(found))


def test_the_largest_group_stays() -> None:
    assert left_out(stage(a=1, b=1, c=1)) == ""
    assert left_out(stage(a=1, b=1, c=2)) == "c"
    assert left_out(stage(a=1, b=2, c=2)) == "a"
    assert left_out(stage(a=1, b=2, c=3, d=3, e=4)) == "abe", "though it is no majority"
    text = str(choose_excluded([stage(a=1, b=2, c=2)])[A])
    assert text.startswith("stage 0: the weights, buffers and optimizer state of a differ in 'x' from those of 2 of 3 ")


def test_of_equally_large_groups_that_of_the_oldest_server_stays() -> None:
    assert left_out(stage(a=1, b=2)) == "b"
    assert left_out(stage(b=1, a=2)) == "a"
    assert left_out(stage(a=1, b=2, c=1, d=2)) == "bd"
    text = str(choose_excluded([stage(a=1, b=2)])[B])
    assert (
        "'x' from those of a, which has been in the stage longest. The largest groups of replicas are equally large"
        in text
    )


def test_a_replica_without_a_hash_is_left_out() -> None:
    assert left_out(stage(a=None, b=1)) == "a"
    assert left_out(stage(a=None, b=None, c=1)) == "ab"
    assert left_out(stage(a=None, b=None)) == "b"
    assert left_out(stage(a=None)) == ""


def test_guests_count_only_where_nobody_else_is() -> None:
    assert left_out(stage(a=1, b=2, c=2), guests="bc") == "bc"
    assert left_out(stage(a=1, b=3, c=2, d=2, e=2), guests="cde") == "bcde"
    assert left_out(stage(b=1, c=2, d=2), guests="bcd") == "b"
    assert left_out(stage(c=1, d=2), guests="cd") == "d"
    assert left_out(stage(a=1, b=2), guests="a") == "a", "it moved from another stage"


def test_where_one_is_right_whatever_most_have_the_others_are_left_out() -> None:
    assert left_out(stage(a=1, b=2, c=2), right="a") == "bc"
    assert left_out(stage(a=1, b=2), right="b") == "a"
    assert left_out(stage(b=1, c=2, d=2), right="a") == "b", "it does not hold the stage"
    assert left_out(stage(b=1, c=2, d=2), right="abc") == "cd", "the first that does"
    text = str(choose_excluded([stage(a=1, b=2, c=2)], trusted=[A])[B])
    assert "of a, which this run trusts (1 of 3 replicas agree with it)" in text


def test_one_stage_is_decided_at_a_time_and_ties_last() -> None:
    tie, clear = stage(a=1, b=2), stage(c=1, b=1, a=2)
    assert left_out(tie, clear) == "a", "so that b, alone, stays in the first stage"
    assert left_out(stage(a=1, b=2), stage(b=1, a=2)) == "b"


def test_stages_that_share_weights() -> None:
    assert left_out(stage({"a": 1}, a=5), stage({"b": 1}, b=6), tied=True) == ""
    assert left_out(stage({"a": 1}, a=5), stage({"b": 2}, b=6), tied=True) == "b"
    assert left_out(stage({"a": 1}, a=5), stage({"b": 2, "c": 2}, b=6, c=6), tied=True) == "a"
    assert left_out(stage({"a": 1}, a=5), stage({"b": 2, "c": 2}, b=6, c=6), tied=True, guests="bc") == "a"
    assert left_out(stage({"a": 1}, a=5), stage({"b": 2}, b=6), stage({"c": 2}, c=7), tied=True) == "a"
    assert left_out(stage({"a": 1}, a=5), stage({"b": 2}, b=6), tied=True, right="b") == "a"
    text = str(choose_excluded([stage({"a": 1}, a=5), stage({"b": 2}, b=6)], tied=True)[B])
    assert text.startswith("stage 1: 'w' of b differ from those of stage 0, which shares them and is kept. ")


def test_a_tie_is_for_what_other_stages_confirm() -> None:
    first = stage({"a": 1, "c": 1}, a=5, c=5)
    assert left_out(first, stage({"b": 2, "d": 1}, b=6, d=7), tied=True) == "b"
    assert left_out(first, stage({"b": 1, "d": 1}, b=6, d=7), tied=True) == "d"
    assert left_out(first, stage({"b": 2, "d": 1}, b=6, d=7), tied=False) == "d", "what it reports is its own then"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_servers_report_no_stage_is_emptied_and_guests_outvote_nobody(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        stages = [
            stage(**{peer: rng.choice([1, 1, 1, 2, 3, None]) for peer in rng.sample("abcdefg", rng.randint(1, 6))})
            for _ in range(rng.randint(1, 3))
        ]
        holders = [[member.peer_id for member in one] for one in stages]
        guests = [PeerId(peer) for peer in "abcdefg" if rng.random() < 0.4]
        gone: set[PeerId] = set()
        for _ in range(10):
            there = [{member: one[member] for member in one if member.peer_id not in gone} for one in stages]
            found = choose_excluded(there, guests=guests)
            if not found:
                break
            for peer in found:
                (touched,) = [i for i, one in enumerate(there) if f"stage {i}:" in str(found[peer])]
                old = [one for one in there[touched] if one.peer_id not in guests]
                kept = [one for one in there[touched] if one.peer_id not in found]
                assert kept
                assert not old or any(one in kept for one in old), "a guest is not kept in place of all others"
            gone |= found.keys()
        assert not replicas_differ(
            [{m: ledger for m, ledger in one.items() if m.peer_id not in gone} for one in stages], tied=False
        )
        alone = [peers for peers in holders if len(peers) == len({*peers} & gone)]
        assert not alone or len(stages) > 1, "only a server that another stage leaves out can empty one"
