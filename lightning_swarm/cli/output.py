"""Lines that commands print beside their results."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line that is no result to standard error."""
    print(text, file=sys.stderr)  # noqa: T201 - a command
