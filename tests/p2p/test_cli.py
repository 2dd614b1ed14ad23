"""The command in real processes: a run from a file, a peer that joins it, and an observer."""

from __future__ import annotations

import importlib
import json
import shlex
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file

from lightning_swarm import cli
from lightning_swarm.planner.records import MIN_GAIN
from tests.p2p.processes import COMMAND, Run
from tests.p2p.warm import WarmRun, wait_until

# Cold starts of peers in this file: 10. The onlooker is none.

PROJECT = """
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        if batch_idx == 0 and self.trainer.current_epoch == 0:
            print("trained in", self.trainer.strategy.local_rank, flush=True)
        self.trainer.should_stop = Path("enough").exists()
        loss = self.net(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        print("data was read", flush=True)
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        return DataLoader(TensorDataset(rows), batch_size=8)


class Evaluated(Net):
    def validation_step(self, batch, batch_idx):
        output = self.net(batch[0])
        print("evaluated", type(self.trainer.strategy).__name__, output.sum().item(), flush=True)
        return output

    test_step = predict_step = validation_step


class Held(Data):
    val_dataloader = test_dataloader = predict_dataloader = Data.train_dataloader
"""

CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  strategy:
    class_path: lightning_swarm.SwarmStrategy
    init_args:
      num_stages: 2
  max_epochs: -1
  precision: 64-true
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
model:
  class_path: their_project.Net
  init_args:
    width: 6
data: their_project.Data
"""

Command = Callable[..., Run]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Run `lightning-swarm …` in the folder of a project."""
    (tmp_path / "their_project.py").write_text(PROJECT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    runs: list[Run] = []

    def begin(*arguments: object) -> Run:
        runs.append(WarmRun(*arguments, program=COMMAND))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


@pytest.mark.thorough
def test_a_run_from_a_file_is_joined_and_watched_and_left_and_leaves_an_ordinary_checkpoint(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = command("fit", "--config", "run.yaml", "--trainer.devices", 2)
    line = run.wait_for("can join this run: ")
    pasted = shlex.split(line.partition("can join this run: ")[2])
    assert pasted[:2] == ["lightning-swarm", "join"]
    assert pasted[3:] == ["--config", "run.yaml"]  # the number of devices differs between machines
    run.wait_for("trained in 0")  # it is running
    joiner = command(*pasted[1:])

    onlooker = command("status", pasted[2], "--json", "--watch", 0.5)
    seen = watch_until(onlooker, lambda seen: sum(map(len, seen["stages"])) == 3)
    assert seen["run_id"] == "swarm"
    assert seen["step"] > 0
    assert seen["steps_per_minute"] > 0
    lead = pasted[2].partition("/")[2]
    assert [peer["peer_id"] for peer in seen["peers"] if peer["lead"]] == [lead]
    assert all(peer["problem"] is None and peer["age_s"] > 0 for peer in seen["peers"])

    joiner.wait_for("In run 'swarm' from step")  # a status also shows peers that are about to join
    joiner.process.send_signal(signal.SIGTERM)
    assert joiner.wait() == 0, "".join(joiner.output)
    assert any("Leaving run 'swarm' with one of its next records" in line for line in joiner.output)
    assert any("Run 'swarm' has released this peer." in line for line in joiner.output)
    left = watch_until(onlooker, lambda seen: sum(map(len, seen["stages"])) == 2)
    assert left["step"] >= seen["step"]
    watch_until(onlooker, lambda seen: seen["step"] > left["step"])  # the run continues without it

    assert_planned(command, pasted[2], monkeypatch, capfd)

    onlooker.interrupt()
    assert onlooker.wait() == 0, "".join(onlooker.output)
    (tmp_path / "enough").touch()
    assert run.wait() == 0, "".join(run.output)
    assert [one.survivors() for one in (run, joiner, onlooker)] == [[], [], []]
    assert [line for line in run.output if line.startswith("trained in")] == ["trained in 0\n"]
    assert not [line for line in joiner.output if line.startswith(("trained in", "data was read"))]
    assert_plain(tmp_path, monkeypatch)
    [path] = tmp_path.rglob("*.ckpt")
    assert_exported(path, monkeypatch, capfd)
    assert_evaluated(path, monkeypatch, capfd)


@pytest.mark.thorough
def test_a_dashboard_goes_on_by_another_peer_if_the_asked_server_is_killed(command: Command, tmp_path: Path) -> None:
    run = command("fit", "--config", "run.yaml", "--trainer.devices", 2)
    pasted = shlex.split(run.wait_for("can join this run: ").partition("can join this run: ")[2])
    run.wait_for("trained in 0")
    onlooker = command("status", pasted[2], "--json", "--watch", 0.5)
    before = watch_until(onlooker, lambda seen: sum(map(len, seen["stages"])) == 2)
    joiner = command(*pasted[1:])
    joined = watch_until(onlooker, lambda seen: sum(map(len, seen["stages"])) == 3)
    joiner.wait_for("In run 'swarm' from step")  # a status also shows peers that are about to join
    onlooker.interrupt()
    known = {peer["peer_id"] for peer in before["peers"]}
    (victim,) = (peer for peer in joined["peers"] if peer["peer_id"] not in known)
    dashboard = command("dashboard", f"{victim['place']}/{victim['peer_id']}", "--port", 0, "--every", 0.2)
    page = dashboard.wait_for("Dashboard of ").split()[-1]

    def answer(state: Any, number: int) -> bool:
        found = sum(stage["num_peers"] for stage in state["stages"])
        return (found, state["problem"]) == (number, None) and state["numbers"]["step"] is not None

    def has_resumed(state: Any) -> bool:
        # On a busy machine a living peer may also be silent in one survey.
        losses = [one for one in state["events"] if one["kind"] in ("silent", "left")]
        of_victim = [one for one in losses if victim["peer_id"][-6:] in one["text"]]
        return bool(of_victim) and of_victim[-1]["resumed_s"] is not None

    whole = state_until(page, lambda state: answer(state, 3))
    joiner.process.send_signal(signal.SIGKILL)
    assert joiner.wait() == -signal.SIGKILL
    lost = state_until(page, lambda state: answer(state, 2) and has_resumed(state))
    assert lost["numbers"]["step"] > whole["numbers"]["step"]
    for peer in lost["report"]["peers"]:  # a killed peer is listed until its announcement expires
        if peer["peer_id"] == victim["peer_id"]:
            assert peer["problem"]
            assert peer["stages"] == victim["stages"]
    wait_until(
        lambda: b"lightning_swarm:step " in urllib.request.urlopen(f"{page}metrics").read(),
        "the metrics have no step, although the coordinator answers",
    )
    dashboard.interrupt()
    assert dashboard.wait() == 0, "".join(dashboard.output)
    (tmp_path / "enough").touch()
    assert run.wait() == 0, "".join(run.output)
    assert [one.survivors() for one in (run, joiner, onlooker, dashboard)] == [[], [], [], []]


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["done", "killed"])
def test_the_callbacks_page_shows_losses_and_ends_with_the_trainer(command: Command, tmp_path: Path, end: str) -> None:
    callback = "[{class_path: lightning_swarm.Dashboard, init_args: {port: 0}}]"
    run = command("fit", "--config", "run.yaml", "--trainer.devices", 2, "--trainer.callbacks", callback)
    page = run.wait_for("Dashboard of this run: ").split()[-1]
    state = state_until(page, lambda state: len(state["logged"]["series"].get("train_loss", ())) > 2)
    assert state["logged"]["begins"] == sorted(state["logged"]["begins"])
    wait_until(
        lambda: b'lightning_swarm:logged_value{name="train_loss"} ' in urllib.request.urlopen(f"{page}metrics").read(),
        "the metrics have no loss, although the page has",
    )
    if end == "killed":
        run.process.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    else:
        (tmp_path / "enough").touch()
        assert run.wait() == 0, "".join(run.output)
    assert run.survivors() == []
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(page)
    assert sum("Dashboard of this run: " in line for line in run.output) == 1


def state_until(page: str, wanted: Callable[[Any], Any]) -> Any:
    """Return the first state of a dashboard that satisfies a condition."""
    with urllib.request.urlopen(f"{page}api/events") as stream:
        for line in stream:
            if line.startswith(b"data: ") and wanted(state := json.loads(line.removeprefix(b"data: "))):
                return state
    raise AssertionError("the stream ended")


def watch_until(onlooker: Run, wanted: Callable[[Any], bool]) -> Any:
    """Return the first status that satisfies a condition."""
    while True:
        seen = json.loads(onlooker.wait_for('{"run_id"'))
        if wanted(seen):
            return seen


def assert_planned(
    command: Command, address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`plan --swarm` reports the best settings by the swarm's measurements, beside the current settings."""
    planning = command("plan", "--swarm", address, "--json", "--over", 0.5, "--largest-batch-size", 64)
    said = json.loads(planning.wait_for('{"best"'))
    assert planning.wait() == 0, "".join(planning.output)
    now, best = said["now"], said["best"]
    assert now["setting"] == {"num_stages": 2, "microbatch_size": 1, "batch_size": 8, "target_batch_size": 8}
    assert now["samples_per_s"] > 0
    assert now["sent_bytes_per_s"] > 0
    assert now["predicted_samples_per_s"] > 0
    assert now["unmeasured"] == []
    # Its lines have carried less than the 64 kB that a measurement needs.
    assert address.partition("/")[2] in now["assumed_lines"]
    assert best["samples_per_s"] > 0
    assert best["setting"]["target_batch_size"] <= 64
    assert said["worth_it"] is (said["gain"] >= MIN_GAIN)  # either is possible, depending on this machine's load
    nobody = f"127.0.0.1:1/{address.partition('/')[2]}"
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "plan", "--swarm", nobody, "--timeout", "5"])
    assert cli.main() == 1
    said = capfd.readouterr().err
    assert nobody in said
    assert "cannot be reached: " in said


def assert_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint equals the plain Trainer's after as many steps."""
    [path] = tmp_path.rglob("*.ckpt")
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] > 0
    monkeypatch.syspath_prepend(tmp_path)
    their_project = importlib.import_module("their_project")
    sys.modules.pop("their_project")
    (tmp_path / "enough").unlink()
    torch.manual_seed(1)
    plain = their_project.Net(width=6)
    trainer = L.Trainer(
        accelerator="cpu", max_steps=saved["global_step"], precision="64-true", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(plain, their_project.Data())
    assert saved["state_dict"].keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][name], tensor, rtol=1e-10, atol=1e-10)


def assert_exported(path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs in this process: a cold start would take longer than the export."""
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "export", str(path), "model.safetensors"])
    capfd.readouterr()
    assert cli.main() == 0
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert capfd.readouterr().out == f"model.safetensors: {len(weights)} tensors\n"
    torch.testing.assert_close(load_file("model.safetensors"), dict(weights), rtol=0.0, atol=0.0)


def assert_evaluated(path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The other commands with the same file on a real network; in this process, which saves three cold starts."""
    found = {}
    for name in ("validate", "test", "predict"):
        options = ["--model=their_project.Evaluated", "--model.width=6", "--data=their_project.Held"]
        argv = ["lightning-swarm", name, "--config", "run.yaml", *options, "--trainer.devices=1", f"--ckpt_path={path}"]
        monkeypatch.setattr(sys, "argv", argv)
        assert cli.main() == 0
        said = [line.split() for line in capfd.readouterr().out.splitlines()]
        found[name] = [line[1:] for line in said if line[:1] == ["evaluated"]]
    their_project = sys.modules.pop("their_project")
    plain = their_project.Net(width=6)  # Lightning also loads into float32 before it converts
    plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    plain.double()
    sums = [plain.net(rows).sum().item() for [rows] in their_project.Data().train_dataloader()]
    for lines in found.values():
        assert [line[0] for line in lines] == ["SwarmStrategy"] * 3
        assert [float(line[1]) for line in lines] == pytest.approx(sums, rel=1e-12)
