"""Requests and answers of OpenAI's Responses API, converted to and from chats. No response is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_swarm.serving.http_fields import Chat, RequestError, converted, fields_of, short
from lightning_swarm.serving.pieces import TextPiece

_SHARED: Final = frozenset(
    {
        *("model", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "seed", "stop", "parallel_tool_calls", "chat_template_kwargs"),
    }
)
"""Fields that chats have under the same names."""

_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "include": ([],),
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "context_management": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
}
"""Unsupported fields, each with the values that request nothing."""

_ECHO: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("instructions", "temperature", "top_p", "max_output_tokens", "text")),
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
"""Fields of the request that the response repeats, with their defaults."""

# Field of a chat -> field of this API, for errors.
_NAMES: Final = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
_ITEM: Final = frozenset({"id", "status", "type"})  # fields of any item that do not change the text
_REASONED: Final = ("role", "content", "reasoning_content")  # fields of a message made from a reasoning item alone
_ROLES: Final = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def read_response(body: bytes) -> tuple[Chat, dict[str, Any]]:
    """Read a request as a chat; return it with the fields that the response repeats.

    Raises:
        RequestError: A field is wrong, unknown or unsupported.
    """
    rest = fields_of(body, _UNSUPPORTED)
    echo = {name: rest.get(name, value) for name, value in _ECHO.items()}
    chat = {name: rest.pop(name) for name in [*rest] if name in _SHARED}
    instructions, items = rest.pop("instructions", ""), rest.pop("input", None)
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items or not isinstance(instructions, str):
        raise RequestError(400, "`input` must be a text or a list of items, and `instructions` a text", param="input")
    chat["messages"] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        _add(item, chat["messages"])
    if "max_output_tokens" in rest:
        chat["max_completion_tokens"] = rest.pop("max_output_tokens")
    tools = rest.pop("tools", [])
    if not isinstance(tools, list):
        raise RequestError(400, f"`tools` must be a list, got {short(tools)}", param="tools")
    chat["tools"] = [_nested(tool, "tools") for tool in tools]
    choice = rest.pop("tool_choice", "auto")
    chat["tool_choice"] = choice if isinstance(choice, str) else _nested(choice, "tool_choice")
    chat |= _format(rest.pop("text", {}))
    if rest:
        unknown = min(rest)
        raise RequestError(400, f"there is no field `{short(unknown)}` in this request", param=unknown[:100])
    try:
        return converted(chat, Chat), echo
    except RequestError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def _nested(tool: Any, param: str) -> dict[str, Any]:
    """Return a function, or the choice of a function, in the form of chats."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise RequestError(400, f"tools must have the type 'function', got {short(tool)}", param=param)
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _format(text: Any) -> dict[str, Any]:
    """Return the format of the answer in the form of chats."""
    rest = dict(text) if isinstance(text, dict) else {"": text}  # refused below
    form = rest.pop("format", None) or {"type": "text"}
    if rest or not isinstance(form, dict):
        raise RequestError(400, f"`text` must have only a `format`, got {short(text)}", param="text")
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"response_format": {"type": form.get("type"), **({"json_schema": schema} if schema else {})}}


def _add(item: Any, messages: list[dict[str, Any]]) -> None:
    """Append an item of the input to a chat's messages.

    An assistant's reasoning, text and calls are separate items, and become one message.
    """
    given = {name: value for name, value in item.items() if value is not None} if isinstance(item, dict) else {}
    fields = {name: value for name, value in given.items() if name not in _ITEM}
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else {}
    match given.get("type", "message"), fields:
        case "reasoning", {"content": [{"type": "reasoning_text", "text": text}], **rest} if not any(rest.values()):
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        case "message", {"role": str(role), "content": content, **rest} if role in _ROLES and not rest:
            if role == "assistant" and last.keys() == {*_REASONED} and not last["content"]:
                last["content"] = _plain(content)
            else:
                messages.append({"role": _ROLES[role], "content": _plain(content)})
        case "function_call", {"call_id": call_id, "name": name, "arguments": arguments, **rest} if not rest:
            if not last:
                messages.append({"role": "assistant", "content": ""})
            function = {"name": name, "arguments": arguments}
            messages[-1].setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        case "function_call_output", {"call_id": call_id, "output": output, **rest} if not rest:
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _plain(output)})
        case _:
            raise RequestError(
                400,
                "items of `input` must be messages with a role and a content, reasoning in plain text, function calls "
                f"with a call_id, name and arguments, or outputs of calls, got {short(item)}",
                param="input",
            )


def _plain(content: Any) -> Any:
    """Return a message's content in the form of chats; `conversation` refuses parts that are not text."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    are_texts = all(kind in ("input_text", "output_text", "text") for kind in kinds)
    return [{"type": "text", "text": text} for text in texts] if are_texts else content


class ResponseForm:
    """The form of a response; implements `Form`. Its events also build the whole response."""

    end_mark = ""  # such streams have no end mark

    def __init__(self, model: str, echo: Mapping[str, Any]) -> None:
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._fixed = {**echo, "object": "response", "model": model, "error": None, "metadata": {}}
        self._items = list[dict[str, Any]]()  # only the last item can be incomplete
        self._num_events = 0
        self._call = -1  # index of the newest call
        self._reason = "stop"

    def begin(self) -> list[dict[str, Any]]:
        """Return the events before the text."""
        return [self._whole_event(f"response.{kind}", "in_progress") for kind in ("created", "in_progress")]

    def take(self, _: int, piece: TextPiece) -> list[dict[str, Any]]:
        """Add a piece to the response, and return the piece's events."""
        events = list[dict[str, Any]]()
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            if text:
                events += self._open(kind)
                (part,) = self._items[-1]["content"]
                part["text"] += text
                events.append(self._event(f"response.{part['type']}.delta", content_index=0, delta=text, logprobs=[]))
        for call in piece.calls:
            if call.index != self._call:
                self._call = call.index
                events += self._open("function_call", call_id=call.id, name=call.name, arguments="")
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                events.append(self._event("response.function_call_arguments.delta", delta=call.arguments))
        self._reason = piece.finish_reason or self._reason
        return events

    def end(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events after the text; the last one has the whole response."""
        status = "incomplete" if self._reason == "length" else "completed"
        events = self._close(status)
        return [*events, self._whole_event(f"response.{status}", status, usage)]

    def whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole response."""
        response: dict[str, Any] = self.end(usage)[-1]["response"]
        return response

    def _open(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Begin an item, unless the last item has the same kind; each call has an item of its own."""
        if self._items and self._items[-1]["type"] == kind != "function_call":
            return []
        events = self._close("completed")
        item: dict[str, Any] = {"type": kind, "id": f"{kind}_{uuid.uuid4().hex}", "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        events.append(self._event("response.output_item.added", item=_copy(item)))
        if kind != "function_call":
            part = {"type": "output_text" if kind == "message" else "reasoning_text", "text": ""}
            item["content"] = [part | ({"annotations": []} if kind == "message" else {})]
            events.append(self._event("response.content_part.added", content_index=0, part=dict(item["content"][0])))
        return events

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the last item."""
        if not self._items:
            return []
        item, events = self._items[-1], list[dict[str, Any]]()
        item["status"] = status
        if item["type"] == "function_call":
            call = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event("response.function_call_arguments.done", **call))
        else:
            (part,) = item["content"]
            name = f"response.{part['type']}.done"
            events.append(self._event(name, content_index=0, text=part["text"], logprobs=[]))
            events.append(self._event("response.content_part.done", content_index=0, part=dict(part)))
        return [*events, self._event("response.output_item.done", item=_copy(item))]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return an event of the last item."""
        position = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if "item" in fields:
            del position["item_id"]
        return self._numbered({"type": kind, **position, **fields})

    def _whole_event(self, kind: str, status: str, usage: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return an event with the whole response so far."""
        response = {
            **self._fixed,
            "id": self._id,
            "created_at": self._created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [_copy(item) for item in self._items],
            "usage": None if usage is None else _usage(usage),
        }
        return self._numbered({"type": kind, "response": response})

    def _numbered(self, content: dict[str, Any]) -> dict[str, Any]:
        self._num_events += 1
        return {**content, "sequence_number": self._num_events - 1}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    content: Sequence[dict[str, Any]] | None = item.get("content")
    return {**item, **({} if content is None else {"content": [dict(part) for part in content]})}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
