"""Tools and JSON under OpenAI's own client and LangChain: a model of random weights writes valid JSON and calls."""

from __future__ import annotations

import ast
import asyncio
import copy
import importlib.util
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field, SecretStr

from lightning_swarm.serving import http_server
from lightning_swarm.serving.http_server import Access
from lightning_swarm.serving.texts import ServedText
from tests.p2p.processes import free_port
from tests.p2p.test_stock_clients import CLIENTS, node
from tests.parity.test_http_endpoint import ask, http
from tests.served import bytes_tokenizer, make_model

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }}
{% endfor %}{% if tools %}<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}
{% endfor %}"""


class Trip(BaseModel, extra="forbid"):
    """Plan a trip."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=14)


SCHEMA = Trip.model_json_schema()
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "Book.", "parameters": SCHEMA, "strict": True}}
    for name in ("train", "plane")
]
JSON: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
ASKED: list[Any] = [{"role": "user", "content": "Go"}]


@pytest.fixture(scope="module")
def served() -> ServedText:
    model = make_model("llama", vocab_size=264, eos_token_id=2, max_position_embeddings=4096, num_hidden_layers=2)
    return ServedText("tiny", model, bytes_tokenizer(template=TEMPLATE))


def chat(client: openai.AsyncOpenAI, **fields: Any) -> Awaitable[Any]:
    create: Any = client.chat.completions.create
    return create(**{"model": "tiny", "messages": ASKED, "max_tokens": 400, **fields})  # type: ignore[no-any-return]


def test_json_of_a_schema(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        how: dict[str, Any] = {"response_format": JSON, "seed": 1, "n": 3, "logprobs": True, "temperature": 1.5}
        whole = await chat(client, **how)
        texts = ["", "", ""]
        async for piece in await chat(client, **how, stream=True):
            for choice in piece.choices:
                texts[choice.index] += choice.delta.content or ""
        parse: Any = client.chat.completions.parse
        parsed = await parse(model="tiny", messages=ASKED, response_format=Trip, max_tokens=400, seed=4)
        return whole.choices, texts, parsed.choices[0].message.parsed

    choices, texts, parsed = ask(served, act)
    assert [choice.message.content for choice in choices] == texts
    assert len({*texts}) == 3
    assert {choice.finish_reason for choice in choices} == {"stop"}
    for choice in choices:
        Trip.model_validate_json(choice.message.content)
        assert "".join(one.token for one in choice.logprobs.content) == choice.message.content
    assert isinstance(parsed, Trip)


def test_completions_follow_grammars(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        create: Any = client.completions.create
        grammars = [
            {"choice": ["left", "right"]},
            {"regex": "[0-9]{3}"},
            {"json": SCHEMA},
            {"grammar": 'root ::= "a"+ "b"'},
        ]
        found = [
            await create(model="tiny", prompt="Go", max_tokens=200, seed=5, extra_body={"structured_outputs": one})
            for one in grammars
        ]
        cut = await create(
            model="tiny", prompt="Go", max_tokens=2, seed=5, extra_body={"structured_outputs": {"json": SCHEMA}}
        )
        exact = await create(
            model="tiny", prompt="Go", max_tokens=3, seed=5, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}
        )
        return [one.choices[0].text for one in found], cut.choices[0].finish_reason, exact.choices[0].finish_reason

    (choice, digits, trip, letters), cut, exact = ask(served, act)
    assert choice in ("left", "right")
    assert len(digits) == 3
    assert digits.isdecimal()
    Trip.model_validate_json(trip)
    assert letters.strip("a") == "b"
    assert (cut, exact) == ("length", "stop")


def test_calls(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> Any:
        many = await chat(client, tools=TOOLS, tool_choice="required", seed=3, n=3)
        named = {"type": "function", "function": {"name": "plane"}}
        one = await chat(client, tools=TOOLS, tool_choice=named, seed=3)
        text = await chat(client, tools=TOOLS, tool_choice="none", seed=3, max_tokens=8)
        both: dict[str, Any] = {"tools": TOOLS, "response_format": JSON, "parallel_tool_calls": False, "seed": 3}
        brace = str(served.tokenizer.convert_tokens_to_ids("{"))
        answer, call = [await chat(client, **both, logit_bias={brace: bias}) for bias in (100, -100)]
        return many, one, text, answer.choices[0], call.choices[0]

    many, one, text, answer, call = ask(served, act)
    for choice in many.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        for made in choice.message.tool_calls:
            assert made.function.name in ("train", "plane")
            Trip.model_validate_json(made.function.arguments)
    assert max(len(choice.message.tool_calls) for choice in many.choices) > 1, "calls in parallel"
    assert [made.function.name for made in one.choices[0].message.tool_calls] == ["plane"]
    assert text.choices[0].message.tool_calls is None
    Trip.model_validate_json(answer.message.content)
    assert (answer.finish_reason, call.finish_reason) == ("stop", "tool_calls")


def test_a_stream_of_calls_is_the_whole_answer(served: ServedText) -> None:
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "seed": 3, "n": 2, "logprobs": True}

    async def act(client: openai.AsyncOpenAI) -> Any:
        calls, scores, reasons = dict[tuple[int, int], list[str]](), [0] * 2, list[str | None]()
        async for piece in await chat(client, **how, stream=True):
            (choice,) = piece.choices
            scores[choice.index] += len(choice.logprobs.content)
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    calls[choice.index, call.index] = [call.function.name, ""]
                calls[choice.index, call.index][1] += call.function.arguments
        return calls, scores, reasons, await chat(client, **how)

    calls, scores, reasons, whole = ask(served, act)
    assert calls == {
        (choice.index, index): [call.function.name, call.function.arguments]
        for choice in whole.choices
        for index, call in enumerate(choice.message.tool_calls)
    }
    assert reasons == ["tool_calls"] * 2
    assert scores == [len(choice.logprobs.content) for choice in whole.choices]


def test_a_model_that_is_free_to_call(served: ServedText) -> None:
    """After the marker of a call, here a token that a bias makes likely, the call fits its function."""
    template = "{% for tool in tools or [] %}{{ tool.function.name }}[TOOL_CALLS]{% endfor %}{{ messages[0].content }}"
    own = ServedText("tiny", served.model, bytes_tokenizer("[TOOL_CALLS]", template=template))
    marker = str(own.tokenizer.convert_tokens_to_ids("[TOOL_CALLS]"))

    async def act(client: openai.AsyncOpenAI) -> Any:
        calls = await chat(client, tools=TOOLS, parallel_tool_calls=False, logit_bias={marker: 100}, seed=3)
        text = await chat(client, tools=TOOLS, logit_bias={marker: -100}, seed=3, max_tokens=8)
        return calls.choices[0], text.choices[0]

    calls, text = ask(own, act)
    (call,) = calls.message.tool_calls
    Trip.model_validate_json(call.function.arguments)
    assert (calls.finish_reason, calls.message.content) == ("tool_calls", None)
    assert (text.finish_reason, text.message.tool_calls) == ("length", None)


def test_a_conversation_with_results(served: ServedText) -> None:
    """A client sends an answer's calls back, with their results; the template gets the arguments as an object."""

    async def act(client: openai.AsyncOpenAI) -> Any:
        first = (await chat(client, tools=TOOLS, tool_choice="required", seed=3)).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "booked"} for call in first.tool_calls]
        again = await chat(client, tools=TOOLS, messages=[*ASKED, first, *results], max_tokens=4)
        return first, again

    first, again = ask(served, act)
    calls = [
        {**call.to_dict(), "function": {"arguments": json.loads(call.function.arguments)}} for call in first.tool_calls
    ]
    results = [{"role": "tool", "content": "booked"}] * len(calls)
    said = [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    wanted = served.tokenizer.apply_chat_template(said, tools=TOOLS, tokenize=False)
    assert again.usage.prompt_tokens == len(served.tokenizer(wanted).input_ids)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"response_format": {**JSON, "json_schema": {"name": "n", "schema": {"not": {}}}}},
        "Unimplemented keys",
        "response_format",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
        "call_0: .*f",
        "tools",
    ),
    ({"extra_body": {"structured_outputs": {"regex": "["}}}, "unclosed character class", "structured_outputs"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ship"}}},
        "asks for 'ship'",
        "tool_choice",
    ),
]


@pytest.mark.parametrize(("fields", "words", "param"), REFUSED)
def test_errors_come_before_any_token(
    served: ServedText, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], words: str, param: str
) -> None:
    monkeypatch.setattr(served.model, "generate", None)
    with pytest.raises(openai.BadRequestError, match=words) as found:
        ask(served, lambda client: chat(client, **fields))  # type: ignore[arg-type, return-value]
    assert found.value.param == param


def test_a_template_without_tools(served: ServedText) -> None:
    plain = ServedText("tiny", served.model, bytes_tokenizer(template="{{ messages[0].content }}"))
    with pytest.raises(openai.BadRequestError, match="the chat template of model 'tiny' supports no tools"):
        ask(plain, lambda client: chat(client, tools=TOOLS))  # type: ignore[arg-type, return-value]


@pytest.fixture
def address(served: ServedText) -> str:
    return begin_endpoint(served)


def begin_endpoint(served: ServedText) -> str:
    """Start an endpoint, and return its address."""
    port = free_port()
    options = {"host": "127.0.0.1", "port": port}
    server = threading.Thread(target=http_server.run, args=([served],), kwargs=options, daemon=True)
    server.start()
    while server.is_alive():
        with socket.socket() as trying:
            if not trying.connect_ex(("127.0.0.1", port)):
                break
    return f"http://127.0.0.1:{port}/v1"


def test_the_example(address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tools.py", address])
    runpy.run_path(str(EXAMPLES / "serving" / "tools.py"), run_name="__main__")
    found = ast.literal_eval(capsys.readouterr().out)
    assert isinstance(found["is_warm"], bool)
    assert -60 <= found["celsius"] <= 60


def with_langchain(served: ServedText, act: Callable[[ChatOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with http(served, Access()) as own:
            model = ChatOpenAI(model="tiny", base_url="http://swarm/v1", api_key=SecretStr("-"), http_async_client=own,
                               max_retries=0, seed=3, max_completion_tokens=400)  # fmt: skip
            return await act(model)

    return asyncio.run(run())


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchains_structured_output(served: ServedText, method: Any) -> None:
    found = with_langchain(served, lambda model: model.with_structured_output(Trip, method=method).ainvoke("Go"))
    assert isinstance(found, Trip)


def test_langchains_tools(served: ServedText) -> None:
    async def act(model: ChatOpenAI) -> Any:
        bound = model.bind_tools([Trip], tool_choice="any", strict=True)
        whole, streamed = await bound.ainvoke("Go"), None
        async for piece in bound.astream("Go"):
            streamed = piece if streamed is None else streamed + piece
        return whole.tool_calls, streamed.tool_calls  # type: ignore[union-attr]

    whole, streamed = with_langchain(served, act)
    assert [call["args"] for call in whole] == [call["args"] for call in streamed]
    assert {call["name"] for call in whole} == {"Trip"}
    for call in whole:
        Trip.model_validate(call["args"])


def test_langchain_sends_a_call_back_that_was_cut(served: ServedText) -> None:
    async def act(model: ChatOpenAI) -> Any:
        bound = model.bind_tools([Trip], tool_choice="any", strict=True)
        cut = await bound.ainvoke("Go", max_completion_tokens=50)
        said = ["Go", cut, *(ToolMessage("no JSON", tool_call_id=call["id"]) for call in cut.invalid_tool_calls)]
        return cut, await bound.ainvoke(said)

    cut, again = with_langchain(served, act)
    assert (len(cut.tool_calls), len(cut.invalid_tool_calls)) == (0, 1)
    Trip.model_validate(again.tool_calls[0]["args"])


@pytest.fixture
def calling_address(served: ServedText) -> str:
    """Start an endpoint whose model prefers to call a tool, and return its address."""
    tokenizer = bytes_tokenizer("<tool_call>", template=TEMPLATE)
    own = copy.copy(served.model)
    own.generation_config = copy.deepcopy(own.generation_config)
    own.generation_config.sequence_bias = [[[tokenizer.convert_tokens_to_ids("<tool_call>")], 30.0]]
    return begin_endpoint(ServedText("tiny", own, tokenizer))


def assert_trips(trips: list[Any]) -> None:
    assert trips
    for trip in trips:
        Trip.model_validate(trip)


@pytest.mark.thorough
def test_litellm_lets_a_model_call_tools_and_write_json(calling_address: str) -> None:
    if importlib.util.find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # otherwise it would be downloaded
    command = [sys.executable, str(CLIENTS / "litellm_tools.py"), calling_address, json.dumps(TOOLS), json.dumps(JSON)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120.0, env=offline)
    whole, streamed = map(json.loads, shown.stdout.splitlines())
    assert whole == streamed
    calls, text, num_results = whole
    assert {name for name, _ in calls} <= {"train", "plane"}
    assert len(calls) >= num_results >= 2
    assert_trips([json.loads(arguments) for _, arguments in calls])
    Trip.model_validate_json(text)


@pytest.mark.thorough
def test_nodes_clients_let_a_model_call_tools_and_write_json(calling_address: str, tmp_path: Path) -> None:
    """OpenAI's client and Vercel's AI SDK: agents, calls that are streamed, objects."""
    command = node(tmp_path, "tools_node.mjs", "ai@5", "@ai-sdk/openai-compatible@1", "zod@3")
    schema = json.dumps(SCHEMA | {"title": "book"})
    shown = subprocess.run(
        [*command, calling_address, schema], check=True, capture_output=True, text=True, timeout=120.0
    )
    agent, streamed_agent, calls, parsed, vercel, streamed_vercel, made = map(json.loads, shown.stdout.splitlines())
    assert agent == streamed_agent
    assert vercel == streamed_vercel
    for called, num_results in (agent, vercel):
        assert len(called) == num_results >= 2
    assert_trips(agent[0])
    for trip in (*calls, *parsed, *vercel[0], *made):
        assert trip["city"] in ("Oslo", "Rome")
