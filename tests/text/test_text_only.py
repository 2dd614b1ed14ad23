"""The check that a change touches text alone."""

from __future__ import annotations

import pytest

from tests.text.text_only import tree_of

CODE = '''"""Module."""
LIMIT = 3  # of rows
"""What is allowed."""

def check(count, name):
    """Check it."""
    if count > LIMIT:
        raise ValueError(f"at most {LIMIT} rows, got {count} of {name!r}")
    return "key"
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Module."""', '"""Limits of tables."""'),
        ('"""What is allowed."""', '"""The most rows of a table."""'),
        ("# of rows", "# rows"),
        ('    """Check it."""\n', ""),
        ('f"at most {LIMIT} rows, got {count} of {name!r}"', 'f"{name!r} has {count} rows, of at most {LIMIT}"'),
    ],
)
def test_text_may_change(old: str, new: str) -> None:
    assert old in CODE
    assert tree_of(CODE.replace(old, new)) == tree_of(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ('"key"', '"keys"'),
        ("count > LIMIT", "count >= LIMIT"),
        ("got {count} of", "got {count + 1} of"),
        ("{name!r}", "{name}"),
        ("{LIMIT} rows", "3 rows"),
    ],
)
def test_code_may_not(old: str, new: str) -> None:
    assert old in CODE
    assert tree_of(CODE.replace(old, new)) != tree_of(CODE)
