"""A server that a record sends to another stage, and events during its move."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from typing_extensions import override

from lightning_swarm.coordinator import commit
from lightning_swarm.coordinator.membership.moves import PlannedMoves
from lightning_swarm.coordinator.rebalancing.balancer import Balancer
from lightning_swarm.coordinator.rebalancing.policy import Move, StageRelease
from lightning_swarm.core import tasks
from lightning_swarm.core.errors import Busy
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.peer import lifecycle
from lightning_swarm.protocol.messages.step import Departure, Record
from lightning_swarm.protocol.rpc import APPLY, TAKE_OVER
from lightning_swarm.server.stage import StageLoad
from tests.unit.conftest import MakeSwarm
from tests.unit.coordinator.membership.test_leaving import A, B, C, Staying, assert_plain, step
from tests.unit.swarm import Swarm


def send(swarm: Swarm, peer: PeerId, stage: int, monkeypatch: Any, *, at: int = 0) -> None:
    """Make a step's record send a server to a stage."""
    calls = 0

    def choose(self: PlannedMoves, gone: Any) -> tuple[list[Departure], list[StageRelease]]:
        nonlocal calls
        calls += 1
        return [Departure(member=swarm.members[peer], stage_index=stage)] if calls == at + 1 else [], []

    monkeypatch.setattr(PlannedMoves, "choose", choose)


async def steps(swarm: Swarm, first: int, last: int, *, pause_s: float = 5.0, among: str = "a") -> list[Record]:
    records = []
    for number in range(first, last):
        records.append(await step(swarm, number, among=among))
        await asyncio.sleep(pause_s)
    return records


def test_a_server_leaves_its_stage_by_one_record_and_enters_the_other_by_a_later_one(
    make_swarm: MakeSwarm, monkeypatch: Any
) -> None:
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)
    send(swarm, B, 1, monkeypatch, at=1)

    async def go() -> None:
        records = await steps(swarm, 0, 6)
        assert [swarm.names_after(record) for record in records[:2]] == [["ab", "c"], ["a", "c"]]
        assert [one.stage_index for record in records for one in record.departures] == [1]
        assert swarm.names_after(records[-1]) == ["a", "cb"]
        assert "Leaving stage 0 of run 'run' for stage 1." in b.said
        assert swarm.servers[B].steps.stages == (1,)
        assert_plain(swarm, *([number] for number in range(6)))

    swarm.run(go())


def test_a_stage_is_not_emptied_whoever_says_so(make_swarm: MakeSwarm, monkeypatch: Any) -> None:
    swarm = make_swarm("a", "c")
    send(swarm, C, 0, monkeypatch)

    async def go() -> None:
        (record,) = await steps(swarm, 0, 1)
        assert swarm.names_after(record) == ["a", "c"]
        assert record.departures == []

    swarm.run(go())


def test_a_mover_that_follows_the_record_that_sent_it_is_at_rest_when_it_has_arrived(
    make_swarm: MakeSwarm, monkeypatch: Any
) -> None:
    """Its donor applies that record late, so the mover downloads the previous state."""
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)
    send(swarm, B, 1, monkeypatch)
    handlers = swarm.network.find(C)._call_handlers
    apply, num_waits, is_late = handlers[APPLY.name], 0, False

    async def late(caller: PeerId, body: bytes) -> bytes:
        nonlocal is_late
        if not is_late:
            is_late = True
            await asyncio.sleep(3 * lifecycle._LINGER_S)
        return await apply(caller, body)

    handlers[APPLY.name] = late
    first_of = tasks.first_of

    async def counted(*waits: Any, **options: Any) -> Any:
        nonlocal num_waits
        num_waits += 1
        assert num_waits < 1000, "it waits for nothing, time after time"
        return await first_of(*waits, **options)

    monkeypatch.setattr(lifecycle, "first_of", counted)

    async def go() -> None:
        records = await steps(swarm, 0, 8)
        assert is_late
        assert swarm.names_after(records[-1]) == ["a", "cb"]
        assert not swarm.servers[B].admission.moves.is_set()
        assert not b.task.done()

    swarm.run(go())


@pytest.mark.parametrize("sheds", [[], [StageRelease(B, 1)]], ids=["moves", "sheds"])
def test_coordination_is_handed_over_by_no_record_but_the_one_it_was_chosen_for(
    make_swarm: MakeSwarm, monkeypatch: Any, sheds: list[StageRelease]
) -> None:
    """The first record is never decided."""
    swarm = make_swarm("a b", "b")
    moves = swarm.coordinator.generation._step_commit._moves
    handed_over: list[None] = []
    monkeypatch.setattr(moves, "_step_aside", lambda: handed_over.append(None))
    planned = [[Move(A, 0, 1)]]
    monkeypatch.setattr(Balancer, "moves", lambda *_, **__: planned.pop() if planned else [])

    async def go() -> None:
        assert moves.choose([]) == ([], [])
        monkeypatch.setattr(Balancer, "releases", lambda *_, **__: sheds)
        await step(swarm, 0, among="a")
        assert handed_over == []

    swarm.run(go())


class Measured(StageLoad):
    """Reports constant work at one rate."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate = rate

    @property
    @override
    def samples_per_s(self) -> float:
        return self._rate

    @override
    def busy_share(self, *, now_s: float) -> float:
        return 1.0


def measure(swarm: Swarm, **rates: float) -> None:
    """Set the rates that servers report, by name."""
    for name, rate in rates.items():
        sums = swarm.servers[PeerId(name)].steps.sums
        for stage in sums.stages.values():
            stage.load = Measured(rate)


def test_where_nobody_takes_over_who_coordinates_stays_and_another_one_moves(make_swarm: MakeSwarm) -> None:
    """The best move is b's, which coordinates: from 12 and 1 to 10 and 3. Moving a would give 2 and 11."""
    swarm = make_swarm("b a", "c")
    asked: list[PeerId] = []
    for name in (A, C):

        async def refuses(caller: PeerId, body: bytes) -> bytes:
            asked.append(caller)
            raise Busy("not now")

        swarm.network.find(name)._call_handlers[TAKE_OVER.name] = refuses
    Staying(swarm, A)
    balance = swarm.coordinator.balancer
    balance._rule, balance._interval_s = "gain", 60.0

    async def go() -> None:
        measure(swarm, a=10.0, b=2.0, c=1.0)
        records: list[Record] = []
        while len(records) < 100 and not (records and records[-1].departures):
            records += await steps(swarm, len(records), len(records) + 1, among="b")
        assert asked == [B, B], "each of the others, once"
        assert [(one.member.peer_id, one.stage_index) for one in records[-1].departures] == [(A, 1)]
        assert_plain(swarm, *([number] for number in range(len(records))))

    swarm.run(go())


def test_a_mover_that_is_told_to_leave_goes(make_swarm: MakeSwarm, monkeypatch: Any) -> None:
    swarm = make_swarm("a b", "c")
    b = Staying(swarm, B)
    send(swarm, B, 1, monkeypatch)

    async def go() -> None:
        await step(swarm, 0, among="a")
        await asyncio.sleep(0.1)
        b.stay.leave()
        records = await steps(swarm, 1, 8)
        assert b.task.done()
        assert swarm.names_after(records[-1]) == ["a", "c"]
        b.task.result()

    swarm.run(go())


def test_a_mover_that_slept_comes_back(make_swarm: MakeSwarm, monkeypatch: Any) -> None:
    """It has not received the record that sent it, nor any later one."""
    swarm = make_swarm("a b", "c", limits=Limits(call_timeout=30.0, silence_timeout=5.0))
    Staying(swarm, B)
    send(swarm, B, 1, monkeypatch)

    async def freeze(self: commit.StepCommit, *arguments: Any) -> Record:
        record = await decide(self, *arguments)
        if record.departures:
            swarm.network.freeze(B)
        return record

    decide = commit.StepCommit._with_changes
    monkeypatch.setattr(commit.StepCommit, "_with_changes", freeze)

    async def go() -> None:
        records = await steps(swarm, 0, 3)
        assert records[0].departures
        swarm.network.thaw(B)
        await asyncio.sleep(60.0)
        records = await steps(swarm, 3, 8)
        assert sorted("".join(swarm.names_after(records[-1]))) == ["a", "b", "c"]
        assert_plain(swarm, *([number] for number in range(8)))

    swarm.run(go())


def test_a_mover_keeps_the_snapshots_that_it_has(make_swarm: MakeSwarm, monkeypatch: Any) -> None:
    swarm = make_swarm("a b", "c", limits=Limits(call_timeout=30.0, snapshot_interval=1e6))
    Staying(swarm, B)
    send(swarm, B, 1, monkeypatch, at=2)

    async def go() -> None:
        await steps(swarm, 0, 2)
        store = swarm.servers[B].snapshots.store
        before = store.held
        assert before
        records = await steps(swarm, 2, 8)
        assert swarm.names_after(records[-1]) == ["a", "cb"]
        assert store.held == before

    swarm.run(go())


@pytest.mark.parametrize("rate", [5e-324, 1e200])
def test_what_a_server_says_of_its_speed_ends_no_coordinator(
    make_swarm: MakeSwarm, monkeypatch: Any, rate: float
) -> None:
    swarm = make_swarm("a b", "c")
    balance = swarm.coordinator.balancer
    balance._rule, balance._interval_s = "gain", 1e-3

    class Absurd(StageLoad):
        """Reports an absurd load of stage 1."""

        def __init__(self, stage: int) -> None:
            super().__init__()
            self._stage = stage

        @property
        @override
        def samples_per_s(self) -> float:
            return rate if self._stage else 10.0

    async def go() -> None:
        for server in swarm.servers.values():
            for index in server.steps.stages:
                server.steps.stage(index).load = Absurd(index)
        for record in await steps(swarm, 0, 3):
            assert swarm.names_after(record) == ["ab", "c"]
        assert "c" not in balance._estimates
        assert balance._estimates["a"].samples_per_s == 10.0

    swarm.run(go())


@pytest.mark.parametrize(
    ("rosters", "shed", "after"),
    [
        (("ab", "a"), (A, 0), ["b", "a"]),
        (("ab", "ab"), (B, 1), ["ab", "a"]),
        (("a", "ab"), (A, 0), ["a", "ab"]),  # it has the only copy
        (("ab", "c"), (A, 0), ["ab", "c"]),  # it has no other stage
    ],
)
def test_a_server_gives_up_one_of_several_stages(
    make_swarm: MakeSwarm, monkeypatch: Any, rosters: Sequence[str], shed: tuple[PeerId, int], after: list[str]
) -> None:
    swarm = make_swarm(*(" ".join(names) for names in rosters))
    calls = 0

    def choose(self: PlannedMoves, gone: Any) -> tuple[list[Departure], list[StageRelease]]:
        nonlocal calls
        calls += 1
        return [], [StageRelease(*shed)] if calls == 2 else []

    monkeypatch.setattr(PlannedMoves, "choose", choose)

    async def go() -> None:
        records = await steps(swarm, 0, 5, among=after[0][0])
        assert swarm.names_after(records[0]) == list(rosters)
        assert [swarm.names_after(record) for record in records[1:]] == 4 * [after]
        for name, server in swarm.servers.items():
            held = tuple(index for index, peers in enumerate(after) if name in peers)
            assert server.steps.stages == held
            assert tuple(server.steps.sums.ledgers) == held
            there = {index for index, block in enumerate(server.admission.model.blocks.modules)
                     if not any(parameter.is_meta for parameter in block.parameters())}  # fmt: skip
            assert there == set(held), "what it gave up takes no memory"
        assert swarm.servers[A].events.counts["sheds"] == (after != list(rosters))
        assert_plain(swarm, *([number] for number in range(5)))

    swarm.run(go())
