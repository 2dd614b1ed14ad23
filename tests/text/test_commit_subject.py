"""The hook that checks the subject of a commit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

HOOKS = yaml.safe_load((Path(__file__).parents[2] / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
[HOOK] = [hook for hook in HOOKS if hook["id"] == "commit-subject"]


def accepts(message: str) -> bool:
    """Match as pygrep does with the hook's arguments: the whole file at once, as bytes."""
    assert HOOK["language"] == "pygrep"
    assert HOOK["args"] == ["--multiline", "--negate"]
    return re.search(HOOK["entry"].encode(), message.encode(), re.MULTILINE | re.DOTALL) is not None


@pytest.mark.parametrize(
    "message",
    [
        "docs: a change\n",
        "cli, docs: two scopes\n\nThe reason, in a line that may be longer than the 72 characters of a subject.\n",
        f"docs: {'x' * 66}\n",
        f"fixup! docs: {'x' * 66}\n",
        "Merge branch 'speed' into main\n",
        'Revert "docs: a change"\n',
    ],
)
def test_subjects_with_a_scope_pass(message: str) -> None:
    assert accepts(message)


@pytest.mark.parametrize(
    "message",
    [
        "a change without a scope\n\ndocs: this line is not the subject\n",
        f"docs: {'x' * 67}\n",
        "Docs: a change\n",
        "docs:a change\n",
        "docs: \n",
        "\n",
    ],
)
def test_other_subjects_are_refused(message: str) -> None:
    assert not accepts(message)
