"""Malicious servers and a kill among eight real processes: the weights equal the plain Trainer's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_swarm.coordinator.audit.policy import PROBATION
from tests.p2p import audited

# Cold starts in this file: 24, in thorough runs alone.

SCRIPT = Path(audited.__file__)
MOST_S = 600.0


@pytest.mark.thorough
@pytest.mark.timeout(MOST_S + 60.0)
@pytest.mark.parametrize(("seed", "since"), [(1, 3), (2, 3), (3, PROBATION + 6)])
def test_liars_and_a_kill_change_no_weight(seed: int, since: int, tmp_path: Path) -> None:
    """Work of a server that is malicious late counted unaudited, so the run rolls back.

    Otherwise it may roll back, if the malicious servers audited each other.
    """
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(seed), str(since)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MOST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    fired = (tmp_path / "fired").read_text()
    assert f"kill {audited.KILLED}" in fired
    # On a busy machine a malicious server may be dropped before it sends a false value.
    num_liars = sum(f"{liar}: " in fired for liar in audited.LIARS)
    assert num_liars >= 2
    convicted = {line.split()[3] for line in done.stderr.splitlines() if line.startswith("convicted: step")}
    assert len(convicted) == num_liars, done.stderr
    assert since < PROBATION or "went_back: " in done.stderr, done.stderr
    plain = audited.Net(seed)
    L.Trainer(devices=1, **audited.QUIET).fit(plain, audited.loader(seed))
    found = torch.load(tmp_path / "weights.pt")
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=0.0, atol=1e-12)
