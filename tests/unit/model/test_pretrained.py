"""Hugging Face folders are read part by part: each tensor equals that of `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.export import export_pretrained
from lightning_swarm.model.pretrained import PretrainedFolder, PretrainedModel, device_of, dtype_of
from tests.served import FAMILIES, make_model

CPU = torch.device("cpu")


def read(path: Path, dtype: str) -> tuple[Any, Any]:
    """Return the module that was read in parts, and its card."""
    folder = PretrainedFolder(path)
    model = PretrainedModel(folder.config, folder.generation_config, dtype=dtype)
    number = len(model.blocks.modules)
    ranges = [range(index, index + 1) for index in range(number)]
    card = folder.card(model, ranges)
    reader = folder.reader(model)
    for stage in model.stages(ranges):
        model.fill(stage.named_stage_tensors(), reader, CPU)
    model.fill(model.around, reader, CPU)
    return model.module, card


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_tensor_is_that_of_hugging_face(
    tmp_path: Path, family: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(family, dtype=torch.float32).save_pretrained(tmp_path)
    found, card = read(tmp_path, dtype)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype_of(dtype))
    both = [{**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (found, wanted)]
    assert both[0].keys() == both[1].keys()
    for name, tensor in both[0].items():
        assert tensor.dtype == both[1][name].dtype, name
        assert torch.equal(tensor, both[1][name]), name
    assert card.dtype == dtype
    assert "are not served" not in caplog.text


def changed(path: Path, **tensors: torch.Tensor) -> None:
    file = path / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    """Hugging Face loads both tensors unchanged, even if the config says that they are tied."""
    make_model("llama", tie_word_embeddings=True, dtype=torch.float32).save_pretrained(tmp_path)
    changed(tmp_path, **{"lm_head.weight": torch.randn(29, 16)})
    with pytest.raises(ConfigError, match=r"tied weights must be equal.*tie_word_embeddings"):
        read(tmp_path, "float32")


@pytest.mark.parametrize("value", ["nan", "inf", "70000"])
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path: Path, value: str) -> None:
    """A number may be finite in the file and infinite in float16."""
    make_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    weight = torch.ones(16)
    weight[3] = float(value)
    changed(tmp_path, **{"model.norm.weight": weight})
    with pytest.raises(ConfigError, match=r"1 of 16 in 'model\.norm\.weight' are not, in torch\.float16"):
        read(tmp_path, "float16")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tensors_that_are_no_part_of_the_model_are_named(
    tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(family, dtype=torch.float32).save_pretrained(tmp_path)
    changed(tmp_path, **{"model.layers.9.mlp.up_proj.weight": torch.ones(2), "model.layers.1.extra": torch.ones(2)})
    read(tmp_path, "float32")
    assert "2 tensors of " in caplog.text
    assert "not served: model.layers.1.extra, model.layers.9.mlp.up_proj.weight" in caplog.text


@pytest.mark.parametrize("name", ["cuda:99", "cpus", "xla"])
def test_a_device_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"can use here.*got '{name}': .*such as 'cpu'"):
        device_of(name)
    assert device_of("cpu") == CPU


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    make_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    changed(tmp_path, **{"model.norm.weight": torch.ones(16, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=r"must be as its config\.json describes.*torch\.int8"):
        read(tmp_path, "float32")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    make_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has no 'model\.layers\.2\.mlp\.up_proj\.weight'"):
        read(tmp_path, "float32")
    with pytest.raises(ConfigError, match=r"has none\. Write it by"):
        PretrainedFolder(tmp_path / "nowhere")


def test_a_checkpoint_becomes_a_folder(tmp_path: Path) -> None:
    model = make_model("llama", dtype=torch.float32)
    model.generation_config.eos_token_id = [3, 5]
    model.config.save_pretrained(tmp_path)
    model.generation_config.save_pretrained(tmp_path)
    state = {f"net.model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": {**state, "net.other": torch.ones(2)}}, tmp_path / "last.ckpt")
    export_pretrained(tmp_path / "last.ckpt", tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.generation_config.eos_token_id == [3, 5]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name])
    torch.save({"state_dict": {"other": torch.ones(2)}}, tmp_path / "last.ckpt")
    with pytest.raises(ConfigError, match="has them 0 times"):
        export_pretrained(tmp_path / "last.ckpt", tmp_path)
