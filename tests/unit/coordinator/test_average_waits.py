"""The coordinator's wait for a server that does not average, while other servers report that it sent them no part."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import pytest

from lightning_swarm.coordinator.server_calls import _AverageWaits
from lightning_swarm.coordinator.step.replay_plan import choose_blamed
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import DeadlineExceeded
from lightning_swarm.network import PeerId

PATIENCE_S, LONGEST_S = 4.0, 20.0
STAGES = ["a", "b", "c"], ["d", "e"], ["own", "f"]


def ended_s(loop: VirtualLoop, reports: Mapping[str, tuple[float, str]]) -> dict[str, float]:
    """Return when the wait for each silent server ends, if the rest report at a time which servers they missed."""
    rosters = [[PeerId(peer) for peer in stage] for stage in STAGES]
    choose = partial(choose_blamed, rosters, (), spared=PeerId("own"), has_strangers=True)
    ended: dict[str, float] = {}

    async def ask(waits: _AverageWaits, peer: str) -> None:
        try:
            async with waits.until_blamed(PeerId(peer)):
                await asyncio.sleep(reports[peer][0] if peer in reports else LONGEST_S)
        except DeadlineExceeded:
            assert peer not in reports
        if peer in reports:
            waits.note(PeerId(peer), [PeerId(one) for one in reports[peer][1]])
        else:
            ended[peer] = loop.time() - begin_s

    async def ask_all() -> None:
        waits = _AverageWaits(PATIENCE_S, lambda unreached: choose(unreached))
        await asyncio.gather(*(ask(waits, peer) for stage in STAGES for peer in stage))
        assert waits.has_failed == any(missed for _, missed in reports.values())

    begin_s = loop.time()
    loop.run_until_complete(ask_all())
    return ended


FINE = dict.fromkeys("abcdef", (0.1, "")) | {"own": (0.1, "")}


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({"a": (4.5, "c"), "b": (5.0, "c"), "c": None}, {"c": 5.0}),
        ({"a": (1.0, "c"), "b": (1.0, "c"), "c": None}, {"c": PATIENCE_S}),
        ({"a": (4.5, "c"), "c": None}, {"c": LONGEST_S}),  # `a` may be the malicious one
        ({"a": (4.5, "d"), "b": (4.5, "d"), "d": None}, {"d": LONGEST_S}),  # they share no stage
        ({"d": (4.5, "e"), "e": None}, {"e": 4.5}),  # no other server could report it
        ({"own": (4.5, "f"), "f": None}, {"f": 4.5}),
        ({"a": (4.5, "c"), "b": (5.0, "c"), "c": None, "d": (6.0, "e"), "e": None}, {"c": 5.0, "e": 6.0}),
        ({"c": None}, {"c": LONGEST_S}),
    ],
)
def test_a_wait_ends_when_enough_others_report_the_server(
    loop: VirtualLoop, reports: dict[str, tuple[float, str] | None], expected: dict[str, float]
) -> None:
    given = {peer: report for peer, report in {**FINE, **reports}.items() if report is not None}
    assert ended_s(loop, given) == pytest.approx(expected)
