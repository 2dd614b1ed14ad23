"""Table cells and lines of code on the pages fit, so that a reader need not scroll sideways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, blocks, cells

MOST = 120  # characters of a cell
WIDEST = 88  # characters of a line of code, as many as a page shows on a screen of 1,280 pixels

VERBATIM = ("text", "none", "diff")
"""Blocks whose lines the page does not choose: output of a program, and a diff."""


def long_cells(page: str) -> list[str]:
    """Return the table cells that belong in a sentence below their table."""
    return [cell for cell in cells(page) if len(cell) > MOST]


def long_lines(page: str) -> list[str]:
    """Return the lines of code that a reader has to scroll."""
    return [
        f"{block}: {line}"
        for block in blocks(page)
        if block.kind not in VERBATIM
        for line in block.text.splitlines()
        if len(line) > WIDEST
    ]


@pytest.mark.parametrize("page", PAGES)
def test_cells_are_short(page: str) -> None:
    assert not long_cells(page), "move the explanation into a sentence below the table"


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_code_are_short(page: str) -> None:
    assert not long_lines(page), "wrap the line"


def test_long_cells_and_lines_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    wide = "x" * (MOST + 1)
    page.write_text(
        f"| a | b |\n|---|---|\n| {wide} | [c](https://{wide}) |\n\n```sh\n{wide}\n```\n\n```text\n{wide}\n```\n"
    )
    assert long_cells(str(page)) == [wide]
    assert long_lines(str(page)) == [f"{page}:5: {wide}"]
