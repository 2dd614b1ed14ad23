"""The HTTP endpoint under OpenAI's own client: each answer equals that of the model in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from lightning_swarm.serving import http_connections, http_server
from lightning_swarm.serving.http_server import Access, TextEndpoint
from lightning_swarm.serving.texts import ServedText
from tests.p2p.processes import free_port
from tests.parity.test_served import letters
from tests.served import make_model

CONTEXT = 64
TEMPLATE = """{% for message in messages %}{{ message.content }}{% if message.role == 'system' %}
{{ raise_exception('no system message') }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ mark or 'z' }}{% endif %}"""
PROMPT = "bigcat"


@pytest.fixture
def served() -> ServedText:
    tokenizer = letters()
    tokenizer.chat_template = TEMPLATE.replace("\n", "")
    return ServedText("tiny", make_model("llama", max_position_embeddings=CONTEXT), tokenizer)


@asynccontextmanager
async def http(served: ServedText, access: Access) -> AsyncIterator[httpx.AsyncClient]:
    app = TextEndpoint([served]).app(access)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://swarm") as client:
        yield client


def ask(served: ServedText, act: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]], **access: Any) -> Any:
    """Run a client's calls against the endpoint, and return their result."""

    async def run() -> Any:
        async with http(served, Access(**access)) as own:
            client = openai.AsyncOpenAI(api_key="k" * 16, base_url="http://swarm/v1", http_client=own, max_retries=0)
            return await act(client)

    return asyncio.run(run())


def complete(served: ServedText, prompt: Any = PROMPT, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in [*fields] if name in EXTRA}
    create: Any = lambda client: client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)  # noqa: E731
    return ask(served, create)


EXTRA = {"top_k", "min_p", "repetition_penalty", "stop_token_ids", "min_tokens", "allowed_token_ids"}
EXTRA |= {"include_stop_str_in_output", "skip_special_tokens", "add_special_tokens", "exact"}


def text_of(served: ServedText, prompt: str = PROMPT, num_tokens: int = 12, **options: Any) -> str:
    """Return the text that the model in this process generates."""
    ids = served.tokenizer(prompt, return_tensors="pt").input_ids
    options = {"do_sample": False, "max_new_tokens": num_tokens, **options}
    found = served.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return str(served.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def logprobs_of(served: ServedText, text: str) -> Tensor:
    """Return each token's log probabilities over the vocabulary, from the second token on."""
    ids = served.tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        return served.model(ids).logits[0, :-1].log_softmax(dim=-1)


def test_text_is_the_models(served: ServedText) -> None:
    found = complete(served, max_tokens=12, temperature=0)
    assert found.choices[0].text == text_of(served)
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (6, 12)
    assert complete(served, max_tokens=12, temperature=0, exact=True).choices[0].text == text_of(served)


def test_without_a_limit_a_text_has_the_rest_of_the_context(served: ServedText) -> None:
    found = complete(served, temperature=0)
    assert found.usage.total_tokens == CONTEXT
    assert found.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="at most 64 tokens, got 6 of the prompt and `max_tokens` 59"):
        complete(served, max_tokens=59)


SAME_AS_GREEDY: list[dict[str, Any]] = [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-6}]


@pytest.mark.parametrize("fields", SAME_AS_GREEDY)
def test_what_cuts_all_but_the_best_token(served: ServedText, fields: dict[str, Any]) -> None:
    assert complete(served, max_tokens=12, seed=1, **fields).choices[0].text == text_of(served)
    assert complete(served, max_tokens=12, seed=1, temperature=5.0).choices[0].text != text_of(served)


def test_draws_are_of_the_seed(served: ServedText) -> None:
    first, again, other = (complete(served, max_tokens=12, seed=seed).choices[0].text for seed in (1, 1, 2))
    assert first == again != other


def test_the_models_own_defaults_hold(served: ServedText) -> None:
    served.model.generation_config.top_k = 1
    assert complete(served, max_tokens=12).choices[0].text == text_of(served)
    assert complete(served, max_tokens=12, top_k=0, temperature=5.0, seed=1).choices[0].text != text_of(served)
    served.model.generation_config.repetition_penalty = 1.8
    wanted = text_of(served, repetition_penalty=1.8)
    assert complete(served, max_tokens=12).choices[0].text == wanted != text_of(served, repetition_penalty=1.0)


def test_repetition_penalty(served: ServedText) -> None:
    found = complete(served, max_tokens=12, temperature=0, repetition_penalty=1.8).choices[0].text
    assert found == text_of(served, repetition_penalty=1.8)


def test_presence_and_frequency_penalties(served: ServedText) -> None:
    """Computed by hand: the presence penalty counts a token of the text once, the frequency penalty each time."""
    for presence, frequency in [(2.0, 0.0), (0.0, 1.5), (-2.0, 1.0)]:
        ids = served.tokenizer(PROMPT, return_tensors="pt").input_ids
        for _ in range(12):
            with torch.no_grad():
                logits = served.model(ids).logits[0, -1]
            counts = torch.bincount(ids[0, 6:], minlength=len(logits))
            token = (logits - presence * (counts > 0) - frequency * counts).argmax()
            ids = torch.cat([ids, token.view(1, 1)], dim=1)
        wanted = served.tokenizer.decode(ids[0, 6:], skip_special_tokens=True)
        fields = {"presence_penalty": presence, "frequency_penalty": frequency}
        assert complete(served, max_tokens=12, temperature=0, **fields).choices[0].text == wanted


def test_biases_and_allowed_tokens(served: ServedText) -> None:
    a, b = served.tokenizer.convert_tokens_to_ids(["q", "x"])
    assert complete(served, max_tokens=5, logit_bias={str(a): 100}).choices[0].text == "qqqqq"
    assert {*complete(served, max_tokens=30, allowed_token_ids=[a, b]).choices[0].text} == {"q", "x"}
    with pytest.raises(openai.BadRequestError, match="the model has 29 tokens, got number 29"):
        complete(served, logit_bias={"29": 1})


def test_stops(served: ServedText) -> None:
    text = text_of(served)
    stop = text[4:6]
    before = text[: text.index(stop)]
    assert complete(served, max_tokens=12, temperature=0, stop=[stop, "none"]).choices[0].text == before
    found = complete(served, max_tokens=12, temperature=0, stop=stop, include_stop_str_in_output=True).choices[0]
    assert (found.text, found.finish_reason) == (before + stop, "stop")
    token = served.tokenizer.convert_tokens_to_ids(text[4])
    found = complete(served, max_tokens=12, temperature=0, stop_token_ids=[token]).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.index(text[4]) + 1], "stop")
    later = complete(served, max_tokens=12, temperature=0, stop_token_ids=[token], min_tokens=8)
    assert later.usage.completion_tokens >= 8


def test_several_texts(served: ServedText) -> None:
    found = complete(served, ["bigcat", "dog"], max_tokens=8, n=2, seed=5)
    assert [one.index for one in found.choices] == [0, 1, 2, 3]
    alone = [
        complete(served, prompt, max_tokens=8, seed=seed).choices[0].text
        for prompt in ("bigcat", "dog")
        for seed in (5, 6)
    ]
    assert [one.text for one in found.choices] == alone
    assert len({*alone}) == 4
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (9, 32)


def test_prompts_of_tokens(served: ServedText) -> None:
    ids = served.tokenizer(PROMPT).input_ids
    found = complete(served, [ids, served.tokenizer("dog").input_ids], max_tokens=8, temperature=0)
    assert [one.text for one in found.choices] == [text_of(served, num_tokens=8), text_of(served, "dog", 8)]
    assert complete(served, ids, max_tokens=8, temperature=0).choices[0].text == text_of(served, num_tokens=8)
    with pytest.raises(openai.BadRequestError, match=r"tokens must be 0\.\.28"):
        complete(served, [29])


def test_logprobs_are_the_models(served: ServedText) -> None:
    found = complete(served, max_tokens=6, temperature=0, logprobs=3).choices[0]
    text = PROMPT + found.text
    assert "".join(found.logprobs.tokens) == found.text
    for place, (token, value, top) in enumerate(
        zip(found.logprobs.tokens, found.logprobs.token_logprobs, found.logprobs.top_logprobs, strict=True)
    ):
        wanted = logprobs_of(served, text)[5 + place]
        assert value == pytest.approx(
            float(wanted[served.tokenizer.convert_tokens_to_ids(token)]), abs=1e-6
        )  # the library scores in float32
        best = [served.tokenizer.decode([int(one)]) for one in wanted.topk(3).indices]
        assert sorted(top, key=top.get, reverse=True) == best


def test_a_prompt_with_its_logprobs(served: ServedText) -> None:
    """Evaluation harnesses score texts with zero new tokens."""
    found = complete(served, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert found.text == PROMPT
    ids = served.tokenizer(PROMPT).input_ids
    wanted = logprobs_of(served, PROMPT)
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1:] == pytest.approx(
        [float(wanted[at, one]) for at, one in enumerate(ids[1:])]
    )
    assert found.logprobs.text_offset == list(range(6))
    assert complete(served, max_tokens=4, echo=True, temperature=0).choices[0].text == PROMPT + text_of(
        served, num_tokens=4
    )


def test_a_prompt_is_scored_once_for_all_its_choices(served: ServedText) -> None:
    scored: list[tuple[int, ...]] = []
    served.model.register_forward_pre_hook(
        lambda _, args, given: scored.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    found = complete(served, max_tokens=0, echo=True, logprobs=1, n=3).choices
    assert scored == [(1, len(PROMPT))]
    assert [one.logprobs.token_logprobs for one in found] == 3 * [found[0].logprobs.token_logprobs]


def test_a_connection_that_sends_no_request_is_closed(served: ServedText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "_REQUEST_S", 0.3)
    address = ("127.0.0.1", free_port())
    server = threading.Thread(
        target=http_server.run, args=([served],), kwargs={"host": "127.0.0.1", "port": address[1]}
    )
    server.daemon = True  # uvicorn ends by signals, which only the main thread receives
    server.start()
    while True:
        assert server.is_alive()
        with socket.socket() as trying:
            if not trying.connect_ex(address):
                break
    with socket.create_connection(address, 60.0) as silent, socket.create_connection(address, 60.0) as slow:
        slow.sendall(b"GET /v1/models HTT")
        assert (silent.recv(1), slow.recv(1)) == (b"", b"")
    write = served.model.generate

    def write_slowly(*args: Any, **options: Any) -> Any:
        threading.Event().wait(0.9)
        return write(*args, **options)

    monkeypatch.setattr(served.model, "generate", write_slowly)
    # A busy machine may send a request too late, but no retry would help if the answer was too late.
    with openai.OpenAI(api_key="-", base_url=f"http://127.0.0.1:{address[1]}/v1", max_retries=4) as client:
        found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=4, temperature=0)
    assert len(found.choices[0].text) == 4


def chat(client: openai.AsyncOpenAI, **fields: Any) -> Awaitable[Any]:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, **fields}
    create: Any = client.chat.completions.create
    return create(**fields)  # type: ignore[no-any-return]


def test_chats(served: ServedText) -> None:
    found = ask(served, lambda client: chat(client, max_tokens=6, logprobs=True, top_logprobs=2))
    choice = found.choices[0]
    assert choice.message.content == text_of(served, PROMPT + "z", 6)
    assert [len(one.top_logprobs) for one in choice.logprobs.content] == [2] * 6
    assert "".join(bytes(one.bytes).decode() for one in choice.logprobs.content) == choice.message.content
    for template, prompt in [({"chat_template_kwargs": {"mark": "y"}}, "y"), ({"add_generation_prompt": False}, "")]:
        found = ask(served, lambda client, extra=template: chat(client, max_tokens=6, extra_body=extra))
        assert found.choices[0].message.content == text_of(served, PROMPT + prompt, 6)


def test_streams(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        texts, usage, scores = ["", ""], None, 0
        how: dict[str, Any] = {"max_tokens": 8, "n": 2, "seed": 3, "temperature": 1}
        stream = await chat(client, **how, stream=True, logprobs=True, stream_options={"include_usage": True})
        async for piece in stream:
            usage = piece.usage or usage
            for choice in piece.choices:
                texts[choice.index] += choice.delta.content or ""
                scores += len(choice.logprobs.content)
        whole = await chat(client, **how)
        return texts, [one.message.content for one in whole.choices], usage.completion_tokens, scores

    texts, whole, num_tokens, scores = ask(served, act)
    assert texts == whole
    assert (num_tokens, scores) == (16, 16)


def test_a_template_may_refuse(served: ServedText) -> None:
    messages = [{"role": "system", "content": "a"}]

    async def act(client: openai.AsyncOpenAI) -> Any:
        with pytest.raises(openai.BadRequestError, match="refuses this chat: no system message"):
            await chat(client, messages=messages)
        return await chat(client, max_tokens=2)

    assert ask(served, act).choices[0].message.content == text_of(served, PROMPT + "z", 2)


def test_errors_have_openais_form(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="there is no model 'other'") as found:
            await client.models.retrieve("other")
        assert (found.value.code, found.value.type) == ("model_not_found", "invalid_request_error")
        assert found.value.request_id is not None
        assert (await client.models.retrieve("tiny")).id == "tiny"
        assert [one.id for one in (await client.models.list()).data] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="Not Found: POST /v1/embeddings"):
            await client.embeddings.create(model="tiny", input="a")
        with pytest.raises(openai.NotFoundError) as huge:
            await chat(client, model="<script>" * 100_000)
        assert len(huge.value.message) < 1000
        with pytest.raises(openai.BadRequestError, match="`functions` is not supported here") as refused:
            await chat(client, functions=[{"name": "f"}])
        assert refused.value.param == "functions"

    ask(served, act)


def test_metrics_count_exactly(served: ServedText) -> None:
    async def act() -> Any:
        async with http(served, Access()) as own:
            client = openai.AsyncOpenAI(api_key="-", base_url="http://swarm/v1", http_client=own, max_retries=0)
            create: Any = client.completions.create
            await create(model="tiny", prompt=PROMPT, max_tokens=8, n=2)
            end = {"stop_token_ids": [served.tokenizer.convert_tokens_to_ids(text_of(served)[4])]}
            ended = await create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, extra_body=end)
            async for _ in await chat(client, max_tokens=5, stream=True):
                pass
            for wrong in ({"model": "other"}, {"max_tokens": 59}):
                with pytest.raises(openai.APIStatusError):
                    await chat(client, **wrong)
            assert (await own.get("/nothing")).status_code == 404
            while True:
                values = metrics((await own.get("/metrics")).text)
                if not values["num_requests_running", "tiny"]:  # all threads have ended
                    return values, 2 * 8 + ended.usage.completion_tokens + 5

    values, num_tokens = asyncio.run(act())
    assert values["generation_tokens_total", "tiny"] == num_tokens
    assert values["inter_token_latency_seconds_count", "tiny"] == num_tokens - 4
    assert values["prompt_tokens_total", "tiny"] == 3 * 6 + 7  # a chat's template adds a letter
    assert values["num_requests_waiting", "tiny"] == 0
    histograms = ["time_to_first_token", "e2e_request_latency", "request_queue_time"]
    assert [values[f"{name}_seconds_count", "tiny"] for name in histograms] == [4, 4, 3]
    assert (values["request_success_total", "length tiny"], values["request_success_total", "stop tiny"]) == (3, 1)
    answered = {key: value for (name, key), value in values.items() if name == "http_requests_total"}
    answered.pop("/metrics 200", None)
    assert answered == {
        "/v1/completions 200": 2,
        "/v1/chat/completions 200": 1,
        "/v1/chat/completions 404": 1,
        "/v1/chat/completions 400": 1,
        "other 404": 1,
    }


def metrics(text: str) -> dict[tuple[str, str], float]:
    """Return values by their names and their labels."""
    return {
        (sample.name.partition(":")[2], " ".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_key(served: ServedText) -> None:
    list_models: Any = lambda client: client.models.list()  # noqa: E731 - for both
    assert ask(served, list_models, keys=["k" * 16]).data[0].id == "tiny"
    assert ask(served, list_models, keys=["K" * 16, "k" * 16]).data[0].id == "tiny"
    with pytest.raises(openai.AuthenticationError, match="requires its API key"):
        ask(served, list_models, keys=["K" * 16])


@pytest.mark.parametrize(
    ("path", "headers", "access", "status"),
    [
        ("/v1/models", {}, {}, 200),
        ("/v1/models", {"origin": "http://swarm"}, {}, 200),
        ("/v1/models", {"origin": "https://evil.example"}, {}, 403),
        ("/v1/models", {"origin": "https://chat.example"}, {"origins": ["https://chat.example"]}, 200),
        ("/", {"host": "evil.example"}, {"hosts": ["swarm"]}, 400),
        ("/v1/models", {"authorization": "Basic aaaa"}, {"keys": ["k" * 16]}, 401),
        ("/metrics", {}, {"keys": ["k" * 16]}, 401),
        ("/", {}, {"keys": ["k" * 16]}, 200),
    ],
)
def test_who_may_ask(
    served: ServedText, path: str, headers: dict[str, str], access: dict[str, Any], status: int
) -> None:
    async def run() -> httpx.Response:
        async with http(served, Access(**access)) as client:
            return await client.get(path, headers=headers)

    found = asyncio.run(run())
    assert found.status_code == status
    assert found.headers["x-request-id"]
    allowed = headers.get("origin") if access.get("origins") else None
    assert found.headers.get("access-control-allow-origin") == allowed
