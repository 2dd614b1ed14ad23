"""If all servers of a stage die, the run rolls back to a snapshot, and its curve remains that of one machine."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.core.errors import PeerError, StepError
from lightning_swarm.core.limits import Limits
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET, WEIGHT_TOLERANCE, Run, quiet_warnings, run_plain
from tests.parity.models import DigitsMLP, NanoGPT, Net, Recipe, TinyGPTWithLosses, digits, loader, sentences
from tests.parity.test_batch_norm import ResNet

STEPS = 12
SHORT = Limits(call_timeout=30.0, snapshot_interval=0.001, revive_timeout=5.0, stage_timeout=60.0)
"""A snapshot begins at every step if the one before is complete. Short timeouts end a failed rollback soon."""


def make_digits() -> Net:
    return DigitsMLP(Recipe(optimizer="adamw", schedule="onecycle"))


class Killing(L.Callback):
    """Kills peers when a batch begins.

    Args:
        at: Steps before which peers die, each once.
        peers: Numbers of the peers that die then, per entry of `at`.
    """

    def __init__(self, at: Sequence[int], peers: Sequence[Sequence[int]]) -> None:
        self.left = list(zip(at, peers, strict=True))
        self.num_killed = 0
        self.steps: list[int] = []  # `global_step` before each batch
        self.losses: dict[int, float] = {}  # step -> loss; a repeated step overwrites its first loss

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)
        self.kill_those_due(trainer)

    def kill_those_due(self, trainer: L.Trainer) -> None:
        if self.left and trainer.global_step == self.left[0][0]:
            _, peers = self.left.pop(0)
            strategy = trainer.strategy
            assert isinstance(strategy, InMemoryStrategy)
            for number in peers:
                self.strike(strategy, number)
                self.num_killed += 1

    def strike(self, strategy: InMemoryStrategy, number: int) -> None:
        assert strategy.network is not None
        strategy.network.kill(strategy.peers[number].transport.peer_id)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses[trainer.global_step - 1] = float(outputs["loss"])


class Fit:
    """A training run in a swarm, with its observations."""

    def __init__(
        self,
        killing: Killing,
        make: Callable[[], L.LightningModule] = make_digits,
        *,
        data: Any = None,
        validation: Any = None,
        limits: Limits = SHORT,
        num_stages: int = 2,
        devices: int = 2,
        callbacks: Sequence[L.Callback] = (),
        swarm: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.module = make()
        settings = {"num_stages": num_stages, "microbatch_size": 3, "latency_s": 0.001, **(swarm or {})}
        self.strategy = InMemoryStrategy(limits=limits, **settings)
        options = {"max_steps": STEPS, "max_epochs": -1, **options}
        with quiet_warnings():
            self.trainer = L.Trainer(
                **{**QUIET, **options}, devices=devices, strategy=self.strategy, callbacks=[*callbacks, killing]
            )
            self.trainer.fit(self.module, data or loader(digits()), validation)
        self.weights = self.module.state_dict()

    @property
    def num_went_back(self) -> int:
        return self.strategy.peers[0].events.counts["went_back"]

    def went_back_to(self) -> list[int | None]:
        """Return the steps to which the run rolled back."""
        events = self.strategy.peers[0].events
        return [event.step for event in events.newest if event.kind == "went_back"]


def assert_same(fit: Fit, killing: Killing, plain: Run) -> None:
    assert list(killing.losses) == list(range(len(plain.losses)))
    for step, loss in killing.losses.items():
        assert loss == pytest.approx(plain.losses[step], rel=1e-10)
    torch.testing.assert_close(fit.weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


def plain(make: Callable[[], L.LightningModule] = make_digits, data: Any = None, **options: Any) -> Run:
    return run_plain(make, data or loader(digits()), **{"max_steps": STEPS, "max_epochs": -1, **options})


def stages_of(fit: Fit) -> dict[str, tuple[int, ...]]:
    """Return the stages of the last run's servers at its end."""
    members = [server for server in fit.strategy.servers if server.membership.is_member]
    generation = max(server.membership.run.manifest.generation for server in members)
    assert generation > 0
    return {
        str(server.membership.me.peer_id): server.steps.stages
        for server in members
        if server.membership.run.manifest.generation == generation
    }


class KillingLate(Killing):
    """Kills peers when a step's batches are through and its record is awaited."""

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(trainer.global_step)

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        self.kill_those_due(trainer)


@pytest.mark.parametrize("at", [5, 6])
def test_it_dies_while_a_step_closes(at: int) -> None:
    killing = KillingLate([at], [[1]])
    fit = Fit(killing)
    assert killing.num_killed == 1
    assert len(fit.went_back_to()) == 1
    (pause,) = [event for event in fit.strategy.peers[0].events.newest if event.kind == "pause"]
    assert (pause.stage, pause.step) == (0, at)
    assert_same(fit, killing, plain())


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("at", [2, 5, 7, 8])
def test_the_only_server_of_a_stage_dies(at: int) -> None:
    """With epochs of 7 batches, it rolls back in the middle of an epoch, at its end, and across epochs."""
    killing = Killing([at], [[1]])
    fit = Fit(killing)
    assert killing.num_killed == 1
    (back,) = fit.went_back_to()
    assert back is not None
    assert 1 <= back <= at
    assert killing.steps == [*range(at + 1), *range(back, STEPS)], "callbacks see steps again from the snapshot's on"
    assert stages_of(fit) == {"peer-0": (0, 1)}, "the survivor holds both"
    assert_same(fit, killing, plain())


class Scaled(nn.Module):
    """Scales by a buffer that no state dict contains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heat", torch.ones(()), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = x * self.heat
        return scaled


class Annealed(DigitsMLP):
    """Updates such buffers from their previous values, in a block and beside the pipeline."""

    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw"))
        self.net.insert(3, Scaled())
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[3].heat.mul_(0.9)  # type: ignore[operator, union-attr]
        self.shift += 0.1

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0] + self.shift, batch[1]], batch_idx)


@pytest.mark.parametrize("at", [4, 8])
def test_buffers_that_no_state_dict_holds_go_back_too(at: int) -> None:
    killing = Killing([at], [[1]])
    fit = Fit(killing, Annealed)
    assert killing.num_killed == 1
    assert len(fit.went_back_to()) == 1
    assert_same(fit, killing, plain(Annealed))
    assert fit.module.net[3].heat.item() == pytest.approx(0.9**STEPS)  # type: ignore[operator, union-attr]


class TiedGPT(TinyGPTWithLosses):
    """Shares a weight between its first and last stage."""

    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="adamw"))
        self.net[3].out.weight = self.net[0].token.weight


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("make", "reference", "data"), [(ResNet, partial(ResNet, 3), digits), (TiedGPT, TiedGPT, sentences)]
)
def test_what_stages_keep_besides_their_own_weights_goes_back_too(
    make: Callable[[], L.LightningModule], reference: Callable[[], L.LightningModule], data: Callable[[], Any]
) -> None:
    """Running statistics, and weights that two stages share."""
    killing = Killing([5], [[1]])
    fit = Fit(killing, make, data=loader(data()))
    assert killing.num_killed == 1
    assert fit.num_went_back == 1
    assert_same(fit, killing, plain(reference, loader(data())))


def test_the_last_copies_of_two_stages_die() -> None:
    """Both servers of the second stage die at once, and one of the first stage's."""
    killing = Killing([6], [[1, 5, 4]])
    fit = Fit(killing, num_stages=3, devices=6)
    assert killing.num_killed == 3
    assert len(fit.went_back_to()) == 1
    assert stages_of(fit) == {"peer-0": (2,), "peer-2": (1,), "peer-3": (0,)}
    assert_same(fit, killing, plain())


def test_it_goes_back_again_and_again() -> None:
    killing = Killing([3, 6, 9], [[3], [2], [1]])
    fit = Fit(killing, num_stages=4, devices=4)
    assert killing.num_killed == 3
    assert len(fit.went_back_to()) == 3
    assert stages_of(fit) == {"peer-0": (0, 1, 2, 3)}
    assert_same(fit, killing, plain())


class DiesAtSetup(L.Callback):
    """Kills a peer when a run that rolled back is about to begin."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_setups = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.num_setups += 1
        if self.num_setups == 2:
            strategy = trainer.strategy
            assert isinstance(strategy, InMemoryStrategy)
            assert strategy.network is not None
            strategy.network.kill(strategy.peers[self.number].transport.peer_id)


def test_another_one_dies_while_it_goes_back() -> None:
    killing, dies = Killing([6], [[1]]), DiesAtSetup(2)
    fit = Fit(killing, num_stages=3, devices=3, callbacks=[dies])
    assert dies.num_setups == 3
    assert fit.num_went_back == 2
    assert len(fit.went_back_to()) == 1, "to the same snapshot"
    assert stages_of(fit) == {"peer-0": (0, 1, 2)}
    assert_same(fit, killing, plain())


def test_a_frozen_server_is_waited_for_and_then_done_without() -> None:
    class Freezing(Killing):
        def strike(self, strategy: InMemoryStrategy, number: int) -> None:
            assert strategy.network is not None
            strategy.network.freeze(strategy.peers[number].transport.peer_id)

    killing = Freezing([4], [[1]])
    fit = Fit(killing)
    assert killing.num_killed == 1
    assert len(fit.went_back_to()) == 1
    assert_same(fit, killing, plain())


# ---------------------------------------------------------------------- what the loop is at


class Random(Net):
    """Draws random numbers in its step and in the pipeline; logs by epoch, and counts with a metric."""

    def __init__(self) -> None:
        super().__init__(DigitsMLP(dropout=0.3).net, Recipe(schedule="onecycle"))
        self.mean = torchmetrics.MeanMetric()
        self.epochs: list[tuple[int, float, float]] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images * torch.rand_like(images)), labels)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        return loss

    @override
    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        self.epochs.append((self.trainer.current_epoch, float(found["mean_epoch"]), float(found["loss_epoch"])))


class Noisy(torch.utils.data.Dataset[list[Tensor]]):
    """Augments each sample at random, so that a repeated read differs."""

    def __len__(self) -> int:
        return len(digits())

    @override
    def __getitem__(self, index: int) -> list[Tensor]:
        image, label = digits()[index]
        return [image + 0.1 * torch.rand_like(image), label]


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("at", [3, 7, 10])
def test_random_numbers_are_drawn_again_and_averages_of_the_epoch_hold_each_batch_once(at: int) -> None:
    """The reference is a swarm without failures, because stages draw other random numbers than one machine."""
    fits = []
    for killing in (Killing([], []), Killing([at], [[1]])):
        torch.manual_seed(1)
        data = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True)
        fits.append((Fit(killing, Random, data=data), killing))
    (calm, calm_steps), (fit, killing) = fits
    assert len(fit.went_back_to()) == 1
    assert killing.losses == pytest.approx(calm_steps.losses, rel=1e-12)
    torch.testing.assert_close(fit.weights, calm.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)
    found, expected = fit.module.epochs, calm.module.epochs  # type: ignore[union-attr]
    assert dict.fromkeys(epoch for epoch, *_ in found) == dict.fromkeys(epoch for epoch, *_ in expected)
    last = {epoch: values for epoch, *values in found}
    for epoch, *values in expected:
        assert last[epoch] == pytest.approx(values, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("num_loaders", [1, 2])
def test_what_loaders_draw_from_generators_of_their_own_is_drawn_again(num_loaders: int) -> None:
    """The failure also comes in a later epoch than the first."""

    def data() -> Any:
        generators = [torch.Generator().manual_seed(number) for number in range(num_loaders)]
        loaders = [loader(digits(), shuffle=True, generator=one) for one in generators]
        return loaders if num_loaders > 1 else loaders[0]

    class Reading(Random):
        """Reads one batch of several."""

        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[-1] if num_loaders > 1 else batch, batch_idx)

    for at in (3, 9):
        losses = []
        for killing in (Killing([], []), Killing([at], [[1]])):
            fit = Fit(killing, Reading, data=data(), max_steps=12)
            assert len(fit.went_back_to()) == killing.num_killed
            losses.append(killing.losses)
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)


class Validated(L.Callback):
    """Records the steps after which validation ran."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}
        self.times: list[int] = []

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.times.append(trainer.global_step)
        self.found[trainer.global_step] = float(trainer.callback_metrics["val_loss"])


class Evaluated(Net):
    def __init__(self) -> None:
        super().__init__(DigitsMLP().net, Recipe())

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("at", [4, 7, 9])
def test_validation_schedules_and_accumulation_go_on_as_they_were(at: int) -> None:
    options: dict[str, Any] = {"max_epochs": 4, "max_steps": -1, "accumulate_grad_batches": 2, "val_check_interval": 3}
    validated, expected = Validated(), Validated()
    killing = Killing([at], [[1]])
    fit = Fit(killing, Evaluated, callbacks=[validated], validation=loader(digits(), 20), **options)
    torch.manual_seed(0)
    one = run_plain(Evaluated, loader(digits()), loader(digits(), 20), callbacks=[expected], **options)
    assert len(fit.went_back_to()) == 1
    assert validated.found == pytest.approx(expected.found, rel=1e-9)
    torch.testing.assert_close(fit.weights, one.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)
    rates = [trainer.optimizers[0].param_groups[0]["lr"] for trainer in (fit.trainer, one.trainer) if trainer]
    assert rates[0] == rates[1] < 0.01


@pytest.mark.skipif(not hasattr(lightning_callbacks, "WeightAveraging"), reason="came with Lightning 2.6")
def test_averaged_weights_are_of_each_step_once() -> None:
    options: dict[str, Any] = {"max_epochs": 2, "max_steps": -1}
    killing = Killing([9], [[1]])

    def make() -> Net:
        return make_digits().double()  # Lightning copies it before it is converted

    fit = Fit(killing, make, callbacks=[lightning_callbacks.EMAWeightAveraging(decay=0.8)], **options)
    one = plain(make, callbacks=[lightning_callbacks.EMAWeightAveraging(decay=0.8)], **options)
    (back,) = fit.went_back_to()
    assert back is not None
    assert back > 1
    torch.testing.assert_close(fit.weights, one.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("role", ["auto", "trainer"])
def test_what_is_on_the_trainer_goes_back_too(role: str) -> None:
    def make() -> Net:
        return NanoGPT(Recipe(schedule="onecycle"))

    devices = 2 + (role == "trainer")
    killing = Killing([6], [[devices - 1]])
    swarm = {"pipeline": "transformer.h", "role": role}
    fit = Fit(killing, make, data=loader(sentences()), devices=devices, swarm=swarm)
    assert len(fit.went_back_to()) == 1
    one = plain(make, loader(sentences()))
    torch.testing.assert_close(fit.weights, one.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


class Tunable(Net):
    """Has a learning rate for a finder to set; kills peers in the finder's trial, which calls no other callback.

    Args:
        in_trial: Called at the beginning of each batch of the trial.
    """

    def __init__(self, in_trial: Callable[[L.Trainer], None] = lambda _: None) -> None:
        super().__init__(DigitsMLP().net)
        self.learning_rate = 1e-3
        self.in_trial = in_trial

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not any(isinstance(one, LearningRateFinder) for one in self.trainer.callbacks):  # type: ignore[attr-defined]
            self.in_trial(self.trainer)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class Finder(LearningRateFinder):
    """Counts its trials."""

    num_trials = 0

    @override
    def lr_find(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.num_trials += 1
        super().lr_find(trainer, pl_module)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("at", "interval_s"), [(9, 0.001), (5, 300.0)])
def test_a_rate_that_was_found_is_not_looked_for_again(at: int, interval_s: float, tmp_path: Path) -> None:
    """The run does not roll back into the trial either, whose steps have the same numbers as the run's own."""
    killing, found, expected = Killing([at], [[1]]), Finder(num_training_steps=10), Finder(num_training_steps=10)
    limits = replace(SHORT, snapshot_interval=interval_s)
    fit = Fit(killing, Tunable, callbacks=[found], limits=limits, default_root_dir=tmp_path)
    one = plain(Tunable, callbacks=[expected], default_root_dir=tmp_path)
    assert killing.num_killed == 1
    assert len(fit.went_back_to()) == 1
    assert found.num_trials == expected.num_trials == 1
    assert_same(fit, killing, one)
    assert "on_fit_start" not in vars(found), "it will look again in another fit"


def test_a_trial_of_rates_cannot_go_back(tmp_path: Path) -> None:
    killing = Killing([3], [[1]])
    finder = Finder(num_training_steps=10)
    _, notes = broken_off(
        killing,
        make=lambda: Tunable(killing.kill_those_due),
        callbacks=[finder],
        default_root_dir=tmp_path,
    )
    assert "`LearningRateFinder` or `BatchSizeFinder` was still trying values" in notes
    assert finder.num_trials == 1


class Stateful(torch.utils.data.DataLoader[Any]):
    """Has a resumable position, as torchdata's loader does."""

    def __init__(self) -> None:
        super().__init__(digits(), batch_size=8)
        self.num_given = self.num_passed = 0

    @override
    def __iter__(self) -> Any:
        num_passed, self.num_passed = self.num_passed, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= num_passed:
                self.num_given = number + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"num_given": self.num_given % len(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_passed = state["num_given"]


def test_a_loader_that_knows_its_place_is_asked() -> None:
    killing = Killing([4], [[1]])
    fit = Fit(killing, data=Stateful())
    assert len(fit.went_back_to()) == 1
    assert_same(fit, killing, plain())


# ---------------------------------------------------------------------- where it cannot


def broken_off(killing: Killing, **options: Any) -> tuple[StepError | PeerError, str]:
    with pytest.raises((StepError, PeerError)) as caught:
        Fit(killing, **options)
    assert killing.num_killed > 0
    return caught.value, "\n".join(caught.value.__notes__)


def test_without_a_snapshot_the_error_names_the_checkpoint(tmp_path: Path) -> None:
    _, notes = broken_off(
        Killing([5], [[1]]),
        limits=replace(SHORT, snapshot_interval=None),
        callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=2)],
        enable_checkpointing=True,
    )
    assert "there is no snapshot to roll back to" in notes
    assert "step=4.ckpt" in notes


def test_who_dies_before_the_first_step_takes_the_run_along() -> None:
    _, notes = broken_off(Killing([0], [[1]]))
    assert "there is no snapshot to roll back to" in notes


def test_a_stage_and_its_keeper_die_together() -> None:
    """The third stage's server keeps the second stage, and the second's server keeps the third."""
    killing = Killing([6], [[1, 2]])
    _, notes = broken_off(killing, num_stages=4, devices=4)
    assert "there is no snapshot to roll back to" in notes


class Halves(L.Callback):
    """Computes with the weights when a checkpoint is saved."""

    @override
    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["halves"] = [tensor / 2 for tensor in checkpoint["state_dict"].values()]


def test_a_hook_that_works_on_weights_keeps_the_run_from_going_back(caplog: pytest.LogCaptureFixture) -> None:
    _, notes = broken_off(Killing([5], [[1]]), callbacks=[Halves()])
    assert "there is no snapshot to roll back to" in notes
    said = [record for record in caplog.records if "cannot be kept in memory" in record.message]
    assert len(said) == 1, "once, at the first snapshot"
    assert "['halves'][0]" in said[0].message


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left"), RuntimeError("file write failed")])
def test_a_full_disk_keeps_the_run_from_going_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failure: Exception
) -> None:
    """The error names both causes, and no file is left on the disk."""
    written: list[Path] = []

    def save(checkpoint: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        written.append(path)
        raise failure

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "save", save)
    _, notes = broken_off(Killing([5], [[1]]))
    assert len(written) == 1
    assert "The run could not roll back: a rollback must write a checkpoint" in notes
    assert f"into {tmp_path}, the folder for temporary files, and could not: {failure}. Free space" in notes
    assert not list(tmp_path.iterdir())


def test_an_error_of_another_kind_goes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                raise StepError("of the user's own")

    with pytest.raises(StepError, match="of the user's own") as caught:
        Fit(Killing([], []), callbacks=[Raising()])
    assert "no snapshot" not in "\n".join(caught.value.__notes__)
