"""The table of methods: each stands once, has a handler, and asks for the roles that it takes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_swarm
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import OPEN_METHODS, Role
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.protocol import rpc
from lightning_swarm.protocol.messages.wire import WireMessage, encode
from lightning_swarm.protocol.rpc import RPCS, Call, Download, Upload

BY_NAME = {one.name: one for one in RPCS}
PACKAGE = Path(lightning_swarm.__file__).parent


def served_in_package() -> Iterator[str]:
    """The constants of the methods that modules of the package answer."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "serve":
                name = ast.unparse(node.value).removeprefix("rpc.")
                if name.isupper():
                    yield name


def test_each_method_stands_once_and_has_a_handler() -> None:
    assert len(BY_NAME) == len(RPCS) > 80
    assert not OPEN_METHODS & BY_NAME.keys()
    served = Counter(served_in_package())
    assert {name for name, value in vars(rpc).items() if value in RPCS} == served.keys()
    assert set(served.values()) == {1}
    quoted = [name for path in PACKAGE.rglob("*.py") for name in BY_NAME if f'"{name}"' in path.read_text()]
    assert sorted(quoted) == sorted(BY_NAME)


def test_what_decides_over_a_run_needs_the_role_that_it_takes() -> None:
    """Each by its name: the matrix of the gate's tests would follow a table that was loosened."""
    decides = ["admit", "load", "restart", "release"]
    computes = ["forward", "backward", "cancel", "state", "write", "set_evaluation_weights"]
    leads = ["run.claim", "run.enlist", "step.grant", "step.done", "step.record", "snapshot.keep_loop", "trainer.loop"]
    trainers = [*(f"server.{name}" for name in decides), *(f"stage.{name}" for name in computes), *leads]
    assert {BY_NAME[method].by for method in trainers} == {Role.TRAINER}
    coordinates = [
        "run.lead",
        "run.inherit",
        "run.take_over",
        "run.listen",
        "step.prepare",
        "step.propose",
        "step.freeze",
    ]
    reads = [
        "step.apply",
        "stage.follow",
        "stage.piece",
        "snapshot.keep",
        "snapshot.read",
        "ticket.wait",
        "ticket.fetch",
    ]
    assert {BY_NAME[method].by for method in [*coordinates, *reads]} == {Role.SERVER}
    assert {"transport.certify", "transport.introduce", "transport.ping"} == OPEN_METHODS
    assert Counter(one.by for one in RPCS) == {Role.OBSERVER: 7, Role.SERVER: 52, Role.TRAINER: 33}


def test_only_trainers_answer_what_a_lead_answers() -> None:
    asked = {one.name for one in RPCS if one.of is Role.TRAINER}
    assert asked == {
        "run.claim",
        "run.text",
        "session.failed",
        "session.outputs",
        "snapshot.keep_loop",
        "trainer.audit",
        "trainer.avoid",
        "trainer.leads",
        "trainer.loop",
        "trainer.replay",
        "trainer.report",
        "trainer.report_metrics",
        "trainer.results",
    }
    assert {one.name for one in RPCS if one.of is Role.OBSERVER} == {
        "peer.ban",
        "peer.hello",
        "peer.others",
        "peer.report",
    }


def test_all_messages_are_records_or_plain_bytes() -> None:
    for one in RPCS:
        for kind in (one.request, one.reply):
            assert kind in (None, bytes) or issubclass(kind, WireMessage), one.name
        assert isinstance(one, (Call, Download, Upload))


REFUSED = PeerId("refused")


@pytest.mark.parametrize(
    ("method", "good", "bad"),
    [
        (rpc.LEAVE, b"", b"x"),
        (rpc.CLAIM, b"", b"x"),
        (rpc.SESSION_CLOSE, encode(rpc.SESSION_CLOSE.request(session="0" * 32, keeps=False)), b"x"),
    ],
    ids=lambda value: value.name if isinstance(value, Call) else "",
)
def test_a_malformed_request_comes_to_no_handler(method: Call, good: bytes, bad: bytes) -> None:
    loop, network = VirtualLoop(), MemoryNetwork()
    served, caller, refused = (network.transport(name) for name in ("served", "caller", REFUSED))
    came: list[object] = []

    def admit(peer: PeerId) -> None:
        if peer == REFUSED:
            raise ProtocolError("is refused first")

    async def handle(peer: PeerId, request: object) -> object:
        came.append(request)
        return None

    method.serve(served, handle, admit=admit)
    with pytest.raises(ProtocolError, match=r"takes no arguments, got 1 bytes|must hold one SessionClose, got 1 bytes"):
        loop.run_until_complete(caller.call(served.peer_id, method.name, bad, timeout=1.0))
    with pytest.raises(ProtocolError, match="is refused first"):
        loop.run_until_complete(refused.call(served.peer_id, method.name, bad, timeout=1.0))
    assert came == []
    assert loop.run_until_complete(caller.call(served.peer_id, method.name, good, timeout=1.0)) == b""
    assert len(came) == 1
    loop.close()
