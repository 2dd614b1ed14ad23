"""A joiner's download: in pieces, from several members at once, and at a bounded rate."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError, TicketGone, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.progress import Progress
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.access import Permit, Role
from lightning_swarm.protocol import queries, serialization
from lightning_swarm.protocol.messages.membership import FollowReply, TensorLayout
from lightning_swarm.protocol.messages.state import Snapshot
from lightning_swarm.protocol.rpc import FOLLOW, PIECE
from lightning_swarm.server.server import Server
from lightning_swarm.server.state_transfer import donor, stage_copy
from lightning_swarm.server.state_transfer.donor import Throttle
from lightning_swarm.server.state_transfer.stage_copy import IncomingSnapshot, StageCopy
from tests.unit.conftest import MakeSwarm
from tests.unit.swarm import WIDTH, Swarm, rows

A, J = PeerId("a"), PeerId("j")
STATE_BYTES = 2 * (WIDTH * WIDTH + WIDTH) * 8  # a stage's state after its first step: weights and momenta


class Holder:
    """A stage with only the attributes that a blank copy needs."""

    index = 0

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def weights(self) -> dict[str, Tensor]:
        return {str(number): tensor for number, tensor in enumerate(self._tensors)}


TENSORS = (
    torch.arange(7, dtype=torch.float32),
    torch.tensor(3.5, dtype=torch.float64),
    torch.empty(0, 4),
    torch.tensor([True, False, True]),
    torch.arange(6, dtype=torch.int16).reshape(2, 3),
    torch.arange(4, dtype=torch.bfloat16).reshape(4, 1).expand(4, 1)[:1],
)


def copy_of(tensors: Sequence[Tensor] = TENSORS) -> StageCopy:
    names = [str(number) for number in range(len(tensors))]
    snapshot = Snapshot(
        generation=0,
        stage_index=0,
        version=4,
        version_hash=1,
        weights=names,
        optimizer=[],
        structure=serialization.flatten([])[0],
        selection=None,
    )
    layouts = [TensorLayout(shape=list(one.shape), dtype=str(one.dtype).removeprefix("torch.")) for one in tensors]
    return StageCopy(FollowReply(snapshot=snapshot, layouts=layouts), tuple(tensors))


def blank(copy: StageCopy, **changes: Any) -> IncomingSnapshot:
    stage: Any = Holder(changes.pop("own", TENSORS))
    return IncomingSnapshot(copy.head, stage, max_bytes=changes.pop("max_bytes", 1000))


@pytest.mark.parametrize("piece_bytes", [1, 5, 8, 1000])
def test_pieces_of_any_length_make_the_whole(piece_bytes: int) -> None:
    copy = copy_of()
    made = blank(copy)
    assert made.num_bytes == copy.num_bytes == 28 + 8 + 3 + 12 + 2
    for start in reversed(range(0, copy.num_bytes, piece_bytes)):
        parts = copy.piece(start, start + piece_bytes)
        assert made.fill(start, parts, at_most=piece_bytes) == min(piece_bytes, copy.num_bytes - start)
    weights, state = made.values()
    assert state == {}
    for found, expected in zip(weights.values(), TENSORS, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


BYTES = torch.zeros(9, dtype=torch.uint8)
WRONG: dict[str, Sequence[Tensor]] = {
    "nothing": [],
    "too long": [BYTES],
    "other numbers": [BYTES[:8].view(torch.int32)],
    "a matrix": [BYTES[:8].reshape(2, 4)],
    "cut in the midst of a tensor": [BYTES[:2], BYTES[:2]],
    "not cut where a tensor ends": [BYTES[:8]],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_piece_changes_nothing(wrong: str) -> None:
    copy = copy_of()
    made = blank(copy)
    made.fill(0, copy.piece(0, copy.num_bytes), at_most=1000)
    with pytest.raises(ProtocolError, match="a piece"):
        made.fill(24, WRONG[wrong], at_most=8)
    assert all(map(torch.equal, made.values()[0].values(), TENSORS))


def test_a_copy_of_something_else_is_refused_before_memory_is_taken() -> None:
    for own in (TENSORS[:-1], (TENSORS[0].double(), *TENSORS[1:]), (TENSORS[0][:3], *TENSORS[1:])):
        with pytest.raises(ProtocolError, match="must have weights of the stage's shapes and dtypes"):
            blank(copy_of(), own=own)
    with pytest.raises(ProtocolError, match=r"at most `Limits\.max_message_bytes` = 52 bytes, got 53"):
        blank(copy_of(), max_bytes=52)
    layouts = [*copy_of().head.layouts, TensorLayout(shape=[1], dtype="nn")]
    with pytest.raises(ProtocolError, match="a dtype of torch, got 'nn'"):
        blank(StageCopy(FollowReply(snapshot=copy_of().head.snapshot, layouts=layouts), ()))


def test_a_bool_that_is_none_is_refused() -> None:
    made = blank(copy_of())
    copy = copy_of((*TENSORS[:3], torch.tensor([2, 0, 1], dtype=torch.uint8), *TENSORS[4:]))
    made.fill(0, copy.piece(0, 53), at_most=53)
    with pytest.raises(ProtocolError, match="neither 0 nor 1"):
        made.values()


def test_a_throttle_serves_who_comes_first_at_its_rate(loop: VirtualLoop) -> None:
    throttle = Throttle(100)
    through: list[tuple[str, float]] = []

    async def take(name: str, num_bytes: int) -> None:
        await throttle.acquire(num_bytes)
        through.append((name, loop.time()))

    async def go() -> None:
        await asyncio.gather(take("a", 50), take("b", 200), take("c", 10))
        throttle.charge(100)  # more than 2.1 s' worth by now
        await take("d", 1)
        await asyncio.sleep(100.0)
        await take("e", 1000)

    loop.run_until_complete(go())
    assert through == [("a", 0.0), ("b", 0.5), ("c", 2.5), ("d", pytest.approx(3.6)), ("e", pytest.approx(103.6))]


# ---------------------------------------------------------------------- from several members


def in_pieces(monkeypatch: pytest.MonkeyPatch, num_bytes: int = 16) -> None:
    monkeypatch.setattr(stage_copy, "PIECE_BYTES", num_bytes)


def sent_pieces(swarm: Swarm) -> Counter[PeerId]:
    """Return the bytes that each sender sent the joiner."""
    found = Counter[PeerId]()
    for peer, server in swarm.servers.items():
        found[peer] = server._transport.traffic.sent_bytes[J, PIECE.name]
    return +found


def joined(swarm: Swarm) -> Server:
    swarm.run(swarm.step(rows(0), rows(1)))
    joiner = swarm.join(J)
    swarm.run(swarm.step(rows(2), rows(3)))
    assert joiner.membership.is_member
    swarm.weights()  # all replicas are equal
    return joiner


def test_members_send_the_state_together(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)
    swarm = make_swarm("a a2 a3", "b b2 b3 b4")
    joined(swarm)
    sent = sent_pieces(swarm)
    assert set(sent) == {"a", "a2", "a3"}
    assert min(sent.values()) > 0.2 * sum(sent.values())
    swarm.run(asyncio.sleep(3.0))
    assert all(server.donor._state.downloads == {} for server in swarm.servers.values()), (
        "they were told that it is through"
    )


def test_a_joiner_reports_each_of_its_waits(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)
    swarm = make_swarm("a a2", "b b2 b3")
    swarm.run(swarm.step(rows(0), rows(1)))
    joiner = swarm.add_server(J)
    news: list[str | Progress] = []
    permits = {J: Permit(Role.SERVER, 0.0, b"", 1)}
    monkeypatch.setattr(joiner.joiner._transport, "permit_of", permits.get)

    async def find() -> Sequence[PeerId]:
        return [A]

    swarm.joining.append(swarm.loop.create_task(joiner.joiner.enter(find, news.append)))
    swarm.run(asyncio.sleep(1.0))
    swarm.run(swarm.step(rows(2), rows(3)))
    assert joiner.membership.is_member
    download = "Downloading stage 0 from 2 peers"
    pieces = [(one.num_bytes, one.total_bytes) for one in news if isinstance(one, Progress) and one.state == download]
    assert pieces == [(min(sent, STATE_BYTES), STATE_BYTES) for sent in range(0, STATE_BYTES + 16, 16)]
    states = [str(one) for one in news if not str(one).startswith(download)]
    assert states == [
        "Asking for a run by this peer's certificate as server",
        "Asking a for a stage, which accepts the certificate",
        "Building stage 0",
        "Comparing stage 0 with the run's",
        "Stage 0 is loaded, at step 1. This peer enters when a step ends.",
        "Waiting for a step to end: step 1 is open",
    ]


def all_join(swarm: Swarm) -> tuple[list[PeerId], dict[PeerId, dict[str, list[str]]]]:
    """Let four servers join, one after the other; return their names, and the details that each reports by state."""
    names = [PeerId(f"j{number}") for number in range(4)]
    waits: dict[PeerId, dict[str, list[str]]] = {name: defaultdict(list) for name in names}

    async def find() -> Sequence[PeerId]:
        return [A]

    def note(name: PeerId, news: str | Progress) -> None:
        if isinstance(news, Progress):
            waits[name][news.state].append(news.detail)

    for name in names:
        joiner = swarm.add_server(name).joiner
        swarm.joining.append(swarm.loop.create_task(joiner.enter(find, partial(note, name))))
        swarm.run(asyncio.sleep(0.1))
    return names, waits


def test_a_step_admits_joiners_in_turn(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told how many of those that are ready come before it; a stage of one server admits two."""
    monkeypatch.setattr(donor, "_MAX_JOINING", 4)
    swarm = make_swarm("a", "b b2 b3 b4 b5")
    swarm.run(swarm.step(rows(0), rows(1)))
    names, waits = all_join(swarm)
    state = "Waiting for a step to end"
    turns = [waits[name].pop(state)[-1] for name in names]
    assert turns == ["step 1 is open", *(f"step 1 is open, {number} wait before this peer" for number in (1, 2, 3))]
    swarm.run(swarm.step(rows(2), rows(3)))
    assert [swarm.servers[name].membership.is_member for name in names] == [True, True, False, False]
    swarm.run(asyncio.sleep(1.0))
    assert [waits[name][state][-1:] for name in names] == [
        [],
        [],
        ["step 2 is open"],
        ["step 2 is open, 1 wait before this peer"],
    ]


def test_joiners_download_and_enter_in_turn(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told how many are before it. One that is away keeps its turn, and delays no other."""
    monkeypatch.setattr(donor, "_MAX_JOINING", 1)
    swarm = make_swarm("a", "b b2 b3 b4 b5")
    swarm.run(swarm.step(rows(0), rows(1)))
    names, waits = all_join(swarm)
    swarm.run(asyncio.sleep(40.0))  # each has asked several times
    for number, name in enumerate(names):
        before = f"at most 1 peers may join through a at once, and {number - 1} wait before this peer"
        details = waits[name]["Waiting to download stage 0"]
        assert set(details) == ({before} if number else set())
        assert len(details) > 1 or not number
    admitted = []
    for seed in range(2, 10):
        swarm.run(swarm.step(rows(seed)))
        admitted += [name for name in names if name not in admitted and swarm.servers[name].membership.is_member]
        swarm.run(asyncio.sleep(20.0))
    assert admitted == names
    assert swarm.servers[A].donor._turns == {}


def test_other_versions_join_with_one_warning(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    greet, here = queries.greet, queries.own_greeting(0.0).versions

    async def greet_other(*arguments: Any, **options: Any) -> Any:
        found = await greet(*arguments, **options)
        versions = {**here, "torch": "2.4.0\x1b", "Python": "3.99.0", "hivemind": "1.1.99"}
        return replace(found, greeting=msgspec.structs.replace(found.greeting, versions=versions))

    monkeypatch.setattr(queries, "greet", greet_other)
    swarm = make_swarm("a", "b")
    joined(swarm)
    [warning] = [one.getMessage() for one in caplog.records if one.getMessage().startswith("Versions here")]
    assert f"Python {here['Python']} here, 3.99.0 there; torch {here['torch']} here, 2.4.0? there." in warning
    assert "hivemind" not in warning


def intercept(server: Server, method: str, change: Callable[[Message], Message]) -> None:
    """Change a server's answers."""
    handlers = server._transport._stream_handlers  # type: ignore[attr-defined]
    handle, *limits = handlers[method]

    async def changed(caller: PeerId, message: Message) -> Message:
        return change(await handle(caller, message))

    handlers[method] = (changed, *limits)


def test_a_helper_that_dies_is_done_without(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)
    swarm = make_swarm("a a2", "b b2")
    swarm.run(swarm.step(rows(0), rows(1)))
    swarm.add_server(J)
    peers = [PeerId("a"), PeerId("a2")]
    first = peers[(swarm.servers[J].membership.me.boot_id + 1) % 2]
    [helper] = set(peers) - {first}
    num_pieces = 0

    def fail(message: Message) -> Message:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == 3:
            raise Unreachable("it died")
        return message

    intercept(swarm.servers[helper], PIECE.name, fail)

    async def find() -> Sequence[PeerId]:
        return [A]

    swarm.joining.append(swarm.loop.create_task(swarm.servers[J].joiner.enter(find)))
    swarm.run(asyncio.sleep(1.0))
    swarm.run(swarm.step(rows(2), rows(3)))
    assert num_pieces >= 3
    assert swarm.servers[J].membership.is_member
    assert sent_pieces(swarm)[first] > 0.5 * STATE_BYTES
    swarm.weights()


def test_a_helper_that_sends_something_else_is_asked_no_more(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_pieces(monkeypatch)
    swarm = make_swarm("a a2", "b b2")
    swarm.run(swarm.step(rows(0), rows(1)))
    boot_id = 100 + len(swarm.servers)
    helper = [PeerId("a"), PeerId("a2")][boot_id % 2]  # another donor than the first one, and than the next attempt's

    def spoil(message: Message) -> Message:
        return Message(message.body, tuple(tensor ^ 1 for tensor in message.tensors)) if spoiling else message

    spoiling = True
    intercept(swarm.servers[helper], PIECE.name, spoil)
    swarm.join(J)
    assert "sent are not the state of one version" in caplog.text
    spoiling = False
    sent = sent_pieces(swarm)
    swarm.run(asyncio.sleep(10.0))
    swarm.run(swarm.step(rows(2), rows(3)))
    assert swarm.servers[J].membership.is_member
    again = sent_pieces(swarm) - sent
    assert len(again) == 1, "one member alone sent it the second time"
    swarm.weights()


def test_members_at_another_version_do_not_help(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(monkeypatch)
    swarm = make_swarm("a a2", "b b2")
    swarm.run(swarm.step(rows(0), rows(1)))
    joiner = swarm.add_server(J)
    stream = joiner._transport.stream
    refused: list[str] = []

    async def between(peer: PeerId, method: str, message: Message, **more: Any) -> Message:
        try:
            answer = await stream(peer, method, message, **more)
        except TicketGone as error:
            refused.append(str(error))
            raise
        if method == FOLLOW.name:
            await swarm.step(rows(2), rows(3))  # a record is applied before the second member is asked
        return answer

    joiner._transport.stream = between  # type: ignore[method-assign]

    async def find() -> Sequence[PeerId]:
        return [A]

    swarm.joining.append(swarm.loop.create_task(joiner.joiner.enter(find)))
    swarm.run(asyncio.sleep(1.0))
    assert refused == ["stage 0 is at version 2 here"]
    assert len(sent_pieces(swarm)) == 1
    swarm.run(swarm.step(rows(4), rows(5)))
    assert joiner.membership.is_member
    swarm.weights()


# ---------------------------------------------------------------------- not too fast


def test_what_joiners_download_keeps_to_the_rate(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = make_swarm("a", "b", limits=Limits(call_timeout=30.0, max_upload=20))
    monkeypatch.setattr(donor, "_MIN_PIECE_BYTES", 16)
    in_pieces(monkeypatch)
    swarm.run(swarm.step(rows(0), rows(1)))
    joiner = swarm.add_server(J)

    async def find() -> Sequence[PeerId]:
        return [A]

    begin_s = swarm.loop.time()
    swarm.joining.append(swarm.loop.create_task(joiner.joiner.enter(find)))

    async def caught_up() -> None:
        while not joiner.membership.has_run:  # noqa: ASYNC110 - the clock is virtual
            await asyncio.sleep(0.1)

    swarm.run(caught_up())
    assert swarm.loop.time() - begin_s == pytest.approx(STATE_BYTES / 20, rel=0.15)
