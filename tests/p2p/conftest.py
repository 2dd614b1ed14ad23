"""Fixtures of the tests with processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.p2p.processes import Run


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*arguments: object, kind: type[Run] = Run, **options: Any) -> Run:
        runs.append(kind(*arguments, **options))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()
