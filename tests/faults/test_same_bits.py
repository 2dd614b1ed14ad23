"""Audits compare bits between machines of one kind; other kinds have little room to cheat, or to accuse for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from torch import Tensor, nn
from torch.autograd.function import Function
from typing_extensions import override

from lightning_swarm import Trust
from lightning_swarm.client.audit import sender as orders
from lightning_swarm.coordinator.audit import policy, step_audits
from lightning_swarm.core.tasks import gather_bounded
from lightning_swarm.protocol.messages.audits import AuditFinding
from lightning_swarm.protocol.settings import Compression
from lightning_swarm.server.audit import handlers
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.testing import FaultPlan, Phase, local_swarm
from tests.adversaries.adversary import Adversary
from tests.adversaries.attacks import Attack, SeenFinding, SeenSums
from tests.faults.test_audited import NUM_STEPS, SINCE, WIDTH, Model, audited, data, events_of, honest_weights

# The last stage has peer-0, peer-2 and peer-4, the first has peer-1, peer-3 and peer-5.
FLOATS: dict[str, Any] = {"num_stages": 2, "deterministic": False, "dtype": torch.float32}


class LastBit(Attack):
    """Sends the true sum with the last bit of one element flipped."""

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        said = seen.own.values.clone()
        said[3] = torch.nextafter(said[3], said.new_tensor(torch.inf))
        return said


@pytest.mark.thorough
def test_a_lie_of_one_bit_is_found() -> None:
    liar = Adversary("peer-3", LastBit(), since=SINCE)
    _, strategy = audited(6, liar, **FLOATS)
    assert liar.lies == {SINCE: 1}
    assert events_of(strategy, "convicted") == {"peer-3"}


# ------------------------------------------------------------------ honest servers


class Orders:
    """Orders in which servers added, and microbatches that reached an auditor before their turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added: list[list[Any]] = []
        self.num_early = 0
        unpack, take = step_audits.unpack_order, handlers._Recomputed.take_next

        def unpacked(packed: bytes, receipts: Any) -> list[Any]:
            self.added.append(unpack(packed, receipts))
            return self.added[-1]

        def taken(found: handlers._Recomputed) -> Any:
            inputs = take(found)
            self.num_early += inputs is None and bool(found.early)
            return inputs

        monkeypatch.setattr(step_audits, "unpack_order", unpacked)
        monkeypatch.setattr(handlers._Recomputed, "take_next", taken)


def normalized() -> Model:
    return Model(torch.float32, lambda: nn.LayerNorm(WIDTH))  # type: ignore[arg-type]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("precision", "codec", "accumulated"),
    [("32-true", None, 2), ("bf16-mixed", None, 1), ("32-true", "8bit", 1)],
)
def test_the_order_of_adding_convicts_nobody(
    monkeypatch: pytest.MonkeyPatch, precision: Any, codec: Any, accumulated: int
) -> None:
    """Microbatches reach servers in different orders, and auditors in yet another order."""
    seen = Orders(monkeypatch)

    async def backwards(works: Sequence[Any], limit: int, **more: Any) -> list[Any]:
        return await gather_bounded([*works][::-1], limit, **more)

    monkeypatch.setattr(orders, "gather_bounded", backwards)
    # A server's first backward comes after other servers'.
    faults = FaultPlan().delay("peer-2", by_s=0.5, at=Phase.BACKWARD).delay("peer-3", by_s=0.5, at=Phase.BACKWARD)
    settings: dict[str, Any] = {"latency_s": 0.002, "microbatch_s": [0.01], "faults": faults}
    if codec is not None:
        settings["compression"] = Compression(activations=codec, gradients=codec)
    with local_swarm(
        4, num_stages=2, microbatch_size=2, trust=Trust("audited", audit_share=1.0, on_conviction="go_on"), **settings
    ) as swarm:
        trainer = swarm.trainer(max_steps=2, precision=precision, accumulate_grad_batches=accumulated)
        trainer.fit(normalized(), data(torch.float32))
        (strategy,) = swarm.strategies
    assert faults.fired
    assert any(added != sorted(added) for added in seen.added)
    assert seen.num_early
    assert not events_of(strategy, "convicted") | events_of(strategy, "disputed")


class Unsteady(Function):
    """A product whose weight gradient has other last bits each time, as if threads added in the order of arrival."""

    num_calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        Unsteady.num_calls += 1
        return gradients[0] @ weight, gradients[0].T @ x * (1 + Unsteady.num_calls * 2.0**-23)


class UnsteadyLinear(nn.Linear):
    @override
    def forward(self, input: Tensor) -> Tensor:
        return Unsteady.apply(input, self.weight) + self.bias  # type: ignore[no-any-return]


class UnsteadyModel(Model):
    def __init__(self) -> None:
        super().__init__(torch.float32)
        for block in self.net:
            block[0].__class__ = UnsteadyLinear  # type: ignore[index]


@pytest.mark.thorough
def test_machines_that_never_compute_the_same_bits_are_compared_within_a_tolerance(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = {**FLOATS, "num_stages": 1}
    _, strategy = audited(4, model=UnsteadyModel(), **settings)
    assert "do not repeat their bits" in caplog.text
    assert not events_of(strategy, "convicted") | events_of(strategy, "disputed")
    liar = Adversary("peer-3", "scaled_sum", since=SINCE, strength=1.01)
    _, strategy = audited(4, liar, model=UnsteadyModel(), **settings)
    assert events_of(strategy, "convicted") == {"peer-3"}


# ------------------------------------------------------------------ machines of other kinds


@pytest.fixture
def other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make peer-3 report another kind of machine."""
    true: Callable[[GradientSums], str] = GradientSums.arithmetic.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        GradientSums,
        "arithmetic",
        property(lambda sums: "another kind" if sums._me.peer_id == "peer-3" else true(sums)),
    )


class OtherSum(Attack):
    """An auditor that reports its inputs truly but a false sum."""

    @override
    def finding(self, seen: SeenFinding) -> AuditFinding:
        return replaced(seen.true, values=[2.0 * value for value in seen.true.values])


@pytest.mark.thorough
@pytest.mark.usefixtures("other_kind")
def test_an_honest_machine_of_another_kind_accuses_nobody() -> None:
    _, strategy = audited(6, **FLOATS)
    assert not events_of(strategy, "convicted") | events_of(strategy, "disputed")


@pytest.mark.thorough
@pytest.mark.usefixtures("other_kind")
def test_a_machine_of_another_kind_that_accuses_again_and_again_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_audits, "MAX_REFUTED", 2)
    expected = honest_weights(6, num_stages=2, dtype=torch.float32)
    liar = Adversary("peer-3", OtherSum(), since=1)
    found, strategy = audited(6, liar, **FLOATS)
    assert len(liar.lies) == 3
    assert "peer-3" in events_of(strategy, "disputed")
    assert events_of(strategy, "convicted") == {"peer-3"}
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.usefixtures("other_kind")
def test_accusations_that_prove_nothing_are_made_twice_of_each_server() -> None:
    """After the second one the coordinator audits in its place."""
    liar = Adversary("peer-3", "false_accusation", since=1)
    _, strategy = audited(6, liar, **FLOATS)
    assert 2 <= liar.struck <= 4, "of peer-1 and peer-5"
    accused = Counter(event.peer for event in strategy.servers[0].events.newest if event.kind == "disputed")
    assert accused.keys() <= {"peer-1", "peer-5"}
    assert max(accused.values()) == 2
    assert not events_of(strategy, "convicted")


# ------------------------------------------------------------------ steps that are worth a lie


class Lots:
    """Draws that never select half of the servers at an audit share of 1/16, and always select them at 1/2."""

    def random(self) -> float:
        return 0.4

    def sample(self, population: Sequence[Any], k: int) -> list[Any]:
        return list(population)


@pytest.mark.thorough
@pytest.mark.parametrize("max_steps", [NUM_STEPS, None])
def test_a_lie_of_the_last_step_is_likely_found(monkeypatch: pytest.MonkeyPatch, max_steps: int | None) -> None:
    monkeypatch.setattr(policy, "PROBATION", 0)
    monkeypatch.setattr(step_audits, "lots", Lots())
    worth, kept = step_audits.is_irreversible, set[int]()

    def is_irreversible(step: int, _: int | None, *, is_snapshot_due: bool) -> bool:
        kept.update({step} if is_snapshot_due else ())
        return worth(step, max_steps, is_snapshot_due=is_snapshot_due)

    monkeypatch.setattr(step_audits, "is_irreversible", is_irreversible)
    liar = Adversary("peer-3", "scaled_sum", since=NUM_STEPS - 1, strength=1.0001)
    _, strategy = audited(6, liar, share=1 / 16, num_stages=2)
    assert liar.struck
    assert 0 in kept, "the first step ends with a snapshot"
    assert NUM_STEPS - 1 not in kept
    assert events_of(strategy, "convicted") == ({"peer-3"} if max_steps else set())


# ------------------------------------------------------------------ means


class WithinTheRounding(Attack):
    """Falsifies a part of the mean whose true value is zero, by less than its neighbours' rounding error."""

    @override
    def reduced(self, part: Tensor, generator: torch.Generator) -> Tensor:
        return torch.where(part == 0.0, 2.0**-24 * part.square().mean().sqrt(), part)


class Unused(Model):
    """Its first block has weights that no data reach."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.net[0][0] = nn.Linear(51 * WIDTH, WIDTH)  # type: ignore[index]

    @override
    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs = nn.functional.pad(batch[0].repeat(1, 50), (0, WIDTH))
        return super().training_step([inputs, batch[1]])


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_false_mean_within_the_rounding_is_found_where_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(policy, "PROBATION", 0)
    liar = Adversary("peer-3", WithinTheRounding(), since=SINCE)
    _, strategy = audited(6, liar, model=Unused(), share=share, **FLOATS)
    assert liar.struck
    assert events_of(strategy, "convicted") == ({"peer-3"} if share else set()), "projections do not show it"
