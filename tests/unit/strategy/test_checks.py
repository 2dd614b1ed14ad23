"""Common mistakes of new users are refused before anything starts, with rule, value and remedy."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm import SwarmStrategy, cli
from lightning_swarm.core.errors import ConfigError, PeerError, StepError, Unreachable
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.boundary_layers import Bottleneck, Maxout, boundary_layers
from lightning_swarm.network import PeerId, hivemind
from lightning_swarm.peer import process as process_module
from lightning_swarm.peer.discovery import RunDirectory
from lightning_swarm.protocol.rpc import VIEW
from lightning_swarm.strategy import checks, launcher
from lightning_swarm.strategy.launcher import SwarmLauncher
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET

ID = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"


class Net(L.LightningModule):
    """A new user's model of three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loose(Net):
    """Its layers are not in one place."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)


class Listed(Net):
    """Has lists of blocks, the larger one inside."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.heads = nn.ModuleList([nn.Linear(4, 1)])
        self.body = nn.Module()
        self.body.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class Adversarial(Net):
    """Has two optimizers."""

    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.2)]


class Data(L.LightningDataModule):
    """Has no training data."""

    @override
    def val_dataloader(self) -> Any:
        return loader()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(8, 4, dtype=torch.float64)), batch_size=4)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a process or the network starts."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(SwarmLauncher, "_first_module", None)
    monkeypatch.setattr(process_module, "child_command", list)
    monkeypatch.setattr(launcher, "hivemind_peer", start)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # leaves torch's threads alone


def swarm(options: dict[str, Any] | None = None, **trainer: Any) -> L.Trainer:
    return L.Trainer(**{**QUIET, "devices": 2, "max_steps": 1, **trainer}, strategy=SwarmStrategy(**options or {}))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "no data": (
        lambda: swarm().fit(Net()),
        "`fit` must have data: got no dataloader and no data module, and Net has no `train_dataloader`. Pass",
    ),
    "no data in the data module": (
        lambda: swarm().fit(Net(), Data()),
        "`fit` must have data: got a data module, and Data has no `train_dataloader`. Pass a",
    ),
    "no data in a data module by name": (
        lambda: swarm().predict(Net(), datamodule=Data()),
        "`predict` must have data: got a data module, and Data has no `predict_dataloader`. Pass a",
    ),
    "no data to validate on": (
        lambda: swarm().validate(Net()),
        "`validate` must have data: got no dataloader and no data module, and Net has no `val_dataloader`",
    ),
    "no stages": (
        lambda: swarm({"num_stages": 0}).fit(Net(), loader()),
        "`num_stages` must be a positive whole number or None, got 0. Leave it out",
    ),
    "more stages than blocks": (
        lambda: swarm({"num_stages": 4}).fit(Net(), loader()),
        "`num_stages` must be 1..3 (the model's blocks), got 4. Lower it",
    ),
    "more devices than blocks": (
        lambda: swarm(devices=4).fit(Net(), loader()),
        "`num_stages` must be 1..3 (the model's blocks), got 4. Lower it",
    ),
    "nodes": (
        lambda: swarm(num_nodes=2).fit(Net(), loader()),
        "`num_nodes` must be 1: a swarm has peers, not nodes; got 2. Leave it out",
    ),
    "microbatches of nothing": (
        lambda: swarm({"microbatch_size": 0}).fit(Net(), loader()),
        "`microbatch_size` must be a positive whole number or None, got 0. Leave it out",
    ),
    "precision": (
        lambda: swarm(precision="16-true").fit(Net(), loader()),
        "got '16-true'. Choose one of them",
    ),
    "no Sequential": (
        lambda: swarm({"num_stages": 2}).fit(Loose(), loader()),
        "have one `torch.nn.Sequential` that holds all its parameters, got none in Loose. Put the model into one",
    ),
    "a list of blocks": (
        lambda: swarm({"num_stages": 2}).fit(Listed(), loader()),
        "got none in Listed. Cut its list of blocks with `pipeline='body.blocks'`, or choose another way. Put",
    ),
    "a misspelt balance": (
        lambda: swarm({"split": "tim"}).fit(Net(), loader()),
        "got 'tim'. Did you mean 'time'? Leave it out to balance by parameters.",
    ),
    "a block without its list": (
        lambda: swarm({"split": "2"}).fit(Net(), loader()),
        "got '2'. Write ['2'] if a block has that name. Leave it out",
    ),
    "a checkpoint that is not there": (
        lambda: swarm().fit(Net(), loader(), ckpt_path="no such.ckpt"),
        "Checkpoint file not found: no such.ckpt. `ckpt_path` must be a checkpoint's path, 'best' or 'last'. ",
    ),
    "a checkpoint to validate that is not there": (
        lambda: swarm().validate(Net(), loader(), ckpt_path="no such.ckpt"),
        "Checkpoint file not found: no such.ckpt. `ckpt_path` must be a checkpoint's path, 'best' or 'last'. ",
    ),
    "a boundary in one stage": (
        lambda: swarm({"num_stages": 1, "boundary": Bottleneck(ratio=2)}).fit(Net(), loader()),
        "`boundary` stands between stages, so there must be at least 2, got 1. Raise `num_stages`",
    ),
    "a boundary of another ratio": (
        lambda: swarm({"split": ["2"], "boundary": Bottleneck(ratio=3, features=4)}).fit(Net(), loader()),
        "`Bottleneck.ratio` must divide the number of features, got 3 and 4",
    ),
    "a boundary after what says no features": (
        lambda: swarm({"split": ["2"], "boundary": Maxout(ratio=2)}).fit(Net(), loader()),
        "the number of features after 'net.1' must be known, but Tanh has no layer that shows it",
    ),
    "a boundary behind a callback's back": (
        lambda: swarm(
            {"split": ["1"], "boundary": Maxout(ratio=2)}, callbacks=[StochasticWeightAveraging(swa_lrs=0.01)]
        ).fit(Net(), loader()),
        "got StochasticWeightAveraging. Call `insert_boundary(self, ...)`",
    ),
    "a misspelt pipeline": (
        lambda: swarm({"pipeline": "nett"}).fit(Net(), loader()),
        "`pipeline` must be the dotted name of a submodule of Net, got 'nett'. Choose one of",
    ),
    "a misspelt split": (
        lambda: swarm({"split": ["0", "3"]}).fit(Net(), loader()),
        "`split` must name blocks of the model, got '3'. Correct it: choose from 0, 1, 2",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_before_anything_starts(nothing_starts: None, mistake: str) -> None:
    make_it, message = MISTAKES[mistake]
    with pytest.raises(ConfigError) as refusal:
        make_it()
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "options", [{"num_stages": 3}, {"split": ["1"], "boundary": Bottleneck(ratio=2)}], ids=["stages", "a boundary"]
)
def test_what_is_right_does_start(nothing_starts: None, options: dict[str, Any]) -> None:
    module = Net()
    with pytest.raises(AssertionError, match="something was started"):
        swarm(options).fit(module, loader())
    assert not boundary_layers(module)


@pytest.mark.parametrize(
    ("options", "handed"),
    [
        ({"num_stages": 1}, {"ckpt_path": "last"}),  # it may bring layers
        ({"split": "time"}, {}),  # the cuts may differ
    ],
)
def test_where_a_boundary_stands_may_be_known_later(
    nothing_starts: None, options: dict[str, Any], handed: dict[str, str]
) -> None:
    with pytest.raises(AssertionError, match="something was started"):
        swarm({**options, "boundary": Maxout(ratio=3)}).fit(Net(), loader(), **handed)


@pytest.mark.parametrize("path", ["best", "last", "hpc", "registry:net:version:v2", "s3://bucket/net.ckpt", None])
def test_what_lightning_looks_up_itself_passes(path: str | None) -> None:
    checks.check_ckpt_path(path)


def test_a_second_starter_is_refused_before_anyone_is_told_of_it() -> None:
    class UnderWay(InMemoryStrategy):
        @override
        def prepare(self) -> None:
            super().prepare()
            assert self.network is not None
            transport = self.network.transport("coordinator")
            self.directory = RunDirectory(self.network.directory(transport), transport, "swarm")

            async def view(caller: PeerId, body: bytes) -> bytes:
                return b""

            transport.handle_call(VIEW.name, view)
            assert self.peer is not None
            self.peer.runtime.run(self.directory.announce_run(transport.peer_id))

        @override
        def leave(self) -> None:
            if self.peer is not None:
                self.known = self.peer.runtime.run(self.directory.known_servers())
            super().leave()

    strategy = UnderWay(role="both", initial_peers=f"192.0.2.1:5/{ID}")
    trainer = L.Trainer(**{**QUIET, "devices": 1, "max_steps": 1}, strategy=strategy)
    with pytest.raises(ConfigError, match="a run has one starter, and run 'swarm' is already in progress"):
        trainer.fit(Net(), loader())
    assert strategy.known == {}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("saves", [True, False])
def test_a_run_that_breaks_off_says_how_to_go_on(tmp_path: Path, saves: bool) -> None:
    class Killer(L.Callback):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                assert strategy.network is not None
                strategy.network.kill(strategy.peers[1].transport.peer_id)

    strategy = InMemoryStrategy(num_stages=2, limits=Limits(snapshot_interval=None, stage_timeout=600.0))
    callbacks: list[L.Callback] = [Killer()]
    if saves:
        callbacks.append(ModelCheckpoint(tmp_path, every_n_train_steps=1))
    options = {**QUIET, "devices": 2, "max_steps": 4, "callbacks": callbacks, "enable_checkpointing": saves}
    with pytest.raises((PeerError, StepError)) as broken:
        L.Trainer(**options, strategy=strategy).fit(Net(), loader())
    *_, note = broken.value.__notes__
    if saves:
        (saved,) = tmp_path.glob("*.ckpt")
        assert note.startswith(f"Start the run again with `ckpt_path={str(saved)!r}`")
    else:
        assert note.startswith("This run has no checkpoint to resume from")


def test_a_notebook_has_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_swarm.strategy.checks._IS_INTERACTIVE", True)
    with pytest.raises(ConfigError, match=r"notebook .* `devices` must be 1, .* got 2\. Use `devices=1`"):
        swarm()
    assert swarm(devices=1).num_devices == 1


def test_no_devices_is_refused_by_lightning() -> None:
    with pytest.raises(MisconfigurationException, match=r"`Trainer\(devices=0\)` value is not a valid input"):
        swarm(devices=0)


def test_two_optimizers() -> None:
    """The error comes after the model's setup, before any peer is asked to serve."""
    strategy = InMemoryStrategy(num_stages=2)
    trainer = L.Trainer(**{**QUIET, "devices": 2, "max_steps": 1}, strategy=strategy)
    with pytest.raises(ConfigError, match=r"must return one optimizer, got several\. Use one, with parameter groups"):
        trainer.fit(Adversarial(), loader())
    assert all(peer.server is None for peer in strategy.peers)


@pytest.mark.parametrize(
    ("options", "devices"),
    [({"num_stages": 3}, 1), ({"num_stages": 1}, 3), ({"microbatch_size": 100}, 2)],
    ids=["more stages than devices", "more devices than stages", "microbatches larger than the batch"],
)
def test_what_looks_wrong_and_is_right(options: dict[str, Any], devices: int) -> None:
    trainer = L.Trainer(**{**QUIET, "devices": devices, "max_steps": 1}, strategy=InMemoryStrategy(**options))
    trainer.fit(Net(), loader())
    assert trainer.global_step == 1


def test_a_port_that_another_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwarmLauncher, "_first_module", None)
    monkeypatch.setattr(hivemind, "PORT_PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refusal:
            swarm({"listen": f"127.0.0.1:{port}"}, devices=1).fit(Net(), loader())
    assert f"a free port, got 127.0.0.1 and {port}: Address already in use. End the process that listens there" in str(
        refusal.value
    )


def test_nobody_answers_where_the_run_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check starts no daemon, because a plain connection shows that no peer listens there."""
    monkeypatch.setattr(SwarmLauncher, "_first_module", None)
    daemons: list[int] = []
    create = asyncio.create_subprocess_exec

    async def watched(*arguments: Any, **options: Any) -> Any:
        process = await create(*arguments, **options)
        daemons.append(process.pid)
        return process

    monkeypatch.setattr(asyncio.subprocess, "create_subprocess_exec", watched)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}/12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"
    with pytest.raises(Unreachable) as refusal:
        swarm({"role": "both", "initial_peers": address}, devices=1).fit(Net(), loader())
    assert f"a peer to join must answer at the address that names it, {address}: " in str(refusal.value)
    assert "its machine refuses the connection" in str(refusal.value)
    assert "Check that the peer still runs, and its port." in str(refusal.value)
    assert not daemons


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("way", ["nobody", "another program"])
def test_a_status_of_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str) -> None:
    """The error names the obstacle in plain words, not libp2p's, and the address once."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        if way == "nobody":
            other.close()
        monkeypatch.setattr(sys, "argv", ["lightning-swarm", "status", f"{place}/{ID}", "--timeout", "0.1"])
        assert cli.main() == 1
    said = capsys.readouterr().err
    what, remedy = (
        ("its machine refuses the connection", "Check that the peer still runs, and its port.")
        if way == "nobody"
        else ("the program that listens there is not a peer", "Check the port: another program uses it.")
    )
    assert said.startswith(f"lightning-swarm: error: {place}/{ID} cannot be reached: {what}")
    assert f". {remedy}" in said
    assert said.count(ID) == 1
    assert "dial" not in said


# ---------------------------------------------------------------------- at the command line

PROJECT = """
import lightning as L


class Net(L.LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()


class Data(L.LightningDataModule):
    pass
"""

TYPOS: dict[str, tuple[str, str, str]] = {
    "model": ("--model their_net.Nett", "", "Parser key \"model\":|module 'their_net' has no attribute 'Nett'"),
    "module": ("--model their_nett.Net", "", "Parser key \"model\":|No module named 'their_nett'"),
    "data": ("--model their_net.Net --data their_net.Dat", "", "module 'their_net' has no attribute 'Dat'"),
    "no model": ("", "", "the following arguments are required: fit.model"),
    "file": ("--config missing.yaml", "", "File does not exist: |missing.yaml"),
    "key": ("--config run.yaml", "modell: their_net.Net\n", "does not accept option 'modell'"),
    "key of the Trainer": (
        "--config run.yaml",
        "model: their_net.Net\ntrainer: {max_epoch: 3}\n",
        "'trainer.max_epoch'",
    ),
    "key of the strategy": (
        "--config run.yaml",
        "trainer: {strategy: {class_path: lightning_swarm.SwarmStrategy, init_args: {num_stage: 2}}}",
        "Parser key \"trainer.strategy\":|Option 'num_stage' is not accepted",
    ),
    "option of the strategy": (
        "--model their_net.Net --trainer.strategy.num_stage 2",
        "",
        "Parser key \"trainer.strategy\":|Option 'num_stage' is not accepted",
    ),
    "value": (
        "--model their_net.Net --trainer.strategy.num_stages two",
        "",
        "Parser key \"num_stages\":|Expected a <class 'int'>|Given value: two",
    ),
    "option of the model": ("--model their_net.Net --model.widt 3", "", "Option 'widt' is not accepted"),
    "no YAML": ("--config run.yaml", "model: [oops\n", "Problems parsing config|line 1, column 8"),
}


@pytest.mark.parametrize("typo", TYPOS)
def test_a_misspelt_command_says_where_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, typo: str
) -> None:
    arguments, content, said = TYPOS[typo]
    (tmp_path / "their_net.py").write_text(PROJECT)
    (tmp_path / "run.yaml").write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "fit", *arguments.split()])
    try:
        assert cli.main() == 2
    finally:
        sys.modules.pop("their_net", None)
    error = capsys.readouterr().err
    assert error.startswith("lightning-swarm: error: ")
    for part in said.split("|"):
        assert part in error
    for noise in ("Union subtypes", "NoneType", "NestedArg", "Traceback"):
        assert noise not in error
    assert "\n    lightning-swarm fit --trainer.strategy.help lightning_swarm.SwarmStrategy\n" in error
