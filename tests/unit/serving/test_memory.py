"""The memory that a server takes, and weights that do not fit."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.serving import memory

CPU = torch.device("cpu")


def limit(folder: Path, limit_bytes: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit_bytes}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_a_container_may_have_less_than_its_machine(tmp_path: Path) -> None:
    free = memory.free_bytes(CPU, groups=tmp_path)
    assert 0 < free <= psutil.virtual_memory().total
    limit(tmp_path, "max", 900, 100)
    assert memory.free_bytes(CPU, groups=tmp_path) > 1000
    limit(tmp_path, "1000", 900, 100)  # the page cache counts as used there
    assert memory.free_bytes(CPU, groups=tmp_path) == 200
    limit(tmp_path, "1000", 1200, 100)
    assert memory.free_bytes(CPU, groups=tmp_path) == 0


def test_free_memory_is_divided_and_the_choice_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 10_000_000_000)
    said: list[str] = []
    assert memory.shares(None, None, CPU, said.append) == (6_000_000_000, 2_000_000_000)
    assert said[0].startswith(
        "Taking 8.0 GB of memory, of which 2.0 GB for texts: 10.0 GB are free on cpu, and a fifth"
    )
    assert memory.shares(None, 1_000_000_000, CPU, said.append) == (7_000_000_000, 1_000_000_000)
    assert memory.shares(4_000, None, CPU, said.append) == (3_000, 1_000)
    assert len(said) == 2  # a number of the user's needs no explanation
    for texts in (4_000, 0):
        with pytest.raises(ConfigError, match=r"for weights and texts, got 4.0 kB with .* for texts. Lower `--texts`"):
            memory.shares(4_000, texts, CPU, said.append)
