"""Events are logged, counted and reported once; a stage without servers is waited for."""

import logging
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_swarm.core.errors import StageLost, SwarmError, Unreachable
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import events as events_module
from lightning_swarm.protocol.events import Event, EventLog, OutageWait
from lightning_swarm.protocol.messages.reports import EventKind


def test_what_happens_often_is_said_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            events.note("retry", peer="b", stage=1, step=7, reason="it did not answer")
        events.note("retry", peer="b", stage=1, step=8, reason="it did not answer")
    assert [record.getMessage() for record in caplog.records] == [
        "retry: step 7, stage 1, b: it did not answer",
        "retry: step 8, stage 1, b: it did not answer",
    ]
    assert events.counts == {"retry": 1001}
    assert len(events.newest) == 2


def test_a_person_reads_a_short_line_and_all_of_it_where_everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    peer = "12D3KooWM7CaTpaYCfDNfo8mBoJC6tJUtsUAnUqmRnzhZ6errLTo"
    reason = (
        f"Cannot open a stream to {peer}: failed to dial: failed to dial {peer}: all dials failed\n  * [/a] refused."
    )
    with caplog.at_level(logging.DEBUG):
        EventLog().note("gone", peer=peer, step=3, reason=reason)
    assert [record.getMessage() for record in caplog.records] == [
        "gone: step 3, errLTo: refused.",
        f"In full: gone: step 3, {peer}: {reason}".replace("\n", " "),  # a single line, for any text of a peer
    ]


def test_it_is_a_warning_where_somebody_may_want_to_do_something(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    with caplog.at_level(logging.INFO):
        events.note("gone", peer="b")
        events.note("joined", peer="b")
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.INFO]
    assert events.newest[-1] == Event("joined", "b")
    assert str(Event("pause")) == "pause"


def test_a_long_run_keeps_the_newest() -> None:
    events = EventLog()
    for step in range(10_000):
        events.note("replay", step=step)
    assert [event.step for event in events.newest][-1] == 9_999
    assert len(events.newest) == 256
    assert events.counts["replay"] == 10_000


def test_what_others_counted_is_taken_once_however_often_and_late_they_say_it() -> None:
    lead, b = EventLog(), EventLog()
    lead.note("strike", peer="b")
    b.note("retry", peer="c")
    early = b.report()
    b.note("retry", peer="c")
    b.note("ban", peer="c")
    lead.learn({PeerId("b"): b.report()})
    lead.learn({PeerId("b"): early, PeerId("lead"): lead.report()})
    assert lead.drain() == {"strike": 1, "retry": 2, "ban": 1}
    lead.learn({PeerId("b"): b.report()})
    assert not lead.drain()
    b.note("retry", peer="c")
    lead.learn({PeerId("b"): b.report()})
    assert lead.drain() == {"retry": 1}


def test_a_peer_that_was_started_again_counts_from_nothing() -> None:
    lead, before, now = EventLog(), EventLog(), EventLog()
    for _ in range(3):
        before.note("retry")
    lead.learn({PeerId("b"): before.report()})
    assert lead.drain() == {"retry": 3}
    now.note("retry")
    lead.learn({PeerId("b"): now.report()})
    assert lead.drain() == {"retry": 1}


def test_of_many_peers_that_come_and_go_all_is_counted_and_not_all_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_MAX_LOGS", 10)
    lead, stays, back = EventLog(), EventLog(), EventLog()
    found = Counter[EventKind]()
    for i in range(100):
        reports = {PeerId("stays"): stays}
        if i in (40, 55):  # one of the forgotten, in between
            reports[PeerId("back")] = back
        else:
            reports[PeerId(f"peer-{i}")] = EventLog()
        for log in reports.values():
            log.note("retry")
        lead.learn({peer: log.report() for peer, log in reports.items()})
        found += lead.drain()
    assert found == {"retry": 200}
    assert len(lead.known_counts(PeerId("lead"))) == 11
    assert len(lead._drained) == 20


def test_who_coordinates_passes_on_what_members_say() -> None:
    events, b = EventLog(), EventLog()
    b.note("ban", peer="c")
    events.note("gone", peer="c")
    events.learn({PeerId("b"): b.report(), PeerId("c"): EventLog().report()})
    events.keep_only([PeerId("b")])
    assert events.known_counts(PeerId("a")) == {PeerId("a"): events.report(), PeerId("b"): b.report()}
    assert events.counts == {"gone": 1}


def test_what_others_say_is_kept_once_and_not_counted() -> None:
    events = EventLog()
    events.note("gone", peer="b", step=3)
    events.log_only("left", peer="b", step=4)  # already known from the record of step 3
    events.log_only("joined", peer="c", stage=1, step=4)
    events.note("joined", peer="c", stage=1, step=4)  # this peer is the coordinator
    events.log_only("joined", peer="b", stage=0, step=6)
    events.log_only("left", peer="b", step=9)
    events.log_only("convicted", peer="b", step=9)  # no change of membership
    events.log_only("went_back", step=9)
    assert [(event.kind, event.peer, event.step) for event in events.newest] == [
        ("gone", "b", 3),
        ("joined", "c", 4),
        ("joined", "b", 6),
        ("left", "b", 9),
        ("convicted", "b", 9),
        ("went_back", None, 9),
    ]
    assert events.counts == {"gone": 1, "joined": 1}


def test_each_event_knows_when_it_was_noted() -> None:
    events = EventLog()
    before = time.time()
    events.note("pause", step=3)
    assert before <= events.newest[0].unix_time_s <= time.time()


def test_two_threads_note_and_read() -> None:
    """A loop's thread and a trainer's thread, which switch constantly."""
    events = EventLog()
    found = Counter[EventKind]()
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as other:
            noting = other.submit(lambda: [events.note("retry", step=step) for step in range(3000)])
            for step in range(3000):
                events.note("retry", step=-step)
                found += events.drain()
            noting.result()
    finally:
        sys.setswitchinterval(switch_s)
    found += events.drain()
    assert found == {"retry": 6000}


B, C = PeerId("b"), PeerId("c")
ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/a"


def keep(wait: OutageWait, now_s: float, gone: dict[PeerId, SwarmError] | None = None) -> None:
    wait.keep(1, gone or {B: Unreachable("it is silent")}, step=7, address=ADDRESS, now_s=now_s)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lightning_swarm.protocol.events"]


def test_one_line_a_minute_says_what_is_missing_and_how_to_join(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    wait = OutageWait(events, stage_timeout=3600.0)
    for now_s in range(0, 300, 5):
        keep(wait, float(now_s))
    assert len(lines(caplog)) == 5
    assert lines(caplog)[2] == (
        "Step 7 waits for stage 1: none of its servers answers. b was lost last, 120 s ago (it is silent). The run "
        f"goes on as soon as one of b answers, or another server joins with `lightning-swarm join {ADDRESS}`. "
        "Otherwise it ends in 3480 s."
    )
    assert [(event.kind, event.stage, event.step) for event in events.newest] == [("pause", 1, 7)]


def test_it_names_who_was_there_last(caplog: pytest.LogCaptureFixture) -> None:
    wait = OutageWait(EventLog(), stage_timeout=3600.0)
    keep(wait, 0.0)
    keep(wait, 61.0, {B: Unreachable("it is silent"), C: Unreachable("it went")})
    assert "c was lost last, 0 s ago (it went)" in lines(caplog)[-1]
    assert "one of b, c answers" in lines(caplog)[-1]


def test_when_somebody_is_back_the_next_time_is_another_one(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    wait = OutageWait(events, stage_timeout=100.0)
    keep(wait, 0.0)
    wait.stage_found(step=7)
    wait.stage_found(step=8)
    keep(wait, 150.0)
    assert events.counts == {"pause": 2, "resume": 1}
    assert "Otherwise it ends in 100 s." in lines(caplog)[-1]


def test_it_ends() -> None:
    wait = OutageWait(EventLog(), stage_timeout=100.0)
    keep(wait, 0.0)
    keep(wait, 99.0)
    with pytest.raises(StageLost, match=r"`Limits.stage_timeout` = 100 s; b was lost last: it is silent"):
        keep(wait, 100.0)
