"""The model that fits into none of its processes, here a small version on a swarm in one process."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.large import train
from lightning_swarm.model.sharded_format import ShardedCheckpoint
from lightning_swarm.testing import InMemoryStrategy

SMALL = ["--d-model=16", "--num-blocks=6", "--batch-size=6", "--precision=64-true", "--max-steps=3", "--memory-mb=0"]


def run(folder: Path, *arguments: str) -> list[InMemoryStrategy]:
    strategies: list[InMemoryStrategy] = []

    def strategy(**options: Any) -> InMemoryStrategy:
        strategies.append(InMemoryStrategy(**options))
        return strategies[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *SMALL, f"--folder={folder}", *arguments])
        patch.setattr(train, "SwarmStrategy", strategy)
        train.main()
    return strategies


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_it_trains_and_goes_on_in_other_stages_as_the_plain_trainer_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [first] = run(tmp_path / "swarm")
    assert all(parameter.is_meta for parameter in first.lightning_module.parameters())  # type: ignore[union-attr]
    assert ShardedCheckpoint(tmp_path / "swarm/last.ckpt").has_optimizer
    [then] = run(tmp_path / "swarm", "--resume", "--max-steps=6", "--devices=5", "--num-stages=5")
    assert len(then.servers) == 5
    assert run(tmp_path / "plain", "--plain") == run(tmp_path / "plain", "--plain", "--resume", "--max-steps=6") == []
    said = re.findall(r"^step (\d): train_loss (.*), val_loss (.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert [int(step) for step, *_ in said] == [3, 6, 3, 6]
    assert said[:2] == said[2:]
