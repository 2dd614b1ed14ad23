"""Invitations on the command line: the name of a file, the text itself, or `-` for standard input."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from lightning_swarm.peer.process import INVITE, handed_over
from lightning_swarm.trust.invitation_text import MAX_TEXT_BYTES, from_text, is_invitation

INVITE_HELP: Final = "an invitation: its file, its text, or -, which reads standard input"

_ARG_START, _ARG_END = 45, 46  # proc(5)'s fields 48 and 49, as indices into the fields after the program's name


@contextmanager
def invitation_file(argument: str | None) -> Iterator[str | None]:
    """Yield the name of a file with the invitation that `--invite` gives; None if the option is not used.

    An invitation's text goes into an unnamed file, because the rest of the package reads files. Raises `ConfigError`
    for a text that is no invitation.
    """
    if argument == "-":
        text, source = sys.stdin.read(MAX_TEXT_BYTES), "standard input"
    elif argument is not None and is_invitation(argument):
        hide_argument(argument)
        text, source = argument, "the text of `--invite`"
    else:
        yield argument
        return
    from_text(text, source)
    with handed_over(text) as (variables, _):  # an unnamed file, as a parent process hands it to its children
        yield variables[INVITE]


def hide_argument(secret: str) -> None:
    """Overwrite a secret in the command line that `ps` shows to all users of this machine; Linux only."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[_ARG_START]), int(fields[_ARG_END])
        offset = ctypes.string_at(begin, end - begin).find(secret.encode()) if 0 < begin < end else -1
        if offset >= 0:
            ctypes.memset(begin + offset, ord("*"), len(secret))
