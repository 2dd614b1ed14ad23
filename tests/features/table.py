"""Writes the table of features from the marks of this folder's tests: ``python -m tests.features.table``."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.features.mark import Verdict

FILE = Path(__file__).parents[2] / "docs" / "features.md"

_HEAD = Path(__file__).with_name("head.md")

# In the order of the table. A module's docstring is its heading; `test_table` has no rows.
_MODULES = (
    "test_models",
    "test_whole",
    "test_loop",
    "test_data",
    "test_optimization",
    "test_gradients",
    "test_weights",
    "test_finetuning",
    "test_modes",
    "test_generation",
    "test_tuning",
    "test_precision",
    "test_compiling",
    "test_logging",
    "test_checkpoints",
    "test_averaging",
    "test_callbacks",
    "test_trainers",
    "test_trainers_metrics",
)

_MOST = 120  # characters of a cell

Row = tuple[str, Verdict, str]


def render() -> str:
    """Return the whole file."""
    parts = [_HEAD.read_text(encoding="utf-8")]
    for name in _MODULES:
        module = importlib.import_module(f"tests.features.{name}")
        assert module.__doc__ is not None
        heading = module.__doc__.splitlines()[0].rstrip(".")
        parts.append("\n".join([f"## {heading}", "", *_table(rows_of(module)), ""]))
    return "\n".join(parts)


def rows_of(module: ModuleType) -> list[Row]:
    """Return the rows of one module's tests, in their order.

    Raises:
        ValueError: A test has no mark.
    """
    rows: list[Row] = []
    for name, test in vars(module).items():
        if name.startswith("test_"):
            marks = list(_marks(test))
            if not marks:
                raise ValueError(f"`{name}` in {module.__name__} needs a mark that says which feature it shows")
            rows += [(mark.args[0], mark.args[1], mark.args[2]) for mark in marks]
    return rows


def _table(rows: list[Row]) -> list[str]:
    """Return the lines of a table, and a list of the notes that are too long for a cell."""
    lines = ["| feature | verdict | note |", "|---|---|---|"]
    below = []
    for name, verdict, note in rows:
        is_long = len(note) > _MOST
        lines.append(f"| {name} | {verdict} | {'see below' if is_long else note} |")
        if is_long:
            below.append(f"- **{name}**: {note}{'' if note.endswith('.') else '.'}")
    return [*lines, "", *below] if below else lines


def _marks(test: object) -> Iterator[pytest.Mark]:
    for mark in reversed(getattr(test, "pytestmark", [])):
        if mark.name == "feature":
            yield mark
        elif mark.name == "parametrize":
            for parameters in mark.args[1]:
                yield from (inner for inner in getattr(parameters, "marks", ()) if inner.name == "feature")


if __name__ == "__main__":
    print(render(), end="")
