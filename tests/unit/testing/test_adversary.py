"""`Adversary`: the steps in which it is malicious, and the effect of false sums on an undefended run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.peer.peer import Peer
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase
from lightning_swarm.testing.faults import DidNotHappen
from tests.adversaries import attacks
from tests.adversaries.adversary import Adversary
from tests.adversaries.attacks import ATTACKS, Attack, SeenSums, hidden_deviations
from tests.adversaries.swarms import lie_in_process
from tests.unit.testing.linear import LR, NUM_STEPS, WIDTH, Net, batches, run

# ---------------------------------------------------------------------- when


def test_an_adversary_lies_in_the_steps_that_it_was_told_to() -> None:
    usual, late, some, early = (
        Adversary("peer-1", "sign_flip"),
        Adversary("peer-1", "sign_flip", since=2),
        Adversary("peer-1", "sign_flip", since=1, every=2),
        Adversary("peer-1", "sign_flip", until=1),
    )
    for adversary in (usual, late, some, early):
        run(Net(), adversary)
    assert [sorted(one.lies) for one in (usual, late, some, early)] == [[0, 1, 2, 3], [2, 3], [1, 3], [0]]
    assert [one.struck for one in (usual, late, some, early)] == [4, 2, 2, 1], "one sum a step"


def test_an_adversary_that_told_no_lie_fails_the_test() -> None:
    with pytest.raises(DidNotHappen, match=r"told no lie: peer-1: SignFlip.*, every 1 from step 99"):
        run(Net(), Adversary("peer-1", "sign_flip", since=99))
    with pytest.raises(DidNotHappen, match="told no lie: peer-9"):
        run(Net(), Adversary("peer-9", "sign_flip"), Adversary("peer-1", "sign_flip"))
    with pytest.raises(DidNotHappen, match="delay=5"):
        run(Net(), Adversary("peer-1", "delayed_gradient", delay=5))


def test_what_is_no_adversary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`attack` must be one of sign_flip, .*, got 'sign_flop'"):
        Adversary("peer-1", "sign_flop")
    with pytest.raises(ConfigError, match="got since=3, every=1, until=3"):
        Adversary("peer-1", "sign_flip", since=3, until=3)
    with pytest.raises(ConfigError, match="options belong to an attack that is named"):
        Adversary("peer-1", attacks.SignFlip(), strength=3.0)


def test_every_attack_has_a_name_and_a_source() -> None:
    classes = {name: one for name, one in vars(attacks).items() if isinstance(one, type) and issubclass(one, Attack)}
    defined = {one for name, one in classes.items() if not name.startswith("_")}
    assert set(ATTACKS.values()) == defined - {Attack}
    assert all("Source: " in (attack.__doc__ or "") for attack in ATTACKS.values())


def test_a_process_lies_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer of this swarm stands for a process, which has the whole list but no state of the other processes."""
    liars, make = [Adversary("peer-1", "sign_flip", since=1), Adversary("peer-9", "sign_flip")], InMemoryStrategy._peer

    def made(strategy: InMemoryStrategy, number: int) -> Peer:
        peer = make(strategy, number)
        lie_in_process(liars, tmp_path / "fired")(peer, PeerId(f"peer-{number}"))
        return peer

    expected, found = Net(), Net()
    run(expected, Adversary("peer-1", "sign_flip", since=1))
    monkeypatch.setattr(InMemoryStrategy, "_peer", made)
    run(found)
    assert torch.equal(expected.weights()[0], found.weights()[0])
    assert (tmp_path / "fired").read_text() == f"{liars[0]}\n", "once"
    assert [liar.struck for liar in liars] == [3, 0]


def test_a_process_sees_no_sums_of_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"peer-1: InnerProduct.* Use the in-memory network"):
        lie_in_process([Adversary("peer-1", "inner_product")], tmp_path / "fired")


# ---------------------------------------------------------------------- sums


@dataclass(frozen=True)
class Noted(Attack):
    """Wraps an attack, and records its inputs and results for sums."""

    attack: Attack
    told: list[tuple[SeenSums, Tensor]] = field(default_factory=list)

    @property
    @override
    def memory(self) -> int:
        return self.attack.memory

    @override
    def sum(self, seen: SeenSums) -> Tensor:
        said = self.attack.sum(seen)
        honest = [replace(one, values=one.values.clone()) for one in seen.honest]
        own = replace(seen.own, values=seen.own.values.clone())
        self.told.append((replace(seen, own=own, honest=honest), said.clone()))
        return said


def after(told: Sequence[Sequence[tuple[SeenSums, Tensor]]]) -> Tensor:
    """Compute the only block's weights after steps with the honest sums and the attacks' sums."""
    weights = Net().weights()[0]
    for x, *lies in zip(batches(), *told, strict=True):
        honest = sum(one.values for one in lies[0][0].honest)
        true = honest + sum(seen.own.values for seen, _ in lies)
        mean = x.mean(dim=0).div(WIDTH).expand(WIDTH, WIDTH).flatten()
        total_weight = (true / mean).mean()
        torch.testing.assert_close(true / total_weight, mean, rtol=1e-9, atol=1e-12)
        weights -= LR * ((honest + sum(said for _, said in lies)) / total_weight).view(WIDTH, WIDTH)
    return weights


Said = Callable[[SeenSums], Tensor]


def per_sample(seen: SeenSums) -> Tensor:
    return torch.stack([one.values / one.weight for one in seen.honest])


SUMS: dict[str, tuple[dict[str, Any], Said]] = {
    "sign_flip": ({"strength": 1000.0}, lambda seen: -1000.0 * seen.own.values),
    "scaled_sum": ({"strength": 10.0}, lambda seen: 10.0 * seen.own.values),
    "zero_sum": ({}, lambda seen: 0.0 * seen.own.values),
    "inner_product": (
        {"strength": 0.6},
        lambda seen: (
            -0.6 * seen.own.weight * sum(one.values for one in seen.honest) / sum(one.weight for one in seen.honest)
        ),
    ),
    "little_is_enough": (
        {},
        lambda seen: (
            seen.own.weight
            * (per_sample(seen).mean(dim=0) - hidden_deviations(5, 2) * per_sample(seen).std(dim=0, correction=0))
        ),
    ),
    "delayed_gradient": (
        {"delay": 1},
        lambda seen: (
            seen.earlier[1].values * seen.own.weight / seen.earlier[1].weight if 1 in seen.earlier else seen.own.values
        ),
    ),
}


@pytest.mark.first_cells(4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_the_mean_is_what_the_attack_on_a_sum_says(name: str, deterministic: bool) -> None:
    """Two of five servers are malicious."""
    options, expected = SUMS[name]
    lies = [Noted(ATTACKS[name](**options)) for _ in range(2)]
    liars = [Adversary(f"peer-{i + 2}", attack) for i, attack in enumerate(lies)]
    net = Net()
    run(net, *liars, num_peers=5, deterministic=deterministic)
    first = 1 if name == "delayed_gradient" else 0
    for liar, lie in zip(liars, lies, strict=True):
        assert sorted(liar.lies) == list(range(first, NUM_STEPS))
        for seen, said in lie.told:
            assert (len(seen.honest), seen.num_servers, seen.num_liars) == (3, 5, 2)
            assert seen.own.weight > 0.0
            torch.testing.assert_close(said, expected(seen), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.weights()[0], after([lie.told for lie in lies]), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(net.weights()[0], net.clean(NUM_STEPS)[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_adversaries_share_a_random_direction(deterministic: bool) -> None:
    lies = [Noted(attacks.RandomDirection(strength=10.0)) for _ in range(2)]
    net = Net()
    run(net, *(Adversary(f"peer-{i + 1}", lie) for i, lie in enumerate(lies)), deterministic=deterministic)
    for (seen, said), (other, also) in zip(*(lie.told for lie in lies), strict=True):
        assert float(said.norm()) == pytest.approx(float(10.0 * seen.own.values.norm()), rel=1e-12)
        assert float(also.norm()) == pytest.approx(float(10.0 * other.own.values.norm()), rel=1e-12)
        torch.testing.assert_close(said / said.norm(), also / also.norm())
    directions = [said / said.norm() for _, said in lies[0].told]
    assert not torch.allclose(directions[0], directions[1])
    torch.testing.assert_close(net.weights()[0], after([lie.told for lie in lies]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sum_that_is_no_number_has_no_mean(deterministic: bool) -> None:
    """The step is skipped."""
    net, liar = Net(), Adversary("peer-1", "not_a_number", since=2)
    run(net, liar, deterministic=deterministic)
    assert liar.lies == {2: 1, 3: 1}, "the norm of the mean, no number either, is no lie"
    torch.testing.assert_close(net.weights(), net.clean(2))


def test_sums_that_do_not_fit_have_no_mean() -> None:
    net, liar = Net(), Adversary("peer-1", "sign_flip", strength=1e12, since=3)
    run(net, liar, deterministic=True)
    assert liar.struck == 1
    torch.testing.assert_close(net.weights(), net.clean(3))


def test_hidden_deviations_are_those_of_the_paper() -> None:
    """The paper corrupts 24 of 50 workers: 2 supporters are needed, and 24 of 26 are nearer to the mean."""
    assert hidden_deviations(50, 24) == pytest.approx(1.43, abs=0.01)
    assert hidden_deviations(16, 7) == pytest.approx(0.765, abs=0.001)
    assert hidden_deviations(4, 1) == 0.0, "there are too many honest ones to hide among"


def test_a_sum_that_gets_more_after_its_freeze_is_lied_about_as_a_whole() -> None:
    """A server dies when the step closes, so the rest recompute its microbatches and freeze once more."""
    lie = Noted(attacks.SignFlip(5.0))
    net, liar = Net(), Adversary("peer-1", lie)
    run(net, liar, num_peers=4, num_steps=1, faults=FaultPlan().kill("peer-3", at=Phase.CLOSE, step=0))
    assert liar.struck == len(lie.told) > 1
    true = [seen.own.values for seen, _ in lie.told]
    assert lie.told[-1][0].own.weight > lie.told[0][0].own.weight, "something was added"
    assert not torch.allclose(true[0], true[-1])
    mean = batches()[0].mean(dim=0).div(WIDTH).expand(WIDTH, WIDTH).flatten()
    everything = true[-1] + sum(one.values for one in lie.told[-1][0].honest)
    weight = (everything / mean).mean()
    torch.testing.assert_close(everything / weight, mean)
    expected = Net().weights()[0] - LR * ((everything - 6.0 * true[-1]) / weight).view(WIDTH, WIDTH)
    torch.testing.assert_close(net.weights()[0], expected, rtol=1e-9, atol=1e-9)


def test_a_seed_repeats_all_lies() -> None:
    found = []
    for seed in (1, 1, 2):
        net = Net(2)
        liars = [
            Adversary("peer-1", "noisy_output", seed=seed, strength=0.3),
            Adversary("peer-2", "random_direction", seed=seed, strength=2.0),
        ]
        run(net, *liars)
        found.append(torch.cat(net.weights()))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
