"""Trainers whose runs have no audits do not load the code of audits."""

from __future__ import annotations

import subprocess
import sys


def test_a_peer_is_loaded_without_the_trainers_part_of_audits() -> None:
    program = "import sys, lightning_swarm.peer.peer; print([one for one in sys.modules if 'client.audit' in one])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
