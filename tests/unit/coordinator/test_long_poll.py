"""A step's traffic at the coordinator grows in proportion to the peers, and none of its messages exceeds the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest

from benchmarks.crowd import NUM_STEPS
from benchmarks.standins import BriefTrainer, Crowd
from lightning_swarm.coordinator.event_deltas import MAX_NEWS, EventDeltas
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import MAX_CALL_BYTES, PeerId
from lightning_swarm.protocol.messages.batches import RecordReply
from lightning_swarm.protocol.messages.calls import (
    MAX_MICROBATCHES,
    MAX_RECEIPTS,
    Origin,
    Receipt,
    Receipts,
    Run,
    pack,
    pack_origins,
    to_ranges,
    to_runs,
    unpack,
    unpack_origins,
)
from lightning_swarm.protocol.messages.reports import EVENT_KINDS, EventCounts
from lightning_swarm.protocol.messages.step import NamedReceipts
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import ADMIT, APPLY, AVERAGE, DONE, FREEZE, GRANT, PROPOSE, RECORD

A = PeerId("a")


@contextmanager
def crowd(num_servers: int, num_trainers: int, num_microbatches: int = 4) -> Iterator[Crowd]:
    made = Crowd(num_servers, num_trainers, num_microbatches)
    try:
        made.loop.run_until_complete(made.begin())
        yield made
    finally:
        made.loop.run_until_complete(made.close())
        made.loop.close()


# ---------------------------------------------------------------------- a thousand


async def step_of(trainers: Sequence[BriefTrainer]) -> None:
    """Run a step that the lead, the first trainer, closes without the other trainers."""
    working = asyncio.gather(*(trainer.step() for trainer in trainers))
    await asyncio.sleep(1.0)
    await trainers[0].steps.close()
    await working


@pytest.mark.thorough
def test_a_step_of_a_thousand_trainers_and_a_thousand_servers_fits_into_calls() -> None:
    """All servers report all kinds of values, and a hundred are gone. The list of members fits, too."""
    with crowd(1000, 1000, num_microbatches=2) as made:
        made.kill(100)
        made.loop.run_until_complete(made.step())
        seats = made.trainers[0].steps.run.seats
        assert [len(roster) for roster in seats.rosters] == [899, 1]
        assert sum(number for _, _, number in made.newest.closing.batches) == 1000
        assert made.calls.largest.keys() >= {
            ADMIT.name,
            GRANT.name,
            DONE.name,
            FREEZE.name,
            AVERAGE.name,
            PROPOSE.name,
            APPLY.name,
            RECORD.name,
        }
        assert max(made.calls.largest.values()) < MAX_CALL_BYTES // 3  # each kind of event adds a count per server
        assert len(encode(RecordReply(record=made.newest, closing=False, seats=seats))) < MAX_CALL_BYTES // 4


def passed_over(made: Crowd) -> BriefTrainer:
    """Return a trainer that missed two steps, during which servers were lost."""
    *there, absent = made.trainers
    made.kill(3)
    for _ in range(2):
        made.loop.run_until_complete(step_of(there))
    return absent


def test_a_trainer_that_passed_over_a_record_is_told_who_is_there() -> None:
    with crowd(10, 10) as made:
        absent, lead = passed_over(made), made.trainers[0]
        made.loop.run_until_complete(absent.steps.wait_for_record(1))
        assert absent.steps.version == lead.steps.version == 3
        assert absent.steps.run.seats == lead.steps.run.seats
        assert [len(roster) for roster in absent.steps.run.rosters] == [6, 1]


def test_a_record_that_is_not_the_next_one_is_refused_without_who_is_there() -> None:
    with crowd(10, 10) as made:
        absent = passed_over(made)
        before = absent.steps.run.seats
        handlers = made.transports[0]._call_handlers
        answer = handlers[RECORD.name]

        async def seatless(caller: PeerId, body: bytes) -> bytes:
            reply = decode(await answer(caller, body), RecordReply)
            return encode(msgspec.structs.replace(reply, seats=None))

        handlers[RECORD.name] = seatless
        with pytest.raises(ProtocolError, match="must come with the run's members"):
            made.loop.run_until_complete(absent.steps.wait_for_record(1))
        assert (absent.steps.version, absent.steps.run.seats) == (1, before)


# ---------------------------------------------------------------------- growth


def bytes_of_a_step(num_servers: int, num_trainers: int) -> int:
    """Return the coordinator's traffic in a step."""
    with crowd(num_servers, num_trainers) as made:
        made.clear()
        for _ in range(NUM_STEPS):
            made.loop.run_until_complete(made.step())
        return made.by_method([made.transports[0].peer_id]).total()


@pytest.mark.parametrize("twice", [(10, 80), (20, 40), (20, 80)])
def test_bytes_at_who_coordinates_grow_with_the_peers_and_not_with_their_square(twice: tuple[int, int]) -> None:
    before, after = bytes_of_a_step(10, 40), bytes_of_a_step(*twice)
    assert before < after < 2.05 * before


def test_what_a_trainer_is_told_of_a_step_has_one_size() -> None:
    def told(num_servers: int, num_trainers: int) -> int:
        with crowd(num_servers, num_trainers) as made:
            made.clear()
            made.loop.run_until_complete(made.step())
            trainers = [one.peer_id for one in made.transports[num_servers + 1 :]]
            return made.by_method(trainers)[RECORD.name]

    assert told(40, 80) - told(10, 10) < 10  # one more digit in some numbers


# ---------------------------------------------------------------------- many in a few bytes


@pytest.mark.parametrize(
    "receipts",
    [
        [],
        [(0, 0, 0)],
        [(4, 7, 0), (4, 8, 0), (4, 0, 2), (0, 3, 1)],
        [(7, MAX_MICROBATCHES - 1, 0)],
        [(first, index, 0) for first in range(0, 4000, 4) for index in range(4)],
    ],
)
def test_receipts_come_back_from_their_bitmaps(receipts: list[Receipt]) -> None:
    body = encode(NamedReceipts(stage_index=0, receipts=pack(receipts), origins=[]))
    assert unpack(decode(body, NamedReceipts).receipts) == set(receipts)
    assert (
        len(body)
        < 50 + 8 * len({first for first, _, _ in receipts}) + max([index for _, index, _ in receipts] + [0]) // 8
    )


@pytest.mark.parametrize(
    "receipts",
    [
        [(0, 0, b"")],
        [(-1, 0, b"\x01")],
        [(0, -1, b"\x01")],
        [(0, 0, bytes(MAX_MICROBATCHES // 8 + 1))],
        [(0, b"\x01")],
    ],
)
def test_what_is_no_bitmap_is_refused(receipts: list[object]) -> None:
    body = msgspec.msgpack.encode({"stage_index": 0, "receipts": receipts})
    with pytest.raises(ProtocolError):
        decode(body, NamedReceipts)


def test_more_receipts_than_fit_into_memory_are_refused_before_they_are_there() -> None:
    full: Receipts = [(first, 0, b"\xff" * (MAX_RECEIPTS // 8)) for first in range(1000)]
    assert len(unpack(full[:1])) == MAX_RECEIPTS
    with pytest.raises(ProtocolError, match=f"at most {MAX_RECEIPTS} microbatches, got {1000 * MAX_RECEIPTS}"):
        unpack(full)


@pytest.mark.parametrize(
    ("places", "runs"),
    [
        ([], []),
        ([5], [(5, 1, 1)]),
        (list(range(0, 4000, 4)), [(0, 4, 1000)]),
        ([0, 4, 8, 11, 14, 20], [(0, 4, 3), (11, 3, 2), (20, 1, 1)]),
    ],
)
def test_places_of_batches_come_back_from_their_runs(places: list[int], runs: list[Run]) -> None:
    assert to_runs(places) == runs
    assert [place for found in to_ranges(runs) for place in found] == places


def test_origins_of_batches_come_back() -> None:
    for number in (0, 1, 5):
        origins = {4 * place: Origin(float(1 + place // 3), PeerId(f"t{place % 2}")) for place in range(number)}
        assert unpack_origins(pack_origins(origins), origins.keys()) == origins
    assert pack_origins(dict.fromkeys((8, 0, 4), Origin(2.0, A))) == [(2.0, A, 3)]
    for wrong in ([], [(1.0, A, 1)], [(1.0, A, 3)], [(1.0, A, 1 << 40)]):
        with pytest.raises(ProtocolError, match="each of 2 batches must have one weight and one trainer"):
            unpack_origins(wrong, {0, 4})


def test_a_run_that_claims_more_batches_than_there_can_be_takes_no_memory() -> None:
    (found,) = to_ranges([(3, 5, 1 << 40)])
    assert 3 + 5 * (1 << 39) in found
    assert 4 not in found


# ---------------------------------------------------------------------- what the lead is told


def noted(count: int) -> EventCounts:
    return EventCounts(log=1, counts=dict.fromkeys(EVENT_KINDS[:1], count) if count else {})


def test_the_lead_is_told_what_is_new_and_again_while_it_may_not_have_heard() -> None:
    told, a, b = EventDeltas(), PeerId("a"), PeerId("b")
    assert told.news({a: noted(1), b: noted(0)}, version=3) == {a: noted(1)}
    assert told.news({a: noted(1), b: noted(0)}, version=3) == {a: noted(1)}, "the answer may have been lost"
    assert told.news({a: noted(1), b: noted(2)}, version=4) == {b: noted(2)}
    assert told.news({a: noted(3), b: noted(2)}, version=5) == {a: noted(3)}
    assert told.news({b: noted(2)}, version=6) == {}
    assert told.news({a: noted(3), b: noted(2)}, version=7) == {a: noted(3)}, "who was away is told of anew"


def test_of_many_that_have_something_to_tell_some_are_told_of_later() -> None:
    told = EventDeltas()
    everyone = {PeerId(f"{index}"): noted(1) for index in range(MAX_NEWS + 10)}
    assert len(told.news(everyone, version=0)) == MAX_NEWS
    rest = told.news(everyone, version=1)
    assert len(rest) == 10
    assert not told.news(everyone, version=2)


def test_who_was_told_of_longest_ago_comes_first_where_all_have_something_to_tell_all_the_time() -> None:
    told, heard = EventDeltas(), set[PeerId]()
    for step in range(3):
        news = told.news({PeerId(f"{index}"): noted(step + 1) for index in range(2 * MAX_NEWS + 10)}, version=step)
        assert len(news) == MAX_NEWS
        heard |= news.keys()
    assert len(heard) == 2 * MAX_NEWS + 10
