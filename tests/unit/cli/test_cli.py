"""The command line: accepted arguments, executed actions, and output."""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import lightning_swarm
from lightning_swarm import Bottleneck, Limits, Maxout, SwarmStrategy, cli
from lightning_swarm.cli import SwarmCLI
from lightning_swarm.model.boundary_layers import Boundary
from lightning_swarm.monitor.swarm_report import ObservedNumber, ObservedPeer, SwarmReport
from lightning_swarm.testing import InMemoryStrategy

CLASS = "lightning_swarm.SwarmStrategy"
IN_MEMORY = "lightning_swarm.testing.InMemoryStrategy"
QUIET = [
    "--seed_everything=1",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.max_epochs=1",
    "--trainer.precision=64-true",
]


class Net(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.seen: list[str] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append("fit")
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append("validate")
        self.net(batch[0])

    @override
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append("test")
        self.net(batch[0])

    @override
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append("predict")
        prediction: Tensor = self.net(batch[0])
        return prediction

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unoptimized(Net):
    """Leaves the optimizer to the command line."""

    configure_optimizers = L.LightningModule.configure_optimizers  # type: ignore[assignment]


class Data(L.LightningDataModule):
    def _loader(self) -> DataLoader[Any]:
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(TensorDataset(rows), batch_size=8)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


MODEL = [f"--model={__name__}.Net", f"--data={__name__}.Data"]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in a temporary folder, without the tests' own arguments and import path."""
    monkeypatch.setattr(sys, "argv", ["lightning-swarm"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)


def strategy_of(*options: str, kind: type[LightningCLI] = SwarmCLI) -> SwarmStrategy:
    """Return the strategy that the CLI passed to `Trainer`."""
    made = kind(Net, Data, run=False, save_config_callback=None, args=[*QUIET, *options])
    strategy = made.trainer.strategy
    assert type(strategy) is SwarmStrategy
    return strategy


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", *arguments])
    return cli.main()


# ---------------------------------------------------------------------- forms of the strategy


@pytest.mark.parametrize(
    ("options", "num_stages"),
    [
        ([], None),
        (["--trainer.strategy.num_stages=2"], 2),
        (["--trainer.strategy.init_args.num_stages=2"], 2),
        (["--trainer.strategy=swarm"], None),
        (["--trainer.strategy", "swarm", "--trainer.strategy.num_stages", "2"], 2),
        (["--trainer.strategy=swarm", "--trainer.strategy.init_args.num_stages=2"], 2),
        ([f"--trainer.strategy={CLASS}"], None),
        ([f"--trainer.strategy={CLASS}", "--trainer.strategy.num_stages=2"], 2),
        ([f"--trainer.strategy={CLASS}", "--trainer.strategy.init_args.num_stages=2"], 2),
        (["--trainer.strategy=SwarmStrategy", "--trainer.strategy.num_stages=2"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_form_of_the_strategy(options: list[str], num_stages: int | None) -> None:
    assert strategy_of(*options).config.num_stages == num_stages


@pytest.mark.parametrize("name", ["swarm", CLASS])
def test_names_of_the_strategy_in_a_plain_lightning_cli(name: str) -> None:
    strategy_of(f"--trainer.strategy={name}", kind=LightningCLI)


def test_records_are_set_by_word_or_by_field() -> None:
    config = strategy_of("--trainer.strategy.trust=audited", "--trainer.strategy.rebalancing=none").config
    assert (config.trust, config.settings.rebalancing) == ("audited", "none")
    options = (
        *("--trainer.strategy.trust=lightning_swarm.Trust", "--trainer.strategy.trust.level=audited"),
        "--trainer.strategy.trust.audit_share=0.5",
        '--trainer.strategy.rebalancing={"rule": "none", "interval": 5}',
    )
    config = strategy_of(*options).config
    assert (config.trust, config.settings.audit_share) == ("audited", 0.5)
    assert (config.settings.rebalancing, config.settings.rebalance_interval) == ("none", 5.0)


def test_deprecated_arguments_work_and_warn() -> None:
    options = ("--trainer.strategy.trust=audited", "--trainer.strategy.audit_share=0.5")
    with pytest.warns(DeprecationWarning, match=r"Write `trust=Trust\('audited', audit_share=\.\.\.\)`"):
        settings = strategy_of(*options).config.settings
    assert settings.audit_share == 0.5
    with pytest.warns(DeprecationWarning, match=r"Write `rebalancing=Rebalancing\(interval=\.\.\.\)`") as caught:
        strategy = SwarmStrategy(rebalance_interval=5.0)
    assert strategy.config.settings.rebalance_interval == 5.0
    assert caught[0].filename == __file__


def test_limits_are_set_one_by_one() -> None:
    limits = strategy_of("--trainer.strategy.limits.call_timeout=7").config.limits
    assert limits == Limits(call_timeout=7.0)
    assert limits != Limits()


@pytest.mark.parametrize(
    ("options", "boundary"),
    [
        ([], None),
        (["--trainer.strategy.boundary=null"], None),
        (["--trainer.strategy.boundary=Bottleneck", "--trainer.strategy.boundary.ratio=4"], Bottleneck(ratio=4)),
        (
            ["--trainer.strategy.boundary={class_path: lightning_swarm.Maxout, init_args: {ratio: 2, features: 8}}"],
            Maxout(ratio=2, features=8),
        ),
    ],
)
def test_boundary_layers_are_named_by_their_class(options: list[str], boundary: Boundary | None) -> None:
    assert strategy_of(*options).config.boundary == boundary


def test_another_strategy_can_be_named() -> None:
    named = SwarmCLI(Net, Data, run=False, args=[*QUIET, "--trainer.strategy=auto"])
    assert not isinstance(named.trainer.strategy, SwarmStrategy)
    default = SwarmCLI(Net, Data, run=False, trainer_defaults={"strategy": "auto"}, args=QUIET)
    assert not isinstance(default.trainer.strategy, SwarmStrategy)


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("num_stages=0", "`num_stages` must be a positive whole number or None, got 0. Leave it out"),
        ("boundary={class_path: Bottleneck, init_args: {ratio: 1}}", "`Bottleneck.ratio` must be a whole number of at"),
        ("limits.call_timeout=-1", "`Limits.call_timeout` must be a number of at least 0.001, got -1.0. Leave it out"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_rule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, rule: str
) -> None:
    assert command(monkeypatch, "fit", *MODEL, *QUIET, f"--trainer.strategy.{option}") == 2
    assert f"lightning-swarm: error: {rule}" in capsys.readouterr().err


def test_an_error_of_the_model_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="negative dimension"):
        command(monkeypatch, "fit", *MODEL, *QUIET, "--model.width=-1")


# ---------------------------------------------------------------------- help and configuration


@pytest.mark.parametrize(
    "asked",
    [[f"--trainer.strategy.help={CLASS}"], ["--trainer.strategy.help"]],
)
def test_help_of_the_strategy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "fit", *asked)
    said = " ".join(capsys.readouterr().out.split())
    assert "--trainer.strategy.num_stages NUM_STAGES Number of stages that the model is cut into." in said
    assert "--trainer.strategy.role {auto,both,trainer,server}" in said
    assert "--trainer.strategy.limits.call_timeout CALL_TIMEOUT Seconds until a call to another peer" in said
    for name in inspect.signature(SwarmStrategy).parameters:
        assert f"--trainer.strategy.{name}" in said


def test_printed_configuration_says_the_same_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        *MODEL,
        "--model.width=5",
        "--trainer.strategy.num_stages=2",
        "--trainer.strategy.limits.max_in_flight=3",
    ]
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "fit", *options, "--print_config")
    printed = capsys.readouterr().out
    content = yaml.safe_load(printed)
    assert content["model"]["init_args"] == {"width": 5}
    assert content["trainer"]["strategy"]["init_args"]["num_stages"] == 2
    assert content["trainer"]["strategy"]["init_args"]["limits"]["max_in_flight"] == 3
    Path("run.yaml").write_text(printed)
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "fit", "--config", "run.yaml", "--print_config")
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, *arguments)
    said = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name} " in said
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "--version")
    assert capsys.readouterr().out == f"lightning-swarm {lightning_swarm.__version__}\n"


def test_help_of_status_names_all_that_its_objects_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "status", "--help")
    said = capsys.readouterr().out
    for record in (SwarmReport, ObservedPeer, ObservedNumber):
        assert not [one.name for one in fields(record) if f"`{one.name}`" not in said]


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_help_of_a_command_begins_with_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, name, "--help")
    usage, _, said = capsys.readouterr().out.partition("\n\n")
    assert usage == f"usage: lightning-swarm {name} --model CLASS [--data CLASS] [options], or --config FILE [options]"
    weights = "" if name == "fit" else " --ckpt_path last.ckpt"
    assert f"\n    lightning-swarm {name} --config run.yaml{weights}\n" in said.partition("options:")[0]
    assert ("BasePredictionWriter" in said.partition("options:")[0]) == (name == "predict")
    assert "--ckpt_path" in said


@pytest.mark.parametrize("option", ["--watch", "--timeout"])
def test_status_refuses_times_that_are_not_above_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    address = "127.0.0.1:1/12D3KooWBTrNL8qKG3cYjWeQQYYgbXz5GmSnyHvmbRBVYdTgGnnE"
    assert command(monkeypatch, "status", address, option, "0") == 2
    assert f"`{option}` must be a number of seconds above 0, got 0.0" in capsys.readouterr().err


COMMANDS = ("fit", "validate", "test", "predict", "join", "serve", "invite", "status", "doctor", "export")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_what_to_type_and_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "--help")
    overview = " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, name, "--help")
    usage, what, *rest = capsys.readouterr().out.split("\n\n")
    assert usage.startswith(f"usage: lightning-swarm {name} ")
    line = what.partition(". ")[0].splitlines()[0].rstrip(".")
    assert f" {name} {line}" in overview  # the overview has the same line
    examples = "\n".join(rest).partition("options:")[0]
    assert f"\n    lightning-swarm {name} " in f"\n{examples}"


def test_a_mistyped_command_gets_the_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(monkeypatch, "fitt")
    assert "invalid choice: 'fitt' (choose from" in capsys.readouterr().err


def test_without_jsonargparse_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert command(monkeypatch, "fit", *MODEL) == 2
    said = capsys.readouterr().err
    assert "jsonargparse is not installed" in said
    assert 'pip install "lightning-swarm[cli]"' in said


# ---------------------------------------------------------------------- running


class Watched(InMemoryStrategy):
    """Keeps the last instance."""

    last: InMemoryStrategy

    def __init__(self, num_stages: int | None = None) -> None:
        super().__init__(num_stages=num_stages)
        Watched.last = self


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_commands_run_on_a_swarm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    calls = [f"--trainer.strategy={__name__}.Watched", "--trainer.strategy.num_stages=2", "--trainer.devices=2"]
    made: list[Net] = []
    build = Net.__init__
    monkeypatch.setattr(Net, "__init__", lambda self, width=8: (made.append(self), build(self, width))[1])
    assert command(monkeypatch, name, *MODEL, *QUIET, *calls, "--trainer.num_sanity_val_steps=0") == 0
    assert name in made[0].seen
    assert len(Watched.last.servers) == 2
    assert list(Path.cwd().iterdir()) == []  # writes no configuration beside the user's files


def test_garbage_is_collected_as_usual_from_fit_on(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, found = gc.get_threshold(), {}
    build = Net.__init__

    def init(self: Net, width: int = 8) -> None:
        found["made"] = gc.get_threshold()
        build(self, width)

    monkeypatch.setattr(Net, "__init__", init)
    monkeypatch.setattr(Net, "on_fit_start", lambda self: found.update(fits=gc.get_threshold()))
    assert command(monkeypatch, "fit", *MODEL, *QUIET, "--trainer.devices=1") == 0
    assert found["made"][0] > usual[0], "imports are over when the model is made"
    assert found["fits"] == gc.get_threshold() == usual


def test_fit_saves_its_configuration_beside_its_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [f"--trainer.strategy={__name__}.Watched", "--trainer.strategy.num_stages=1"]
    logger = ["--trainer.log_every_n_steps=1", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    assert command(monkeypatch, "fit", *MODEL, *QUIET, *options, *logger) == 0
    [saved] = Path("logs").rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["init_args"] == {"num_stages": 1}


def test_optimizer_of_the_command_line_steps_every_stage() -> None:
    options = [
        "--optimizer=torch.optim.Adam",
        "--optimizer.lr=0.05",
        "--lr_scheduler=StepLR",
        "--lr_scheduler.step_size=1",
    ]
    weights = []
    for strategy in (["auto"], [f"{__name__}.Watched", "--trainer.strategy.num_stages=2", "--trainer.devices=2"]):
        arguments = ["fit", *QUIET, f"--trainer.strategy={strategy[0]}", *strategy[1:], *options]
        made = SwarmCLI(Unoptimized, Data, save_config_callback=None, args=arguments)
        weights.append(made.model.state_dict())
    plain, swarm = weights
    for name, tensor in plain.items():
        torch.testing.assert_close(swarm[name], tensor, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- export


@pytest.fixture
def checkpoint() -> Path:
    """A checkpoint with a tied weight, and a tensor that is not contiguous."""
    module = Net()
    module.tied = module.net[0].weight
    module.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint("trained.ckpt", weights_only=True)
    return Path("trained.ckpt")


def test_export_writes_every_weight(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    assert command(monkeypatch, "export", str(checkpoint), "out.safetensors") == 0
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert capsys.readouterr().out == f"out.safetensors: {len(weights)} tensors\n"
    written = load_file("out.safetensors")
    assert written.keys() == weights.keys()
    assert {"tied", "turned"} < written.keys()
    for name, tensor in weights.items():
        assert torch.equal(written[name], tensor)
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["out.safetensors", "trained.ckpt"]


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("sprung"),)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str, target: str) -> str:
    """Run an export that must fail; return the error output."""
    assert command(monkeypatch, "export", source, target) == 2
    assert not list(Path.cwd().glob("*.safetensors*"))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("lightning-swarm: error: ")
    return said.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["bad.ckpt does not exist", "Check the path"]),
        (b"no pickle", ["bad.ckpt holds other objects, or is broken"]),
        (b"", ["bad.ckpt", "Check the path"]),
        ([1], ["holds a list", "Check the path"]),
        ({"epoch": 1}, ["weights under `state_dict`", "['epoch']", "that the Trainer saved"]),
        ({"state_dict": {"a": torch.ones(1), "b": 3}}, ["must be dense tensors", "['b']", "Leave them out"]),
        ({"state_dict": {"a": torch.eye(2).to_sparse()}}, ["must be dense tensors", "['a']"]),
        ({"state_dict": {"a": torch.ones(1)}, "x": Trap()}, ["tensors, numbers and text only", "weights_only=True"]),
    ],
    ids=["missing", "no pickle", "empty", "list", "no weights", "number", "sparse", "code"],
)
def test_what_cannot_be_exported_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: Any, words: list[str]
) -> None:
    if isinstance(content, bytes):
        Path("bad.ckpt").write_bytes(content)
    elif content is not None:
        torch.save(content, "bad.ckpt")
    said = refused(monkeypatch, capsys, "bad.ckpt", "out.safetensors")
    assert [word for word in words if word not in said] == []
    assert not Path("sprung").exists()


def test_a_target_that_cannot_be_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    assert "must end in .safetensors" in refused(monkeypatch, capsys, str(checkpoint), "out.bin")
    said = refused(monkeypatch, capsys, str(checkpoint), "nowhere/out.safetensors")
    assert "nowhere/out.safetensors must be a file that can be written" in said
    assert "Name a folder that exists" in said


def test_without_safetensors_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], checkpoint: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    said = refused(monkeypatch, capsys, str(checkpoint), "out.safetensors")
    assert 'pip install "lightning-swarm[export]"' in said
