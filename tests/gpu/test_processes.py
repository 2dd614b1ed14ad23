"""Peers in real processes, all on one GPU; one of them dies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lightning_swarm.testing import SharedGPU
from tests.p2p import train
from tests.p2p.processes import Run
from tests.parity.harness import LOSS_TOLERANCE, WEIGHT_TOLERANCE, run_plain

STEPS = 16
KILLED_AT = 5


@pytest.mark.parametrize("kill", [False, True])
def test_peers_in_processes_train_as_one(kill: bool, tmp_path: Path) -> None:
    options: list[object] = ["--devices", 4, "--max-steps", STEPS, "--microbatch-size", 3, "--gpu"]
    run = Run("digits", tmp_path, *options, *(["--kill-at", KILLED_AT] if kill else []))
    try:
        assert run.wait(240.0) == 0, "".join(run.output)[-6000:]
        assert not run.survivors()
    finally:
        run.end()
    assert (tmp_path / "fired").exists() == kill
    found = json.loads((tmp_path / "result.json").read_text())
    data = train.make("digits")[1]
    plain = run_plain(lambda: train.make("digits")[0], data, max_steps=STEPS, accelerator=SharedGPU())
    assert found["losses"] == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True, map_location="cpu")
    for name, tensor in plain.weights.items():
        assert float((weights[name] - tensor).abs().max()) <= WEIGHT_TOLERANCE
