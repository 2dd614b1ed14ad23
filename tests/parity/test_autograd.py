"""Uses of autograd that `training_step` may make of a plain module also work with a pipelined module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import lightning_swarm.nn
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError, StageError
from tests.parity.harness import Run, SwarmRun, assert_exact, assert_same_curve, run_plain, run_swarm
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader

STEPS = 8


def layers(*more: nn.Module) -> list[nn.Module]:
    return [nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), *more, nn.Linear(16, 10)]


class Digits(Net):
    """A classifier whose loss the tests replace."""

    def __init__(self, *more: nn.Module, recipe: Recipe | None = None) -> None:
        super().__init__(lightning_swarm.nn.Sequential(*layers(*more)), recipe)

    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor | None:
        return F.cross_entropy(self.net(images), labels)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        images, labels = batch
        return self.loss(images, labels, batch_idx)


def run_both(make_module: Callable[[], Net], **options: Any) -> tuple[Run, SwarmRun]:
    """Train with the plain Trainer and a swarm, and compare the runs."""
    steps = {"max_steps": STEPS, **options}
    swarm_only = {key: steps.pop(key) for key in ("split", "num_stages", "num_servers") if key in steps}
    plain = run_plain(make_module, loader(digits()), **steps)
    swarm = run_swarm(make_module, loader(digits()), **swarm_only, **steps)
    assert_exact(swarm, plain)
    return plain, swarm


# ---------------------------------------------------------------------- several calls


class Twice(Digits):
    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        shifted = self.net(images.roll(1, dims=1))
        return F.cross_entropy(self.net(images), labels) + 0.5 * F.cross_entropy(shifted, labels)


def test_two_calls_in_one_step() -> None:
    _, swarm = run_both(Twice)
    calls = {call for record in swarm.records for _, _, call in swarm.held.counted(record)}
    assert calls == {0, 1}


class Chained(Net):
    """Feeds its output to itself again."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64)))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(self.net(batch[0])), batch[0])


def test_a_call_on_the_output_of_another() -> None:
    run_both(Chained)


class Detached(Digits):
    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        target = self.net(images.flip(1)).detach()
        output = self.net(images)
        return F.cross_entropy(output, labels) + 0.1 * F.mse_loss(output, target)


class UnderNoGrad(Digits):
    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.net(images.flip(1))
        assert not target.requires_grad
        output = self.net(images)
        return F.cross_entropy(output, labels) + 0.1 * F.mse_loss(output, target)


class UnderInferenceMode(Digits):
    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        with torch.inference_mode():
            target = self.net(images.flip(1))
        output = self.net(images)
        return F.cross_entropy(output, labels) + 0.1 * F.mse_loss(output, target.clone())


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("module", [Detached, UnderNoGrad, UnderInferenceMode])
def test_a_call_that_is_not_backpropagated(module: type[Digits]) -> None:
    _, swarm = run_both(module)
    assert all(server.calls.cache.used_bytes == 0 for server in swarm.strategy.servers), "its leavings were kept"


# ---------------------------------------------------------------------- what a pipeline cannot do


class WithCreateGraph(Digits):
    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        images = images.clone().requires_grad_()
        loss = F.cross_entropy(self.net(images), labels)
        (gradient,) = torch.autograd.grad(loss, images, create_graph=True)
        return loss + gradient.square().sum()


class FromAnEarlierBatch(Digits):
    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        output = self.net(images)
        if batch_idx == 0:
            self.earlier = output
        return F.cross_entropy(output + self.earlier.sum(), labels)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize(
    ("module", "message"),
    [
        (WithCreateGraph, r"`create_graph=True` needs .* without the swarm\."),
        (FromAnEarlierBatch, r"Detach outputs that you keep|can be backpropagated once"),
    ],
)
def test_what_cannot_work_is_a_clear_error(module: type[Digits], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(module, loader(digits()), max_steps=STEPS)


# ---------------------------------------------------------------------- modes


SEEN: dict[int, tuple[list[Any], Callable[[Tensor], Any]]] = {}


class Spy(nn.Module):
    """Records the flags under which a stage computes."""

    def __init__(self, seen: list[Any], look: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._key = id(seen)  # an id, so that copies of the block share one record that is no part of the block
        SEEN[self._key] = seen, look

    def forward(self, hidden: Tensor) -> Tensor:
        seen, look = SEEN[self._key]
        seen.append(look(hidden))
        return hidden


@pytest.fixture
def flags() -> Iterator[None]:
    """Restore PyTorch's flags: Lightning leaves the process deterministic."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.parametrize("option", ["deterministic", "detect_anomaly"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_the_trainers_flags_hold_in_the_stages(option: str, flags: None) -> None:
    seen: list[tuple[bool, bool]] = []

    def look(_hidden: Tensor) -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()

    run_both(lambda: Digits(Spy(seen, look)), **{option: True})
    assert set(seen) == {(option == "deterministic", option == "detect_anomaly")}


class Root(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + (hidden * 0.0).sqrt()  # the gradient of sqrt at zero is 0 / 0


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in SqrtBackward0")
def test_an_anomaly_is_found_in_a_stage(flags: None) -> None:
    with pytest.raises(StageError, match=r"SqrtBackward0|MulBackward0"):
        run_swarm(lambda: Digits(Root()), loader(digits()), max_steps=STEPS, detect_anomaly=True)


class UnderAutocast(Digits):
    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.net(images)
        assert output.dtype == torch.bfloat16
        return F.cross_entropy(output.float(), labels)


def test_autocast_inside_training_step() -> None:
    seen: list[torch.dtype] = []

    def make_module() -> Digits:
        return UnderAutocast(Spy(seen, lambda hidden: hidden.dtype), nn.Linear(16, 16), Spy(seen, lambda h: h.dtype))

    plain = run_plain(make_module, loader(digits()), max_steps=STEPS, precision="32-true")
    in_plain = set(seen)
    seen.clear()
    swarm = run_swarm(make_module, loader(digits()), max_steps=STEPS, precision="32-true", num_stages=3)
    assert_same_curve(swarm, plain, loss=1e-2)
    assert set(seen) == in_plain == {torch.bfloat16}


class HalfInEval(nn.Module):
    """Shows whether it is in train or eval mode, without random draws."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden if self.training else 0.5 * hidden


class Validated(Digits):
    def __init__(self, modes: list[tuple[bool, bool]]) -> None:
        super().__init__(
            Spy(modes, lambda _: (torch.is_grad_enabled(), torch.is_inference_mode_enabled())), HalfInEval()
        )
        self.accuracy = MulticlassAccuracy(10)
        self.history: list[dict[str, float]] = []

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        output = self.net(images)
        loss = F.cross_entropy(output, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.accuracy(output, labels), on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        output = self.net(images)
        assert not output.requires_grad
        self.log("val_loss", F.cross_entropy(output, labels))
        self.accuracy(output, labels)
        self.log("val_accuracy", self.accuracy, on_epoch=True)

    @override
    def on_validation_epoch_end(self) -> None:
        self.history.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})


@pytest.mark.thorough
@pytest.mark.parametrize("inference_mode", [True, False])
def test_two_validations_and_what_they_log(inference_mode: bool) -> None:
    modes: list[tuple[bool, bool]] = []
    options: dict[str, Any] = {"max_epochs": 2, "inference_mode": inference_mode, "num_sanity_val_steps": 2}

    def make_module() -> Validated:
        return Validated(modes)

    plain = run_plain(make_module, loader(digits()), loader(digits(), 20), **options)
    in_plain = set(modes)
    modes.clear()
    swarm = run_swarm(make_module, loader(digits()), loader(digits(), 20), **options)
    assert set(modes) == in_plain == {(True, False), (False, False)}
    assert_exact(swarm, plain)
    assert isinstance(plain.module, Validated)
    assert isinstance(swarm.module, Validated)
    assert len(plain.module.history) == 3  # includes the sanity check
    assert len({metrics["val_loss"] for metrics in plain.module.history}) == 3
    for ours, metrics in zip(swarm.module.history, plain.module.history, strict=True):
        assert ours == pytest.approx(metrics, rel=1e-11)
    assert {"loss_epoch", "train_accuracy", "val_loss", "val_accuracy"} <= plain.module.history[-1].keys()
    assert plain.trainer is not None
    assert swarm.trainer is not None
    assert swarm.trainer.callback_metrics.keys() == plain.trainer.callback_metrics.keys()
    for name, theirs in plain.trainer.callback_metrics.items():
        assert float(swarm.trainer.callback_metrics[name]) == pytest.approx(float(theirs), rel=1e-11), name


# ---------------------------------------------------------------------- exceptions


class Own(Exception):
    pass


@pytest.mark.parametrize("after_the_call", [False, True])
def test_the_users_exception_comes_through_unchanged(after_the_call: bool) -> None:
    raised = Own("my own")

    class Raises(Digits):
        @override
        def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
            output = self.net(images) if after_the_call else images
            if batch_idx == 2:
                raise raised
            return F.cross_entropy(output if after_the_call else self.net(images), labels)

    with pytest.raises(Own) as caught:
        run_swarm(Raises, loader(digits()), max_steps=STEPS)
    assert caught.value is raised
    assert caught.value.__cause__ is None


class Boom(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        raise ZeroDivisionError("in my block")


def test_an_exception_in_a_block_brings_its_traceback() -> None:
    with pytest.raises(StageError) as caught:
        run_swarm(lambda: Digits(Boom()), loader(digits()), num_stages=3, num_servers=3, max_steps=STEPS)
    text = str(caught.value)
    assert "ZeroDivisionError: in my block" in text
    assert "stage 1" in text or "stage 2" in text
    assert "Traceback" in text
    assert "test_autograd.py" in text, "the line that raised is not shown"


# ---------------------------------------------------------------------- no loss


class Sometimes(Digits):
    """Returns no loss for some batches."""

    without: tuple[int, ...] = (2, 3)

    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor | None:
        output = self.net(images)
        return None if batch_idx in self.without else F.cross_entropy(output, labels)


class NeverInTheFirstWindow(Sometimes):
    without = (0, 1, 6)


@pytest.mark.first_cells(1)
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2, 3])
@pytest.mark.parametrize("module", [Sometimes, NeverInTheFirstWindow])
def test_none_instead_of_a_loss(module: type[Digits], accumulate_grad_batches: int) -> None:
    plain, _ = run_both(module, accumulate_grad_batches=accumulate_grad_batches, max_steps=7)
    assert 0.0 in plain.losses


# ---------------------------------------------------------------------- gradients of inputs, frozen parameters


class WithInputGradient(Digits):
    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        self.images = images.clone().requires_grad_()
        return F.cross_entropy(self.net(self.images), labels)

    @override
    def on_after_backward(self) -> None:
        assert self.images.grad is not None
        self.gradients.append(self.images.grad)


def test_an_input_gets_its_gradient() -> None:
    plain, swarm = run_both(WithInputGradient)
    assert isinstance(plain.module, WithInputGradient)
    assert isinstance(swarm.module, WithInputGradient)
    for ours, theirs in zip(swarm.module.gradients, plain.module.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        assert float(theirs.abs().max()) > 0


class SameDraw(Digits):
    """Takes each gradient of a call with dropout twice, from the kept graph and from a recomputed one."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.5))

    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        self.images = images.clone().requires_grad_()
        loss = F.cross_entropy(self.net(self.images), labels)
        self.found = [torch.autograd.grad(loss, self.images, retain_graph=True)[0] for _ in range(2)]
        return loss

    @override
    def on_after_backward(self) -> None:
        assert all(torch.equal(gradient, self.images.grad) for gradient in self.found)
        assert not torch.equal(torch.autograd.grad(self.net(self.images).sum(), self.images)[0], self.images.grad)


@pytest.mark.thorough
def test_all_backwards_of_a_call_see_the_same_draw() -> None:
    run_swarm(SameDraw, loader(digits()), max_steps=STEPS, num_stages=3, num_servers=4, split=["0", "2", "4"])


class LayersAround(Net):
    """Takes gradients through layers that the trainer computes."""

    def __init__(self, adversarial: Callable[[LayersAround, Tensor, Tensor], Tensor]) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
        self.embed, self.head = nn.Linear(64, 16), nn.Linear(16, 10)
        self.adversarial = adversarial

    def cost(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.net(self.embed(images))), labels)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        gradient = self.adversarial(self, batch[0].clone().requires_grad_(), batch[1])
        return self.cost(batch[0] + 0.1 * gradient.sign(), batch[1])


def by_grad(self: LayersAround, images: Tensor, labels: Tensor) -> Tensor:
    loss = self.cost(images, labels)
    norm = torch.autograd.grad(loss, self.embed.weight, retain_graph=True)[0].norm()
    return norm * torch.autograd.grad(loss, images)[0]


def by_backward(self: LayersAround, images: Tensor, labels: Tensor) -> Tensor:
    self.cost(images, labels).backward()
    assert images.grad is not None
    return images.grad


def around_alone(self: LayersAround, images: Tensor, labels: Tensor) -> Tensor:
    self.embed(images).square().sum().backward()
    assert images.grad is not None
    return images.grad


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("adversarial", [by_grad, by_backward, around_alone])
def test_gradients_through_layers_around_the_pipeline(adversarial: Any) -> None:
    plain = run_plain(lambda: LayersAround(adversarial), loader(digits()), max_steps=STEPS)
    swarm = run_swarm(lambda: LayersAround(adversarial), loader(digits()), max_steps=STEPS, pipeline="net")
    assert_exact(swarm, plain)


def test_gradients_around_the_pipeline_alone_are_refused_where_they_would_count() -> None:
    options: dict[str, Any] = {"max_steps": STEPS, "accumulate_grad_batches": 2, "pipeline": "net"}
    with pytest.raises(ConfigError, match=r"left gradients at \['embed"):
        run_swarm(lambda: LayersAround(around_alone), loader(digits()), **options)


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.SiLU(inplace=True), nn.Linear(16, 10)
            )
        )

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_a_stage_may_begin_in_place() -> None:
    run_both(InPlace, split=["0", "1", "3"], num_stages=3, num_servers=4)


def test_cached_parametrizations_in_microbatches() -> None:
    class Orthogonal(InPlace):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.orthogonal(self.net[2])

        @override
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            with nn.utils.parametrize.cached():
                return super().training_step(batch, batch_idx)

    run_both(Orthogonal)


@pytest.mark.first_cells(2)
@pytest.mark.parametrize("frozen", [(0,), (0, 2), (2,), (4,)])
def test_frozen_parameters_stay(frozen: tuple[int, ...]) -> None:
    def make_module() -> Digits:
        module = Digits()
        for index in frozen:
            module.net[index].requires_grad_(requires_grad=False)
        return module

    plain, _ = run_both(make_module, split=["0", "2", "4"], num_stages=3, num_servers=3)
    torch.manual_seed(0)
    for name, tensor in make_module().double().state_dict().items():
        assert torch.equal(tensor, plain.weights[name]) == (int(name.split(".")[1]) in frozen)


class Branch(nn.Module):
    """Has two layers, of which an argument of the call selects one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, hidden: Tensor, *, left: bool) -> Tensor:
        chosen: Tensor = self.left(hidden) if left else self.right(hidden)
        return chosen


class Branching(Digits):
    left_in: tuple[int, ...] = (1, 4, 5)

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(Branch(), recipe=recipe)

    @override
    def loss(self, images: Tensor, labels: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(images, left=batch_idx in self.left_in), labels)


@pytest.mark.first_cells(1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_parameters_without_a_gradient_are_passed_over(optimizer: Any, accumulate_grad_batches: int) -> None:
    # Neither weight decay nor momentum may change unused weights.
    recipe = Recipe(optimizer=optimizer, learning_rate=1e-2)
    run_both(lambda: Branching(recipe), accumulate_grad_batches=accumulate_grad_batches, num_servers=4)


# ---------------------------------------------------------------------- structures


class Nest(nn.Module):
    def forward(self, hidden: Tensor) -> tuple[tuple[Tensor, tuple[Tensor, ...]], list[Tensor]]:
        return (hidden, (hidden * 2, hidden.argmax(1))), [hidden.detach()]


class Unnest(nn.Module):
    def forward(self, tree: tuple[tuple[Tensor, tuple[Tensor, ...]], list[Tensor]]) -> Tensor:
        (hidden, (double, best)), (still,) = tree
        return hidden + 0.5 * double - 0.1 * still * best.unsqueeze(1)


class Nested(Net):
    def __init__(self) -> None:
        blocks = [nn.Linear(64, 16), Nest(), Unnest(), nn.Linear(16, 10), Nest()]
        super().__init__(nn.Sequential(*blocks))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (logits, (double, best)), (still,) = self.net(batch[0])
        assert torch.equal(best, logits.argmax(1))
        assert not still.requires_grad
        return F.cross_entropy(logits + 0.1 * double, batch[1])


def test_nested_tuples_between_stages_and_at_the_end() -> None:
    run_both(Nested, split=["0", "2", "3"], num_stages=3, num_servers=4)


def test_the_module_is_itself_again_after_fit() -> None:
    _, swarm = run_both(DigitsMLP)
    assert "forward" not in vars(swarm.module.net)
    images, _ = digits().tensors
    net = swarm.module.net
    assert isinstance(net, nn.Module)
    net(images.double()).sum().backward()
    assert all(parameter.grad is not None for parameter in swarm.module.parameters())


def test_callbacks_see_batches_in_order() -> None:
    seen: list[tuple[str, int]] = []

    class Order(L.Callback):
        @override
        def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(("zero_grad", trainer.global_step))

        @override
        def on_before_backward(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(("backward", trainer.global_step))

        @override
        def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(("after", trainer.global_step))

        @override
        def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
            seen.append(("step", trainer.global_step))

    run_plain(Digits, loader(digits()), max_steps=5, accumulate_grad_batches=2, callbacks=[Order()])
    in_plain = seen.copy()
    seen.clear()
    run_swarm(Digits, loader(digits()), max_steps=5, accumulate_grad_batches=2, callbacks=[Order()])
    assert seen == in_plain
