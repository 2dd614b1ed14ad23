"""In an audited run no single server's weights reach a checkpoint, the module or a rollback unverified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from msgspec.structs import replace as replaced
from typing_extensions import override

from lightning_swarm.model.fingerprint import fingerprint
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol.messages.state import Snapshot
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import KEEP
from lightning_swarm.server.server import Server
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import SwarmRun, assert_exact, run_swarm
from tests.parity.models import digits, loader
from tests.parity.test_joining import Joining
from tests.parity.test_rollback import Fit, Killing, assert_same, make_digits, plain
from tests.poisoned import lies, raised
from tests.unit.model.forged import forged

LEAD = PeerId("peer-0")
DATA = partial(loader, digits())


class Liar(L.Callback):
    """Has the first server of a stage without the lead send false values from the start.

    Args:
        begin: Makes a server malicious.
    """

    def __init__(self, begin: Callable[[Server], None]) -> None:
        self._begin = begin
        self.name = ""
        self.stage: list[int] = []  # numbers of the stage's peers

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        if self.name:
            return  # the run rolled back
        rosters = strategy.servers[0].membership.run.rosters
        roster = next(one for one in rosters if LEAD not in {member.peer_id for member in one})
        assert len(roster) > 2
        self.name = roster[0].peer_id
        self.stage = [int(member.peer_id.removeprefix("peer-")) for member in roster]
        by_name = {server._transport.peer_id: server for server in strategy.servers}
        self._begin(by_name[PeerId(self.name)])


def unconfirmed(strategy: InMemoryStrategy) -> set[str | None]:
    events = [event for peer in strategy.peers for event in peer.events.newest]
    return {event.peer for event in events if event.kind == "unconfirmed"}


def saved(folder: Path, *callbacks: L.Callback, **options: Any) -> SwarmRun:
    """Train two epochs on two stages, with a checkpoint at the end of each and one in between."""
    every = ModelCheckpoint(folder, "{step:03d}", auto_insert_metric_name=False, every_n_train_steps=5, save_top_k=-1)
    options = {"enable_checkpointing": True, "callbacks": [*callbacks, every], "max_epochs": 2, **options}
    return run_swarm(make_digits, DATA(), num_servers=6, exact_sums=True, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("poison", [raised, forged], ids=["other weights", "the same fingerprint"])
def test_what_a_liar_sends_comes_into_no_checkpoint(poison: Any, tmp_path: Path) -> None:
    honest = saved(tmp_path / "honest")
    liar = Liar(partial(lies, poison=poison))
    found = saved(tmp_path / "beside a liar", liar, trust="audited")
    assert_exact(found, honest)
    assert unconfirmed(found.strategy) == {liar.name}
    assert not found.strategy.peers[0].events.counts["convicted"], "nor does it come to a judge"
    names = sorted(path.name for path in (tmp_path / "honest").iterdir())
    assert names
    for name in names:
        one, other = (
            torch.load(tmp_path / folder / name, weights_only=False) for folder in ("honest", "beside a liar")
        )
        for key, tensor in one["state_dict"].items():
            assert torch.equal(other["state_dict"][key], tensor)
        states = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (one, other))
        torch.testing.assert_close(*states, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_an_honest_audited_run_is_the_same_run(tmp_path: Path) -> None:
    honest = saved(tmp_path / "plain")
    found = saved(tmp_path / "audited", trust="audited")
    assert_exact(found, honest)
    assert unconfirmed(found.strategy) == set()
    assert not any(server.events.counts["gone"] for server in found.strategy.servers)


@pytest.mark.thorough
def test_a_server_joins_an_audited_run(tmp_path: Path) -> None:
    joining = Joining(at=2, count=2)
    found = saved(tmp_path / "audited", joining, trust="audited", num_joiners=2, latency_s=0.001)
    assert_exact(found, saved(tmp_path / "plain"))
    assert len(joining.entered_at) == 2
    assert unconfirmed(found.strategy) == set()


class Poisoning(L.Callback):
    """Replaces the weights of some servers of a stage without the lead before a step.

    Args:
        at: The step.
        count: Number of servers.
    """

    def __init__(self, *, at: int, count: int) -> None:
        self._at, self._count = at, count
        self.names: set[str] = set()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        if trainer.global_step != self._at or self.names:
            return
        rosters = strategy.servers[0].membership.run.rosters
        index = next(i for i, one in enumerate(rosters) if LEAD not in {member.peer_id for member in one})
        self.names = {member.peer_id for member in rosters[index][: self._count]}
        for server in strategy.servers:
            if server._transport.peer_id in self.names:
                stage = server.steps.stage(index)
                own = stage.weights()
                stage.load_weights(dict(zip(own, raised(list(own.values())), strict=True)))


def test_what_a_server_with_other_weights_computed_counts_nowhere(tmp_path: Path) -> None:
    """Its false outputs went to the next stage, whose honest servers added the resulting gradients."""
    poisoning = Poisoning(at=4, count=1)
    found = saved(tmp_path / "audited", poisoning, trust="audited", num_gone=1)
    assert_exact(found, saved(tmp_path / "plain"))
    gone = {event.peer for event in found.strategy.peers[0].events.newest if event.kind == "gone"}
    assert gone == poisoning.names


def sends_false_snapshots(server: Server) -> None:
    transport: Any = server._transport
    honest = transport.stream

    async def stream(peer: PeerId, method: str, message: Message, **options: Any) -> Message:
        if method == KEEP.name:
            tensors = tuple(raised(message.tensors))
            head = replaced(decode(message.body, Snapshot), version_hash=fingerprint(tensors))
            message = Message(encode(head), tensors)
        answer: Message = await honest(peer, method, message, **options)
        return answer

    transport.stream = stream


class KillingTheStage(Killing):
    """Kills all servers of a malicious server's stage.

    Args:
        at: The step before which they die.
        liar: Knows the stage.
    """

    def __init__(self, at: int, liar: Liar) -> None:
        super().__init__([at], [[]])
        self._liar = liar

    @override
    def kill_those_due(self, trainer: L.Trainer) -> None:
        if self.left:
            self.left = [(self.left[0][0], self._liar.stage)]
        super().kill_those_due(trainer)


def test_after_a_stage_is_lost_the_run_goes_on_from_what_its_servers_had() -> None:
    """The stage's first server had sent false weights to the keeper."""
    liar = Liar(sends_false_snapshots)
    killing = KillingTheStage(6, liar)
    fit = Fit(killing, devices=6, callbacks=[liar], swarm={"trust": "audited"})
    assert killing.num_killed == len(liar.stage)
    assert fit.num_went_back == 1
    assert unconfirmed(fit.strategy) == {liar.name}
    assert_same(fit, killing, plain())
