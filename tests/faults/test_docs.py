"""The names in `docs/faults.md` exist in the code. `tests/docs` runs the page's examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from lightning_swarm.core.limits import Limits
from lightning_swarm.protocol.messages.reports import EVENT_KINDS
from lightning_swarm.testing import FaultPlan
from lightning_swarm.testing.faults import Kind

TEXT = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()


def test_words_are_those_of_the_code() -> None:
    table = TEXT.partition("The words in `code` are events")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert named - set(EVENT_KINDS) <= {"training_step", "ckpt_path", "serve", "fit"}
    assert {*re.findall(r"`Limits\.(\w+)`", TEXT)} <= {*Limits.__dataclass_fields__}
    methods = {*re.findall(r"^\| `(\w+)\(", TEXT, flags=re.MULTILINE)}
    assert methods == {*get_args(Kind)} <= {*vars(FaultPlan)}
