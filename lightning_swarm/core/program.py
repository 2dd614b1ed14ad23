"""How this program was started: where, and with which arguments, whatever it has changed of both since."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

# The package is imported first of all by most programs, and a folder may be gone by the time that a peer starts.
_imported_in: Path | None = None
with contextlib.suppress(OSError):
    _imported_in = Path.cwd()


def program() -> list[str]:
    """The arguments that Python ran a program with: a script, or ``-m`` and a module, and the program's own.

    Programs take away from `sys.argv` what they have read, and set it for libraries that read it.
    """
    return _program(sys.orig_argv[1:])


def _program(arguments: Sequence[str]) -> list[str]:
    rest = list(arguments)
    while rest and rest[0].startswith("-") and not rest[0].startswith(("-m", "-c")) and rest[0] != "-":
        del rest[: 2 if rest[0] in _WITH_VALUE else 1]
    if rest and rest[0].startswith("-m") and len(rest[0]) > 2:  # python -mname
        return ["-m", rest[0][2:], *rest[1:]]
    return rest


def own_arguments(script: str) -> list[str]:
    """The arguments of a script that runs; those of `sys.argv` where another program runs it, a profiler say."""
    asked = program()
    if asked[:1] and _is_same(started_in() / asked[0], Path(script)):
        return asked[1:]
    return sys.argv[1:]


def module_arguments(name: str) -> list[str]:
    """The same of a module that runs by ``-m``."""
    asked = program()
    return asked[2:] if asked[:2] == ["-m", name] else sys.argv[1:]


def started_in() -> Path:
    """The folder that this program was started in, or the first that is known."""
    asked, main = program(), getattr(sys.modules["__main__"], "__file__", None)
    if asked and main is not None and not asked[0].startswith("-"):
        # Python has made an absolute path of the script's when it began.
        given, found = Path(asked[0]).parts, Path(main).parts
        if not Path(asked[0]).is_absolute() and Path(main).is_absolute() and ".." not in given:
            own = [part for part in given if part != "."]
            if list(found[-len(own) :]) == own:
                return Path(*found[: -len(own)])
    return _imported_in if _imported_in is not None else Path()


def _is_same(one: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return one.resolve() == other.resolve()
    return False
