"""The members of the next step: a record removes peers but never a stage's last verified copy; and the voters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from lightning_swarm.coordinator.membership.rosters import MAX_VOTERS, alone_in, choose_voters, next_rosters
from lightning_swarm.network import PeerId
from lightning_swarm.peer.discovery import ServerAnnouncement
from lightning_swarm.peer.manifest import RunSpec, make_manifest
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Candidate
from tests.unit.conftest import MakeSwarm
from tests.unit.peer.test_config import config
from tests.unit.swarm import rows


def members(names: str) -> list[Member]:
    return [Member(peer_id=PeerId(name), boot_id=1) for name in names]


def peers(names: str) -> list[PeerId]:
    return [PeerId(name) for name in names]


def newcomer(name: str, stage_index: int) -> Candidate:
    return Candidate(member=members(name)[0], stage_index=stage_index, addresses=[])


def after(*rosters: str, gone: str = "", leaving: str = "", newcomers: dict[str, int] | None = None) -> list[str]:
    """Return the next rosters, as words."""
    found = next_rosters(
        [members(roster) for roster in rosters],
        gone=peers(gone),
        leaving=peers(leaving),
        newcomers=[newcomer(name, index) for name, index in (newcomers or {}).items()],
    )
    return ["".join(member.peer_id for member in roster) for roster in found]


def test_nothing_changes_when_nobody_comes_or_goes() -> None:
    assert after("ab", "c") == ["ab", "c"]


def test_newcomers_stand_behind_the_members_of_their_stage() -> None:
    assert after("ba", "c", newcomers={"y": 1, "x": 0, "z": 1}) == ["bax", "cyz"]


def test_who_leaves_goes_where_another_stays() -> None:
    assert after("ab", "c", leaving="a") == ["b", "c"]


def test_a_last_copy_waits() -> None:
    assert after("ab", "c", leaving="c") == ["ab", "c"]


def test_a_newcomer_lets_nobody_go_before_it_has_applied_a_record() -> None:
    assert after("ab", "c", leaving="c", newcomers={"x": 1}) == ["ab", "cx"]
    assert after("ab", "cx", leaving="c") == ["ab", "x"]


def test_of_two_that_leave_a_stage_the_first_to_ask_goes() -> None:
    assert after("ab", "c", leaving="ba") == ["a", "c"]
    assert after("ab", "c", leaving="ab") == ["b", "c"]


def test_who_is_gone_saves_no_copy() -> None:
    assert after("ab", "c", gone="b", leaving="a") == ["a", "c"]


def test_who_holds_several_stages_leaves_all_of_them_or_none() -> None:
    assert after("ab", "a", leaving="a") == ["ab", "a"]
    assert after("ab", "ac", leaving="a") == ["b", "c"]


def test_who_asked_and_is_gone_or_was_never_there_changes_nothing() -> None:
    assert after("ab", "c", gone="a", leaving="az") == ["b", "c"]


def test_a_stage_whose_members_are_all_gone_has_only_newcomers() -> None:
    assert after("ab", "c", gone="c", newcomers={"x": 1}) == ["ab", "x"]
    assert after("ab", "c", gone="c") == ["ab", ""]


def test_alone_in_names_the_stages_that_hold_somebody_back() -> None:
    rosters = [members("ab"), members("ac"), members("a")]
    assert alone_in(rosters, PeerId("a"), peers("abc")) == [2]
    assert alone_in(rosters, PeerId("a"), peers("ac")) == [0, 2]
    assert alone_in(rosters, PeerId("b"), peers("abc")) == []


def test_whoever_comes_and_goes_each_stage_keeps_who_need_not_be_gone() -> None:
    """The rules, in a second and direct implementation, for a thousand random swarms."""
    rng = random.Random(0)
    held_back = 0
    for _ in range(1000):
        names = "abcdefg"[: rng.randint(1, 7)]
        rosters = ["".join(rng.sample(names, rng.randint(1, len(names)))) for _ in range(rng.randint(1, 3))]
        gone = rng.sample(names, rng.randint(0, len(names) // 2))
        leaving = rng.sample(names, rng.randint(0, len(names)))
        found = after(*rosters, gone="".join(gone), leaving="".join(leaving), newcomers={"x": 0})
        assert found[0].endswith("x")
        stayed = set("".join(found)) - {"x"}
        for before, now in zip(rosters, found, strict=True):
            alive = [name for name in before if name not in gone]
            assert [name for name in now if name != "x"] == [name for name in alive if name in stayed]
            assert (set(now) - {"x"}) or not alive, "somebody was there, and the record let all go"
        assert not stayed & set(gone)
        assert stayed | set(gone) | set(leaving) >= set("".join(rosters)), "who neither leaves nor is gone stays"
        for name in (set(leaving) & stayed) - set(gone):
            held_back += 1
            others = [set(roster) & (stayed - {name}) for roster in rosters if name in roster]
            assert not all(others), f"{name} could have gone"
    assert held_back > 100


def test_the_order_of_rosters_does_not_depend_on_who_leaves_first() -> None:
    found = {tuple(after("abc", "abc", leaving="".join(order))) for order in itertools.permutations("ab")}
    assert found == {("c", "c")}


# ---------------------------------------------------------------------- who votes


def voters(*rosters: str, trainers: str = "", before: str = "a", hosts: Mapping[str, str] | None = None) -> str:
    machines = {PeerId(peer): host for peer, host in (hosts or {}).items()}
    held = [members(roster) for roster in (*rosters, trainers) if roster]
    on_trainers = [False] * len(rosters) + [True] * bool(trainers)
    chosen = choose_voters(held, on_trainers, members(before), machines)
    return "".join(member.peer_id for member in chosen)


def test_an_odd_number_votes() -> None:
    assert [len(voters("abcdefghij"[:n])) for n in range(1, 11)] == [1, 1, 3, 3, 5, 5, 7, 7, 7, 7]
    assert MAX_VOTERS == 7


def test_voters_stay_while_they_are_there() -> None:
    assert voters("abc", "de", before="ecd") == "ecdab"
    assert voters("ab", before="ba") == "b"
    assert voters("bc", "de", before="abc") == "bcd"


def test_a_restarted_voter_has_no_vote() -> None:
    old = Member(peer_id=PeerId("a"), boot_id=0)
    assert choose_voters([members("ab")], [False], [old], {}) == members("a")[:1]
    assert old not in choose_voters([members("ab")], [False], [old], {})


def test_trainers_vote_where_nothing_is_cut_only() -> None:
    assert voters("ab", trainers="cde") == "a"
    assert voters(trainers="cde", before="d") == "dce"


def test_votes_go_to_different_hosts_first() -> None:
    hosts = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "z"}
    assert voters("abc", "de", hosts=hosts) == "adebc"
    assert voters("abcd", hosts=hosts) == "adb"
    assert voters("abc", hosts=hosts) == "abc"


def test_of_the_members_keepers_vote_where_there_are_keepers() -> None:
    def chosen(*rosters: str, keepers: str, before: str = "") -> str:
        held = [members(roster) for roster in rosters]
        found = choose_voters(held, [False] * len(held), members(before), {}, [PeerId(name) for name in keepers])
        return "".join(member.peer_id for member in found)

    assert chosen("abc", "de", keepers="bde") == "bde"
    assert chosen("abc", "de", keepers="bdez", before="ea") == "ebd"
    assert chosen("abc", "de", keepers="be", before="e") == "e"
    assert chosen("abc", "de", keepers="z", before="a") == ""


def test_a_run_begins_with_votes_on_different_hosts(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", admit=False)
    spec = RunSpec(
        ranges=swarm.ranges,
        num_servers=4,
        num_trainers=1,
        seed=0,
        gradient_clip_norm=None,
        gradient_clip_value=None,
        first_step=0,
        selection=swarm.manifest.selection,
        max_steps=None,
        total_steps=None,
    )
    announced = {
        PeerId(name): ServerAnnouncement(boot_id=0, addresses=[f"/dns4/{host}/tcp/1/p2p/{name}"])
        for name, host in zip("abcd", "xxxy", strict=True)
    }
    manifest = make_manifest(spec, config(), swarm._model, members("a")[0], members("abcd"), [], announced)
    assert manifest.voters == members("adb")


def test_a_record_names_voters_on_different_hosts(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a b", "c d")
    swarm.servers[PeerId("d")]._transport.address = "/ip4/10.0.0.2/tcp/1/p2p/d"  # type: ignore[attr-defined]
    record = swarm.run(swarm.step(rows(1)))
    assert [voter.peer_id for voter in record.next_voters or []] == ["a", "d", "b"]
