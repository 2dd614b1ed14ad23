"""The example for volunteers, who each train the whole model, here with one peer on a real network."""

import sys
from pathlib import Path

import pytest

from examples.volunteers import train


def test_it_begins_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--max-steps=3", "--d-model=16"])
    monkeypatch.setattr(train, "SAMPLES_OF_A_STEP", 64)
    train.main()
    assert "lightning-swarm join 127.0.0.1:" in caplog.text
    assert "3 steps, loss" in capsys.readouterr().out
