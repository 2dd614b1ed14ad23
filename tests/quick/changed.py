"""Select the files for `make quick`: ``python -m tests.quick.changed {code,tests} [BASE]`` prints paths.

A file counts as changed if it differs between `BASE` and the working tree, or if git does not track it yet. The default
`BASE` is the commit at which the branch left main. On main itself it is the last commit's parent.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

PACKAGE = "lightning_swarm"
UNIT_TESTS = PurePosixPath("tests/unit")
PROCESS_TESTS = PurePosixPath("tests/p2p")  # minutes: left to `make test`
FOLDERS = (PACKAGE, "tests", "examples", "benchmarks")
PAGES_CONFIG = "docs/conf.py"


def changed_files(root: Path, base: str | None = None) -> list[str]:
    """Return the paths of changed and deleted files, relative to the repository's root."""
    # A renamed file is listed under both names, because the tests of both folders may notice.
    differ = _git(root, "diff", "--name-only", "--no-renames", base or _default_base(root))
    return sorted({*differ, *_git(root, "ls-files", "--others", "--exclude-standard")})


def _default_base(root: Path) -> str:
    [head] = _git(root, "rev-parse", "HEAD")
    try:
        [left_main] = _git(root, "merge-base", "main", "HEAD")
    except subprocess.CalledProcessError:  # there is no main
        return "HEAD~1"
    return "HEAD~1" if left_main == head else left_main


def _git(root: Path, *arguments: str) -> list[str]:
    # Without quoting, names that are not ASCII are printed as they are.
    command = ["git", "-c", "core.quotePath=false", *arguments]
    return subprocess.run(command, cwd=root, check=True, text=True, capture_output=True).stdout.splitlines()


def changed_code(changed: Iterable[str], root: Path) -> list[str]:
    """Return the changed Python files that `make lint` checks."""
    return [
        path
        for path in changed
        if path.endswith(".py")
        and (path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or path == PAGES_CONFIG)
        and (root / path).is_file()
    ]


def changed_tests(changed: Iterable[str], root: Path) -> list[str]:
    """Return the changed test files, and the unit tests of the folders in which other files changed."""
    selected: set[str] = set()
    for path in map(PurePosixPath, changed):
        if _is_test(path) and (root / path).is_file():
            selected.add(str(path))
        elif path.is_relative_to(PACKAGE):
            selected |= _tests_in(UNIT_TESTS / path.parent.relative_to(PACKAGE), root)
        elif path.is_relative_to(UNIT_TESTS):  # a helper, or a deleted test
            selected |= _tests_in(path.parent, root)
    return sorted(selected)


def _is_test(path: PurePosixPath) -> bool:
    is_quick = path.is_relative_to("tests") and not path.is_relative_to(PROCESS_TESTS)
    return is_quick and path.name.startswith("test_") and path.suffix == ".py"


def _tests_in(folder: PurePosixPath, root: Path) -> set[str]:
    """Return the tests directly in a folder, or in the nearest folder above that has tests."""
    while True:
        found = {str(folder / path.name) for path in (root / folder).glob("test_*.py")}
        if found or folder == UNIT_TESTS:
            return found
        folder = folder.parent


def main(kind: str, base: str | None = None) -> int:
    """Print the selected paths, one a line."""
    root = Path(__file__).resolve().parents[2]
    select = {"code": changed_code, "tests": changed_tests}[kind]
    try:
        changed = changed_files(root, base)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr)
        return 1
    sys.stdout.writelines(f"{path}\n" for path in select(changed, root))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
