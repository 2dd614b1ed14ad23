"""Calls of tools in a text, which are read while the text is written."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol

from lightning_swarm.serving.grammar import Grammar
from lightning_swarm.serving.http_fields import Chat, RequestError
from lightning_swarm.serving.pieces import CallPiece, TextPiece, TokenScore, overlap
from lightning_swarm.serving.texts import ServedText, end_tokens
from lightning_swarm.serving.tool_formats import FORMATS, CallFormat, format_of, grammar_with_calls

_ID: Final = string.ascii_letters + string.digits
_NAME: Final = r"([A-Za-z0-9_.-]{1,64})"


class CallReader(Protocol):
    """Separates a text's calls from the rest of the text."""

    @property
    def has_calls(self) -> bool:
        """Return whether the text has calls, all of which are complete."""

    def take(self, text: str) -> TextPiece:
        """Read more of the text, and return the parts that are certain."""

    def rest(self) -> TextPiece:
        """Return the remaining parts after the text's end."""


async def with_calls(pieces: AsyncIterator[TextPiece], reader: CallReader) -> AsyncIterator[TextPiece]:
    """Yield a text's pieces with its calls apart. A text that ends after a call has the reason "tool_calls"."""
    scores = list[TokenScore]()  # of text that is held
    async for piece in pieces:
        scores += piece.scores
        found = reader.take(piece.text)
        reason = piece.finish_reason
        if reason is not None:
            found.append(reader.rest())
            reason = "tool_calls" if reason == "stop" and reader.has_calls else reason
        if found.text or found.calls or found.reasoning or reason is not None:
            yield replace(found, finish_reason=reason, scores=scores)
            scores = []


def _begin(index: int, name: str, arguments: str = "") -> CallPiece:
    """Return the beginning of a call, with a new id. Templates of Mistral require ids of nine letters and digits."""
    return CallPiece(index, arguments, name, "".join(secrets.choice(_ID) for _ in range(9)))


class FormatReader:
    """Reads calls of a known format. The text's grammar ensures that each call follows the format to its end.

    Args:
        form: The format.
        names: The functions that the text may call. The name of any other is part of the text.
        only_first: Calls follow no text: they begin the text, or there are none.
    """

    def __init__(self, form: CallFormat, names: Collection[str], *, only_first: bool = False) -> None:
        self._form, self._names, self._only_first = form, names, only_first
        self._first = re.compile(rf"\s*{re.escape(form.opening + form.head)}{_NAME}{re.escape(form.middle)}")
        self._next = re.compile(re.escape(form.tail + form.separator + form.head) + _NAME + re.escape(form.middle))
        self._held = ""  # text whose part is not certain yet
        self._seen = ""  # text since the last certain part, with the marker
        self._index = -1
        self._read: Callable[[], str | CallPiece | None] = self._read_text
        self._json = _JsonEnd()

    @property
    def has_calls(self) -> bool:
        """Return whether the text has calls, all of which are complete."""
        return self._index >= 0 and self._json.is_complete

    def take(self, text: str) -> TextPiece:
        """Read more of the text, and return the parts that are certain."""
        self._held += text
        found, calls = "", list[CallPiece]()
        while (part := self._read()) is not None:
            if isinstance(part, str):
                found += part
            else:
                calls.append(part)
        return TextPiece(found, calls=calls)

    def rest(self) -> TextPiece:
        """Return the remaining text, unless it belongs to a call."""
        held, self._held = self._held, ""
        if self._index < 0:
            return TextPiece(self._seen + held)
        if self._read != self._read_begin or _agree(held, self._form.tail + self._form.separator + self._form.head):
            return TextPiece()
        after = held.removeprefix(self._form.tail + self._form.closing)
        return TextPiece(after if after.strip() else "")

    def _read_text(self) -> str | None:
        """Pass text on up to the first call. None: more text is needed."""
        marker = self._form.marker
        if not marker:
            if not (begin := self._held.lstrip(" \n")):  # the blanks that the grammar admits before text
                return None
            self._read = self._read_begin if begin[0] == "{" else self._read_rest
            return ""
        if self._only_first and not _agree(self._held.lstrip(), marker):
            self._read = self._read_rest
            return ""
        place = self._held.find(marker)
        if place >= 0:
            passed, self._held = self._held[:place], self._held[place + len(marker) :]
            self._seen, self._read = marker, self._read_begin
            return passed
        keep = overlap(self._held, marker)
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed or None

    def _read_rest(self) -> str | None:
        passed, self._held = self._held, ""
        return passed or None

    def _read_begin(self) -> str | CallPiece | None:
        """Read a call up to its arguments."""
        begin = (self._next if self._index >= 0 else self._first).match(self._held)
        if begin is None:
            return None
        if begin[1] not in self._names:
            self._held, self._seen, self._read = self._seen + self._held, "", self._read_rest
            return ""
        self._held, self._seen = self._held[begin.end() :], ""
        self._index, self._read, self._json = self._index + 1, self._read_arguments, _JsonEnd()
        return _begin(self._index, begin[1])

    def _read_arguments(self) -> CallPiece | None:
        """Pass arguments on as they come."""
        end = self._json.find(self._held)
        passed, self._held = self._held[:end], self._held[end:]
        if self._json.is_complete:
            self._read = self._read_begin
        return CallPiece(self._index, passed) if passed else None


def _agree(one: str, other: str) -> bool:
    """Return whether one of two texts begins with the other."""
    return one.startswith(other) or other.startswith(one)


class _JsonEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_complete = False

    def find(self, text: str) -> int:
        """Return the number of the text's characters that belong to the object."""
        for place, sign in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = sign == "\\", sign != '"'
            elif sign == '"':
                self._in_string = True
            elif sign in "{}":
                self._depth += 1 if sign == "{" else -1
                if not self._depth:
                    self.is_complete = True
                    return place + 1
        return len(text)


class TemplateReader:
    """Reads calls by the response template of a tokenizer. Each call comes whole, after its end."""

    def __init__(self, tokenizer: Any, prompt: str, tools: Any) -> None:
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=tools)
        self._num_calls = 0
        self._is_open = False  # a call has begun
        self._raw = ""  # text since the last certain part, with the call's delimiters
        self._is_broken = False  # a call does not follow the template: the text goes on unread

    @property
    def has_calls(self) -> bool:
        """Return whether the text has calls, all of which are complete."""
        return self._num_calls > 0 and not self._is_open and not self._is_broken

    def take(self, text: str) -> TextPiece:
        """Read more of the text, and return the parts that are certain."""
        found = TextPiece()
        # Each sign alone, because a failure loses the events of all that is read at once.
        for place, sign in enumerate(text):
            if self._is_broken:
                found.text += text[place:]
                break
            self._raw += sign
            self._read(partial(self._parser.feed, sign), found)
        return found

    def rest(self) -> TextPiece:
        """Return the remaining parts after the text's end."""
        found = TextPiece()
        if not self._is_broken:
            self._read(lambda: self._parser.finalize()[1], found)
        return found

    def _read(self, parse: Callable[[], Any], found: TextPiece) -> None:
        """Append the parts that a step of the parser makes certain. If a call is wrong, its text is one of them."""
        try:
            new = self._piece(parse())
        except (KeyError, TypeError, ValueError):  # a call that ended early, or that is no JSON
            self._is_broken = True
            new = TextPiece(self._raw)
        found.append(new)
        if not self._is_open:
            num_held = len(self._parser._buffer) - self._parser._pos  # it may begin a delimiter
            self._raw = self._raw[max(0, len(self._raw) - num_held) :]

    def _piece(self, events: Any) -> TextPiece:
        found, calls = TextPiece(), list[CallPiece]()
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "tool_calls":
                self._is_open = kind != "region_close"
                calls += [] if self._is_open else self._calls(event["value"])
            elif kind == "region_chunk" and field == "content":
                found.text += event["text"]
            elif kind == "region_chunk":
                found.reasoning += event["text"]
        found.calls = calls
        return found

    def _calls(self, value: Any) -> list[CallPiece]:
        calls = []
        for call in value if isinstance(value, list) else [value]:
            function = call["function"]
            given = function["arguments"]
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append(_begin(self._num_calls, function["name"], arguments))
            self._num_calls += 1
        return calls


@dataclass(frozen=True)
class ToolUse:
    """The way in which a request's texts call tools."""

    new_reader: Callable[[], CallReader]
    grammar: Grammar | None
    kept_tokens: Collection[int]  # special tokens that are part of calls


def tool_use(served: ServedText, asked: Chat, prompt: str, answer: Grammar | None) -> ToolUse | None:
    """Return the way in which a request's texts call tools; None: they call none.

    Args:
        served: The model.
        asked: The request.
        prompt: The prompt's text.
        answer: The grammar of a text without calls. None: any text.

    Raises:
        RequestError: The model cannot call these tools in this way.
    """
    if not asked.callable_tools:
        return None
    tokenizer, tools = served.tokenizer, tools_of(asked)
    form = FORMATS[served.tool_parser] if served.tool_parser else format_of(tokenizer.get_chat_template(tools=tools))
    if form is not None:
        special = form.special_tokens(tokenizer)
        kept = {number for text, number in special.items() if text != form.prefix}
        names = {tool.function.name for tool in asked.callable_tools}
        new_reader = partial(FormatReader, form, names, only_first=answer is not None)
        return ToolUse(new_reader, grammar_with_calls(form, asked, special, answer), kept)
    if getattr(tokenizer, "response_template", None) is None or not hasattr(tokenizer, "get_response_parser"):
        raise RequestError(
            400,
            f"the format of the tool calls of model {served.name!r} is not known here. Name one of {[*FORMATS]} by "
            "`lightning-swarm http --tool-parser`, or ask for JSON by `response_format`",
            param="tools",
        )
    if asked.must_call or answer is not None:
        raise RequestError(
            400,
            f'model {served.name!r} calls tools in a format without a grammar here: `tool_choice` must be "auto" or '
            '"none", and calls exclude `response_format` and `structured_outputs`',
            param="tool_choice",
        )
    by_template = partial(TemplateReader, tokenizer, prompt, tools)
    return ToolUse(by_template, None, served.special_tokens - {*end_tokens(served.model.generation_config)})


def tools_of(asked: Chat) -> list[dict[str, Any]] | None:
    """Return the tools that the model sees, in the form that chat templates take. None: there are none."""
    if not asked.callable_tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in asked.tools
    ]
