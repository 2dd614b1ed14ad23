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


@pytest.mark.parametrize("group", ["/docker/abc", "/"])
@pytest.mark.parametrize("own", [5000, 2**63 - 4096])  # without a limit of its own, that of a group above counts
def test_a_container_of_the_first_version(group: str, own: int, tmp_path: Path) -> None:
    def write(folder: str, limit_bytes: int) -> None:
        path = tmp_path / "memory" / folder
        path.mkdir(parents=True, exist_ok=True)
        (path / "memory.limit_in_bytes").write_text(f"{limit_bytes}\n")
        (path / "memory.usage_in_bytes").write_text("3000\n")
        (path / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 600\n")

    listed = tmp_path / "cgroup"
    listed.write_text(f"12:cpu,cpuacct:/other\n4:memory:{group}\n1:name=systemd:/x:y\n0::/\n")
    write("", 9000)
    write(group.strip("/"), own)
    left = min(own, 9000 if group != "/" else own) - 3000 + 600
    assert min(memory._left_in_groups(tmp_path, listed)) == left
    assert min(memory._left_in_groups(tmp_path / "none", listed), default=None) is None


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
