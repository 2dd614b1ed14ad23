"""Text generation."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from transformers import DynamicCache
from typing_extensions import override

from lightning_swarm import SampleText
from lightning_swarm.core.errors import ConfigError
from tests.features.mark import REFUSED, WORKS, feature
from tests.parity.harness import Run, assert_exact, run_plain, run_swarm
from tests.parity.test_generation import FAMILIES, NUM_STEPS, Writing, made
from tests.parity.test_hugging_face import loader

LAYERS = FAMILIES["llama"].layers


def texts(run: Run) -> list[Tensor]:
    assert isinstance(run.module, Writing)
    return run.module.texts


@feature(
    "Hugging Face's `model.generate()` in a hook, with its cache of keys and values",
    WORKS,
    "greedy, sampled, beams, padded batches, several texts per prompt, prompt lookup. Keys and values stay on "
    "the servers, and a server that dies changes no token ([inference](inference.md))",
)
def test_generate_in_a_hook() -> None:
    make = partial(made, "llama", "beams", Writing)
    plain = run_plain(make, loader(), max_steps=NUM_STEPS)
    swarm = run_swarm(make, loader(), max_steps=NUM_STEPS, pipeline=LAYERS)
    assert all(torch.equal(own, other) for own, other in zip(texts(swarm), texts(plain), strict=True))
    assert_exact(swarm, plain)


class Quiet(Writing):
    """Generates only when a test calls it."""

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        pass


def spelled(folder: Path) -> list[dict[str, str]]:
    with (folder / "samples.csv").open(newline="") as file:
        return [{name: row[name] for name in ("step", "prompt", "text")} for row in csv.DictReader(file)]


class Letters:
    """A tokenizer of as many letters as the model has tokens."""

    def __call__(self, text: str, return_tensors: str) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[1 + ord(letter) - ord("a") for letter in text]])}

    def decode(self, tokens: Tensor, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token - 1) for token in tokens.tolist())


@feature(
    "`SampleText`: generated texts during training, in TensorBoard, Weights & Biases or a CSV file",
    WORKS,
    "generated through the stages; the training curve is the same with and without it",
)
def test_sample_text(tmp_path: Path) -> None:
    def options(name: str) -> dict[str, Any]:
        callback = SampleText(
            ["abc", "pq"], tokenizer=Letters(), every_n_steps=2, max_new_tokens=5, do_sample=True, top_k=5
        )
        return {"callbacks": [callback], "logger": CSVLogger(tmp_path, name), "max_steps": 4}

    make = partial(made, "llama", "greedy", Quiet)
    plain = run_plain(make, loader(), **options("plain"))
    swarm = run_swarm(make, loader(), pipeline=LAYERS, **options("swarm"))
    without = run_swarm(make, loader(), pipeline=LAYERS, max_steps=4)
    assert_exact(swarm, plain)
    assert swarm.losses == without.losses
    rows = spelled(tmp_path / "swarm" / "version_0")
    assert rows == spelled(tmp_path / "plain" / "version_0")
    assert [(row["step"], row["prompt"]) for row in rows] == [("2", "abc"), ("2", "pq"), ("4", "abc"), ("4", "pq")]
    assert all(len(row["text"]) == 5 for row in rows)


class Misused(Quiet):
    use: Callable[[Any, Tensor], Any]

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.model.eval()
        type(self).use(self.model, torch.tensor([[3, 4, 5]]))


class WithGradients(Misused):
    @staticmethod
    def use(model: Any, ids: Tensor) -> None:
        with torch.enable_grad():
            model(ids, use_cache=True)


class Checkpointed(Misused):
    @staticmethod
    def use(model: Any, ids: Tensor) -> None:
        model.activation_checkpointing_enable()
        model.train().generate(ids, max_new_tokens=2)


class Trained(Quiet):
    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class Static(Misused):
    @staticmethod
    def use(model: Any, ids: Tensor) -> None:
        with torch.no_grad():
            model.generate(ids, max_new_tokens=2, cache_implementation="static")


class Filled(Misused):
    @staticmethod
    def use(model: Any, ids: Tensor) -> None:
        cache = DynamicCache()
        cache.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8), 0)
        with torch.no_grad():
            model(ids, past_key_values=cache)


@feature(
    "caches of keys and values in training, or with gradients",
    REFUSED,
    "Hugging Face models create a cache by default; pass `use_cache=False` there",
)
@pytest.mark.parametrize("kind", [WithGradients, Trained])
def test_caches_with_gradients(kind: type[Quiet]) -> None:
    with pytest.raises(ConfigError, match="a cache of keys and values supports only generating text"):
        run_swarm(partial(made, "llama", "greedy", kind), loader(), max_steps=1, pipeline=LAYERS)


@feature(
    "static, quantized and offloaded caches, and caches that were filled elsewhere",
    REFUSED,
    "use the default cache, and a new cache for each text",
)
@pytest.mark.parametrize(
    ("kind", "refusal"),
    [(Static, "must be a `DynamicCache` that is not offloaded, got StaticCache"), (Filled, "a cache must be empty")],
)
def test_other_caches(kind: type[Quiet], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        run_swarm(partial(made, "llama", "greedy", kind), loader(), max_steps=1, pipeline=LAYERS)


@feature(
    "generating text in train mode with gradient checkpointing",
    REFUSED,
    "Hugging Face's checkpointed blocks use no cache; generate under `model.eval()`",
)
def test_checkpointed_blocks_in_train_mode() -> None:
    with pytest.raises(ConfigError, match="blocks with gradient checkpointing have no cache in train mode"):
        run_swarm(partial(made, "llama", "greedy", Checkpointed), loader(), max_steps=1, pipeline=LAYERS)
