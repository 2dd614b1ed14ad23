"""A language model of Hugging Face, on a swarm in this process and without a swarm."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest
import torch

from examples.hugging_face import train
from examples.hugging_face.train import LAYERS, LanguageModel, padded, paragraphs
from lightning_swarm.testing import InMemoryStrategy

SMALL = ["--max-steps=3", "--width=16", "--num-layers=4", "--batch-size=5", "--precision=64-true"]

read = cache(paragraphs)
"""The same texts for all models."""


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> LanguageModel:
    made: list[LanguageModel] = []

    def make(*args: Any, **options: Any) -> LanguageModel:
        made.append(LanguageModel(*args, **options))
        return made[-1]

    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *arguments])
    monkeypatch.setattr(train, "LanguageModel", make)
    monkeypatch.setattr(train, "paragraphs", read)
    train.main()
    [model] = made
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", LAYERS)
def test_a_swarm_trains_it_as_the_plain_trainer_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_type: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    strategies: list[InMemoryStrategy] = []

    def strategy(**options: Any) -> InMemoryStrategy:
        strategies.append(InMemoryStrategy(**options))
        return strategies[-1]

    monkeypatch.setattr(train, "SwarmStrategy", strategy)
    swarm = run(monkeypatch, f"--model-type={model_type}")
    said = capsys.readouterr().out.splitlines()[-2:]
    plain = run(monkeypatch, f"--model-type={model_type}", "--plain")
    [used] = strategies
    assert len(used.servers) == 3
    weights = plain.state_dict()
    for name, tensor in swarm.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=0.0, atol=1e-10)
    assert said[0].startswith("train_loss ")
    assert said[1].startswith("    def __init__(self")
    assert capsys.readouterr().out.splitlines()[-2:] == said


def test_batches_are_as_long_as_their_longest_text() -> None:
    texts = paragraphs(context=80, max_bytes=1 << 16)
    assert max(map(len, texts)) == 80
    assert len(set(map(len, texts))) > 20
    batch = padded([torch.tensor([5, 6]), torch.tensor([7, 8, 9])])
    assert batch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[5, 6, -100], [7, 8, 9]]
