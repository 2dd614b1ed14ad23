"""If the lead dies, a peer that was started with data takes the run over, with the curve of one machine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryTransport
from tests.parity.harness import WEIGHT_TOLERANCE, Run, comparable, run_plain
from tests.parity.models import DigitsMLP, NanoGPT, Net, Recipe, digits, loader, sentences
from tests.parity.standbys import LIMITS, Swarm, shuffled
from tests.parity.trainers import coordinator_of

STEPS = 10


def make_digits() -> Net:
    return DigitsMLP(Recipe(optimizer="adamw", schedule="onecycle"))


def assert_same(swarm: Swarm, plain: Run | None = None) -> None:
    plain = plain or run_plain(make_digits, loader(digits()), max_steps=STEPS, max_epochs=-1)
    assert sorted(swarm.losses) == list(range(len(plain.losses)))
    for step, loss in swarm.losses.items():
        assert loss == pytest.approx(plain.losses[step], rel=1e-10)
    torch.testing.assert_close(swarm.weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("at", [1, 4, 8])
def test_the_lead_dies_in_the_middle_of_an_epoch(at: int) -> None:
    """Epochs have 7 batches."""
    swarm = Swarm(1, 1, make_digits, {at: "lead"}, options={"max_steps": STEPS}).fit()
    assert swarm.leads == ["lead", "standby-0"]
    assert_same(swarm)


@pytest.mark.thorough
def test_the_standby_dies_too() -> None:
    swarm = Swarm(2, 2, make_digits, {3: "lead", 6: "standby-0"}, options={"max_steps": STEPS}).fit()
    assert swarm.leads == ["lead", "standby-0", "standby-1"]
    assert swarm.trainers["standby-1"].global_step == STEPS
    assert_same(swarm)


class Freezing(L.Callback):
    """Freezes the lead in mid-epoch."""

    def __init__(self, swarm: Callable[[], Swarm]) -> None:
        self.swarm = swarm

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and not self.swarm().frozen:
            self.swarm().freeze("lead")


@pytest.mark.thorough
def test_a_lead_that_is_cut_off_does_not_go_on_alone() -> None:
    """The lead has the whole model in snapshots but cannot know whether the other peers live, so it must stop."""
    swarm = Swarm(1, 1, make_digits, {}, lambda name: [Freezing(lambda: swarm)], options={"max_steps": STEPS})
    swarm.fit()
    assert swarm.frozen == ["lead"]
    assert swarm.leads == ["lead", "standby-0"]
    assert_same(swarm)
    notes = " ".join(getattr(swarm.errors["lead"], "__notes__", []))
    assert "The run does not roll back here: neither most of the voters nor ['standby-0'], which could take" in notes


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [14, 36])
def test_a_lead_is_cut_off_and_many_calls_come_too_late(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the freeze a seventh of the calls lose their request or their answer and time out."""
    rng, late = random.Random(seed), []
    send = MemoryTransport._send_call
    swarm = Swarm(1, 1, make_digits, {}, lambda name: [Freezing(lambda: swarm)], options={"max_steps": STEPS})

    async def send_late(self: MemoryTransport, peer: PeerId, method: str, request: bytes) -> bytes:
        delay_s = 1.1 * LIMITS.silence_timeout if swarm.frozen and rng.random() < 0.15 else 0.0
        is_request = rng.random() < 0.5
        if delay_s:
            late.append(method)
        await asyncio.sleep(delay_s if is_request else 0.0)
        answer = await send(self, peer, method, request)
        await asyncio.sleep(0.0 if is_request else delay_s)
        return answer

    monkeypatch.setattr(MemoryTransport, "_send_call", send_late)
    swarm.fit()
    assert len(late) > 10
    assert swarm.leads == ["lead", "standby-0"]
    assert_same(swarm)


class Returning(L.Callback):
    """Restarts the old lead's program while the standby leads; kills the standby once the old lead could lead."""

    def __init__(self, swarm: Callable[[], Swarm], name: str) -> None:
        self.swarm = swarm
        self.name = name

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        swarm = self.swarm()
        if self.name != "standby-0" or self.name in swarm.killed:
            return
        if trainer.global_step == 4:
            swarm.start("again")
        if trainer.global_step >= 4:
            swarm.waited_for(self._may_go_on, within_s=30.0)
        peer = swarm.strategies["again"].peer
        if (
            peer is not None
            and peer.server is not None
            and peer.server.snapshots.loops.versions
            and swarm.has_standby()
        ):
            swarm.kill("standby-0")

    def _may_go_on(self) -> bool:
        """Return whether the next record admits it, or an earlier one did."""
        again = self.swarm().strategies["again"].peer
        if again is None or again.server is None:
            return False
        coordinator = coordinator_of([one.peer for one in self.swarm().strategies.values() if one.peer is not None])
        waiting = {} if coordinator is None else coordinator.generation.server_membership._waiting
        return again.server.membership.is_member or any(one.ready for one in waiting.values())


@pytest.mark.thorough
def test_the_leads_program_started_again_serves_and_may_lead_once_more() -> None:
    swarm = Swarm(
        1,
        2,
        make_digits,
        {3: "lead"},
        lambda name: [Returning(lambda: swarm, name)],
        later=["again"],
        options={"max_steps": 40},
    )
    swarm.fit()
    assert swarm.leads == ["lead", "standby-0", "again"]
    assert_same(swarm, run_plain(make_digits, loader(digits()), max_steps=40, max_epochs=-1))


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("options", [{"delay_optimizer_step": True}, {"deterministic": True}])
def test_other_kinds_of_steps(options: dict[str, Any]) -> None:
    calm, swarm = (
        Swarm(1, 1, make_digits, kills, swarm=options, options={"max_steps": STEPS}).fit()
        for kills in ({}, {4: "lead"})
    )
    assert swarm.leads == ["lead", "standby-0"]
    assert swarm.losses.keys() == calm.losses.keys()
    if "deterministic" in options:
        assert swarm.losses == calm.losses
        assert all(map(torch.equal, swarm.weights.values(), calm.weights.values()))


@pytest.mark.thorough
def test_layers_around_the_pipeline_are_inherited() -> None:
    """Servers keep the layers around the pipeline as soon as a standby could take the run over."""

    def sentences_twice() -> DataLoader[Any]:
        return loader(sentences())

    make = partial(NanoGPT, Recipe(optimizer="adamw"))
    swarm = Swarm(
        1,
        1,
        make,
        {6: "lead"},
        data=sentences_twice,
        swarm={"pipeline": "transformer.h"},
        options={"max_steps": STEPS},
    ).fit()
    assert swarm.leads == ["lead", "standby-0"]
    assert_same(swarm, run_plain(make, sentences_twice(), max_steps=STEPS, max_epochs=-1))


class Watched(Net):
    """Logs by epoch, counts with a metric, draws random numbers in its step, and is validated."""

    def __init__(self) -> None:
        super().__init__(DigitsMLP().net, Recipe(schedule="onecycle"))
        self.mean = torchmetrics.MeanMetric()
        self.epochs: dict[int, tuple[float, float]] = {}

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images * torch.rand_like(images)), labels)
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.net(images), labels))

    @override
    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        self.epochs[self.trainer.current_epoch] = float(found["mean_epoch"]), float(found["loss_epoch"])


class Counting(L.Callback):
    """Has a state that JSON can represent, so that the next lead gets it."""

    def __init__(self) -> None:
        self.num_batches = 0

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        self.num_batches += 1

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


class Hoarding(L.Callback):
    """Has a state that only pickle could send, so the next lead does not get it."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"of my own": Hoarding()}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_callbacks_loggers_and_schedulers_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Compared with a swarm without failures: data, random numbers, averages of the epoch, decisions."""

    def callbacks(folder: Path) -> Sequence[L.Callback]:
        return [
            ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, filename="{step}"),
            EarlyStopping("val_loss", patience=50),
            LearningRateMonitor(),
            Counting(),
        ]

    options: dict[str, Any] = {
        "max_epochs": 3,
        "max_steps": -1,
        "enable_checkpointing": True,
        "log_every_n_steps": 1,
        "val_check_interval": 3,
    }

    def fit(name: str, kills: dict[int, str]) -> Swarm:
        def own(peer: str) -> Sequence[L.Callback]:
            return [*callbacks(tmp_path / name), *([Hoarding()] if kills else [])]

        return Swarm(
            1,
            1,
            Watched,
            kills,
            callbacks=own,
            data=shuffled,
            validation=lambda: loader(digits()),
            options={**options, "logger": CSVLogger(tmp_path, name=name)},
        ).fit()

    calm, swarm = fit("calm", {}), fit("killed", {10: "lead"})
    assert calm.leads == ["lead"]
    assert swarm.leads == ["lead", "standby-0"]
    assert swarm.losses == pytest.approx(calm.losses, rel=1e-11)
    torch.testing.assert_close(swarm.weights, calm.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)
    before, after = calm.trainers["lead"], swarm.trainers["standby-0"]
    assert (after.global_step, after.current_epoch) == (before.global_step, before.current_epoch)
    expected, found = calm.modules["lead"].epochs, swarm.modules["standby-0"].epochs
    assert sorted(found) == [1, 2], "it came in the second epoch"
    for epoch, values in found.items():
        assert values == pytest.approx(expected[epoch], rel=1e-11), "averages of the epoch hold each batch once"
    for kind in (ModelCheckpoint, EarlyStopping, Counting):
        one, other = (next(c for c in t.callbacks if isinstance(c, kind)) for t in (before, after))  # type: ignore[attr-defined]
        assert comparable(one.state_dict()) == comparable(other.state_dict()), kind
    kept = {one.name for one in (tmp_path / "killed").glob("*.ckpt")}
    assert {one.name for one in (tmp_path / "calm").glob("*.ckpt")} == kept - {"step=10.ckpt"}, "of steps done twice"
    (schedule,), (other,) = ([c.scheduler for c in t.strategy.lr_scheduler_configs] for t in (before, after))
    assert schedule.state_dict() == other.state_dict()
    assert "it will lack the state of callback 'Hoarding'" in caplog.text
