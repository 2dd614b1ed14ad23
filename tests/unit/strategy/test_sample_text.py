"""`SampleText` with the plain Trainer: refused settings, logged texts, and no change of the training."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm import SampleText
from lightning_swarm.core.errors import ConfigError
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, digits, loader


class Writer(nn.Module):
    """Draws bytes from all generators that exist."""

    def generate(self, tokens: Tensor, *, attention_mask: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        assert attention_mask.shape == tokens.shape
        random.random()
        np.random.rand()  # noqa: NPY002
        drawn = torch.randint(97, 123, (1, max_new_tokens))
        return torch.cat([tokens, drawn], dim=1)


class Writes(DigitsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()


class Text(Logger):
    """Like Weights & Biases' logger."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[str, list[str], list[list[Any]], int]] = []

    @property
    @override
    def name(self) -> str:
        return "text"

    @property
    @override
    def version(self) -> int:
        return 0

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_text(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        self.tables.append((key, columns, data, step))


class Board(Text):
    """Like TensorBoard's logger."""

    log_text = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str, int]] = []
        self.experiment = SimpleNamespace(add_text=lambda tag, text, step: self.texts.append((tag, text, step)))


def fit(*callbacks: Any, logger: Any = False, **options: Any) -> tuple[Any, tuple[Any, ...]]:
    """Train; return the module, and the generators' next numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    module = Writes()
    settings = {
        **QUIET,
        "precision": 32,
        "max_steps": 4,
        "log_every_n_steps": 1,
        "logger": logger,
        "callbacks": list(callbacks),
        **options,
    }
    L.Trainer(devices=1, **settings).fit(module, loader(digits()))
    return module, (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002


def test_texts_go_to_loggers_and_nothing_else_changes() -> None:
    text, board = Text(), Board()
    callback = SampleText(["a", "b"], every_n_steps=2, max_new_tokens=6)
    module, drawn = fit(callback, logger=[text, board])
    calm, others = fit()
    assert drawn == others
    for name, weight in module.state_dict().items():
        assert torch.equal(weight, calm.state_dict()[name])
    assert module.training == calm.training
    assert [(one.step, one.prompt, len(one.text)) for one in callback.samples] == [
        (2, "a", 6),
        (2, "b", 6),
        (4, "a", 6),
        (4, "b", 6),
    ]
    assert len({one.text for one in callback.samples}) == 1, "each text has a generator of its own"
    assert [(key, columns, step) for key, columns, _, step in text.tables] == [
        ("samples", ["step", "prompt", "text", "tokens_per_s"], 2),
        ("samples", ["step", "prompt", "text", "tokens_per_s"], 4),
    ]
    assert [(tag, step) for tag, _, step in board.texts] == [
        ("samples/0", 2),
        ("samples/1", 2),
        ("samples/0", 4),
        ("samples/1", 4),
    ]
    assert callback.samples[0].text in board.texts[0][1]


def test_accumulated_batches_are_no_steps() -> None:
    callback = SampleText(["a"], every_n_steps=1, max_new_tokens=1)
    fit(callback, max_steps=2, accumulate_grad_batches=3)
    assert [one.step for one in callback.samples] == [1, 2]


def test_a_function_of_ones_own() -> None:
    callback = SampleText(["a"], every_n_steps=4, generate=lambda module, prompt: f"{type(module).__name__}, {prompt}")
    fit(callback)
    assert [one.text for one in callback.samples] == ["Writes, a"]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"prompts": []}, "`prompts` of `SampleText` must be texts"),
        ({"prompts": "one text"}, "`prompts` of `SampleText` must be texts"),
        ({"prompts": [""]}, "`prompts` of `SampleText` must be texts"),
        ({"every_n_steps": 0}, "`every_n_steps` of `SampleText` must be a whole number of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "`max_new_tokens` of `SampleText` must be a whole number"),
        ({"generate": str, "do_sample": True}, "leave `tokenizer`, `answers` and options out"),
    ],
)
def test_what_is_refused(options: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        SampleText(**{"prompts": ["a"], **options})


def test_a_model_that_writes_nothing_is_refused_before_it_trains() -> None:
    trainer = L.Trainer(devices=1, **{**QUIET, "precision": 32}, max_steps=1, callbacks=[SampleText(["a"])])
    with pytest.raises(ConfigError, match="needs a model that has a method `generate`"):
        trainer.fit(DigitsMLP(), loader(digits()))
