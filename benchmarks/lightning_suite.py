"""How many of Lightning's own tests pass when their Trainers use a swarm.

The tests come from an unpacked source distribution of Lightning, or a checkout, of the installed version: nothing of
them is in this repository. A Trainer that names no strategy and has one CPU device gets `SwarmStrategy(num_stages=1)`:
as it is, or in a swarm without a cut, or in one of a single stage that is cut (`--how`). A test counts if it passes
with the plain Trainer, too. Refused: it ends in a refusal that `docs/features.md` has.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import lightning_plugin
from benchmarks.report import table, write

_ROOT = Path(__file__).parent.parent
_FOLDERS = [
    "callbacks",
    "checkpointing",
    "core",
    "loggers",
    "loops",
    "models",
    "overrides",
    "plugins",
    "profilers",
    "test_cli.py",
    "trainer",
    "tuner",
    "utilities",
]

# What a refusal says, and the row of the features table that it is.
_REFUSALS = {
    "`automatic_optimization` must be True": "manual optimization",
    "one optimizer, got": "several optimizers",
    "an optimizer with parameters, got none": "no optimizer: `configure_optimizers` returns None",
    "dense gradient, got LBFGS": "`LBFGS`",
    "dense gradient, got SparseAdam": "`SparseAdam`",
    "`optimizer_step` must be Lightning's": "overridden `optimizer_step`",
    "`optimizer_zero_grad` must be Lightning's": "overridden `optimizer_zero_grad`",
    "`configure_gradient_clipping` must be": "overridden `configure_gradient_clipping`",
    "must not read or change weights during fit": "`ModelPruning`",
    "`precision` must be one of": "`precision='16-true'`",
    "`num_nodes` must be 1": "`Trainer(num_nodes=2)`",
}


@dataclass(frozen=True)
class Outcome:
    """What became of a test in a swarm."""

    test: str
    kind: str  # "passed", "refused", "failed" or "timeout"
    swarm: bool  # it ran one
    error: str


def main(words: Sequence[str] | None = None) -> None:
    """Run the tests folder by folder, and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="unpacked sdist or checkout of Lightning, of the installed version")
    parser.add_argument("--folders", nargs="*", default=_FOLDERS, help="folders or files in tests/tests_pytorch")
    parser.add_argument("--every", type=int, default=1, help="run only every n-th file of a folder")
    parser.add_argument("--how", choices=["alone", "whole", "stage"], default="whole", help="the kind of run")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for a test")
    arguments = parser.parse_args(words)
    tests = arguments.source.resolve() / "tests" / "tests_pytorch"
    if not tests.is_dir():
        parser.error(f"there is no {tests}: name an unpacked sdist or a checkout of Lightning")
    os.environ[lightning_plugin.HOW] = arguments.how
    found: dict[str, list[Outcome]] = {}
    for folder in arguments.folders:
        path = tests / folder
        files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        found[folder] = _run_folder(Suite(tests.parent, tuple(files[:: arguments.every]), arguments.timeout))
        write("lightning_suite", _report(found))


def _run_folder(suite: Suite) -> list[Outcome]:
    """Run tests as they are, then those that passed in a swarm."""
    passed = [test for test, record in suite.run().items() if record["outcome"] == "passed"]
    outcomes: list[Outcome] = []
    while len(outcomes) < len(passed):
        left = passed[len(outcomes) :]
        records = suite.run(left)
        done = list(itertools.takewhile(records.__contains__, left))
        outcomes += [_outcome(test, records[test]) for test in done]
        if len(done) < len(left):  # its process ended or hung in the next one
            outcomes.append(Outcome(left[len(done)], "timeout", swarm=True, error="its process came to no end"))
    return outcomes


@dataclass(frozen=True)
class Suite:
    """Files of tests."""

    root: Path  # the folder of Lightning's tests
    files: tuple[Path, ...]
    timeout_s: int  # of a test

    def run(self, selected: Sequence[str] | None = None) -> dict[str, dict[str, object]]:
        """Run all tests as they are, or some in a swarm. Returns each test's first failure, or else its last phase."""
        with tempfile.TemporaryDirectory() as folder:
            records, chosen = Path(folder, "records"), Path(folder, "selected")
            records.touch()
            variables = {lightning_plugin.RECORDS: str(records), "PYTHONPATH": f"{_ROOT}{os.pathsep}{self.root}"}
            variables |= {"TMPDIR": folder, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            if selected is not None:
                chosen.write_text("\n".join(selected))
                variables[lightning_plugin.SELECTED] = str(chosen)
            options = ["-q", "--tb=no", "-p", "benchmarks.lightning_plugin", "-p", "no:cacheprovider", "-p", "no:xdist"]
            options += [f"--timeout={self.timeout_s}", "--timeout-method=signal", "--continue-on-collection-errors"]
            options += ["-c", str(self.root.parent / "pyproject.toml"), f"--rootdir={self.root}"]
            command = [sys.executable, "-m", "pytest", *options, *map(str, self.files)]
            self._wait(command, {**os.environ, **variables}, records)
            return _read(records)

    def _wait(self, command: Sequence[str], environment: Mapping[str, str], records: Path) -> None:
        """Run a command until it ends, or records nothing for too long; what it leaves behind is named and ended."""
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, stdout=subprocess.DEVNULL, stderr=2, start_new_session=True
        )
        size, since_s = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since_s < 3 * self.timeout_s:
            time.sleep(0.5)
            if records.stat().st_size > size:
                size, since_s = records.stat().st_size, time.monotonic()
        ended = process.returncode is not None
        with contextlib.suppress(ProcessLookupError):
            for _ in range(20 if ended else 0):  # what ends with its parent takes a moment
                os.killpg(process.pid, 0)
                time.sleep(0.5)
            os.killpg(process.pid, signal.SIGKILL)
            run = "a swarm" if lightning_plugin.SELECTED in environment else "the tests as they are"
            print(f"{run} {'left processes behind' if ended else 'hung'}: {self.files[0].parent}", flush=True)
        process.wait()


def _read(records: Path) -> dict[str, dict[str, object]]:
    """The tests that came to an end."""
    found: dict[str, dict[str, object]] = {}
    ended = set()
    for record in map(json.loads, records.read_text().splitlines()):
        found.setdefault(record["test"], record)
        if found[record["test"]]["outcome"] == "passed":
            found[record["test"]] = record
        if record["phase"] == "teardown":
            ended.add(record["test"])
    return {test: record for test, record in found.items() if test in ended}


def _outcome(test: str, record: Mapping[str, object]) -> Outcome:
    error, swarm = str(record["error"] or ""), bool(record["swarm"])
    refusals = record["refusals"]
    assert isinstance(refusals, list)
    if record["outcome"] == "passed":
        kind = "passed"
    elif any(_is_documented(text) for text in refusals):
        kind = "refused"
    else:
        kind = "timeout" if error.startswith("Failed: Timeout") else "failed"
    return Outcome(test, kind, swarm, error or f"{record['outcome']} in {record['phase']}")


def _is_documented(text: str) -> bool:
    """True if the features table has a refusal."""
    rows = (_ROOT / "docs" / "features.md").read_text()
    return any(
        said in text and re.search(rf"\| {re.escape(row)}[^|]*\| refused", rows) for said, row in _REFUSALS.items()
    )


def _report(found: Mapping[str, Sequence[Outcome]]) -> str:
    kinds = ("passed", "refused", "failed", "timeout")
    rows: list[list[object]] = [["folder", "pass plainly", *kinds, "ran a swarm", "of these, passed or refused"]]
    for name, outcomes in (*found.items(), ("all", [outcome for of in found.values() for outcome in of])):
        counts = Counter(outcome.kind for outcome in outcomes)
        swarms = [outcome for outcome in outcomes if outcome.swarm]
        good = sum(outcome.kind in ("passed", "refused") for outcome in swarms)
        share = f"{good / len(swarms):.1%}" if swarms else "-"
        rows.append([name, len(outcomes), *(counts[kind] for kind in kinds), len(swarms), share])
    title = "Lightning's own tests with SwarmStrategy(num_stages=1) where they name no strategy"
    bad = [outcome for of in found.values() for outcome in of if outcome.kind in ("failed", "timeout")]
    lines = [f"{outcome.kind} {outcome.test}\n    {' '.join(outcome.error.split())[:200]}" for outcome in bad]
    return "\n".join([table(title, rows), "", *lines])


if __name__ == "__main__":
    main()
