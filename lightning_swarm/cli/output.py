"""Lines that commands print beside their results."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line to standard error, because it is not part of the result."""
    print(text, file=sys.stderr)  # noqa: T201 - a command
