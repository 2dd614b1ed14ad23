"""How a test of this folder says which row of the table of features it is."""

from __future__ import annotations

from typing import Literal

import pytest

Verdict = Literal["works", "partly", "refused"]
WORKS: Verdict = "works"
PARTLY: Verdict = "partly"
REFUSED: Verdict = "refused"


def feature(name: str, verdict: Verdict, note: str = "") -> pytest.MarkDecorator:
    """Mark a test, or one of its parameters, as a row of `docs/features.md`.

    Args:
        name: The feature as users of Lightning write it, in Markdown.
        verdict: What the test shows.
        note: What they should know besides: a limit, or the remedy.
    """
    return pytest.mark.feature(name, verdict, note)
