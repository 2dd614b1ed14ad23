"""The table in the documentation equals the one generated from the tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.features import table
from tests.features.mark import WORKS, feature


def test_the_table_is_the_tests() -> None:
    written = table.FILE.read_text(encoding="utf-8")
    assert written == table.render(), "stale: python -m tests.features.table > docs/features.md"


def test_a_long_note_is_below_the_table() -> None:
    long = "n" * 121
    lines = table._table([("x", WORKS, "a note"), ("y", WORKS, long)])
    assert lines[2:] == ["| x | works | a note |", "| y | works | see below |", "", f"- **y**: {long}."]


def test_every_module_is_in_the_table() -> None:
    here = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    assert here == {*table._MODULES, "test_table"}


def test_a_test_without_a_mark_is_noticed() -> None:
    module = ModuleType("test_new")

    @feature("x", WORKS, "a note")
    def marked() -> None: ...

    def unmarked() -> None: ...

    module.__dict__["test_marked"] = marked
    assert table.rows_of(module) == [("x", WORKS, "a note")]
    module.__dict__["test_unmarked"] = unmarked
    with pytest.raises(ValueError, match="`test_unmarked` in test_new needs a mark"):
        table.rows_of(module)
