"""OpenAI's Responses API under its own client: texts, tools and JSON are those of chats; other fields are refused."""

from __future__ import annotations

import json
from typing import Annotated, Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import Field, TypeAdapter

from lightning_swarm.serving.http_fields import Chat, RequestError
from lightning_swarm.serving.http_responses import ResponseForm, read_response
from lightning_swarm.serving.pieces import CallPiece, TextPiece
from lightning_swarm.serving.texts import ServedText
from tests.parity.test_http_endpoint import ask
from tests.parity.test_http_tools import SCHEMA, TEMPLATE, TOOLS, Trip
from tests.served import bytes_tokenizer, make_model

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
KINDS: TypeAdapter[Any] = TypeAdapter(Annotated[ResponseStreamEvent, Field(discriminator="type")])
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}


@pytest.fixture(scope="module")
def served() -> ServedText:
    model = make_model("llama", vocab_size=264, eos_token_id=2, max_position_embeddings=4096, num_hidden_layers=2)
    return ServedText("tiny", model, bytes_tokenizer(template=TEMPLATE))


def create(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    make: Any = client.responses.create
    fields = {"model": "tiny", "input": "Go", "max_output_tokens": 400, "extra_body": {"seed": 3}, **fields}
    return make(**fields)


async def streamed(events: Any) -> tuple[list[Any], Any]:
    """Return a stream's events, whose fields and numbers are as they must be, and the last one's response."""
    found = [event async for event in events]
    for number, event in enumerate(found):
        KINDS.validate_python(event.model_dump(exclude_unset=True), strict=True)
        assert event.sequence_number == number
    return found, found[-1].response


def content(response: Any) -> Any:
    """Return a response's items without their ids."""
    Response.model_validate(response.model_dump(exclude_unset=True))
    return [{**item.model_dump(exclude_unset=True), "id": "", "call_id": ""} for item in response.output]


def test_a_text_is_that_of_a_chat(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        fields: dict[str, Any] = {"max_output_tokens": 20, "instructions": "Be brief"}
        whole = await create(client, **fields)
        events, last = await streamed(await create(client, **fields, stream=True))
        messages: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Go"}]
        chat = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=20, seed=3)
        assert whole.output_text == last.output_text == chat.choices[0].message.content
        assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == whole.output_text
        assert content(whole) == content(last)
        assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert whole.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
        assert (whole.usage.output_tokens, last.usage.output_tokens, whole.instructions) == (20, 20, "Be brief")

    ask(served, act)


def test_tools_and_their_outputs(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        fields: dict[str, Any] = {"tools": FLAT, "tool_choice": "required"}
        whole = await create(client, **fields)
        events, last = await streamed(await create(client, **fields, stream=True))
        assert whole.status == "completed"
        assert content(whole) == content(last)
        calls = [item for item in whole.output if item.type == "function_call"]
        assert calls
        for call in calls:
            Trip.model_validate_json(call.arguments)
        deltas = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == "".join(call.arguments for call in calls)
        named = await create(client, tools=FLAT, tool_choice={"type": "function", "name": "plane"})
        assert {item.name for item in named.output} == {"plane"}
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "Done"} for call in calls]
        sent = [{"role": "user", "content": "Go"}, *whole.output, *outputs]
        assert (await create(client, input=sent, tools=FLAT, max_output_tokens=5)).usage.output_tokens == 5

    ask(served, act)


def test_json_of_a_schema(served: ServedText) -> None:
    async def act(client: openai.AsyncOpenAI) -> None:
        parse: Any = client.responses.parse
        found = await parse(model="tiny", input="Go", text_format=Trip, max_output_tokens=400)
        assert isinstance(found.output_parsed, Trip)
        form = {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}
        Trip.model_validate_json((await create(client, text={"format": form})).output_text)
        stream: Any = client.responses.stream
        async with stream(model="tiny", input="Go", text_format=Trip, max_output_tokens=400) as events:
            async for _ in events:
                pass
            assert isinstance((await events.get_final_response()).output_parsed, Trip)

    ask(served, act)


def test_text_reasoning_and_calls_are_items_of_their_own() -> None:
    form = ResponseForm("tiny", read(input="a")[1])
    pieces = [
        TextPiece("a", reasoning="Hm"),
        TextPiece("b"),
        TextPiece(calls=[CallPiece(0, "", "f", "1"), CallPiece(0, "{}"), CallPiece(1, "", "g", "2")]),
        TextPiece(calls=[CallPiece(1, "{}")]),
        TextPiece("c", "tool_calls"),
    ]
    events = [*form.begin(), *(event for piece in pieces for event in form.take(0, piece)), *form.end(USAGE)]
    for event in events:
        KINDS.validate_python(event)
    assert events[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"] == 1
    found = events[-1]["response"]["output"]
    assert [item["type"] for item in found] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item["content"][0]["text"] for item in found if "content" in item] == ["Hm", "ab", "c"]
    assert {item["status"] for item in found} == {"completed"}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == found
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3, 4]


def read(**fields: Any) -> tuple[Chat, dict[str, Any]]:
    return read_response(json.dumps({"model": "tiny", **fields}).encode())


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "x", "status": "completed"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}], "id": "y"}
    output = {"type": "function_call_output", "call_id": "1", "output": "3"}
    thought = {"type": "reasoning", "id": "z", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
    asked = [{"role": "developer", "content": "d"}, thought, {"type": "message", **said}, call, call, output, call]
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert read(input=asked)[0].messages == [
        {"role": "system", "content": "d"},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "b"}],
            "reasoning_content": "Hm",
            "tool_calls": [called, called],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
    ]


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"input": "a", "previous_response_id": "resp_1"}, "not supported here", "previous_response_id"),
        ({"input": "a", "store": True}, "not supported here", "store"),
        ({"input": "a", "background": True}, "not supported here", "background"),
        ({"input": "a", "messages": []}, "no field `messages`", "messages"),
        ({"input": "a", "x" * 5000: 1}, "no field `x", "x" * 100),
        ({}, "`input` must be a text or a list", "input"),
        ({"input": []}, "`input` must be a text or a list", "input"),
        ({"input": "a", "instructions": 3}, "`instructions` a text", "input"),
        ({"input": [3]}, "items of `input` must be messages", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of `input` must be messages", "input"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "items of `input` must be messages", "input"),
        ({"input": [{"role": "root", "content": "a"}]}, "items of `input` must be messages", "input"),
        ({"input": [{"role": "user", "content": "a", "tool_calls": []}]}, "items of `input` must be messages", "input"),
        ({"input": "a", "max_output_tokens": -1}, "Expected `int` >= 0", "max_output_tokens"),
        ({"input": "a", "tools": 3}, "`tools` must be a list", "tools"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools must have the type 'function'", "tools"),
        ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "matching regex", "tools"),
        ({"input": "a", "tool_choice": {"type": "file_search"}}, "tools must have the type 'function'", "tool_choice"),
        ({"input": "a", "text": {"verbosity": "low"}}, "`text` must have only a `format`", "text"),
        ({"input": "a", "text": "json"}, "`text` must have only a `format`", "text"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "`json_schema` must be set", "text"),
    ],
)
def test_other_fields_are_refused_by_name(fields: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(RequestError, match=words) as found:
        read(**fields)
    assert (found.value.status, found.value.param) == (400, param)
    assert len(str(found.value)) < 1000
