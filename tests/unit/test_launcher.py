"""Which surroundings the launcher can start peers from."""

from __future__ import annotations

import pytest

from lightning_swarm import SwarmStrategy
from lightning_swarm.launcher import SwarmLauncher


@pytest.mark.parametrize(("num_peers", "fits"), [(1, True), (2, False)])
def test_a_notebook_has_no_script_to_run_again_for_a_second_peer(num_peers: int, fits: bool) -> None:
    assert SwarmLauncher(SwarmStrategy(), num_peers).is_interactive_compatible is fits
