"""The byte-level GPT from its file, by the command, on a swarm in this process and without a swarm."""

import csv
import sys
from pathlib import Path

import pytest

from lightning_swarm import cli
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import quiet_warnings

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "bytes" / "run.yaml"
SMALL = [
    "--trainer.precision=64-true",
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_model_summary=false",
    "--model.d_model=16",
    "--model.num_blocks=2",
    "--model.warmup_steps=2",
    "--data.context=16",
    "--data.batch_size=6",
    "--data.max_bytes=20000",
]


class Watched(InMemoryStrategy):
    """Keeps the last instance."""

    last: InMemoryStrategy

    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages=num_stages)
        Watched.last = self


def fit(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> list[dict[str, float]]:
    """Run the command; return the rows that its logger wrote."""
    arguments = ["fit", f"--config={CONFIG}", *SMALL, f"--trainer.logger.init_args.save_dir={out}", *options]
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", *arguments])
    with quiet_warnings():
        assert cli.main() == 0
    assert {"config.yaml", "checkpoints"} <= {path.name for path in (out / "version_0").iterdir()}
    with (out / "version_0" / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.fixture(autouse=True)
def _take_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.thorough
def test_one_file_trains_the_same_with_and_without_a_swarm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    swarm = fit(monkeypatch, tmp_path / "swarm", f"--trainer.strategy.class_path={__name__}.Watched")
    assert len(Watched.last.servers) == 4
    assert Watched.last.config.num_stages == 2
    plain = fit(monkeypatch, tmp_path / "plain", "--trainer.strategy", "auto", "--trainer.devices", "1")
    assert len(plain) == 4 + 2
    assert {"train_loss", "val_loss"} <= {name for row in plain for name in row}
    for ours, theirs in zip(swarm, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_the_file_asks_for_the_real_swarm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "fit", f"--config={CONFIG}", "--print_config"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert "class_path: lightning_swarm.SwarmStrategy\n" in capsys.readouterr().out


def test_what_the_file_leaves_commented_can_be_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = CONFIG.read_text().splitlines()
    settings = [
        line.replace("# ", "", 1) for line in lines if line.lstrip().startswith(("# micro", "# target", "# split"))
    ]
    assert len(settings) == 3
    file = tmp_path / "run.yaml"
    at = lines.index("      num_stages: 2")
    file.write_text("\n".join([*lines[:at], *settings, *lines[at:]]))
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "fit", f"--config={file}", "--print_config"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    said = capsys.readouterr().out
    assert "microbatch_size: 8" in said
    assert "target_batch_size: 128" in said
    assert "split:\n      - '0'\n      - '3'" in said
