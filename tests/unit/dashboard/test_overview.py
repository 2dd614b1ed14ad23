"""Overviews and their events, from reports of runs and served models."""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from lightning_swarm.core.errors import Unreachable
from lightning_swarm.dashboard.changes import MAX_EVENTS, MAX_OF_SOURCE
from lightning_swarm.dashboard.overview import MAX_BOXES_IN_ALL, Overview
from lightning_swarm.dashboard.watch import Board, watch
from lightning_swarm.monitor.swarm_report import ObservedNumber, ObservedPeer, SwarmReport
from lightning_swarm.network.addresses import Address
from lightning_swarm.protocol.messages.reports import MAX_LOGGED
from tests.unit.dashboard.example import ADDRESS, PROBLEM, START_S, model_report, name, overview, peer, report


def events(*reports: SwarmReport) -> list[str]:
    board = Board(ADDRESS)
    for second, each in enumerate(reports):
        found = board.add(each, START_S + second)
    return [event.text for event in found.events]


def silent(number: int) -> ObservedPeer:
    return peer(number, problem=PROBLEM, stages=(), coordinator=False, lead=False, step=None)


def test_the_example_has_each_number_and_event() -> None:
    found = overview()
    assert (found.kind, found.name, found.numbers["peers"], found.numbers["silent_peers"]) == ("run", "tiny-gpt", 9, 1)
    assert found.numbers["steps_per_minute"] == pytest.approx(60 * 9 / 40, rel=0.1)
    # Of four stages, the median is the mean of the two in the middle.
    rates = sorted(stage.rate or 0.0 for stage in found.stages)
    assert found.numbers["samples_per_second"] == pytest.approx((rates[1] + rates[2]) / 2)
    assert [stage.num_peers for stage in found.stages] == [2, 2, 2, 2]
    assert [event.kind for event in found.events] == ["joined", "joined", "moved", "coordinator", "silent"]
    assert found.events[2].text == "rV8hZu moved from stage 1 to stage 2"
    assert found.events[3].text == "Lz9eHs coordinates now, in place of Sow8nd"
    assert found.events[4].resumed_s is not None
    assert 20 <= found.events[4].resumed_s <= 26  # it stood still for 20 s, and a step takes 4.4 s
    assert found.curves.series.keys() == found.numbers.keys()
    (gone,) = (one for one in found.report.peers if isinstance(one, ObservedPeer) and one.problem)
    assert gone.stages == (2,)  # its last known one
    assert found.join == (f"lightning-swarm join {ADDRESS} --invite swarm.invite train.py",)


def test_each_change_of_a_peer_is_one_event() -> None:
    first, second, waits = peer(0), peer(1), peer(2, stages=())
    assert events(report([first, second]), report([first, second])) == []
    assert events(report([first]), report([first, second])) == ["kT2xPq at 203.0.113.8:31337 joined stage 1"]
    assert events(report([first, waits]), report([first, peer(2)])) == ["u7RmVa at 203.0.113.9:31337 joined stage 2"]
    assert events(report([first, second]), report([first])) == ["kT2xPq left stage 1"]
    one_gone = [report([first, second]), report([first, silent(1)]), report([first, silent(1)])]
    assert events(*one_gone) == ["kT2xPq at 203.0.113.8:31337 does not answer"]
    assert events(*one_gone, report([first]))[1:] == ["kT2xPq is no longer listed"]
    assert events(*one_gone, report([first, second]))[1:] == ["kT2xPq at 203.0.113.8:31337 answers, stage 1"]
    assert events(*(report([first], step) for step in (9, None, 7))) == ["The run went back from step 9 to step 7"]
    crowd = [peer(number) for number in range(1, 500)]
    assert events(report([first]), report([first, *crowd])) == ["499 peers joined"]


def test_a_coordinator_that_dies_is_replaced_by_an_event_although_surveys_in_between_have_none() -> None:
    before = report([peer(0), peer(1)])
    between = report([silent(0), peer(1)], step=None)
    after = report([silent(0), peer(1, coordinator=True)], step=101)
    board = Board(ADDRESS)
    found = [board.add(each, START_S + 2 * second) for second, each in enumerate((before, between, between, after))]
    assert [event.kind for event in found[-1].events] == ["silent", "coordinator"]
    assert found[-1].events[0].resumed_s == 6.0
    assert found[1].numbers["step"] is None
    assert found[1].coordinator is None


def test_events_rates_and_losses_of_a_run_that_always_changes_are_bounded() -> None:
    board = Board(ADDRESS)
    for second in range(500):
        found = board.add(report([peer(0), peer(1 + second)], step=5), START_S + second)
    assert len(found.events) == MAX_EVENTS
    sizes = len(board._rates), len(board._log._losses)
    assert sizes == (2, MAX_EVENTS)


def test_peers_that_change_in_each_survey_displace_no_other_events() -> None:
    board = Board(ADDRESS)
    board.add(report([peer(0)]), START_S)
    for second in range(300):
        restless = peer(2, stages=tuple(range(second % 2, 1024, 2)))
        crowd = [peer(number) for number in range(10, 20) if second % 2]
        found = board.add(report([peer(0), peer(1), restless, *crowd], step=9 - second % 2), START_S + 1 + second)
    kinds = Counter(event.kind for event in found.events)
    assert kinds == {"moved": MAX_OF_SOURCE, "back": MAX_OF_SOURCE, "left": MAX_OF_SOURCE, "joined": 1 + MAX_OF_SOURCE}
    assert found.events[0].text == "kT2xPq at 203.0.113.8:31337 joined stage 1"
    assert found.events[-1].at_s == found.at_s
    assert "u7RmVa moved from 512 stages to 512 stages" in {event.text for event in found.events}


def test_a_stage_of_thousands_is_sent_as_a_few_hundred_with_those_that_need_attention() -> None:
    peers = [peer(number, stages=(number % 4,)) for number in range(10_000)]
    before = Board(ADDRESS)
    before.add(report(peers), START_S)
    peers[9_000] = silent(9_000)
    found = before.add(report(peers), START_S + 1)
    shown = found.shown()
    assert len(shown.report.peers) <= MAX_BOXES_IN_ALL
    assert sum(stage.num_peers for stage in shown.stages) == 9_999
    assert name(9_000) in {one.peer_id for one in shown.report.peers}
    assert len(zlib.compress(msgspec.json.encode(shown))) < 100_000


def test_a_served_model_has_its_servers_texts_and_tokens() -> None:
    board = Board(ADDRESS)
    board.add(model_report(), START_S)
    report = model_report()
    found = board.add(replace(report, servers=report.servers[:2]), START_S + 1)
    assert (found.kind, "step" in found.numbers, found.numbers["peers"]) == ("model", False, 2)
    assert [(stage.num_peers, stage.load) for stage in found.stages] == [(1, 3), (1, 3), (1, 3), (0, 0)]
    assert [event.text for event in found.events] == ["u7RmVa left stages 2 to 3"]
    assert found.numbers["tokens_per_second"] == pytest.approx((2 * 41.5 + 38.5) / 4)
    assert json.loads(msgspec.json.encode(found))["report"]["servers"][0]["tokens_per_s"] == 41.5


def number(name: str, step: int, value: float, age_s: float = 0.0) -> ObservedNumber:
    return ObservedNumber(name=name, value=value, step=step, age_s=age_s)


def test_logged_numbers_become_curves_over_steps_with_times_and_end_where_the_run_goes_back() -> None:
    board = Board(ADDRESS)
    for second, logged in enumerate([
        (number("train_loss", 3, 1.5), number("val_loss", 2, 2.0, age_s=20.0)),
        (number("train_loss", 3, 9.9), number("val_loss", 2, 2.0, age_s=21.0)),  # nothing new
        (),  # the lead is gone
        (number("train_loss", 7, 0.5),),
        (number("train_loss", 7, 0.5, age_s=1.0), number("val_loss", 8, 0.25)),
    ]):  # fmt: skip
        found = board.add(report([peer(0)], logged=logged), START_S + second)
    assert found.logged.begins == (2.0, 3.0, 7.0, 8.0)
    assert found.logged.series == {"val_loss": (2.0, None, None, 0.25), "train_loss": (None, 1.5, 0.5, None)}
    assert found.logged_at_s == tuple(START_S + second for second in (-20, 0, 3, 4))
    found = board.add(report([peer(0)], logged=(number("train_loss", 4, 0.75),)), START_S + 5)
    assert found.logged.begins == (2.0, 3.0, 4.0)
    assert found.logged.series["train_loss"] == (None, 1.5, 0.75)


def test_a_lead_that_renames_its_numbers_and_counts_far_fills_no_memory() -> None:
    board = Board(ADDRESS)
    for second in range(300):
        names = [f"{second} {place}" for place in range(MAX_LOGGED)]
        logged = tuple(number(name, (1 << 64) - 1 - second % 2, 1e308 * (-1) ** second) for name in ["loss", *names])
        found = board.add(report([peer(0)], logged=logged[:MAX_LOGGED]), START_S + second)
    assert len(found.logged.series) <= MAX_LOGGED
    assert len(board._logged_steps) == MAX_LOGGED
    assert len(found.logged.begins) == 1
    assert json.loads(msgspec.json.encode(found))["logged"]["series"]["loss"]


def test_surveys_go_on_by_another_peer_if_the_asked_one_is_gone() -> None:
    address = Address.parse(ADDRESS)
    peers = [replace(peer(0), place="203.0.113.7:31337", peer_id=address.peer_id), peer(1), silent(2)]
    asked: list[str] = []
    published: list[Overview] = []
    stopped = threading.Event()

    def survey(at: Address) -> Iterator[Any]:
        asked.append(str(at))
        if len(asked) in (1, 3):
            yield report(peers)
        if len(asked) < 3:
            raise Unreachable("It is gone.")
        stopped.set()

    def opened(at: Address) -> Any:
        return survey(at)

    watch(address, opened, published.append, stopped, every_s=0.001)
    assert asked == [ADDRESS, ADDRESS, f"203.0.113.8:31337/{name(1)}"]
    assert [found.problem for found in published] == [None, "It is gone.", "It is gone.", None]
    assert published[1].report == published[0].report
    assert f" {asked[-1]} " in published[-1].join[0]
    asked.clear()
    with pytest.raises(Unreachable):  # the error of a command with a wrong address
        watch(address, lambda _: broken(), published.append, threading.Event(), every_s=0.001)


def test_after_an_outage_all_known_peers_are_asked_again() -> None:
    asked: list[str] = []
    published: list[Overview] = []
    stopped = threading.Event()

    def survey(at: Address) -> Any:
        asked.append(str(at))
        if len(asked) in (1, 5):
            yield report([peer(1), peer(2)])
        if len(asked) == 5:
            stopped.set()
        raise Unreachable("The network is down.")

    watch(Address.parse(ADDRESS), survey, published.append, stopped, every_s=0.001)
    others = [f"203.0.113.{7 + number}:31337/{name(number)}" for number in (1, 2)]
    assert asked == [ADDRESS, *others, ADDRESS, others[0]]  # the first peer stays dead


def broken() -> Any:
    raise Unreachable("It was never there.")
    yield
