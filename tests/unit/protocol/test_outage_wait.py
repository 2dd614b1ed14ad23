"""A stage of which nobody is there: who waits says so once a minute, and not for ever."""

from __future__ import annotations

import pytest

from lightning_swarm.core.errors import StageLost, SwarmError, Unreachable
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.events import EventLog, OutageWait

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
