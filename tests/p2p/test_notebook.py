"""A notebook's process, without a script, serves in another run, trains, and gets errors for unsupported settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from tests.parity.harness import QUIET, quiet_warnings
from tests.parity.models import DigitsMLP, digits, loader

# Cold starts in this file: 1.

CELLS = """
import warnings
import lightning as L
from lightning_swarm import SwarmStrategy
from lightning_swarm.errors import ConfigError
from tests.parity.harness import QUIET
from tests.parity.models import digits, loader, DigitsMLP

warnings.simplefilter("ignore")

class Mine(DigitsMLP):  # defined in no file
    pass

def trainer(devices=1, **options):
    return L.Trainer(**QUIET, devices=devices, max_epochs=1, strategy=SwarmStrategy(num_stages=2, **options))

helping = trainer(initial_peers={address!r})
helping.fit(Mine(), loader(digits()))
print("helped:", helping.state.status.value, helping.training)
alone = trainer()
alone.fit(Mine(), loader(digits()))
print("trained:", alone.global_step)
try:
    trainer(devices=2)
except ConfigError as error:
    print("refused:", error)
print("still here")
"""


class Notebook(Callback):
    """Starts a notebook-like process once training begins, and ends training after that process served for a while."""

    def __init__(self, folder: Path) -> None:
        self.cells = folder / "cells.txt"
        self.process: subprocess.Popen[str] | None = None
        self.joined_at: int | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        address = trainer.strategy.address  # type: ignore[attr-defined]
        self.cells.write_text(CELLS.replace("{address!r}", repr(address)))
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdin is not None
        self.process.stdin.write(f"exec(open({str(self.cells)!r}).read())\n")
        self.process.stdin.flush()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert self.process is not None
        assert self.process.poll() is None, self.process.communicate()[0]
        if self.joined_at is None and trainer.strategy.status().num_servers == 2:  # type: ignore[attr-defined]
            self.joined_at = trainer.global_step
        trainer.should_stop = self.joined_at is not None and trainer.global_step > self.joined_at + 3


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_notebook_outlives_the_run_in_which_it_helped(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    strategy = SwarmStrategy(num_stages=2)
    with quiet_warnings():
        trainer = L.Trainer(**QUIET, devices=1, max_epochs=-1, strategy=strategy, callbacks=[notebook])
        try:
            trainer.fit(DigitsMLP(), loader(digits()))
        finally:
            assert notebook.process is not None
            said = notebook.process.communicate(timeout=200.0)[0]  # closing its input ends the process
    assert "helped: finished False" in said, said
    assert "trained: 7" in said
    assert "refused: in a notebook or at a Python prompt `devices` must be 1" in said
    assert "still here" in said
    assert "SCRIPT.py (SCRIPT.py: a script that builds the same module and calls `fit`)" in said
    assert notebook.process.returncode == 0
