"""Separate processes over hivemind: the plain Trainer's curve, their traffic, and no process left afterwards."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm.client.pipeline.row_check import NUM_PROBES
from lightning_swarm.peer.config import Compression
from lightning_swarm.protocol.compression.quantization import Blockwise8Bit
from tests.p2p.processes import COMMAND, SCRIPT, Run
from tests.p2p.train import ROWS, WIDTH, make
from tests.p2p.warm import WarmRun
from tests.parity.harness import LOSS_TOLERANCE, WEIGHT_TOLERANCE, run_plain
from tests.parity.models import Net, digits
from tests.parity.trainers import Curve, assert_exact
from tests.wire import wired

# Cold starts of peers in this file: 1 + 1 + 2 + 1 + 1 for the curves and the daemon, 3 times 2 for the ghosts.

Start = Callable[..., Run]


@pytest.fixture
def start_warm(start: Start) -> Start:
    """Starts runs whose first process is forked from one that has imported everything."""
    return partial(start, kind=WarmRun)


KILLED_AT = 30
"""The step in which the second stage's only server dies. The remaining process rolls back to a snapshot alone."""


@pytest.mark.parametrize(
    ("model", "devices", "num_stages", "clip", "joiner_at"),
    [
        pytest.param("digits", 2, 2, 0.5, None, id="clipped, and a stage's only server is killed"),
        pytest.param(
            "gpt-losses",
            2,
            4,
            None,
            5,
            id="servers with two stages, one of which gets a second server",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_curve_equals_the_plain_trainers(
    start_warm: Start,
    tmp_path: Path,
    model: str,
    devices: int,
    num_stages: int,
    clip: float | None,
    joiner_at: int | None,
) -> None:
    # DataLoader workers are forked from a process with a swarm, outlive it for a moment, and set their own SIGCHLD
    # handler.
    options: list[object] = ["--clip", clip, "--num-workers", 2, "--kill-at", KILLED_AT] if clip else []
    if joiner_at:
        options += ["--joiner-at", joiner_at]
    run = start_warm(
        model, tmp_path, "--devices", devices, "--num-stages", num_stages, "--microbatch-size", 3, "--max-steps", 50,
        *options,
    )  # fmt: skip
    if joiner_at:
        invitation = run.wait_for("can join this run: lightning-swarm join ")
        address, script = invitation.partition("lightning-swarm join ")[2].split()[:2]
        assert script == "train.py"
        run.wait_for("waiting for a joiner")
        (tmp_path / "joiner").mkdir()
        environment = {"PYTHONPATH": str(SCRIPT.parents[2])}
        joiner = start_warm(
            # The run determines the number of stages.
            "serve", address, SCRIPT, model, tmp_path / "joiner", "--devices", 1, "--role", "both", "--num-stages", 3,
            program=COMMAND, environment=environment,
        )  # fmt: skip
        run.wait_for("waiting for an onlooker")
        onlooker = start_warm("status", address, "--json", program=COMMAND, environment=environment)
        seen = json.loads(onlooker.wait_for('{"run_id"'))
        assert onlooker.wait() == 0, "".join(onlooker.output)
        (tmp_path / "seen").touch()
        assert joiner.wait() == 0, "".join(joiner.output)
        assert joiner.survivors() == []
        assert [path.name for path in (tmp_path / "joiner").iterdir()] == ["traffic-0.json"], "it trained nothing"
        newcomer = json.loads((tmp_path / "joiner" / "traffic-0.json").read_text())["peer_id"]
        # Measured rates decide the joiner's stage, and whether the server with two stages still holds it, too.
        (shared,) = (stage for stage in seen["stages"] if newcomer in stage)
        assert len(shared) in (1, 2)
        assert [len(stage) for stage in seen["stages"] if stage is not shared] == [1, 1, 1]
    assert run.wait() == 0, "".join(run.output)
    assert run.survivors() == []
    result = json.loads((tmp_path / "result.json").read_text())
    if joiner_at:
        [(step, peers)] = result["newcomers"]
        assert peers == [newcomer]
        assert joiner_at <= step <= joiner_at + 2, "it was ready before the step was over"
    assert len(result["status"]) == num_stages
    given_up = result["num_left"] if joiner_at else 0
    assert given_up <= 1, "one stage has a server to spare"
    assert sum(map(len, result["status"])) == max(devices, num_stages) + bool(joiner_at) - given_up
    assert (result["went_back"] == []) == (clip is None)
    if clip:
        (back,) = result["went_back"]
        assert 0 < back <= KILLED_AT
        assert (tmp_path / "fired").read_text() == f"kill peer-1 at BACKWARD_DONE, step {KILLED_AT}\n"
        assert not (tmp_path / "traffic-1.json").exists(), "it came to its end"
        assert any("went_back: " in line for line in run.output)
    assert all(num_microbatches > 0 for stage in result["status"] for num_microbatches in stage)
    norms = assert_plain(tmp_path, model, clip)
    if clip:
        assert max(norms) > clip


def assert_plain(
    out: Path, model: str, clip: float | None = None, prepared: Callable[[Net], Net] = lambda module: module
) -> list[float]:
    """Check losses and weights against the plain Trainer; return the Trainer's gradient norms."""
    result = json.loads((out / "result.json").read_text())
    steps: dict[str, Any] = {"max_steps": 50, "max_epochs": -1}
    plain = run_plain(lambda: prepared(make(model)[0]), make(model)[1], gradient_clip_val=clip, **steps)
    assert result["steps"] == 50
    for ours, theirs in zip(result["losses"], plain.losses, strict=True):
        assert abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs)
    weights = torch.load(out / "weights.pt")
    assert weights.keys() == plain.weights.keys()
    for name, tensor in plain.weights.items():
        assert float((weights[name] - tensor).abs().max()) <= WEIGHT_TOLERANCE
    return plain.norms


CUT = 2


def with_wires(module: Net) -> Net:
    wired(module.net, Compression.parse("8bit"), [CUT], ROWS)
    return module


@pytest.mark.thorough
def test_boundary_carries_one_activation_and_one_gradient(start_warm: Start, tmp_path: Path) -> None:
    """Both are encoded, and neither passes through the trainer, which holds no stage here."""
    run = start_warm(
        "wide", tmp_path, "--devices", 3, "--num-stages", 2, "--role", "trainer", "--microbatch-size", ROWS,
        "--max-steps", 50, "--split", CUT, "--compression", "8bit",
    )  # fmt: skip
    assert run.wait() == 0, "".join(run.output)
    assert run.survivors() == []
    num_microbatches = sum(json.loads((tmp_path / "result.json").read_text())["status"][0])
    assert num_microbatches == 50 * 2 + NUM_PROBES
    num_microbatches -= NUM_PROBES
    assert_plain(tmp_path, "wide", prepared=with_wires)
    trainer, *servers = (json.loads((tmp_path / f"traffic-{rank}.json").read_text()) for rank in range(3))
    names = {server["peer_id"] for server in servers}
    between = sum(_sent(server, to=names) for server in servers)
    one_way_bytes = num_microbatches * ROWS * WIDTH * Blockwise8Bit.bits / 8
    checked_bytes = 8 * one_way_bytes / num_microbatches  # rows that a check computes together and apart, once
    assert 2 * one_way_bytes < between - checked_bytes <= 1.05 * 2 * one_way_bytes
    # Apart from the weights at both ends of the run, the trainer's traffic is too small for one stage's activations.
    to_servers = _sent(trainer, to=names)
    to_trainer = sum(_sent(server, to={trainer["peer_id"]}) for server in servers)
    assert to_servers + to_trainer < 0.4 * one_way_bytes


def _sent(traffic: dict[str, Any], *, to: set[str]) -> int:
    weights = {"server.load", "stage.state", "snapshot.keep"}
    return sum(n for peer, method, n in traffic["sent"] if peer in to and method not in weights)


@pytest.mark.thorough
def test_two_trainers_make_the_curve_of_the_batches_that_count(start_warm: Start, tmp_path: Path) -> None:
    """An exception in the lead ends the run for both; no process outlives it."""
    run = start_warm("digits", tmp_path, "--role", "both", "--target-batch-size", 20, "--fail-at", 60)
    run.wait_for("batch 60")
    assert run.survivors() == []
    assert run.wait() != 0
    assert any("the user's own mistake" in line for line in run.output)
    curve = Curve(weights=torch.load(tmp_path / "weights.pt"))
    for rank in range(2):
        notes = json.loads((tmp_path / f"notes-{rank}.json").read_text())
        for place, number, ids, loss in notes["batches"]:
            curve.batches[tuple(place)] = rank, ids
            curve.losses[tuple(place)], curve.numbers[tuple(place)] = loss, tuple(number)
        if rank == 0:
            curve.steps = [[(step, first) for step, first in places] for places in notes["steps"]]
    assert [places[0][0] for places in curve.steps] == list(range(len(curve.steps)))
    assert len(curve.steps) > 20

    def made() -> Net:
        return make("digits", endless=True)[0]

    assert_exact(curve, made, digits(), num_trainers=2, target_batch_size=20, made_as=torch.float32)


@pytest.mark.thorough
def test_a_server_whose_daemon_is_killed_says_so_and_the_run_goes_on(start_warm: Start, tmp_path: Path) -> None:
    run = start_warm("digits", tmp_path, "--num-stages", 2, "--microbatch-size", 3, "--max-steps", 50, "--clip", 0.5)
    run.wait_for("batch 3")
    (server,) = (pid for pid, command in run.alive().items() if "_bootstrap.py" in command)
    (daemon,) = (pid for pid, command in run.alive().items() if "p2pd" in command and parent_of(pid) == server)
    os.kill(daemon, signal.SIGKILL)
    assert run.wait() == 0, "".join(run.output)
    assert run.survivors() == []
    assert any(f"the libp2p daemon of this peer, process {daemon}, has ended" in line for line in run.output)
    assert len(json.loads((tmp_path / "result.json").read_text())["went_back"]) == 1
    assert_plain(tmp_path, "digits", 0.5)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "kill -9"])
def test_no_process_outlives_its_run(start: Start, tmp_path: Path, how: str) -> None:
    run = start("digits", tmp_path)
    run.wait_for("batch 3")
    assert len(run.alive()) >= 4  # two peers and their daemons
    if how == "Ctrl-C":
        run.interrupt()
    elif how == "SIGTERM":
        run.process.send_signal(signal.SIGTERM)
    else:
        run.process.kill()
    assert run.survivors() == []
    assert (run.wait() == 0) == (how == "SIGTERM")  # Lightning treats SIGTERM as an orderly end
    if how in ("Ctrl-C", "SIGTERM"):
        # The weights were gathered, and the other peer was notified.
        noise = ("Traceback", "older weights", "was killed", "[ERROR]")
        assert not [line for line in run.output if any(word in line for word in noise)]
