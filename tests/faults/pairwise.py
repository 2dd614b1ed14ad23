"""Which of many plans `make test` runs: any two of a fault's kind, its victim and its moment meet in one of them.

So does each duration of a kind with each victim. Most mistakes are of one value, or of two that meet; `make check` runs
all plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.faults.plans import Case


def pairwise(plans: Iterable[tuple[Case, ...] | Case]) -> list[Any]:
    """All plans as parameters of a test; those that bring no new pair of values are marked as thorough."""
    met: set[object] = set()
    found = []
    for plan in plans:
        pairs = _pairs(plan)
        found.append(pytest.param(plan, marks=[pytest.mark.thorough] if pairs <= met else []))
        met |= pairs
    return found


def _pairs(plan: tuple[Case, ...] | Case) -> set[object]:
    *causes, fault = plan if isinstance(plan, tuple) else (plan,)
    victim = ("victim", (fault.whom, fault.groups))
    values = [("kind", fault.kind), victim, ("moment", (fault.phase, fault.of))]
    values += [("cause", str(cause)) for cause in causes]
    return {*itertools.combinations(values, 2), (("duration", (fault.kind, fault.for_s)), victim)}
