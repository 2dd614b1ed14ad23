"""Requests that name an adapter as their model: each text is that of peft on one machine, even if servers die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import peft
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId
from lightning_swarm.serving.http_server import TextEndpoint
from lightning_swarm.serving.texts import ServedText
from tests.parity.test_adapted_texts import plain, save_adapter, serve
from tests.parity.test_served import letters
from tests.served import ServedSwarm, make_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set"),  # peft: GPT-2's layers are transposed
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing"),  # peft asks for it
]

NUM_NEW = 12
NAMES = ("base", "poems", "laws/v2")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[ServedSwarm]:
    with closing(serve("llama", tmp_path)) as made:
        lock, run = threading.RLock(), made.runtime.run

        def run_alone(work: Any) -> Any:
            with lock:  # texts are written on several threads
                return run(work)

        made.runtime.run = run_alone  # type: ignore[method-assign]
        yield made


def adapters(folder: Path) -> dict[str, Path]:
    return {name: save_adapter("llama", folder / name, seed=seed) for seed, name in enumerate(NAMES[1:])}


def models(swarm: ServedSwarm, folder: Path) -> list[ServedText]:
    base = swarm.connect()
    given = [(name, base.swarm.with_lora(one), "base") for name, one in adapters(folder).items()]
    return [ServedText(name, model, letters(), parent=parent) for name, model, parent in [("base", base, None), *given]]


def expected(model: Any, prompt: str) -> str:
    tokenizer = letters()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options = {"do_sample": False, "max_new_tokens": NUM_NEW}
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def ask(served: list[ServedText], act: Any) -> Any:
    async def run() -> Any:
        app = TextEndpoint(served).app()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://swarm") as own:
            client = openai.AsyncOpenAI(api_key="-", base_url="http://swarm/v1", http_client=own, max_retries=0)
            return await act(client)

    return asyncio.run(run())


def complete(client: openai.AsyncOpenAI, model: str, prompt: str) -> Any:
    return client.completions.create(model=model, prompt=prompt, max_tokens=NUM_NEW, temperature=0)


def test_requests_at_once_name_models_and_adapters(swarm: ServedSwarm, tmp_path: Path) -> None:
    served = models(swarm, tmp_path)
    asked = [(name, prompt) for prompt in ("bigcat", "dog") for name in NAMES]

    async def act(client: openai.AsyncOpenAI) -> Any:
        listed = [(one.id, one.parent) for one in (await client.models.list()).data]  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'") as refused:
            await complete(client, "other", "dog")
        assert refused.value.code == "model_not_found"
        assert (await client.models.retrieve("laws/v2")).id == "laws/v2"
        return listed, await asyncio.gather(*(complete(client, *one) for one in asked))

    listed, found = ask(served, act)
    assert listed == [("base", None), ("poems", "base"), ("laws/v2", "base")]
    own = {"base": make_model("llama")}
    own |= {name: plain("llama", folder) for name, folder in adapters(tmp_path).items()}
    texts = [one.choices[0].text for one in found]
    assert texts == [expected(own[name], prompt) for name, prompt in asked]
    assert len({*texts}) == len(texts), "the adapters change nothing"
    embeddings = {one.model.get_input_embeddings().weight.data_ptr() for one in served}
    assert len(embeddings) == 1, "each adapter has a copy of the embeddings"


def test_a_second_request_begins_with_the_prefix_of_the_first(swarm: ServedSwarm, tmp_path: Path) -> None:
    served = models(swarm, tmp_path)
    for one in served:
        one.model.swarm.prefixes.texts.min_tokens = 4

    async def act(client: openai.AsyncOpenAI) -> Any:
        prompt, texts, cached = "bigcat", list[tuple[str, str, str]](), list[int]()
        bodies: list[dict[str, Any]] = [{}, {}, {"cache_salt": "b"}, {"exact": True}, {}]
        for name, body in zip(["base"] * 4 + ["poems"], bodies, strict=True):
            found: Any = await client.completions.create(
                model=name, prompt=prompt, max_tokens=NUM_NEW, temperature=0, extra_body=body
            )
            texts.append((name, prompt, found.choices[0].text))
            cached.append(found.usage.prompt_tokens_details.cached_tokens)
            prompt = f"bigcat{texts[0][2]}dog"
        metrics = await client._client.get("http://swarm/metrics")
        return texts, cached, metrics.text

    texts, cached, metrics = ask(served, act)
    own = {"base": make_model("llama"), "poems": plain("llama", adapters(tmp_path)["poems"])}
    assert [text for *_, text in texts] == [expected(own[name], prompt) for name, prompt, _ in texts]
    known = len(letters()("bigcat").input_ids) + NUM_NEW - 1  # the last token was not computed
    assert cached == [0, known, 0, 0, 0]
    assert f'prefix_cache_hits_total{{model_name="base"}} {float(known)}' in metrics


def test_a_server_that_dies_is_replaced_and_counted(swarm: ServedSwarm, tmp_path: Path) -> None:
    served = models(swarm, tmp_path)
    killed, calls = list[PeerId](), list[int]()

    def kill(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            (session,) = swarm.client.served.forwards._sessions._open.values()  # type: ignore[union-attr]
            killed.append(session._route[0])
            swarm.network.kill(killed[0])

    served[1].model.register_forward_pre_hook(kill)

    async def act(client: openai.AsyncOpenAI) -> Any:
        await complete(client, "base", "dog")
        await complete(client, "poems", "dog")
        found = await complete(client, "poems", "bigcat")
        return found.choices[0].text, await client.get("/../metrics", cast_to=httpx.Response)

    text, answer = ask(served, act)
    assert killed, "the fault is due"
    assert text == expected(plain("llama", adapters(tmp_path)["poems"]), "bigcat")
    values = {
        (sample.name.partition(":")[2], sample.labels.get("model_name")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert swarm.client is not None
    assert values["replaced_servers_total", "base"] == swarm.client.routes.num_replaced > 0
    assert ("replaced_servers_total", "poems") not in values
    assert [values["generation_tokens_total", name] for name in NAMES] == [NUM_NEW, 2 * NUM_NEW, 0]
    assert [values["prompt_tokens_total", name] for name in NAMES] == [3, 9, 0]


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_an_adapter_of_another_kind_or_model_is_refused(swarm: ServedSwarm, tmp_path: Path) -> None:
    swarm.connect()
    assert swarm.client is not None
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(make_model("llama"), prompts).save_pretrained(tmp_path / "prompts")
    with pytest.raises(ConfigError, match="an endpoint serves LoRA adapters, got tuned prompts"):
        swarm.client.with_lora(tmp_path / "prompts")
    other = save_adapter("gpt2", tmp_path / "other")
    with pytest.raises(ConfigError, match="`adapter` must be a folder"):
        swarm.client.with_lora(other)
    assert expected(swarm.client.model, "dog") == expected(make_model("llama"), "dog")
