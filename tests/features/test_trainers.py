"""Several trainers: `role='both'` on several devices."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, StepError
from lightning_swarm.strategy.collectives import encode_shared
from lightning_swarm.strategy.metrics import SharedLogs
from tests.features.both import approx
from tests.features.mark import REFUSED, WORKS, feature
from tests.parity.models import DigitsMLP, digits
from tests.parity.test_trainers_come import come
from tests.parity.trainers import Seen, assert_exact, place_of, train


@feature(
    "`SwarmStrategy(role='both', target_batch_size=...)`",
    WORKS,
    "each device reads data and serves; needs `target_batch_size`",
)
def test_both() -> None:
    seen = train(2)
    assert_exact(seen, DigitsMLP, digits(), num_trainers=2)


@feature(
    "`SwarmStrategy(role='both', target_batch_size=..., initial_peers=...)`, to join a run in progress",
    WORKS,
    "adds a trainer from the next step on; also with `role='trainer'`",
)
def test_one_more_while_the_run_is_under_way() -> None:
    """The logs of both trainers are combined."""

    class Logs(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_epoch=False, on_step=True)
            return super().training_step(batch, batch_idx)

    logged: list[float] = []

    class Reads(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.strategy.run.loop.stepped:  # type: ignore[attr-defined]
                logged.append(float(trainer.callback_metrics["samples"]))

    seen, _ = come(lambda seen: Logs(), callbacks=lambda rank: [Reads()] if rank == 0 else [])
    assert_exact(seen, DigitsMLP, digits(), num_trainers=2)
    assert logged == [float(record.closing.num_samples) for record in seen.records]


@feature(
    "DataLoaders, `Trainer(use_distributed_sampler=...)`",
    WORKS,
    "each sample counts once per epoch, from any trainer; of an iterable dataset, each trainer reads every n-th sample",
)
def test_data() -> None:
    seen = train(2, max_steps=-1, max_epochs=1)
    parts = [{n for by, ids in seen.batches.values() if by == rank for n in ids} for rank in (0, 1)]
    assert len(parts[0]) + len(parts[1]) == 52
    assert not parts[0] & parts[1]


class Broadcasts(DigitsMLP):
    """Broadcasts the lead's values to all trainers before the first batch."""

    def __init__(self, told: dict[int, list[Any]]) -> None:
        super().__init__()
        self.told = told

    @override
    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        own = self.told.setdefault(self.trainer.global_rank, [])
        strategy.barrier("begin")
        own.append(strategy.broadcast({"name": secrets.token_hex(4), "seeds": [1, 2.5, None, True]}))

    @override
    def on_fit_start(self) -> None:
        self.told[self.trainer.global_rank].append(self.trainer.strategy.broadcast(secrets.token_hex(4)))


@feature(
    "`trainer.strategy.broadcast` and `barrier` before the first batch, in trainers that one program starts",
    WORKS,
    "`broadcast` returns the lead's text and numbers; at a `barrier`, other trainers wait until the lead has "
    "reached it",
)
def test_broadcast() -> None:
    told: dict[int, list[Any]] = {}
    train(3, lambda seen: Broadcasts(told), max_steps=2)
    assert len(told[0]) == 2
    assert told == dict.fromkeys(range(3), told[0])


@feature("`trainer.strategy.broadcast` of values other than text and numbers", REFUSED)
@pytest.mark.parametrize(
    "value",
    [(1, 2), torch.ones(()), {1: 2}, float("nan"), "x" * 40_000],
    ids=["tuple", "tensor", "keys", "nan", "long"],
)
def test_broadcast_of_objects(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"`broadcast` can send only text, numbers"):
        encode_shared(value, "broadcast")


class BroadcastsInStep(DigitsMLP):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trainer.strategy.broadcast("name")
        return super().training_step(batch, batch_idx)


@feature("`trainer.strategy.broadcast` in a step of several trainers", REFUSED)
def test_broadcast_in_a_step() -> None:
    with pytest.raises(ConfigError, match=r"`broadcast` must not be called"):
        train(2, lambda seen: BroadcastsInStep(), max_steps=2)


@feature("`Trainer(sync_batchnorm=True)` with several trainers", REFUSED)
def test_sync_batchnorm() -> None:
    with pytest.raises(ConfigError, match="`sync_batchnorm` must be False"):
        train(2, sync_batchnorm=True, max_steps=2)


class Lines(Logger):
    """Keeps the logged lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []
        self.steps: list[int | None] = []

    @property
    @override
    def name(self) -> str:
        return "lines"

    @property
    @override
    def version(self) -> str:
        return "0"

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @override
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append(metrics)
        self.steps.append(step)

    def column(self, name: str) -> list[float]:
        return [line[name] for line in self.lines if name in line]

    def steps_of(self, name: str) -> list[int | None]:
        return [step for step, line in zip(self.steps, self.lines, strict=True) if name in line]


class Logs(DigitsMLP):
    """Logs the loss in every way; withdraws some batches, with their logs."""

    def __init__(self, seen: Seen, *, choosy: bool = False) -> None:
        super().__init__()
        self.seen = seen
        self.choosy = choosy

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("step_only", loss, on_step=True, on_epoch=False, sync_dist=True)
        self.log("own", loss, on_step=False, on_epoch=True)
        for how in ("sum", "max", "min"):
            self.log(how, loss, on_step=True, on_epoch=True, reduce_fx=how, sync_dist=True)
        if self.trainer.global_rank == 1:
            self.log("of another", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.choosy and self.trainer.global_rank == 1 and self.trainer.fit_loop.batch_idx % 2:
            self.seen.withdrawn.add(place_of(self))
            return None
        return loss


def train_logged(
    make_module: Callable[[Seen], Any] = Logs,
    *,
    target_batch_size: int = 10,
    swarm: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Seen, Lines]:
    """Train for one epoch of the lead."""
    lines = [Lines(), Lines()]
    loggers = iter(lines)
    seen = train(
        2,
        make_module,
        max_steps=-1,
        max_epochs=1,
        each={"logger": lambda: next(loggers)},
        log_every_n_steps=1,
        swarm={"target_batch_size": target_batch_size, **(swarm or {})},
        **options,
    )
    assert_exact(seen, DigitsMLP, digits(), num_trainers=2, target_batch_size=1)
    return seen, lines[0]


def assert_logged(seen: Seen, lines: Lines) -> None:
    """Check for the log of one machine that trained on the counted batches, in float64."""
    steps = [
        [(seen.losses[place], len(seen.batches[place][1]), seen.batches[place][0]) for place in step]
        for step in seen.steps
    ]
    counted = [one for step in steps for one in step]

    def mean(batches: list[tuple[float, int, int]]) -> float:
        return sum(loss * number for loss, number, _ in batches) / sum(number for _, number, _ in batches)

    assert lines.steps_of("loss_step") == list(range(len(steps)))
    assert lines.column("loss_step") == approx([mean(step) for step in steps])
    assert lines.column("step_only") == approx([mean(step) for step in steps])
    assert lines.column("sum_step") == approx([sum(one[0] for one in step) for step in steps])
    assert lines.column("max_step") == approx([max(one[0] for one in step) for step in steps])
    assert lines.column("min_step") == approx([min(one[0] for one in step) for step in steps])
    assert lines.column("loss_epoch") == approx([mean(counted)])
    assert lines.column("sum_epoch") == approx([sum(one[0] for one in counted)])
    assert lines.column("max_epoch") == approx([max(one[0] for one in counted)])
    assert lines.column("min_epoch") == approx([min(one[0] for one in counted)])
    assert lines.column("own") == approx([mean([one for one in counted if one[2] == 0])])
    assert lines.column("of another") == approx([mean([one for one in counted if one[2] == 1])])


@pytest.mark.first_cells(1)
@feature(
    "`self.log(sync_dist=True)` of numbers in `training_step`",
    WORKS,
    "over the batches of all trainers in a step or epoch",
)
@pytest.mark.parametrize("choosy", [False, True])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_sync_dist(choosy: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seen, lines = train_logged(lambda seen: Logs(seen, choosy=choosy))
    assert_logged(seen, lines)
    said = [text for text in caplog.messages if "without `sync_dist=True`" in text]
    assert [text.split()[0] for text in said] == ["'own'"]
    assert bool(seen.withdrawn) == choosy

    monkeypatch.setattr(SharedLogs, "receive", lambda self, others, metrics: None)
    with pytest.raises(AssertionError):  # the check can fail
        assert_logged(*train_logged())


@feature(
    "`Trainer(log_every_n_steps=...)`",
    WORKS,
    "counts the swarm's steps, with batches from any trainers; no step is left out",
)
def test_each_step_is_logged_once_where_the_lead_passes_several() -> None:
    """Each batch is a step, so the lead passes the other trainer's steps while it waits for a place."""
    seen, lines = train_logged(target_batch_size=4)
    assert len(seen.steps) > seen.trainers[0].fit_loop.epoch_loop.total_batch_idx + 1
    assert_logged(seen, lines)


class Elsewhere(Logs):
    @override
    def on_train_epoch_end(self) -> None:
        self.log("late", 1.0, sync_dist=True)


def assert_refused(make_module: Callable[[Seen], Any], words: str) -> None:
    # This is the lead's error, or the one that ended another trainer.
    with pytest.raises((ConfigError, StepError), match=words):
        train(2, make_module, max_steps=-1, max_epochs=1)


@feature("`self.log(sync_dist=True)` in other training hooks", REFUSED, "log in `training_step`")
def test_sync_dist_elsewhere() -> None:
    assert_refused(
        Elsewhere, "`sync_dist=True` may be used only in `training_step`.*got 'late' in `on_train_epoch_end`"
    )
