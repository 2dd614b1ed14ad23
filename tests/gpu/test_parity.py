"""A swarm with all peers on a GPU has the plain Trainer's result there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.testing import FaultPlan, Phase, SharedGPU
from tests.parity.harness import (
    LOSS_TOLERANCE,
    WEIGHT_TOLERANCE,
    Run,
    SwarmRun,
    assert_exact,
    assert_same_curve,
    run_plain,
    run_swarm,
)
from tests.parity.models import (
    MODELS,
    VOCABULARY,
    DigitsMLP,
    Images,
    NanoGPT,
    Net,
    Recipe,
    digits,
    loader,
    sentences,
)
from tests.parity.test_joining import Joining
from tests.parity.test_resume import EPOCH, go, make_digits

STEPS = 12
DEVICE = "cuda"


def on_gpu(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `run_plain` or `run_swarm` with all devices on one GPU."""
    return run(*args, accelerator=SharedGPU(), **options)


def both(make: Callable[[], L.LightningModule], data: Any, **options: Any) -> tuple[SwarmRun, Run]:
    """Train with a swarm of four servers, and with the plain Trainer."""
    of_both = {name: options.pop(name) for name in ("precision", "gradient_clip_val", "deterministic") & options.keys()}
    plain = on_gpu(run_plain, make, data(), max_steps=STEPS, **of_both)
    swarm = on_gpu(run_swarm, make, data(), max_steps=STEPS, **of_both, **{"num_servers": 4, **options})
    devices = {
        parameter.device.type
        for server in swarm.strategy.servers
        for stage in server.steps.sums.stages.values()
        for parameter in stage.parameters.values()
    }
    assert devices == {DEVICE}
    return swarm, plain


@pytest.mark.parametrize("name", [name for name in MODELS if name != "trees"])
def test_float64_is_exact(name: str) -> None:
    model, data = MODELS[name]
    swarm, plain = both(lambda: model(Recipe(schedule="onecycle")), lambda: loader(data()), gradient_clip_val=0.5)
    assert_exact(swarm, plain)


def test_the_gpu_and_the_cpu_agree() -> None:
    on_cpu = run_plain(DigitsMLP, loader(digits()), max_steps=STEPS)
    assert_exact(on_gpu(run_swarm, DigitsMLP, loader(digits()), max_steps=STEPS), on_cpu)


def test_what_stands_around_the_pipeline_and_a_tied_weight() -> None:
    swarm, plain = both(NanoGPT, lambda: loader(sentences()), pipeline="transformer.h")
    assert_exact(swarm, plain)


def test_batch_norms() -> None:
    swarm, plain = both(Images, lambda: loader(digits()), pipeline="body", num_servers=3)
    assert_exact(swarm, plain)


class Convolutions(DigitsMLP):
    """Has convolutions in its blocks."""

    def __init__(self) -> None:
        super().__init__(Recipe(optimizer="sgd", learning_rate=1e-3))
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3),
            nn.Flatten(),
            nn.Linear(144, 10),
        )


def test_convolutions() -> None:
    swarm, plain = both(Convolutions, lambda: loader(digits()), num_servers=2)
    assert_exact(swarm, plain)


class Recurrent(DigitsMLP):
    """Has an LSTM, which cuDNN computes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (8, 8)), Sequence(8, 12, dropout), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)
        )


class Sequence(nn.Module):
    def __init__(self, num_features: int, width: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_features, width, num_layers=2, batch_first=True, dropout=dropout)

    def forward(self, rows: Tensor) -> Tensor:
        last: Tensor = self.lstm(rows)[0][:, -1]
        return last


def test_recurrent_layers() -> None:
    swarm, plain = both(Recurrent, lambda: loader(digits()), num_servers=2)
    assert_exact(swarm, plain)


def test_the_dropout_of_a_recurrent_layer_is_refused() -> None:
    with pytest.raises(Exception, match="for an RNN, set its dropout to 0"):
        on_gpu(run_swarm, lambda: Recurrent(dropout=0.5), loader(digits()), max_steps=1)


@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 5e-6), ("bf16-mixed", 1e-2), ("16-mixed", 1e-2)])
@pytest.mark.parametrize("name", ["digits", "gpt-losses"])
def test_other_precisions(name: str, precision: str, tolerance: float) -> None:
    model, data = MODELS[name]
    dtypes = set()

    def make() -> Net:
        module = model(Recipe(learning_rate=1e-3))
        first = next(one for one in module.modules() if isinstance(one, nn.Linear))
        first.register_forward_hook(lambda _module, _inputs, output: dtypes.add(output.dtype))
        return module

    swarm, plain = both(make, lambda: loader(data()), precision=precision)
    assert_same_curve(swarm, plain, loss=tolerance)
    wanted = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    assert dtypes == {wanted[precision]}
    assert all(tensor.dtype == torch.float32 for tensor in swarm.weights.values())


def test_the_scale_of_float16_moves_as_the_plain_trainer_moves_it() -> None:
    def scales_of(run: Callable[..., Run], **options: Any) -> tuple[list[float], Run]:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=4)
        plugin = L.pytorch.plugins.MixedPrecision("16-mixed", "cuda", scaler=scaler)
        found: list[float] = []

        class Notes(L.Callback):
            @override
            def on_train_batch_end(self, *_: Any) -> None:
                found.append(scaler.get_scale())

        options = {"precision": None, "plugins": [plugin], "callbacks": [Notes()], "max_steps": 24, **options}
        made = on_gpu(run, lambda: InFloat16(Recipe(optimizer="sgd")), loader(digits()), **options)
        return found, made

    plain_scales, plain = scales_of(run_plain)
    swarm_scales, swarm = scales_of(run_swarm, microbatch_size=4)
    assert swarm_scales == plain_scales
    assert min(plain_scales) < 2.0**24, "nothing overflowed"
    assert_same_curve(swarm, plain, loss=1e-2)


class InFloat16(DigitsMLP):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).float(), batch[1])


# ---------------------------------------------------------------------- random numbers


class Attention(nn.Module):
    """Attention with dropout, for which a GPU has kernels that draw their own numbers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        queries, keys, values = self.qkv(hidden).unflatten(-1, (3, 2, -1)).transpose(1, 3).unbind(2)
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, dropout_p=p, is_causal=True)
        return hidden + mixed.transpose(1, 2).flatten(2)


class Drawing(Net):
    """Has dropout of all kinds in its blocks."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True)
        super().__init__(
            nn.Sequential(
                nn.Embedding(VOCABULARY, 8), Attention(8, 0.3), nn.Dropout(0.2), layer, nn.RReLU(), nn.Linear(8, 11)
            )
        )

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())


def test_the_draws_are_the_same_on_the_gpu_and_on_the_cpu() -> None:
    on_cpu = run_swarm(Drawing, loader(sentences()), max_steps=STEPS)
    swarm = on_gpu(run_swarm, Drawing, loader(sentences()), max_steps=STEPS, num_servers=3, seed=1)
    assert_exact(swarm, on_cpu)
    assert len(set(swarm.losses)) == STEPS


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_attention_with_dropout_in_half_precision(precision: str) -> None:
    def train(seed: int) -> SwarmRun:
        data = loader(sentences())
        run: SwarmRun = on_gpu(run_swarm, Drawing, data, max_steps=4, precision=precision, num_servers=3, seed=seed)
        return run

    # Equal curves in different arrangements show that the masks are keyed.
    assert_same_curve(train(0), train(1), loss=2e-3)


# ---------------------------------------------------------------------- what is special about a GPU


def test_the_optimizer_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = set()
    build = PeerModel.__init__

    def noted(self: PeerModel, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        devices.add(self.offloads)

    monkeypatch.setattr(PeerModel, "__init__", noted)
    swarm, plain = both(DigitsMLP, lambda: loader(digits()), offload_optimizer=True)
    assert devices == {True}
    assert_exact(swarm, plain)
    state = {
        value.device.type
        for server in swarm.strategy.servers
        for stage in server.steps.sums.stages.values()
        for own in stage.optimizer.state().values()
        for value in own.values()
        if isinstance(value, Tensor)
    }
    assert state == {"cpu"}


@pytest.mark.parametrize("fused", [True, False])
def test_fused_optimizers(fused: bool) -> None:
    class Fused(DigitsMLP):
        @override
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=fused, foreach=False)

    swarm, plain = both(Fused, lambda: loader(digits()))
    assert_exact(swarm, plain)


@pytest.mark.parametrize("compression", ["float16", "bfloat16", "8bit", "6bit", "4bit"])
def test_compression(compression: str) -> None:
    class Wide(DigitsMLP):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))

    options = {"compression": compression, "max_steps": 4, "precision": "32-true"}
    on_cpu = run_swarm(Wide, loader(digits()), num_servers=4, **options)
    swarm = on_gpu(run_swarm, Wide, loader(digits()), num_servers=4, **options)
    assert_same_curve(swarm, on_cpu, loss=2e-2)


def test_powersgd() -> None:
    from lightning_swarm import Compression

    options = {"compression": Compression(averaging="powersgd", rank=2), "max_steps": 6, "num_servers": 4}
    on_cpu = run_swarm(DigitsMLP, loader(digits()), **options)
    assert_same_curve(on_gpu(run_swarm, DigitsMLP, loader(digits()), **options), on_cpu, loss=1e-6)


def test_the_same_bits_whoever_computes_what() -> None:
    runs = [
        on_gpu(
            run_swarm,
            DigitsMLP,
            loader(digits()),
            max_steps=STEPS,
            num_servers=number,
            seed=number,
            exact_sums=True,
            deterministic=True,
            precision="32-true",
        )
        for number in (2, 4, 5)
    ]
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(torch.equal(run.weights[name], tensor) for name, tensor in runs[0].weights.items())


@pytest.mark.parametrize("phase", [Phase.FORWARD_DONE, Phase.BACKWARD_DONE])
def test_a_server_that_dies(phase: Phase) -> None:
    faults = FaultPlan().kill("peer-1", at=phase, step=3)
    plain = on_gpu(run_plain, DigitsMLP, loader(digits()), max_steps=STEPS)
    swarm = on_gpu(run_swarm, DigitsMLP, loader(digits()), max_steps=STEPS, num_servers=4, num_gone=1, faults=faults)
    faults.check()
    assert_exact(swarm, plain)


def test_a_server_that_joins() -> None:
    plain = on_gpu(run_plain, DigitsMLP, loader(digits()), max_steps=STEPS)
    joining = Joining(at=3)
    swarm = on_gpu(run_swarm, DigitsMLP, loader(digits()), max_steps=STEPS, num_joiners=1, callbacks=[joining])
    assert_exact(swarm, plain)
    assert joining.entered_at


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_one_curve_through_swarm_plain_swarm(tmp_path: Path) -> None:
    ways = {"swarm": partial(on_gpu, run_swarm), "plain": partial(on_gpu, run_plain)}
    whole = go(ways["plain"], make_digits, digits(), tmp_path / "whole", 1)
    parts = [go(ways[way], make_digits, digits(), tmp_path / "parts", n) for n, way in enumerate(ways, start=1)]
    last = go(ways["swarm"], make_digits, digits(), tmp_path / "parts", 3)
    at_once = on_gpu(run_plain, make_digits, loader(digits()), max_epochs=3)
    assert whole.losses == at_once.losses[:EPOCH]
    losses = [loss for part in [*parts, last] for loss in part.losses]
    assert losses == pytest.approx(at_once.losses, rel=LOSS_TOLERANCE)
    for name, tensor in at_once.weights.items():
        assert float((last.weights[name] - tensor).abs().max()) <= WEIGHT_TOLERANCE


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_stages() -> None:
    plain = on_gpu(run_plain, DigitsMLP, loader(digits()), max_steps=4, precision="32-true")
    swarm = on_gpu(
        run_swarm, lambda: torch.compile(DigitsMLP()), loader(digits()), max_steps=4, precision="32-true", num_servers=2
    )
    assert swarm.losses == pytest.approx(plain.losses, rel=5e-6)
