"""Masks of the tokens that break a text's grammar, by llguidance."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from typing_extensions import override

from lightning_swarm.serving import grammar_check
from lightning_swarm.serving.grammar import Grammar, refuse
from lightning_swarm.serving.http_fields import RequestError

_MAX_CHARACTERS: Final = 256 << 10
_CHECK_S: Final = 15.0  # the check's own limit is of processor time


class GrammarCompiler:
    """Compiles grammars for a model's tokenizer."""

    def __init__(self, tokenizer: Any, *, num_tokens: int, ends: Sequence[int]) -> None:
        import llguidance.hf

        if not ends:
            raise RequestError(400, "a grammar needs an end token, and this model has none in generation_config.json")
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=list(ends))
        except BaseException as error:  # a panic of Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise RequestError(
                400, f"this model's tokenizer cannot follow grammars: {error}. Leave JSON, grammars and tools out"
            ) from error

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Check and compile a grammar, which may take seconds. Raises RequestError if it is wrong or too complex."""
        from llguidance import LLMatcher

        if len(grammar.whole) > _MAX_CHARACTERS:
            refuse(grammar.param, f"it has {len(grammar.whole)} characters, more than {_MAX_CHARACTERS}")
        if problem := _problem(grammar.whole):
            refuse(grammar.param, _without_excerpt(problem, grammar))
        matcher = LLMatcher(self._tokenizer, grammar.whole, log_level=0, limits=grammar_check.new_limits())
        if matcher.is_error():
            refuse(grammar.param, _without_excerpt(matcher.get_error(), grammar))
        return CompiledGrammar(matcher, grammar.param)


def _without_excerpt(problem: str, grammar: Grammar) -> str:
    """Shorten an error: instead of an excerpt, show the beginning of the wrong line if there are several."""
    place = re.match(r"at (\d+)\(\d+\): (.*?)(?:\n +\d+ \| |$)", problem, re.DOTALL)
    if place is None:
        return problem
    return f"{place[2]}, in {grammar.text.splitlines()[int(place[1]) - 1][:100]}" if grammar.text else place[2]


@functools.lru_cache(maxsize=64)
def _problem(grammar: str) -> str:
    """Compile a grammar in a process of its own; return the error, or an empty text."""
    try:
        found = subprocess.run(
            [sys.executable, "-P", str(Path(grammar_check.__file__))],
            input=re.sub(r"<\[\d+\]>", '"<>"', grammar),  # the check's tokenizer has no special tokens
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHECK_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RequestError(429, "this endpoint is too busy to compile a grammar. Try again later") from error
    return found.stdout if found.returncode == 0 else "it is too complex to compile it with bounded time and memory"


class CompiledGrammar:
    """A grammar that texts can follow."""

    def __init__(self, matcher: Any, param: str) -> None:
        self._matcher, self._param = matcher, param

    def new_text(self, num_prompt: int) -> GrammarMask:
        """Return the mask of a new text after `num_prompt` tokens of the prompt."""
        return GrammarMask(self._matcher.deep_copy(), self._param, num_prompt)


class GrammarMask(transformers.LogitsProcessor):
    """Excludes the tokens that break a text's grammar."""

    def __init__(self, matcher: Any, param: str, num_prompt: int) -> None:
        self._matcher, self._param = matcher, param
        self._num_read = num_prompt  # tokens of prompt and text that the matcher knows

    @override
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.is_done(input_ids)
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        self._check()
        kept = torch.zeros(scores.shape[1], dtype=torch.bool)
        kept[: len(allowed)] = allowed[: scores.shape[1]]
        if not kept.any():
            refuse(self._param, "none of the model's tokens continue the text")
        return scores.masked_fill(~kept.to(scores.device), float("-inf"))

    def is_done(self, input_ids: Any) -> bool:
        """Return whether the text is complete, so that nothing can follow."""
        new = input_ids[0, self._num_read :].tolist()
        self._num_read += len(new)
        if new:
            self._matcher.consume_tokens(new)
            self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            refuse(self._param, self._matcher.get_error())
