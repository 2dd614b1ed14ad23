"""The lead's messages about peers that join and leave, for each change that a record can contain."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from lightning_swarm.monitor.membership import Membership
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.run import Conviction, Member
from lightning_swarm.protocol.messages.step import Candidate, Departure, Record, Vacancy
from tests.unit.coordinator.test_consensus import record

ID = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"


def member(name: str) -> Member:
    return Member(peer_id=PeerId(name), boot_id=0)


def run(*rosters: str, trainers: str = "a", is_whole: bool = False, tied: Sequence[Sequence[int]] = ()) -> Any:
    """Return a run whose peers have names of one letter."""
    found = [[member(name) for name in roster] for roster in rosters]
    manifest, ties = SimpleNamespace(is_whole=is_whole), SimpleNamespace(groups=lambda: tied)
    return SimpleNamespace(manifest=manifest, ties=ties, rosters=found, trainers=[*trainers], bans=(), invitations=())


def after(*, left: dict[str, int] | None = None, joined: dict[str, int] | None = None, **changes: Any) -> Record:
    absent = changes.pop("absent", "")
    found = record()
    return replace(
        found,
        closing=replace(found.closing, absent=[*absent]),
        left=[Vacancy(member=member(name), stage_index=stage) for name, stage in (left or {}).items()],
        newcomers=[Candidate(member=member(n), stage_index=i, addresses=[]) for n, i in (joined or {}).items()],
        **changes,
    )


def said(begin: Any, *records: Record) -> list[str]:
    membership = Membership(begin, {})
    return [line.text for one in records for line in membership.follow(one, begin)]


def test_a_server_that_joins_dies_or_leaves() -> None:
    begin = run("ab", "cd")
    assert said(begin, after(joined={"x": 1})) == ["Peer x joined: stage 1 now has 3 servers, 5 peers in all"]
    dead = after(left={"c": 1}, absent="c")
    assert said(begin, dead) == ["Peer c died or was cut off: stage 1 has 1 server left, 3 peers in all"]
    assert said(run("ab", "c"), dead) == ["Peer c died or was cut off: stage 1 has no servers left, 2 peers in all"]
    assert said(begin, after(left={"d": 1})) == ["Peer d left: stage 1 has 1 server left, 3 peers in all"]


def test_one_that_moves_or_gives_a_stage_up_is_still_there() -> None:
    moves = after(left={"c": 1}, departures=[Departure(member=member("c"), stage_index=1)])
    assert said(run("ab", "cd"), moves) == ["Peer c left: stage 1 has 1 server left, 3 peers in all"]
    sheds = after(left={"a": 1})
    assert said(run("ab", "ac"), sheds) == ["Peer a left stage 1: stage 1 has 1 server left, 3 peers in all"]


def test_one_that_comes_back_at_once_makes_two_lines() -> None:
    lines = said(run("ab"), after(left={"b": 0}, joined={"b": 0}, absent="b"))
    assert [line.split(":")[0] for line in lines] == ["Peer b died or was cut off", "Peer b joined"]


def test_a_trainer_that_joins_and_goes() -> None:
    begin = run("ab", trainers="a")
    joins = after(enlisted=[PeerId("t")])
    goes = after(retired=[PeerId("t")])
    assert said(begin, joins, goes) == [
        "Peer t joined: 2 trainers, 3 peers in all",
        "Peer t is no longer in the run: 1 trainer, 2 peers in all",
    ]
    both = [after(enlisted=[PeerId("b")]), after(retired=[PeerId("b")])]
    assert [line.split(":")[0] for line in said(begin, *both)] == ["Peer b trains now", "Peer b no longer trains"]


def test_a_trainer_that_dies_with_its_stage_makes_one_line() -> None:
    begin = run("ab", trainers="ab", is_whole=True)
    lines = said(begin, after(left={"b": 0}, absent="b"), after(retired=[PeerId("b")]))
    assert lines == ["Peer b died or was cut off: 1 trainer, 1 peer in all"]


def test_a_convicted_server_did_not_die() -> None:
    convicted = [Conviction(peer=PeerId("b"), reason="its sums are false")]
    (line,) = Membership(run("ab"), {}).follow(after(left={"b": 0}, absent="b", convicted=convicted), run("ab"))
    assert line.text == "Peer b was convicted of false work: stage 0 has 1 server left, 1 peer in all"
    assert line.level == logging.WARNING


def test_a_rollback_names_who_is_lost_and_who_is_new() -> None:
    membership = Membership(run("ab", "c"), {})
    lines = [line.text.split(":")[0] for line in membership.catch_up(run("a", "d"))]
    assert lines == ["Peer b died or was cut off", "Peer c died or was cut off", "Peer d joined"]
    assert membership.catch_up(run("a", "d")) == []


def test_an_address_is_shown_as_people_write_it_and_cannot_steer_a_terminal() -> None:
    member = Member(peer_id=PeerId(ID), boot_id=0)
    addresses = [f"/ip4/127.0.0.1/tcp/1/p2p/{ID}", f"/ip4/203.0.113.8/tcp/31337/p2p/{ID}"]
    joins = replace(record(), newcomers=[Candidate(member=member, stage_index=0, addresses=addresses)])
    assert said(run("a"), joins)[0].startswith("Peer uaGUUR (203.0.113.8:31337) joined: ")
    evil = Member(peer_id=PeerId("\x1b[2Jx"), boot_id=0)
    joins = replace(record(), newcomers=[Candidate(member=evil, stage_index=0, addresses=["\x1b[2J"])])
    (line,) = said(run("a"), joins)
    assert line.isprintable()


def test_a_stage_on_machines_of_several_kinds_is_told_once_and_its_end_too() -> None:
    mixed, one_kind = after(portable=[1]), after()
    became, ended = said(run("ab", "cd"), one_kind, mixed, mixed, one_kind, one_kind)
    assert became.startswith("Stage 1 is on machines of several kinds from step ")
    assert "the optimizer's step takes about three times as long" in became
    assert ended.startswith("Stage 1 is on machines of one kind again from step ")


def test_a_stage_may_be_mixed_by_a_stage_with_which_it_shares_parameters() -> None:
    lines = said(run("ab", "cd", "ef", tied=[[0, 2]]), after(portable=[0, 2]))
    shared = "or a stage with which it shares parameters, is on machines of several kinds from step "
    assert [line.startswith(f"Stage {stage}, {shared}") for stage, line in zip((0, 2), lines, strict=True)] == [
        True
    ] * 2


def test_a_model_that_is_not_cut_has_no_stage_in_its_line() -> None:
    (line,) = said(run("ab", is_whole=True), after(portable=[0]))
    assert line.startswith("The model is on machines of several kinds ")
