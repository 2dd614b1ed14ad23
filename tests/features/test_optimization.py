"""Optimization."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from typing_extensions import override

from lightning_swarm.client.pipeline import pipeline
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model import autocast
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.testing import InMemoryStrategy
from tests.features.both import STEPS, Evaluated, Trained, fit_both
from tests.features.mark import PARTLY, REFUSED, WORKS, feature
from tests.features.refused import assert_refused
from tests.parity.harness import QUIET, quiet_warnings, run_plain, run_swarm
from tests.parity.models import DigitsMLP, NanoGPT, Recipe, digits, loader, make_optimizer, sentences


def scheduled(make: Callable[[torch.optim.Optimizer], Any], base: type[DigitsMLP] = Trained, **how: Any) -> Any:
    """Return a module with a schedule of the learning rate."""

    class Scheduled(base):  # type: ignore[valid-type, misc]  # a base that is chosen at run time
        @override
        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(self, self.recipe)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **how}}

    return Scheduled


def assert_same_rates(make_module: Any, *validation: Any, **options: Any) -> list[float]:
    both = fit_both(make_module, *validation, **options)
    assert both.swarm.learning_rates == both.plain.learning_rates
    assert len(set(both.plain.learning_rates)) > 1
    return both.plain.learning_rates


@feature("`SGD`, `AdamW`, parameter groups", WORKS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizers(optimizer: Any) -> None:
    fit_both(lambda: DigitsMLP(Recipe(optimizer=optimizer)), max_steps=STEPS)


def eight_bits(kind: str, base: type[L.LightningModule] = Trained, *, in_32_bits: Sequence[str] = ()) -> Any:
    """Return a module with an optimizer of bitsandbytes, and some weights whose state has 32 bits.

    Of these, even ones are named by their modules, as bitsandbytes' own layers are, and odd ones by themselves.
    """

    class EightBits(base):  # type: ignore[valid-type, misc]  # a base that is chosen at run time
        @override
        def configure_optimizers(self) -> Any:
            from bitsandbytes import optim

            manager = optim.GlobalOptimManager.get_instance()
            manager.register_parameters(self.parameters())
            for i, name in enumerate(in_32_bits):
                if i % 2:
                    manager.override_config(self.get_parameter(f"{name}.weight"), "optim_bits", 32)
                else:
                    manager.register_module_override(self.get_submodule(name), "weight", {"optim_bits": 32})
            return getattr(optim, kind)(self.parameters(), lr=3e-3, min_8bit_size=1)

    return EightBits


@pytest.mark.first_cells(1)
@feature("8-bit optimizers of bitsandbytes: `Adam8bit`, `AdamW8bit`, `LAMB8bit`, `Lion8bit`", WORKS)
@pytest.mark.parametrize("kind", ["Adam8bit", "AdamW8bit", "LAMB8bit", "Lion8bit"])
def test_8_bit_optimizers(kind: str) -> None:
    both = fit_both(eight_bits(kind), max_steps=STEPS, swarm={"num_servers": 4})
    for server in both.swarm.strategy.servers:
        (stage,) = server.steps.sums.stages.values()
        assert all(one["state1"].dtype == torch.uint8 for one in stage.optimizer.state().values())


@pytest.mark.first_cells(1)
@feature("`GlobalOptimManager` of bitsandbytes: parameters with 32-bit state", WORKS)
@pytest.mark.parametrize(
    ("base", "data", "pipeline", "in_32_bits"),
    [
        (Trained, digits, None, ["net.0", "net.4"]),
        (NanoGPT, sentences, "transformer.h", ["transformer.wpe", "transformer.ln_f", "transformer.h.1.norms.0"]),
    ],
)
def test_8_bit_overrides(
    base: type[L.LightningModule],
    data: Any,
    pipeline: str | None,
    in_32_bits: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other stages of the same process must not find their overrides in the same places."""
    from bitsandbytes.optim import GlobalOptimManager

    monkeypatch.setattr(GlobalOptimManager, "_instance", None)  # a singleton, which would still have earlier modules
    module = eight_bits("AdamW8bit", base, in_32_bits=in_32_bits)
    both = fit_both(
        module, data=lambda: loader(data()), max_steps=STEPS, swarm={"pipeline": pipeline, "num_servers": 3}
    )
    state = both.trainers[1].optimizers[0].state
    names = {one: name for name, one in both.swarm.module.named_parameters()}
    found = {names[one] for one, own in state.items() if own["state1"].dtype == torch.float32}
    assert found == {f"{name}.weight" for name in in_32_bits}


@feature("schedulers by step (`interval='step'`), `frequency`", WORKS)
def test_schedules_by_step() -> None:
    module = scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.9), interval="step", frequency=2)
    assert len(set(assert_same_rates(module, max_steps=STEPS))) == 5


@feature("schedulers by epoch", WORKS)
def test_schedules_by_epoch() -> None:
    assert_same_rates(scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5)), max_epochs=3)


@feature("`ReduceLROnPlateau`", WORKS)
def test_plateaus() -> None:
    module = scheduled(lambda one: ReduceLROnPlateau(one, patience=0, threshold=0.5), Evaluated, monitor="val_loss")
    assert_same_rates(module, loader(digits()), max_epochs=4)


@feature("overridden `lr_scheduler_step`", WORKS)
def test_own_scheduler_step() -> None:
    base = scheduled(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), interval="step")

    class EveryThird(base):  # type: ignore[valid-type, misc]  # as above
        @override
        def lr_scheduler_step(self, scheduler: LRScheduler, metric: Any | None) -> None:
            if self.global_step % 3 == 0:
                scheduler.step()

    assert len(set(assert_same_rates(EveryThird, max_steps=STEPS))) == 4


class Kept(Trained):
    """Creates its optimizer once, has its own schedule, and warms up by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.double()  # before the optimizer makes its state
        self.num_calls = 0
        self.made = torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.made, 0.9)

    @override
    def configure_optimizers(self) -> Any:
        self.num_calls += 1
        return self.made

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for group in self.made.param_groups:
            group["weight_decay"] = 0.01 * self.global_step
        return super().training_step(batch, batch_idx)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.schedule.step()


@feature(
    "an optimizer that is made in `__init__` or kept, and a scheduler that the module steps itself",
    WORKS,
    "`configure_optimizers` is called once, and the Trainer has the object that it returned",
)
def test_kept_optimizers() -> None:
    both = fit_both(Kept, max_steps=STEPS, swarm={"num_servers": 3})
    for run in (both.plain, both.swarm):
        module: Any = run.module
        assert module.num_calls == 1
        assert run.trainer.optimizers[0] is module.made
        assert [id(one) for one in module.made.param_groups[0]["params"]] == [id(one) for one in module.parameters()]
    torch.testing.assert_close(*(run.trainer.optimizers[0].state_dict() for run in (both.plain, both.swarm)))


class OldStyle(torch.optim.SGD):
    """Requires a closure, which Lightning passes."""

    @override
    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            closure()
        return super().step()


@feature("optimizers whose `step` needs a closure", WORKS, "it must call the closure at the weights before the step")
def test_closures() -> None:
    class Trains(Trained):
        @override
        def configure_optimizers(self) -> Any:
            return OldStyle(self.parameters(), lr=0.1, momentum=0.9)

    fit_both(Trains, max_steps=STEPS)


class Sharpness(torch.optim.SGD):
    """Steps by the gradient at weights moved along the gradient."""

    @override
    def step(self, closure: Any) -> Any:
        closure()
        parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        before = [one.detach().clone() for one in parameters]
        with torch.no_grad():
            for one in parameters:
                one.add_(one.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for one, old in zip(parameters, before, strict=True):
                one.copy_(old)
        return super().step()


class Unmoved(torch.optim.SGD):
    @override
    def step(self, closure: Any) -> Any:
        return super().step()


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@feature("no optimizer: `configure_optimizers` returns None", REFUSED, "works on one device, without other peers")
def test_no_optimizer() -> None:
    class Reads(DigitsMLP):
        @override
        def configure_optimizers(self) -> Any:
            return None

    with quiet_warnings():
        assert_refused("must return an optimizer with parameters, got none", Reads)
        L.Trainer(**QUIET, devices=1, max_steps=2, strategy="swarm").fit(Reads(), loader(digits()))


@feature(
    "optimizers that compute gradients at changed weights (sharpness-aware: `SAM`), or call no closure",
    REFUSED,
    "when the run begins; use `SGD`, `AdamW` or `StochasticWeightAveraging`",
)
@pytest.mark.parametrize(("kind", "message"), [(Sharpness, "Sharpness changes weights"), (Unmoved, "Unmoved did not")])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_closures_at_other_weights(kind: type[torch.optim.SGD], message: str, num_stages: int) -> None:
    class Trains(DigitsMLP):
        @override
        def configure_optimizers(self) -> Any:
            return kind(self.parameters(), lr=0.1)

    strategy = InMemoryStrategy(num_stages=num_stages)
    trainer = L.Trainer(**{**QUIET, "devices": 2, "max_steps": 1}, strategy=strategy)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Trains(), loader(digits()))


@feature("learning rates that a callback sets", WORKS, "each step uses the hyperparameters of the lead's optimizer")
def test_rates_that_are_set() -> None:
    class Sets(L.Callback):
        @override
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * (1 + trainer.global_step)

    assert_same_rates(Trained, max_steps=STEPS, made={"callbacks": lambda _: [Sets()]})


@feature("`Trainer(accumulate_grad_batches=...)`", WORKS, "`target_batch_size` counts samples instead")
def test_accumulation() -> None:
    both = fit_both(accumulate_grad_batches=3, max_epochs=2)
    assert both.plain.global_steps[-1] == 6


@feature("`GradientAccumulationScheduler`", WORKS)
def test_scheduled_accumulation() -> None:
    schedule = {"callbacks": lambda _: [GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]}
    both = fit_both(made=schedule, max_epochs=3)
    assert both.plain.global_steps[-1] == 7 + 4 + 2


@feature("`Trainer(gradient_clip_val=...)` by norm", WORKS, "the norm over all stages")
def test_clipping_by_norm() -> None:
    both = fit_both(gradient_clip_val=0.1, max_steps=STEPS)
    assert both.swarm.num_clipped == STEPS


@pytest.mark.first_cells(1)
@feature("`Trainer(gradient_clip_algorithm='value')`", WORKS)
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_clipping_by_value(accumulate_grad_batches: int) -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": accumulate_grad_batches}
    clips: list[dict[str, Any]] = [{}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
    # Momentum of plain gradients, because AdamW would cancel most of the clipping.
    free, clipped = (fit_both(lambda: DigitsMLP(Recipe(optimizer="sgd")), **options, **clip) for clip in clips)
    assert clipped.swarm.losses[-1] != pytest.approx(free.swarm.losses[-1], rel=1e-3)
    assert clipped.swarm.num_clipped == 0, "the norm had a part in it"


@feature("frozen parameters (`requires_grad=False` before training)", WORKS)
def test_frozen_parameters() -> None:
    class Frozen(Trained):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

    fit_both(Frozen, max_steps=STEPS)


@feature("`training_step` returning None", WORKS, "the batch counts in no step")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_left_out_batches() -> None:
    class LeavesOut(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx != 2 else None

    assert fit_both(LeavesOut, max_epochs=1).plain.losses[2] == 0.0


@feature(
    "`on_before_backward`, `on_after_backward`, `on_before_optimizer_step`, `on_before_zero_grad`",
    WORKS,
    "called at the same steps; for gradients see [below](#gradients-that-users-take-themselves)",
)
def test_hooks_around_the_step() -> None:
    class Notes(L.Callback):
        def __init__(self) -> None:
            self.calls: list[tuple[str, int]] = []

        @override
        def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
            self.calls.append(("backward begins", trainer.global_step))

        @override
        def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
            self.calls.append(("backward is over", trainer.global_step))

        @override
        def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
            self.calls.append(("step", trainer.global_step))

        @override
        def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
            self.calls.append(("zero", trainer.global_step))

    notes = {"plain": Notes(), "swarm": Notes()}
    fit_both(made={"callbacks": lambda name: [notes[name]]}, max_epochs=1, accumulate_grad_batches=2)
    assert notes["swarm"].calls == notes["plain"].calls
    assert notes["plain"].calls.count(("step", 2)) == 1


class ReadsState(L.Callback):
    def __init__(self) -> None:
        self.found: list[list[float]] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        state = trainer.optimizers[0].state
        self.found += [[float(one["exp_avg"].norm()) for one in state.values()]]


@feature("reading `optimizer.state` and `optimizer.state_dict()` in hooks", WORKS, "the state is gathered at that time")
def test_optimizer_state_is_read() -> None:
    reads = {"plain": ReadsState(), "swarm": ReadsState()}
    fit_both(
        lambda: DigitsMLP(Recipe(optimizer="adamw")), made={"callbacks": lambda name: [reads[name]]}, max_steps=STEPS
    )
    assert len(reads["plain"].found) == STEPS
    for ours, theirs in zip(reads["swarm"].found, reads["plain"].found, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-10)


class ScheduleFree(torch.optim.SGD):
    """Trains between averaged and stepped weights, and swaps them for validation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.param_groups[0].update(beta=0.9, number=0, averages=False)

    @torch.no_grad()
    def swap(self, *, averages: bool) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["averages"] != averages else ():
                if "stepped" in self.state[parameter]:
                    weight = 1 - 1 / group["beta"] if averages else 1 - group["beta"]
                    parameter.lerp_(self.state[parameter]["stepped"], weight)
            group["averages"] = averages

    @override
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                assert not group["averages"]
                group["number"] += 1
                for parameter in [one for one in group["params"] if one.grad is not None]:
                    stepped = self.state[parameter].setdefault("stepped", parameter.clone())
                    parameter.lerp_(stepped, 1 / group["number"])
                    factor = group["beta"] * (1 - 1 / group["number"]) - 1
                    parameter.add_(parameter.grad, alpha=group["lr"] * factor)
                    stepped.sub_(parameter.grad, alpha=group["lr"])
        return loss


class TrainsScheduleFree(Evaluated):
    @override
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters())

    def swap(self, *, averages: bool) -> None:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.swap(averages=averages)

    @override
    def on_train_start(self) -> None:
        self.swap(averages=False)

    @override
    def on_validation_start(self) -> None:
        self.swap(averages=True)

    @override
    def on_validation_end(self) -> None:
        self.swap(averages=False)


@feature("optimizers that swap weights for validation by their state, such as schedule-free optimizers", WORKS)
def test_schedule_free_optimizers() -> None:
    both = fit_both(TrainsScheduleFree, loader(digits()), max_epochs=3)
    assert both.logged()["val_loss"] > 0


class ReadsCounts(L.Callback):
    """Reads the optimizer's count in its parameter groups in each way."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def note(self, trainer: L.Trainer, place: str) -> None:
        (group,) = trainer.optimizers[0].param_groups
        ways = (group["number"], group.get("number"), dict(group)["number"], {**group}["number"])
        saved = trainer.optimizers[0].state_dict()["param_groups"][0]["number"]
        assert {*ways, copy.deepcopy(group)["number"], saved} == {ways[0]}
        self.found.append((place, trainer.global_step, ways[0]))

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "batch begins")

    @override
    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % 2:
            self.note(trainer, "before the step")

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % 3:
            self.note(trainer, "batch ends")

    @override
    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.note(trainer, "the end")


@feature(
    "reading numbers that optimizers update in `param_groups`: `k` of schedule-free optimizers, `d` of Prodigy",
    WORKS,
    "they are gathered at that time, with the state",
)
def test_counts_in_parameter_groups_are_read() -> None:
    reads = {"plain": ReadsCounts(), "swarm": ReadsCounts()}
    fit_both(TrainsScheduleFree, loader(digits()), made={"callbacks": lambda name: [reads[name]]}, max_epochs=2)
    assert reads["swarm"].found == reads["plain"].found
    assert reads["plain"].found[-1] == ("the end", 14, 14)


@feature("setting such a number during `fit`", REFUSED, "at the next batch; set it before `fit`")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_count_is_set_during_fit(num_stages: int) -> None:
    class Sets(L.Callback):
        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.optimizers[0].param_groups[0]["number"] = 0

    with pytest.raises(ConfigError, match=r"`number` of a parameter group was set.*Set it before `fit`"):
        run_swarm(
            TrainsScheduleFree, *[loader(digits())] * 2, callbacks=[Sets()], num_stages=num_stages, max_steps=STEPS
        )


class KeepsTensors(ScheduleFree):
    @override
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["mean"] = torch.zeros(())
        return super().step(closure)


@feature(
    "optimizers that write values other than numbers into `param_groups`", REFUSED, "keep them in `optimizer.state`"
)
def test_an_optimizer_writes_tensors_into_its_groups() -> None:
    class Trains(DigitsMLP):
        @override
        def configure_optimizers(self) -> Any:
            return KeepsTensors(self.parameters())

    assert_refused(r"may write only numbers into its parameter groups.*KeepsTensors writes `mean`, a Tensor", Trains)


def clear_state(trainer: L.Trainer) -> None:
    trainer.optimizers[0].state.clear()


def zero_state(trainer: L.Trainer) -> None:
    for state in trainer.optimizers[0].state.values():
        state["exp_avg"].zero_()


def replace_state(trainer: L.Trainer) -> None:
    trainer.optimizers[0].state = defaultdict(dict)


def load_state(trainer: L.Trainer) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def delete_state(trainer: L.Trainer) -> None:
    optimizer = trainer.optimizers[0]
    del optimizer.state[optimizer.param_groups[0]["params"][0]]


def forget_state(trainer: L.Trainer) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.state[optimizer.param_groups[0]["params"][-1]] = {}


def step_again(trainer: L.Trainer) -> None:
    for state in trainer.optimizers[0].state.values():
        state["step"].zero_()


def replace_momentum(trainer: L.Trainer) -> None:
    for state in trainer.optimizers[0].state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


RESETS = (clear_state, zero_state, replace_state, load_state, delete_state, forget_state, step_again, replace_momentum)


def new_optimizer(trainer: L.Trainer) -> None:
    trainer.strategy.setup_optimizers(trainer)


def new_hook(trainer: L.Trainer) -> None:
    trainer.optimizers[0].register_step_post_hook(lambda *_: None)


@pytest.mark.first_cells(4)
@feature(
    "changing `optimizer.state`, replacing the optimizer, or registering its hooks, during `fit`",
    REFUSED,
    "at the next batch or checkpoint, because servers have copies of the optimizer; hyperparameters may change",
)
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    ("do", "message"),
    [
        *((do, r"its `state` was changed.*Begin another `fit`") for do in RESETS),
        (new_optimizer, r"another optimizer took its place"),
        (new_hook, r"a hook was registered"),
    ],
)
def test_an_optimizer_is_changed_during_fit(
    do: Callable[[L.Trainer], None], message: str, num_stages: int, tmp_path: Path
) -> None:
    class Changes(L.Callback):
        """Restarts every few steps, as a warm restart does; after the last time only a checkpoint follows."""

        def __init__(self, at: int) -> None:
            self.at = at

        @override
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            assert trainer.global_step <= self.at
            if trainer.global_step == self.at:
                do(trainer)

    for at in (1, 3):
        with pytest.raises(ConfigError, match=message):
            run_swarm(
                lambda: DigitsMLP(Recipe(optimizer="adamw")),
                loader(digits()),
                callbacks=[Changes(at), ModelCheckpoint(tmp_path, every_n_train_steps=3)],
                enable_checkpointing=True,
                num_stages=num_stages,
                max_steps=3,
            )
    assert not list(tmp_path.iterdir())


class ByWholeNorm(torch.optim.SGD):
    """Steps by the gradient's direction."""

    @override
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for gradient in gradients:
            gradient.div_(norm)
        super().step()
        return loss


class StepsTogether(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        return ByWholeNorm(self.parameters(), lr=0.1)


class Counts(DigitsMLP):
    steps = 0

    @override
    def configure_optimizers(self) -> Any:
        def count(*_: Any) -> None:
            self.steps += 1

        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(count)
        return optimizer


class CountsItself(DigitsMLP):
    steps = 0

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        own_step = optimizer.step

        def step(closure: Any = None) -> Any:
            self.steps += 1
            return own_step(closure)

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer


class ClampsItself(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        own_step = optimizer.step

        def step(closure: Any = None) -> Any:
            loss = own_step(closure)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.data.clamp_(-0.1, 0.1)
            return loss

        optimizer.step = step  # type: ignore[method-assign]
        return optimizer


@feature("a function that replaces an optimizer's `step`, and refers to nothing but the optimizer", WORKS)
def test_a_step_of_its_own() -> None:
    both = fit_both(ClampsItself, max_steps=STEPS)
    assert max(float(tensor.abs().max()) for tensor in both.swarm.weights.values()) <= 0.1


@feature(
    "optimizers that use all parameters at once (Prodigy, D-Adaptation), or have hooks that refer to other objects",
    REFUSED,
    "a server steps the parameters of its stage; with `num_stages=1` one stage has all of them",
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (StepsTogether, r"by its own gradient"),
        (Counts, r"to a Counts"),
        (CountsItself, r"to a CountsItself"),
    ],
)
def test_optimizers_that_need_more_than_a_stage(make: Callable[[], L.LightningModule], message: str) -> None:
    assert_refused(message, make)


@feature("the same optimizers if all parameters are in one stage", WORKS)
def test_an_optimizer_that_looks_at_all_parameters_of_one_stage() -> None:
    swarm = run_swarm(StepsTogether, loader(digits()), num_stages=1, num_servers=1, max_steps=STEPS)
    plain = run_plain(StepsTogether, loader(digits()), max_steps=STEPS)
    assert swarm.losses == pytest.approx(plain.losses, rel=1e-11)


class Root(nn.Module):
    """Has a gradient 0 / 0: the root's derivative is infinite at zero, and infinity times zero is NaN."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + (0.0 * hidden).sqrt()


class RootOfZero(DigitsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(Root())


@feature(
    "`torch.set_float32_matmul_precision`, or `fp32_precision` of `torch.backends`",
    WORKS,
    "servers multiply with the trainer's setting, also servers that the command line started",
)
def test_float32_matmul_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is the process's, which the servers share here, so it is reset after a call has read it."""
    seen: list[str] = []

    class Noting(nn.Module):
        @override
        def forward(self, hidden: Tensor) -> Tensor:
            seen.append(torch.get_float32_matmul_precision())
            return hidden

    class Multiplied(DigitsMLP):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(Noting())

        @override
        def on_train_batch_start(self, *args: Any) -> None:
            torch.set_float32_matmul_precision("high")
            seen.clear()  # results from before training

    def capture(*args: Any, **options: Any) -> ComputeMode:
        mode = autocast.capture(*args, **options)
        torch.set_float32_matmul_precision("highest")
        return mode

    monkeypatch.setattr(pipeline, "capture", capture)
    try:
        run_swarm(Multiplied, loader(digits()), max_steps=2)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(seen) > 1, "there is a backward, too"
    assert set(seen) == {"high"}


@feature("`Trainer(detect_anomaly=True)`", WORKS)
def test_detect_anomaly() -> None:
    fit_both(detect_anomaly=True, max_steps=3)
    for run in (run_plain, run_swarm):
        run(RootOfZero, loader(digits()), max_steps=1)
        with pytest.raises(Exception, match="returned nan values in its 0th output"):
            run(RootOfZero, loader(digits()), max_steps=1, detect_anomaly=True)


@feature(
    "gradients that are not finite",
    PARTLY,
    "the step is skipped in all stages, with a warning; the plain Trainer continues with NaN",
)
def test_gradients_that_are_not_finite() -> None:
    class Poisoned(DigitsMLP):
        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 2 else 1.0)

    both = fit_both(Poisoned, max_steps=STEPS, exact=False)
    assert [record.outcome for record in both.swarm.records].count("skip") == 1
    assert all(bool(tensor.isfinite().all()) for tensor in both.swarm.weights.values())
    assert not all(bool(tensor.isfinite().all()) for tensor in both.plain.weights.values())


class BackpropagatesItself(DigitsMLP):
    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


@feature("overridden `backward`", WORKS)
def test_own_backward() -> None:
    doubled, plain = fit_both(BackpropagatesItself, max_steps=STEPS), fit_both(DigitsMLP, max_steps=STEPS)
    assert doubled.swarm.norms[0] == pytest.approx(2 * plain.swarm.norms[0])


# ---------------------------------------------------------------------- refused


class Manual(DigitsMLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[:4].parameters(), 0.1), torch.optim.SGD(self.net[4:].parameters(), 0.1)]


class SecondOrder(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Sparse(DigitsMLP):
    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()))


class StepsItself(DigitsMLP):
    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class ZeroesItself(DigitsMLP):
    @override
    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None: ...


class ClipsItself(DigitsMLP):
    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("make_module", "message"),
    [
        pytest.param(
            Manual,
            r"`automatic_optimization` must be True.*got False.*Let Lightning optimize",
            marks=feature("manual optimization", REFUSED, "let Lightning optimize"),
        ),
        pytest.param(
            TwoOptimizers,
            r"must return one optimizer, got several.*Use one, with parameter groups",
            marks=feature("several optimizers", REFUSED, "use one, with parameter groups"),
        ),
        pytest.param(
            SecondOrder,
            r"must step from one dense gradient, got LBFGS.*Use SGD",
            marks=feature("`LBFGS`", REFUSED, "use an optimizer that steps from one dense gradient"),
        ),
        pytest.param(
            Sparse,
            r"must step from one dense gradient, got SparseAdam.*Use SGD",
            marks=feature("`SparseAdam`", REFUSED, "as for `LBFGS`"),
        ),
        pytest.param(
            StepsItself,
            r"`optimizer_step` must be .*StepsItself overrides it.*Remove",
            marks=feature("overridden `optimizer_step`", REFUSED, "remove the override; the servers step"),
        ),
        pytest.param(
            ZeroesItself,
            r"`optimizer_zero_grad` must be .*ZeroesItself overrides it.*Remove",
            marks=feature("overridden `optimizer_zero_grad`", REFUSED, "remove the override"),
        ),
        pytest.param(
            ClipsItself,
            r"`configure_gradient_clipping` must be .*ClipsItself overrides it.*Remove",
            marks=feature("overridden `configure_gradient_clipping`", REFUSED, "use `gradient_clip_val`"),
        ),
    ],
)
def test_refused_optimization(make_module: Callable[[], DigitsMLP], message: str) -> None:
    assert_refused(message, make_module)
