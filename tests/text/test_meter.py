"""The meter of text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.text.meter import read

CODE = '''"""Tell what somebody said of others."""

# Whoever comes is what counts.
LIMIT = 3  # of rows
COUNT = 4  # rows
WHAT = "what is no text"  # type: ignore
'''


def test_docstrings_and_comments_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(CODE)
    reading = read([path])
    assert reading.found == {"nobody": 2, "what": 2, "those": 1}
    assert reading.words == 14
    assert reading.rate("what") == pytest.approx(2000 / 14)
    assert (reading.comments, reading.fragments) == (2, 1)
    assert reading.beyond() == [
        "nobody 142.86 of 0.1",
        "what 142.86 of 1.5",
        "those 71.43 of 1.0",
        "fragments 50% of 6%",
    ]


def test_code_on_a_page_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("Say `what` it does.\n\n```python\nwhat = others\n```\n")
    assert read([path]).beyond() == []
