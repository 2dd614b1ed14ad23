"""Let a served model call a function, and answer in JSON: python tools.py http://127.0.0.1:8000/v1."""

import json
import sys
from functools import partial
from typing import Any

from openai import OpenAI

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "weather", "description": "The weather of a city.", "parameters": CITY, "strict": True}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"is_warm": {"type": "boolean"}, "celsius": {"type": "integer", "minimum": -60, "maximum": 60}},
    "required": ["is_warm", "celsius"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask, compute the calls, and print the answer."""
    url = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=url, api_key="-")
    ask: Any = partial(client.chat.completions.create, model=client.models.list().data[0].id, max_tokens=300)
    said: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
    tools = [{"type": "function", "function": WEATHER}]
    asked = ask(messages=said, tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0].message
    said.append(asked)
    for call in asked.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        said.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: 21 degrees"})
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER, "strict": True}}
    print(json.loads(ask(messages=said, response_format=form).choices[0].message.content))


if __name__ == "__main__":
    main()
