"""Every benchmark runs in a temporary folder, for its tables and pictures, and leaves this process unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loggers_as_before: None) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    num_threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(num_threads)
