"""A pytest plugin for Lightning's own tests: gives a Trainer that names no strategy a swarm, and records outcomes.

`benchmarks.lightning_suite` loads it, and sets its two variables of the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from torch import nn

RECORDS = "SWARM_LIGHTNING_RECORDS"
"""Variable: the file to write to, one JSON object a line."""

SELECTED = "SWARM_LIGHTNING_SELECTED"
"""Variable: a file with the tests to run in a swarm, one a line. Not set: run all, as they are."""

HOW = "SWARM_LIGHTNING_HOW"
"""Variable: "alone", as on one device by default; "whole", a swarm without a cut; or "stage", one that is cut."""

_began = False  # the test in hand ran a swarm


# Lightning's tests name no strategy, and Lightning chooses its default in a private method. The package has no setting
# for a swarm of one process by default, and none to cut a model without a list of blocks.
def _choose_swarm() -> None:
    """Have Trainers choose a swarm where they would choose one CPU device."""
    # A run of the tests as they are must not import it.
    from lightning_swarm import SwarmStrategy
    from lightning_swarm.core.errors import ConfigError
    from lightning_swarm.model import partition
    from lightning_swarm.model.partition import Blocks
    from lightning_swarm.peer.config import SwarmConfig
    from lightning_swarm.strategy.launcher import SwarmLauncher

    choose, launch = _AcceleratorConnector._choose_strategy, SwarmLauncher.launch

    def choose_swarm(self: Any) -> Any:
        chosen = choose(self)
        on_cpu = isinstance(chosen, SingleDeviceStrategy) and chosen.root_device.type == "cpu"
        return SwarmStrategy(num_stages=1) if on_cpu else chosen

    def launch_noted(*args: Any, **kwargs: Any) -> Any:
        global _began  # noqa: PLW0603
        _began = True
        return launch(*args, **kwargs)

    find = partition.find_blocks

    def find_some(model: nn.Module, pipeline: str | None) -> Blocks:
        try:
            return find(model, pipeline)
        except ConfigError:  # Lightning's tests have a layer where users have a list of them
            layer = next((item for item in model.named_children() if list(item[1].parameters())), None)
            if layer is None:
                raise
            return Blocks(nn.ModuleList([layer[1]]), "", (layer[0],), (layer[1],))

    def can_always(model: nn.Module) -> bool:
        return True

    if os.environ[HOW] != "alone":
        SwarmConfig.needs_no_swarm = lambda *_: False  # type: ignore[method-assign]
    if os.environ[HOW] == "stage":
        partition.find_blocks, partition.can_be_cut = find_some, can_always  # as `strategy.model_setup` calls them
    _AcceleratorConnector._choose_strategy = choose_swarm  # type: ignore[method-assign]
    SwarmLauncher.launch = launch_noted  # type: ignore[method-assign]


def pytest_configure() -> None:
    """Choose a swarm before any test is imported, if tests are selected for it."""
    if SELECTED in os.environ:
        _choose_swarm()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests that are selected."""
    if SELECTED in os.environ:
        selected = set(Path(os.environ[SELECTED]).read_text().splitlines())
        items[:] = [item for item in items if item.nodeid in selected]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record each phase of a test."""
    global _began  # noqa: PLW0603
    report = yield
    error = call.excinfo.value if call.excinfo is not None and report.failed else None
    record = {
        "test": item.nodeid,
        "phase": report.when,
        "outcome": report.outcome,
        "swarm": _began,
        "error": None if error is None else f"{type(error).__name__}: {error}"[:2000],
        "refusals": _refusals(error),
    }
    _write(record)
    if report.when == "teardown":
        _began = False
    return report


def _write(record: dict[str, Any]) -> None:
    with Path(os.environ[RECORDS]).open("a") as file:
        file.write(json.dumps(record) + "\n")


def _refusals(error: BaseException | None) -> list[str]:
    """The text of each ConfigError among an error and those behind it."""
    found = []
    while error is not None:
        if any(kind.__name__ == "ConfigError" for kind in type(error).__mro__):
            found.append(str(error))
        error = error.__cause__ or error.__context__
    return found
