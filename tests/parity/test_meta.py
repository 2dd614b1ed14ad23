"""A model built on torch's meta device trains as on one machine, though no peer ever holds all of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lightning_swarm import Bottleneck
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.init_record import InitRecord
from lightning_swarm.strategy.rollback.loop_state import LoopState
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.harness import QUIET, SwarmRun, quiet_warnings, run_plain, run_swarm
from tests.parity.models import NanoGPT, Recipe, configured, digits, loader, sentences
from tests.parity.test_joining import Joining
from tests.parity.test_rollback import Fit, Killing
from tests.parity.trainers import Seen, shuffled, train
from tests.parity.trainers import assert_exact as assert_exact_curve

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

STEPS = 9
DRAWS: list[float] = []
"""Random numbers drawn immediately after a model was built, which show the generator's state."""


class Block(nn.Module):
    """Has drawn, redrawn, tied, computed and copied parameters, and buffers of all kinds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.leave = nn.Linear(width, width)
        self.leave.weight = self.enter.weight
        self.scale = nn.Parameter(torch.full((width,), 0.5) + 0.1 * torch.rand(width))
        self.norm = nn.LayerNorm(width)
        self.middle = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.middle.weight)
        nn.init.trunc_normal_(self.enter.bias, std=0.3, a=-0.4, b=0.4)
        self.register_buffer("steps", torch.arange(width) / width, persistent=False)
        self.register_buffer("signs", torch.tensor([1.0, -1.0]))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(self.middle(self.enter(self.norm(hidden)))) * self.scale + self.steps
        return hidden + self.leave(inner) * self.signs.repeat(hidden.shape[-1] // 2)  # type: ignore[operator]


class Net(L.LightningModule):
    """Has blocks between layers that the trainers compute, all built in `configure_model`."""

    def __init__(self, on_meta: bool, num_blocks: int = 4, width: int = 12) -> None:
        super().__init__()
        self.on_meta = on_meta
        self.num_blocks = num_blocks
        self.width = width
        self.net: nn.Sequential | None = None

    @override
    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta") if self.on_meta else nullcontext():
                self.build()
            DRAWS.append(float(torch.rand(())))

    def build(self) -> None:
        self.enter = nn.Linear(64, self.width)
        self.register_buffer("mean", torch.randn(64) / 8)
        self.net = nn.Sequential(*(Block(self.width) for _ in range(self.num_blocks)))
        self.leave = nn.Linear(self.width, 10)
        self.apply(self._again)

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.1)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        images, labels = batch
        return F.cross_entropy(self.leave(self.net(self.enter(images - self.mean))), labels)

    @override
    def configure_optimizers(self) -> Any:
        return configured(self, Recipe(schedule="onecycle"))


def on_meta() -> Net:
    return Net(on_meta=True)


def in_memory() -> Net:
    return Net(on_meta=False)


def real_names(module: nn.Module) -> set[str]:
    return {name for name, one in module.named_parameters() if not one.is_meta}


def assert_held_in_stages(swarm: SwarmRun, *, num_stages: int) -> None:
    """Check that each peer's model has only its stages' parameters and those around the blocks."""
    strategy = swarm.strategy
    names = {name for name, _ in swarm.module.named_parameters()}
    around = {name for name in names if not name.startswith("net.")}
    assert real_names(swarm.module) == around
    held = []
    for server in strategy.servers:
        model = server.admission.model
        real = real_names(model._module)
        served = {name for index in server.steps.stages for name in server.steps.stage(index).parameters}
        assert real - around == served - around, "other parameters than those of its stages were made"
        held.append(served)
    assert set().union(*held) == names
    assert len(strategy.servers) < num_stages or all(one < names for one in held)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("num_stages", "num_servers"), [(2, 2), (4, 6), (4, 1)])
def test_it_trains_as_one_machine_would(num_stages: int, num_servers: int) -> None:
    DRAWS.clear()
    plain = run_plain(in_memory, loader(digits()), max_steps=STEPS)
    swarm = run_swarm(
        on_meta, loader(digits()), max_steps=STEPS, num_stages=num_stages, num_servers=num_servers, pipeline="net"
    )
    assert DRAWS[0] == DRAWS[1], "other numbers would be drawn after the model was built"
    assert swarm.losses == pytest.approx(plain.losses, rel=1e-11)
    assert_held_in_stages(swarm, num_stages=num_stages)


def saving(folder: Path) -> dict[str, Any]:
    every = ModelCheckpoint(folder, "{step:03d}", auto_insert_metric_name=False, every_n_epochs=1, save_top_k=-1)
    return {"enable_checkpointing": True, "callbacks": [every]}


@pytest.mark.thorough
def test_a_file_holds_all_of_it_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """All weights are together in a checkpoint only, whose machine must have room for them."""
    plain = run_plain(in_memory, loader(digits()), max_epochs=3)
    first = run_swarm(on_meta, loader(digits()), max_epochs=1, pipeline="net", **saving(tmp_path))
    file = tmp_path / "007.ckpt"
    rest = run_swarm(
        on_meta, loader(digits()), max_epochs=3, pipeline="net", num_stages=3, num_servers=3, ckpt_path=file,
        **saving(tmp_path),
    )  # fmt: skip
    assert [*first.losses, *rest.losses] == pytest.approx(plain.losses, rel=1e-11)
    assert_held_in_stages(rest, num_stages=3)
    saved = torch.load(tmp_path / "021.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(saved, plain.weights, rtol=0.0, atol=1e-10)
    back = run_plain(in_memory, loader(digits()), max_epochs=3, ckpt_path=tmp_path / "014.ckpt", **saving(tmp_path))
    assert back.losses == pytest.approx(plain.losses[14:], rel=1e-11)


def test_one_stage_at_a_time_is_in_the_starters_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StorageWeakRef] = []
    alive: list[int] = []
    values = InitRecord.values

    def watched(record: InitRecord, *args: Any) -> list[Tensor]:
        alive.append(len({one.cdata for one in made if not one.expired()}))
        found = values(record, *args)
        made.extend(StorageWeakRef(one.untyped_storage()) for one in found)
        return found

    monkeypatch.setattr(InitRecord, "values", watched)
    run_swarm(on_meta, loader(digits()), max_steps=2, num_stages=4, num_servers=4, pipeline="net", role="trainer")
    outside, *stages = alive
    assert outside == 0
    assert stages == [5] * 5, "more is there than what the trainers compute, two layers and a buffer"
    assert len(made) == 5 + 4 * len(list(Block(2).state_dict(keep_vars=True)))


@pytest.mark.thorough
def test_newcomers_and_boundary_layers() -> None:
    plain = run_plain(in_memory, loader(digits()), max_steps=STEPS)
    joined = run_swarm(
        on_meta,
        loader(digits()),
        max_steps=STEPS,
        num_joiners=2,
        pipeline="net",
        callbacks=[Joining(count=2)],
        latency_s=0.001,
    )
    assert joined.losses == pytest.approx(plain.losses, rel=1e-11)
    assert_held_in_stages(joined, num_stages=2)
    boundary = {"boundary": Bottleneck(2, 12), "pipeline": "net", "max_steps": STEPS}
    narrow = run_swarm(in_memory, loader(digits()), **boundary)
    on = run_swarm(on_meta, loader(digits()), **boundary)
    assert on.losses == pytest.approx(narrow.losses, rel=1e-11)
    assert on.losses != pytest.approx(plain.losses, rel=1e-3)


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))


def test_init_module() -> None:
    plain = run_plain(in_memory, loader(digits()), max_steps=STEPS)
    torch.manual_seed(0)
    strategy = InMemoryStrategy(num_stages=2, pipeline="net", microbatch_size=3)
    with quiet_warnings():
        trainer = L.Trainer(**QUIET, devices=2, strategy=strategy, max_steps=STEPS, callbacks=[losses := Losses()])
        with trainer.init_module(empty_init=True):
            module = Net(on_meta=False)
            module.build()
        assert all(parameter.is_meta for parameter in module.parameters())
        trainer.fit(module, loader(digits()))
    assert losses.seen == pytest.approx(plain.losses, rel=1e-11)


class Outside(Net):
    """Built outside of `configure_model`, where no operation is recorded."""

    def __init__(self) -> None:
        super().__init__(on_meta=True)
        self.configure_model()


class Unfilled(Net):
    @override
    def configure_model(self) -> None:
        super().configure_model()
        self.net[1].lost = nn.Parameter(torch.empty(3, device="meta"))  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            Outside,
            {},
            r"filled while .* is recorded, but nothing fills enter\.weight.*in `configure_model`",
        ),
        (lambda: Unfilled(on_meta=True), {}, r"but nothing fills net\.1\.lost\b"),
        (on_meta, {"callbacks": [StochasticWeightAveraging(0.1)]}, r"StochasticWeightAveraging uses all weights"),
        (on_meta, {"split": "time"}, r"`split='time'` measures its blocks"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    make: Callable[[], Net], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(make, loader(digits()), max_steps=STEPS, pipeline="net", **options)


def test_it_does_not_go_on_from_what_it_was_made_with() -> None:
    swarm = run_swarm(on_meta, loader(digits()), max_steps=2, pipeline="net")
    assert swarm.trainer is not None
    with quiet_warnings(), pytest.raises(ConfigError, match=r"must continue from a checkpoint"):
        swarm.trainer.fit(swarm.module, loader(digits()))


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("make", [on_meta, in_memory])
def test_it_goes_back_when_a_stage_is_lost(make: Callable[[], Net], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plain(in_memory, loader(digits()), max_steps=12)
    in_files: list[bool] = []
    complete = LoopState.complete

    def watched(state: LoopState, weights: Any, optimizer: Any) -> Any:
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/stage.pt" in line]
        ranges = [[int(end, 16) for end in one[0].split("-")] for one in maps]
        tensors = [*weights.values(), *(one["exp_avg"] for one in optimizer.values())]
        in_files.extend(any(begin <= one.data_ptr() < end for begin, end in ranges) for one in tensors)
        return complete(state, weights, optimizer)

    monkeypatch.setattr(LoopState, "complete", watched)
    killing = Killing([6], [[1]])
    fit = Fit(killing, make, num_stages=3, devices=4, swarm={"pipeline": "net"})
    assert killing.num_killed == 1
    assert len(fit.went_back_to()) == 1
    assert list(killing.losses) == list(range(12))
    assert list(killing.losses.values()) == pytest.approx(plain.losses, rel=1e-10)
    assert in_files
    assert all(in_files), "the trainer held the whole model"


@pytest.mark.thorough
def test_several_trainers_have_what_they_compute_themselves(tmp_path: Path) -> None:
    def make(seen: Seen) -> NanoGPT:
        with seen.trainers[len(seen.modules)].init_module(empty_init=True):
            return NanoGPT()

    seen = train(
        2,
        make,
        data=lambda: shuffled(sentences()),
        swarm={"pipeline": "transformer.h"},
        callbacks=lambda rank: [ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8)] if rank == 0 else [],
        enable_checkpointing=True,
    )
    for module in seen.modules.values():
        around = {name for name, _ in module.named_parameters() if not name.startswith("transformer.h.")}
        assert real_names(module) == around
        assert around
    seen.weights = torch.load(tmp_path / "step=8.ckpt", weights_only=True)["state_dict"]
    assert_exact_curve(seen, NanoGPT, sentences(), num_trainers=2)
