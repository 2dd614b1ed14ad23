"""Methods that are replaced on one object."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from lightning_swarm.core.override import Override


class Loop:
    """Runs."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self) -> str:
        self.runs += 1
        return "own"


def test_an_override_is_called_and_removed() -> None:
    loop = Loop()
    override = Override(loop, "run", lambda: f"not {override.replaced()}")
    assert loop.run() == "not own"
    override.remove()
    assert (loop.run(), loop.runs) == ("own", 2)
    assert vars(loop) == {"runs": 2}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loop: pickle.loads(pickle.dumps(loop))])
def test_a_copy_has_its_own_method(copied: Callable[[Loop], Loop]) -> None:
    loop = Loop()
    Override(loop, "run", lambda: "replaced")
    other = copied(loop)
    assert other.run() == "own"
    assert (loop.runs, other.runs) == (0, 1)
    assert loop.run() == "replaced"
