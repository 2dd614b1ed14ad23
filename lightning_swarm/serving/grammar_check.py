"""Compiles a grammar in a separate process, so that too much time, memory or stack does not harm the endpoint.

This script reads the arguments of `_check` as JSON from standard input, and prints the result as JSON in its last line.
It compiles for a tokenizer of bytes in place of the model's, because the vocabulary hardly affects the cost.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any, Final

MAX_CHARACTERS: Final = 256 << 10
TOO_COMPLEX: Final = "it is too complex to compile with bounded time and memory"
_CPU_S: Final = 2
_MEMORY_BYTES: Final = 1 << 30
# Recursive grammars overflow this stack long before they overflow that of a thread of the endpoint, 8 MiB.
_STACK_BYTES: Final = 1 << 20


def new_limits() -> Any:
    """Return llguidance's limits for a grammar and for each step of its parser."""
    import llguidance

    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=20_000,
        max_lexer_states=30_000,  # about 2 KB each
        max_grammar_size=200_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _check(grammar: str, is_source: bool) -> tuple[str, str]:
    """Compile a grammar; return it in Lark, and its error or an empty text.

    Args:
        grammar: The grammar.
        is_source: Whether it may be GBNF, which llguidance converts in Python, in quadratic time.
    """
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        lark = str(any_to_lark(grammar)) if is_source else grammar
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the converter raises errors of any kind for wrong grammars
        return "", f"it cannot be read: {error}"
    if len(lark) > MAX_CHARACTERS:
        return "", f"it must have at most {MAX_CHARACTERS} characters, got {len(lark)}"
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark, log_level=0, limits=new_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return lark, matcher.get_error()


def _print_result(arguments: tuple[str, bool]) -> None:
    try:
        result = _check(*arguments)
    except MemoryError:
        result = "", TOO_COMPLEX
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    checking = threading.Thread(target=_print_result, args=(json.load(sys.stdin),))
    checking.start()
    checking.join()  # if the thread fails, its traceback is on standard error, and no result is printed
