"""A user's own forward around a list of blocks: the trainer computes the code around it, the swarm the blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateFinder
from torch import Tensor, nn
from typing_extensions import override

from lightning_swarm.client.pipeline.differentiation import GradientElsewhere
from lightning_swarm.coordinator.step import reconcile
from lightning_swarm.coordinator.step.replay_plan import ReplayPlan
from lightning_swarm.core.errors import ConfigError, ProtocolError, StepError
from lightning_swarm.network import Message
from lightning_swarm.protocol.messages.calls import CallKey, ComputeMode, ForwardRequest
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import AverageRequest
from lightning_swarm.protocol.messages.wire import encode
from lightning_swarm.protocol.rpc import FORWARD
from lightning_swarm.server.gradients import GradientSums
from lightning_swarm.server.step_handlers import StepHandlers
from lightning_swarm.testing import InMemoryStrategy
from tests.parity.float16 import HALF, InHalves, train
from tests.parity.harness import (
    LOSS_TOLERANCE,
    QUIET,
    WEIGHT_TOLERANCE,
    Run,
    SwarmRun,
    assert_exact,
    assert_same_curve,
    deviation,
    quiet_warnings,
    run_plain,
    run_swarm,
)
from tests.parity.models import Block, Images, NanoGPT, Recipe, digits, loader, sentences

LIST = {"pipeline": "transformer.h"}
STEPS = 6


def scheduled() -> NanoGPT:
    return NanoGPT(Recipe(schedule="onecycle"))


def both(
    make: Callable[[], L.LightningModule], data: Callable[[], Any] = sentences, *validation: Any, **options: Any
) -> tuple[SwarmRun, Run]:
    """Train with a swarm and with the plain Trainer, and check that the curves are equal."""
    of_both = {name: options.pop(name) for name in options.keys() & {"accumulate_grad_batches", "gradient_clip_val"}}
    of_both |= {name: options.pop(name) for name in options.keys() & {"max_steps", "max_epochs", "precision"}}
    of_both |= {name: options.pop(name) for name in options.keys() & {"gradient_clip_algorithm", "limit_val_batches"}}
    of_both = {"max_steps": STEPS, **of_both}
    plain = run_plain(make, loader(data()), *validation, **of_both)
    swarm = run_swarm(make, loader(data()), *validation, **{**LIST, **options}, **of_both)
    assert_same_curve(swarm, plain, weight=WEIGHT_TOLERANCE)
    assert {tensor.dtype for tensor in plain.weights.values()} <= {torch.float64, torch.int64}
    return swarm, plain


# ---------------------------------------------------------------------- the same curve


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 2, "num_servers": 2},
        {"num_stages": 3, "num_servers": 4, "accumulate_grad_batches": 2},
        {"num_stages": 4, "num_servers": 2, "role": "trainer", "accumulate_grad_batches": 3},
    ],
    ids=str,
)
def test_curve_equals_the_plain_trainers(options: dict[str, Any]) -> None:
    steps = 12 // options.get("accumulate_grad_batches", 1)
    swarm, plain = both(scheduled, max_steps=steps, gradient_clip_val=0.45, **options)
    assert 0 < swarm.num_clipped < steps, "the norm of all stages did not decide anything"
    # With accumulation, the plain norms are recorded per batch, not per step.
    if "accumulate_grad_batches" not in options:
        assert swarm.norms == pytest.approx(plain.norms, rel=1e-9)
    (around,) = {server.steps.stage(index) for server in swarm.strategy.servers for index in on_trainers(server)}
    assert sorted(around.parameters) == sorted(
        ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"]
    )


def on_trainers(server: Any) -> list[int]:
    return [index for index in server.steps.stages if server.steps.stage(index).on_trainers]


def test_clipping_by_value() -> None:
    swarm, _ = both(scheduled, gradient_clip_val=0.01, gradient_clip_algorithm="value", num_servers=3)
    assert swarm.records


@pytest.mark.thorough
def test_samples_weigh_equally_with_a_target() -> None:
    """A step of batches of 8 and 4 samples weighs each sample 1/52, also in the layers around the pipeline."""
    whole = run_plain(scheduled, loader(sentences(), 52), max_epochs=5)
    swarm = run_swarm(scheduled, loader(sentences()), max_epochs=5, target_batch_size=52, **LIST)
    torch.testing.assert_close(swarm.weights, whole.weights, rtol=0.0, atol=1e-10)


class Finetuned(NanoGPT):
    """Freezes the blocks; trains embeddings and head."""

    frozen = ("h",)

    def __init__(self) -> None:
        super().__init__(Recipe())
        for name in self.frozen:
            self.transformer[name].requires_grad_(False)


class OnlyItsHead(Finetuned):
    """Trains only the head, so that no gradient returns to the pipeline."""

    frozen = ("h", "wte", "wpe")

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 11, bias=False)


class NoGradient(NanoGPT):
    """Trains a head on the blocks' outputs, computed without gradients."""

    @override
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            x = self.transformer["wte"](idx)
            for block in self.transformer["h"]:  # type: ignore[union-attr]
                x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class NowAndThen(NanoGPT):
    """Has batches that do not call the pipeline, and batches that do not train."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx % 3 == 1:
            logits = self.lm_head(self.transformer["ln_f"](self.transformer["wte"](batch[0])))
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return super().training_step(batch, batch_idx) if batch_idx % 5 != 3 else None


class Looped(NanoGPT):
    """Runs the list of blocks twice."""

    @override
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx)
        for _ in range(2):
            for block in self.transformer["h"]:  # type: ignore[union-attr]
                x = block(x)
            x = self.transformer["ln_f"](x)
        logits = self.lm_head(x)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Penalised(NanoGPT):
    """Adds a penalty on the head's weight to the loss, which does not pass through the pipeline."""

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.lm_head.weight.square().sum()


class DropsOut(NanoGPT):
    """Has dropout around the list only, so that its masks are drawn by the trainer as in the plain run."""

    @override
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = F.dropout(self.transformer["wte"](idx), 0.3, training=self.training)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits = self.lm_head(F.dropout(self.transformer["ln_f"](x), 0.3, training=self.training))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.first_cells(1)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    "make", [Finetuned, OnlyItsHead, NoGradient, NowAndThen, Looped, Penalised, DropsOut], ids=lambda one: one.__name__
)
def test_forwards_of_many_kinds(make: type[NanoGPT]) -> None:
    swarm, plain = both(make, gradient_clip_val=0.5, num_servers=3, accumulate_grad_batches=2)
    initial = weights_of(make)
    moved = [name for name, tensor in plain.weights.items() if not torch.equal(tensor, initial[name])]
    assert "lm_head.weight" in moved
    assert make in (Finetuned, OnlyItsHead, NoGradient) or any(".h." in name for name in moved)
    if make in (OnlyItsHead, NoGradient):
        assert not any(swarm.held.counted(record, 2) for record in swarm.records), (
            "the pipeline was asked for gradients"
        )
    assert all(record.closing.batches for record in swarm.records)


def weights_of(make: Callable[[], L.LightningModule]) -> Mapping[str, Tensor]:
    torch.manual_seed(0)
    return make().double().state_dict()


class Staged(Images):
    """Keeps most layers in stages; uses the temperature outside of them."""

    def configure_stages(self) -> Any:
        return [nn.Sequential(nn.Flatten(), self.enter[0]), self.body, self.leave]

    def __init__(self) -> None:
        super().__init__()
        del self.enter[1]

    @override
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.leave(self.body(self.enter(x)))
        return logits

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]) * self.temperature, batch[1])


class Validated(Images):
    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))


@pytest.mark.first_cells(1)
@pytest.mark.parametrize(("make", "pipeline"), [(Images, "body"), (Staged, None)])
def test_other_cuts_leave_parameters_outside(make: type[Images], pipeline: str | None) -> None:
    _, plain = both(make, digits, pipeline=pipeline, max_epochs=2, max_steps=-1, num_servers=3)
    assert abs(float(plain.weights["temperature"]) - 1) > 1e-3


def test_validation_sees_the_weights_and_buffers_of_the_last_step() -> None:
    validation = loader(digits(), 20)
    swarm, plain = both(Validated, digits, validation, pipeline="body", max_epochs=2, max_steps=-1)
    assert swarm.trainer is not None
    assert plain.trainer is not None
    ours, theirs = (float(run.trainer.callback_metrics["val_loss"]) for run in (swarm, plain))  # type: ignore[union-attr]
    assert ours == pytest.approx(theirs, rel=LOSS_TOLERANCE)


class Phases(BaseFinetuning):
    """Trains the head and half of the blocks first, then embeddings in a group of their own, then all."""

    @override
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.transformer["wpe"], *pl_module.transformer["h"]])

    @override
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.transformer["wpe"], optimizer, lr=1e-2)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.transformer["h"], optimizer, lr=1e-3)


class Unfreezes(NanoGPT):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=3e-3)


def test_what_trains_may_change_around_the_pipeline_too() -> None:
    plain = run_plain(Unfreezes, loader(sentences()), max_epochs=3, callbacks=[Phases()])
    swarm = run_swarm(Unfreezes, loader(sentences()), max_epochs=3, callbacks=[Phases()], num_stages=3, **LIST)
    assert_exact(swarm, plain)
    assert sum(record.change.selection is not None for record in swarm.records) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_the_curve_is_close_in_bfloat16(precision: Any) -> None:
    plain = run_plain(NanoGPT, loader(sentences()), max_steps=10, precision=precision)
    swarm = run_swarm(NanoGPT, loader(sentences()), max_steps=10, precision=precision, **LIST)
    assert_same_curve(swarm, plain, loss=1e-2)


class InFloat16(InHalves):
    """Has a layer before the pipeline and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        first, *others, last = self.net
        self.net = nn.Sequential(first, nn.Sequential(*others), last)


@pytest.mark.thorough
def test_scaled_gradients_around_the_pipeline() -> None:
    plain = train(run_plain, InFloat16, max_steps=30)
    swarm = train(run_swarm, InFloat16, max_steps=30, microbatch_size=HALF, pipeline="net.1")
    assert swarm.scales == plain.scales
    assert plain.num_skipped > 2
    assert_same_curve(swarm.run, plain.run, loss=1e-6, weight=1e-6)


# ---------------------------------------------------------------------- where the weights are


class Looks(L.Callback):
    """Checks the module's and the stage's weights around the pipeline, and which peers may compute with them."""

    def __init__(self) -> None:
        self.seen = 0

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, InMemoryStrategy)
        assert strategy.peer is not None
        assert strategy.peer.server is not None
        (index,) = on_trainers(strategy.peer.server)
        stage = strategy.peer.server.steps.stage(index)
        assert stage.version == trainer.global_step
        for name, parameter in pl_module.named_parameters():
            if name in stage.parameters:
                self.seen += 1
                assert type(parameter.grad) is GradientElsewhere, "a use would say where it is"
                assert torch.equal(parameter, stage.parameters[name])
                assert parameter.data_ptr() != stage.parameters[name].data_ptr()
        key = CallKey(generation=0, step=stage.version, first=0, index=0, call=9, evaluation=True)
        request = ForwardRequest(
            key=key,
            stage_index=index,
            mode=ComputeMode(training=False, grad=False),
            source=None,
            result_key=bytes(16),
            structure=["tuple", ["tuple"], {}],
        )
        with pytest.raises(ProtocolError, match="trainers compute stage"):
            strategy.peer.runtime.run(
                strategy.peer.transport.call(
                    strategy.peer.transport.peer_id, FORWARD.name, encode(request), timeout=1.0
                )
            )
        with pytest.raises(ProtocolError, match="trainers compute stage"):
            strategy.peer.runtime.run(
                strategy.peer.transport.stream(
                    strategy.peer.transport.peer_id, FORWARD.name, Message(encode(request)), timeout=1.0
                )
            )


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("role", ["auto", "trainer"])
def test_the_trainer_computes_with_what_its_stage_holds(role: Any) -> None:
    looks = Looks()
    run_swarm(scheduled, loader(sentences()), max_steps=STEPS, callbacks=[looks], role=role, **LIST)
    assert looks.seen == 4 * STEPS


def test_what_gets_no_gradient_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Staged):
        def configure_stages(self) -> Any:
            return [nn.Flatten(), self.enter[0], self.leave]

    run_swarm(Forgetful, loader(digits()), max_steps=2)
    assert "4 parameters outside of the pipeline got no gradient" in caplog.text
    assert "body.0.weight" in caplog.text
    assert caplog.text.count("got no gradient") == 1


# ---------------------------------------------------------------------- bugs that are seen

PLANTED_AT = 5


@pytest.fixture(params=["twice", "not at all"])
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[CallKey]:
    """Add the gradient of one batch around the pipeline twice, or never."""
    struck: list[CallKey] = []
    add_batch = StepHandlers.add_batch

    async def wrong(
        self: StepHandlers, index: int, key: CallKey, gradients: Mapping[str, Tensor | None], weight: float, seen: Any
    ) -> None:
        strikes = key.step == PLANTED_AT and not struck
        if strikes:
            struck.append(key)
        if not strikes or request.param == "twice":
            await add_batch(self, index, key, gradients, weight, seen)
        if strikes and request.param == "twice":
            other = CallKey(generation=0, step=key.step, first=key.first, index=1, call=0)
            await add_batch(self, index, other, gradients, weight, seen)

    monkeypatch.setattr(StepHandlers, "add_batch", wrong)
    return struck


@pytest.mark.parametrize("planted", ["not at all"], indirect=True)
def test_a_batch_that_its_trainer_did_not_add_fails_the_step(planted: list[CallKey]) -> None:
    with pytest.raises(StepError, match=rf"step {PLANTED_AT}: .*stage 2 lacks its own batch"):
        run_swarm(scheduled, loader(sentences()), max_steps=STEPS, **LIST)
    assert len(planted) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("planted", ["twice"], indirect=True)
def test_a_sum_with_a_batch_too_many_is_in_no_record(planted: list[CallKey], caplog: pytest.LogCaptureFixture) -> None:
    """The sum is discarded, and the batch in it runs again."""
    plain = run_plain(scheduled, loader(sentences()), max_steps=2 * STEPS)
    swarm = run_swarm(scheduled, loader(sentences()), max_steps=2 * STEPS, **LIST)
    assert len(planted) == 1
    assert f"strike: step {PLANTED_AT}" in caplog.text
    assert_exact(swarm, plain)


@pytest.mark.first_cells(1)
def test_the_curve_shows_what_is_not_counted_once(planted: list[CallKey], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_plain(scheduled, loader(sentences()), max_steps=2 * STEPS)
    # Without this, the closing would strike the batch.
    monkeypatch.setattr(reconcile, "plan_replays", lambda *_, **__: ReplayPlan((), (), {}, ()))
    monkeypatch.setattr(GradientSums, "bind", bind_anyway)
    swarm = run_swarm(scheduled, loader(sentences()), max_steps=2 * STEPS, **LIST)
    assert len(planted) == 1
    with pytest.raises(AssertionError, match=r"batch \d+: loss"):
        assert_exact(swarm, plain)
    assert deviation(swarm, plain)[0] > 1e3 * LOSS_TOLERANCE


def bind_anyway(self: GradientSums, _: AverageRequest, rosters: Sequence[list[Member]]) -> dict[int, int]:
    return {index: rosters[index].index(self._me) for index in self.stages}


# ---------------------------------------------------------------------- refused


class TiedToABlock(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8)
        self.again.weight = self.transformer["h"][1].project.weight  # type: ignore[index, union-attr]


class SparseOutside(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 11)
        self.transformer["wte"] = nn.Embedding(11, 8, sparse=True)


class PenalisedBlocks(NanoGPT):
    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        penalty = torch.stack([one.square().sum() for one in self.parameters()]).sum()
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class StagedToo(NanoGPT):
    def configure_stages(self) -> Any:
        return list(self.transformer["h"])  # type: ignore[arg-type]


class LeavesEarly(NanoGPT):
    @override
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"][:3]:  # type: ignore[index]
            x = block(x)
        return self.lm_head(x), self.lm_head(x).sum()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (TiedToABlock, LIST, r"either in .* blocks.* or outside of them.*got again.weight outside.*Untie it"),
        (SparseOutside, LIST, r"must be dense.*`sparse=True` in transformer.wte"),
        (PenalisedBlocks, LIST, r"a loss may reach the pipeline's weights.*\['transformer.h.0.*weight decay"),
        (
            StagedToo,
            LIST,
            r"must name a module with a forward.*`ModuleList` 'transformer.h' in StagedToo.*Name the",
        ),
        (LeavesEarly, LIST, r"must call its blocks one after the other.*'transformer.h.2' went to .*configure_stages"),
        (NanoGPT, {}, r"one `torch.nn.Sequential`.*a `ModuleList` of blocks with `pipeline=...`"),
        (
            NanoGPT,
            {**LIST, "split": "time"},
            r"`example_input_array` must be set: NanoGPT has none.*Set it in `__init__`",
        ),
        (NanoGPT, {**LIST, "num_stages": 5}, r"`num_stages` must be 1..4.*got 5"),
    ],
)
def test_what_cannot_be_is_refused(make: type[NanoGPT], options: dict[str, Any], message: str) -> None:
    module = make()
    strategy = InMemoryStrategy(**{"num_stages": 2, **options})
    trainer = L.Trainer(**{**QUIET, "devices": 2, "max_steps": 1}, strategy=strategy)
    with pytest.raises(ConfigError, match=message), quiet_warnings():
        trainer.fit(module, loader(sentences()))
    assert not any("forward" in vars(one) for one in module.modules()), "something still stands in for a forward"


@pytest.mark.thorough
def test_a_run_that_goes_back_takes_it_along(tmp_path: Path) -> None:
    """A learning rate finder also changes the layers around the pipeline; rollback restores them."""

    class Tunable(NanoGPT):
        learning_rate = 1e-3

        def __init__(self) -> None:
            super().__init__(Recipe())

        @override
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

    runs = []
    for run, options in (run_plain, {}), (run_swarm, LIST):
        finder = LearningRateFinder(num_training_steps=20, max_lr=0.1)
        done = run(Tunable, loader(sentences()), max_epochs=3, callbacks=[finder], default_root_dir=tmp_path, **options)
        runs.append((done, finder.optimal_lr))
    (plain, wanted), (swarm, found) = runs
    assert found.results["loss"] == pytest.approx(wanted.results["loss"], rel=1e-9)
    assert len(wanted.results["loss"]) > 15
    assert_exact(swarm, plain)


class Attends(Block):
    """Returns its attention's weights as well; a softmax of the output stands for them."""

    @override
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        out = super().forward(hidden)
        return out, out.softmax(-1)


class Unpacked(NanoGPT):
    def __init__(self) -> None:
        super().__init__()
        self.transformer["h"] = nn.ModuleList([Attends(8) for _ in range(4)])

    @override
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x, weights = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x * weights))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_blocks_that_give_more_than_goes_on() -> None:
    plain = run_plain(Unpacked, loader(sentences()), max_steps=STEPS)
    swarm = run_swarm(Unpacked, loader(sentences()), max_steps=STEPS, num_servers=3, **LIST)
    assert_exact(swarm, plain)
