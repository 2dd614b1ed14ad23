"""A swarm without a cut: each trainer computes the whole model, with the curve of one machine in float64."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.protocol.compression import Compression
from lightning_swarm.strategy.strategy import SwarmStrategy
from tests.features.test_trainers import assert_logged, train_logged
from tests.features.test_trainers_metrics import assert_epoch, assert_steps, trained
from tests.parity.harness import QUIET, assert_exact, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader
from tests.parity.test_trainers_come import LATE, RANK, trainers_of, under_way
from tests.parity.test_trainers_die import VICTIM, assert_right, freeze, kill, run
from tests.parity.trainers import Seen, train
from tests.parity.trainers import assert_exact as assert_same

WHOLE: dict[str, Any] = {"num_stages": 1, "microbatch_size": None}


UNCUT: dict[str, Any] = {**WHOLE, "role": "both", "target_batch_size": 13}  # also for a model that could be cut


class Branches(Net):
    """Has two branches and a parameter of its own, so it is no chain of blocks."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 12), nn.Tanh()), recipe)
        self.side = nn.Linear(64, 12, bias=False)
        self.head = nn.Linear(12, 10)
        self.temperature = nn.Parameter(torch.ones(()))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        mixed = self.net(images) * self.side(images).sigmoid()
        centred = mixed - mixed.mean(0)  # compares samples
        return F.cross_entropy(self.head(centred) / self.temperature, labels)


class Images(Net):
    """Has batch norms, one of which each sample passes twice."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(
            nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), recipe
        )
        self.twice = nn.BatchNorm1d(144, momentum=0.3)
        self.average = nn.BatchNorm1d(10, momentum=None)
        self.head = nn.Linear(144, 10, bias=False)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        found = self.net(images.view(-1, 1, 8, 8))
        found = self.twice(self.twice(found).relu())
        return F.cross_entropy(self.average(self.head(found)), labels)


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_batch_norms(num_trainers: int) -> None:
    # AdamW amplifies the rounding of gradients that are zero, and batches of four have more such gradients.
    recipe = Recipe(optimizer="sgd")
    seen = train(num_trainers, lambda seen: Images(recipe), max_steps=8, swarm=WHOLE)
    assert_same(seen, lambda: Images(recipe), digits(), num_trainers=num_trainers)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_one_trainer(num_batches: int) -> None:
    recipe = Recipe(schedule="onecycle")
    options: dict[str, Any] = {"max_steps": 50, "accumulate_grad_batches": num_batches, "gradient_clip_val": 0.5}
    plain = run_plain(lambda: Branches(recipe), loader(digits()), **options)
    swarm = run_swarm(lambda: Branches(recipe), loader(digits()), num_servers=1, **WHOLE, **options)
    assert_exact(swarm, plain)
    assert swarm.num_clipped > 0


@pytest.mark.parametrize("num_trainers", [2, 4])
def test_several_trainers(num_trainers: int) -> None:
    seen = train(num_trainers, lambda seen: Branches(), max_steps=20, swarm=WHOLE)
    assert_same(seen, lambda: Branches(), digits(), num_trainers=num_trainers)


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets")
def test_what_all_trainers_log() -> None:
    """Logged numbers and metric objects cover the batches of both trainers."""
    assert_logged(*train_logged(swarm=WHOLE))
    seen, lines = trained(swarm={"target_batch_size": 10, **WHOLE})
    assert_epoch(seen, lines)
    assert_steps(seen, lines)


class Enough(L.Callback):
    """Stops the lead's loop some steps after another trainer joined."""

    def __init__(self, seen: Callable[[], Seen], num_steps: int = 4) -> None:
        self.seen, self.num_steps = seen, num_steps

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        came = [step for step, who in enumerate(trainers_of(self.seen())) if LATE in who]
        trainer.should_stop = bool(came) and trainer.global_step >= came[-1] + 1 + self.num_steps


def test_a_trainer_joins_a_run_under_way() -> None:
    """Its server downloads the model first, then it trains."""
    kept: list[Seen] = []

    def making(seen: Seen) -> Branches:
        kept.append(seen)
        return Branches()

    def callbacks(rank: int) -> list[L.Callback]:
        return [Enough(lambda: kept[0])] if rank == 0 else []

    seen = train(2, making, come={RANK: under_way}, callbacks=callbacks, swarm=WHOLE, max_steps=2000)
    assert_same(seen, lambda: Branches(), digits(), num_trainers=2)
    assert [LATE] in trainers_of(seen)
    assert all({member.peer_id for member in rosters[0]} >= {LATE} for rosters in seen.rosters[-3:])


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_trainer_dies_or_freezes(is_killed: bool) -> None:
    """Other trainers bring its batch. A thawed trainer continues once its server has joined again."""
    seen, lead = run("before backward", kill if is_killed else freeze, num_records=2, **WHOLE)
    assert len(seen.errors) == is_killed
    assert_right(seen, lead)
    members = [{member.peer_id for member in rosters[0]} for rosters in seen.rosters]
    assert any(VICTIM not in one for one in members)
    assert (VICTIM in members[-1]) == (not is_killed)


class Validated(Branches):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_rank:
            time.sleep(0.05)  # the last batches of an epoch then come from another trainer
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.head(self.net(batch[0])), batch[1]))


class Newest(L.Callback):
    """Compares the weights in validation with the servers'."""

    def __init__(self) -> None:
        self.differing: list[tuple[int, str]] = []
        self.num_validated = 0

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, SwarmStrategy)
        assert trainer.strategy.run is not None
        session = trainer.strategy.run.session
        layers = session.local_layers
        assert layers is not None
        _, held = layers.runtime.run(layers.stage.copied_weights(layers.module.spec.index, None))
        own = dict(pl_module.named_parameters())
        self.differing += [(session.version, name) for name in held if name in own and not own[name].equal(held[name])]
        self.num_validated += 1


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("swarm", [WHOLE, {"pipeline": "net"}], ids=["whole", "around"])
def test_the_newest_weights_validate_whoever_brought_the_last_batch(swarm: dict[str, Any]) -> None:
    """The lead's own layers are current too, even if it brings no batch of the epoch's last steps."""
    newest = Newest()
    train(
        3,
        lambda seen: Validated(),
        callbacks=lambda rank: [newest] if rank == 0 else [],
        validation=lambda: loader(digits()),
        max_steps=-1,
        max_epochs=5,
        swarm=swarm,
    )
    assert newest.num_validated == 5
    assert not newest.differing


class Saving(L.Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_one_device_goes_on_from_what_stages_wrote(tmp_path: Path) -> None:
    """The file is a folder to which each server wrote its stages, optimizer state included."""
    saving = Saving(tmp_path / "folder", 7)  # the end of an epoch
    run_swarm(DigitsMLP, loader(digits()), max_steps=7, state_dict_type="sharded", callbacks=[saving])
    trainer = L.Trainer(**QUIET, devices=1, max_steps=14, strategy=SwarmStrategy())
    module = DigitsMLP().double()  # Lightning loads before it converts
    trainer.fit(module, loader(digits()), ckpt_path=saving.path)
    plain = run_plain(DigitsMLP, loader(digits()), max_steps=14)
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(weight, plain.weights[name], rtol=0.0, atol=1e-10)


class LooksAtItsOptimizer(Branches):
    """Reads the optimizer's state as `fit` begins, and before each batch."""

    def __init__(self) -> None:
        super().__init__(Recipe())
        self.steps: list[float] = []

    def look(self) -> None:
        state = self.trainer.optimizers[0].state_dict()["state"]
        self.steps += [float(one["step"]) for one in list(state.values())[:1]]

    @override
    def on_train_start(self) -> None:
        self.look()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look()


def test_an_optimizer_that_is_read_after_a_resume_goes_on(tmp_path: Path) -> None:
    """The state it reads is a copy, not the tensors that the stage updates in place."""
    saving = Saving(tmp_path / "saved.ckpt", 7)  # the end of an epoch
    run_swarm(LooksAtItsOptimizer, loader(digits()), num_servers=1, max_steps=7, callbacks=[saving], **WHOLE)
    options: dict[str, Any] = {"num_servers": 1, "max_steps": 10, "ckpt_path": saving.path, **WHOLE}
    found = run_swarm(LooksAtItsOptimizer, loader(digits()), **options)
    plain = run_plain(LooksAtItsOptimizer, loader(digits()), max_steps=10)
    for name, weight in plain.weights.items():
        # Adam amplifies rounding near zero
        torch.testing.assert_close(found.weights[name], weight, rtol=0.0, atol=1e-7)
    assert found.trainer is not None
    assert isinstance(found.trainer.lightning_module, LooksAtItsOptimizer)
    assert found.trainer.lightning_module.steps == [7.0, 7.0, 8.0, 9.0]


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [(UNCUT, {"num_stages": 3}), ({"num_stages": 2}, UNCUT)])
def test_a_run_goes_on_with_and_without_a_cut(before: Any, after: Any, tmp_path: Path) -> None:
    """The optimizer's state is restored too."""
    saving = Saving(tmp_path / "saved.ckpt", 4)  # the end of an epoch
    run_swarm(
        DigitsMLP, loader(digits(), 13), num_servers=before["num_stages"], max_steps=4, callbacks=[saving], **before
    )
    options = {"num_servers": after["num_stages"], "ckpt_path": saving.path, **after}
    found = run_swarm(DigitsMLP, loader(digits(), 13), max_steps=8, **options)
    assert found.status.is_whole == (after is UNCUT)
    plain = run_plain(DigitsMLP, loader(digits(), 13), max_steps=8)
    assert found.trainer is not None
    assert found.trainer.global_step == 8
    for name, weight in plain.weights.items():
        # Adam amplifies rounding near zero
        torch.testing.assert_close(found.weights[name], weight, rtol=0.0, atol=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"offload_optimizer": True}, 1e-9),
        ({"compression": "float16"}, 0.01),
        ({"compression": "8bit"}, 0.1),
        ({"compression": Compression(averaging="4bit", error_feedback=True)}, 0.2),
        ({"compression": Compression(averaging="powersgd", rank=8)}, 0.5),
    ],
    ids=["offloaded", "float16", "8 bits", "4 bits", "PowerSGD"],
)
def test_the_recipe_of_volunteers(options: dict[str, Any], share: float) -> None:
    """Each sample counts once, and all replicas have the same weights, close to the exact run's."""
    recipe = Recipe(optimizer="sgd")
    seen = train(2, lambda seen: Branches(recipe), max_steps=20, swarm={**WHOLE, **options})
    read = [number for places in seen.steps for place in places for number in seen.batches[place][1]]
    assert sorted(read[: len(digits())]) == list(range(len(digits())))
    exact = train(1, lambda seen: Branches(recipe), max_steps=20, swarm=WHOLE)
    begun = dict(Branches(recipe).double().state_dict())
    way = sum(float((exact.weights[name] - begun[name]).square().sum()) for name in exact.weights) ** 0.5
    off = sum(float((exact.weights[name] - seen.weights[name]).square().sum()) for name in exact.weights) ** 0.5
    assert way > 0.0
    assert off < share * way
