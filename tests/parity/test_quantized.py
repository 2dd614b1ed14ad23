"""Served models with quantised weights: tokens, losses and adapters of transformers and peft on one machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, StageLost
from lightning_swarm.model.pretrained import PretrainedModel
from lightning_swarm.network import PeerId
from tests.parity import test_attach as tuning
from tests.parity.test_served import PROMPTS, write
from tests.served import ServedSwarm, calling, make_model
from tests.unit.server.inference import test_batching as batching

pytestmark = tuning.pytestmark

SIZES: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64},
    # With linear layers around the blocks, which transformers quantises, too.
    "opt": {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 128, "num_attention_heads": 4},
}
FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"load_in_8bit": True},
}
STORED: dict[str, dict[str, Any]] = {
    "nested nf4": {**FORMS["nf4"], "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16},
    "fp4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": FORMS["int8"],
    "some layers": {**FORMS["nf4"], "llm_int8_skip_modules": ["model.layers.1.mlp", "lm_head"]},
}


def base(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model with biases and with inputs of layers that are large in some columns."""
    if family == "qwen2":
        torch.manual_seed(0)
        config = transformers.Qwen2Config(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=None)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    else:
        model = make_model(family, dtype=dtype, **OWN_SIZES.get(family, SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif "norm.weight" in name:
                parameter.normal_(1.0)
                parameter[::16] *= 6.0
            elif family == "qwen2":
                parameter.mul_(3.0)
    return model


def quantized(folder: Path, dtype: torch.dtype, **form: Any) -> Any:
    """Load a folder by transformers, quantised by `form`; without it as the folder is."""
    if form.get("load_in_4bit"):
        form = {"bnb_4bit_compute_dtype": dtype, **form}
    options = {"quantization_config": transformers.BitsAndBytesConfig(**form)} if form else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    for layer in model.modules():
        # Some CPUs have a kernel in bfloat16, for which bitsandbytes would rewrite the weights at their first use.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model.eval()


class QuantizedSwarm(ServedSwarm):
    """Servers of a folder's model that the first server quantises."""

    kind = "nf4"

    def serve(self, name: str, **options: Any) -> Any:
        """See `ServedSwarm`."""
        return super().serve(name, **{"quantize": None if options.get("join") else self.kind, **options})


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., ServedSwarm]]:
    """Serve a model: server `a` holds it all, and the others half of it, `c` without files."""
    swarms: list[ServedSwarm] = []

    def make(model: Any, kind: str | None, servers: str = "abc", **options: Any) -> ServedSwarm:
        model.save_pretrained(tmp_path)
        swarms.append(ServedSwarm(tmp_path, num_stages=2))
        for name in servers:
            share = {"quantize": kind} if name == "a" else {"join": "a", "share": 0.5, "has_files": name != "c"}
            swarms[-1].serve(name, **{**share, **options})
        return swarms[-1]

    yield make
    for swarm in swarms:
        swarm.close()


def refuse(folder: Path, message: str, **options: Any) -> None:
    """Check that a first server of a folder's model is refused."""
    with pytest.raises(ConfigError, match=message), closing(ServedSwarm(folder, num_stages=2)) as swarm:
        swarm.serve("a", **options)


@pytest.mark.first_cells(0, 20, 7)
@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt", "mixtral"])
def test_a_text_is_that_of_transformers(
    serve: Callable[..., ServedSwarm], family: str, dtype: torch.dtype, kind: str
) -> None:
    model = base(family, dtype)
    swarm = serve(model, kind)
    assert [len(host.span) for host in swarm.hosts.values()] == [2, 1, 1]
    remote, plain = swarm.connect(), quantized(swarm.folder, dtype, **FORMS[kind])
    for mode in ("greedy", "sampled", "beams", "prefill in chunks", "prompt lookup"):
        assert torch.equal(write(remote, mode), write(plain, mode)), mode
    logits = [one(PROMPTS, attention_mask=(PROMPTS > 0).long(), use_cache=False).logits for one in (remote, plain)]
    assert torch.equal(*logits)
    with torch.no_grad():
        assert not torch.equal(logits[0], model(PROMPTS, attention_mask=(PROMPTS > 0).long()).logits)


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("form", STORED)
def test_a_folder_whose_weights_are_quantised_is_served_as_it_is(
    serve: Callable[..., ServedSwarm], tmp_path: Path, form: str
) -> None:
    base("qwen2", torch.bfloat16).save_pretrained(tmp_path / "plain")
    swarm = serve(quantized(tmp_path / "plain", torch.bfloat16, **STORED[form]), None, servers="")
    for name in "abc":
        swarm.serve(name, join="" if name == "a" else "a", has_files=name != "c")
    remote, plain = swarm.connect(), quantized(swarm.folder, torch.bfloat16)
    assert torch.equal(write(remote, "greedy"), write(plain, "greedy"))
    assert torch.equal(remote(PROMPTS, use_cache=False).logits, plain(PROMPTS, use_cache=False).logits)
    refuse(swarm.folder, r"dtype in which it was saved, torch\.bfloat16, got torch\.float32", dtype="float32")


@pytest.mark.parametrize("kind", FORMS)
def test_no_death_of_a_server_changes_a_token(serve: Callable[..., ServedSwarm], kind: str) -> None:
    swarm = serve(base("llama"), kind, servers="abcd")
    remote, killed = swarm.connect(), list[str]()

    def kill() -> None:
        killed.extend(name for name in "ab" if swarm.hosts[name].server)
        for name in killed:
            swarm.network.kill(PeerId(name))

    found = write(remote, "greedy", stopping_criteria=[calling(kill, at=PROMPTS.shape[1] + 4)])
    assert killed
    assert torch.equal(found, write(quantized(swarm.folder, torch.float32, **FORMS[kind]), "greedy"))


@pytest.mark.parametrize("kind", FORMS)
def test_texts_share_a_forward_if_rows_do_not_depend_on_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With int8, a column that is large in one text is computed otherwise for all texts of a forward."""
    monkeypatch.setattr(QuantizedSwarm, "kind", kind)
    monkeypatch.setattr(batching, "ServedSwarm", QuantizedSwarm)
    monkeypatch.setattr(batching, "make_model", base)
    texts = batching.recorded(tmp_path, "llama", monkeypatch, batching.plain_prompts())
    steps = batching.JointSteps[Any](batching.InlineExecutor())
    with closing(batching.VirtualLoop()) as loop:
        for number in (1, 2, 3):
            apart = batching.alone(loop, texts.waiting(number))
            found = [result for result, _ in batching.results(loop, steps, texts.waiting(number))]
            torch.testing.assert_close(found, apart, rtol=1e-4, atol=1e-3 if kind == "nf4" else 0.0)
    assert (steps.num_joint > 0) == (kind == "nf4")


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("kind", FORMS)
def test_an_adapter_over_quantised_weights_is_that_of_peft(
    serve: Callable[..., ServedSwarm], monkeypatch: pytest.MonkeyPatch, kind: str, mode: str
) -> None:
    swarm = serve(base("llama"), kind)
    strategy = tuning.attached(swarm, monkeypatch, microbatch_size=6)
    write(swarm.connect(name="writer"), "greedy")  # texts must not change the weights
    bases = quantized(swarm.folder, torch.float32, **FORMS[kind]), strategy.base_model()
    runs = []
    for model, chosen in zip(bases, ("auto", strategy), strict=True):
        torch.manual_seed(1)
        runs.append(tuning.tune(getattr(tuning.lora(model), mode)(), chosen, steps=4, precision="32-true"))
    plain, found = runs
    assert (found.losses, found.validated) == (plain.losses, plain.validated)
    trained = {name: one for name, one in plain.named_parameters() if one.requires_grad}
    own = dict(found.named_parameters())
    assert trained
    assert all(torch.equal(own[name], one) for name, one in trained.items())


@pytest.mark.parametrize("kind", FORMS)
def test_an_adapter_in_bfloat16_is_that_of_peft(
    serve: Callable[..., ServedSwarm], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Adapters are in float32, and peft rounds their products to bfloat16 at other places than without quantisation."""
    swarm = serve(base("llama", torch.bfloat16), kind)
    strategy = tuning.attached(swarm, monkeypatch, microbatch_size=6)
    bases = quantized(swarm.folder, torch.bfloat16, **FORMS[kind]), strategy.base_model()
    losses, adapters = list[list[float]](), list[list[Tensor]]()
    for model in bases:
        torch.manual_seed(1)
        adapted = tuning.lora(model).train()
        trained = [one for one in adapted.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses.append([])
        for (ids,) in tuning.data():
            loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        adapters.append(trained)
    assert losses[0] == losses[1]
    assert all(map(torch.equal, *adapters))


def test_an_adapter_writes_texts_in_bfloat16_as_in_peft(serve: Callable[..., ServedSwarm], tmp_path: Path) -> None:
    swarm = serve(base("llama", torch.bfloat16), "nf4")
    make = partial(quantized, swarm.folder, torch.bfloat16, **FORMS["nf4"])
    torch.manual_seed(1)
    adapted = tuning.lora(make())
    with torch.no_grad():
        for name, one in adapted.named_parameters():
            if "lora_B" in name:
                one.normal_(std=0.1)
    adapted.eval().save_pretrained(tmp_path / "adapter")
    swarm.connect(adapts=True)
    assert swarm.client is not None
    found = swarm.client.load_adapter(tmp_path / "adapter")
    given = {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long(), "use_cache": False}
    with torch.no_grad():
        assert torch.equal(found(**given).logits, adapted(**given).logits)


# ---------------------------------------------------------------------- refusals


def test_servers_of_one_model_have_one_quantisation(serve: Callable[..., ServedSwarm], tmp_path: Path) -> None:
    swarm = serve(base("llama"), "nf4", servers="a")
    with pytest.raises(ConfigError, match=r"are nf4, got `--quantize int8`\. Leave it out"):
        swarm.serve("b", join="a", quantize="int8")
    swarm.serve("c", join="a", quantize="nf4")
    plain = ServedSwarm(swarm.folder, num_stages=2)
    with closing(plain):
        first = plain.serve("a")
        ids = {host.models.card.id for host in (first, swarm.hosts["a"])}
        assert len(ids) == 2
        with pytest.raises(ConfigError, match=r"are plain, got `--quantize nf4`\. Leave it out"):
            plain.serve("b", join="a", quantize="nf4")
        quantized(swarm.folder, torch.float32, **FORMS["int8"]).save_pretrained(tmp_path / "int8")
        plain.folder = tmp_path / "int8"
        with pytest.raises(ConfigError, match=r"are plain, but the weights in `--weights` are int8\. Name the folder"):
            plain.serve("d", join="a")
    refuse(plain.folder, r"are int8 already, got `--quantize nf4`\. Leave it out", quantize="nf4")


def test_blocks_from_another_server_are_compared(serve: Callable[..., ServedSwarm]) -> None:
    """Not only the weights, but also their scales."""
    swarm = serve(base("llama"), "nf4", servers="a")
    server = swarm.hosts["a"].server
    assert server is not None
    parts, read = server.parts, server.parts.tensor

    def poisoned(name: str) -> Tensor:
        return read(name) * (2.0 if name.endswith("mlp.up_proj.absmax") else 1)

    server.parts = replace(parts, tensor=poisoned)
    with pytest.raises(StageLost, match="do not match the model's card"):
        swarm.serve("b", join="a", has_files=False)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        *(({"quant_method": one}, f"got '{one}'") for one in ("gptq", "awq", "compressed-tensors", "torchao", "gguf")),
        ({"quant_method": "bitsandbytes"}, "got bitsandbytes with"),
        ({"quant_method": "bitsandbytes", **FORMS["int8"], "llm_int8_threshold": "6"}, "'llm_int8_threshold': '6'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_has_fp16_weight": True}, "has_fp16_weight"),
        ({"quant_method": "bitsandbytes", **FORMS["int8"], "llm_int8_skip_modules": ["(a+)+"]}, "names of modules"),
        ({"quant_method": "bitsandbytes", **FORMS["nf4"], "bnb_4bit_compute_dtype": "float64"}, "got 'float64'"),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], refusal: str) -> None:
    base("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    refuse(tmp_path, refusal)


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    base("llama").config.save_pretrained(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    refuse(tmp_path, r"has GGUF, as in model-Q4_K_M\.gguf.*use `--quantize`")


def test_a_stored_layer_must_be_complete_and_in_the_form_of_its_config(tmp_path: Path) -> None:
    base("llama").save_pretrained(tmp_path / "plain")
    quantized(tmp_path / "plain", torch.float32, **FORMS["nf4"]).save_pretrained(tmp_path / "whole")
    file, layer = "model.safetensors", "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "whole" / file)
    state = f"{layer}.quant_state.bitsandbytes__nf4"
    other = bytes(tensors[state].tolist()).replace(b"float32", b"float16")
    changes: dict[str, dict[str, Tensor]] = {
        "has no 'absmax' under": {name: one for name, one in tensors.items() if name != f"{layer}.absmax"},
        "has `dtype` float16 instead of float32": {**tensors, state: torch.tensor([*other], dtype=torch.uint8)},
    }
    for message, changed in changes.items():
        folder = shutil.copytree(tmp_path / "whole", tmp_path / "changed", dirs_exist_ok=True)
        save_file(changed, folder / file, {"format": "pt"})
        refuse(folder, message)


@pytest.mark.parametrize(("value", "kind"), [("inf", "nf4"), ("nan", "nf4"), ("70000", "int8")])
def test_weights_that_are_no_finite_numbers_are_refused(tmp_path: Path, value: str, kind: str) -> None:
    """A number may be finite in the file and infinite in float16, in which int8's scales are computed."""
    model = base("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float(value)
    model.save_pretrained(tmp_path)
    refuse(tmp_path, r"1 of 8192 in 'model\.layers\.1\.mlp\.up_proj\.weight' are not", quantize=kind)


def test_what_quantised_weights_need_is_named(
    serve: Callable[..., ServedSwarm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"float32, bfloat16 or float16, got .*float64"):
        serve(base("llama", torch.float64), "nf4", servers="a")
    with pytest.raises(ConfigError, match=r"a multiple of 64.*'model\.layers\.0\.mlp\.down_proj' has 24.*int8"):
        serve(make_model("llama", dtype=torch.float32, hidden_size=64), "nf4", servers="a")
    swarm = serve(base("llama"), "nf4", servers="a")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    remote = swarm.connect()  # a client needs no bitsandbytes
    assert remote.model.layers[0].mlp.up_proj.weight.is_meta
    card = swarm.hosts["a"].models.card
    with pytest.raises(ConfigError, match=r"need bitsandbytes.*pip install 'bitsandbytes>="):
        PretrainedModel(card.config, "", dtype=card.dtype)
