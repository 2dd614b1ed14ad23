"""A GPT whose blocks are in a `ModuleList`, on a swarm in this process and on none."""

import sys
from typing import Any

import pytest
import torch

from examples.nanogpt import train
from examples.nanogpt.model import GPT
from lightning_swarm.testing import InMemoryStrategy

SMALL = ["--max-steps=4", "--n-layer=3", "--n-embd=16", "--batch-size=6", "--precision=64-true"]


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[GPT, list[str]]:
    """Run the script; return the trained model, and the output after the progress bar."""
    made: list[GPT] = []

    def make(**options: Any) -> GPT:
        made.append(GPT(**options))
        return made[-1]

    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *arguments])
    monkeypatch.setattr(train, "GPT", make)
    train.main()
    [model] = made
    return model, capsys.readouterr().out.partition("\ndef ")[2].splitlines()


@pytest.mark.thorough
def test_a_swarm_trains_it_as_the_plain_trainer_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strategies: list[InMemoryStrategy] = []

    def strategy(**options: Any) -> InMemoryStrategy:
        strategies.append(InMemoryStrategy(**options))
        return strategies[-1]

    monkeypatch.setattr(train, "SwarmStrategy", strategy)
    swarm, swarm_said = run(monkeypatch, capsys)
    plain, plain_said = run(monkeypatch, capsys, "--plain")
    [used] = strategies
    assert used.config.pipeline == "transformer.h"
    assert len(used.servers) == 3
    assert all(server.calls.num_forwards > 0 for server in used.servers)
    weights = plain.state_dict()
    assert swarm.state_dict().keys() == weights.keys()
    for name, tensor in swarm.state_dict().items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensor, weights[name], rtol=0.0, atol=1e-10)
    # The tie holds, also in a checkpoint.
    assert swarm.lm_head.weight is swarm.transformer.wte.weight
    assert swarm_said == plain_said
    assert swarm_said[-1].startswith("train_loss 5.")


def test_the_head_and_the_embeddings_are_one() -> None:
    model = GPT(n_layer=2, n_embd=16)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(name.startswith("lm_head") for name, _ in model.named_parameters())


def test_a_token_sees_only_those_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(n_layer=2, n_embd=16, n_head=2, block_size=12).eval()
    tokens = torch.randint(256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    (before, loss), (after, none) = model(tokens, tokens), model(changed)
    assert loss.shape == ()
    assert none is None
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.equal(after[:, 7:], before[:, 7:])
