"""The selection of `make quick`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.quick.changed import changed_code, changed_files, changed_tests

FILES = (
    "lightning_swarm/__init__.py",
    "lightning_swarm/client/session.py",
    "lightning_swarm/client/pipeline/router.py",
    "lightning_swarm/monitor/view/scene.py",
    "tests/unit/test_public_paths.py",
    "tests/unit/client/test_session.py",
    "tests/unit/client/test_status.py",
    "tests/unit/client/helper.py",
    "tests/unit/client/pipeline/test_router.py",
    "tests/unit/monitor/test_view.py",
    "tests/parity/test_loop.py",
    "tests/parity/harness.py",
    "tests/p2p/test_killed.py",
    "docs/conf.py",
    "README.md",
)


IN_CLIENT = ["tests/unit/client/test_session.py", "tests/unit/client/test_status.py"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("lightning_swarm/__init__.py", ["tests/unit/test_public_paths.py"]),
        ("lightning_swarm/client/session.py", IN_CLIENT),
        ("lightning_swarm/client/gone.py", IN_CLIENT),
        ("lightning_swarm/client/pipeline/router.py", ["tests/unit/client/pipeline/test_router.py"]),
        ("lightning_swarm/monitor/view/scene.py", ["tests/unit/monitor/test_view.py"]),
        ("tests/unit/client/helper.py", IN_CLIENT),
        ("tests/unit/client/test_gone.py", IN_CLIENT),
        ("tests/unit/client/test_session.py", ["tests/unit/client/test_session.py"]),
        ("tests/unit/test_public_paths.py", ["tests/unit/test_public_paths.py"]),
        ("tests/parity/test_loop.py", ["tests/parity/test_loop.py"]),
        ("tests/parity/test_gone.py", []),
        ("tests/parity/harness.py", []),
        ("tests/p2p/test_killed.py", []),
        ("README.md", []),
    ],
)
def test_folders_map_to_folders(changed: str, selected: list[str], root: Path) -> None:
    assert changed_tests([changed], root) == selected


def test_two_changes_in_a_folder_select_its_tests_once(root: Path) -> None:
    changed = ["lightning_swarm/client/session.py", "tests/unit/client/test_session.py"]
    assert changed_tests(changed, root) == IN_CLIENT


def test_ruff_gets_code_that_is_there(root: Path) -> None:
    changed = ["README.md", "docs/conf.py", "lightning_swarm/client/gone.py", "tests/parity/harness.py"]
    assert changed_code(changed, root) == ["docs/conf.py", "tests/parity/harness.py"]


def test_changes_are_those_since_the_branch_left_main(root: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True)

    def commit() -> None:
        git("add", "--all")
        git("commit", "--quiet", "--message", "docs: a change")

    git("init", "--quiet", "--initial-branch", "main")
    (root / "README.md").write_text("one")
    commit()
    (root / "README.md").write_text("two")
    (root / ".gitignore").write_text("*.log\n")
    commit()
    assert changed_files(root) == [".gitignore", "README.md"]  # on main: the last commit

    git("checkout", "--quiet", "-b", "branch")
    (root / "docs" / "conf.py").write_text("x = 1")
    commit()
    git("mv", "tests/unit/client/helper.py", "tests/unit/client/tool.py")
    (root / "new.py").touch()
    (root / "new.log").touch()
    renamed = ["tests/unit/client/helper.py", "tests/unit/client/tool.py"]
    assert changed_files(root) == ["docs/conf.py", "new.py", *renamed]
    assert changed_files(root, "HEAD") == ["new.py", *renamed]

    git("branch", "--quiet", "--delete", "--force", "main")
    assert changed_files(root) == ["docs/conf.py", "new.py", *renamed]
