"""The callback `Dashboard`: its port is checked before training, and only the lead opens one page for one fit."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest

from lightning_swarm import Dashboard
from lightning_swarm.core import extras
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.peer.peer import Peer
from lightning_swarm.strategy import dashboard
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, digits, loader
from tests.parity.standbys import Swarm
from tests.parity.test_rollback import Fit, Killing


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the page's process by one that waits; return the commands."""
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def record(command: list[str], *, pass_fds: Sequence[int] = (), **options: Any) -> Any:
        if "dashboard" not in command:
            return popen(command, pass_fds=pass_fds, **options)
        commands.append(command)
        assert [str(number) for number in pass_fds] == [command[command.index("--fd") + 1]]
        return popen([sys.executable, "-c", "import time; time.sleep(600)"], **options)

    monkeypatch.setattr(dashboard.subprocess, "Popen", record)
    monkeypatch.setattr(Peer, "address", property(lambda peer: f"127.0.0.1:1/{peer.transport.peer_id}"))
    return commands


def fit(callback: L.Callback, **options: Any) -> Any:
    strategy = InMemoryStrategy(num_stages=2, run_id="night")
    trainer = L.Trainer(
        **{**QUIET, "max_steps": 2, "devices": 2, "strategy": strategy, **options}, callbacks=[callback]
    )
    trainer.fit(DigitsMLP(), loader(digits()))
    return trainer


@pytest.mark.parametrize("port", [-1, 1 << 16, True, "8080", 1.0])
def test_a_wrong_port_is_an_error(port: Any) -> None:
    with pytest.raises(ConfigError, match="`port` of `Dashboard` must be a whole number from 0 to 65535, got "):
        Dashboard(port)


def test_a_port_in_use_and_missing_packages_are_errors_before_training(
    monkeypatch: pytest.MonkeyPatch, opened: list[list[str]]
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(DigitsMLP, "training_step", lambda *_: steps.append(1))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"must be a free port of this machine, got {port}: .* or 0 for any"):
            fit(Dashboard(port))
    monkeypatch.setitem(extras.PACKAGES, "dashboard", ("sys", "no_such_package"))
    with pytest.raises(
        ConfigError, match=r"needs no_such_package. Leave it out, or run: pip install .lightning-swarm\[dashboard\]"
    ):
        fit(Dashboard(0))
    assert steps == []
    assert opened == []


def test_a_fit_opens_one_page_and_ends_it(opened: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    pages: list[Any] = []

    class Looking(Dashboard):
        def on_train_start(self, *_: Any) -> None:
            pages.append(self._page)

    callback = Looking(0)
    fit(callback)
    (command,) = opened
    assert command[:4] == [sys.executable, "-m", "lightning_swarm", "dashboard"]
    assert command[command.index("--run-id") + 1] == "night"
    assert caplog.text.count("Dashboard of this run: http://127.0.0.1:") == 1
    assert pages[0].returncode is not None
    assert callback._page is None
    fit(callback)  # again
    assert len(opened) == 2


def test_without_a_swarm_a_warning_says_so(opened: list[list[str]], caplog: pytest.LogCaptureFixture) -> None:
    fit(Dashboard(0), strategy="auto", devices=1)
    assert opened == []
    assert "no SwarmStrategy" in caplog.text


def test_a_rollback_keeps_the_page(opened: list[list[str]]) -> None:
    killing = Killing([5], [[1]])
    fitted = Fit(killing, callbacks=[Dashboard(0)])
    assert (killing.num_killed, fitted.num_went_back) == (1, 1)
    assert len(opened) == 1


@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "taken"])
def test_the_next_lead_opens_its_own_page_or_goes_on_without_one(
    opened: list[list[str]], caplog: pytest.LogCaptureFixture, is_taken: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if is_taken else 0
        callbacks = {"lead": Dashboard(0), "standby-0": Dashboard(port), "server-0": Dashboard(0)}
        swarm = Swarm(1, 1, DigitsMLP, {5: "lead"}, lambda name: [callbacks[name]], options={"max_steps": 10})
        try:
            swarm.fit()
        finally:
            for callback in callbacks.values():
                callback.close()
    assert swarm.leads == ["lead", "standby-0"]
    assert [command[4].partition("/")[2] for command in opened] == ["lead", "standby-0"][: 1 if is_taken else 2]
    assert ("The run continues without a page: `port` of `Dashboard` must be" in caplog.text) == is_taken
