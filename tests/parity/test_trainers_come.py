"""Trainers that join a run under way, train and leave again: one curve, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_swarm.coordinator.membership.trainers import TrainerMembership
from lightning_swarm.core.errors import ConfigError, Unreachable
from lightning_swarm.server.server import Server
from tests.parity.models import DigitsMLP, Recipe, digits
from tests.parity.trainers import LIMITS, Seen, ThreadStrategy, assert_exact, coordinator_of, numbered, train

LATE, RANK = "peer-1", 1
NUM_STEPS = 10
VALIDATED_EACH = 10  # batches


def server_of_lead(seen: Seen) -> Server | None:
    """Return the server of the lead's current run: after a rollback it is another object."""
    strategy = seen.trainers[0].strategy
    assert isinstance(strategy, ThreadStrategy)
    return None if strategy.peer is None else strategy.peer.server


def enrolment(seen: Seen) -> TrainerMembership:
    coordinator = coordinator_of([*seen.peers, *seen.servers])
    assert coordinator is not None
    return coordinator.generation.trainers.membership


def under_way(seen: Seen) -> None:
    """Wait until the run has a record, as a joining trainer does."""
    seen.wait_for(lambda: len(seen.records) > 0)


class Late(L.Callback):
    """Makes the lead continue when the trainer asks to join, and stop when `done`; records where the trainer begins."""

    def __init__(self, seen: Callable[[], Seen], done: Callable[[Seen], bool] = lambda seen: True) -> None:
        self.seen = seen
        self.done = done
        self.begins: dict[str, Any] = {}

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if isinstance(trainer.strategy, ThreadStrategy) and trainer.strategy.comes:
            self.begins = {
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "rank": trainer.global_rank,
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
            }

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, ThreadStrategy)
        if trainer.strategy.comes or trainer.global_step < 2:
            return
        seen = self.seen()
        seen.wait_for(lambda: LATE in enrolment(seen).waiting or [LATE] in trainers_of(seen) or seen.errors)
        if trainer.global_step == NUM_STEPS - 1:
            seen.wait_for(lambda: self.done(seen) or 0 in seen.errors)


def come(
    make_module: Callable[[Seen], Any] = lambda seen: DigitsMLP(),
    done: Callable[[Seen], bool] = lambda seen: True,
    callbacks: Callable[[int], list[L.Callback]] = lambda rank: [],
    **options: Any,
) -> tuple[Seen, Late]:
    """Train with a lead, and a trainer that joins its run."""
    kept: list[Seen] = []

    def making(seen: Seen) -> Any:
        kept.append(seen)
        return make_module(seen)

    late = Late(lambda: kept[0], done)
    options = {"max_steps": NUM_STEPS, "come": {RANK: under_way}, **options}
    rank = vars(rank_zero_only)["rank"]  # a global of the process, which these trainers share as threads only
    try:
        return train(2, making, callbacks=lambda rank: [late, *callbacks(rank)], **options), late
    finally:
        vars(rank_zero_only)["rank"] = rank


def test_one_that_reads_all_of_a_stream_says_so() -> None:
    class Stream(IterableDataset[Any]):
        @override
        def __iter__(self) -> Any:
            while True:
                yield from numbered(digits())

    with pytest.warns(UserWarning, match="joins a run under way, reads all of its DataLoader.*global_rank") as warned:
        seen, _ = come(data=lambda: DataLoader(Stream(), batch_size=4))
    assert [LATE] in trainers_of(seen)
    assert sum("reads all of its" in str(one.message) for one in warned) == 1, "the lead has no reason to"


def trainers_of(seen: Seen) -> list[list[str]]:
    """Return the trainers that joined or left, by record."""
    return [[*record.enlisted, *(f"-{peer}" for peer in record.retired)] for record in seen.records]


@pytest.mark.parametrize("role", ["both", "trainer"])
def test_it_trains_along_from_the_next_step_on(role: str) -> None:
    recipe = Recipe(schedule="onecycle")
    seen, late = come(lambda seen: DigitsMLP(recipe), roles={RANK: {"role": role}})
    assert_exact(seen, lambda: DigitsMLP(recipe), digits(), num_trainers=2)
    assert [LATE] in trainers_of(seen)
    first = trainers_of(seen).index([LATE]) + 1
    assert (late.begins["step"], late.begins["rank"]) == (first, 1)
    assert late.begins["epoch"] == _epoch_of(seen, first)
    assert late.begins["lr"] == pytest.approx(seen.records[first].hyperparameters[0]["lr"], rel=1e-12)
    assert seen.trainers[RANK].global_step > first


def _epoch_of(seen: Seen, step: int) -> int:
    """Return the lead's epoch when it asked for the record before `step`."""
    return max(number[0] for place, number in seen.numbers.items() if seen.batches[place][0] == 0 and place[0] < step)


def test_the_lead_alone_validates_and_saves(tmp_path: Any) -> None:
    saving: list[ModelCheckpoint] = []

    def callbacks(rank: int) -> list[L.Callback]:
        saving.append(ModelCheckpoint(dirpath=tmp_path / str(rank), every_n_train_steps=4))
        return [saving[-1]]

    seen, _ = come(callbacks=callbacks, enable_checkpointing=True)
    assert_exact(seen, DigitsMLP, digits(), num_trainers=2)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_an_epoch_is_validated_however_few_of_its_batches_the_lead_is_left_with() -> None:
    """Two validations are 10 of 13 batches apart; of an epoch with another trainer the lead brings fewer."""

    class Validated(DigitsMLP):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.seen = seen

        @override
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.seen.validated.append(self.trainer.current_epoch)

    for _ in range(4):  # thread timing decides who brings a batch
        seen, _ = come(Validated, validation=lambda: DataLoader(digits(), 52), val_check_interval=VALIDATED_EACH)
        leads = [place for place, (epoch, _) in seen.numbers.items() if epoch == 1 and seen.batches[place][0] == 0]
        assert seen.validated == [0, 1]
        if 0 < len(leads) < VALIDATED_EACH:
            break
    assert 0 < len(leads) < VALIDATED_EACH


def test_one_that_dies_in_its_first_step_is_not_waited_for() -> None:
    """Its server may hold a stage by then; the run fetches that from the lead's server."""

    class Dies(DigitsMLP):
        def __init__(self, seen: Seen) -> None:
            super().__init__()
            self.seen = seen

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.trainer.global_rank == RANK:
                self.seen.kill(LATE)
            return super().training_step(batch, batch_idx)

    limits = replace(LIMITS, silence_timeout=0.5, call_timeout=10.0)

    def gone(seen: Seen) -> bool:
        return LATE in enrolment(seen)._going or [f"-{LATE}"] in trainers_of(seen)

    seen, _ = come(Dies, gone, swarm={"limits": limits}, roles={RANK: {"role": "trainer"}}, raises=False)
    assert seen.killed == [LATE]
    assert isinstance(seen.errors.pop(RANK), Unreachable)
    assert not seen.errors
    assert [LATE] in trainers_of(seen)
    assert [f"-{LATE}"] in trainers_of(seen)
    assert_exact(seen, DigitsMLP, digits(), num_trainers=1, gone=[RANK])


def test_one_whose_loop_ends_leaves_and_the_others_go_on() -> None:
    class Ends(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = True

    def gone(seen: Seen) -> bool:
        return LATE in enrolment(seen)._going or [f"-{LATE}"] in trainers_of(seen)

    seen, _ = come(done=gone, callbacks=lambda rank: [Ends()] if rank == RANK else [])
    # Its loop's only batch may be one that the lead has brought before.
    has_brought = any(rank == RANK for rank, _ in seen.batches.values())
    assert_exact(seen, DigitsMLP, digits(), num_trainers=1 + has_brought)
    assert [f"-{LATE}"] in trainers_of(seen)


@pytest.mark.parametrize(
    ("swarm", "roles", "match"),
    [
        ({}, {RANK: {"target_batch_size": 24}}, r"`target_batch_size` is 24 here and 12 in run"),
        ({"role": "auto"}, {RANK: {"role": "both"}}, r"only if its starter has `role='both'`"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_trains(swarm: dict[str, Any], roles: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        come(swarm=swarm, roles=roles)


def test_it_brings_batches_of_the_order_that_the_run_has() -> None:
    """Each sample occurs once an epoch, in the steps of a run with a single trainer."""
    seen, _ = come()
    alone = train(1, max_steps=NUM_STEPS)
    steps, steps_alone = ([[one.batches[place][1] for place in step] for step in one.steps] for one in (seen, alone))
    assert steps[:4] == steps_alone[:4], "of the first epoch; threads have their random numbers in common"
    order = [one for step in steps for batch in step for one in batch]
    num_samples = len(digits())
    assert sorted(order[:num_samples]) == sorted(order[num_samples : 2 * num_samples]) == list(range(num_samples))
    assert {rank for rank, _ in seen.batches.values()} == {0, RANK}
