"""Snapshots: their times, their keepers, and that a server holds at most two."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import Tensor

from lightning_swarm.client.model_state import ModelState, gather_snapshots
from lightning_swarm.coordinator.commit import agreed_snapshots, choose_backups
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ConfigError, NotEnlisted, ProtocolError, TicketGone, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.fingerprint import digest, fingerprint
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.run import HeldSnapshot, Member
from lightning_swarm.protocol.messages.state import HeldSnapshots, Snapshot, SnapshotRequest
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.queries import agreed_digest, newest_complete, newest_safe, only_recorded, version_to_keep
from lightning_swarm.protocol.rpc import KEEP, SNAPSHOT
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.snapshots import SnapshotStore, copy_stage
from tests.unit.conftest import MakeSwarm, needs_full_disk, on_a_full_disk
from tests.unit.model.forged import forged
from tests.unit.swarm import LEAD, Swarm, make_module, rows

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
INTERVAL_S = 1000.0
LIMITS = Limits(call_timeout=30.0, snapshot_interval=INTERVAL_S)


def rosters(*names: str) -> list[list[Member]]:
    return [[Member(peer_id=PeerId(name), boot_id=0) for name in roster.split()] for roster in names]


def holding(**held: Sequence[tuple[int, int]]) -> dict[PeerId, HeldSnapshots]:
    """Return held (version, stage) pairs by peer."""
    return {
        PeerId(name): HeldSnapshots(
            host="", snapshots=[HeldSnapshot(version=v, stage_index=i, digest=bytes(32)) for v, i in pairs]
        )
        for name, pairs in held.items()
    }


# ---------------------------------------------------------------------- who keeps what


@pytest.mark.parametrize(
    ("names", "hosts", "keepers"),
    [
        (("a", "b"), {}, ["b", "a"]),
        (("a b", "c"), {}, ["c", "a"]),
        (("a", "a b"), {}, ["b", None]),  # each server holds the second stage, so it survives with any
        (("a",), {}, [None]),
        (("a", "b", "c"), {}, ["b", "a", "a"]),
        (("a", "b", "c", "d"), {"a": "1", "b": "1", "c": "2", "d": "2"}, ["c", "d", "a", "b"]),
        (("a", "b", "c"), {"a": "1", "b": "1"}, ["c", "c", "a"]),  # the host of `c` is unknown
    ],
)
def test_another_server_keeps_a_stage_on_another_host_if_there_is_one(
    names: Sequence[str], hosts: Mapping[str, str], keepers: Sequence[str | None]
) -> None:
    known = {PeerId(name): host for name, host in hosts.items()}
    assert choose_backups(rosters(*names), [False] * len(names), known) == keepers


def test_what_trainers_hold_is_kept_by_no_server() -> None:
    assert choose_backups(rosters("a", "b", "a t"), [False, False, True], {}) == ["b", "a", None]


def test_where_a_trainer_may_be_replaced_a_server_keeps_what_it_holds() -> None:
    kept = choose_backups(rosters("a", "b", "a t"), [False, False, True], {}, has_standbys=True)
    assert kept == ["b", "a", "b"]
    assert choose_backups(rosters("a", "a", "a t"), [False, False, True], {}, has_standbys=True) == [None, None, None]


@pytest.mark.parametrize(
    ("held", "through", "complete"),
    [
        (holding(), None, None),
        (holding(a=[(1, 0), (1, 1)], b=[(1, 1), (1, 0)]), 1, 1),
        (holding(a=[(1, 0)], b=[(1, 1)]), None, 1),  # each stage is on its own server
        (holding(a=[(1, 0), (1, 1), (4, 0)], b=[(1, 1), (1, 0), (4, 1), (4, 0)]), 1, 4),
        (holding(a=[(1, 0), (4, 0)], b=[(1, 1)]), None, 1),
        (holding(a=[(1, 0), (1, 1)]), None, 1),  # `b` does not answer; `a` keeps its stage
    ],
)
def test_a_snapshot_is_through_when_no_stage_dies_with_its_servers(
    held: dict[PeerId, HeldSnapshots], through: int | None, complete: int | None
) -> None:
    assert newest_safe(held, rosters("a", "b"), [False, False]) == through
    assert newest_complete(held, 2) == complete


def test_what_all_servers_hold_needs_no_other() -> None:
    held = holding(a=[(1, 0), (1, 1)], b=[(1, 0)])
    assert newest_safe(held, rosters("a b", "a"), [False, False]) is None
    assert newest_safe(holding(a=[(1, 0), (1, 1)], b=[(1, 0), (1, 1)]), rosters("a b", "a"), [False, False]) == 1
    assert newest_safe(holding(a=[(1, 0), (1, 1)], b=[(1, 0)]), rosters("a b", "a b"), [False, False]) == 1


def test_when_a_keeper_is_gone_what_is_whole_is_kept() -> None:
    """`b` alone held the first stage and kept the second; the newer snapshot had reached no other server."""
    held = holding(a=[(5, 0), (5, 1), (10, 1)], c=[(5, 1), (10, 1)])
    assert newest_safe(held, rosters("b", "a c"), [False, False]) is None
    assert version_to_keep(held, rosters("b", "a c"), [False, False]) == 5
    assert version_to_keep(holding(a=[(10, 1)]), rosters("b", "a c"), [False, False]) is None


@pytest.mark.parametrize(
    ("resumable", "kept"),
    [
        pytest.param([5, 10, 12], 10, id="all"),
        pytest.param([5, 12], 5, id="not the newest"),
        pytest.param([12], 10, id="none that is whole"),
        pytest.param([], 10, id="none"),
        pytest.param(None, 10, id="it does not tell"),
    ],
)
def test_what_the_lead_could_go_on_from_is_kept(resumable: list[int] | None, kept: int) -> None:
    """A loop has no state for a version in whose step it trained another trainer's batch."""
    held = holding(a=[(5, 0), (5, 1), (10, 0), (10, 1)], b=[(5, 0), (5, 1), (10, 0), (10, 1), (12, 1)])
    assert version_to_keep(held, rosters("a", "b"), [False, False], resumable) == kept


# ---------------------------------------------------------------------- in a run


async def steps(swarm: Swarm, *seeds: int, apart_s: float = 1.0) -> list[Record]:
    records = []
    for seed in seeds:
        records.append(await swarm.step(rows(seed)))
        await asyncio.sleep(apart_s)
    return records


def versions(swarm: Swarm) -> dict[str, list[tuple[int, int]]]:
    """Return the (version, stage) pairs that each server holds."""
    return {
        name: [(one.version, one.stage_index) for one in server.snapshots.store.held]
        for name, server in swarm.servers.items()
    }


def test_the_first_step_is_kept_by_two_and_then_one_step_an_interval(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=LIMITS)
    records = swarm.run(steps(swarm, 1, 2, 3))
    assert [record.snapshot is not None for record in records] == [True, False, False]
    assert versions(swarm) == {"a": [(1, 0), (1, 1)], "b": [(1, 0), (1, 1)]}
    records = swarm.run(steps(swarm, 4, 5, 6, 7, 8, apart_s=0.6 * INTERVAL_S))
    assert [record.snapshot and record.snapshot.keep for record in records] == [None, None, 1, None, 6]
    both = [(6, 0), (6, 1), (8, 0), (8, 1)]
    assert versions(swarm) == {"a": both, "b": both}


def test_what_is_kept_is_the_stage_to_the_bit_with_its_momenta(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.run(steps(swarm, 1))
    stage = swarm.servers[B].steps.stage(1)
    print_of_it, kept = stage.fingerprint(), sent_copy(stage, 0)
    swarm.run(steps(swarm, 2, 3))
    assert stage.fingerprint() != print_of_it
    message = swarm.run(
        swarm.trainer.stream(A, SNAPSHOT.name, Message(encode(SnapshotRequest(stage_index=1, version=1))), timeout=1.0)
    )
    head = decode(message.body, Snapshot)
    assert (head.version, head.stage_index, head.version_hash) == (1, 1, print_of_it)
    assert head.optimizer == [name for name, _ in stage.module.named_stage_parameters()]
    assert len(message.tensors) == 2 * len(head.weights), "weights, and a momentum of each"
    assert all(map(torch.equal, message.tensors, kept.tensors))
    with pytest.raises(TicketGone):
        swarm.run(
            swarm.trainer.stream(
                A, SNAPSHOT.name, Message(encode(SnapshotRequest(stage_index=1, version=2))), timeout=1.0
            )
        )


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_what_has_no_room_in_memory_is_in_files(make_swarm: MakeSwarm, room: int) -> None:
    limits = Limits(call_timeout=30.0, snapshot_interval=0.001, snapshot_bytes=room)
    swarm = make_swarm("a", "b", limits=limits)
    swarm.run(steps(swarm, 1, 2, 3, 4))
    assert versions(swarm)["a"] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    for server in swarm.servers.values():
        store = server.snapshots.store
        assert (store.used_bytes > 0) == (room > 0)
        for one in store.held:
            head, tensors = swarm.run(store.get(one.stage_index, one.version))
            assert (head.stage_index, head.version) == (one.stage_index, one.version)
            assert digest(tensors, encode(head)) == one.digest
            assert fingerprint(tensors) == head.version_hash


@needs_full_disk
def test_a_full_disk_costs_the_snapshot_and_not_the_run(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", on_a_full_disk)
    limits = Limits(call_timeout=30.0, snapshot_interval=0.001, snapshot_bytes=0)
    swarm = make_swarm("a", "b", limits=limits)
    records = swarm.run(steps(swarm, 1, 2, 3))
    assert records[-1].snapshot is not None
    assert not any(versions(swarm).values())
    for stage in (0, 1):
        assert f"No room for a snapshot of stage {stage}: [Errno 28] No space left on device" in caplog.text


def test_a_run_of_one_server_and_one_that_wants_none_take_none(make_swarm: MakeSwarm) -> None:
    for swarm in (
        make_swarm("a", "a", limits=LIMITS),
        make_swarm("a", "b", limits=Limits(call_timeout=30.0, snapshot_interval=None)),
    ):
        records = swarm.run(steps(swarm, 1, 2))
        assert [record.snapshot for record in records] == [None, None]
        assert not any(versions(swarm).values())


def test_an_older_one_stays_until_the_newer_one_is_through(make_swarm: MakeSwarm) -> None:
    """Stage 1 is kept by no server any more, so the first snapshot is the last complete one."""
    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.run(steps(swarm, 1))
    stream = swarm.servers[B]._transport.stream

    async def lost(peer: PeerId, method: str, message: Message, *, timeout: float, max_bytes: int = 0) -> Message:
        if method == KEEP.name:
            raise ProtocolError("lost")
        return await stream(peer, method, message, timeout=timeout, max_bytes=max_bytes)

    swarm.servers[B]._transport.stream = lost  # type: ignore[method-assign]
    records = swarm.run(steps(swarm, *range(2, 8), apart_s=1.1 * INTERVAL_S))
    orders = [record.snapshot for record in records]
    assert [order is not None for order in orders] == [False, True, False, True, False, True]
    assert {order.keep for order in orders if order is not None} == {1}
    for held in versions(swarm).values():
        assert [pair for pair in held if pair[0] == 1] == [(1, 0), (1, 1)]
        assert len({version for version, _ in held}) == 2


def test_a_copy_that_came_damaged_is_not_kept(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.run(steps(swarm, 1))
    message = sent_copy(swarm.servers[B].steps.stage(1), 0)
    swarm.servers[A].snapshots.store.keep_only(None)
    head = decode(message.body, Snapshot)
    future = Message(encode(replaced(head, version=head.version + 2)), message.tensors)
    begun_s = swarm.loop.time()
    with pytest.raises(ProtocolError, match="is at version 1, and waits for the next version only, got 3"):
        swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, future, timeout=LIMITS.call_timeout))
    assert swarm.loop.time() - begun_s < 1.0, "its tensors take memory"
    damaged = Message(message.body, tuple(tensor + 1 for tensor in message.tensors))
    with pytest.raises(ProtocolError, match="does not have the hash that its sender states"):
        swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, damaged, timeout=1.0))
    assert swarm.servers[A].snapshots.store.held == []
    swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, message, timeout=1.0))
    assert [one.stage_index for one in swarm.servers[A].snapshots.store.held] == [1]


def test_going_back_drops_them(make_swarm: MakeSwarm) -> None:
    from tests.unit.coordinator.test_rollback import go_back

    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.run(steps(swarm, 1))
    assert all(versions(swarm).values())
    go_back(swarm)
    assert not any(versions(swarm).values())


# ---------------------------------------------------------------------- while a disk is slow


def slow_disk(loop: VirtualLoop, seconds: float) -> None:
    """Delay the results of the loop's executor."""

    def run_later(_executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = loop.create_future()
        loop.call_later(seconds, lambda: future.cancelled() or future.set_result(func(*args)))
        return future

    loop.run_in_executor = run_later  # type: ignore[method-assign]


ON_DISK = Limits(call_timeout=30.0, snapshot_interval=INTERVAL_S, snapshot_bytes=0)


def test_a_server_that_is_released_while_it_takes_one_serves_the_next_run(make_swarm: MakeSwarm) -> None:
    from tests.unit.coordinator.test_rollback import step
    from tests.unit.peer.test_failover import begin_again, release

    swarm = make_swarm("a", "a", "b", limits=ON_DISK)
    slow_disk(swarm.loop, 10.0)
    swarm.run(steps(swarm, 1))
    assert versions(swarm)["a"] == [], "the first of two stages is being written"
    assert release(swarm) == [A, B]
    swarm.run(asyncio.sleep(100.0))
    assert not any(versions(swarm).values())
    begin_again(swarm, [A], [A], [B])
    swarm.run(step(swarm, 1, 2))
    swarm.run(asyncio.sleep(100.0))
    assert versions(swarm)["a"] == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    "after_s",
    [5.0, 15.0, 25.0, 35.0, 45.0],
    ids=["own is hashed", "own", "checked", "other's is hashed", "other's"],
)
def test_what_is_written_while_the_run_goes_back_is_not_kept(make_swarm: MakeSwarm, after_s: float) -> None:
    from tests.unit.coordinator.test_rollback import go_back

    swarm = make_swarm("a", "b", limits=ON_DISK)
    slow_disk(swarm.loop, 10.0)
    swarm.run(steps(swarm, 1, apart_s=after_s))
    go_back(swarm)
    swarm.run(asyncio.sleep(100.0))
    assert not any(versions(swarm).values())


def test_one_that_is_dropped_while_it_is_read_is_read_to_its_end(loop: VirtualLoop) -> None:
    stage = make_module(1)
    tensors = [parameter.detach() for parameter in stage.parameters()]
    head = Snapshot(
        generation=0,
        stage_index=0,
        version=1,
        version_hash=fingerprint(tensors),
        weights=[],
        optimizer=[],
        structure=None,
        selection=None,
    )
    store = SnapshotStore(0)
    loop.run_until_complete(store.put(head, tensors, wanted=lambda: True))
    slow_disk(loop, 10.0)

    async def read() -> Sequence[Tensor]:
        reading = asyncio.create_task(store.get(0, 1))
        await asyncio.sleep(5.0)
        store.keep_only(None)
        return (await reading)[1]

    assert fingerprint(loop.run_until_complete(read())) == head.version_hash
    with pytest.raises(TicketGone):
        loop.run_until_complete(store.get(0, 1))


def test_one_of_an_older_generation_is_not_gone_back_to(make_swarm: MakeSwarm) -> None:
    """The new generation reaches its version again."""
    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.run(steps(swarm, 1))

    def gather() -> ModelState | None:
        run = swarm.steps.run
        return swarm.run(gather_snapshots(swarm.trainer, run, [1], timeout=5.0, max_bytes=1 << 20))

    assert gather() is not None
    for server in swarm.servers.values():
        head, tensors = copy_stage(swarm.servers[B].steps.stage(1), 3)
        put = server.snapshots.store.put(head, tensors, wanted=lambda: True)
        swarm.run(put)
    with pytest.raises(Unreachable, match="the snapshot of stage 1"):
        gather()


# ---------------------------------------------------------------------- keepers that lie


def snapshot(stage_index: int, version: int, content: int = 0) -> HeldSnapshot:
    return HeldSnapshot(stage_index=stage_index, version=version, digest=bytes([content]) * 32)


def test_a_snapshot_is_what_most_servers_of_its_stage_took() -> None:
    own = rosters("a b c", "d e", "f")
    taken = {PeerId(peer): [snapshot(0, 4)] for peer in "ab"} | {C: [snapshot(0, 4, 1), snapshot(1, 4, 1)]}
    taken |= {PeerId("d"): [snapshot(1, 4)], PeerId("e"): [snapshot(1, 4, 1)], PeerId("f"): [snapshot(2, 4)]}
    agreed = [snapshot(0, 4), snapshot(2, 4)]
    assert agreed_snapshots(own, taken, [], version=4) == agreed, "of two that differ nobody knows which is right"
    assert agreed_snapshots(own, taken, agreed[:1], version=4) == agreed[1:], "told once"
    assert agreed_snapshots(own, taken, [], version=3) == []
    assert agreed_snapshots(own, {A: taken[A]}, [], version=4) == [], "one of three"
    assert agreed_snapshots(own, {A: 3 * taken[A]}, [], version=4) == []


def poisoned(swarm: Swarm, keeper: PeerId, stage_index: int, version: int) -> None:
    """Replace the weights that a server keeps, with a matching hash."""
    store = swarm.servers[keeper].snapshots.store
    head, tensors = swarm.run(store.get(stage_index, version))
    others = [tensor + 1.0 if tensor.is_floating_point() else tensor for tensor in tensors]
    head = replaced(head, version_hash=fingerprint(others))
    swarm.run(store.put(head, others, wanted=lambda: True))


def gathered(swarm: Swarm, *wanted: int) -> ModelState | None:
    run = swarm.steps.run
    return swarm.run(gather_snapshots(swarm.trainer, run, wanted, timeout=5.0, max_bytes=1 << 20))


def assert_equal(found: ModelState | None, version: int, expected: Mapping[str, Tensor]) -> None:
    assert found is not None
    assert found.version == version
    assert found.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found.weights[name], tensor)


def test_the_next_record_says_what_a_snapshot_is(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a c", "b", limits=LIMITS)
    swarm.join("j")
    records = swarm.run(steps(swarm, 1, 2, 3))
    assert [len(record.snapshots or ()) for record in records] == [0, 2, 0]
    known = swarm.steps.run.snapshots
    assert [(one.version, one.stage_index) for one in known] == [(1, 0), (1, 1)]
    for name in ("a", "b", "c", "j"):
        server = swarm.servers[PeerId(name)]
        assert server.membership.run.snapshots == known
        assert [one for one in server.snapshots.store.held if one not in known] == []


def test_a_server_that_joins_meanwhile_keeps_no_snapshot_untold(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=LIMITS)
    hashed = {peer: swarm.servers[peer].steps.unrecorded_snapshots for peer in (A, B)}
    for peer in hashed:
        swarm.servers[peer].steps.unrecorded_snapshots = tuple  # hashing it takes longer than a step
    swarm.run(steps(swarm, 1))
    swarm.join("j")
    swarm.run(steps(swarm, 2, 3))
    assert [len(roster) for roster in swarm.rosters_now] in ([2, 1], [1, 2])
    for peer, untold in hashed.items():
        swarm.servers[peer].steps.unrecorded_snapshots = untold
    (record,) = swarm.run(steps(swarm, 4))
    assert [(one.version, one.stage_index) for one in record.snapshots or ()] == [(1, 0), (1, 1)]


def test_snapshots_that_nobody_ordered_are_told_by_no_record(make_swarm: MakeSwarm) -> None:
    """The only server of a stage invents snapshots, which voters would refuse, and which would fill the run's view."""
    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.servers[B].steps.unrecorded_snapshots = lambda: [snapshot(1, version) for version in (0, 2, 3, 10**6)]
    records = swarm.run(steps(swarm, 1, 2, 3))
    assert [len(record.snapshots or ()) for record in records] == [0, 1, 0]


def test_a_copy_that_a_keeper_made_up_is_not_loaded(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.run(steps(swarm, 1))
    expected = {name: tensor.clone() for name, tensor in swarm.weights().items()}
    swarm.run(steps(swarm, 2))
    assert_equal(gathered(swarm, 1), 1, expected)
    poisoned(swarm, A, 1, 1)
    assert_equal(gathered(swarm, 1), 1, expected)
    swarm.network.kill(B)
    with pytest.raises(Unreachable, match="no holder sent the snapshot of stage 1 at version 1"):
        gathered(swarm, 1)


def test_what_a_record_tells_is_kept_whatever_a_member_sends_later(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=LIMITS)
    swarm.run(steps(swarm, 1))
    message = sent_copy(swarm.servers[B].steps.stage(1), 0)
    swarm.run(steps(swarm, 2))
    store, told = swarm.servers[A].snapshots.store, swarm.steps.run.digest_of(1, 1)
    assert told in [one.digest for one in store.held]
    tensors = tuple(tensor + 1 for tensor in message.tensors)
    head = replaced(decode(message.body, Snapshot), version_hash=fingerprint(tensors))
    with pytest.raises(ProtocolError, match="the copy of stage 1 at version 1 must have the BLAKE3 digest"):
        swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, Message(encode(head), tensors), timeout=1.0))
    swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, message, timeout=1.0))
    assert told in [one.digest for one in store.held]


def test_where_the_newest_was_made_up_the_one_before_is_loaded(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b", limits=Limits(call_timeout=30.0, snapshot_interval=0.001))
    swarm.run(steps(swarm, 1))
    expected = {name: tensor.clone() for name, tensor in swarm.weights().items()}
    swarm.run(steps(swarm, 2))
    poisoned(swarm, A, 1, 2)
    swarm.network.kill(B)
    held = swarm.steps.run.snapshots
    assert [one.version for one in held] == [1, 1], "no record tells yet what the newest is"
    found = gathered(swarm, 1, 2)
    assert found is not None
    assert found.version == 2, "then the word of those that keep it is all there is"
    swarm.steps.run.snapshots = [*held, *(snapshot(index, 2, 7) for index in (0, 1))]
    assert_equal(gathered(swarm, 1, 2), 1, expected)


# ---------------------------------------------------------------------- in audited runs


def test_the_snapshot_is_what_the_coordinators_server_took_if_it_took_one() -> None:
    own = rosters("a b c", "d e", "f")
    taken = {PeerId(peer): [snapshot(0, 4, 1)] for peer in "bc"} | {A: [snapshot(0, 4)]}
    assert agreed_snapshots(own, taken, [], version=4) == [snapshot(0, 4, 1)]
    assert agreed_snapshots(own, taken, [], version=4, trusted=[A]) == [snapshot(0, 4)]
    del taken[A]
    assert agreed_snapshots(own, taken, [], version=4, trusted=[A]) == [], "it has not said so yet"
    assert agreed_snapshots(own, taken, [], version=4, trusted=[PeerId("d")]) == [snapshot(0, 4, 1)]


def test_as_long_as_no_record_tells_most_takers_do() -> None:
    claimed = {PeerId(peer): bytes([number]) for peer, number in {"a": 0, "b": 1, "c": 1, "k": 1}.items()}
    assert agreed_digest(claimed, [A, B, C], trusted=[PeerId("d")]) == b"\1"
    assert agreed_digest(claimed, [A, B, C], trusted=[A]) == b"\0"
    assert agreed_digest(claimed, [A, B], trusted=[PeerId("d")]) is None
    assert agreed_digest(claimed, [], trusted=[A]) is None, "who keeps it for others did not take it"
    assert agreed_digest({B: b"1"}, [A, B], trusted=[A]) is None


def test_copies_count_if_records_tell_them() -> None:
    held = holding(a=[(1, 0), (1, 1), (2, 0)], b=[(1, 0)])
    left = only_recorded(held, [snapshot(0, 1), snapshot(1, 1, 7)])
    assert [(one.version, one.stage_index) for one in left[A].snapshots] == [(1, 0)]
    assert left[B] == held[B]


def sent_copy(stage: Stage, generation: int) -> Message:
    head, tensors = copy_stage(stage, generation)
    return Message(encode(head), tuple(tensors))


def forged_copy(swarm: Swarm, peer: PeerId, stage_index: int) -> Message:
    """Return a forged snapshot of the server's stage with the same fingerprint."""
    message = sent_copy(swarm.servers[peer].steps.stage(stage_index), 0)
    tensors = tuple(forged(message.tensors))
    assert not all(map(torch.equal, tensors, message.tensors))
    assert fingerprint(tensors) == fingerprint(message.tensors)
    return Message(message.body, tensors)


def unconfirmed(events: EventLog) -> list[str | None]:
    return [event.peer for event in events.newest if event.kind == "unconfirmed"]


@pytest.mark.parametrize("told", [False, True], ids=["before", "after the record"])
def test_a_keeper_that_was_sent_a_false_copy_gets_another_ones(make_swarm: MakeSwarm, told: bool) -> None:
    swarm = make_swarm("a", "b c", limits=LIMITS, audit_share=0.0)
    store = swarm.servers[A].snapshots.store
    swarm.run(steps(swarm, 1))
    expected = {name: tensor.clone() for name, tensor in swarm.weights().items()}
    false = forged_copy(swarm, B, 1)
    if told:
        store.discard(1, 1)  # simulates a snapshot that has not arrived yet
        swarm.run(steps(swarm, 2))
        with pytest.raises(ProtocolError, match=r"the copy of stage 1 at version . must have the BLAKE3 digest"):
            swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, false, timeout=1.0))
        swarm.run(asyncio.sleep(1.0))
    else:
        swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, false, timeout=1.0))
        swarm.run(steps(swarm, 2))
    assert swarm.steps.run.digest_of(1, 1) in [one.digest for one in store.held]
    assert unconfirmed(swarm.servers[A].events) == ["b"]
    for peer in (B, C):
        swarm.network.kill(peer)
    assert_equal(gathered(swarm, 1), 1, expected)


def test_of_a_lost_stage_nothing_is_read_that_no_record_tells(make_swarm: MakeSwarm) -> None:
    limits = Limits(call_timeout=30.0, snapshot_interval=0.001)
    swarm = make_swarm("a", "b c", limits=limits, audit_share=0.0)
    swarm.run(steps(swarm, 1))
    expected = {name: tensor.clone() for name, tensor in swarm.weights().items()}
    swarm.run(steps(swarm, 2))
    swarm.run(swarm.servers[B]._transport.stream(A, KEEP.name, forged_copy(swarm, B, 1), timeout=1.0))
    for peer in (B, C):
        swarm.network.kill(peer)
    assert [one.version for one in swarm.steps.run.snapshots] == [1, 1], "no record tells yet what the newest is"
    assert_equal(gathered(swarm, 1, 2), 1, expected)
    with pytest.raises(Unreachable, match="no record has a digest of stage 1 at version 2"):
        gathered(swarm, 2)


def test_while_its_takers_live_a_snapshot_is_read_that_no_record_tells(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c", limits=LIMITS, audit_share=0.0)
    swarm.run(steps(swarm, 1))
    expected = {name: tensor.clone() for name, tensor in swarm.weights().items()}
    assert_equal(gathered(swarm, 1), 1, expected)


def test_who_keeps_another_copy_than_a_record_tells_is_told_of(make_swarm: MakeSwarm) -> None:
    swarm, events = make_swarm("a", "b c", limits=LIMITS, audit_share=0.0), EventLog()
    swarm.run(steps(swarm, 1, 2))
    poisoned(swarm, A, 1, 1)
    for peer in (B, C):
        swarm.network.kill(peer)
    run = swarm.steps.run
    with pytest.raises(Unreachable, match="no holder sent the snapshot of stage 1 at version 1"):
        swarm.run(gather_snapshots(swarm.trainer, run, [1], timeout=5.0, max_bytes=1 << 20, events=events))
    assert unconfirmed(events) == ["a"]


def test_who_is_no_keeper_of_a_stage_reads_no_snapshot_of_it(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm("a", "b c", limits=LIMITS, audit_share=0.0, trainers=LEAD)
    swarm.run(steps(swarm, 1))
    request = Message(encode(SnapshotRequest(stage_index=1, version=1)))
    assert swarm.run(swarm.servers[A]._transport.stream(B, SNAPSHOT.name, request, timeout=1.0)).tensors
    with pytest.raises(NotEnlisted):
        swarm.run(swarm.servers[C]._transport.stream(B, SNAPSHOT.name, request, timeout=1.0))


def test_an_interval_is_a_time_or_nothing() -> None:
    assert Limits(snapshot_interval=None).snapshot_interval is None
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="snapshot_interval"):
            Limits(snapshot_interval=wrong)
    with pytest.raises(ConfigError, match="revive_timeout"):
        Limits(revive_timeout=None)  # type: ignore[arg-type]
