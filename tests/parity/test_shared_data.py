"""Trainers share one order of batches: each sample once an epoch, in the same steps, for any number of trainers."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler, random_split
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, digits
from tests.parity.test_trainers_come import enrolment, server_of_lead
from tests.parity.test_trainers_roll_back import LIMITS as BACK
from tests.parity.test_trainers_roll_back import Killing
from tests.parity.trainers import Curve, Seen, default_dtype, numbered, place_of, shuffled, train

QUICK = Limits(call_timeout=30.0, start_timeout=30.0, lead_timeout=30.0, silence_timeout=1.0)

NUM_SAMPLES = 52


class Weights(L.Callback):
    """Records the lead's weights after each step."""

    def __init__(self) -> None:
        self.found: dict[int, dict[str, Tensor]] = {}

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.found[trainer.global_step] = {name: tensor.clone() for name, tensor in state.items()}


def curve(seen: Curve) -> list[list[tuple[list[int], float]]]:
    """Return the batches of each step and their losses, in the order of their places."""
    return [
        [(seen.batches[place][1], seen.losses[place]) for place in sorted(places, key=of_step)] for places in seen.steps
    ]


def of_step(place: tuple[int, int]) -> int:
    return place[1] % (1 << 26)


def assert_same(seen: Seen, reference: Seen) -> None:
    assert [[ids for ids, _ in step] for step in curve(seen)] == [[ids for ids, _ in step] for step in curve(reference)]
    for step, other in zip(curve(seen), curve(reference), strict=True):
        assert [loss for _, loss in step] == pytest.approx([loss for _, loss in other], rel=1e-10)
    for name, tensor in reference.weights.items():
        torch.testing.assert_close(seen.weights[name], tensor, rtol=0.0, atol=1e-10)


def counted(seen: Seen) -> list[int]:
    return [number for places in seen.steps for place in places for number in seen.batches[place][1]]


def assert_each_once(seen: Seen, num_epochs: int) -> None:
    samples = counted(seen)
    for epoch in range(num_epochs):
        assert sorted(samples[epoch * NUM_SAMPLES : (epoch + 1) * NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    assert len(samples) == num_epochs * NUM_SAMPLES


def run(num_trainers: int, make_module: Callable[[Seen], Any] = lambda seen: DigitsMLP(), **options: Any) -> Seen:
    return train(num_trainers, make_module, **{"max_steps": -1, "max_epochs": 3, **options})


ALONE = Weights()


@pytest.fixture(scope="module")
def alone() -> Seen:
    return run(1, callbacks=lambda rank: [ALONE])


def test_one_trainer_reads_what_a_plain_one_reads(alone: Seen) -> None:
    loader = shuffled(digits())
    # Lightning requests no more batches from a loader than it has.
    plain = [batch[-1].tolist() for _ in range(3) for batch in islice(loader, 13)]
    assert [ids for step in curve(alone) for ids, _ in step] == plain
    assert_each_once(alone, 3)


class Slow(DigitsMLP):
    """The second trainer takes several times as long for a batch as the first one's recent batches took."""

    took_s = [0.1]  # noqa: RUF012 - of both trainers' modules: what the first one's batches took

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.began_s = time.monotonic()
        if self.trainer.global_rank == 1:
            time.sleep(4 * self.took_s[-1])
        return super().training_step(batch, batch_idx)

    @override
    def on_after_backward(self) -> None:
        if self.trainer.global_rank == 0:
            self.took_s.append(time.monotonic() - self.began_s)


@pytest.mark.thorough
def test_a_faster_trainer_brings_more_of_each_step() -> None:
    four: dict[str, Any] = {"swarm": {"target_batch_size": 16}}
    seen = run(2, lambda seen: Slow(), **four)
    assert_same(seen, run(1, **four))
    assert_each_once(seen, 3)
    num_batches = Counter(rank for rank, _ in seen.batches.values())
    assert num_batches[0] > num_batches[1] > 0


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_trainers", [2, 4])
def test_steps_are_the_same_whoever_brings_them(alone: Seen, num_trainers: int) -> None:
    weights = Weights()
    seen = run(num_trainers, callbacks=lambda rank: [weights] if rank == 0 else [])
    assert_same(seen, alone)
    assert_each_once(seen, 3)
    assert {rank for rank, _ in seen.batches.values()} == set(range(num_trainers))
    steps = [step for step in weights.found if step in ALONE.found]
    assert len(steps) >= 10
    for step in steps:
        for name, tensor in ALONE.found[step].items():
            torch.testing.assert_close(weights.found[step][name], tensor, rtol=0.0, atol=1e-10)


class Validated(DigitsMLP):
    """Records the epochs at whose end the lead validated."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.validated.append(self.trainer.current_epoch)


def validation() -> DataLoader[Any]:
    return DataLoader(digits(), 52)


class Dying(Validated):
    """The second trainer dies in its third batch, or in its first later one if another trainer brought the third."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and self.trainer.fit_loop.batch_idx >= 2 and not self.seen.killed:
            self.seen.kill("peer-1")
        return loss


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("num_trainers", [2, 3])
def test_what_a_dead_trainer_held_is_brought_by_the_others(alone: Seen, num_trainers: int) -> None:
    seen = run(num_trainers, make_module=Dying, validation=validation, raises=False, swarm={"limits": QUICK})
    assert seen.killed == ["peer-1"]
    assert 0 not in seen.errors
    assert list(dict.fromkeys(seen.validated)) == [0, 1, 2], "however few batches of the lead an epoch ends with"
    # If it died late, the run rolls back into an epoch that was validated already.
    assert len(seen.validated) == 3 or (seen.went_back and seen.validated == [0, 0, 1, 2])
    assert_same(seen, alone)
    assert_each_once(seen, 3)


class Meets(L.Callback):
    """After a trainer's death the lead waits until another one joins."""

    def __init__(self, comes: int) -> None:
        self.comes = comes

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        seen = pl_module.seen
        if trainer.is_global_zero and seen.killed:
            seen.wait_for(lambda: self.has_come(seen) or self.comes in seen.errors)

    def has_come(self, seen: Seen) -> bool:
        if server_of_lead(seen) is None:
            return True  # the run rolls back, and the lead waits again after its restart
        return f"peer-{self.comes}" in (*enrolment(seen).waiting, *seen.trainers_of_the_run)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    ("comes", "went_back"),
    [
        pytest.param(2, [1], id="its stage is gone with it"),
        pytest.param(4, [], id="another one has its stage"),
    ],
)
def test_one_is_killed_and_another_one_comes_in_mid_epoch(alone: Seen, comes: int, went_back: list[int]) -> None:
    rank = vars(rank_zero_only)["rank"]
    try:
        come = {comes: lambda seen: seen.wait_for(lambda: bool(seen.killed))}
        options = {"validation": validation, "raises": False, "swarm": {"limits": QUICK}}
        seen = run(comes + 1, Dying, come=come, callbacks=lambda rank: [Meets(comes)], **options)
    finally:
        vars(rank_zero_only)["rank"] = rank
    assert seen.killed == ["peer-1"]
    assert seen.went_back == went_back
    assert set(seen.errors) == {1}
    came = next(record for record in seen.records if f"peer-{comes}" in record.enlisted)
    assert came.position is not None
    assert 0 < came.position[1] < 13, "it is in the middle of an epoch"
    assert {rank for rank, _ in seen.batches.values()} == set(range(comes + 1))
    assert_same(seen, alone)
    assert_each_once(seen, 3)


# ---------------------------------------------------------------------- a checkpoint in mid-epoch


ANOTHER_CALLBACK = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


@pytest.mark.first_cells(1)
@ANOTHER_CALLBACK
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_a_run_goes_on_at_the_sample(alone: Seen, before: int, after: int, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    options = {"enable_checkpointing": True, "max_steps": 6}
    begun = run(before, callbacks=lambda rank: [saving] if rank == 0 else [], **options)
    path = tmp_path / "step=6.ckpt"
    seen = run(after, Validated, validation=validation, ckpt_path=path)
    assert seen.validated == [1, 2]
    assert len(begun.steps) == 6
    begun.steps += seen.steps
    begun.batches |= {place: one for place, one in seen.batches.items() if place[0] >= 6}
    begun.losses |= {place: one for place, one in seen.losses.items() if place[0] >= 6}
    begun.weights = seen.weights
    assert_same(begun, alone)
    assert_each_once(begun, 3)


@pytest.mark.first_cells(1)
@ANOTHER_CALLBACK
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_between_two_epochs(alone: Seen, before: int, after: int, tmp_path: Path) -> None:
    """The last batch of an epoch is done but counted in none of the steps that the file contains."""
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)
    options = {"enable_checkpointing": True, "max_steps": 5}
    begun = run(before, callbacks=lambda rank: [saving] if rank == 0 else [], **options)
    assert begun.records[3].position == (0, 12)
    seen = run(after, ckpt_path=tmp_path / "step=4.ckpt")
    seen.steps = begun.steps[:4] + seen.steps
    for name in ("batches", "losses"):
        old = {place: one for place, one in getattr(begun, name).items() if place[0] < 4}
        setattr(seen, name, old | getattr(seen, name))
    assert_same(seen, alone)
    assert_each_once(seen, 3)


@pytest.mark.thorough
@ANOTHER_CALLBACK
def test_a_run_goes_on_where_an_epoch_ended_with_a_step(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_epochs=1, save_top_k=-1)

    def data() -> DataLoader[Any]:
        return shuffled(TensorDataset(*(part[:48] for part in digits().tensors)))

    begun = run(1, callbacks=lambda rank: [saving] if rank == 0 else [], data=data, enable_checkpointing=True)
    seen = run(2, ckpt_path=tmp_path / "step=4.ckpt", data=data)
    assert_same_from(seen, begun, 4)


def assert_same_from(seen: Seen, reference: Seen, step: int) -> None:
    reference.steps = reference.steps[step:]
    assert_same(seen, reference)


@ANOTHER_CALLBACK
def test_a_checkpoint_of_another_order_is_named(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    run(1, callbacks=lambda rank: [saving], enable_checkpointing=True, max_steps=2)
    for data, found in (
        (lambda: DataLoader(numbered(digits()), 4), "0 generators of SequentialSampler"),
        (lambda: DataLoader(shuffled(digits()).dataset, 5, sampler=shuffled(digits()).sampler), "11 batches of"),
    ):
        with pytest.raises(ConfigError, match=f"this trainer's {found}.* differ from the checkpoint's"):
            run(1, data=data, ckpt_path=tmp_path / "step=2.ckpt")


@ANOTHER_CALLBACK
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_a_run_whose_epochs_are_through_ends_at_once(num_trainers: int, tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "last", every_n_epochs=1)
    run(num_trainers, callbacks=lambda rank: [saving] if rank == 0 else [], enable_checkpointing=True, max_epochs=1)
    seen = run(num_trainers, ckpt_path=tmp_path / "last.ckpt", max_epochs=1)
    assert not seen.records


@ANOTHER_CALLBACK
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_such_a_file_loads_in_a_plain_trainer(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    run(2, callbacks=lambda rank: [saving] if rank == 0 else [], enable_checkpointing=True, max_steps=2)
    with default_dtype(torch.float64):
        plain = L.Trainer(**QUIET, max_epochs=1)
        plain.fit(DigitsMLP(), DataLoader(digits(), 4), ckpt_path=tmp_path / "step=2.ckpt")
    assert plain.current_epoch == 1


# ---------------------------------------------------------------------- whatever samples


class Backwards(Sampler[list[int]]):
    """A user-defined batch sampler with batches of several sizes, which depend on the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(48, -1, -4):
            yield list(range(begin, min(begin + 2 + (begin + self.epoch) % 3, 52)))

    def __len__(self) -> int:
        return 13


class Logical(Sampler[int]):
    """Draws from the process's generators, as samplers do."""

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(7).sample(range(52), 26))

    def __len__(self) -> int:
        return 26


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(numbered(digits()), 5),
    "the last one dropped": lambda: DataLoader(numbered(digits()), 5, drop_last=True),
    "workers": lambda: shuffled(digits(), num_workers=1),
    "batch sampler": lambda: DataLoader(numbered(digits()), batch_sampler=Backwards()),
    "weighted": lambda: DataLoader(
        numbered(digits()), 4, sampler=WeightedRandomSampler([1.0] * 52, 20, generator=torch.Generator().manual_seed(1))
    ),
    "sampler": lambda: DataLoader(numbered(digits()), 4, sampler=Logical()),
}


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("name", LOADERS)
def test_any_sampler_is_shared(name: str) -> None:
    plain = [batch[-1].tolist() for batch in LOADERS[name]()]
    seen = run(2, data=LOADERS[name], max_epochs=1)
    assert [ids for step in curve(seen) for ids, _ in step] == plain
    assert {rank for rank, _ in seen.batches.values()} == {0, 1}


@pytest.mark.parametrize(("limit", "number"), [(5, 5), (0.5, 6)])
def test_an_epoch_is_limited_for_all_together(limit: float, number: int) -> None:
    seen = run(2, limit_train_batches=limit, max_epochs=2)
    assert len([place for places in seen.steps for place in places]) == 2 * number
    assert len(set(counted(seen)[: 4 * number])) == 4 * number


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")
@pytest.mark.parametrize("num_trainers", [1, 2])
def test_of_several_loaders_each_has_its_own_length(num_trainers: int) -> None:
    """Combined loaders are not shared, though each alone could be."""
    read: list[list[int]] = [[] for _ in range(num_trainers)]

    class Both(DigitsMLP):
        @override
        def training_step(self, batch: list[list[Tensor]], batch_idx: int) -> Any:
            *tensors, numbers = batch[0]
            read[self.trainer.global_rank].extend(numbers.tolist())
            return super().training_step(tensors, batch_idx)

    def data() -> Any:
        other: Any = torch.arange(NUM_SAMPLES)
        return CombinedLoader([DataLoader(numbered(digits()), 4), DataLoader(other, 13)], "max_size_cycle")

    run(num_trainers, lambda seen: Both(), data=data, max_epochs=1, swarm={"target_batch_size": 4})
    parts = [list(range(rank, NUM_SAMPLES, num_trainers)) for rank in range(num_trainers)]
    assert read[0] == parts[0]
    # The run ends with the lead's data, perhaps before the last batch of another trainer.
    for found, part in zip(read, parts, strict=True):
        assert found in (part, part[:-2])


def test_a_sampler_that_gives_others_something_else_is_named() -> None:
    orders = iter([list(range(52)), list(range(51, -1, -1))])

    def data() -> DataLoader[Any]:
        order: Any = next(orders)
        return DataLoader(numbered(digits()), 4, sampler=order)

    seen = run(2, data=data, raises=False)
    assert seen.errors.keys() == {1}
    assert isinstance(seen.errors[1], ConfigError)
    assert "this trainer's 13 batches of list in epoch 0 differ from the lead's 13 batches" in str(seen.errors[1])
    assert_each_once(seen, 3)


@pytest.mark.parametrize("is_seeded", [False, True])
def test_a_split_that_each_trainer_draws_for_itself_is_refused(is_seeded: bool) -> None:
    """Their batches have equal indices but refer to different samples."""
    seeds = iter(range(2))

    def data() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3 if is_seeded else next(seeds))
        train, _ = random_split(numbered(digits()), [40, NUM_SAMPLES - 40], generator=generator)
        return DataLoader(train, batch_size=4)

    seen = run(2, data=data, max_epochs=1, raises=False)
    if is_seeded:
        assert not seen.errors
        assert len(set(counted(seen))) == len(counted(seen)) == 40
    else:
        assert "differ from the lead's" in str(seen.errors[1])
        assert "seed a `random_split`" in str(seen.errors[1])


# ---------------------------------------------------------------------- frozen, and going back


class Freezing(DigitsMLP):
    """The second trainer is frozen in its third batch until the run has recorded more steps."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen
        self.ran: list[tuple[int, int]] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and self.trainer.current_epoch == 0 and batch_idx == 1:
            self.ran.append(place_of(self))
            if len(self.ran) == 1:
                self.act(lambda: self.seen.network.freeze(PeerId("peer-1")))
                self.seen.wait_for(lambda: len(self.seen.records) > 3)
                self.act(lambda: self.seen.network.thaw(PeerId("peer-1")))
        return super().training_step(batch, batch_idx)

    def act(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        self.seen.runtime.run(act())


@pytest.mark.thorough
def test_what_a_frozen_trainer_held_is_brought_by_others_and_not_again(alone: Seen) -> None:
    seen = run(4, make_module=Freezing, swarm={"limits": QUICK, "rebalancing": "none"})
    module = seen.modules[1]
    assert isinstance(module, Freezing)
    assert len(module.ran) == 1, "somebody else brought it, so it has not run again"
    assert module.ran[0] not in [place for places in seen.steps for place in places]
    assert_same(seen, alone)
    assert_each_once(seen, 3)


@pytest.mark.thorough
def test_a_run_that_goes_back_reads_on_where_its_weights_are(alone: Seen) -> None:
    killing = Killing([4], [["peer-1"]])
    seen = train(
        3,
        callbacks=lambda rank: [killing] if rank == 0 else [],
        raises=False,
        max_steps=-1,
        max_epochs=3,
        swarm={"limits": BACK},
    )
    assert len(seen.went_back) == 1
    assert set(seen.errors) == {1}
    assert_same(seen, alone)
    assert_each_once(seen, 3)
