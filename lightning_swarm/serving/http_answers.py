"""Answers of OpenAI's HTTP protocol: whole answers, chunks of streams, and errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from lightning_swarm.core.errors import ConfigError, SwarmError
from lightning_swarm.serving.http_fields import RequestError
from lightning_swarm.serving.pieces import CallPiece, TextPiece, TokenScore

_TEXT: Final = "text_completion"


@dataclass
class Choice:
    """One of a request's texts, as far as it has been written."""

    index: int
    text: str = ""
    finish_reason: str = "stop"
    scores: list[TokenScore] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)
    reasoning: str = ""
    has_begun: bool = False  # whether its first chunk was made

    def add(self, piece: TextPiece) -> None:
        """Append the next piece."""
        self.text += piece.text
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.scores += piece.scores
        self.calls = _merged([*self.calls, *piece.calls])
        self.reasoning += piece.reasoning


def _merged(pieces: Sequence[CallPiece]) -> list[CallPiece]:
    """Join the pieces of each call."""
    calls = dict[int, CallPiece]()  # index of the call -> call
    for piece in pieces:
        call = calls.get(piece.index)
        calls[piece.index] = piece if call is None else replace(call, arguments=call.arguments + piece.arguments)
    return [*calls.values()]


class Form(Protocol):
    """The form of an answer, whole or as events of a stream."""

    end_mark: str  # text that ends a stream

    def begin(self) -> list[dict[str, Any]]:
        """Return the events before the texts."""

    def take(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """Return the events of a text's next piece."""

    def end(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events after the texts."""

    def whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole answer."""


@dataclass
class AnswerForm:
    """The form of answers to completions and chats."""

    model: str
    chat: bool
    num_texts: int
    has_scores: bool  # whether log probabilities were requested
    has_usage: bool  # whether a stream ends with its usage
    end_mark: str = "data: [DONE]\n\n"

    def __post_init__(self) -> None:
        self._choices = [Choice(index) for index in range(self.num_texts)]
        self._id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def begin(self) -> list[dict[str, Any]]:
        """Return no events: a text's first chunk is its beginning."""
        return []

    def take(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """Add a piece to its text, and return the piece's chunk."""
        chunk = self._piece_chunk(self._choices[index], piece)
        self._choices[index].add(piece)
        return [chunk]

    def end(self, usage: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a chunk with the usage, if it was requested."""
        return [{**self._chunk([]), "usage": usage}] if self.has_usage else []

    def whole(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer with all texts."""
        answer = self._answer("chat.completion" if self.chat else _TEXT, map(self._whole, self._choices))
        return {**answer, "usage": usage}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text: dict[str, Any] = {"text": choice.text}
        if self.chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None, **_reasoning(choice.reasoning)}
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
            text = {"message": message}
        return {**self._common_fields(choice.index, choice.finish_reason, choice.scores, 0), **text}

    def _piece_chunk(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        """Return the chunk of a piece that `choice` does not contain yet."""
        text: dict[str, Any] = {"text": piece.text}
        if self.chat:
            delta: dict[str, Any] = {} if choice.has_begun else {"role": "assistant"}
            if piece.text or not (piece.calls or piece.reasoning):
                delta["content"] = piece.text
            if piece.calls:
                delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in _merged(piece.calls)]
            text = {"delta": {**delta, **_reasoning(piece.reasoning)}}
        choice.has_begun = True
        common = self._common_fields(choice.index, piece.finish_reason, piece.scores, len(choice.text))
        return self._chunk([{**common, **text}])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._answer("chat.completion.chunk" if self.chat else _TEXT, choices)

    def _answer(self, object_type: str, choices: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": object_type, "created": self._created, "model": self.model}
        return {**head, "choices": list(choices)}

    def _common_fields(
        self, index: int, reason: str | None, scores: Sequence[TokenScore], begin: int
    ) -> dict[str, Any]:
        """Return a choice's fields beside its text; `begin` is the position in the text of the first scored token."""
        logprobs: dict[str, Any] | None = None
        if self.has_scores and self.chat:
            logprobs = {"content": [_chat_logprobs(score) for score in scores]}
        elif self.has_scores:
            logprobs = _completion_logprobs(scores, begin)
        return {"index": index, "logprobs": logprobs, "finish_reason": reason}


def _call(call: CallPiece) -> dict[str, Any]:
    """Return a call or a piece of a call. Only the first piece has a name and an id."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reasoning(text: str) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def _chat_logprobs(score: TokenScore) -> dict[str, Any]:
    """Return a token's score in the form of chats."""
    top = [{"token": text, "logprob": value, "bytes": [*text.encode()]} for text, value in score.top]
    return {"token": score.text, "logprob": score.logprob, "bytes": [*score.text.encode()], "top_logprobs": top}


def _completion_logprobs(scores: Sequence[TokenScore], begin: int) -> dict[str, Any]:
    """Return tokens' scores in the form of completions."""
    offsets = []
    for score in scores:
        offsets.append(begin)
        begin += len(score.text)
    # Several tokens may have the same text. In reversed order, the dict keeps the most probable of them.
    tops = [None if score.logprob is None else dict(reversed(score.top)) for score in scores]
    return {
        "tokens": [score.text for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error that occurred while a text was written."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, ConfigError):
        return 400
    return 503 if isinstance(error, SwarmError) else 500


def error_answer(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    error_type = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}
