"""Without a cut: one stage, which is the whole LightningModule."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.errors import ConfigError
from tests.features.mark import PARTLY, REFUSED, WORKS, feature
from tests.parity.float16 import InFloat16
from tests.parity.harness import QUIET, quiet_warnings, run_plain, run_swarm
from tests.parity.harness import assert_exact as exact
from tests.parity.models import Recipe, digits, loader
from tests.parity.test_trainers_scale import assert_scales, precision
from tests.parity.test_whole import WHOLE, Branches, Images
from tests.parity.trainers import assert_exact, numbered, train


class Adversaries(L.LightningModule):
    """Steps two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(64, 10), nn.Linear(64, 10)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, model, sign in zip(self.optimizers(), (self.one, self.other), (1.0, -0.1), strict=True):
            optimizer.zero_grad()
            self.manual_backward(sign * F.cross_entropy(model(batch[0]), batch[1]))
            optimizer.step()

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.one.parameters(), lr=0.1), torch.optim.Adam(self.other.parameters(), lr=0.01)


@feature(
    "any LightningModule on one device, without other peers",
    WORKS,
    "Lightning's own loop trains it, without a swarm; manual optimization, several optimizers and `LBFGS` work too",
)
def test_one_device() -> None:
    def trained(strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Adversaries()
        with quiet_warnings():
            L.Trainer(**QUIET, devices=1, max_steps=20, strategy=strategy).fit(module, loader(digits()))
        return module.state_dict()

    plain = trained("auto")
    for strategy in ("swarm", SwarmStrategy(num_stages=1)):
        assert all(torch.equal(one, plain[name]) for name, one in trained(strategy).items())


@feature(
    "a model without blocks, with several trainers (`num_stages=1`, `role='both'`, `target_batch_size`)",
    WORKS,
    "each computes the whole model; losses over a batch and layers comparing samples work: [without a cut](whole.md)",
)
def test_several_trainers() -> None:
    seen = train(2, lambda seen: Branches(), max_steps=6, swarm=WHOLE)
    assert_exact(seen, lambda: Branches(), digits(), num_trainers=2)


@feature(
    "`BatchNorm` in an uncut model",
    WORKS,
    "normalises each batch by itself; running statistics count each batch once, in the order of the step's batches",
)
def test_batch_norm() -> None:
    seen = train(2, lambda seen: Images(), max_steps=4, swarm=WHOLE)
    norms = [name for name, _ in seen.modules[0].named_buffers() if name.endswith("num_batches_tracked")]
    counted = [sum(len(places) for places in seen.steps) * uses for uses in (1, 2, 1)]
    assert [int(seen.weights[name]) for name in norms] == counted


class PseudoLabels(Images):
    """Uses batch norms in both modes, and in both orders, within one `training_step`."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        losses = []
        for training in (False, True, False, True):
            self.train(training)
            losses.append(super().training_step([images, labels], batch_idx))
        target = losses[0].detach()
        return losses[1] + losses[3] + (losses[2] - target).square()


@feature("using a `BatchNorm` in eval mode, or reading it, within `training_step` of an uncut model", WORKS)
def test_batch_norm_in_both_modes() -> None:
    recipe = Recipe(optimizer="sgd")
    plain = run_plain(lambda: PseudoLabels(recipe), loader(digits()), max_steps=6)
    exact(run_swarm(lambda: PseudoLabels(recipe), loader(digits()), num_servers=1, max_steps=6, **WHOLE), plain)


class Counting(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class CountingUnseen(Counting):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.data.add_(1)  # no version counter changes
        return Branches.training_step(self, batch, batch_idx)


class CountingAfterwards(Counting):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return Branches.training_step(self, batch, batch_idx)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1


@feature(
    "other buffers that training changes, in an uncut model",
    PARTLY,
    "works on one device without a swarm; refused by name with several trainers, because each would have its "
    "own values",
)
@pytest.mark.parametrize("model", [Counting, CountingUnseen, CountingAfterwards])
def test_other_buffers(model: type[Counting]) -> None:
    with pytest.raises(ConfigError, match=r"only the forwards of batch norms.*may change buffers.*'seen'.*devices=1"):
        run_swarm(model, loader(digits()), num_servers=1, max_steps=2, **WHOLE)


class Reset(Images):
    @override
    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch:
            self.twice.reset_running_stats()


class Precise(Images):
    @override
    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.net(digits().tensors[0][:4].view(4, 1, 8, 8).to(self.dtype))


@feature(
    "running statistics of a `BatchNorm` that hooks change: a reset, or further forwards in train mode",
    PARTLY,
    "works on one device without a swarm; otherwise refused by name, as is `StochasticWeightAveraging` of such a model",
)
@pytest.mark.parametrize(("model", "name"), [(Reset, "twice.running_mean"), (Precise, "net.1.running_mean")])
def test_written_statistics(model: type[Images], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"may change buffers.*'{name}'"):
        run_swarm(model, loader(digits(), 8), num_servers=1, max_epochs=3, max_steps=-1, **WHOLE)


class Norms(Branches):
    """Checks gradients in a hook."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.look)

    def look(self, *_: Any) -> None:
        self.found = sum(one.grad.norm() for one in self.parameters() if one.grad is not None)


@feature(
    "gradients after the batch, in `on_train_batch_end` or `on_before_zero_grad`, of an uncut model",
    REFUSED,
    "they have moved to the step's sums; `on_after_backward` has them",
)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_before_zero_grad", "on_train_batch_start"])
def test_gradients_after_the_batch(hook: str) -> None:
    with pytest.raises(ConfigError, match=r"once their batch ends: got a use of `\.grad`.*on_after_backward"):
        run_swarm(lambda: Norms(hook), loader(digits()), num_servers=1, max_steps=2, **WHOLE)


class Warming(Branches):
    """Counts its own batches, but no other trainer's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1


@feature(
    "attributes that change from batch to batch, with several trainers",
    PARTLY,
    "each trainer has its own, and a warning names them; values computed from `global_step` are equal on all trainers",
)
def test_attributes_of_each_trainer(caplog: pytest.LogCaptureFixture) -> None:
    train(2, lambda seen: Warming(), max_steps=6, swarm=WHOLE)
    (said,) = {one.getMessage() for one in caplog.records if "Attributes change" in one.getMessage()}
    assert "'num_batches'" in said
    caplog.clear()
    train(2, lambda seen: Branches(), max_steps=6, swarm=WHOLE)
    assert "Attributes change" not in caplog.text


class Sparse(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 12, sparse=True)


@feature(
    "sparse gradients and complex parameters, in an uncut model",
    REFUSED,
    "with several trainers; on one device without a swarm they work",
)
def test_sparse() -> None:
    with pytest.raises(ConfigError, match="sparse"):
        run_swarm(Sparse, loader(digits()), num_servers=1, max_steps=2, **WHOLE)


@feature(
    "`precision='16-mixed'` with several trainers",
    WORKS,
    "one scale for the whole run; if one trainer's gradient overflows, all skip the step; also with a cut model",
)
@pytest.mark.parametrize("swarm", [WHOLE, {}], ids=["whole", "cut"])
def test_16_mixed(swarm: dict[str, Any]) -> None:
    each = {"plugins": precision}
    seen = train(2, lambda seen: InFloat16().float(), each=each, precision=None, max_steps=12, swarm=swarm)
    assert {record.outcome for record in seen.records} == {"skip", "apply"}
    assert_scales(seen)


class Stream(IterableDataset[Any]):
    """Yields the samples in order, again and again."""

    @override
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from numbered(digits())


@feature(
    "an `IterableDataset` with several trainers, for an uncut model",
    PARTLY,
    "each reads its own part, of which every sample counts once. Samples that a dead trainer had read are lost, "
    "and no trainer takes a dead lead's place: [data](data.md#where-each-trainer-reads-its-own-data)",
)
def test_a_stream() -> None:
    seen = train(2, lambda seen: Branches(), data=lambda: DataLoader(Stream(), batch_size=4), max_steps=6, swarm=WHOLE)
    assert_exact(seen, lambda: Branches(), digits(), num_trainers=2)
    for trainer in (0, 1):
        own = [seen.batches[place][1] for places in seen.steps for place in places if seen.batches[place][0] == trainer]
        read = [one for batch in own for one in batch]
        assert read == [(trainer + 2 * index) % len(digits()) for index in range(len(read))]


class Divided(Stream):
    """Divides itself among the processes, as `ddp` demands."""

    trainer: L.Trainer

    @override
    def __iter__(self) -> Iterator[Any]:
        whole = super().__iter__()
        yield from itertools.islice(whole, self.trainer.global_rank, None, self.trainer.world_size)


class Knows(Branches):
    """Gives its stream the Trainer."""

    @override
    def setup(self, stage: str) -> None:
        source: Any = self.trainer.fit_loop._data_source.instance
        source.dataset.trainer = self.trainer


@feature(
    "an `IterableDataset` that divides itself by `trainer.global_rank` and `trainer.world_size`",
    WORKS,
    "they are 0 and 1 where data is made and read, because the swarm divides it; with "
    "`use_distributed_sampler=False` they are the trainer's number and the number of trainers",
)
@pytest.mark.parametrize("by_swarm", [True, False])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_stream_that_divides_itself(by_swarm: bool, num_workers: int) -> None:
    def data() -> DataLoader[Any]:
        return DataLoader(Divided(), batch_size=4, num_workers=num_workers)

    options: dict[str, Any] = {"use_distributed_sampler": by_swarm, "swarm": WHOLE, "max_steps": 6}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Every trainer of the run reads all")
        warnings.filterwarnings("ignore", ".*num_workers")
        seen = train(2, lambda seen: Knows(), data=data, **options)
    assert_exact(seen, lambda: Branches(), digits(), num_trainers=2)
    for rank, trainer in seen.trainers.items():
        assert (trainer.global_rank, trainer.world_size) == (rank, 1)
        own = [seen.batches[place][1] for places in seen.steps for place in places if seen.batches[place][0] == rank]
        read = [one for batch in own for one in batch]
        assert read == [(rank + 2 * index) % len(digits()) for index in range(len(read))]


class Clipping(Branches):
    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


@feature(
    "gradients in `on_before_optimizer_step`, of an uncut model",
    PARTLY,
    "works if a single batch of one trainer is the step; otherwise a use is refused, because the gradient is in "
    "the servers' sums. `on_after_backward` has the current batch's gradients",
)
def test_gradients_before_the_step() -> None:
    options: dict[str, Any] = {"num_servers": 1, **WHOLE}
    plain = run_plain(Clipping, loader(digits()), max_steps=6)
    exact(run_swarm(Clipping, loader(digits()), max_steps=6, **options), plain)
    with pytest.raises(ConfigError, match=r"got a use of `\.grad`"):
        run_swarm(Clipping, loader(digits()), max_steps=6, accumulate_grad_batches=2, **options)
