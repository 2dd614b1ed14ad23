"""Audited runs: keepers decide even after deaths, and a convicted server cannot return."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from typing_extensions import override

from lightning_swarm import Trust
from lightning_swarm.coordinator.step.reconcile import ReconciledStep, SumReconciliation
from lightning_swarm.core.errors import AccessDenied, ConfigError, StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.membership import JoinRequest
from lightning_swarm.protocol.messages.run import Conviction
from lightning_swarm.protocol.messages.wire import PROTOCOL_VERSION, encode
from lightning_swarm.protocol.rpc import JOIN
from lightning_swarm.testing import FaultPlan, Phase, local_swarm
from lightning_swarm.testing.local import InMemoryStrategy
from tests.faults.harness import FaultySwarm
from tests.faults.plans import STAGES
from tests.faults.test_local_swarm import Net, data

SHORT = Limits(snapshot_interval=0.001, silence_timeout=1.0, revive_timeout=1.0, call_timeout=10.0, stage_timeout=5.0)

KEEPERS = "a b d"
CONVICTED = PeerId("peer-1")
REASON = "its sum was not that of its gradients"


@pytest.mark.parametrize("at", [Phase.CLOSE, Phase.AVERAGE, Phase.DECIDE, Phase.APPLY])
def test_keepers_take_over_from_one_that_dies(at: Phase) -> None:
    swarm = FaultySwarm(*STAGES, plan=FaultPlan().kill("a", at=at, step=1, of="a"), voters=KEEPERS, keepers=KEEPERS)
    try:
        swarm.train()
        swarm.audit()
        assert swarm.count("takeover") > 0
        for server in swarm.survivors().values():
            run = server.membership.run
            assert run.coordinator in ("b", "d")
            assert {voter.peer_id for voter in run.voters} < {PeerId(name) for name in KEEPERS.split()}
    finally:
        swarm.close()


def test_servers_that_keep_nothing_come_and_go() -> None:
    swarm = FaultySwarm(
        *STAGES, plan=FaultPlan().kill("c", at=Phase.AVERAGE, step=1), voters="a", keepers="a", joiners="g", leavers="e"
    )
    try:
        swarm.train()
        swarm.audit()
        assert "g" in swarm.survivors()
        for server in swarm.survivors().values():
            assert [voter.peer_id for voter in server.membership.run.voters] == ["a"]
    finally:
        swarm.close()


def test_the_starter_keeps_alone_unless_others_are_named() -> None:
    net = Net()
    with local_swarm(5, num_stages=2, trust=Trust("audited", audit_share=0.0)) as swarm:
        swarm.trainer(max_steps=2).fit(net, data())
        (strategy,) = swarm.strategies
        runs = [server.membership.run for server in strategy.servers]
        assert all([voter.peer_id for voter in run.voters] == ["peer-0"] for run in runs)
        assert {tuple(run.electorate.keepers or ()) for run in runs} == {("peer-0",)}


def test_a_keeper_that_serves_coordinates_for_a_starter_that_does_not() -> None:
    net = Net()
    trust = Trust("audited", audit_share=0.0)
    with local_swarm(4, num_stages=2, trust=trust, role="trainer", keepers=["peer-2"]) as swarm:
        swarm.trainer(max_steps=2).fit(net, data())
        (strategy,) = swarm.strategies
        assert {server.membership.run.coordinator for server in strategy.servers} == {"peer-2"}


def test_without_a_keeper_that_serves_no_run_begins() -> None:
    with local_swarm(3, num_stages=2, trust=Trust("audited", audit_share=0.0), role="trainer") as swarm:
        trainer = swarm.trainer(max_steps=2)
        with pytest.raises(
            ConfigError, match=r"a run with strangers must be coordinated by a keeper that holds a stage.*role='"
        ):
            trainer.fit(Net(), data())


class LastOfItsStage(L.Callback):
    """Kills the only server of the first stage that was not convicted, after which the convicted one tries to join."""

    def __init__(self) -> None:
        self.refusal = ""

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        assert strategy.network is not None
        if trainer.global_step == 3 and strategy.network.is_live(PeerId("peer-3")):
            strategy.network.kill(PeerId("peer-3"))
        if trainer.global_step == 5:
            transport = strategy.peers[1].transport
            request = JoinRequest(
                protocol_version=PROTOCOL_VERSION,
                boot_id=strategy.peers[1].boot_id,
                addresses=[f"/ip4/1.1.1.1/tcp/1/p2p/{CONVICTED}"],
                stage_index=0,
            )
            try:
                asking = transport.call(PeerId("peer-0"), JOIN.name, encode(request), timeout=5.0)
                strategy.virtual_loop.run_until_complete(asking)
            except AccessDenied as error:
                self.refusal = str(error)


def test_a_run_that_goes_back_to_a_snapshot_forgives_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the first stage's two servers is convicted, and then the other one dies."""
    close = SumReconciliation.close

    async def closed(self: SumReconciliation) -> ReconciledStep | None:
        if self.step.step == 1 and CONVICTED in self.step_servers.peers:
            self.step_servers.exclude(CONVICTED, StepError(REASON))
            self.convicted[CONVICTED] = REASON
        return await close(self)

    monkeypatch.setattr(SumReconciliation, "close", closed)
    last = LastOfItsStage()
    settings = {"num_stages": 2, "trust": Trust("audited", audit_share=0.0), "latency_s": 0.001, "limits": SHORT}
    with local_swarm(5, **settings) as swarm:
        swarm.trainer(max_steps=7, max_epochs=-1, callbacks=[last]).fit(Net(), data())
    (strategy,) = swarm.strategies
    assert strategy.peers[0].events.counts["went_back"] == 1
    runs = [server.membership.run for server in strategy.servers if server.membership.is_member]
    newest = [run for run in runs if run.manifest.generation > 0]
    assert len(newest) == 3
    for run in newest:
        assert run.servers == ["peer-0", "peer-2", "peer-4"]
        assert run.manifest.convicted == [Conviction(peer=CONVICTED, reason=REASON)]
        assert run.electorate.convicted == {CONVICTED: REASON}
        assert run.electorate.keepers == ["peer-0"]
    assert f"peer-1 was convicted: {REASON}" in last.refusal
