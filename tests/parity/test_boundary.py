"""Boundary layers: a swarm that sends half of a layer's output equals one machine that has the whole layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import lightning_swarm.nn
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm import Bottleneck, Maxout, SwarmStrategy, insert_boundary, restore_boundary
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.boundary_layers import Boundary, boundary_layers
from lightning_swarm.model.export import export_safetensors
from lightning_swarm.model.partition import StageModule
from lightning_swarm.strategy import extra_trainers
from lightning_swarm.testing import InMemoryStrategy
from tests.parity import test_moving as moving
from tests.parity.harness import (
    LOSS_TOLERANCE,
    QUIET,
    WEIGHT_TOLERANCE,
    assert_exact,
    quiet_warnings,
    run_plain,
    run_swarm,
)
from tests.parity.models import (
    Block,
    Embed,
    LossHead,
    NanoGPT,
    Net,
    Recipe,
    TinyGPTWithLosses,
    Trees,
    digits,
    loader,
    records,
    sentences,
)
from tests.parity.test_joining import Joining
from tests.parity.test_resume import EPOCH, go
from tests.parity.test_rollback import Fit, Killing, assert_same
from tests.parity.test_rollback import plain as plain_to_the_end
from tests.parity.trainers import assert_exact as assert_exact_curve
from tests.parity.trainers import shuffled, train

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")

HALF = Bottleneck(ratio=2)
IN_LIST: dict[str, Any] = {"split": ["1", "3"], "pipeline": "transformer.h"}
AFTER = ["transformer.h.0", "transformer.h.2"]


WIDTH = 16
"""Half the width is two numbers: a LayerNorm leaves only their order and a noisy gradient, so use a quarter."""


def gpt() -> NanoGPT:
    return NanoGPT(Recipe(schedule="onecycle"), width=WIDTH)


def gpt_with_losses() -> TinyGPTWithLosses:
    module = TinyGPTWithLosses()
    module.net = lightning_swarm.nn.Sequential(Embed(WIDTH), Block(WIDTH), Block(WIDTH), LossHead(WIDTH))
    return module


class Restoring(NanoGPT):
    """Loads checkpoints of swarms with boundary layers."""

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        restore_boundary(self, checkpoint["state_dict"])


def ordinary() -> NanoGPT:
    return gpt().double()


def restoring() -> Restoring:
    return Restoring(Recipe(schedule="onecycle"), width=WIDTH).double()


def inserted(module: Any, boundary: Boundary = HALF, after: list[str] = AFTER) -> Any:
    insert_boundary(module, boundary, after)
    return module


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("boundary", [HALF, Bottleneck(ratio=4), Maxout(ratio=2), Maxout(ratio=4)], ids=str)
@pytest.mark.parametrize(
    ("model", "after", "swarm"),
    [(gpt_with_losses, ["net.0", "net.2"], {"split": ["1", "3"]}), (gpt, AFTER, IN_LIST)],
    ids=["sequential", "list"],
)
def test_the_curve_of_the_same_model_on_one_machine(
    boundary: Boundary, model: Any, after: list[str], swarm: dict[str, Any]
) -> None:
    def with_layers() -> Any:
        return inserted(model(), boundary, after)

    data = loader(sentences())
    plain = run_plain(with_layers, data, max_steps=9)
    run = run_swarm(model, data, num_stages=3, num_servers=4, boundary=boundary, max_steps=9, **swarm)
    assert_exact(run, plain)
    assert list(boundary_layers(run.module)) == after
    before = with_layers().double().state_dict()
    moved = {name for name, tensor in run.weights.items() if not torch.equal(tensor, before[name])}
    assert moved == before.keys(), "the layers are trained, too"
    batch = list(sentences()[:3])
    pipelines = [one if model is gpt else one.net for one in (run.module, plain.module)]
    ours, theirs = (one(batch[0], targets=batch[1]) for one in pipelines)
    torch.testing.assert_close(ours, theirs)  # the plain forward after the run


def test_only_some_features_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: dict[int, set[tuple[int, int]]] = {}
    forward = StageModule.forward

    def watched(self: StageModule, inputs: tuple[Any, ...], extras: Any) -> Any:
        output = forward(self, inputs, extras)
        widths.setdefault(self.spec.index, set()).add((inputs[0].shape[-1], output.shape[-1]))
        return output

    monkeypatch.setattr(StageModule, "forward", watched)
    run_swarm(gpt, loader(sentences()), num_stages=3, num_servers=3, boundary=Maxout(ratio=4), max_steps=2, **IN_LIST)
    assert widths == {0: {(16, 4)}, 1: {(4, 4)}, 2: {(4, 16)}}


@pytest.mark.thorough
def test_one_curve_through_a_swarm_one_machine_and_a_swarm_of_fewer_stages(tmp_path: Path) -> None:
    """Boundary layers away from the new cuts are computed whole; they come from the file, without any setting."""
    plain = run_plain(lambda: inserted(restoring()), loader(sentences()), max_epochs=4)
    parts = [
        go(run_swarm, ordinary, sentences(), tmp_path, 1, num_stages=3, num_servers=4, boundary=HALF, **IN_LIST),
        go(run_plain, restoring, sentences(), tmp_path, 2),
        go(run_swarm, ordinary, sentences(), tmp_path, 3, num_stages=2, num_servers=3, pipeline="transformer.h"),
        go(run_swarm, ordinary, sentences(), tmp_path, 4, num_stages=1, num_servers=2, pipeline="transformer.h"),
    ]
    assert [len(part.losses) for part in parts] == 4 * [EPOCH]
    assert [loss for part in parts for loss in part.losses] == pytest.approx(plain.losses, rel=LOSS_TOLERANCE)
    torch.testing.assert_close(parts[-1].weights, plain.weights, rtol=0.0, atol=WEIGHT_TOLERANCE)

    last = next(tmp_path.glob("*28.ckpt"))
    loaded = Restoring.load_from_checkpoint(last, recipe=None, width=WIDTH, weights_only=True)
    exported = gpt()
    export_safetensors(last, tmp_path / "last.safetensors")
    weights = load_file(tmp_path / "last.safetensors")
    restore_boundary(exported, weights)
    exported.load_state_dict(weights)
    tokens = sentences()[:3]
    for model in (loaded, exported):
        assert list(boundary_layers(model)) == AFTER
        torch.testing.assert_close(model.double()(*tokens), plain.module(*tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_whoever_joins_has_the_layers_of_the_run() -> None:
    joining = Joining(count=2)
    options: dict[str, Any] = {"max_steps": 12, "max_epochs": -1}
    plain = run_plain(lambda: inserted(gpt()), loader(sentences()), **options)
    run = run_swarm(
        gpt,
        loader(sentences()),
        num_stages=3,
        num_servers=3,
        num_joiners=2,
        boundary=HALF,
        callbacks=[joining],
        latency_s=0.001,
        **IN_LIST,
        **options,
    )
    assert_exact(run, plain)
    assert all(joiner.calls.num_forwards for joiner in joining.joiners)
    assert run.strategy.refusals == []


@pytest.mark.thorough
def test_a_run_that_goes_back_has_the_same_layers() -> None:
    killing = Killing([6], [[1]])
    data = loader(sentences())
    back = Fit(killing, gpt, data=data, num_stages=3, devices=3, swarm={"boundary": HALF, **IN_LIST})
    assert len(back.went_back_to()) == 1
    assert list(boundary_layers(back.module)) == AFTER
    assert_same(back, killing, plain_to_the_end(lambda: inserted(gpt()), data))


@pytest.mark.thorough
def test_who_moves_to_another_stage_takes_its_halves_of_the_layers() -> None:
    layers = Bottleneck(ratio=2, features=24)
    run = moving.few(boundary=layers, split=["2"])
    assert moving.moved(run.records)
    steps: dict[str, Any] = {"max_steps": moving.STEPS, "max_epochs": -1}
    assert_exact(run, run_plain(lambda: inserted(moving.net(), layers, ["net.1"]), moving.data(), **steps))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("boundary", [HALF, Maxout(ratio=4)], ids=str)
def test_halves_are_compiled_with_their_stages(boundary: Boundary) -> None:
    def compiled() -> Any:
        return torch.compile(gpt_with_losses(), backend="eager", fullgraph=True)

    try:
        run = run_swarm(
            compiled, loader(sentences()), num_stages=3, num_servers=3, boundary=boundary, split=["1", "3"], max_steps=4
        )
    finally:
        torch._dynamo.reset()
    run.weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in run.weights.items()}
    after = ["net.0", "net.2"]
    assert_exact(run, run_plain(lambda: inserted(gpt_with_losses(), boundary, after), loader(sentences()), max_steps=4))


@pytest.mark.thorough
def test_several_trainers_train_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Layers are initialized from the process's seed, which all trainers share here because they are threads.
    monkeypatch.setattr(extra_trainers, "reseed", lambda rank: None)
    after = ["transformer.h.1"]
    seen = train(
        2,
        lambda _: gpt(),
        data=lambda: shuffled(sentences()),
        swarm={"pipeline": "transformer.h", "split": ["2"], "boundary": HALF},
    )
    assert_exact_curve(seen, lambda: inserted(gpt(), HALF, after), sentences(), num_trainers=2)
    assert all(list(boundary_layers(module)) == after for module in seen.modules.values())


class Own(Net):
    """Has boundary layers from its construction, so that callbacks copy them; its user selects parameters to train."""

    def __init__(self, trains: str = "all") -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)))
        self.trains = trains

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters() if self.trains == "all" else self.net.parameters(), lr=0.1)


def fit(module: Any, *callbacks: L.Callback, **swarm: Any) -> None:
    strategy: SwarmStrategy = InMemoryStrategy(**{"num_stages": 2, "microbatch_size": 4, **swarm})
    with quiet_warnings():
        trainer = L.Trainer(**QUIET, devices=2, strategy=strategy, max_steps=2, max_epochs=2, callbacks=list(callbacks))
        trainer.fit(module, loader(digits()))


def test_an_optimizer_without_the_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must train the boundary layers, got .* after 'net\.0'.*self\.parameters"):
        fit(Own("some"), boundary=HALF, split=["1"])


def test_one_stage_has_no_boundary() -> None:
    with pytest.raises(ConfigError, match=r"at least 2, got 1\. Raise `num_stages`"):
        fit(Own(), boundary=HALF, num_stages=1)


def test_a_callback_that_has_a_copy_by_now_is_refused() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    with pytest.raises(ConfigError, match=r"got StochasticWeightAveraging\. Call `insert_boundary\(self"):
        fit(Own(), averaging, boundary=HALF, split=["1"])
    own = Own()
    insert_boundary(own, HALF, ["net.0"])
    fit(own, StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1), split=["1"])
    assert list(boundary_layers(own)) == ["net.0"]


def test_a_checkpoint_without_layers_is_refused(tmp_path: Path) -> None:
    go(run_plain, restoring, sentences(), tmp_path, 1)
    with pytest.raises(ConfigError, match=r"a checkpoint without such layers\. Leave `boundary` out"):
        go(run_swarm, ordinary, sentences(), tmp_path, 2, num_stages=3, boundary=HALF, **IN_LIST)


def test_a_hidden_state_of_several_tensors_is_refused() -> None:
    layers = Bottleneck(ratio=2, features=8)
    with quiet_warnings(), pytest.raises(ConfigError, match=r"the hidden state is one tensor, got .* output is a dict"):
        run_swarm(Trees, loader(records()), boundary=layers, max_steps=2)
