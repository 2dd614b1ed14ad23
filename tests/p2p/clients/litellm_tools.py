"""Let a model call tools by LiteLLM, whole and streamed; print the names and arguments of both as lines of JSON."""

import json
import sys

import litellm

url, tools = sys.argv[1:]
options = {
    "model": "openai/tiny",
    "api_base": url,
    "api_key": "-",
    "messages": [{"role": "user", "content": "Go"}],
    "tools": json.loads(tools),
    "tool_choice": "required",
    "seed": 3,
    "max_tokens": 400,
    "num_retries": 0,
}
whole = litellm.completion(**options)
streamed = litellm.stream_chunk_builder([*litellm.completion(**options, stream=True)])
for found in (whole, streamed):
    calls = found.choices[0].message.tool_calls
    print(json.dumps([[call.function.name, call.function.arguments] for call in calls]))
