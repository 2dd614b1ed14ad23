"""Every command in the documentation would be accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.commands import NotUnderstood, check, check_span, lines
from tests.docs.pages import PAGES, ROOT, blocks, shown, spans


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the repository's folders, without the files that commands write."""
    for path in ROOT.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page: str, tmp_path: Path) -> None:
    for name, text in shown(page).items():
        (tmp_path / name).write_text(text)
    for block in blocks(page):
        if block.kind == "sh":
            for words in lines(block.text):
                check(words)
    for text in spans(page):
        check_span(text)


@pytest.mark.parametrize(
    "command",
    [
        "lightning-swarm joyn 203.0.113.7:31337/12D3KooW... train.py",
        "lightning-swarm join 203.0.113.7:31337 train.py",
        "lightning-swarm join 203.0.113.7:31337/12D3KooW... other.py",
        "lightning-swarm join 203.0.113.7:31337/12D3KooW... --listen nowhere train.py",
        "lightning-swarm status 203.0.113.7:31337/12D3KooW... --jason",
        "lightning-swarm doctor --peer 203.0.113.7",
        "lightning-swarm fit --model my_project.MyModel --trainer.strategy.num_stagse 2",
        "lightning-swarm fit --model my_project.NoModel",
        "lightning-swarm fit --config no.yaml",
        "lightning-swarm simulate no.yaml",
        "lightning-swarm simulate examples/spot/scenario.yaml --tea",
        "make tea",
        "make test ARGZ=-x",
        "make test ARGS=tests/none.py",
        "pip install -e '.[tea]'",
        "python -m benchmarks.recovery --tea 2",
        "python -m benchmarks.tea",
        "python -m examples.digits.train --tea",
        "python other.py",
        "python train.py --tea",
        "SWARM_TEA=1 make test",
        "tea --please",
    ],
)
def test_one_that_would_fail_is_found(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    [words] = lines(command)
    with pytest.raises((NotUnderstood, OSError)):
        check(words)


def test_the_page_of_variables_lists_all_of_them() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "lightning_swarm").rglob("*.py"))
    names = set(re.findall(r'"(SWARM_[A-Z_]+)"', sources))
    assert {"SWARM_JOIN", "SWARM_ANNOUNCE"} <= names
    assert names - {*re.findall(r"`(SWARM_[A-Z_]+)`", (ROOT / "docs" / "environment.md").read_text())} == set()
