"""A notebook's process, without a script, serves in another run, trains, and gets errors for unsupported settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import TensorDataset
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.network.access import Role
from lightning_swarm.peer.process import owners_folder
from lightning_swarm.trust.invitation_text import to_text
from lightning_swarm.trust.owner import Owner, owner_file
from tests.docs.pages import ROOT, shown
from tests.parity.harness import QUIET, quiet_warnings
from tests.parity.models import DigitsMLP, digits, loader

# Cold starts in this file: 3.

CELLS = """
import warnings
import lightning as L
from lightning_swarm import SwarmStrategy
from lightning_swarm.network.access import Role
from lightning_swarm.peer.process import owners_folder
from lightning_swarm.trust.invitation_text import to_text
from lightning_swarm.trust.owner import Owner, owner_file
from tests.docs.pages import ROOT, shown
from lightning_swarm.errors import ConfigError
from tests.parity.harness import QUIET
from tests.parity.models import digits, loader, DigitsMLP

warnings.simplefilter("ignore")

class Mine(DigitsMLP):  # defined in no file
    pass

def trainer(devices=1, **options):
    return L.Trainer(**QUIET, devices=devices, max_epochs=1, strategy=SwarmStrategy(num_stages=2, **options))

helping = trainer(initial_peers="{address}")
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

    def __init__(self, folder: Path, cells: Sequence[str]) -> None:
        self.folder, self.cells = folder, cells
        self.process: subprocess.Popen[str] | None = None
        self.joined_at: int | None = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        address = trainer.strategy.address  # type: ignore[attr-defined]
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-q"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdin is not None
        for number, text in enumerate(self.cells):
            cell = self.folder / f"cell{number}.txt"
            cell.write_text(text.replace("{address}", address))
            self.process.stdin.write(f"exec(open({str(cell)!r}).read())\n")
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
    notebook = Notebook(tmp_path, [CELLS])
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


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_example_joins_by_its_invitation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells as they are, but for the address and the file: they install nothing, and the peer computes."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    owner = Owner.load("swarm", owner_file(owners_folder(), "swarm"))
    invitation = tmp_path / "swarm.invite"
    invitation.write_text(to_text(owner.invite(Role.SERVER, uses=1, expires_at_s=time.time() + 3600.0, stay_s=3600)))
    cells = json.loads((ROOT / "examples/notebook/join.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert '"203.0.113.7:31337/12D3KooW..."' in texts[0]
    assert '"swarm.invite"' in texts[0]
    texts[0] = texts[0].replace("203.0.113.7:31337/12D3KooW...", "{address}").replace("swarm.invite", str(invitation))
    notebook = Notebook(tmp_path, [*texts, "print('still here:', importlib.util.find_spec('pip') and strategy.peer)"])
    names: dict[str, Any] = {"__name__": "train"}
    exec(shown("docs/quickstart.md")["train.py"], names)
    x = torch.linspace(-3, 3, 6400).unsqueeze(1)
    data = loader(TensorDataset(x, x.sin()))
    with quiet_warnings():
        strategy = SwarmStrategy(num_stages=2, trust="invited")
        options = {**QUIET, "precision": "32-true"}
        trainer = L.Trainer(**options, devices=1, max_epochs=-1, strategy=strategy, callbacks=[notebook])
        try:
            trainer.fit(names["Sine"](), data)
        finally:
            assert notebook.process is not None
            said = notebook.process.communicate(timeout=200.0)[0]
    assert re.search(r"\w+, \d+ cores, \d+\.\d GB of free memory, \d+ GFLOP/s in float32", said), said
    assert "This machine can be a peer." in said, said
    assert "WRONG" not in said
    assert "Asking for a run by this peer's certificate as server." in said
    assert re.search(r"In run 'swarm' from step \d+ on, with stage \d", said), said
    assert "still here: None" in said, said
    assert notebook.process.returncode == 0
