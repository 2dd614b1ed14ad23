"""Text for people: short names of peers, one-line errors without libp2p's chains of causes, sizes, and tables.

Much of a message's text comes from other peers. `printable` keeps it from controlling a terminal or forging log lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_SHORT_LENGTH: Final = 6
_MAX_LENGTH: Final = 2000  # bounds the line, and the work of the patterns below
_PEER_ID: Final = re.compile(r"\b(?:12D3KooW|Qm)[1-9A-HJ-NP-Za-km-z]{20,}")
# A failed connection's chain of causes, and the parts of a chain before its last cause.
_FAILED_DIAL: Final = re.compile(r"(?:Cannot (?:connect|open a stream) to \S+: )?failed to dial[^();]*")
_BEFORE_CAUSE: Final = re.compile(r"(?:(?:Cannot .* to \S+|failed to [^:]*|dial \S+ \S+|connect): )*")
_ATTEMPT: Final = re.compile(r"\* \[[^\]]*\]")  # libp2p lists the addresses that it has tried
_ERROR_NUMBER: Final = re.compile(r"\[Errno -?\d+\] ")
_BACKOFF: Final = "dial backoff"  # libp2p failed at this address a moment ago, and pauses before it tries again


def printable(text: str) -> str:
    """Replace line ends and tabs by spaces, and characters that could control a terminal or reorder text by "?"."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)


def printable_lines(text: str) -> str:
    """Apply `printable` to each line, so that a traceback keeps its lines; for errors that are raised, not for logs."""
    return "\n".join(map(printable, text.split("\n")))


def short_name(peer_id: str) -> str:
    """Return the end of a peer's id, because all ids begin alike."""
    return printable(peer_id[-_SHORT_LENGTH:] if len(peer_id) > 2 * _SHORT_LENGTH else peer_id)


def shorten(text: str) -> str:
    """Write a message as one line, with short names of peers and only the innermost cause of a failed connection."""
    if len(text) > _MAX_LENGTH:
        text = f"{text[: _MAX_LENGTH - 3]}..."
    line = _PEER_ID.sub(lambda match: short_name(match[0]), " ".join(printable(text).split()))
    return _ERROR_NUMBER.sub("", _FAILED_DIAL.sub(_cause, line))


def _cause(chain: re.Match[str]) -> str:
    """Return the last cause in a chain, other than a pause of libp2p."""
    causes = [_BEFORE_CAUSE.sub("", attempt.strip(" ."), count=1) for attempt in _ATTEMPT.split(chain[0])]
    known = [cause for cause in causes[1:] or causes if cause != _BACKOFF]
    cause = known[-1] if known else "it could not be reached a moment ago"
    return f"{cause}." if chain[0].endswith(".") else cause


_MAX_NAMED: Final = 5


def few(names: Sequence[str]) -> str:
    """List the first names, followed by the total number if there are more."""
    total = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + total


def size_text(num_bytes: int) -> str:
    """Write a number of bytes with two or three digits and a decimal unit, such as ``9.2 GB``."""
    size, units = float(num_bytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f} {units[0]}" if units[0] != "bytes" and size < 99.95 else f"{size:.0f} {units[0]}"


def table_lines(rows: Sequence[Sequence[str]], *, indent: str = "", numbers: bool = False) -> list[str]:
    """Align the columns of a table to the left; with `numbers`, all but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [
        [
            cell.rjust(width) if numbers and column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return [indent + "  ".join(cells).rstrip() for cells in aligned]
