"""Modules keep the names by which users import them, wherever they stand in the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

PATHS = {
    "lightning_swarm.boundary": "Bottleneck",
    "lightning_swarm.cli": "SwarmCLI",
    "lightning_swarm.config": "Compression",
    "lightning_swarm.errors": "ConfigError",
    "lightning_swarm.events": "Event",
    "lightning_swarm.nn": "Sequential",
    "lightning_swarm.preemption": "watch",
    "lightning_swarm.pytorch_lightning": "SwarmStrategy",
    "lightning_swarm.randomness": "checkpoint_contexts",
    "lightning_swarm.status": "SwarmStatus",
    "lightning_swarm.strategy": "SwarmStrategy",
    "lightning_swarm.testing": "local_swarm",
    "lightning_swarm.view": "SwarmView",
}

# A filter of a user's script on Lightning's class finds what it finds without this package.
_DEPRECATION = """
import lightning.pytorch
from lightning.fabric.utilities.rank_zero import LightningDeprecationWarning, rank_zero_deprecation
import lightning_swarm
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rank_zero_deprecation("old")
assert issubclass(caught[0].category, LightningDeprecationWarning), caught[0].category
"""


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """What a fresh process imports by each path alone, before anything else of the package."""
    # Where only `pytorch_lightning` is said, it is imported: that changes what Lightning logs, and its warnings' class.
    program = f"import sys, warnings\n{_DEPRECATION}" + "\n".join(
        f"assert ('pytorch_lightning' in sys.modules) == {path > 'lightning_swarm.pytorch_lightning'}\n"
        f"from {path} import {name}; import {path}; assert {path}.{name} is {name}; print('{path}')"
        for path, name in PATHS.items()
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200.0, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.parametrize("path", PATHS)
def test_a_public_path_imports(path: str, imported: set[str]) -> None:
    assert path in imported
