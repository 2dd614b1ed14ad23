"""The log messages of the package that a process shows."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_swarm import cli
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.process import LOG, follow_environment

LOGGER = logging.getLogger("lightning_swarm")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG, "")


@contextmanager
def as_in_a_script(*handlers: logging.Handler) -> Iterator[None]:
    """Run as in a script, without the handlers that pytest gives each test."""
    root = logging.getLogger()
    before = root.handlers, LOGGER.handlers, LOGGER.level, LOGGER.propagate
    root.handlers, LOGGER.handlers, LOGGER.propagate = list(handlers), [], True
    try:
        yield
    finally:
        root.handlers, LOGGER.handlers, level, LOGGER.propagate = before
        LOGGER.setLevel(level)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Log on three levels; return the printed messages."""
    log = logging.getLogger("lightning_swarm.somewhere")
    log.debug("small")
    log.info("of interest")
    log.warning("important")
    return [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]


def test_warnings_are_said_where_nobody_configures_anything(capsys: pytest.CaptureFixture[str]) -> None:
    with as_in_a_script():
        follow_environment()
        assert said(capsys) == ["important"]


def test_the_environment_may_ask_for_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(LOG, "debug")
    with as_in_a_script():
        follow_environment()
        follow_environment()
        assert said(capsys) == ["small", "of interest", "important"]


def test_where_logs_go_is_the_scripts_to_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOG, "info")
    out = io.StringIO()
    with as_in_a_script(logging.StreamHandler(out)):
        follow_environment()
        assert said(capsys) == []
    assert out.getvalue().splitlines() == ["of interest", "important"]


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG, "loud")
    with pytest.raises(ConfigError, match="SWARM_LOG must be one of debug, info, warning, error, got 'loud'"):
        follow_environment()


@pytest.mark.parametrize(("option", "lines"), [("-v", 2), ("--verbose", 2), ("-vv", 3)])
def test_a_command_says_more_if_it_is_told_to(
    option: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", option, "--version"])
    with as_in_a_script():
        with pytest.raises(SystemExit):
            cli.main()
        assert "lightning-swarm" in capsys.readouterr().out
        assert len(said(capsys)) == lines
