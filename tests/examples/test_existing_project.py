"""An ordinary Lightning project, before and after the diff that makes it use a swarm."""

import csv
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_swarm
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import quiet_warnings

HERE = Path(__file__).resolve().parents[2] / "examples" / "existing_project"
DIFF = (HERE / "swarm.diff").read_text()
SMALL = [
    "--accelerator=cpu",
    "--precision=64-true",
    "--max-epochs=2",
    "--num-patches=48",
    "--batch-size=8",
    "--num-workers=0",
    "--width=8",
    "--depth=2",
]


class Watched(InMemoryStrategy):
    """Keeps the last instance."""

    last: InMemoryStrategy

    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages=num_stages)
        Watched.last = self


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project. Its imports stay, because jsonargparse imports every LightningModule that ever existed."""
    folder = tmp_path / "project"
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(lightning_swarm, "SwarmStrategy", Watched)
    return folder


def train(project: Path, out: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[dict[str, float]]:
    """Run the project's script; return the rows that its logger wrote."""
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, f"--out={project / out}", *arguments])
    spec = importlib.util.spec_from_file_location("script", project / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with quiet_warnings():
        script.main()
    with (project / out / "logs" / "version_0" / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def apply_diff(project: Path) -> None:
    # Outside of any repository, as with `patch -p1`.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(project.parent)}
    subprocess.run(["git", "apply", "swarm.diff"], cwd=project, env=environment, check=True)


def test_the_diff_has_three_lines_at_most_and_is_the_one_in_the_text() -> None:
    changed = [line for line in DIFF.splitlines() if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 3
    assert DIFF in (HERE / "README.md").read_text()


def test_the_project_as_it_was_knows_of_no_swarm() -> None:
    assert all("swarm" not in path.read_text() for path in HERE.rglob("*.py"))


@pytest.mark.thorough
def test_metrics_are_the_same_with_the_diff(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train(project, "before", monkeypatch)
    apply_diff(project)
    after = train(project, "after", monkeypatch, "--devices=4")
    assert len(Watched.last.servers) == 4
    assert {"train_loss", "val_psnr", "lr-AdamW", "test_psnr"} <= {name for row in before for name in row}
    assert [row.keys() for row in after] == [row.keys() for row in before]
    for ours, theirs in zip(after, before, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    # The noisy patches themselves have 20 dB.
    assert before[-1]["test_psnr"] > 20.5
    assert sorted(path.name for path in (project / "after" / "checkpoints").iterdir()) == [
        path.name for path in sorted((project / "before" / "checkpoints").iterdir())
    ]
