"""Messages of a chat, in the form of Hugging Face's chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from lightning_swarm.serving.http_fields import RequestError, short

_ASSISTANT_FIELDS: Final = frozenset({"tool_calls", "reasoning_content"})
_IGNORED: Final = "provider_specific_fields"  # LiteLLM sends back parts of an answer in this field, such as `refusal`


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages as templates expect them. Raises RequestError for a part that is not a text.

    A call's result gets the function's name, which some templates require and clients leave out.
    """
    converted = [_message(message) for message in messages]
    names = {call["id"]: call["function"]["name"] for message in converted for call in message.get("tool_calls", [])}
    for message in converted:
        if (name := names.get(message.get("tool_call_id"))) is not None:
            message.setdefault("name", name)
    return converted


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in message.items() if value not in (None, [], {})}
    role, content = rest.pop("role", None), rest.pop("content", "")
    if role == "assistant":
        rest.pop(_IGNORED, None)
    allowed = _ASSISTANT_FIELDS if role == "assistant" else {"tool_call_id"} if role == "tool" else frozenset()
    calls = rest.pop("tool_calls", []) if "tool_calls" in allowed else []
    texts = {name: rest.pop(name) for name in [*rest] if name in ("name", *allowed)}
    if rest:
        _refuse(f"a message of the role {short(role)!r} must not have the field `{short(min(rest))}`")
    if not all(isinstance(value, str) for value in (role, *texts.values())):
        _refuse(f"a message's role, name and id must be texts, got {short([role, *texts.values()])}")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", role):  # a template might read another role as several messages
        _refuse(f"a message's role must have 1 to 64 letters, digits, - and _, got {short(role)!r}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(_is_text(part) for part in parts):
        _refuse("a message's content must be a text, or a list of parts of the type 'text'")
    converted = {"role": role, "content": "".join(part["text"] for part in parts), **texts}
    return {**converted, "tool_calls": _calls(calls)} if calls else converted


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Return an assistant's calls with their arguments as objects, as templates expect them."""
    try:
        typed_calls = msgspec.convert(calls, list[_ToolCall])
    except msgspec.MsgspecError as error:
        raise RequestError(
            400, f"`tool_calls` must have ids, names, and arguments as a text: {error}", param="messages"
        ) from error
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in typed_calls
    ]


def _arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as the text itself if it is not an object.

    Agents send back calls that `max_tokens` has cut off, so that the model sees its mistake.
    """
    try:
        arguments: dict[str, Any] = msgspec.json.decode(text or "{}", type=dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return arguments


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _Called
    type: str = "function"
    index: int | None = None  # sent back by clients that join the pieces of a stream


def _refuse(message: str) -> None:
    raise RequestError(400, message, param="messages")


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
