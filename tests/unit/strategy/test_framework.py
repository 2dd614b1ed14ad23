"""Lightning's two import trees: a strategy for each, and an error for mixtures."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

import lightning_swarm
import lightning_swarm.pytorch_lightning
import lightning_swarm.testing.pytorch_lightning
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.strategy.launcher import SwarmLauncher
from tests.parity.harness import QUIET

FRONT_DOORS = {lightning.pytorch: lightning_swarm, pytorch_lightning: lightning_swarm.pytorch_lightning}
BOTH = [
    pytest.param(lightning.pytorch, pytorch_lightning, id="lightning.pytorch's Trainer"),
    pytest.param(pytorch_lightning, lightning.pytorch, id="pytorch_lightning's Trainer"),
]


def module_of(tree: ModuleType) -> Any:
    class Net(tree.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("it was trained")

    return Net()


def data_of(tree: ModuleType) -> Any:
    class Data(tree.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(torch.zeros(4, 2))  # type: ignore[arg-type]

    return Data()


def callback_of(tree: ModuleType) -> Any:
    class Noted(tree.Callback):  # type: ignore[misc, name-defined]
        pass

    return Noted()


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a peer was started")

    monkeypatch.setattr("lightning_swarm.strategy.launcher.hivemind_peer", start)
    monkeypatch.setattr(SwarmLauncher, "_first_module", None)


@pytest.mark.parametrize(("tree", "other"), BOTH)
@pytest.mark.parametrize("form", ["swarm", "class path", "instance"])
def test_each_registry_has_a_real_subclass(tree: ModuleType, other: ModuleType, form: str) -> None:
    door = FRONT_DOORS[tree]
    given = {
        "swarm": "swarm",
        "class path": f"{door.__name__}.SwarmStrategy",
        "instance": door.SwarmStrategy(),
    }[form]
    strategy = tree.Trainer(**QUIET, strategy=given).strategy
    assert type(strategy) is door.SwarmStrategy
    assert tree.strategies.Strategy in type(strategy).__mro__
    assert other.strategies.Strategy not in type(strategy).__mro__
    assert strategy.__doc__.startswith("Trains one model on a swarm of peers")


@pytest.mark.parametrize("name", ["SwarmStrategy", "SwarmView"])
@pytest.mark.parametrize("tree", FRONT_DOORS)
def test_classes_are_found_where_they_say(tree: ModuleType, name: str) -> None:
    derived = getattr(FRONT_DOORS[tree], name)
    assert derived.__qualname__ == name
    assert pickle.loads(pickle.dumps(derived)) is derived


@pytest.mark.parametrize(("tree", "other"), BOTH)
def test_a_strategy_of_the_other_import(tree: ModuleType, other: ModuleType) -> None:
    says = (
        f"SwarmStrategy must come from the Trainer's import of Lightning: it is for `{other.__name__}`, the Trainer is "
        f"from `{tree.__name__}`. Write `from {FRONT_DOORS[tree].__name__} import SwarmStrategy`, or import the "
        f"Trainer from `{other.__name__}`."
    )
    with pytest.raises(ConfigError, match=re.escape(says)):
        tree.Trainer(**QUIET, strategy=FRONT_DOORS[other].SwarmStrategy(num_stages=2))


@pytest.mark.parametrize(("tree", "other"), BOTH)
def test_an_in_memory_strategy_of_the_other_import(tree: ModuleType, other: ModuleType) -> None:
    doors = {lightning.pytorch: lightning_swarm.testing, pytorch_lightning: lightning_swarm.testing.pytorch_lightning}
    with pytest.raises(ConfigError, match=f"it is for `{other.__name__}`, the Trainer is from `{tree.__name__}`"):
        tree.Trainer(**QUIET, strategy=doors[other].InMemoryStrategy())


def fit(tree: ModuleType, **given: Any) -> Callable[[], Any]:
    callbacks = [given.pop("callback")] if "callback" in given else []
    return lambda: tree.Trainer(**QUIET, strategy="swarm", callbacks=callbacks).fit(**given)


@pytest.mark.parametrize(("tree", "other"), BOTH)
def test_what_else_may_come_from_the_other_import(tree: ModuleType, other: ModuleType) -> None:
    def assert_refused(kind: str, name: str, error: Any, call: Callable[[], Any]) -> None:
        says = (
            f"a {kind} must come from the Trainer's import of Lightning: {name} is from `{other.__name__}`, the "
            f"Trainer from `{tree.__name__}`. Change the import of {kind} to `{tree.__name__}`."
        )
        with pytest.raises(error, match=re.escape(says)):
            call()

    module, data = module_of(tree), data_of(tree)
    assert_refused("LightningModule", "Net", TypeError, fit(tree, model=module_of(other), datamodule=data))
    for name in ("datamodule", "train_dataloaders"):
        given = fit(tree, model=module, **{name: data_of(other)})
        assert_refused("LightningDataModule", "Data", ConfigError, given)
    given = fit(tree, model=module, datamodule=data, callback=callback_of(other))
    # Lightning 2.5 asks every callback for its state, which raises a TypeError with the same words.
    assert_refused("Callback", "Noted", (ConfigError, TypeError), given)


@pytest.mark.parametrize(("tree", "other"), BOTH)
def test_messages_are_logged_in_the_name_of_the_trainers_tree(
    tree: ModuleType, other: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    FRONT_DOORS[other].SwarmStrategy()
    caplog.set_level("INFO")
    tree.Trainer(**QUIET, strategy=FRONT_DOORS[tree].SwarmStrategy())
    said = [record.name for record in caplog.records if record.message.startswith("GPU available")]
    assert said == [f"{tree.__name__}.utilities.rank_zero"]


@pytest.mark.thorough
def test_importing_a_swarm_leaves_messages_in_the_name_of_the_scripts_tree() -> None:
    script = (
        "import logging, lightning.pytorch as L, lightning_swarm; logging.basicConfig(format='%(name)s'); "
        "logging.getLogger('lightning.pytorch').propagate = True; L.Trainer(accelerator='cpu', logger=False)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = {line for line in done.stderr.splitlines() if line.endswith(".utilities.rank_zero")}
    assert names == {"lightning.pytorch.utilities.rank_zero"}
