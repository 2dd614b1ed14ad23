"""The byte-level GPT with LAMB, on a swarm in this process and without a swarm."""

import sys
from typing import Any

import lightning as L
import pytest
import torch
from pytorch_optimizer import Lamb

from examples.lamb import train
from examples.lamb.train import LambGPT
from lightning_swarm.testing import InMemoryStrategy

SMALL = ["--max-steps=4", "--d-model=16", "--batch-size=6", "--accumulate=2", "--precision=64-true"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> LambGPT:
    made: list[LambGPT] = []

    def make(**options: Any) -> LambGPT:
        made.append(LambGPT(**options))
        return made[-1]

    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *arguments])
    monkeypatch.setattr(train, "LambGPT", make)
    train.main()
    [model] = made
    return model


@pytest.mark.thorough
def test_a_swarm_trains_it_as_the_plain_trainer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies: list[InMemoryStrategy] = []

    def strategy(**options: Any) -> InMemoryStrategy:
        strategies.append(InMemoryStrategy(**options))
        return strategies[-1]

    monkeypatch.setattr(train, "SwarmStrategy", strategy)
    swarm = run(monkeypatch)
    plain = run(monkeypatch, "--plain")
    [used] = strategies
    assert len(used.servers) == 3
    assert all(
        isinstance(one.optimizer.torch_optimizer, Lamb)
        for server in used.servers
        for one in server.steps.sums.stages.values()
    )
    weights = plain.state_dict()
    for name, tensor in swarm.state_dict().items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensor, weights[name], rtol=0.0, atol=1e-10)


def test_an_update_is_as_long_as_its_parameter_and_the_rate_say() -> None:
    """Algorithm 2 of the paper, whose first step is known in closed form; a norm above 10 counts as 10 here."""
    torch.manual_seed(0)
    model = LambGPT(d_model=16, num_blocks=1, num_heads=2, context=8, weight_decay=0.1).double()
    optimizer = configured(model)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    tokens = torch.randint(256, (2, 8))
    model(tokens).square().mean().backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        decay = 0.1 if parameter.dim() >= 2 else 0.0
        direction = 0.1 * parameter.grad / (0.001**0.5 * parameter.grad.abs() + 1e-6) + decay * before[name]
        norm = before[name].norm().clamp(max=10)
        ratio = norm / (direction.norm() + 1e-6) if norm > 0 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] - 0.02 * ratio * direction, rtol=1e-9, atol=1e-12)


def configured(model: LambGPT) -> Lamb:
    """Return its optimizer, at the peak of the learning rate."""
    trainer = L.Trainer(accelerator="cpu", max_steps=10, logger=False, enable_checkpointing=False)
    model.trainer = trainer
    optimizer = model.configure_optimizers()["optimizer"]
    assert isinstance(optimizer, Lamb)
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    return optimizer
