"""Which surroundings the launcher can start peers from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from lightning_swarm import SwarmStrategy, launcher
from lightning_swarm.errors import ConfigError
from lightning_swarm.launcher import SwarmLauncher


@pytest.mark.parametrize(("num_peers", "fits"), [(1, True), (2, False)])
def test_a_notebook_has_no_script_to_run_again_for_a_second_peer(num_peers: int, fits: bool) -> None:
    assert SwarmLauncher(SwarmStrategy(), num_peers).is_interactive_compatible is fits


def test_peers_that_would_build_another_module_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(SwarmLauncher, "_first_module", None)
    monkeypatch.setattr(SwarmLauncher, "_start_children", lambda self, _: started.append(self._num_peers))
    monkeypatch.setattr(launcher, "_command", list)
    monkeypatch.setattr(launcher, "hivemind_peer", lambda *_: None)

    def launch(module: L.LightningModule, num_peers: int) -> None:
        strategy: Any = SimpleNamespace(config=None, peer=None, check=lambda _: None)
        trainer: Any = SimpleNamespace(lightning_module=module)
        SwarmLauncher(strategy, num_peers).launch(lambda: None, trainer=trainer)

    first, second = L.LightningModule(), L.LightningModule()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # leaves torch's threads alone
    launch(first, 2)
    launch(first, 2)
    launch(second, 1)
    with pytest.raises(ConfigError, match=r"module of the script's first `fit`; this LightningModule is another one"):
        launch(second, 2)
    assert started == [2, 2, 1]
