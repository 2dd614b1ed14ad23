"""Choice of the cells of a parameter table for `make test`, for `make check`, and for `make exhaustive` only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import pytest

_SHARE = 8
"""`make check` runs one in so many cells that `make test` leaves out."""


def mark_the_rest(items: Sequence[pytest.Item]) -> None:
    """Mark cells as thorough, and most of these as exhaustive.

    The mark `each_value` keeps cells that cover all values; `first_cells(n)` keeps the first n cells.
    """
    tables: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            tables[f"{item.path}::{item.originalname}"].append(item)
    for cells in tables.values():
        kept = set(range(len(cells)))
        if cells[0].get_closest_marker("each_value") is not None:
            kept = covering([frozenset(_values(cell)) for cell in cells])
        first = cells[0].get_closest_marker("first_cells")
        if first is not None:
            kept = set(range(*first.args))
        for index, cell in enumerate(cells):
            if index not in kept:
                cell.add_marker(pytest.mark.thorough)
        thorough = [cell for cell in cells if cell.get_closest_marker("thorough") is not None]
        for index, cell in enumerate(thorough):
            if index % _SHARE:
                cell.add_marker(pytest.mark.exhaustive)


def covering(cells: Sequence[frozenset[Hashable]]) -> set[int]:
    """Choose cells that cover all values, the cell with the most new values first."""
    kept: set[int] = set()
    missing = frozenset[Hashable]().union(*cells)
    while missing:
        best = max(range(len(cells)), key=lambda index: len(cells[index] & missing))
        kept.add(best)
        missing -= cells[best]
    return kept


def _values(cell: pytest.Function) -> Iterator[Hashable]:
    """Yield a cell's values by their names; an object with `parts` yields each part."""
    for name, value in cell.callspec.params.items():
        for index, one in enumerate(value if isinstance(value, tuple) else (value,)):
            parts = getattr(one, "parts", {"": one})
            yield from ((name, index, part, repr(of)) for part, of in parts.items())
