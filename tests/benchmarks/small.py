"""Small runs of benchmarks: `main` with command line arguments, and with smaller constants of its module."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Small(NamedTuple):
    """A small run: the command line, and values for constants of the benchmark's module."""

    words: str = ""
    constants: Mapping[str, Any] = {}


def run(name: str, small: Small, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a benchmark small, and return its output; each row of its tables has numbers."""
    module = importlib.import_module(f"benchmarks.{name}")
    for constant, value in small.constants.items():
        assert hasattr(module, constant), f"{name} has no {constant}"
        monkeypatch.setattr(module, constant, value)
    module.main(shlex.split(small.words))
    written = "\n".join(path.read_text() for path in sorted((folder / "runs" / "bench").glob("*.txt")))
    assert sum(any(letter.isdigit() for letter in line) for line in written.splitlines()[1:]) > 0, written
    return written
