"""The command `dashboard`: mistakes are errors before anything is served, and other machines need its token."""

from __future__ import annotations

import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lightning_swarm import cli
from lightning_swarm.core.errors import Unreachable
from lightning_swarm.monitor import survey
from tests.unit.dashboard.example import ADDRESS, peer, report

PEER = ADDRESS.replace("A" * 44, "BTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR")


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # without owners' keys


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "dashboard", PEER, *words])
    return cli.main()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--every", "0"], "`--every` must be a number of seconds from 0.1 on, got 0."),
        (["--timeout", "nan"], "`--timeout` must be a number of seconds from 0.1 on, got nan."),
        (["--port", "70000"], "a free port, got '127.0.0.1' and 70000: "),
        (["--host", "203.0.113.9"], "an address of this machine and a free port, got '203.0.113.9' and 8080: "),
    ],
)
def test_mistakes_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], error: str
) -> None:
    monkeypatch.setattr(survey, "watch_reports", None)  # no peer is asked
    assert command(monkeypatch, *words) == 2
    shown = capsys.readouterr()
    assert error in shown.err
    assert shown.out == ""


def test_a_taken_port_and_a_wrong_address_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert command(monkeypatch, "--port", str(taken.getsockname()[1])) == 2
    assert "Address already in use" in capsys.readouterr().err

    def watch_reports(*_: Any, **__: Any) -> Iterator[Any]:
        raise Unreachable("It cannot be reached.")
        yield

    monkeypatch.setattr(survey, "watch_reports", watch_reports)
    assert command(monkeypatch, "--port", "0") == 1
    shown = capsys.readouterr()
    assert shown.err.endswith("lightning-swarm: error: It cannot be reached.\n")
    assert shown.out == ""


def test_other_machines_need_the_printed_token_and_a_bug_in_a_survey_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    may_end, asked = threading.Event(), dict[str, Any]()

    def watch_reports(address: Any, **options: Any) -> Iterator[Any]:
        asked.update(options, address=str(address))
        yield report([peer(0)])
        assert may_end.wait(60.0)
        raise TypeError("a bug")

    monkeypatch.setattr(survey, "watch_reports", watch_reports)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(command, monkeypatch, "--host", "0.0.0.0", "--port", "0", "--timeout", "7")
        printed = ""
        while "\n" not in printed:
            printed += capsys.readouterr().out
            assert not running.done()
        place, _, token = printed.split()[-1].rpartition("/?token=")
        assert len(token) >= 43
        page = f"http://127.0.0.1:{place.rpartition(':')[2]}/api/state"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(page)
        assert refused.value.code == 401
        refused.value.close()
        with urllib.request.urlopen(
            urllib.request.Request(page, headers={"authorization": f"Bearer {token}"})
        ) as state:
            assert b"tiny-gpt" in state.read()
        may_end.set()
        with pytest.raises(TypeError, match="a bug"):
            running.result()
    assert (asked["address"], asked["every_s"], asked["timeout"]) == (PEER, 0.0, 7.0)
