"""A run without its lead: the standbys' copies of its loop, the choice of a new lead, and refusal of other leads."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lightning_swarm.coordinator.takeover import appoint, choose_standby_lead, seniority
from lightning_swarm.core.errors import Busy, ProtocolError, Replaced, SwarmError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import Message, PeerId
from lightning_swarm.peer.failover import StandbySender
from lightning_swarm.protocol import plain_values
from lightning_swarm.protocol.messages.batches import NEEDED, MetricState
from lightning_swarm.protocol.messages.membership import JoinRequest
from lightning_swarm.protocol.messages.run import HeldSnapshot, InheritRequest, ReleaseRequest
from lightning_swarm.protocol.messages.state import HeldSnapshots, KeptLoop
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, encode
from lightning_swarm.protocol.queries import ask_held
from lightning_swarm.protocol.rpc import HELD, INHERIT, JOIN, KEEP_LOOP, LEADS, RELEASE, RENEW
from lightning_swarm.protocol.run_state import RunState
from tests.loops import travelling
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import LEAD, Swarm, rows

A, B, C, D = map(PeerId, "abcd")
LIMITS = Limits(call_timeout=30.0, silence_timeout=10.0, revive_timeout=60.0, lead_timeout=1000.0, loop_bytes=10_000)
STATE = travelling()
METRIC = encode(MetricState(name="accuracy", num_updates=1, lengths=[2]))

# ---------------------------------------------------------------------- values that travel


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, -(2**63), 2**64 - 1, 2**200, 1.5, float("inf"), "text", b"bytes"],
        {"a": (1, [2, {3: {"x", "y"}}]), 4: None, (5, 6): "a key may be a tuple"},
        OrderedDict(b=1, a=2),
        Counter({3: 1, 5: 2}),
        [torch.float64, torch.device("cuda:1"), torch.Size([2, 3]), Path("/a/b"), dt.timedelta(hours=1)],
    ],
)
def test_a_value_comes_as_it_went(value: Any) -> None:
    came = plain_values.unpack(plain_values.pack(value))
    assert came == value
    assert type(came) is type(value)


def test_tensors_and_arrays_come_as_they_went() -> None:
    generator = np.random.RandomState(3).get_state()
    value = {
        "torch": torch.get_rng_state(),
        "numpy": generator,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "number": np.float64(0.1),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    came = plain_values.unpack(plain_values.pack(value))
    assert torch.equal(came["torch"], value["torch"])
    assert came["numpy"][0] == generator[0]
    np.testing.assert_array_equal(came["numpy"][1], generator[1])
    assert (came["scalar"], came["number"]) == (value["scalar"], value["number"])
    assert came["scalar"].dtype == torch.bfloat16
    assert torch.equal(came["parameter"], torch.ones(2))


@pytest.mark.parametrize("value", [object(), lambda: None, torch.nn.ReLU(), np.array([object()]), ValueError("no")])
def test_what_cannot_travel_is_named(value: Any) -> None:
    with pytest.raises(plain_values.NotPlain, match=r"value\['a'\]\[1\] is a "):
        plain_values.pack({"a": [0, value]})


def test_a_container_that_holds_itself_does_not_travel() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(plain_values.NotPlain, match="nested more than 64 deep"):
        plain_values.pack(value)


@pytest.mark.parametrize(
    "structure",
    [
        {"a": 1},
        [],
        [1],
        ["call", "os.system"],
        ["tensor", 1],
        ["tensor", -1],
        ["tensor", True],
        ["list", ["tensor", 0], ["tensor", 0]],
        ["list"],  # the tensor is not named
        ["dict", 1],
        ["dict", ["list"], ["tensor", 0]],  # no key
        ["set", ["dict"]],
        ["counter", "a"],
        ["size", "a"],
        ["dtype", "float65"],
        ["dtype", 3],
        ["device", "nowhere"],
        ["integer", 5],
        ["integer", "9" * 5000],
        ["integer", "one"],
        ["seconds", float("nan")],
        ["path", None],
    ],
)
def test_what_is_no_value_is_refused(structure: Any) -> None:
    bytes_of_it = torch.frombuffer(bytearray(msgspec.msgpack.encode(structure)), dtype=torch.uint8)
    with pytest.raises(ProtocolError):
        plain_values.unpack([bytes_of_it, torch.zeros(1)])


def test_too_much_without_tensors_does_not_travel() -> None:
    with pytest.raises(plain_values.NotPlain, match="without its tensors"):
        plain_values.pack("x" * (plain_values.MAX_STRUCTURE_BYTES + 1))
    with pytest.raises(ProtocolError, match="without its tensors, got"):
        plain_values.unpack([torch.zeros(plain_values.MAX_STRUCTURE_BYTES + 1, dtype=torch.uint8)])


@pytest.mark.parametrize("tensors", [[], [torch.zeros(3)], [torch.zeros(1, 3, dtype=torch.uint8)]])
def test_what_has_no_structure_is_refused(tensors: Sequence[torch.Tensor]) -> None:
    with pytest.raises(ProtocolError, match="must begin with the bytes of its structure"):
        plain_values.unpack(tensors)


# ---------------------------------------------------------------------- who is chosen


def held(loops: Sequence[int], *snapshots: tuple[int, int]) -> HeldSnapshots:
    """Return held versions of loops, and held (version, stage) pairs of snapshots."""
    kept = [HeldSnapshot(version=version, stage_index=index, digest=bytes(32)) for version, index in snapshots]
    return HeldSnapshots(host="", snapshots=kept, loops=list(loops))


WHOLE = held([], (3, 0), (3, 1), (5, 0), (5, 1))


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({A: WHOLE, B: WHOLE}, None),
        ({A: WHOLE, B: held([5]), C: held([5])}, (B, 5)),
        ({A: WHOLE, C: held([3, 5])}, (C, 5)),
        ({A: WHOLE, B: held([3]), C: held([5])}, (C, 5)),
        ({A: held([], (3, 0), (3, 1), (5, 0)), B: held([3, 5])}, (B, 3)),  # no snapshot of stage 1 at version 5
        ({A: held([], (5, 0)), B: held([5])}, None),
    ],
)
def test_the_newest_version_that_is_whole_and_the_oldest_who_has_its_loop(
    found: dict[PeerId, HeldSnapshots], chosen: tuple[PeerId, int] | None
) -> None:
    assert choose_standby_lead(found, [A, B, C], 2) == chosen


def test_a_version_with_false_work_is_chosen_last() -> None:
    found = {A: WHOLE, B: held([3]), C: held([5])}
    assert choose_standby_lead(found, [A, B, C], 2, sound=4) == (B, 3)
    assert choose_standby_lead(found, [A, C], 2, sound=4) == (C, 5)


# ---------------------------------------------------------------------- in a run


def begun(make_swarm: MakeSwarm, limits: Limits = LIMITS) -> Swarm:
    """Return a swarm of two stages of two servers, with three voters, one decided step and its snapshot."""
    swarm = make_swarm("a b", "c d", limits=limits, voters="a b c")
    swarm.run(swarm.step(rows(0)))
    swarm.run(asyncio.sleep(1.0))
    return swarm


def keep(swarm: Swarm, standby: PeerId, *, by: PeerId = LEAD, value: Any = STATE, version: int = 1) -> None:
    head = encode(KeptLoop(generation=0, version=version))
    transport = swarm.trainer if by == LEAD else swarm.servers[by]._transport
    message = Message(head, tuple(plain_values.pack(value)))
    swarm.run(transport.stream(standby, KEEP_LOOP.name, message, timeout=5.0, max_bytes=0))


def test_a_standby_keeps_a_loop_for_as_long_as_its_snapshot(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm, Limits(call_timeout=30.0, snapshot_interval=0.001))
    loops = swarm.servers[B].snapshots.loops
    keep(swarm, B)
    assert loops.get(1)["checkpoint"]["epoch"] == 1
    assert swarm.run(ask_held(swarm.trainer, [B], timeout=1.0))[B].loops == [1]
    kept = []
    for seed in (1, 2, 3):
        swarm.run(swarm.step(rows(seed)))
        swarm.run(asyncio.sleep(1.0))
        kept.append(loops.versions)
    assert kept[-1] == [], kept


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"by": A}, "the lead trainer sends its loop's state, not a"),
        ({"version": 0}, "no record orders a snapshot of version 0"),
        ({"value": torch.zeros(20_000)}, "bytes"),
        # A state that could not be read at a takeover is refused on arrival.
        ({"value": {"epoch": 1}}, "a loop's state must have the fields of"),
        ({"value": travelling(checkpoint={"epoch": 1})}, "must be a checkpoint with epoch, .*lacks .*'global_step'"),
        ({"value": travelling(checkpoint=dict.fromkeys(NEEDED))}, "lacks loops"),
        ({"value": travelling(heard=[(b"no record", [], [])])}, "Record"),
        ({"value": travelling(logs={7: [b"nothing logged"]})}, "Logged"),
        ({"value": travelling(added={7: ([METRIC], [])})}, "must have 2 tensors, got 0"),
    ],
)
def test_what_a_standby_does_not_keep(make_swarm: MakeSwarm, changes: dict[str, Any], refusal: str) -> None:
    """The state comes from a peer that is not the lead, has another version, or is too large."""
    swarm = begun(make_swarm)
    with pytest.raises(ProtocolError, match=refusal):
        keep(swarm, B, **changes)
    assert swarm.servers[B].snapshots.loops.versions == []


def test_a_loop_of_another_generation_is_refused(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    message = Message(encode(KeptLoop(generation=1, version=1)), tuple(plain_values.pack(STATE)))
    with pytest.raises(ProtocolError, match="run generation is 0, got a call of 1"):
        swarm.run(swarm.trainer.stream(B, KEEP_LOOP.name, message, timeout=5.0, max_bytes=0))


def test_a_program_with_other_settings_keeps_no_loop(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    swarm.servers[B].snapshots.loops.unfit = lambda manifest: (
        f"`target_batch_size` is not {manifest.settings.target_batch_size}"
    )
    with pytest.raises(ProtocolError, match="could not lead the run: `target_batch_size` is not"):
        keep(swarm, B)
    assert swarm.servers[B].snapshots.loops.versions == []


def test_the_lead_sends_its_loop_to_those_that_want_it(make_swarm: MakeSwarm, caplog: pytest.LogCaptureFixture) -> None:
    swarm = begun(make_swarm)
    known: set[PeerId] = set()
    packed = []

    async def standbys_known() -> set[PeerId]:
        return known

    def pack(value: Any = STATE) -> list[torch.Tensor]:
        packed.append(value)
        return plain_values.pack(value)

    standbys = StandbySender(swarm.trainer, standbys_known, LIMITS)
    run = RunState(swarm.manifest)
    swarm.run(standbys.send(run, 1, pack))
    assert not packed, "without standbys nothing is done"
    known |= {B, D, PeerId("gone")}
    swarm.run(standbys.send(run, 1, pack))
    assert sorted(standbys.holding) == [B, D]
    assert [name for name, server in swarm.servers.items() if server.snapshots.loops.versions] == [B, D]
    swarm.run(standbys.send(run, 1, lambda: pack(torch.zeros(20_000))))
    assert "`Limits.loop_bytes` is 10000" in caplog.text


def test_where_the_oldest_do_not_take_it_the_next_ones_are_sent_the_loop(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = begun(make_swarm)
    run = RunState(swarm.manifest)
    *older, youngest = seniority(run)
    assert len(older) == 3

    async def known() -> list[PeerId]:
        return seniority(run)

    for peer in older:
        swarm.servers[peer].snapshots.loops.unfit = lambda manifest: "it has no data"
    standbys = StandbySender(swarm.trainer, known, LIMITS)
    swarm.run(standbys.send(run, 1, lambda: plain_values.pack(STATE)))
    assert standbys.holding == [youngest]
    assert swarm.servers[youngest].snapshots.loops.versions == [1]
    # One snapshot costs a bounded number of tries, and the next one begins with other peers.
    monkeypatch.setattr("lightning_swarm.peer.failover._MAX_TRIED", 1)
    standbys.holding = ()
    swarm.run(standbys.send(run, 1, lambda: plain_values.pack(STATE)))
    assert standbys.holding == [youngest]


def inherit(swarm: Swarm, standby: PeerId, *peers: PeerId, by: PeerId = A) -> None:
    body = encode(InheritRequest(generation=0, new_lead=standby, first_step=1))
    for peer in peers:
        swarm.run(swarm.servers[by]._transport.call(peer, INHERIT.name, body, timeout=10.0))


def release(swarm: Swarm, by: PeerId, peer: PeerId) -> None:
    transport = swarm.trainer if by == LEAD else swarm.servers[by]._transport
    swarm.run(transport.call(peer, RELEASE.name, encode(ReleaseRequest(generation=0, first_step=1)), timeout=5.0))


def test_only_who_coordinates_names_a_standby_and_only_one_that_can(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    with pytest.raises(Busy, match="the lead trainer answers this server"):
        inherit(swarm, B, C)
    with pytest.raises(SwarmError, match="the run is coordinated by a"):
        inherit(swarm, B, C, by=B)
    swarm.network.freeze(LEAD)
    with pytest.raises(ProtocolError, match="a new lead must have the loop's state at step 1"):
        inherit(swarm, B, B)
    swarm.network.thaw(LEAD)
    with pytest.raises(ProtocolError, match="must be another server"):
        inherit(swarm, LEAD, C)
    assert {server.membership.run.manifest.lead for server in swarm.servers.values()} == {LEAD}
    keep(swarm, B)
    swarm.network.freeze(LEAD)
    inherit(swarm, B, C, B)
    assert {name for name, one in swarm.servers.items() if one.membership.run.manifest.lead == B} == {B, C}
    assert swarm.servers[B].admission.inherits.is_set()


def test_a_former_lead_is_told_and_releases_nobody(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    keep(swarm, B)
    swarm.network.freeze(LEAD)
    inherit(swarm, B, A, C, D, B)
    swarm.network.thaw(LEAD)
    with pytest.raises(Replaced, match=r"peer b leads run 'run' by now.*Start this program again with `initial_peers`"):
        swarm.run(swarm.trainer.call(A, RENEW.name, b"", timeout=5.0))
    with pytest.raises(ProtocolError, match="the lead b releases its servers, not trainer"):
        release(swarm, LEAD, C)
    release(swarm, B, C)
    release(swarm, B, C)  # repeated
    with pytest.raises(ProtocolError, match="was released by b, not by trainer"):
        release(swarm, LEAD, C)


def test_the_other_trainers_are_standbys_too(make_swarm: MakeSwarm) -> None:
    """They are notified to join again, because their batches count no more."""
    swarm = begun(make_swarm)
    for server in swarm.servers.values():
        server.membership.run.trainers = [LEAD, D, B]
    keep(swarm, B)
    swarm.network.freeze(LEAD)
    inherit(swarm, B, A, C, D, B)
    run = swarm.servers[A].membership.run
    assert run.trainers == run.manifest.trainers == [B, D]
    with pytest.raises(Busy, match="b leads the run now, and is about to roll it back"):
        swarm.run(swarm.servers[D]._transport.call(A, RENEW.name, b"", timeout=5.0))


def told_to_inherit(swarm: Swarm) -> list[PeerId]:
    return [name for name, server in swarm.servers.items() if server.admission.inherits.is_set()]


def test_a_majority_lets_one_standby_take_the_run_over(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    for standby in (B, D):
        keep(swarm, standby)
    run = swarm.servers[A].membership.run
    assert seniority(run) == [A, C, B, D]
    swarm.network.freeze(LEAD)
    assert swarm.run(appoint(swarm.servers[A]._transport, run, timeout=10.0)) == ""
    assert told_to_inherit(swarm) == [B]
    assert {server.membership.run.manifest.lead for server in swarm.servers.values()} == {B}


def test_without_a_majority_nobody_takes_it_over(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    keep(swarm, D)
    for peer in (B, C):
        swarm.network.freeze(peer)
    run = swarm.servers[A].membership.run
    why = swarm.run(appoint(swarm.servers[A]._transport, run, timeout=5.0))
    assert "no majority of the 3 voters" in why
    assert told_to_inherit(swarm) == []


def test_a_standby_that_the_others_heard_of_first_is_told_again(make_swarm: MakeSwarm) -> None:
    """The call to the standby is lost after all other peers were notified, so the coordinator repeats it."""
    swarm = begun(make_swarm)
    for standby in (B, D):
        keep(swarm, standby)
    lost = []

    async def lose(caller: PeerId, body: bytes) -> bytes:
        lost.append(caller)
        if len(lost) > 2:
            handlers[INHERIT.name] = answer
        raise Busy("lost")

    async def go() -> None:
        swarm.network.freeze(LEAD)
        await asyncio.sleep(LIMITS.revive_timeout + 8 * LIMITS.silence_timeout)

    handlers = swarm.servers[B]._transport._call_handlers
    answer, handlers[INHERIT.name] = handlers[INHERIT.name], lose
    swarm.run(go())
    assert lost == [A, A, A]
    assert told_to_inherit(swarm) == [B]
    assert {server.membership.run.manifest.lead for server in swarm.servers.values()} == {B}
    assert swarm.servers[A].membership.run.manifest.former_leads == [LEAD]


def test_another_coordinator_names_whom_some_have_heard_of(make_swarm: MakeSwarm) -> None:
    """The previous coordinator fell silent after it had named the standby to one server only."""
    swarm = begun(make_swarm)
    for standby in (B, D):
        keep(swarm, standby)
    swarm.network.freeze(LEAD)
    inherit(swarm, B, C)

    async def go() -> None:
        swarm.network.freeze(A)
        await asyncio.sleep(LIMITS.revive_timeout + 12 * LIMITS.silence_timeout)

    swarm.run(go())
    assert told_to_inherit(swarm) == [B]
    assert {swarm.servers[one].membership.run.manifest.lead for one in (B, C, D)} == {B}
    assert {swarm.servers[one].membership.run.coordinator for one in (B, C, D)} <= {B, C}


def test_a_named_one_is_not_passed_over_because_a_report_is_lost(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    for standby in (B, D):
        keep(swarm, standby)
    swarm.network.freeze(LEAD)
    inherit(swarm, B, A, C, D, B)
    run, transport = swarm.servers[A].membership.run, swarm.servers[A]._transport
    handlers = swarm.servers[B]._transport._call_handlers

    async def lose(caller: PeerId, body: bytes) -> bytes:
        raise Busy("lost")

    answer, handlers[HELD.name] = handlers[HELD.name], lose
    assert "not all snapshots that it needs are reported" in swarm.run(appoint(transport, run, timeout=5.0))
    handlers[HELD.name] = answer
    assert swarm.run(appoint(transport, run, timeout=5.0)) == ""
    assert told_to_inherit(swarm) == [B]
    handlers[HELD.name] = lose
    assert swarm.run(appoint(transport, run, timeout=5.0, is_last=True)) == "", "else the run would end"
    assert told_to_inherit(swarm) == [B, D]


def test_where_the_named_one_dies_before_it_knows_another_is_named(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    for standby in (B, D):
        keep(swarm, standby)
    swarm.network.freeze(LEAD)
    inherit(swarm, B, A, C, D)

    async def go() -> None:
        swarm.network.freeze(B)
        await asyncio.sleep(LIMITS.revive_timeout + 8 * LIMITS.silence_timeout)

    swarm.run(go())
    assert told_to_inherit(swarm) == [D]
    assert {swarm.servers[one].membership.run.manifest.lead for one in (A, C, D)} == {D}


def test_a_silent_lead_is_done_without_sooner_where_there_is_a_standby(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    keep(swarm, B)

    async def go() -> None:
        swarm.network.freeze(LEAD)
        await asyncio.sleep(LIMITS.revive_timeout - 1.0)
        assert told_to_inherit(swarm) == []
        await asyncio.sleep(4 * LIMITS.silence_timeout)
        assert told_to_inherit(swarm) == [B]

    swarm.run(go())


def test_a_dead_standby_is_followed_by_the_next(make_swarm: MakeSwarm) -> None:
    swarm = begun(make_swarm)
    for standby in (B, D):
        keep(swarm, standby)

    async def go() -> None:
        swarm.network.freeze(LEAD)
        await asyncio.sleep(LIMITS.revive_timeout + 3 * LIMITS.silence_timeout)
        swarm.network.freeze(B)  # before it released any server
        await asyncio.sleep(LIMITS.revive_timeout + 4 * LIMITS.silence_timeout)
        assert swarm.servers[C].membership.run.manifest.lead == D
        assert swarm.servers[C].membership.run.manifest.former_leads == [LEAD, B]

    swarm.run(go())


def test_a_lead_that_joins_as_another_process_is_not_waited_for(make_swarm: MakeSwarm) -> None:
    """It keeps its id, so it answers pings."""
    swarm = begun(make_swarm)
    keep(swarm, B)
    addresses = list(swarm.run(swarm.trainer.addresses()))
    request = JoinRequest(protocol_version=PROTOCOL_VERSION, boot_id=77, addresses=addresses, stage_index=None)

    async def go() -> None:
        await asyncio.sleep(5 * LIMITS.silence_timeout)
        assert told_to_inherit(swarm) == []
        del swarm.trainer._call_handlers[LEADS.name]
        await swarm.trainer.call(A, JOIN.name, encode(request), timeout=5.0)
        await asyncio.sleep(2 * LIMITS.silence_timeout)
        assert told_to_inherit(swarm) == [B]

    swarm.run(go())
