"""Modules keep their import names for users, wherever they are in the package."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys

import pytest

import lightning_swarm

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

# A user's warning filter for Lightning's class works as without this package.
_DEPRECATION = """
import lightning.pytorch
from lightning.fabric.utilities.rank_zero import LightningDeprecationWarning, rank_zero_deprecation
import lightning_swarm
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rank_zero_deprecation("old")
assert issubclass(caught[0].category, LightningDeprecationWarning), caught[0].category
assert "lightning_swarm.strategy.strategy" not in sys.modules
"""

# A Trainer imports the strategy by its name. Classes that a command line may name alone are imported with it.
_BY_NAME = """
strategy = lightning.pytorch.Trainer(strategy="swarm", accelerator="cpu", logger=False).strategy
assert type(strategy) is lightning_swarm.SwarmStrategy
assert "lightning.pytorch.cli" in sys.modules
assert "lightning_swarm.strategy.attach" in sys.modules
"""


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Return the paths that a fresh process can import, each as the first import of the package."""
    # Only the path with `pytorch_lightning` imports that tree, as it changes Lightning's logs and its warnings' class.
    program = f"import sys, warnings\n{_DEPRECATION}" + "\n".join(
        f"assert ('pytorch_lightning' in sys.modules) == {path > 'lightning_swarm.pytorch_lightning'}\n"
        f"from {path} import {name}; import {path}; assert {path}.{name} is {name}; print('{path}')"
        for path, name in PATHS.items()
    )
    program += _BY_NAME
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200.0, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.first_cells(4)
@pytest.mark.parametrize("path", PATHS)
def test_a_public_path_imports(path: str, imported: set[str]) -> None:
    assert path in imported


def test_type_checkers_are_shown_the_names_that_there_are() -> None:
    shown: dict[str, object] = {}
    (branch,) = [node for node in ast.parse(inspect.getsource(lightning_swarm)).body if isinstance(node, ast.If)]
    exec(compile(ast.Module(branch.body, []), "shown", "exec"), shown)
    names = {name for name in dir(lightning_swarm) if not name.startswith("_")}
    own = {"TYPE_CHECKING", "alias_modules", "import_after", "lazy_attributes"}
    submodules = {name for name in names if f"lightning_swarm.{name}" in sys.modules} - set(lightning_swarm._PATHS)
    assert {name for name in shown if name != "__builtins__"} - {
        "boundary_layers",
        "random",
    } == names - own - submodules
    for name in lightning_swarm._PATHS:
        assert getattr(lightning_swarm, name) is shown[name]
    assert set(lightning_swarm.__all__) <= {*shown, "__version__"}


@pytest.mark.parametrize("name", ["Limits", "SwarmStrategy", "SwarmView"])
def test_a_public_class_is_pickled_by_name(name: str) -> None:
    found = getattr(lightning_swarm, name)
    assert pickle.loads(pickle.dumps(found)) is found


def test_another_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_swarm' has no attribute 'Strategy'"):
        lightning_swarm.Strategy  # noqa: B018 - what is tested
