"""A run without audits imports no code that audits, and an audited run plugs it in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import lightning_swarm

PROGRAM = """
import json, sys
import torch
from lightning import LightningModule
from torch.utils.data import DataLoader, TensorDataset
from lightning_swarm.testing import local_swarm


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

    def training_step(self, batch):
        return self.blocks(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


with local_swarm(3, num_stages=2, microbatch_size=2, **json.loads(sys.argv[1])) as swarm:
    trainer = swarm.trainer(max_steps=2)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.rand(16, 4)), 4))
print(trainer.global_step)
print(json.dumps(sorted(name for name in sys.modules if name.startswith("lightning_swarm."))))
"""


def imported(**settings: Any) -> set[str]:
    """Return the package's modules that a small swarm imports in a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=200.0,
        check=True,
        env={"PYTHONPATH": str(Path(lightning_swarm.__file__).parents[1])},
    )
    num_steps, modules = run.stdout.splitlines()[-2:]
    assert num_steps == "2"
    return set(json.loads(modules))


def auditing(modules: set[str], side: str) -> list[str]:
    """Return a side's modules in folders, or files, of audits."""
    names = [name.split(".") for name in sorted(modules)]
    return [".".join(name) for name in names if name[1] == side and {"audit", "audits"} & {*name[2:]}]


@pytest.fixture(scope="module")
def unaudited() -> set[str]:
    return imported()


SIDES = ["coordinator", "server", "client"]


@pytest.mark.parametrize("side", SIDES)
def test_a_run_without_audits_imports_no_code_of_theirs(unaudited: set[str], side: str) -> None:
    assert {"lightning_swarm.coordinator.commit", "lightning_swarm.peer.peer"} <= unaudited  # a list of modules
    assert auditing(unaudited, side) == []


def test_an_audited_run_imports_it() -> None:
    modules = imported(trust={"level": "audited", "audit_share": 1.0})
    for side in ("coordinator", "server", "client"):
        assert auditing(modules, side), side
