"""Masks that exclude the tokens that break a text's grammar, by llguidance."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lightning_swarm.serving import grammar_check
from lightning_swarm.serving.grammar import Grammar, refuse
from lightning_swarm.serving.http_fields import RequestError

NewMask: TypeAlias = Callable[[], "GrammarMask"]
"""A compiled grammar: returns the mask of a new text."""

_CHECK_S: Final = 60.0  # for a busy machine: the check itself limits its processor time


class GrammarCompiler:
    """Compiles grammars for a model's tokenizer."""

    def __init__(self, tokenizer: Any, *, num_tokens: int, ends: Sequence[int]) -> None:
        import llguidance.hf

        if not ends:
            raise RequestError(400, "a grammar needs an end token, and this model has none in generation_config.json")
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=list(ends))
        except BaseException as error:  # a panic in Rust is not an `Exception`
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise RequestError(
                400, f"this model's tokenizer cannot follow grammars: {error}. Do not ask for JSON, grammars or tools"
            ) from error

    def compile(self, grammar: Grammar) -> NewMask:
        """Check and compile a grammar, which may take seconds. Raises RequestError if it is wrong or too complex."""
        from llguidance import LLMatcher

        text, limit = grammar.source or grammar.checked or grammar.whole, grammar_check.MAX_CHARACTERS
        if len(text) > limit:
            refuse(grammar.param, f"it must have at most {limit} characters, got {len(text)}")
        lark, problem = _checked(text, is_source=bool(grammar.source))
        if grammar.source:
            grammar = replace(grammar, text=lark, source="")
        if problem:
            refuse(grammar.param, _without_excerpt(problem, grammar))
        matcher = LLMatcher(self._tokenizer, grammar.whole, log_level=0, limits=grammar_check.new_limits())
        if matcher.is_error():
            refuse(grammar.param, _without_excerpt(matcher.get_error(), grammar))
        return lambda: GrammarMask(matcher.deep_copy(), grammar.param)


def _without_excerpt(problem: str, grammar: Grammar) -> str:
    """Shorten an error: in place of the excerpt, show only the wrong line of a grammar with several lines."""
    if re.search(r"unknown special token|Token range", problem):
        return "it names special tokens, which a text with a requested grammar cannot have"
    located = re.match(r"at (\d+)\(\d+\): (.*?)(?:\n +\d+ \| |$)", problem, re.DOTALL)
    if located is None:
        return problem
    return f"{located[2]}, in {grammar.text.splitlines()[int(located[1]) - 1][:100]}" if grammar.text else located[2]


@functools.lru_cache(maxsize=64)
def _checked(grammar: str, *, is_source: bool) -> tuple[str, str]:
    """Run `grammar_check` for a grammar; return the grammar in Lark, and its error or an empty text."""
    try:
        ended = subprocess.run(
            [sys.executable, "-P", str(Path(grammar_check.__file__))],
            input=json.dumps([grammar, is_source]),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=_CHECK_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(429, "this endpoint is too busy to compile a grammar. Try again later") from error
    if ended.returncode < 0:  # killed by a signal, because it exceeded its time, memory or stack
        return "", grammar_check.TOO_COMPLEX
    if ended.returncode > 0 or not ended.stdout:
        reason = " ".join(ended.stderr.splitlines()[-1:]) or "the check ended without a result"
        raise RequestError(500, f"grammars cannot be compiled here: {reason[-300:]}")
    lark, problem = json.loads(ended.stdout.splitlines()[-1])
    return lark, problem


class GrammarMask:
    """Excludes the tokens that break a text's grammar."""

    def __init__(self, matcher: Any, param: str) -> None:
        self._matcher, self._param = matcher, param

    def restrict(self, row: Tensor) -> None:
        """Exclude tokens from the logits ``[tokens]`` of the next token, in place."""
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        self._check()
        kept = torch.zeros(len(row), dtype=torch.bool)
        kept[: len(allowed)] = allowed[: len(row)]
        if not kept.any():
            refuse(self._param, "no token of the model can continue the text")
        row.masked_fill_(~kept.to(row.device), float("-inf"))

    def add(self, token: int) -> None:
        """Append a token to the text."""
        self._matcher.consume_tokens([token])
        self._check()

    @property
    def is_done(self) -> bool:
        """Whether the text is complete, so that no token can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            refuse(self._param, self._matcher.get_error())
