"""Choice of a table's cells for `make test`."""

from __future__ import annotations

import itertools

from tests.cells import covering


def test_each_value_is_in_a_cell_that_is_chosen() -> None:
    table = [frozenset(cell) for cell in itertools.product("abc", "12", "xy")]
    chosen = covering(table)
    assert frozenset().union(*(table[index] for index in chosen)) == frozenset("abc12xy")
    assert len(chosen) == 3, "as many as the values of the longest parameter"
