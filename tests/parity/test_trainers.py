"""Several trainers have the curve of plain torch on the batches that each record counts, in float64."""

from __future__ import annotations

import itertools
import math
import re
import threading
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.strategy import stopping
from lightning_swarm.strategy.data.loader import part_of
from tests.parity.models import DigitsMLP, NanoGPT, Recipe, digits, make_optimizer, make_schedule, sentences
from tests.parity.test_trainers_come import under_way
from tests.parity.trainers import Seen, ThreadStrategy, numbered, place_of, shuffled, train
from tests.parity.trainers import assert_exact as assert_exact_curve


def assert_exact(seen: Seen, *, num_trainers: int, recipe: Recipe | None = None) -> None:
    assert_exact_curve(seen, lambda: DigitsMLP(recipe), digits(), num_trainers=num_trainers)


class Watching(DigitsMLP):
    """Knows the run's observations."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen


@pytest.mark.parametrize(("num_trainers", "schedule"), [(2, "onecycle"), (3, "constant")])
def test_the_curve_is_that_of_the_batches_that_counted(num_trainers: int, schedule: Any) -> None:
    recipe = Recipe(schedule=schedule)
    seen = train(num_trainers, lambda seen: DigitsMLP(recipe))
    assert [record.step for record in seen.records] == list(range(8))
    assert_exact(seen, num_trainers=num_trainers, recipe=recipe)
    for rank, trainer in seen.trainers.items():
        # A trainer that learns of the last step late is notified of the run's end instead.
        assert trainer.global_step == 8 if rank == 0 else 5 <= trainer.global_step <= 8
    (leads,) = (trainer.optimizers[0].param_groups for rank, trainer in seen.trainers.items() if rank == 0)
    assert seen.records[-1].hyperparameters[0]["lr"] != leads[0]["lr"] or schedule == "constant"


def test_each_record_has_the_hyperparameters_of_its_step_where_trainers_take_turns() -> None:
    """Each batch is a step, so the lead passes other trainers' steps while it waits for a place."""
    recipe = Recipe(schedule="onecycle")
    seen = train(3, lambda seen: DigitsMLP(recipe), swarm={"target_batch_size": 4}, max_steps=12)
    of_the_lead = [any(seen.batches[place][0] == 0 for place in places) for places in seen.steps]
    assert (False, False) in itertools.pairwise(of_the_lead), "the lead passed two records for one place"
    optimizer = make_optimizer(DigitsMLP(recipe), recipe)
    schedule = make_schedule(optimizer, recipe)
    assert schedule is not None
    for record in seen.records:
        for named, group in zip(record.hyperparameters, optimizer.param_groups, strict=True):
            assert named["lr"] == pytest.approx(group["lr"], rel=1e-12), record.step
        optimizer.step()
        schedule.step()
    assert_exact_curve(seen, lambda: DigitsMLP(recipe), digits(), num_trainers=3, target_batch_size=4)


class Decays(Watching):
    """Sets each step's learning rate at the start of a batch, in the module or in a callback."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.set_rate()

    def set_rate(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + self.global_step)


class DecayCallback(L.Callback):
    rates: ClassVar = {5: 2e-3, 9: 1e-3}

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        group = trainer.optimizers[0].param_groups[0]
        group["lr"] = self.rates.get(trainer.global_step, group["lr"])


@pytest.mark.parametrize(("num_trainers", "size"), [(2, 4), (2, 8), (4, 4)])
def test_a_rate_that_a_hook_sets_is_that_of_its_step(num_trainers: int, size: int) -> None:
    """This holds for steps without a batch of the lead, and while its batch is reassigned to a later step."""
    seen = train(num_trainers, Decays, swarm={"target_batch_size": size}, max_steps=12)
    assert [record.hyperparameters[0]["lr"] for record in seen.records] == [0.01 / (1 + step) for step in range(12)]
    of_the_lead = [any(seen.batches[place][0] == 0 for place in places) for places in seen.steps]
    assert size > 4 or not all(of_the_lead), "there was no step of others"


def test_a_callback_changes_the_rate_at_the_steps_that_it_names() -> None:
    swarm = {"target_batch_size": 4}
    seen = train(3, Watching, swarm=swarm, max_steps=12, callbacks=lambda rank: [DecayCallback()])
    rates = [record.hyperparameters[0]["lr"] for record in seen.records]
    assert rates == [3e-3] * 5 + [2e-3] * 4 + [1e-3] * 3


def test_what_stands_around_a_list_of_blocks_is_averaged_among_the_trainers() -> None:
    seen = train(
        2, lambda seen: NanoGPT(), data=lambda: shuffled(sentences()),
        swarm={"pipeline": "transformer.h"},
    )  # fmt: skip
    assert_exact_curve(seen, NanoGPT, sentences(), num_trainers=2)


def test_a_batch_that_no_record_counts_is_noticed() -> None:
    """One batch gets an extra sample, so the check above must fail."""
    seen = train(2)
    place = seen.steps[3][0]
    rank, ids = seen.batches[place]
    seen.batches[place] = rank, [*ids[:-1], (ids[-1] + 1) % 52]
    with pytest.raises(AssertionError):
        assert_exact(seen, num_trainers=2)


def test_a_run_begins_with_all_of_its_trainers_though_servers_wait_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting server is there before the second trainer; without that trainer half of the data would be missing."""
    looked = 0
    make_peer, launched = ThreadStrategy.make_peer, threading.Event()

    def server_first(strategy: ThreadStrategy) -> None:
        make_peer(strategy)
        if strategy.is_global_zero:
            strategy.add_server()
            launched.set()
            return
        assert launched.wait(30.0)
        lead: Any = strategy._seen.trainers[0].strategy
        strategy._seen.wait_for(lambda: looked > 1 or lead.run is not None)

    def look(strategy: ThreadStrategy) -> None:
        nonlocal looked
        looked += 1

    monkeypatch.setattr(ThreadStrategy, "make_peer", server_first)
    monkeypatch.setattr(ThreadStrategy, "check_peers", look)
    seen = train(2, max_steps=2)
    assert looked > 1
    assert len(seen.records) == 2
    assert set(seen.trainers_of_the_run) == {"peer-0", "peer-1"}


# ---------------------------------------------------------------------- the lead alone validates, saves, decides


class Validated(Watching):
    """Validates slowly, so that the other trainers could advance meanwhile, and checks that the weights stay fixed."""

    @override
    def on_validation_start(self) -> None:
        self.before = self.weights()

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        torch.arange(10).sum()
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    @override
    def on_validation_end(self) -> None:
        assert all(torch.equal(tensor, self.before[name]) for name, tensor in self.weights().items())
        self.seen.validated.append(self.trainer.global_rank)

    def weights(self) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = self.trainer.strategy.lightning_module_state_dict()
        return weights


class Eager(L.Callback):
    """Makes the lead continue only after the other trainers have filled the step."""

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.global_step == trainer.max_steps:
            return
        strategy: Any = trainer.strategy
        assert isinstance(pl_module, Watching)
        pl_module.seen.wait_for(
            lambda: strategy.peer.server.admission.election.coordinator.generation.step_state.open.ready
        )


def test_the_lead_sees_every_step_and_validates_weights_that_stand_still(tmp_path: Path) -> None:
    saved = [ModelCheckpoint(tmp_path / str(rank), "{step}", every_n_train_steps=1, save_top_k=-1) for rank in range(2)]
    seen = train(
        2,
        Validated,
        validation=lambda: DataLoader(numbered(digits()), batch_size=26),
        callbacks=lambda rank: [saved[rank], *([Eager()] if rank == 0 else [])],
        val_check_interval=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=1,
        max_steps=4,  # ends within an epoch: the lead draws the order of the next one
        enable_checkpointing=True,
    )
    assert_exact(seen, num_trainers=2)
    assert set(seen.validated) == {0}
    files = sorted(path.name for path in (tmp_path / "0").iterdir())
    assert files == [f"step={step}.ckpt" for step in range(1, 5)]
    assert not (tmp_path / "1").exists()
    last = torch.load(tmp_path / "0" / "step=4.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(tensor, last[name]) for name, tensor in seen.modules[0].state_dict().items())


def test_decisions_are_the_leads() -> None:
    decisions = [EarlyStopping("val_loss", patience=1, stopping_threshold=100.0), Timer("00:00:10:00")]
    seen = train(
        2,
        Validated,
        data=lambda: DataLoader(numbered(digits()), batch_size=4),
        validation=lambda: DataLoader(numbered(digits()), batch_size=26),
        callbacks=lambda rank: list(decisions) if rank == 0 else [EarlyStopping("of nobody"), Timer("00:00:00:00")],
        max_steps=-1,
        max_epochs=4,
    )
    assert_exact(seen, num_trainers=2)
    assert seen.trainers[0].should_stop
    assert seen.trainers[0].current_epoch == 1
    assert seen.trainers[0].is_global_zero
    assert not seen.trainers[1].is_global_zero


# ---------------------------------------------------------------------- the end


class WithdrawsLast(Watching):
    """The other trainer keeps a place until the lead waits for the record of its last batch, and then withdraws it."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        strategy: Any = self.trainer.strategy
        if strategy.is_global_zero:
            if self.trainer.fit_loop.batch_idx == 1:
                self.seen.wait_for(lambda: bool(self.seen.withdrawn))
            return loss
        lead: Any = self.seen.trainers[0].strategy
        self.seen.withdrawn.add(place_of(self))
        self.seen.wait_for(
            lambda: (
                lead.peer.server.admission.election.coordinator.generation.trainers.lead._permitted_until is not None
            )
        )
        self.trainer.should_stop = True
        return None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_the_leads_last_batch_counts_though_another_withdraws_the_one_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New batches fill the withdrawn place; the lead brings the remaining batches as well."""
    monkeypatch.setattr(stopping, "ask_lead_to_stop", lambda *_, **__: None)  # the other trainer leaves alone
    seen = train(2, WithdrawsLast, max_steps=-1, max_epochs=1, swarm={"target_batch_size": 30})
    assert [record.closing.num_samples for record in seen.records] == [32, 16]
    assert len(seen.withdrawn) == 1
    assert seen.trainers[0].global_step == 2


def test_the_last_step_is_that_of_the_last_batch() -> None:
    seen = train(3, max_steps=-1, max_epochs=2, swarm={"target_batch_size": 10})
    assert seen.trainers[0].current_epoch == 2
    assert [record.closing.num_samples for record in seen.records] == [12] * 8 + [8]


@pytest.mark.thorough
def test_who_has_no_data_left_serves_to_the_end() -> None:
    class Short(Watching):
        @override
        def on_train_epoch_end(self) -> None:
            if self.trainer.global_rank == 1:
                self.trainer.fit_loop.max_epochs = 1

    seen = train(2, Short, max_steps=12)
    assert_exact(seen, num_trainers=2)
    assert len(seen.records) == 12
    assert 0 < sum(rank == 1 for rank, _ in seen.batches.values()) <= 7


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_ends_its_own_fit_and_at_the_lead_all(rank: int, when: str) -> None:
    class Faulty(Watching):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if (self.trainer.global_rank, self.trainer.fit_loop.batch_idx, when) == (rank, 2, "before"):
                raise RuntimeError("the user's own mistake")
            return loss

        @override
        def on_after_backward(self) -> None:
            if (self.trainer.global_rank, self.trainer.fit_loop.batch_idx, when) == (rank, 2, "after"):
                self.seen.withdrawn.add(place_of(self))
                raise RuntimeError("the user's own mistake")

    seen = train(2, Faulty, raises=False, max_steps=20)
    assert str(seen.errors.pop(rank)) == "the user's own mistake"
    assert not seen.errors
    if rank == 1:
        assert len(seen.records) == 20
        assert any(who == 1 for who, _ in seen.batches.values())
        assert_exact(seen, num_trainers=2)
        ids = [number for part in seen_in_order(seen) for number in part]
        epochs = [sorted(ids[first : first + 52]) for first in range(0, 208, 52)]
        assert epochs == [list(range(52))] * 4, "the lead brings the batch that failed"


def test_an_error_of_a_callback_takes_no_batch_that_counted_along() -> None:
    class Fails(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
            brought.append(not math.isnan(outputs["loss"]))  # otherwise the lead brought it
            if trainer.fit_loop.batch_idx == 2:
                raise RuntimeError("the callback's own mistake")

    brought: list[bool] = []
    seen = train(2, Watching, callbacks=lambda rank: [Fails()] * rank, raises=False, max_steps=20)
    assert str(seen.errors.pop(1)) == "the callback's own mistake"
    assert not seen.errors
    assert len(seen.records) == 20
    assert len(brought) == 3
    assert sum(rank == 1 for rank, _ in seen.batches.values()) == sum(brought)
    assert_exact(seen, num_trainers=2)


def test_callbacks_read_the_loss_of_every_batch() -> None:
    """This includes batches that another trainer has brought."""

    class Reading(Watching):
        @override
        def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            if self.trainer.global_rank == 1:
                losses.append(float(outputs["loss"]))

        @override
        def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
            if (self.trainer.global_rank, batch_idx) == (1, 2):  # waits until the lead has brought its batches
                reached = len(self.seen.batches) + 3
                self.seen.wait_for(lambda: len(self.seen.batches) >= reached)

    losses: list[float] = []
    seen = train(2, Reading, max_steps=20)
    assert_exact(seen, num_trainers=2)
    assert any(map(math.isnan, losses)), "a batch was another trainer's"
    assert not all(map(math.isnan, losses))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_batch_without_a_loss_counts_nowhere() -> None:
    class Choosy(Watching):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            if batch_idx % 3 == self.trainer.global_rank:
                self.seen.withdrawn.add(place_of(self))
                return None
            return loss

    seen = train(2, Choosy)
    assert_exact(seen, num_trainers=2)
    assert seen.withdrawn
    assert not seen.withdrawn & {place for places in seen.steps for place in places}


# ---------------------------------------------------------------------- data


def test_each_epoch_is_drawn_anew_and_shared() -> None:
    seen = train(2, max_steps=-1, max_epochs=2, swarm={"target_batch_size": 4})
    for rank in range(2):
        own = [ids for _, (of, ids) in sorted(seen.batches.items()) if of == rank]
        assert len(own) > 10, "lanes are of equal length"
    epochs = [
        [number for ids in part for number in ids]
        for part in ([*seen_in_order(seen)][:13], [*seen_in_order(seen)][13:])
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(52))
    assert epochs[0] != epochs[1]


def seen_in_order(seen: Seen) -> list[list[int]]:
    return [seen.batches[place][1] for places in seen.steps for place in places]


def test_without_sharing_every_trainer_draws_for_itself() -> None:
    seeds = iter(range(2))  # all trainers share the process's generators, because they are threads

    def draws() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(next(seeds))
        return DataLoader(numbered(digits()), batch_size=4, shuffle=True, generator=generator)

    seen = train(2, data=draws, use_distributed_sampler=False, max_steps=3)
    firsts = {rank: ids for (_, _), (rank, ids) in sorted(seen.batches.items(), reverse=True)}
    assert set(firsts) == {0, 1}
    assert firsts[0] != firsts[1]
    assert_exact(seen, num_trainers=2)


class Endless(IterableDataset[Any]):
    @override
    def __iter__(self) -> Any:
        while True:
            yield from numbered(digits())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_of_a_stream_each_takes_every_nth_sample(num_workers: int) -> None:
    """Workers that do not divide the stream each read all of it, as with a plain Trainer."""
    stream = DataLoader(Endless(), batch_size=4, num_workers=num_workers)
    seen = train(2, data=lambda: stream, max_steps=4)
    assert {number % 2 == rank for rank, ids in seen.batches.values() for number in ids} == {True}
    firsts = {rank: ids for (_, _), (rank, ids) in sorted(seen.batches.items(), reverse=True)}
    assert firsts == {0: [0, 2, 4, 6], 1: [1, 3, 5, 7]}
    assert_exact(seen, num_trainers=2)


def test_a_part_of_a_stream_is_as_long_as_it_is() -> None:
    class Numbers(IterableDataset[int]):
        name = "numbers"

        @override
        def __iter__(self) -> Any:
            return iter(range(7))

        def __len__(self) -> int:
            return 7

    parts = [part_of(DataLoader(Numbers(), batch_size=2), rank, 3) for rank in range(3)]
    assert [len(part) for part in parts] == [2, 1, 1]
    assert [[number for batch in part for number in batch.tolist()] for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [part.dataset.name for part in parts] == ["numbers"] * 3  # type: ignore[attr-defined]
    endless = part_of(DataLoader(Endless()), 0, 2)
    with pytest.raises(TypeError):
        len(endless)


@pytest.mark.parametrize("dataset", ["iterable", "sequential"])
def test_reading_the_same_batches_is_warned_of(dataset: str) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(Endless() if dataset == "iterable" else numbered(digits()), batch_size=4)

    with pytest.warns(UserWarning, match="Every trainer of the run reads all of its DataLoader.*counts once for every"):
        train(2, data=data, max_steps=2, use_distributed_sampler=False)


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "swarm", "words"),
    [
        ({}, {"target_batch_size": None}, r"`role='both'` on several devices needs `target_batch_size`.*got None.*Set"),
        (
            {"callbacks": lambda: [StochasticWeightAveraging(1e-2)]},
            {},
            r"must not change weights.*got StochasticWeightAveraging.*Use it with `role='auto'`",
        ),
        (
            {"callbacks": lambda: [LearningRateFinder()]},
            {},
            r"must not change weights.*got LearningRateFinder, through which `Tuner` works\. Use it with",
        ),
    ],
)
def test_it_is_refused_before_anything_starts(options: dict[str, Any], swarm: dict[str, Any], words: str) -> None:
    options = {name: make() for name, make in options.items()}
    callbacks = options.pop("callbacks", [])
    with pytest.raises(ConfigError, match=words):
        train(2, swarm=swarm, callbacks=lambda rank: callbacks, **options)


@pytest.mark.parametrize("come", [{}, {1: under_way}], ids=["started", "comes"])
def test_what_a_module_brings_is_refused_too(come: dict[int, Any]) -> None:
    class Brings(DigitsMLP):
        @override
        def configure_callbacks(self) -> L.Callback:
            return StochasticWeightAveraging(1e-2)

    made: list[Any] = []

    def make(seen: Seen) -> DigitsMLP:
        made.append(DigitsMLP() if come and not made else Brings())
        return made[-1]

    seen = train(2, make, come=come, raises=False)
    for rank in (1,) if come else (0, 1):
        assert isinstance(seen.errors[rank], ConfigError)
        assert re.search("must not change weights.*got StochasticWeightAveraging.*Use it", str(seen.errors[rank]))
    assert (0 in seen.errors) == (not come)


def test_a_module_that_averages_its_weights_trains_alone() -> None:
    """As with the same callback passed to the Trainer, no further trainer may join."""

    class Brings(DigitsMLP):
        @override
        def configure_callbacks(self) -> L.Callback:
            return StochasticWeightAveraging(1e-2, swa_epoch_start=1)

    class Watches(L.Callback):
        @override
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert isinstance(trainer.strategy, ThreadStrategy)
            assert trainer.strategy.run is not None
            seen.append((trainer.strategy.run.session.is_shared, trainer.strategy.is_shared))

    seen: list[tuple[bool, bool]] = []
    train(1, lambda _: Brings(), callbacks=lambda rank: [Watches()], max_steps=-1, max_epochs=3)
    assert seen == [(False, False)]


def assert_refused(seen: Seen, words: str) -> None:
    """Check that all trainers raise the refusal, also the lead if another one found it."""
    assert any(isinstance(error, ConfigError) and re.search(words, str(error)) for error in seen.errors.values())
    assert re.search(words, str(seen.errors[0]))


@pytest.mark.parametrize("name", ["all_gather", "reduce"])
def test_what_would_wait_for_the_others_is_refused(name: str) -> None:
    class Gathers(Watching):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.all_gather(loss) if name == "all_gather" else self.trainer.strategy.reduce(loss)
            return loss

    seen = train(2, Gathers, raises=False)
    assert_refused(seen, rf"`{name}` must not be called.*use `self.log\(..., sync_dist=True")


def test_freezing_in_mid_run_is_refused() -> None:
    class Freezes(Watching):
        @override
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                next(self.parameters()).requires_grad_(False)

    seen = train(2, Freezes, raises=False)
    assert_refused(seen, "the set of trained parameters must not change")


def test_another_trainers_own_end_is_not_its_step_count() -> None:
    """The server's optimizer is built with the lead's number of steps; the trainer's loop has its own limits."""
    seen: Seen = train(2, max_steps=-1, max_epochs=3)
    assert [trainer.max_epochs for trainer in seen.trainers.values()] == [3, 3]
    assert [trainer.max_steps for trainer in seen.trainers.values()] == [-1, -1]


class Adversarial(DigitsMLP):
    """Trains on images perturbed along its own input gradient."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images = batch[0].clone().requires_grad_()
        loss = F.cross_entropy(self.net(images), batch[1])
        (gradient,) = torch.autograd.grad(loss, images, retain_graph=True)
        return loss + F.cross_entropy(self.net(batch[0] + 0.1 * gradient.sign()), batch[1])


def test_gradients_by_the_input_add_nothing_whoever_takes_them() -> None:
    seen = train(3, lambda seen: Adversarial())
    assert_exact_curve(seen, Adversarial, digits(), num_trainers=3)


class AnotherLossLater(DigitsMLP):
    @override
    def on_after_backward(self) -> None:
        self.net(digits().tensors[0][:3].double()).sum().backward()


def test_a_batch_takes_no_more_once_it_counts_even_if_its_trainer_dies() -> None:
    with pytest.raises(ConfigError, match="another loss after that"):
        train(2, lambda seen: AnotherLossLater())
