"""Messages of a chat, in the form that chat templates of Hugging Face take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from lightning_swarm.serving.http_fields import RequestError, short

_OF_ASSISTANTS: Final = frozenset({"tool_calls", "reasoning_content"})
_IGNORED: Final = "provider_specific_fields"  # in which LiteLLM sends back an answer's `refusal`, for instance


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with their texts and calls. Raises RequestError for a part that is no text.

    A call's result gets the function's name, which some templates require and clients leave out.
    """
    found = [_message(one) for one in messages]
    names = {call["id"]: call["function"]["name"] for one in found for call in one.get("tool_calls", [])}
    for one in found:
        if (name := names.get(one.get("tool_call_id"))) is not None:
            one.setdefault("name", name)
    return found


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value not in (None, [], {})}
    role, content = given.pop("role", None), given.pop("content", "")
    if role == "assistant":
        given.pop(_IGNORED, None)
    own = _OF_ASSISTANTS if role == "assistant" else {"tool_call_id"} if role == "tool" else frozenset()
    texts = {name: given.pop(name) for name in [*given] if name in {"name", *own} - {"tool_calls"}}
    calls = given.pop("tool_calls", []) if "tool_calls" in own else []
    if given:
        _refuse(f"messages have a role, content and a name, got `{short(min(given))}` from {short(role)!r}")
    if not all(isinstance(value, str) for value in (role, *texts.values())):
        _refuse(f"a message's role, name and id are texts, got {short([role, *texts.values()])}")
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", role):  # a template might take it for several messages
        _refuse(f"a message's role has up to 64 letters, digits, - and _, got {short(role)!r}")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(_is_text(part) for part in parts):
        _refuse("a message's content is a text, or a list of parts of the type 'text'")
    found = {"role": role, "content": "".join(part["text"] for part in parts), **texts}
    return {**found, "tool_calls": _calls(calls)} if calls else found


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Return an assistant's calls with their arguments as objects, as templates expect them."""
    try:
        found = msgspec.convert(calls, list[_ToolCall])
    except msgspec.MsgspecError as error:
        raise RequestError(
            400, f"`tool_calls` have ids, names, and arguments in a text: {error}", param="messages"
        ) from error
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in found
    ]


def _arguments(text: str) -> dict[str, Any] | str:
    """Return the object of a call's arguments, or the text itself if it has none.

    Agents send back a call that `max_tokens` has cut, so that the model sees its mistake.
    """
    try:
        found: dict[str, Any] = msgspec.json.decode(text or "{}", type=dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return found


class _Called(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    function: _Called
    type: str = "function"
    index: int | None = None  # clients that collect a stream may send it back


def _refuse(message: str) -> None:
    raise RequestError(400, message, param="messages")


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
