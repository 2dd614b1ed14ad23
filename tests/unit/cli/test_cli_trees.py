"""The command line with models of either of Lightning's import trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch
import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_swarm.pytorch_lightning
from lightning_swarm.cli.programs import choose_framework
from lightning_swarm.cli.pytorch_lightning import SwarmCLI
from lightning_swarm.strategy.framework import LIGHTNING, PYTORCH_LIGHTNING, ImportTree
from lightning_swarm.testing.pytorch_lightning import InMemoryStrategy
from tests.unit.cli import test_cli
from tests.unit.cli.test_cli import QUIET, _elsewhere, command  # noqa: F401 - a fixture for all

CLASS = "lightning_swarm.pytorch_lightning.SwarmStrategy"


class Net(pl.LightningModule):
    made: ClassVar[list[Net]] = []

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.seen: list[str] = []
        Net.made.append(self)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append("fit")
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    @override
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append("test")
        self.net(batch[0])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def _loader(self) -> DataLoader[Any]:
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(TensorDataset(rows), batch_size=8)

    train_dataloader = test_dataloader = _loader


class Watched(InMemoryStrategy):
    """Keeps the last instance."""

    last: InMemoryStrategy

    def __init__(self, num_stages: int | None = None) -> None:
        super().__init__(num_stages=num_stages)
        Watched.last = self


NET, DATA = f"{__name__}.Net", f"{__name__}.Data"
OTHER_NET, OTHER_DATA = f"{test_cli.__name__}.Net", f"{test_cli.__name__}.Data"
ON_SWARM = [f"--trainer.strategy={__name__}.Watched", "--trainer.strategy.num_stages=2", "--trainer.devices=2"]


# ---------------------------------------------------------------------- which tree


def tree_of(*arguments: str) -> ImportTree:
    return choose_framework(arguments, ["fit", "test"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", f"--model={NET}"],
        ["fit", "--model", NET],
        ["fit", f"--model.class_path={NET}", "--model.width=3"],
        ["fit", "--model.help", NET],
        ["fit", f"--model={OTHER_NET}", f"--model={NET}"],
        ["fit", "--model=Net", f"--data={DATA}"],
        ["fit", f"--trainer.strategy.help={CLASS}"],
        ["fit", "--config", "short.yaml"],
        ["fit", "--config=long.yaml"],
        ["fit", "-c", "long.yaml", "--model.width=3"],
        ["fit", f"--model={OTHER_NET}", "--config=long.yaml"],
        ["fit", f"--config={OTHER_NET}.yaml", "--config=long.yaml"],
        ["--config=all.yaml", "fit"],
        ["--config", "one.yaml"],
        ["fit", "--config=strategy.yaml"],
    ],
    ids=" ".join,
)
def test_classes_of_pytorch_lightning_are_seen(arguments: list[str]) -> None:
    model = {"class_path": NET, "init_args": {"width": 3}}
    for name, content in {
        "short": {"model": NET},
        "long": {"seed_everything": 1, "model": model},
        OTHER_NET: {"model": OTHER_NET},
        "all": {"test": {"model": OTHER_NET}, "fit": {"model": model}},
        "one": {"fit": {"model": model}},
        "strategy": {"trainer": {"strategy": {"class_path": CLASS}}},
    }.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    assert tree_of(*arguments) is PYTORCH_LIGHTNING


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fit"],
        ["fit", "--model"],
        ["fit", f"--model={OTHER_NET}"],
        ["fit", f"--model={NET}", f"--model={OTHER_NET}"],
        ["fit", f"--config={NET}"],
        ["fit", "--config=list.yaml"],
        ["fit", "--config=broken.yaml"],
        ["fit", "--config=binary.yaml"],
        ["fit", "--config"],
        ["fit", "--model=nowhere.Net"],
        ["fit", "--model=raises.Net"],
        ["fit", "--model=.."],
        ["fit", f"--model={NET}.made"],
        ["fit", "--model=torch.nn.Linear"],
    ],
    ids=" ".join,
)
def test_what_decides_nothing_is_left_to_lightning(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    Path("list.yaml").write_text("[1, 2]")
    Path("broken.yaml").write_text("a: [")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    Path("raises.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(Path.cwd())
    assert tree_of(*arguments) is LIGHTNING


@pytest.mark.parametrize(
    ("model", "data", "model_from", "data_from"),
    [
        (NET, OTHER_DATA, "pytorch_lightning", "lightning.pytorch"),
        (OTHER_NET, DATA, "lightning.pytorch", "pytorch_lightning"),
    ],
)
def test_a_data_module_of_the_other_tree_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    data: str,
    model_from: str,
    data_from: str,
) -> None:
    assert command(monkeypatch, "fit", f"--model={model}", f"--data={data}", *QUIET) == 2
    assert capsys.readouterr().err == (
        "lightning-swarm: error: a LightningDataModule must come from the Trainer's import of Lightning: Data is from "
        f"`{data_from}`, the Trainer from `{model_from}`. Change the import of LightningDataModule to `{model_from}`.\n"
    )


def test_a_strategy_of_the_other_tree_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--model={NET}", f"--data={DATA}", "--trainer.strategy.class_path=lightning_swarm.SwarmStrategy"]
    assert command(monkeypatch, "fit", *options, *QUIET) == 2
    assert "Write `from lightning_swarm.pytorch_lightning import SwarmStrategy`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
        ("raise RuntimeError('broken in its own way')", "broken in its own way"),
        ("", "has no attribute 'Net'"),
    ],
)
def test_an_error_in_the_models_module_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, says: str
) -> None:
    name = f"its_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    assert command(monkeypatch, "fit", f"--model={name}.Net", *QUIET) == 2
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize("name", ["fit", "test"])
def test_commands_run_on_a_swarm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert command(monkeypatch, name, f"--model={NET}", f"--data={DATA}", *QUIET, *ON_SWARM) == 0
    assert name in Net.made[-1].seen
    assert type(Net.made[-1].trainer) is pl.Trainer
    assert len(Watched.last.servers) == 2


def test_a_file_says_it_all_and_is_saved_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = ["--trainer.log_every_n_steps=1", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    options = [f"--model={NET}", f"--data={DATA}", "--model.width=5", *QUIET, *ON_SWARM, *logger]
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "fit", *options, "--print_config")
    Path("run.yaml").write_text(capsys.readouterr().out)
    assert command(monkeypatch, "fit", "--config=run.yaml") == 0
    [saved] = Path("logs").rglob("config.yaml")
    content = yaml.safe_load(saved.read_text())
    assert content["model"] == {"class_path": NET, "init_args": {"width": 5}}
    assert content["trainer"]["logger"]["class_path"] == "pytorch_lightning.loggers.CSVLogger"


def test_a_setting_that_cannot_work_is_refused_by_its_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "fit", f"--model={NET}", *QUIET, "--trainer.strategy.num_stages=0") == 2
    assert "lightning-swarm: error: `num_stages` must be a positive whole number" in capsys.readouterr().err


def test_what_an_error_hints_at_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "fit", f"--model={NET}", "--model.wide=3") == 2
    assert f"\n    lightning-swarm fit --trainer.strategy.help {CLASS}\n" in capsys.readouterr().err
    for options in (["--trainer.strategy.help", CLASS], ["--model.help", NET]):
        with pytest.raises(SystemExit, match="0"):
            command(monkeypatch, "fit", *options)
    said = " ".join(capsys.readouterr().out.split())
    assert "--model.width WIDTH" in said
    assert "--trainer.strategy.num_stages NUM_STAGES Number of stages that the model is cut into." in said


# ---------------------------------------------------------------------- SwarmCLI


def strategy_of(*options: str) -> pl.strategies.Strategy:
    made = SwarmCLI(Net, Data, run=False, save_config_callback=None, args=[*QUIET[:-1], *options])
    assert type(made.trainer) is pl.Trainer
    assert type(made.trainer.strategy) is lightning_swarm.pytorch_lightning.SwarmStrategy
    return made.trainer.strategy


@pytest.mark.parametrize("given", [[], ["swarm"], [CLASS], ["SwarmStrategy"]], ids=str)
def test_every_name_of_the_strategy(given: list[str]) -> None:
    strategy: Any = strategy_of(*(f"--trainer.strategy={name}" for name in given), "--trainer.strategy.num_stages=2")
    assert strategy.config.num_stages == 2


def test_the_front_door_names_it() -> None:
    assert lightning_swarm.pytorch_lightning.SwarmCLI is SwarmCLI
    assert issubclass(SwarmCLI, pl.cli.LightningCLI)
    assert not issubclass(SwarmCLI, lightning.pytorch.cli.LightningCLI)
    with pytest.raises(AttributeError, match="has no attribute 'SwarmCLI2'"):
        lightning_swarm.pytorch_lightning.SwarmCLI2  # noqa: B018


def test_plugins_of_the_same_tree_are_set_by_class() -> None:
    strategy = strategy_of(
        "--trainer.strategy.precision_plugin=pytorch_lightning.plugins.precision.DoublePrecision",
        "--trainer.strategy.checkpoint_io=pytorch_lightning.plugins.io.TorchCheckpointIO",
    )
    assert type(strategy.precision_plugin) is pl.plugins.precision.DoublePrecision
    assert type(strategy.checkpoint_io) is pl.plugins.io.TorchCheckpointIO


def test_a_plugin_of_the_other_tree_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        strategy_of("--trainer.strategy.precision_plugin=lightning.pytorch.plugins.precision.DoublePrecision")
    assert "does not correspond to a subclass of Precision" in capsys.readouterr().err
