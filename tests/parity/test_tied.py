"""If several stages hold a parameter, all of them apply the step that one machine would apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm import Rebalancing
from lightning_swarm.core.errors import StageLost
from lightning_swarm.peer.config import Compression
from lightning_swarm.testing import FaultPlan, InMemoryStrategy, Phase
from tests.parity.harness import Run, SwarmRun, assert_exact, assert_same_curve, run_plain, run_swarm
from tests.parity.models import (
    Block,
    Embed,
    LossHead,
    Net,
    Recipe,
    TinyGPT,
    TinyGPTWithLosses,
    loader,
    sentences,
)
from tests.parity.test_joining import Joining

STEPS = 6
EMBEDDING = "net.0.token.weight"
RECIPE = Recipe(optimizer="adamw", schedule="onecycle")


class TiedGPT(TinyGPTWithLosses):
    """Shares one weight between the embeddings in the first block and the head in the last one."""

    def __init__(self) -> None:
        super().__init__(RECIPE)
        self.net[3].out.weight = self.net[0].token.weight


def options(**others: Any) -> dict[str, Any]:
    # Each step's norm exceeds this value, so a tied weight that counts twice would falsify all of them.
    return {"max_steps": STEPS, "max_epochs": -1, "gradient_clip_val": 0.5, **others}


@pytest.fixture(scope="module")
def plain() -> Run:
    return run_plain(TiedGPT, loader(sentences()), **options())


def swarm(**others: Any) -> SwarmRun:
    run = run_swarm(TiedGPT, loader(sentences()), **options(**others))
    assert run.num_clipped == STEPS
    assert_tied(run, at_least=2)
    module = run.module
    assert module.net[3].out.weight is module.net[0].token.weight  # type: ignore[union-attr, index]
    return run


def assert_tied(run: SwarmRun, *, at_least: int) -> None:
    """Check that all copies of the weight and of its optimizer state have the same bits, in both stages."""
    held = [
        (server.steps.stage(index).weights()[EMBEDDING], server.steps.stage(index).optimizer.state()[EMBEDDING])
        for server in run.strategy.servers
        for index in server.steps.stages
        if server.membership.me in run.rosters[-1][index]
        if EMBEDDING in server.steps.stage(index).parameters
    ]
    assert len(held) >= at_least
    for weight, state in held:
        assert torch.equal(weight, held[0][0])
        assert all(torch.equal(state[key], held[0][1][key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.first_cells(2)
@pytest.mark.parametrize(("num_stages", "num_servers"), [(2, 1), (2, 2), (2, 4), (3, 5), (4, 4)])
def test_a_tied_weight_trains_as_on_one_machine(plain: Run, num_stages: int, num_servers: int) -> None:
    run = swarm(num_stages=num_stages, num_servers=num_servers)
    assert_exact(run, plain)
    for norm, expected in zip(run.norms, plain.norms, strict=True):
        assert norm == pytest.approx(expected, rel=1e-11), "it counts once"


# Peers 0 and 2 hold the first stage, 1 and 3 the second. Peer 0 trains and coordinates.
@pytest.mark.first_cells(2)
@pytest.mark.parametrize(
    ("plan", "num_gone"),
    [
        (FaultPlan().kill("peer-3", at=Phase.AVERAGE_TIED, of="peer-3", step=2), 1),
        (FaultPlan().kill("peer-2", at=Phase.AVERAGE_TIED, of="peer-2", step=2), 1),
        (FaultPlan().freeze("peer-3", for_s=1e6, at=Phase.AVERAGE_TIED, of="peer-3", step=2), 1),
        (FaultPlan().drop("peer-2", at=Phase.AVERAGE_TIED, step=2), 0),
        (FaultPlan().kill("peer-3", at=Phase.AVERAGE_REDUCE, of="peer-3", step=2), 1),
        (FaultPlan().kill("peer-2", at=Phase.BACKWARD_DONE, step=2).kill("peer-3", at=Phase.AVERAGE, step=3), 2),
    ],
    ids=["dies in a share", "the other dies", "freezes in a share", "a share is lost", "dies in a part", "both die"],
)
def test_a_server_that_dies_in_a_round(plain: Run, plan: FaultPlan, num_gone: int) -> None:
    try:
        run = swarm(num_servers=4, num_gone=num_gone, faults=plan, latency_s=0.001)
    finally:
        plan.check()
    assert_exact(run, plain)
    assert [record.outcome for record in run.records] == ["apply"] * STEPS


@pytest.mark.parametrize("count", [1, 2])
def test_servers_that_join(plain: Run, count: int) -> None:
    """They download the round's mean, which includes the gradients of stages that they are not in."""
    joining = Joining(at=1, count=count)
    run = swarm(callbacks=[joining], num_joiners=count, latency_s=0.001)
    assert_exact(run, plain)
    assert {index for joiner in joining.joiners for index in joiner.steps.stages} == set(range(count))


def test_who_holds_both_stages_gives_one_up(plain: Run) -> None:
    """Until then one tensor serves both stages, and takes one step."""
    run = swarm(
        callbacks=[Joining(at=1)],
        num_servers=1,
        num_joiners=1,
        num_shed=1,
        latency_s=1e-4,
        rebalancing=Rebalancing("gain", interval=0.5),
        microbatch_s=[0.1, 0.1],
    )
    assert_exact(run, plain)
    assert [len(server.steps.stages) for server in run.strategy.servers] == [1, 1]


class Nudging(L.Callback):
    """Changes the weight slightly at one server, as an optimizer might that rounds differently."""

    def __init__(self, server: int) -> None:
        self.server = server

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert isinstance(trainer.strategy, InMemoryStrategy)
        if batch_idx == 2:
            with torch.no_grad():
                steps = trainer.strategy.servers[self.server].steps
                steps.stage(*steps.stages).parameters[EMBEDDING] *= 1 + 1e-15


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_server_whose_copy_comes_to_differ_is_left_out(plain: Run, number: int) -> None:
    """This holds even for the senior server of its stage, because the other stage agrees with its junior."""
    run = swarm(callbacks=[Nudging(number)], num_servers=4, num_gone=1)
    assert_exact(run, plain)
    ((step, vacancy),) = [(record.step, one) for record in run.records for one in record.left]
    assert (step, vacancy.member.peer_id) == (2, f"peer-{number}")
    assert f"'{EMBEDDING}'" in str(vacancy.reason)


def test_where_the_only_servers_of_two_stages_differ_nobody_is_left_of_one() -> None:
    with pytest.raises(StageLost, match=r"stage 1: 'net.0.token.weight' of peer-0 differ from those of stage 0"):
        swarm(callbacks=[Nudging(1)])


@pytest.mark.parametrize("averaging", ["8bit", "powersgd"])
def test_codecs_leave_it_the_same_in_both_stages(plain: Run, averaging: Any) -> None:
    run = swarm(num_servers=4, compression=Compression(averaging=averaging))
    assert run.losses != plain.losses
    assert_same_curve(run, plain, loss=0.1)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_checkpoints_hold_it_as_those_of_one_machine_and_go_both_ways(tmp_path: Path) -> None:
    files = {}
    for name, train in (("plain", run_plain), ("swarm", run_swarm)):
        saving = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=STEPS)
        train(TiedGPT, loader(sentences()), callbacks=[saving], enable_checkpointing=True, **options())
        files[name] = tmp_path / name / f"step={STEPS}.ckpt"
    saved = {name: torch.load(path, weights_only=False) for name, path in files.items()}
    for ours, theirs in (
        (saved["swarm"]["state_dict"], saved["plain"]["state_dict"]),
        *zip(*(one["optimizer_states"][0]["state"].values() for one in (saved["swarm"], saved["plain"])), strict=True),
    ):
        assert ours.keys() == theirs.keys()
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=0, atol=1e-11)
    assert torch.equal(saved["swarm"]["state_dict"]["net.3.out.weight"], saved["swarm"]["state_dict"][EMBEDDING])
    further = options(max_steps=STEPS + 3)
    expected = run_plain(TiedGPT, loader(sentences()), ckpt_path=files["plain"], **further)
    assert_exact(run_plain(TiedGPT, loader(sentences()), ckpt_path=files["swarm"], **further), expected)
    assert_exact(run_swarm(TiedGPT, loader(sentences()), ckpt_path=files["plain"], **further), expected)


class Repeated(Net):
    """Repeats the same block in all stages."""

    def __init__(self) -> None:
        block = Block(8)
        super().__init__(nn.Sequential(Embed(8), block, block, block, TinyGPT().net[3]), RECIPE)

    training_step = TinyGPT.training_step


@pytest.mark.parametrize("num_servers", [1, 3, 5])
def test_a_block_that_is_in_every_stage(num_servers: int) -> None:
    plain = run_plain(Repeated, loader(sentences()), **options())
    run = run_swarm(Repeated, loader(sentences()), num_stages=3, num_servers=num_servers, **options())
    held = [len(server.steps.stages) for server in run.strategy.servers]
    assert sum(held) == max(3, num_servers)
    assert_exact(run, plain)


class DetachedHead(LossHead):
    """Reads its weight, and produces no gradient for it."""

    @override
    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits = F.linear(self.norm(hidden), self.out.weight.detach())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets).mean(1)


class HalfTied(TiedGPT):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = DetachedHead(8)
        self.net[3].out.weight = self.net[0].token.weight


def test_a_stage_that_gives_no_gradient_takes_the_step_as_well() -> None:
    plain = run_plain(HalfTied, loader(sentences()), **options())
    run = run_swarm(HalfTied, loader(sentences()), num_servers=3, **options())
    assert_tied(run, at_least=3)
    assert_exact(run, plain)
