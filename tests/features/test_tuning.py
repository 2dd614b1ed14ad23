"""Tuning: adapters over the frozen blocks of a served model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm.core.errors import ConfigError
from tests.features.mark import REFUSED, WORKS, feature
from tests.parity import test_adapted_texts as texts
from tests.parity import test_attach as tuning
from tests.served import ServedSwarm, make_model

pytestmark = tuning.pytestmark


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[ServedSwarm]:
    make_model("llama").save_pretrained(tmp_path / "base")
    with closing(ServedSwarm(tmp_path / "base", num_stages=2)) as made:
        made.serve("a")
        yield made


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("LoRA", marks=feature("LoRA and rank-stabilised LoRA of peft, with `AttachStrategy`", WORKS)),
        pytest.param("prompt tuning", marks=feature("prompt tuning and p-tuning of peft", WORKS)),
        pytest.param("a head", marks=feature("your own head on top of a served model", WORKS)),
    ],
)
def test_tuned(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    strategy = tuning.attached(swarm, monkeypatch)
    runs = []
    for base, chosen in ((tuning.plain_base(swarm), "auto"), (strategy.base_model(), strategy)):
        torch.manual_seed(1)
        runs.append(tuning.tune(tuning.KINDS[kind](base), chosen, steps=6))
    tuning.assert_equal(runs[1], runs[0])


@feature(
    "`generate` with an adapter, during its training or from a folder",
    WORKS,
    "`remote_model(adapter=...)`; `--adapter` of the command ([tuning](finetune.md))",
)
def test_text_with_an_adapter(swarm: ServedSwarm, tmp_path: Path) -> None:
    adapter = texts.save_adapter("llama", tmp_path / "adapter")
    found = texts.write(texts.remote(swarm, adapter), "greedy")
    assert torch.equal(found, texts.write(texts.plain("llama", adapter), "greedy"))


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("DoRA", marks=feature("DoRA, `lora_bias`, `modules_to_save` in blocks", REFUSED, "use LoRA")),
        pytest.param("IA3", marks=feature("IA3 and prefix tuning", REFUSED, "use LoRA or prompt tuning")),
    ],
)
def test_refused(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make: Any
    make, message = tuning.REFUSED[kind]
    strategy = tuning.attached(swarm, monkeypatch)
    with pytest.raises(ConfigError, match=message):
        tuning.tune(make(strategy.base_model()), strategy, steps=1)


@feature("`AttachStrategy` with several devices", REFUSED, "use `devices=1`; the servers compute in parallel")
def test_several_devices(swarm: ServedSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tuning.attached(swarm, monkeypatch)
    with pytest.raises(ConfigError, match="tuned by one process"):
        tuning.tune(tuning.lora(strategy.base_model()), strategy, steps=1, devices=2)
