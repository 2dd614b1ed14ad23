"""Compiles a grammar in a process of its own, which may run out of time, memory or stack without harm to the endpoint.

Run as a script, with the grammar on standard input. It prints the grammar's error, or nothing. A tokenizer of bytes
replaces the model's, because compiling depends little on the vocabulary.
"""

from __future__ import annotations

import resource
import sys
import threading
from typing import Any, Final

_CPU_S: Final = 2
_MEMORY_BYTES: Final = 1 << 30
# Recursive grammars overflow this stack long before they overflow that of a thread of the endpoint, 8 MiB.
_STACK_BYTES: Final = 1 << 20


def new_limits() -> Any:
    """Return llguidance's limits for a grammar, and for each of its steps."""
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


def _check(grammar: str) -> None:
    import llguidance

    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0, limits=new_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    sys.stdout.write(matcher.get_error())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    checking = threading.Thread(target=_check, args=(sys.stdin.read(),))
    checking.start()
    checking.join()
