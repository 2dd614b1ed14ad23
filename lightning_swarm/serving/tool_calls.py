"""Reads the calls of tools in a text while the text is written."""

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
        """Whether the text has calls, all of which are complete."""

    def take(self, text: str) -> TextPiece:
        """Read more of the text; return the text and the calls that are certain so far."""

    def rest(self) -> TextPiece:
        """After the text's end, return the rest."""


async def with_calls(pieces: AsyncIterator[TextPiece], reader: CallReader) -> AsyncIterator[TextPiece]:
    """Yield a text's pieces, with its calls separated. If it ends after a call, its finish reason is "tool_calls"."""
    scores = list[TokenScore]()  # scores of text that the reader holds back
    async for piece in pieces:
        scores += piece.scores
        certain = reader.take(piece.text)
        reason = piece.finish_reason
        if reason is not None:
            certain.append(reader.rest())
            reason = "tool_calls" if reason == "stop" and reader.has_calls else reason
        if certain.text or certain.calls or certain.reasoning or reason is not None:
            yield replace(certain, finish_reason=reason, scores=scores)
            scores = []


def _begin(index: int, name: str, arguments: str = "") -> CallPiece:
    """Return the first piece of a call, with a new id of nine letters and digits, as Mistral's templates require."""
    return CallPiece(index, arguments, name, "".join(secrets.choice(_ID) for _ in range(9)))


class FormatReader:
    """Reads calls of a known format. The text's grammar ensures that each call follows the format to its end.

    It is a state machine: `_read` is the method that reads the next part of the text.

    Args:
        form: The format.
        names: The functions that the text may call. A call of another function is ordinary text.
        only_first: Whether calls can only be at the beginning of the text.
    """

    def __init__(self, form: CallFormat, names: Collection[str], *, only_first: bool = False) -> None:
        self._form, self._names, self._only_first = form, names, only_first
        self._first = re.compile(rf"\s*{re.escape(form.opening + form.head)}{_NAME}{re.escape(form.middle)}")
        self._next = re.compile(re.escape(form.tail + form.separator + form.head) + _NAME + re.escape(form.middle))
        self._held = ""  # text that was not passed on yet
        self._seen = ""  # the marker before `_held`, which is ordinary text unless a call follows
        self._index = -1  # index of the newest call
        self._read: Callable[[], str | CallPiece | None] = self._read_text  # None: more text is needed
        self._json = _JsonEnd()

    @property
    def has_calls(self) -> bool:
        """Whether the text has calls, all of which are complete."""
        return self._index >= 0 and self._json.is_complete

    def take(self, text: str) -> TextPiece:
        """Read more of the text; return the text and the calls that are certain so far."""
        self._held += text
        passed, calls = "", list[CallPiece]()
        while (part := self._read()) is not None:
            if isinstance(part, str):
                passed += part
            else:
                calls.append(part)
        return TextPiece(passed, calls=calls)

    def rest(self) -> TextPiece:
        """After the text's end, return the rest, unless it belongs to a call."""
        held, self._held = self._held, ""
        if self._index < 0:
            return TextPiece(self._seen + held)
        next_call = self._form.tail + self._form.separator + self._form.head
        if self._read != self._read_call_begin or _may_begin_with(held, next_call):
            return TextPiece()
        after = held.removeprefix(self._form.tail + self._form.closing)
        return TextPiece(after if after.strip() else "")

    def _read_text(self) -> str | None:
        """Pass text on up to the first call."""
        marker = self._form.marker
        if not marker:
            if not (begin := self._held.lstrip(" \n")):  # blanks, which the grammar admits before text
                return None
            self._read = self._read_call_begin if begin[0] == "{" else self._read_rest
            return ""
        if self._only_first and not _may_begin_with(self._held.lstrip(), marker):
            self._read = self._read_rest
            return ""
        position = self._held.find(marker)
        if position >= 0:
            passed, self._held = self._held[:position], self._held[position + len(marker) :]
            self._seen, self._read = marker, self._read_call_begin
            return passed
        keep = overlap(self._held, marker)
        passed, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return passed or None

    def _read_rest(self) -> str | None:
        passed, self._held = self._held, ""
        return passed or None

    def _read_call_begin(self) -> str | CallPiece | None:
        """Read the beginning of a call, up to its arguments."""
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
        """Pass on the arguments of a call, up to their end."""
        end = self._json.find(self._held)
        passed, self._held = self._held[:end], self._held[end:]
        if self._json.is_complete:
            self._read = self._read_call_begin
        return CallPiece(self._index, passed) if passed else None


def _may_begin_with(text: str, prefix: str) -> bool:
    """Return whether a text begins with `prefix`, or may do so when it is longer."""
    return text.startswith(prefix) or prefix.startswith(text)


class _JsonEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False
        self.is_complete = False

    def find(self, text: str) -> int:
        """Read more of the text, and return how many of its characters belong to the object."""
        for position, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    self.is_complete = True
                    return position + 1
        return len(text)


class TemplateReader:
    """Reads calls by a tokenizer's response template. Each call is returned whole, after its end."""

    def __init__(self, tokenizer: Any, prompt: str, tools: Any) -> None:
        self._parser = tokenizer.get_response_parser(prefix=prompt, tools=tools)
        self._num_calls = 0
        self._is_open = False  # whether a call has begun and not ended
        self._raw = ""  # text that was not passed on yet, with the call's delimiters
        self._is_broken = False  # after a call that does not follow the template, all text is passed on unread

    @property
    def has_calls(self) -> bool:
        """Whether the text has calls, all of which are complete."""
        return self._num_calls > 0 and not self._is_open and not self._is_broken

    def take(self, text: str) -> TextPiece:
        """Read more of the text; return the text and the calls that are certain so far."""
        piece = TextPiece()
        # One character at a time, because a failed call of `feed` loses the events of all of its characters.
        for position, character in enumerate(text):
            if self._is_broken:
                piece.text += text[position:]
                break
            self._raw += character
            self._read(partial(self._parser.feed, character), piece)
        return piece

    def rest(self) -> TextPiece:
        """After the text's end, return the rest."""
        piece = TextPiece()
        if not self._is_broken:
            self._read(lambda: self._parser.finalize()[1], piece)
        return piece

    def _read(self, parse: Callable[[], Any], piece: TextPiece) -> None:
        """Append the parts that the parser has just completed. A wrong call is appended as text."""
        try:
            new = self._piece(parse())
        except (KeyError, TypeError, ValueError):  # the call ended early, or is no JSON
            self._is_broken = True
            new = TextPiece(self._raw)
        piece.append(new)
        if not self._is_open:
            num_held = len(self._parser._buffer) - self._parser._pos  # characters that may begin a delimiter
            self._raw = self._raw[max(0, len(self._raw) - num_held) :]

    def _piece(self, events: Any) -> TextPiece:
        piece, calls = TextPiece(), list[CallPiece]()
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "tool_calls":
                self._is_open = kind != "region_close"
                calls += [] if self._is_open else self._calls(event["value"])
            elif kind == "region_chunk" and field == "content":
                piece.text += event["text"]
            elif kind == "region_chunk":
                piece.reasoning += event["text"]
        piece.calls = calls
        return piece

    def _calls(self, value: Any) -> list[CallPiece]:
        calls = []
        for call in value if isinstance(value, list) else [value]:
            function = call["function"]
            arguments = function["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(_begin(self._num_calls, function["name"], arguments))
            self._num_calls += 1
        return calls


@dataclass(frozen=True)
class ToolUse:
    """How a request's texts call tools."""

    new_reader: Callable[[], CallReader]
    grammar: Grammar | None
    kept_tokens: Collection[int]  # special tokens that are part of calls


def tool_use(served: ServedText, fields: Chat, prompt: str, answer: Grammar | None) -> ToolUse | None:
    """Return how a request's texts call tools; None: they call no tools.

    Args:
        served: The model.
        fields: The request's fields.
        prompt: The prompt's text.
        answer: The grammar of a text without calls. None: any text.

    Raises:
        RequestError: The model cannot call tools as the request asks.
    """
    if not fields.callable_tools:
        return None
    tokenizer, tools = served.tokenizer, tools_of(fields)
    form = FORMATS[served.tool_parser] if served.tool_parser else format_of(tokenizer.get_chat_template(tools=tools))
    if form is not None:
        special = form.special_tokens(tokenizer)
        kept = {number for text, number in special.items() if text != form.prefix}
        names = {tool.function.name for tool in fields.callable_tools}
        new_reader = partial(FormatReader, form, names, only_first=answer is not None)
        return ToolUse(new_reader, grammar_with_calls(form, fields, special, answer), kept)
    if getattr(tokenizer, "response_template", None) is None or not hasattr(tokenizer, "get_response_parser"):
        raise RequestError(
            400,
            f"the format of the tool calls of model {served.name!r} is unknown here. Choose one of {[*FORMATS]} by "
            "`lightning-swarm http --tool-parser`, or ask for JSON by `response_format`",
            param="tools",
        )
    if fields.must_call or answer is not None:
        raise RequestError(
            400,
            f'model {served.name!r} calls tools in a format without a grammar here: `tool_choice` must be "auto" or '
            '"none", and calls exclude `response_format` and `structured_outputs`',
            param="tool_choice",
        )
    by_template = partial(TemplateReader, tokenizer, prompt, tools)
    return ToolUse(by_template, None, served.special_tokens - {*end_tokens(served.model.generation_config)})


def tools_of(fields: Chat) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call, in the form of chat templates; None without tools."""
    if not fields.callable_tools:
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
        for tool in fields.tools
    ]
