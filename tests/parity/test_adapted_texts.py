"""A served model with a client's own adapter generates the same tokens as peft on one machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.serving import remote_model
from lightning_swarm.serving.remote_model import prefill_options
from tests.parity.test_served import MODES
from tests.served import ServedSwarm, calling, make_model, writing

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set"),  # peft: GPT-2's layers are transposed
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),  # peft asks for it
]

PROMPTS = torch.tensor([[0, 0, 5, 3, 7, 3], [4, 11, 2, 9, 2, 6]])
LAYERS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "mixtral": ["q_proj", "o_proj"],
    "mamba": ["in_proj", "x_proj"],
}
NUM_NEW = 9


def write(model: Any, mode: str, **options: Any) -> Tensor:
    prompts = PROMPTS[1:] if mode == "prompt lookup" else PROMPTS
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        found = model.generate(
            input_ids=prompts,
            attention_mask=(prompts > 0).long(),
            max_new_tokens=NUM_NEW,
            **{"do_sample": False, **MODES[mode], **options},
        )
    assert isinstance(found, Tensor)
    return found


def save_adapter(family: str, folder: Path, *, seed: int = 1, **options: Any) -> Path:
    """Write an adapter with random weights: peft's initial ones would not change the text."""
    config = peft.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": LAYERS[family], **options})
    model = peft.get_peft_model(make_model(family), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.normal_(std=0.5)
    model.save_pretrained(folder)
    return folder


def plain(family: str, folder: Path) -> Any:
    return peft.PeftModel.from_pretrained(make_model(family), folder)


def serve(family: str, folder: Path, *, num_stages: int = 2) -> ServedSwarm:
    make_model(family).save_pretrained(folder / "base")
    swarm = ServedSwarm(folder / "base", num_stages=num_stages)
    swarm.serve("a")
    for name in "bcd":
        swarm.serve(name, join="a", share=0.5, has_files=False)
    return swarm


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[ServedSwarm]:
    with closing(serve("llama", tmp_path)) as made:
        yield made


def remote(swarm: ServedSwarm, adapter: Path, **options: Any) -> Any:
    swarm.connect(adapts=True, **options)
    assert swarm.client is not None
    return swarm.client.load_adapter(adapter)


def servers(swarm: ServedSwarm) -> list[Any]:
    return [host.server for host in swarm.hosts.values() if host.server is not None]


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["greedy", "sampled", "beams", "prompt lookup", "prefill in chunks"])
@pytest.mark.parametrize("family", LAYERS)
def test_a_text_is_that_of_one_machine(tmp_path: Path, family: str, mode: str) -> None:
    if family == "mamba" and mode in ("prompt lookup", "prefill in chunks"):
        pytest.skip("Hugging Face does not do it either")
    adapter = save_adapter(family, tmp_path / "adapter")
    with closing(serve(family, tmp_path)) as swarm:
        found = write(remote(swarm, adapter), mode)
        assert torch.equal(found, write(plain(family, adapter), mode))
        assert not torch.equal(found, write(make_model(family), mode)), "the adapter changes nothing"
        assert sum(server.sessions.num_steps for server in servers(swarm)) > 3, "nothing was written by sessions"


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("victims", ["b", "bc"])
def test_no_death_of_a_server_changes_a_token(tmp_path: Path, swarm: ServedSwarm, victims: str) -> None:
    """A replacement server has no copy of the adapter, so the client must send it again."""
    adapter = save_adapter("llama", tmp_path / "adapter")
    model, killed = remote(swarm, adapter), list[str]()

    def kill() -> None:
        assert swarm.client is not None
        (session,) = swarm.client.served.forwards._sessions._open.values()
        killed.extend(dict.fromkeys(session._route))
        for name in killed[: len(victims)]:
            swarm.network.kill(PeerId(name))

    found = write(model, "greedy", stopping_criteria=[calling(kill, at=10)])
    assert killed, "the fault is due"
    assert torch.equal(found, write(plain("llama", adapter), "greedy"))


def test_an_adapter_that_a_server_has_dropped_is_sent_again(tmp_path: Path, swarm: ServedSwarm) -> None:
    adapter = save_adapter("llama", tmp_path / "adapter")
    model, dropped = remote(swarm, adapter), list[int]()

    def drop() -> None:
        for server in servers(swarm):
            dropped.append(len(server.tuning.adapters._kept))
            server.tuning.adapters._kept.clear()

    found = write(model, "beams", stopping_criteria=[calling(drop, at=10)])
    assert sum(dropped) == 2, "the fault is due"
    assert torch.equal(found, write(plain("llama", adapter), "beams"))


@pytest.mark.thorough
def test_each_user_has_an_adapter_of_its_own(tmp_path: Path, swarm: ServedSwarm) -> None:
    """Three users with different adapters and one without any generate in turns, token by token."""
    adapters = [save_adapter("llama", tmp_path / f"adapter-{seed}", seed=seed) for seed in range(3)]
    models = [remote(swarm, adapter, name=f"user-{index}") for index, adapter in enumerate(adapters)]
    models.append(swarm.connect(name="nobody's"))
    wanted = [*(plain("llama", adapter) for adapter in adapters), make_model("llama")]

    def tokens(model: Any) -> Iterator[int]:
        ids, cache = PROMPTS[1:], None
        for _ in range(NUM_NEW):
            with torch.no_grad():
                found = model(input_ids=ids, past_key_values=cache, use_cache=True)
            ids, cache = found.logits[:, -1:].argmax(-1), found.past_key_values
            yield int(ids)

    assert list(zip(*map(tokens, models), strict=True)) == list(zip(*map(tokens, wanted), strict=True))


@pytest.mark.parametrize("training", [False, True], ids=["eval mode", "train mode"])
def test_an_adapter_in_training_writes_too(tmp_path: Path, swarm: ServedSwarm, *, training: bool) -> None:
    """`generate` works between steps; a cache that was begun before a step is refused after it."""
    swarm.connect(adapts=True)
    models = []
    for base in (swarm.client.model, make_model("llama")):  # type: ignore[union-attr]
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=LAYERS["llama"], init_lora_weights=False)
        models.append(peft.get_peft_model(base, config))
    optimizers = [torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5) for model in models]
    texts = []
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            texts.append(write(model.train(training), "greedy"))
            model.train()(input_ids=PROMPTS[1:], labels=PROMPTS[1:]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, texts[::2], texts[1::2]))
    assert not torch.equal(texts[0], texts[-1]), "nothing was learned"
    model = models[0].eval()
    with torch.no_grad(), pytest.raises(ConfigError, match=r"Generate text under `torch\.no_grad"):
        model(input_ids=PROMPTS[1:, :1], past_key_values=model(input_ids=PROMPTS[1:]).past_key_values)
    for one in model.parameters():
        one.requires_grad_(False)
    with torch.no_grad():
        cache = model(input_ids=PROMPTS[1:]).past_key_values
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data.add_(0.1)
        with pytest.raises(ConfigError, match="the same adapter from beginning to end"):
            model(input_ids=PROMPTS[1:, :1], past_key_values=cache)


PROMPTS_OF_PEFT: dict[str, Any] = {
    "prompt tuning": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
}


@pytest.mark.filterwarnings("ignore:Position ids are not supported")  # warning caused by a call inside peft
@pytest.mark.parametrize("kind", PROMPTS_OF_PEFT)
def test_a_text_after_prompts_that_were_tuned(
    tmp_path: Path, swarm: ServedSwarm, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is not cut, even if it is longer than one step."""
    monkeypatch.setattr(remote_model, "step_tokens", lambda model: PROMPTS.numel() - 1)
    torch.manual_seed(1)
    peft.get_peft_model(make_model("llama"), PROMPTS_OF_PEFT[kind]).save_pretrained(tmp_path / "adapter")
    model = remote(swarm, tmp_path / "adapter")
    assert torch.equal(write(model, "greedy"), write(plain("llama", tmp_path / "adapter"), "greedy"))
    assert prefill_options(model, 1000) == {}, "peft takes the last token alone of each further chunk"
    assert prefill_options(swarm.connect(name="another"), 1000)


ADAPTERS: dict[str, dict[str, Any]] = {
    "of one stage": {"layers_to_transform": [3]},
    "of other ranks": {"rank_pattern": {"q_proj": 2}},
}


@pytest.mark.parametrize("kind", [*ADAPTERS, "two at once"])
def test_adapters_of_other_kinds(tmp_path: Path, swarm: ServedSwarm, kind: str) -> None:
    folder = save_adapter("llama", tmp_path / "adapter", **ADAPTERS.get(kind, {}))
    models = [remote(swarm, folder), plain("llama", folder)]
    if kind == "two at once":
        save_adapter("llama", tmp_path / "other", seed=2)
        for model in models:
            model.load_adapter(tmp_path / "other", adapter_name="other")
            model.base_model.set_adapter(["default", "other"])
    assert torch.equal(*(write(model, "greedy") for model in models))


def test_a_server_that_takes_no_adapter_is_replaced(tmp_path: Path, swarm: ServedSwarm) -> None:
    """A server without room for adapters is replaced; users who share the room for one still get their texts."""
    for name, room in (("a", 100), ("b", 7000), ("c", 7000), ("d", 7000)):
        server = swarm.hosts[name].server
        assert server is not None
        server.tuning.adapters._max_bytes = room
    folders = [save_adapter("llama", tmp_path / f"adapter-{seed}", seed=seed) for seed in range(2)]
    models = [remote(swarm, folder, name=f"user-{seed}", seed=seed) for seed, folder in enumerate(folders)]
    for model, folder in zip(models, folders, strict=True):
        assert torch.equal(write(model, "greedy"), write(plain("llama", folder), "greedy"))


@pytest.mark.parametrize("kind", ["no folder", "another model's", "a smaller model's", "IA3", "a hostile module"])
def test_a_folder_that_is_none_is_refused(tmp_path: Path, swarm: ServedSwarm, kind: str) -> None:
    folder = tmp_path / "adapter"
    if kind == "another model's":
        save_adapter("gpt2", folder)
    elif kind == "a smaller model's":
        config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=LAYERS["llama"])
        peft.get_peft_model(make_model("llama", num_hidden_layers=2), config).save_pretrained(folder)
    elif kind == "IA3":
        config = peft.IA3Config(task_type="CAUSAL_LM", target_modules=["v_proj"], feedforward_modules=[])
        peft.get_peft_model(make_model("llama"), config).save_pretrained(folder)
    elif kind == "a hostile module":
        save_adapter("llama", folder)
        config_file = folder / "adapter_config.json"
        named = {"megatron_config": {"a": 1}, "megatron_core": "antigravity"}
        config_file.write_text(json.dumps({**json.loads(config_file.read_text()), **named}))
    messages = {"IA3": "got IA3", "a hostile module": "`megatron_config`"}
    with pytest.raises(ConfigError, match=messages.get(kind, "`adapter` must be a folder")):
        remote(swarm, folder)


def test_a_prefix_is_of_one_adapter(tmp_path: Path, swarm: ServedSwarm) -> None:
    adapter = save_adapter("llama", tmp_path / "adapter")
    model, same = remote(swarm, adapter), plain("llama", adapter)
    assert swarm.client is not None
    swarm.client.prefixes.texts.min_tokens = 4
    prompt, kept = torch.arange(3, 15)[None], []

    def write_both() -> torch.Tensor:
        mask = torch.ones_like(prompt)
        with writing(model) as text:
            found = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
        kept.append(text.num_kept_tokens)
        wanted = same.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, wanted)
        return torch.cat([wanted, prompt[:, :3]], dim=1)

    prompt = write_both()
    write_both()
    with model.disable_adapter(), same.disable_adapter():
        write_both()
    for one in (model, same):
        with torch.no_grad():
            for weight in [weight for name, weight in one.named_parameters() if "lora_B" in name]:
                weight.mul_(2.0)
    write_both()
    assert kept == [0, 15, 0, 0]


def test_dropout_of_an_adapter_is_drawn_in_train_mode_whatever_dies(tmp_path: Path, swarm: ServedSwarm) -> None:
    adapter = save_adapter("llama", tmp_path / "adapter", lora_dropout=0.5)
    in_eval_mode = write(remote(swarm, adapter), "greedy")
    undisturbed = write(remote(swarm, adapter, name="second").train(), "greedy")
    assert not torch.equal(undisturbed, in_eval_mode), "nothing was dropped"
    model, killed = remote(swarm, adapter, name="third").train(), list[str]()

    def kill() -> None:
        assert swarm.client is not None
        (session,) = swarm.client.served.forwards._sessions._open.values()
        killed.append(session._route[-1])
        swarm.network.kill(PeerId(killed[0]))

    assert torch.equal(write(model, "greedy", stopping_criteria=[calling(kill, at=5)]), undisturbed)
    assert killed, "the fault is due"
    assert not torch.equal(write(model, "greedy"), undisturbed), "each text draws its own"
