"""Messages for people: peers by their short names, errors in one line and without libp2p's chains of causes.

Other peers send much of a message: `printable` keeps it from steering a terminal, or forging a line of a log.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_SHORT_LENGTH: Final = 6
_MAX_LENGTH: Final = 2000  # bounds the work of the patterns below, and the line
_PEER_ID: Final = re.compile(r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{20,}")
_DIAL: Final = re.compile(r"(?:Cannot (?:connect|open a stream) to \S+: )?failed to dial[^();]*")
_NO_CAUSE: Final = re.compile(r"(?:(?:Cannot .* to \S+|failed to [^:]*|dial \S+ \S+|connect): )*")
_ATTEMPT: Final = re.compile(r"\* \[[^\]]*\]")  # libp2p lists the addresses that it tried
_ERROR_NUMBER: Final = re.compile(r"\[Errno -?\d+\] ")
_BACKOFF: Final = "dial backoff"  # libp2p tried a moment ago, and does not try again so soon


def printable(text: str) -> str:
    """A text with spaces for line ends and tabs, and "?" for characters that a terminal may obey, or show reordered."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def printable_lines(text: str) -> str:
    """Like `printable`, but with the line ends of a traceback kept: for an error that is raised, not for a log."""
    return "\n".join(map(printable, text.split("\n")))


def short_name(peer_id: str) -> str:
    """The end of a peer's id: all ids begin alike."""
    return printable(peer_id[-_SHORT_LENGTH:] if len(peer_id) > 2 * _SHORT_LENGTH else peer_id)


def shorten(text: str) -> str:
    """A message as one line: short names of peers, and of a failed connection only its innermost cause."""
    if len(text) > _MAX_LENGTH:
        text = f"{text[: _MAX_LENGTH - 3]}..."
    line = _PEER_ID.sub(lambda found: short_name(found[0]), " ".join(printable(text).split()))
    return _ERROR_NUMBER.sub("", _DIAL.sub(_cause, line))


def _cause(chain: re.Match[str]) -> str:
    causes = [_NO_CAUSE.sub("", attempt.strip(" ."), count=1) for attempt in _ATTEMPT.split(chain[0])]
    known = [cause for cause in causes[1:] or causes if cause != _BACKOFF]
    cause = known[-1] if known else "it could not be reached a moment ago"
    return f"{cause}." if chain[0].endswith(".") else cause


_MAX_NAMED: Final = 5


def few(names: Sequence[str]) -> str:
    """List the first names, and say how many there are if these are not all."""
    more = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def table_lines(rows: Sequence[Sequence[str]], *, indent: str = "", numbers: bool = False) -> list[str]:
    """Align the columns of a table; with `numbers`, all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return [indent + "  ".join(cells).rstrip() for cells in aligned]
