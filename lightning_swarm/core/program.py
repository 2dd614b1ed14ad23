"""The folder and the arguments with which this program was started, even if it has changed them since."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

# Most programs import this package first, so this is the initial folder. It may be gone when a peer starts.
_imported_in: Path | None = None
with contextlib.suppress(OSError):
    _imported_in = Path.cwd()


def program() -> list[str]:
    """Return Python's arguments from the program on: a script, or ``-m`` and a module, then the program's own.

    `sys.argv` may have changed: programs remove arguments that they have read, and set it for libraries.
    """
    return _program(sys.orig_argv[1:])


def _program(arguments: Sequence[str]) -> list[str]:
    rest = list(arguments)
    while rest and rest[0].startswith("-") and not rest[0].startswith(("-m", "-c")) and rest[0] != "-":
        del rest[: 2 if rest[0] in _OPTIONS_WITH_VALUE else 1]
    if rest and rest[0].startswith("-m") and len(rest[0]) > 2:  # python -mname
        return ["-m", rest[0][2:], *rest[1:]]
    return rest


def own_arguments(script: str) -> list[str]:
    """Return the arguments of the running script; if another program runs it, such as a profiler, use `sys.argv`."""
    arguments = program()
    if arguments[:1] and _is_same(start_folder() / arguments[0], Path(script)):
        return arguments[1:]
    return sys.argv[1:]


def module_arguments(name: str) -> list[str]:
    """Return the arguments of a module that runs by ``-m``; else use `sys.argv`."""
    arguments = program()
    return arguments[2:] if arguments[:2] == ["-m", name] else sys.argv[1:]


def start_folder() -> Path:
    """Return the folder in which this program was started, or else the one in which it imported this module."""
    arguments, main = program(), getattr(sys.modules["__main__"], "__file__", None)
    if arguments and main is not None and not arguments[0].startswith("-"):
        # Python made the script's path absolute at the start, so the folder is this path without the relative path.
        script, absolute = Path(arguments[0]), Path(main)
        if not script.is_absolute() and absolute.is_absolute() and ".." not in script.parts:
            relative = [part for part in script.parts if part != "."]
            if list(absolute.parts[-len(relative) :]) == relative:
                return Path(*absolute.parts[: -len(relative)])
    return _imported_in if _imported_in is not None else Path()


def _is_same(first: Path, second: Path) -> bool:
    with contextlib.suppress(OSError):
        return first.resolve() == second.resolve()
    return False
