"""The last copy of a stage dies in a run of several trainers: all trainers roll back to a snapshot with their loops.

Each trainer is Lightning's own `fit`. The assignment of batches to steps is not deterministic, before or after the
rollback. The reference curve is therefore computed from the records of the surviving history.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torchmetrics import SumMetric
from typing_extensions import override

from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from tests.parity import trainers
from tests.parity.models import DigitsMLP, NanoGPT, Recipe, digits, sentences
from tests.parity.trainers import Seen, ThreadStrategy, shuffled, train

LIMITS = Limits(
    call_timeout=10.0,
    start_timeout=30.0,
    lead_timeout=30.0,
    silence_timeout=1.0,
    revive_timeout=1.0,
    leave_timeout=0.5,
    stage_timeout=60.0,
    snapshot_interval=0.001,
)
"""The interval is so short that a snapshot begins at every step if the one before is complete."""

NUM_STEPS = 20


def make_digits() -> DigitsMLP:
    return DigitsMLP(Recipe(schedule="onecycle"))


class Logging(DigitsMLP):
    """Counts samples in every way in which trainers log together, and keeps the lead's sums per epoch.

    Args:
        seen: Observations of the run.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__(Recipe(schedule="onecycle"))
        self.seen = seen
        self.num_samples = SumMetric()
        # (step, logged, counted) per epoch; a repetition overwrites the first
        self.epochs: dict[int, tuple[int, float, float]] = {}

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        num_samples = float(len(batch[0]))
        self.log("logged", num_samples, sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)
        self.num_samples(num_samples)
        self.log("counted", self.num_samples, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    @override
    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        if "logged" in found:
            values = float(found["logged"]), float(found["counted"])
            # `global_step`, not the number of known records: one that comes while it waits for a place belongs to the
            # next batch.
            self.epochs[self.trainer.current_epoch] = self.trainer.global_step, *values


@dataclass
class Killing(L.Callback):
    """The lead's callback, which kills peers at given steps, each once.

    Args:
        at: Numbers of records.
        peers: Names of the peers that die then, per entry of `at`.
    """

    at: list[int]
    peers: list[list[str]]

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ThreadStrategy)
        if self.at and len(strategy._seen.records) >= self.at[0]:
            self.at.pop(0)
            strategy._seen.kill(*self.peers.pop(0))


def run(
    num_trainers: int,
    killing: Killing,
    make: Callable[[Seen], Any] = Logging,
    *,
    others: dict[int, list[L.Callback]] | None = None,
    gone: Collection[int] = (),
    **options: Any,
) -> Seen:
    """Train, and raise the error of any trainer that was not killed.

    Args:
        num_trainers: Trainers, each with a server.
        killing: The lead's callback.
        make: Makes each trainer's module.
        others: Rank -> its callbacks.
        gone: Ranks that may also end with an error.
        options: As in `train`.
    """
    swarm = {"limits": LIMITS, **options.pop("swarm", {})}
    seen = train(
        num_trainers,
        make,
        callbacks=lambda rank: [*(others or {}).get(rank, []), *([killing] if rank == 0 else [])],
        raises=False,
        swarm=swarm,
        # By default each trainer has separate data and keeps its position there.
        **{"max_steps": NUM_STEPS, "apart": True, **options},
    )
    gone = {*gone, *(int(peer.removeprefix("peer-")) for peer in seen.killed if peer.startswith("peer-"))}
    unexpected = {rank: error for rank, error in seen.errors.items() if rank not in gone}
    for error in unexpected.values():
        raise error
    assert not killing.at, "nobody was killed"
    return seen


def assert_each_once(seen: Seen, living: Collection[int]) -> None:
    """Check that each trainer's batches count in order, none twice, and each sample once within an epoch."""
    counted = [place for places in seen.steps for place in places]
    for rank in living:
        numbers = [seen.numbers[place] for place in counted if seen.batches[place][0] == rank]
        length = 1 + max(index for _, index in numbers)
        last_epoch = max(epoch for epoch, _ in numbers)
        whole = [(epoch, index) for epoch in range(last_epoch + 1) for index in range(length)]
        assert sorted(numbers) == whole[: len(numbers)], f"trainer {rank} left out a batch, or it counts twice"
        samples = [
            (seen.numbers[place][0], one)
            for place in counted
            for by, ids in [seen.batches[place]]
            if by == rank
            for one in ids
        ]
        assert len(set(samples)) == len(samples)


def assert_right(seen: Seen, num_trainers: int, *, gone: Collection[int] = (), **options: Any) -> None:
    """Check weights, losses, loops and logs against the batches in the records."""
    assert len(seen.steps) == NUM_STEPS
    make, data = options.pop("make", make_digits), options.pop("data", digits())
    trainers.assert_exact(seen, make, data, num_trainers=num_trainers, gone=gone, **options)
    living = [rank for rank in range(num_trainers) if rank not in gone]
    assert_each_once(seen, living)
    counted = [place for places in seen.steps for place in places]
    lead = seen.trainers[0]
    own = [place for place in counted if seen.batches[place][0] == 0]
    assert lead.global_step == NUM_STEPS
    # If the last record came while it waited for a place, it has run one more batch, which got no place.
    assert lead.fit_loop.epoch_loop.batch_progress.total.completed in (len(own), len(own) + 1)
    for rank in living:
        progress = seen.trainers[rank].fit_loop.epoch_loop.batch_progress.total
        assert progress.completed <= progress.ready <= len([0 for by, _ in seen.batches.values() if by == rank]) + 1


def assert_logged(seen: Seen) -> None:
    """Check the lead's logged counts per epoch.

    They include other trainers' samples that were counted by then; its own samples count by its own epochs.
    """
    module = seen.modules[0]
    assert isinstance(module, Logging)
    assert module.epochs
    counted = [place for places in seen.steps for place in places]
    logged = total = 0.0
    for epoch, (version, *values) in sorted(module.epochs.items()):
        logged, total = logged + values[0], total + values[1]
        expected = 0
        for place in counted:
            rank, ids = seen.batches[place]
            expected += len(ids) * (seen.numbers[place][0] <= epoch if rank == 0 else place[0] < version)
        assert (logged, total) == (expected, expected), epoch


@pytest.mark.thorough
@pytest.mark.parametrize("at", [4, 12])
def test_a_stage_dies_with_its_trainer_and_one_is_left(at: int) -> None:
    killing = Killing([at], [["peer-1"]])
    seen = run(2, killing)
    (back,) = seen.went_back
    assert 1 <= back <= at + 1
    assert set(seen.errors) == {1}
    assert seen.trainers_of_the_run == ["peer-0"]
    assert_right(seen, 2, gone=[1])
    assert_logged(seen)


@pytest.mark.thorough
@pytest.mark.parametrize("at", [3, 10])
def test_a_stage_dies_with_its_trainer_and_two_are_left(at: int) -> None:
    killing = Killing([at], [["peer-1"]])
    seen = run(3, killing)
    (back,) = seen.went_back
    assert 1 <= back <= at + 1
    assert set(seen.errors) == {1}
    assert set(seen.trainers_of_the_run) == {"peer-0", "peer-2"}
    assert_right(seen, 3, gone=[1])
    assert_logged(seen)


@pytest.fixture
def one_more_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a server that joins before the lead, so that the lead does not hold the last of equally many stages."""
    make_peer = ThreadStrategy.make_peer

    def server_first(strategy: ThreadStrategy) -> None:
        make_peer(strategy)
        if strategy.is_global_zero:
            strategy.add_server()

    monkeypatch.setattr(ThreadStrategy, "make_peer", server_first)


@pytest.mark.first_cells(1)
@pytest.mark.usefixtures("one_more_server")
@pytest.mark.parametrize(("num_trainers", "at"), [(2, 4), (3, 12)])
def test_a_stage_dies_and_all_trainers_are_left(num_trainers: int, at: int) -> None:
    killing = Killing([at], [["server"]])
    seen = run(num_trainers, killing, swarm={"num_stages": num_trainers + 1})
    assert len(seen.went_back) == 1
    assert not seen.errors
    assert_right(seen, num_trainers)
    assert_logged(seen)


@pytest.mark.thorough
def test_a_run_goes_back_again_and_again() -> None:
    """Trainers that rolled back once do so again, with their progress since then."""
    killing = Killing([5, 11], [["peer-1"], ["peer-2"]])
    seen = run(4, killing, swarm={"num_stages": 4})
    assert len(seen.went_back) == 2
    assert set(seen.errors) == {1, 2}
    assert_right(seen, 4, gone=[1, 2])
    assert_logged(seen)


@pytest.mark.thorough
def test_what_is_on_the_trainers_goes_back_with_them() -> None:
    def make() -> NanoGPT:
        return NanoGPT(Recipe(schedule="onecycle"))

    killing = Killing([9], [["peer-1"]])
    seen = run(
        3,
        killing,
        lambda _: make(),
        data=lambda: shuffled(sentences()),
        swarm={"pipeline": "transformer.h"},
    )
    assert len(seen.went_back) == 1
    assert_right(seen, 3, gone=[1], make=make, data=sentences())


class Waiting(L.Callback):
    """Holds up a trainer before one of its batches, as slow code of the user's might.

    Args:
        seen: Observations of the run.
        batch: Index of that batch, once.
        reached: Condition that it waits for.
    """

    def __init__(self, seen: Callable[[], Seen], batch: int, reached: Callable[[Seen], bool]) -> None:
        self.seen = seen
        self.batch: int | None = batch
        self.reached = reached
        self.version = -1  # version of the weights that the trainer knew

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            self.batch, self.version = None, trainer.global_step
            self.seen().wait_for(lambda: self.reached(self.seen()))


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [0, 2])
def test_a_trainer_that_was_elsewhere_goes_back_to_where_it_was(batch: int) -> None:
    """The run rolls back to a version that it does not know yet. Only its server knows whether its batches count."""
    found: list[Seen] = []
    killing = Killing([8], [["peer-1"]])
    waiting = Waiting(lambda: found[0], batch, lambda seen: bool(seen.went_back))

    def make(seen: Seen) -> Logging:
        found[:] = [seen]
        return Logging(seen)

    seen = run(3, killing, make, others={2: [waiting]})
    (back,) = seen.went_back
    assert waiting.batch is None
    assert waiting.version < back
    assert_right(seen, 3, gone=[1])
    assert_logged(seen)
    assert set(seen.trainers_of_the_run) == {"peer-0", "peer-2"}


class Ended(L.Callback):
    """Ends a trainer's data after two batches, and counts how often its loop has ended."""

    num_ends = 0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.limit_train_batches, trainer.fit_loop.max_epochs = 2, 1

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.num_ends += 1


def test_a_trainer_whose_data_is_at_its_end_goes_back() -> None:
    """The trainer has only served since its data ended.

    The victim must have a batch left, because a thread that waits for the run's end cannot be killed. The two waiting
    trainers have far more data: while one holds its last batch, other trainers can add to the same step only.
    """
    found: list[Seen] = []
    ended = Ended()

    class KillingThen(Killing):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if ended.num_ends:
                super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def make(seen: Seen) -> Logging:
        found[:] = [seen]
        return Logging(seen)

    others: dict[int, list[L.Callback]] = {
        0: [Waiting(lambda: found[0], 9, lambda _: ended.num_ends > 0)],
        1: [Waiting(lambda: found[0], 9, lambda seen: bool(seen.killed))],
        2: [ended],
    }
    seen = run(3, KillingThen([1], [["peer-1"]]), make, others=others, max_steps=-1, max_epochs=2)
    assert len(seen.went_back) == 1
    assert ended.num_ends == 2
    assert_each_once(seen, [0, 2])
    trainers.assert_exact(seen, make_digits, digits(), num_trainers=3, target_batch_size=1, gone=[1])


@pytest.mark.thorough
def test_a_trainer_that_is_frozen_meanwhile_is_left_behind() -> None:
    """After it thaws, it belongs to no run, and ends."""
    found: list[Seen] = []

    class Freezing(Killing):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen, before = found[0], len(self.at)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            frozen = PeerId("peer-3")

            async def act() -> None:
                if len(self.at) < before:
                    seen.network.freeze(frozen)
                elif len(seen.records) >= NUM_STEPS - 4:
                    seen.network.thaw(frozen)

            seen.runtime.run(act())
            if not self.at and not seen.network.is_frozen(frozen):
                # Wait before the run's end, after which it would finish without an error.
                seen.wait_for(lambda: 3 in seen.errors)

    def make(seen: Seen) -> Logging:
        found[:] = [seen]
        return Logging(seen)

    seen = run(4, Freezing([6], [["peer-1"]]), make, gone=[1, 3], swarm={"num_stages": 4})
    assert len(seen.went_back) == 1
    assert set(seen.errors) == {1, 3}
    assert_right(seen, 4, gone=[1, 3])
    assert_logged(seen)
