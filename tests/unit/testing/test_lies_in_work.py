"""Effects of false microbatches, means and weights on an undefended run."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm.testing.faults import DidNotHappen
from tests.adversaries import attacks
from tests.adversaries.adversary import Adversary
from tests.adversaries.attacks import ATTACKS, Attack
from tests.unit.testing.linear import BATCH, F64, FIRST, LAST, LR, NUM_STEPS, Net, batches, run

# ---------------------------------------------------------------------- microbatches


def test_outputs_are_what_the_attack_says() -> None:
    """One server holds the second of two stages, and the trainer sees its outputs."""
    said: dict[str, Tensor] = {}
    for name, options in {
        "scaled_output": {"strength": 1.05},
        "zeros": {"strength": 0.0},
        "skipped_blocks": {},
        "noisy_output": {"strength": 0.01},
    }.items():
        net = Net(2)
        liar = Adversary(LAST, ATTACKS.get(name, attacks.ScaledOutput)(**options), since=1)
        run(net, liar, num_peers=2, num_steps=2)
        torch.testing.assert_close(net.outputs[0], Net(2).double().blocks(batches()[0]))
        assert liar.lies == {1: BATCH}, "each microbatch"
        said[name] = net.outputs[1]
    twin = Net(2).double()
    twin.load_state_dict(dict(zip(twin.state_dict(), twin.clean(1), strict=True)))
    hidden: Tensor = twin.blocks[0](batches()[1]).detach()
    true: Tensor = twin.blocks[1](hidden).detach()
    torch.testing.assert_close(said["scaled_output"], 1.05 * true)
    assert not said["zeros"].any()
    torch.testing.assert_close(said["skipped_blocks"], hidden)
    noise = (said["noisy_output"] - true).norm(dim=1) / true.norm(dim=1)
    torch.testing.assert_close(noise, torch.full((BATCH,), 0.01, dtype=F64))


def test_lies_about_outputs_are_not_told_in_evaluations() -> None:
    class Validated(Net):
        def validation_step(self, batch: list[Tensor]) -> None:
            self.found = self.blocks(batch[0]).detach()

        def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
            return DataLoader(TensorDataset(batches()[0]), batch_size=BATCH)

    net = Validated(2)
    run(net, Adversary(LAST, "scaled_output", strength=0.0), num_peers=2, num_steps=1)
    assert net.found.any()


@pytest.mark.parametrize(
    ("attack", "factor"),
    [
        (attacks.ScaledInputGradient(), -1.0),
        (attacks.ScaledInputGradient(0.0), 0.0),
    ],
    ids=str,
)
def test_an_input_gradient_is_what_the_attack_says(attack: Attack, factor: float) -> None:
    net = Net(2)
    run(net, Adversary(LAST, attack), num_peers=2, num_steps=1)
    before, clean, found = Net(2).weights(), net.clean(1), net.weights()
    torch.testing.assert_close(found[0] - before[0], factor * (clean[0] - before[0]), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[1], clean[1]), "its own gradients are right"


def test_an_input_gradient_has_noise() -> None:
    net = Net(2)
    run(net, Adversary(LAST, attacks.NoisyInputGradient(0.1)), num_peers=2, num_steps=1, microbatch_size=BATCH)
    before, clean, found = Net(2).weights(), net.clean(1), net.weights()
    assert 0.0 < (found[0] - clean[0]).norm() < 0.3 * (clean[0] - before[0]).norm()
    torch.testing.assert_close(found[1], clean[1])


def test_receipts_without_computing_add_nothing() -> None:
    net, liar = Net(2), Adversary(LAST, "no_compute", since=1)
    run(net, liar, num_peers=2, num_steps=2)
    assert liar.lies == {1: BATCH}
    before, clean, found = net.clean(1), net.clean(2), net.weights()
    torch.testing.assert_close(found[1], before[1])
    torch.testing.assert_close(found[0], clean[0]), "the gradient of its input is right"


def test_labels_are_flipped_by_who_sees_the_gradient_of_logits() -> None:
    """One server holds the last of two stages. From its flipped labels' gradients, all stages train on these labels."""
    net, liar = Net(2, labels=True), Adversary(LAST, "label_flip")
    run(net, liar, num_peers=2)
    assert liar.lies == dict.fromkeys(range(NUM_STEPS), BATCH)
    for found, flipped, clean in zip(net.weights(), net.clean(4, flipped=True), net.clean(4), strict=True):
        torch.testing.assert_close(found, flipped, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(found, clean)


def test_a_server_that_sees_no_labels_flips_none() -> None:
    with pytest.raises(DidNotHappen):
        run(Net(2, labels=True), Adversary(FIRST, "label_flip"), num_peers=2)


# ---------------------------------------------------------------------- averaging


def changes(found: Tensor, clean: Tensor) -> Tensor:
    """Return the first step's change of the mean in halves, one for each of two reducers."""
    return ((clean - found) / LR).flatten().view(2, -1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_reducer_changes_its_part_of_the_mean(deterministic: bool) -> None:
    clean = Net().clean(1)[0]
    mean = (Net().weights()[0] - clean).div(LR).flatten().view(2, -1)
    for attack, num_changed in ((attacks.ChangedReduction(0.5), 8), (attacks.ChangedReduction(0.5, num_elements=1), 1)):
        net, liar = Net(), Adversary("peer-1", attack)
        replicas = run(net, liar, num_peers=2, num_steps=1, deterministic=deterministic)
        assert liar.lies == {0: 1}
        own, others = changes(net.weights()[0], clean).flip(0)
        torch.testing.assert_close(others, torch.zeros_like(others), rtol=0.0, atol=1e-12)
        shift = own[own.abs() > 1e-9]
        rms = mean[1].square().mean().sqrt()
        torch.testing.assert_close(shift, (0.5 * rms).expand(num_changed), rtol=1e-9, atol=1e-12)
        assert torch.equal(replicas.weights("peer-0"), replicas.weights("peer-1")), "it believes what it says"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_part_is_not_that_of_the_frozen_sum(deterministic: bool) -> None:
    clean = Net().clean(1)[0]
    for attack, num_changed in ((attacks.ChangedPart(0.5), 8), (attacks.ChangedPart(0.5, num_elements=1), 1)):
        net, liar = Net(), Adversary("peer-1", attack)
        replicas = run(net, liar, num_peers=2, num_steps=1, deterministic=deterministic)
        assert liar.lies == {0: 1}
        others, own = changes(net.weights()[0], clean).flip(0)
        torch.testing.assert_close(others, torch.zeros_like(others), rtol=0.0, atol=1e-12)
        shift = own[own.abs() > 1e-9]
        assert len(shift) == num_changed
        assert shift.std(correction=0) < 1e-9 < shift.mean()
        assert torch.equal(replicas.weights("peer-0"), replicas.weights("peer-1"))


def test_a_false_norm_clips_the_step() -> None:
    before, clean = Net().weights()[0], Net().clean(1)[0]
    mean = (before - clean).div(LR).flatten().view(2, -1)
    net, liar = Net(), Adversary("peer-1", "false_norm", strength=100.0)
    run(net, liar, num_peers=2, num_steps=1, clip=1e-3)
    said = (mean[0].square().sum() + 100.0 * mean[1].square().sum()).sqrt()
    torch.testing.assert_close(before - net.weights()[0], (before - clean) * (1e-3 / said), rtol=1e-4, atol=1e-12)
    assert liar.lies == {0: 1}


# ---------------------------------------------------------------------- a stage's state


def test_a_trainer_reads_poisoned_weights() -> None:
    net, liar = Net(2), Adversary(LAST, "poisoned_reading", strength=0.1)
    replicas = run(net, liar, num_peers=2)
    assert liar.struck
    clean, found = net.clean(NUM_STEPS), net.weights()
    torch.testing.assert_close(found[0], clean[0])
    torch.testing.assert_close(replicas.weights(LAST, 1), clean[1]), "it trains on what is true"
    assert float((found[1] - clean[1]).norm() / clean[1].norm()) == pytest.approx(0.1)


class Join(L.Callback):
    """Starts another server."""

    @override
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.strategy.join()  # type: ignore[attr-defined]


def test_a_joiner_gets_poisoned_weights() -> None:
    net, liar = Net(2), Adversary(FIRST, "poisoned_download", strength=0.1)
    # Steps take longer than the messages of a join.
    replicas = run(net, liar, num_peers=2, callbacks=[Join()], latency_s=0.01, microbatch_s=[0.015])
    assert liar.struck == 1, "one copy"
    clean = net.clean(NUM_STEPS)
    torch.testing.assert_close(replicas.weights(FIRST), clean[0])
    distance = (replicas.weights("peer-2") - clean[0]).norm() / clean[0].norm()
    assert 0.05 < distance < 0.2
    torch.testing.assert_close(net.weights(), clean), "what has other weights is not let in"
