"""The mark that assigns a test of this folder to a row of the table of features."""

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
        verdict: The test's result.
        note: A limit or a remedy that users should know.
    """
    return pytest.mark.feature(name, verdict, note)
