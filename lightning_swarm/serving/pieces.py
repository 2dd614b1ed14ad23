"""Pieces of a text that is being written, with their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def overlap(text: str, sought: str) -> int:
    """Return the length of the longest proper prefix of `sought` that is a suffix of `text`."""
    longest = min(len(sought) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if text.endswith(sought[:length])), 0)


@dataclass(frozen=True)
class TokenScore:
    """A token of a text, with the log probabilities of this token and of the most probable tokens."""

    text: str
    logprob: float | None  # None: the first token of a prompt has none
    top: Sequence[tuple[str, float]] = ()

    @classmethod
    def of(cls, tokenizer: Any, token: int, logits: Any, num_top: int) -> TokenScore:
        """Score a token by the logits at its position; without logits, leave it unscored."""
        if logits is None:
            return cls(tokenizer.decode([token]), None)
        logprobs = logits.double().log_softmax(dim=-1)
        values, tokens = logprobs.topk(num_top)
        top = [
            (tokenizer.decode([number]), value) for number, value in zip(tokens.tolist(), values.tolist(), strict=True)
        ]
        return cls(tokenizer.decode([token]), float(logprobs[token]), top)


@dataclass(frozen=True)
class CallPiece:
    """A piece of a tool's call: its beginning, with the function's name, or a piece of its arguments."""

    index: int  # among the text's calls
    arguments: str = ""  # JSON
    name: str = ""  # in a call's first piece only, like `id`
    id: str = ""


@dataclass
class TextPiece:
    """A piece of a text that is being written, or the text's end."""

    text: str = ""
    finish_reason: str | None = None  # only at the end
    error: BaseException | None = None  # the error that ended the text
    scores: Sequence[TokenScore] = ()  # scores of the piece's tokens, if requested
    calls: Sequence[CallPiece] = ()  # pieces of calls, which are no part of `text`
    reasoning: str = ""  # the model's reasoning, if its reader separates it from `text`

    def append(self, other: TextPiece) -> None:
        """Append another piece's text, reasoning and calls."""
        self.text, self.reasoning = self.text + other.text, self.reasoning + other.reasoning
        self.calls = [*self.calls, *other.calls]


class StopFinder:
    """Passes text on as it arrives, but holds back a suffix that may begin a stop string."""

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        self._stops = stops
        self._keeps = keeps  # whether the stop string stays part of the text
        self._held = ""  # suffix that may begin a stop string
        self.has_stop = False  # whether the text has a stop string

    def take(self, text: str) -> str:
        """Append more text, and return the part that is certainly in no stop string."""
        self._held += text
        matches = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if matches:
            self.has_stop = True
            start, stop = min(matches)
            passed, self._held = self._held[: start + len(stop) * self._keeps], ""
            return passed
        end = len(self._held) - max((overlap(self._held, stop) for stop in self._stops), default=0)
        passed, self._held = self._held[:end], self._held[end:]
        return passed

    def rest(self) -> str:
        """After the text's end, return the held suffix."""
        held, self._held = self._held, ""
        return held
