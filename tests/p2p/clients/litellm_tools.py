"""Let a model call tools by LiteLLM in two turns, then write JSON, whole and streamed; print both as lines of JSON."""

import json
import sys
from typing import Any

import litellm

url, tools, schema = sys.argv[1:]
options = {"model": "openai/tiny", "api_base": url, "api_key": "-", "seed": 3, "max_tokens": 400, "num_retries": 0}


def answer(messages: list[Any], *, stream: bool, **fields: Any) -> Any:
    """Return the model's message."""
    found: Any = litellm.completion(**options, messages=messages, stream=stream, **fields)
    if stream:
        found = litellm.stream_chunk_builder([*found], messages=messages)
    return found.choices[0].message


for stream in (False, True):
    messages: list[Any] = [{"role": "user", "content": "Go"}]
    calls = []
    for choice in ("required", "auto"):
        messages.append(answer(messages, stream=stream, tools=json.loads(tools), tool_choice=choice))
        for call in messages[-1].tool_calls:
            calls.append([call.function.name, call.function.arguments])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "booked"})
    text = answer(messages, stream=stream, response_format=json.loads(schema)).content
    print(json.dumps([calls, text, sum(isinstance(one, dict) and one["role"] == "tool" for one in messages)]))
