"""Malicious servers in audited runs are convicted, and the weights equal an honest run's."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from msgspec.structs import replace as replaced
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm import Trust
from lightning_swarm.client.pipeline.replay_buffer import ReplayBuffer
from lightning_swarm.coordinator.audit import policy, step_audits
from lightning_swarm.coordinator.audit.step_audits import StepAudits
from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.audits import SketchReply
from lightning_swarm.protocol.messages.calls import CallKey
from lightning_swarm.protocol.settings import CodecName, Compression, OnConviction
from lightning_swarm.server.audit.handlers import AuditHandlers
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.state_transfer.handlers import StateHandlers
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase
from tests.adversaries.adversary import Adversary
from tests.adversaries.swarms import local_swarm

WIDTH, ROWS, NUM_STEPS, SINCE = 8, 24, 6, 3
KEEPER = "peer-0"


class Model(LightningModule):
    """Four blocks, with dropout."""

    def __init__(self, dtype: torch.dtype = torch.float64, block: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), block(), nn.Dropout(0.2)) for _ in range(4)]
        self.net = nn.Sequential(*made)

    @override
    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return (self.net(inputs) - targets).square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data(dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(*torch.randn(2, NUM_STEPS * ROWS, WIDTH, dtype=dtype)), batch_size=ROWS)


def train(
    num_peers: int,
    *adversaries: Adversary,
    model: LightningModule | None = None,
    dtype: torch.dtype = torch.float64,
    faults: FaultPlan | None = None,
    **settings: Any,
) -> tuple[Tensor, InMemoryStrategy]:
    """Train; return the weights and the strategy."""
    settings = {"microbatch_size": 2, "deterministic": True, **settings}
    with local_swarm(num_peers, adversaries=adversaries, faults=faults, **settings) as swarm:
        trainer = swarm.trainer(max_steps=NUM_STEPS)
        module = model or Model(dtype)
        trainer.fit(module, data(dtype))
        (strategy,) = swarm.strategies
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]), strategy


@functools.cache
def honest_weights(num_peers: int, *, model: Callable[[], LightningModule] | None = None, **settings: Any) -> Tensor:
    """Return the result of `train` with an honest swarm; each run is computed once."""
    return train(num_peers, model=model and model(), **settings)[0]


def audited(
    num_peers: int,
    *adversaries: Adversary,
    share: float = 1.0,
    on_conviction: OnConviction = "go_on",
    **settings: Any,
) -> tuple[Tensor, InMemoryStrategy]:
    # A rollback would hide whether a step counted false work, so the run goes on after convictions.
    trust = Trust("audited", audit_share=share, on_conviction=on_conviction)
    return train(num_peers, *adversaries, trust=trust, **settings)


def events_of(strategy: InMemoryStrategy, kind: str) -> set[str]:
    """Return the peers in the coordinator's events of a kind."""
    return {str(event.peer) for event in strategy.servers[0].events.newest if event.kind == kind}


@pytest.fixture
def without_probation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "PROBATION", 0)


# ------------------------------------------------------------------ honest runs


@pytest.mark.thorough
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_audits_change_nothing_of_an_honest_run(stages: int, dtype: torch.dtype, deterministic: bool) -> None:
    expected = honest_weights(8, num_stages=stages, dtype=dtype, deterministic=True)
    found, strategy = audited(8, num_stages=stages, dtype=dtype, deterministic=deterministic)
    assert not events_of(strategy, "convicted") | events_of(strategy, "disputed")
    tolerance = 0.0 if deterministic else 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


class Overflowing(Model):
    """Its loss is not finite in one step."""

    @override
    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = super().training_step(batch)
        return loss * torch.inf if self.global_step == SINCE else loss


@pytest.mark.thorough
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_that_overflow_are_no_lies(deterministic: bool) -> None:
    expected = honest_weights(6, num_stages=2, model=Overflowing, deterministic=True)
    found, strategy = audited(6, num_stages=2, model=Overflowing(), deterministic=deterministic)
    assert not events_of(strategy, "convicted") | events_of(strategy, "disputed")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("compression", ["8bit", "float16"])
def test_audits_look_at_encoded_tensors(compression: CodecName) -> None:
    codec = Compression(activations=compression, gradients=compression)
    _, strategy = audited(4, num_stages=2, compression=codec, dtype=torch.float32)
    assert not events_of(strategy, "convicted") | events_of(strategy, "disputed")


# ------------------------------------------------------------------ liars

SUMS: list[tuple[str, dict[str, Any]]] = [
    ("sign_flip", {"strength": 1000.0}),
    ("sign_flip", {"strength": 1.0}),
    ("random_direction", {"strength": 1000.0}),
    ("delayed_gradient", {"delay": 2}),
    ("inner_product", {"strength": 0.1}),
    ("little_is_enough", {}),
    ("zero_sum", {}),
    ("not_a_number", {}),
    ("scaled_sum", {"strength": 1.0001}),
    ("no_compute", {}),
]
OUTPUTS: list[tuple[str, dict[str, Any]]] = [
    ("noisy_output", {}),
    ("scaled_output", {"strength": 1.05}),
    ("scaled_output", {"strength": 0.0}),
    ("skipped_blocks", {}),
    ("noisy_input_gradient", {}),
    ("scaled_input_gradient", {"strength": -1.0}),
]


@pytest.mark.thorough
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("attack", "options"), SUMS)
def test_who_lies_of_its_sum_is_out_and_nothing_of_it_counts(attack: str, options: dict[str, Any], stages: int) -> None:
    liars = ["peer-2", "peer-3"]
    expected = honest_weights(6, num_stages=stages)
    found, strategy = audited(
        6, *(Adversary(liar, attack, since=SINCE, **options) for liar in liars), num_stages=stages
    )
    assert events_of(strategy, "convicted") == {*liars}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("liar", ["peer-2", "peer-3"])  # the last stage's, and the first stage's
@pytest.mark.parametrize(("attack", "options"), OUTPUTS)
def test_batches_that_went_through_false_outputs_run_again(attack: str, options: dict[str, Any], liar: str) -> None:
    if liar == "peer-3" and "input_gradient" in attack:
        pytest.skip("nobody asks the first stage for its input's gradient")
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(6, Adversary(liar, attack, since=SINCE, **options), num_stages=2)
    assert events_of(strategy, "convicted") == {liar}
    assert events_of(strategy, "strike")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("attack", ["sign_flip", "little_is_enough", "skipped_blocks"])
def test_most_of_a_stage_may_lie(attack: str) -> None:
    """The coordinator holds the other stage, and judges with weights that it fetches."""
    liars = ["peer-1", "peer-3"]  # two of peer-1, peer-3 and peer-5, which hold the first stage
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(6, *(Adversary(liar, attack, since=SINCE) for liar in liars), num_stages=2)
    assert events_of(strategy, "convicted") == {*liars}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_who_accuses_falsely_is_out() -> None:
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(6, Adversary("peer-3", "false_accusation", since=SINCE), num_stages=2)
    assert events_of(strategy, "convicted") == {"peer-3"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("attack", "options"),
    [("sign_flip", {"strength": 1000.0}), ("random_direction", {"strength": 1000.0}), ("not_a_number", {})],
)
@pytest.mark.parametrize("num_peers", [4, 8])
@pytest.mark.usefixtures("without_probation")
def test_the_screen_finds_gross_lies_without_lots(attack: str, options: dict[str, Any], num_peers: int) -> None:
    liars = [f"peer-{number}" for number in range(1, num_peers // 2)]
    expected = honest_weights(num_peers, num_stages=1)
    lies = [Adversary(liar, attack, since=SINCE, **options) for liar in liars]
    found, strategy = audited(num_peers, *lies, share=0.0, num_stages=1)
    assert events_of(strategy, "convicted") == {*liars}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("phase", [Phase.CLOSE_DONE, Phase.AVERAGE, Phase.BACKWARD_DONE])
def test_honest_servers_may_die_meanwhile(phase: Phase) -> None:
    expected = honest_weights(6, num_stages=2)
    faults = FaultPlan().kill("peer-4", at=phase, step=SINCE)
    found, strategy = audited(6, Adversary("peer-2", "sign_flip", since=SINCE), faults=faults, num_stages=2)
    assert events_of(strategy, "convicted") == {"peer-2"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


DYING_IN_AUDITS = [phase for phase in Phase if phase.name.startswith(("SKETCH", "AUDIT", "KEPT_WORK", "FINDINGS"))]


@pytest.mark.thorough
@pytest.mark.parametrize("phase", DYING_IN_AUDITS, ids=lambda phase: phase.name)
def test_who_dies_in_the_middle_of_audits_is_no_liar(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_audits, "lots", random.Random(0))  # a seed that draws peer-1
    expected = honest_weights(6, num_stages=2)
    faults = FaultPlan().kill("peer-1", at=phase)
    found, strategy = audited(6, share=1.0, faults=faults, num_stages=2)
    assert events_of(strategy, "convicted") == set()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


class Idle:
    """Servers that refuse to compute as auditors, or to send weights to a judge."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, handlers: type, method: str, peers: set[str]) -> None:
        self.num_refused = 0
        honest = getattr(handlers, method)

        async def refuse(own: Any, *request: Any) -> Any:
            if own._membership.me.peer_id not in peers or own._membership.run.version not in (SINCE, SINCE + 1):
                return await honest(own, *request)
            self.num_refused += 1
            raise ProtocolError("not today")

        monkeypatch.setattr(handlers, method, refuse)


@pytest.mark.thorough
def test_an_auditor_that_does_nothing_lets_no_accomplice_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(monkeypatch, AuditHandlers, "_handle_audit", {"peer-1", "peer-5"})
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(6, Adversary("peer-3", "scaled_sum", since=SINCE, strength=1.01), num_stages=2)
    assert idle.num_refused
    assert events_of(strategy, "convicted") == {"peer-3"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_what_nobody_can_judge_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """All servers of a stage refuse to send weights to the judge, and one of them sends a false sum."""
    monkeypatch.setattr(step_audits, "_OWN_SHARE", 0.0)  # otherwise honest servers may be disputed, too
    idle = Idle(monkeypatch, StateHandlers, "_handle_state", {"peer-1", "peer-3", "peer-5"})
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(6, Adversary("peer-3", "scaled_sum", since=SINCE), num_stages=2)
    assert idle.num_refused
    assert events_of(strategy, "disputed") >= {"peer-3"}
    assert not events_of(strategy, "convicted")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize(("share", "strength"), [(1.0, 30.0), (0.0, 1000.0)])
@pytest.mark.usefixtures("without_probation")
def test_who_shows_auditors_another_sum_than_it_gives_is_convicted(
    share: float, strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, num_lies = AuditHandlers._handle_sketch, 0

    async def answer(own: AuditHandlers, *request: Any) -> SketchReply:
        nonlocal num_lies
        reply = await honest(own, *request)
        if own._membership.me.peer_id == "peer-3" and own._membership.run.version >= SINCE:
            num_lies += 1
            (stage,) = reply.stages
            stages = [replaced(stage, values=[value / strength for value in stage.values])]
            reply = SketchReply(stages=stages)
        return reply

    monkeypatch.setattr(AuditHandlers, "_handle_sketch", answer)
    expected = honest_weights(8, num_stages=1)
    liar = Adversary("peer-3", "scaled_sum", since=SINCE, strength=strength)
    found, strategy = audited(8, liar, share=share, num_stages=1, deterministic=False)
    assert num_lies
    assert events_of(strategy, "convicted") == {"peer-3"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


@pytest.mark.thorough
def test_who_claims_to_hold_nothing_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports no microbatch, but contributes a sum nevertheless."""
    freeze = GradientSums._freeze_stage

    def lying(own: GradientSums, stage: Stage, *rest: Any) -> list[str]:
        stale = freeze(own, stage, *rest)
        if own._me.peer_id == "peer-3" and own.version >= SINCE:
            own.ledgers[stage.index]._receipts.clear()
            own.ledgers[stage.index].origins.clear()
            stage.sum_of(own.version).values.fill_(1 << 50)
        return stale

    monkeypatch.setattr(GradientSums, "_freeze_stage", lying)
    found, strategy = audited(6, num_stages=1, share=0.0)
    monkeypatch.setattr(GradientSums, "_freeze_stage", freeze)
    expected = honest_weights(6, num_stages=1)
    assert events_of(strategy, "convicted") == {"peer-3"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_a_copy_that_its_trainer_has_lost_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(self: ReplayBuffer, key: CallKey) -> None:
        return None

    monkeypatch.setattr(ReplayBuffer, "find", find)
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(6, num_stages=2)
    assert events_of(strategy, "disputed")
    assert not events_of(strategy, "gone")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


# ------------------------------------------------------------------ what is refused


class WithBatchNorm(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(WIDTH, dtype=torch.float64))


class Frozen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[1].requires_grad_(False)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.net[3][0].weight = self.net[0][0].weight


@pytest.mark.parametrize(
    ("model", "error"),
    [
        (WithBatchNorm, "running statistics"),
        (Frozen, "the first stage must train a parameter"),
        (Tied, "in two stages"),
    ],
)
def test_models_that_no_audit_can_look_into_are_refused(model: type[Model], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        audited(4, num_stages=2, model=model())


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"trust": Trust("audited", 1.5)}, "0..1"),
        ({"trust": Trust("audited", True)}, "0..1"),
        ({"delay_optimizer_step": True}, "delay_optimizer_step"),
        ({"compression": "8bit"}, "averaging"),
        ({"rebalancing": "paper"}, "paper"),
        ({"role": "both", "target_batch_size": 8}, "role 'both'"),
        ({"trust": Trust("invited", 0.5)}, "needs `trust='audited'`"),
    ],
)
def test_settings_that_no_audit_can_look_into_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        InMemoryStrategy(**{"trust": "audited", **settings})


@pytest.mark.thorough
def test_what_audits_ask_for_may_be_on_disk() -> None:
    """No server keeps a microbatch's tensors in memory."""
    expected = honest_weights(6, num_stages=2)
    found, strategy = audited(
        6, Adversary("peer-3", "noisy_output", since=SINCE), num_stages=2, limits=Limits(cache_bytes=0)
    )
    assert events_of(strategy, "convicted") == {"peer-3"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_who_was_audited_by_a_liar_is_audited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accomplice is convicted in the same step in which it vouched for the other."""
    expected = honest_weights(6, num_stages=1)
    assigned, auditors = StepAudits._assign, {"peer-3": "peer-5", "peer-4": "peer-3"}
    again = list[list[str]]()

    def assign(self: StepAudits, step: Any, units: Any, verdict: Any) -> list[Any]:
        found = assigned(self, step, units, verdict)
        again.append([str(unit.peer) for unit in units if verdict.convicted])
        if verdict.convicted:
            return found
        return [replace(one, auditor=PeerId(auditors.get(one.unit.peer, one.auditor))) for one in found]

    monkeypatch.setattr(StepAudits, "_assign", assign)
    liars = [Adversary(peer, "scaled_sum", since=SINCE, strength=1.0001) for peer in auditors]
    accomplice = Adversary("peer-3", "cover_up", since=SINCE)
    found, strategy = audited(6, *liars, accomplice, num_stages=1)
    assert accomplice.lies
    assert any("peer-4" in units for units in again)
    assert events_of(strategy, "convicted") == {"peer-3", "peer-4"}
    assert all(liar.lies == {SINCE: 1} for liar in liars)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


@pytest.mark.thorough
def test_a_stage_whose_servers_all_contradict_each_other_goes_on() -> None:
    """The means are then the coordinator's own; three of the four servers are malicious."""
    expected = honest_weights(8, num_stages=2)
    liars = [Adversary(peer, "changed_part", since=SINCE, strength=1.0) for peer in ("peer-3", "peer-5", "peer-7")]
    found, strategy = audited(8, *liars, num_stages=2)
    assert events_of(strategy, "disputed") >= {"peer-3", "peer-5", "peer-7"}
    assert not events_of(strategy, "convicted")
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
