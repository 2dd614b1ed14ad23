"""Averaged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.optim.swa_utils import get_ema_avg_fn
from typing_extensions import override

from tests.features.both import Both, Evaluated, Trained, fit_both
from tests.features.mark import WORKS, feature
from tests.parity.harness import LOSS_TOLERANCE, WEIGHT_TOLERANCE, assert_exact, run_plain, run_swarm
from tests.parity.models import digits, loader


class Watched(Evaluated):
    """Records the validation losses; float64 from the start, because the averages are copies of the start."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.found: list[float] = []

    @override
    def on_validation_epoch_end(self) -> None:
        self.found.append(float(self.trainer.callback_metrics["val_loss"]))


def skip_if_older() -> None:
    if not hasattr(callbacks, "WeightAveraging"):
        pytest.skip("came with Lightning 2.6")


def averaging() -> L.Callback:
    skip_if_older()
    return callbacks.WeightAveraging(avg_fn=get_ema_avg_fn(0.7))


def ema() -> L.Callback:
    skip_if_older()
    return callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=3, update_starting_at_epoch=1)


def swa() -> L.Callback:
    return callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=2, annealing_epochs=2)


def averaged(make: Any, folder: Path, **options: Any) -> Both:
    """Train twice; check that losses, validation losses, final weights and files are equal."""
    both = fit_both(
        Watched,
        loader(digits(), 20),
        made={"callbacks": lambda name: [make(), ModelCheckpoint(folder / name, "{step}", save_top_k=-1)]},
        enable_checkpointing=True,
        **options,
    )
    plain, swarm = both.plain.module, both.swarm.module
    assert isinstance(plain, Watched)
    assert isinstance(swarm, Watched)
    assert len(swarm.found) > 1
    assert swarm.found == pytest.approx(plain.found, rel=LOSS_TOLERANCE)
    files = sorted(path.name for path in (folder / "plain").iterdir())
    assert files == sorted(path.name for path in (folder / "swarm").iterdir())
    for name in files:
        theirs, ours = (torch.load(folder / run / name, weights_only=False) for run in ("plain", "swarm"))
        assert ours.keys() == theirs.keys()
        for key in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
            torch.testing.assert_close(ours.get(key), theirs.get(key), rtol=0.0, atol=WEIGHT_TOLERANCE)
    return both


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            averaging,
            marks=feature(
                "`WeightAveraging`",
                WORKS,
                "with one trainer; each update gathers the weights, and validation sends the averages to the servers",
            ),
        ),
        pytest.param(
            ema,
            marks=feature(
                "`EMAWeightAveraging`", WORKS, "with one trainer; `update_every_n_steps` sets how often weights travel"
            ),
        ),
        pytest.param(
            swa,
            marks=feature(
                "`StochasticWeightAveraging`",
                WORKS,
                "with one trainer; the weights are gathered at each epoch that it averages",
            ),
        ),
    ],
)
def test_averages(make: Any, tmp_path: Path) -> None:
    both = averaged(make, tmp_path, max_epochs=4, swarm={"num_servers": 4})
    strategy = both.swarm.strategy
    stages = [server.steps.stage(index) for server in strategy.servers for index in server.steps.stages]
    trained = {name: tensor for stage in stages for name, tensor in stage.weights().items()}
    moved = [name for name, tensor in trained.items() if not torch.equal(tensor, both.swarm.weights[name])]
    assert len(moved) == len(trained), "the module holds the averages, the servers what was trained"
    assert all(stage.generation.evaluation_weights is None for stage in stages)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("make", [averaging, swa])
@pytest.mark.parametrize(("first", "then"), [(run_plain, run_swarm), (run_swarm, run_plain)])
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@feature("averages in checkpoints", WORKS, "both ways between a swarm and a plain Trainer")
def test_resuming(make: Any, first: Any, then: Any, tmp_path: Path) -> None:
    """Any combination of Trainers equals the plain Trainer with its own file."""

    def parts(first: Any, then: Any, folder: Path) -> Any:
        def go(run: Any, name: str, **options: Any) -> Any:
            own = [make(), ModelCheckpoint(folder / name, "saved")]
            data, validation = loader(digits()), loader(digits(), 20)
            return run(Watched, data, validation, callbacks=own, enable_checkpointing=True, **options)

        go(first, "first", max_epochs=3)
        return go(then, "then", max_epochs=5, ckpt_path=folder / "first" / "saved.ckpt")

    plain, other = parts(run_plain, run_plain, tmp_path / "plain"), parts(first, then, tmp_path / "other")
    assert len(plain.module.found) == 2
    assert other.losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    assert other.module.found == pytest.approx(plain.module.found, rel=LOSS_TOLERANCE)
    torch.testing.assert_close(other.weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@feature(
    "`EarlyStopping`, `EMAWeightAveraging` and `ModelCheckpoint` together",
    WORKS,
    "their states move from a swarm to a plain Trainer and back",
)
def test_round_trip(tmp_path: Path) -> None:
    """The third run stops by counts that include the first two runs."""

    def through(*runs: Any, folder: Path) -> list[Any]:
        made = []
        for part, run in enumerate(runs):
            stop = EarlyStopping("val_loss", mode="max", patience=4)
            best = ModelCheckpoint(folder / str(part), "best", monitor="val_loss", mode="max")
            last = ModelCheckpoint(folder / str(part), "saved", every_n_epochs=1, save_top_k=1)
            made.append(
                run(
                    Watched,
                    loader(digits()),
                    loader(digits(), 20),
                    callbacks=[stop, ema(), best, last],
                    enable_checkpointing=True,
                    max_epochs=(2, 3, 9)[part],
                    ckpt_path=folder / str(part - 1) / "saved.ckpt" if part else None,
                )
            )
            assert stop.wait_count == (1, 2, 4)[part]
            assert stop.stopped_epoch == (0, 0, 4)[part]
        return made

    wanted = through(run_plain, run_plain, run_plain, folder=tmp_path / "plain")
    found = through(run_swarm, run_plain, run_swarm, folder=tmp_path / "other")
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.losses == pytest.approx(theirs.losses, rel=LOSS_TOLERANCE)
        assert ours.module.found == pytest.approx(theirs.module.found, rel=LOSS_TOLERANCE)
        torch.testing.assert_close(ours.weights, theirs.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)
    for part in "012":
        theirs, ours = (torch.load(tmp_path / name / part / "saved.ckpt") for name in ("plain", "other"))
        for key in ("state_dict", "current_model_state", "averaging_state", "optimizer_states"):
            torch.testing.assert_close(ours[key], theirs[key], rtol=0.0, atol=WEIGHT_TOLERANCE)
        assert ours["callbacks"].keys() == theirs["callbacks"].keys()
        assert len(ours["callbacks"]) == 4


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("validates", [True, False])
@feature(
    "averages of a module in float32 with `precision='64-true'`",
    WORKS,
    "Lightning creates them in float32, before it converts the module. Each validation passes the trained "
    "weights through them, and so rounds these weights. With `self.double()` in `__init__`, averages are in "
    "float64",
)
def test_averages_in_float32(validates: bool) -> None:
    make, validation = (Evaluated, [loader(digits(), 20)]) if validates else (Trained, [])
    plain = run_plain(make, loader(digits()), *validation, max_epochs=3, callbacks=[averaging()])
    swarm = run_swarm(make, loader(digits()), *validation, max_epochs=3, callbacks=[averaging()])
    assert_exact(swarm, plain)
    assert all(torch.equal(tensor, tensor.float().double()) for tensor in swarm.weights.values())
