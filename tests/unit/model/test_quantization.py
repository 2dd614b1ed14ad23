"""Quantised layers and their tensors are those of bitsandbytes and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
import transformers

from lightning_swarm.cli.serving import serve_parser
from lightning_swarm.core.errors import ConfigError
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
    found = Quantization(kind=kind, dtype=dtype, is_nested=is_nested).quantize(weight)
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
    found = Quantization(kind="int8", dtype=dtype).quantize(weight)
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


def test_the_command_has_all_kinds() -> None:
    for kind in quantization.KINDS:
        assert serve_parser().parse_args(["--weights", "my-llama", "--quantize", kind]).quantize == kind


LOADING = """
import resource
import sys
from pathlib import Path

import torch

from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel
from lightning_swarm.model.quantization import with_quantization

folder, kind, num_bytes = PretrainedFolder(Path(sys.argv[1])), sys.argv[2] or None, int(sys.argv[3])
model = PretrainedModel(with_quantization(folder.config, kind, "bfloat16"), "", dtype="bfloat16")
(stage,) = model.stages([range(len(model.blocks.modules))])
read = folder.reader(model)
for name in list(stage.named_stage_tensors())[:8]:
    read(name)  # imports the rest, and starts the threads
present = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (present + num_bytes, present + num_bytes))
model.fill(stage.named_stage_tensors(), read, torch.device("cpu"))
print(sum(tensor.nbytes for tensor in stage.named_stage_tensors().values()))
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's data")
def test_weights_that_are_larger_than_the_memory_are_loaded_quantised(tmp_path: Path) -> None:
    """A process that may take 70 % of the plain weights' bytes holds them in NF4: no more than a weight is plain."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="4MB")  # the limit counts a file that is mapped
    size = sum(tensor.nbytes for tensor in model.model.layers.state_dict().values())
    assert size > 100e6

    def load(kind: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LOADING, str(tmp_path), kind, str(size * 7 // 10)]
        # Each further thread would take a stack and a heap of its own from the limit.
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=alone)

    plain, found = load(""), load("nf4")
    assert plain.returncode
    assert "memory" in plain.stderr
    assert not found.returncode, found.stderr
    assert int(found.stdout) < 0.3 * size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"llm_int8_skip_modules": "lm_head"}, "must be names of modules"),
        ({"llm_int8_skip_modules": 5}, "must be names of modules"),
        ({"load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "int8"}, "to NF4, FP4 or int8, got"),
        *(({"llm_int8_threshold": value}, "llm_int8_threshold") for value in (10**400, -1, float("nan"), "6", True)),
    ],
)
def test_a_config_with_values_that_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    """The config may come from another peer."""
    given = {"quant_method": "bitsandbytes", "load_in_8bit": True, **change}
    with pytest.raises(ConfigError, match=words):
        Quantization.of({"quantization_config": given})


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="must hold an object"):
        Quantization.of([])  # type: ignore[arg-type]
