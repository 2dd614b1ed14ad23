"""An agent: OpenAI's client, whose model calls tools turn after turn, with the results of the calls before."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx2 as httpx
import openai

from tests.served import bytes_tokenizer, make_model

NUM_TURNS: Final = 20
MARKER: Final = "<tool_call>"
TEMPLATE: Final = """{% for tool in tools or [] %}{{ tool.function.name }}: {{ tool.function.description }}
{% endfor %}{% if tools %}Call by <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}</s>
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "weather": {
        "city": {"enum": ["Oslo", "Rome", "Tromsø"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "why": {"type": "string", "minLength": 12, "maxLength": 16},
    },
    "note": {"lines": {"type": "array", "items": {"enum": ["sun", "rain", "snow"]}, "minItems": 6, "maxItems": 8}},
}
SCHEMAS: Final = {
    name: {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    for name, fields in FIELDS.items()
}
TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Use {name}.", "strict": True, "parameters": schema},
    }
    for name, schema in SCHEMAS.items()
]
GREEDY: Final = {"temperature": 0.0}
SAMPLED: Final = {"temperature": 1.2, "top_p": 0.95, "seed": 14}


def agent_tokenizer() -> Any:
    """Return a tokenizer of bytes, with a token that begins calls."""
    return bytes_tokenizer(MARKER, template=TEMPLATE)


def make_agent_model() -> Any:
    """Make a small model for long chats."""
    return make_model("llama", vocab_size=264, eos_token_id=2, max_position_embeddings=1 << 15)


@dataclass(frozen=True)
class Turn:
    """One answer of the model."""

    content: str | None
    calls: tuple[tuple[str, str], ...]  # names and arguments
    finish_reason: str
    usage: tuple[int, int]  # tokens of the prompt and of the answer


class Agent:
    """A loop of turns: the model calls tools, and the client appends their results.

    Args:
        url: The endpoint.
        sampling: Sampling fields of each request.
        salt: Separates the prefixes of agents.
        on_piece: Gets the number of each turn that is streamed, and of each of its pieces.
        forgets: The agent drops its oldest turns, as agents with a small context do.
        hangs_up: The agent ends a streamed turn as soon as a call is complete, and drops the rest.
        until_up: Waits for an endpoint that ended in a turn, which is then asked again.
    """

    def __init__(
        self,
        url: str,
        sampling: Mapping[str, Any],
        *,
        salt: str = "",
        on_piece: Callable[[int, int], None] = lambda turn, piece: None,
        forgets: bool = False,
        hangs_up: bool = False,
        until_up: Callable[[], None] | None = None,
    ) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=300.0)
        self._sampling, self._salt, self._on_piece = sampling, salt, on_piece
        self._forgets, self._hangs_up, self._until_up = forgets, hangs_up, until_up
        tokenizer = agent_tokenizer()
        self._marker, self._end = map(str, tokenizer.convert_tokens_to_ids([MARKER, tokenizer.eos_token]))
        self.messages: list[Any] = [{"role": "system", "content": "Plan a journey, step by step."}]
        self.requests: list[dict[str, Any]] = []
        self.turns: list[Turn] = []
        self.cached: list[int] = []  # tokens of each prompt that servers had computed before
        self.num_repeated = 0  # turns whose endpoint ended

    def run(self, num_turns: int = NUM_TURNS) -> list[Turn]:
        """Write turns, and return them."""
        for number in range(num_turns):
            if self._forgets and number % 4 == 3:
                self.messages[1:] = []
            self.messages.append({"role": "user", "content": f"Step {number}"})
            request = {"model": "small", "messages": [*self.messages], "tools": TOOLS, "max_tokens": 2000}
            self.requests.append({**request, **self._sampling, **self._choice(number)})
            while True:
                try:
                    self._take(*self._answer(number))
                    break
                except (openai.APIConnectionError, httpx.TransportError):
                    if self._until_up is None:
                        raise
                    self.num_repeated += 1
                    self._until_up()
        return self.turns

    def _choice(self, number: int) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": "note"}}
        choices: list[dict[str, Any]] = [
            {"tool_choice": "required"},
            {"tool_choice": "auto", "logit_bias": {self._marker: 100, self._end: 2}},
            {"tool_choice": named},
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"tool_choice": "auto", "logit_bias": {self._marker: -100}, "max_tokens": 24},
        ]
        return choices[number % 5]

    def _answer(self, number: int) -> tuple[dict[str, Any], str, Any]:
        """Return a turn's message, finish reason and usage."""
        create: Any = self._client.chat.completions.create
        request = {**self.requests[-1], "extra_body": {"cache_salt": self._salt}}
        if number % 2 == 0:
            found = create(**request)
            return found.choices[0].message.to_dict(), found.choices[0].finish_reason, found.usage
        calls: dict[int, Any] = {}
        content, reason, usage = "", "", None
        with create(**request, stream=True, stream_options={"include_usage": True}) as stream:
            for index, chunk in enumerate(stream):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    content += choice.delta.content or ""
                    for piece in choice.delta.tool_calls or []:
                        calls.setdefault(piece.index, piece.to_dict())
                        if piece.id is None:
                            calls[piece.index]["function"]["arguments"] += piece.function.arguments
                if self._hangs_up and calls and _is_json(calls[0]["function"]["arguments"]):
                    calls = {0: calls[0]}
                    break
                self._on_piece(number, index)
        message: dict[str, Any] = {"role": "assistant", "content": content or None, "tool_calls": [*calls.values()]}
        return message if calls else {"role": "assistant", "content": content}, reason, usage

    def _take(self, message: dict[str, Any], reason: str, usage: Any) -> None:
        self.messages.append(message)
        called = list[tuple[str, str]]()
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            called.append((name, arguments))
            result = {"tool": name, "length": len(arguments), "got": sorted(json.loads(arguments))}
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)})
        counted = (0, 0) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        self.turns.append(Turn(message["content"], tuple(called), reason, counted))
        self.cached.append(0 if usage is None else usage.prompt_tokens_details.cached_tokens)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
