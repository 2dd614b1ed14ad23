"""What `docs/faults.md` says of tests runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from lightning_swarm.config import Limits
from lightning_swarm.testing import FaultPlan
from lightning_swarm.testing.faults import Kind
from lightning_swarm.types.events import EVENT_KINDS
from tests.faults.test_local_swarm import Net, data

pytest_plugins = ["lightning_swarm.testing.plugin"]

TEXT = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


def names() -> dict[str, Any]:
    """What the blocks define, one after the other."""
    found: dict[str, Any] = {"MyModel": Net, "my_data": data}
    for block in BLOCKS:
        exec(compile(block, "docs/faults.md", "exec"), found)
    return found


TESTS = {name: test for name, test in names().items() if name.startswith("test_")}


@pytest.mark.parametrize("name", TESTS)
def test_examples_run(name: str, request: pytest.FixtureRequest) -> None:
    arguments = TESTS[name].__code__.co_varnames[: TESTS[name].__code__.co_argcount]
    TESTS[name](*map(request.getfixturevalue, arguments))


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 4
    assert len(TESTS) == 3


def test_words_are_those_of_the_code() -> None:
    table = TEXT.partition("The words in `code` are events")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert named - set(EVENT_KINDS) <= {"training_step", "ckpt_path"}
    assert {*re.findall(r"`Limits\.(\w+)`", TEXT)} <= {*Limits.__dataclass_fields__}
    methods = {*re.findall(r"^\| `(\w+)\(", TEXT, flags=re.MULTILINE)}
    assert methods == {*get_args(Kind)} <= {*vars(FaultPlan)}
