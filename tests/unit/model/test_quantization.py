"""Quantised layers and their tensors are those of bitsandbytes and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers

from lightning_swarm.model import quantization
from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel
from lightning_swarm.model.quantization import Quantization, is_quantized, with_quantization
from tests.served import FAMILIES, make_model


@pytest.mark.parametrize("shape", [(6, 64), (5, 13), (1, 1), (7, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_pieces_of_four_bits_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_nested: bool, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(quantization, "_PIECE", 128)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = Quantization(kind=kind, dtype=dtype, is_nested=is_nested).quantized(weight)
    packed, state = bitsandbytes.functional.quantize_4bit(weight, compress_statistics=is_nested, quant_type=kind)
    assert torch.equal(found.pop("weight"), packed)
    stored = {name: one for name, one in state.as_dict().items() if isinstance(one, torch.Tensor)}
    if is_nested:
        assert state.offset is not None
        stored["nested_offset"] = state.offset
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], one) for name, one in stored.items())


@pytest.mark.parametrize("shape", [(6, 64), (5, 13), (1, 1), (7, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_eight_bits_are_those_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(quantization, "_PIECE", 128)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = Quantization(kind="int8", dtype=dtype).quantized(weight)
    plain: Any = bitsandbytes.nn.Int8Params(weight, requires_grad=False).to("cpu")
    assert torch.equal(found["weight"], plain.CB)
    assert torch.equal(found["SCB"], plain.SCB)


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    make_model(family, dtype=torch.float32).save_pretrained(tmp_path)
    form = transformers.BitsAndBytesConfig(load_in_8bit=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=form, dtype=torch.float32)
    wanted = {name for name, layer in plain.named_modules() if is_quantized(layer)}
    config = with_quantization(PretrainedFolder(tmp_path).config, "int8", "float32")
    found = PretrainedModel(config, "", dtype="float32")
    assert found.quantized == wanted == {name for name, layer in found.module.named_modules() if is_quantized(layer)}
    client = PretrainedModel(config, "", dtype="float32", computes_blocks=False)
    assert client.quantized == wanted
    assert not any(is_quantized(layer) for block in client.blocks.modules for layer in block.modules())
