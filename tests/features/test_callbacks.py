"""Other callbacks and Tuner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.testing import InMemoryStrategy
from tests.features.both import STEPS, Evaluated, approx, fit_both, trainers
from tests.features.mark import REFUSED, WORKS, feature
from tests.features.refused import assert_refused
from tests.features.test_logging import assert_same_tables, table
from tests.parity.harness import WEIGHT_TOLERANCE, quiet_warnings, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Recipe, digits, loader


@pytest.mark.thorough
@feature("`EarlyStopping`", WORKS)
def test_early_stopping() -> None:
    def stopping(_: str) -> list[L.Callback]:
        return [callbacks.EarlyStopping("val_loss", min_delta=0.3, patience=2)]

    both = fit_both(Evaluated, loader(digits(), 20), made={"callbacks": stopping}, max_epochs=20)
    plain, swarm = (trainer.early_stopping_callback.stopped_epoch for trainer in both.trainers)
    assert swarm == plain
    assert 0 < plain < 19


@feature("`LearningRateMonitor`", WORKS)
def test_learning_rate_monitor(tmp_path: Path) -> None:
    fit_both(
        lambda: DigitsMLP(Recipe(schedule="onecycle")),
        made={
            "logger": lambda name: CSVLogger(tmp_path, "", name),
            "callbacks": lambda _: [callbacks.LearningRateMonitor("step", log_momentum=True)],
        },
        log_every_n_steps=1,
        max_steps=STEPS,
    )
    rates = [row["lr-AdamW/pg1"] for row in assert_same_tables(tmp_path)]
    assert len(set(rates)) == STEPS


@feature(
    "`DeviceStatsMonitor`", WORKS, "monitors the trainer's machine; `cpu_stats=True` needs psutil, as in Lightning"
)
def test_device_stats_monitor(tmp_path: Path) -> None:
    fit_both(
        made={
            "logger": lambda name: CSVLogger(tmp_path, "", name),
            "callbacks": lambda _: [callbacks.DeviceStatsMonitor(cpu_stats=True)],
        },
        log_every_n_steps=3,
        max_steps=STEPS,
    )
    plain, swarm = ([sorted(row) for row in table(tmp_path / name)] for name in ("plain", "swarm"))
    assert swarm == plain
    assert len([row for row in plain if "DeviceStatsMonitor.on_train_batch_end/cpu_percent" in row]) == 3


@feature("`ThroughputMonitor`", WORKS, "on the trainer: counts all samples, and the FLOPs of its own device")
def test_throughput_monitor(tmp_path: Path) -> None:
    class Counted(DigitsMLP):
        flops_per_batch = 1000

    fit_both(
        Counted,
        made={
            "logger": lambda name: CSVLogger(tmp_path, "", name),
            "callbacks": lambda _: [callbacks.ThroughputMonitor(lambda batch: len(batch[0]), window_size=3)],
        },
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        max_epochs=2,
    )
    plain, swarm = (table(tmp_path / name) for name in ("plain", "swarm"))
    assert [sorted(row) for row in swarm] == [sorted(row) for row in plain]
    samples, batches = (f"train/{what}" for what in ("samples", "batches"))
    counts = [[(row[batches], row[samples]) for row in rows if batches in row] for rows in (plain, swarm)]
    assert counts[0] == counts[1]
    assert len(counts[0]) > 2


@feature("`SpikeDetection`", WORKS)
def test_spike_detection(tmp_path: Path) -> None:
    class Spikes(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1000.0 if batch_idx == 5 else 1.0)

    for name, run in (("plain", run_plain), ("swarm", run_swarm)):
        file = tmp_path / f"{name}.json"
        spikes = callbacks.SpikeDetection(warmup=2, rtol=10.0, exclude_batches_path=file)
        with pytest.raises(TrainingSpikeException, match="batch 5"):
            run(Spikes, loader(digits()), max_steps=STEPS, callbacks=[spikes])
        assert json.loads(file.read_text(encoding="utf-8")) == [4, 5]


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        pytest.param(callbacks.TQDMProgressBar, "7/7", marks=feature("`TQDMProgressBar`", WORKS)),
        pytest.param(callbacks.RichProgressBar, "7/7", marks=feature("`RichProgressBar`", WORKS)),
    ],
)
def test_progress_bars(make: Callable[[], L.Callback], shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []

    def bar(_: str) -> list[L.Callback]:
        outputs.append("".join(capsys.readouterr()))
        return [make()]

    class Shows(Evaluated):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("shown", loss, prog_bar=True)
            return loss

    fit_both(Shows, loader(digits()), made={"callbacks": bar}, enable_progress_bar=True, max_epochs=1)
    outputs.append("".join(capsys.readouterr()))
    _, plain, swarm = outputs
    for words in (shown, "Epoch 0", "shown"):
        assert words in plain
        assert words in swarm


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(callbacks.ModelSummary, marks=feature("`ModelSummary`", WORKS, "covers the whole model")),
        pytest.param(callbacks.RichModelSummary, marks=feature("`RichModelSummary`", WORKS, "covers the whole model")),
    ],
)
def test_summaries(make: Callable[[], L.Callback], capsys: pytest.CaptureFixture[str], caplog: Any) -> None:
    outputs = []

    def summary(_: str) -> list[L.Callback]:
        outputs.append("".join(capsys.readouterr()) + caplog.text)
        caplog.clear()
        return [make()]

    fit_both(made={"callbacks": summary}, enable_model_summary=True, max_steps=STEPS)
    outputs.append("".join(capsys.readouterr()) + caplog.text)
    for text in outputs[1:]:
        assert "Trainable params" in text
        assert "2.8 K" in text, text


@feature("`BasePredictionWriter`", WORKS)
def test_prediction_writers(tmp_path: Path) -> None:
    class Writes(callbacks.BasePredictionWriter):
        def __init__(self, folder: Path) -> None:
            super().__init__("batch_and_epoch")
            self.folder = folder
            folder.mkdir()

        @override
        def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *where: Any) -> None:
            torch.save((prediction, where[0]), self.folder / f"{where[2]}.pt")

        @override
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            torch.save((predictions, batch_indices), self.folder / "all.pt")

    writers = [Writes(tmp_path / name) for name in ("plain", "swarm")]
    for trainer, writer in zip(trainers(), writers, strict=True):
        trainer.callbacks.append(writer)  # type: ignore[attr-defined]  # Lightning sets it in its connector
        torch.manual_seed(0)
        trainer.predict(Evaluated(), loader(digits()))
    names = sorted(path.name for path in writers[0].folder.iterdir())
    assert names == [*(f"{number}.pt" for number in range(7)), "all.pt"]
    for name in names:
        plain, swarm = (torch.load(writer.folder / name, weights_only=True) for writer in writers)
        assert swarm[1] == plain[1]
        torch.testing.assert_close(swarm[0], plain[0], rtol=0.0, atol=1e-12)


@feature("`LambdaCallback`, and callbacks of your own", WORKS, "hooks run in the trainer's process only")
def test_own_callbacks() -> None:
    calls: dict[str, list[int]] = {"plain": [], "swarm": []}

    def noting(name: str) -> list[L.Callback]:
        return [
            callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: calls[name].append(trainer.global_step))
        ]

    fit_both(made={"callbacks": noting}, max_steps=STEPS)
    assert calls["swarm"] == calls["plain"] == list(range(1, STEPS + 1))


@feature(
    "weights in `on_train_end`, `on_fit_end` of callbacks and of the module", WORKS, "unless `gather_on_end` is off"
)
def test_weights_at_the_end() -> None:
    seen: dict[str, list[tuple[str, torch.Tensor]]] = {"plain": [], "swarm": []}

    class Looks(DigitsMLP):
        def look(self, where: str) -> None:
            name = "swarm" if isinstance(self.trainer.strategy, InMemoryStrategy) else "plain"
            seen[name].append((where, self.net[0].weight.detach().clone()))

        @override
        def on_train_end(self) -> None:
            self.look("on_train_end of the module")

        @override
        def on_fit_end(self) -> None:
            self.look("on_fit_end of the module")

    looking = callbacks.LambdaCallback(
        on_train_end=lambda _, module: module.look("on_train_end of a callback"),
        on_fit_end=lambda _, module: module.look("on_fit_end of a callback"),
    )
    fit_both(Looks, made={"callbacks": lambda _: [looking]}, swarm={"role": "trainer"}, max_steps=STEPS)
    assert len(seen["plain"]) == 4
    for (where, weight), (where_plain, plain) in zip(seen["swarm"], seen["plain"], strict=True):
        assert where == where_plain
        torch.testing.assert_close(weight, plain, rtol=0.0, atol=WEIGHT_TOLERANCE)


# ---------------------------------------------------------------------- refused


def make_pruning() -> L.Callback:
    return callbacks.ModelPruning("l1_unstructured")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        pytest.param(make_pruning, "ModelPruning", marks=feature("`ModelPruning`", REFUSED, "prune after training")),
    ],
)
def test_refused_callbacks(make: Callable[[], L.Callback], name: str) -> None:
    assert_refused(rf"callbacks must not read or change weights.*got {name}\b.*Remove it", callbacks=[make()])


# ---------------------------------------------------------------------- trials


class Tunable(DigitsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 1e-3
        self.batch_size = 4

    @override
    def train_dataloader(self) -> Any:
        return loader(digits(), self.batch_size)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


@feature(
    "`Tuner.lr_find`",
    WORKS,
    "with one trainer; the run returns to the start of the trial. The losses of the trial, its suggestion and "
    "all later steps are the plain Trainer's",
)
def test_lr_find(tmp_path: Path) -> None:
    found = []
    for trainer in trainers(max_steps=STEPS, default_root_dir=tmp_path):
        torch.manual_seed(0)
        module = Tunable().double()
        start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with quiet_warnings():
            tuned = Tuner(trainer).lr_find(module, num_training=20)
            assert tuned is not None
            torch.testing.assert_close(dict(module.state_dict()), start, rtol=0.0, atol=0.0)
            assert (trainer.global_step, module.learning_rate) == (0, tuned.suggestion())
            trainer.save_checkpoint(tmp_path / "after.ckpt")  # the weights are current, from before the trial
            trainer.fit(module)
        assert trainer.global_step == STEPS
        found.append((tuned.results, module.learning_rate, dict(module.state_dict())))
    (plain, plain_rate, plain_weights), (swarm, swarm_rate, swarm_weights) = found
    assert len(plain["lr"]) == 20, "more than the run's `max_steps`"
    assert swarm["lr"] == approx(plain["lr"])
    assert swarm["loss"] == approx(plain["loss"])
    assert swarm_rate == approx(plain_rate)
    torch.testing.assert_close(swarm_weights, plain_weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


class FindsAgain(callbacks.LearningRateFinder):
    """As in Lightning's documentation, it runs at the beginning of certain epochs."""

    def __init__(self, *epochs: int) -> None:
        super().__init__(num_training_steps=20)
        self.epochs = epochs

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Skip the start of `fit`."""

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch in self.epochs:
            self.lr_find(trainer, pl_module)


def assert_same_rates(make: Callable[[], Any], folder: Path, *, num_restarts: int) -> Any:
    """Return the plain Trainer's learning rates and finder; check that the swarm's are equal, and its training, too."""
    finders: dict[str, Any] = {}

    def finding(name: str) -> list[L.Callback]:
        finders[name] = make()
        return [finders[name]]

    both = fit_both(Tunable, made={"callbacks": finding}, max_epochs=3, default_root_dir=folder)
    plain, swarm = (finders[name].optimal_lr for name in ("plain", "swarm"))
    assert swarm.results["lr"] == approx(plain.results["lr"])
    assert swarm.results["loss"] == approx(plain.results["loss"])
    assert both.swarm.learning_rates == approx(both.plain.learning_rates)
    assert {server.membership.run.manifest.generation for server in both.swarm.strategy.servers} == {num_restarts}
    return both.plain.learning_rates, plain


@feature("`LearningRateFinder`", WORKS, "as for `Tuner.lr_find`")
def test_finding_a_rate(tmp_path: Path) -> None:
    rates, finder = assert_same_rates(
        lambda: callbacks.LearningRateFinder(num_training_steps=20), tmp_path, num_restarts=1
    )
    assert set(rates) == {finder.suggestion()}
    assert finder.suggestion() != 1e-3


@feature("`LearningRateFinder` at the beginning of an epoch", WORKS, "in Lightning 2.6, the trial then has one step")
def test_finding_rates_again(tmp_path: Path) -> None:
    _, finder = assert_same_rates(lambda: FindsAgain(1), tmp_path, num_restarts=1)
    assert finder.results["loss"]


class TakesAtMost(nn.Module):
    """A block without memory for more samples."""

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        if len(hidden) > 16:
            raise RuntimeError("CUDA out of memory. Tried to allocate more.")
        return hidden


class Scalable(Tunable):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, TakesAtMost())


@pytest.mark.first_cells(1)
@feature(
    "`Tuner.scale_batch_size`, `BatchSizeFinder`",
    WORKS,
    "with one trainer; servers hold microbatches, so without `microbatch_size` a larger batch may fit",
)
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_scaling_batches(tmp_path: Path, mode: str) -> None:
    found = []
    for trainer in trainers(max_steps=STEPS, default_root_dir=tmp_path, microbatch_size=64):
        torch.manual_seed(0)
        module = Scalable().double()
        with quiet_warnings():
            Tuner(trainer).scale_batch_size(module, mode=mode, init_val=2, max_trials=5, steps_per_trial=2)
            trainer.fit(module)
        assert trainer.global_step == STEPS
        found.append((module.batch_size, dict(module.state_dict())))
    (plain_size, plain_weights), (swarm_size, swarm_weights) = found
    assert swarm_size == plain_size
    assert 8 < plain_size <= 16
    torch.testing.assert_close(swarm_weights, plain_weights, rtol=0.0, atol=WEIGHT_TOLERANCE)
