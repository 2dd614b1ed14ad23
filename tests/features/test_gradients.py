"""Gradients that users take themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.autograd import forward_ad
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from tests.features.both import STEPS, fit_both
from tests.features.mark import PARTLY, REFUSED, WORKS, feature
from tests.parity.harness import run_plain, run_swarm
from tests.parity.models import Net, digits, loader

Loss = Callable[["Free", Tensor, Tensor], Tensor]


class Free(Net):
    """A classifier whose loss and hooks the test provides."""

    def __init__(self, compute: Loss, **hooks: Callable[..., Any]) -> None:
        super().__init__(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10)))
        self.compute = compute
        for name, hook in hooks.items():
            setattr(self, name, hook.__get__(self))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self.images, self.labels = images.clone().requires_grad_(), labels
        return self.compute(self, self.images, labels)

    def cost(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)

    def more(self) -> None:
        """Backpropagate another loss."""
        (0.5 * self.cost(self.images.detach().flip(1), self.labels)).backward()  # type: ignore[no-untyped-call]


def adversarial(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    for _ in range(2):
        (gradient,) = torch.autograd.grad(self.cost(images, labels), images)
        images = (images + 0.1 * gradient.sign()).detach().requires_grad_()
    return self.cost(images.detach(), labels)


def virtual_adversarial(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        target = F.softmax(self.net(images), 1)
    away = (1e-2 * F.normalize(images.detach())).requires_grad_()
    distance = F.kl_div(F.log_softmax(self.net(images + away), 1), target, reduction="batchmean")
    (away,) = torch.autograd.grad(distance, away)
    moved = self.net(images.detach() + F.normalize(away))
    return self.cost(images, labels) + F.kl_div(F.log_softmax(moved, 1), target, reduction="batchmean")


def several_of_one_call(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    output = self.net(images)
    loss = F.cross_entropy(output, labels)
    (one,) = torch.autograd.grad(loss, images, retain_graph=True)
    (other,) = torch.autograd.grad(output.square().mean(), images, retain_graph=True)
    return loss * (1.0 + (one * other).abs().sum().detach())


def jacobian(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    rows = torch.autograd.functional.jacobian(lambda x: self.net(x).sum(0), images[:2])
    return self.cost(images, labels) * (1.0 + rows.square().mean())


def usual(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    return self.cost(images, labels)


def frozen_attack(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    self.requires_grad_(False)
    (gradient,) = torch.autograd.grad(self.cost(images, labels), images)
    images = images.detach() + 0.1 * gradient.sign()
    regularizer = self.net(images).square().mean()
    self.requires_grad_(True)
    return self.cost(images, labels) + regularizer  # the regularizer adds no gradient


@pytest.mark.first_cells(1)
@feature(
    "`torch.autograd.grad` with respect to the pipeline's input: adversarial training, saliency, a Jacobian", WORKS
)
@pytest.mark.parametrize("loss", [adversarial, virtual_adversarial, several_of_one_call, jacobian])
def test_gradients_by_the_input(loss: Loss) -> None:
    both = fit_both(lambda: Free(loss), max_steps=STEPS, swarm={"num_servers": 4})
    assert both.swarm.rerouted.keys() <= {"busy"}, "a backward without what it needs was taken for a fault"


@feature(
    "`requires_grad_(False)` for all weights during a call in `training_step`, as for an adversarial attack",
    WORKS,
    "the call adds no gradient; freezing only some of the weights is refused",
)
def test_weights_are_frozen_for_a_call() -> None:
    fit_both(lambda: Free(frozen_attack), max_steps=STEPS)

    def partly(self: Free, images: Tensor, labels: Tensor) -> Tensor:
        self.net[0].requires_grad_(False)
        return self.cost(images, labels)

    with pytest.raises(ConfigError, match=r"a call with 4 weights .* where 6 did before `training_step`"):
        run_swarm(lambda: Free(partly), loader(digits()), max_steps=STEPS)


def backward_before(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    loss = self.cost(images, labels)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    assert images.grad is not None
    return loss + self.cost(images.detach() + 0.1 * images.grad.sign(), labels)


@feature(
    "your own `.backward()` in `training_step`",
    PARTLY,
    "its gradient does not count, as plain Lightning clears it; refused where plain Lightning adds it: after the first "
    "batch of an accumulation window, and between Lightning's backward and the step",
)
def test_a_backward_of_ones_own() -> None:
    fit_both(lambda: Free(backward_before), max_steps=STEPS)


@pytest.mark.each_value
@feature(
    "`.backward()` of another loss in `on_before_backward`, `on_after_backward`, or an overridden `backward`", WORKS
)
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward", "backward"])
def test_another_loss_within_lightnings_backward(hook: str, accumulate_grad_batches: int) -> None:
    def run(self: Free, *loss: Tensor) -> None:
        self.more()
        if hook == "backward":
            (gradient,) = torch.autograd.grad(loss[0], self.images, retain_graph=True)
            (loss[0] * (1.0 + gradient.norm())).backward()  # type: ignore[no-untyped-call]

    fit_both(lambda: Free(usual, **{hook: run}), max_steps=4, accumulate_grad_batches=accumulate_grad_batches)


class Forces(Free):
    """Checks gradients between batches."""

    def __init__(self) -> None:
        super().__init__(usual)
        self.seen: list[float] = []

    def look(self, images: Tensor, *, by_hand: bool) -> None:
        with torch.enable_grad():
            images = images.clone().requires_grad_()
            energy = self.net(images).logsumexp(1).sum()
            if by_hand:
                energy.backward()
            else:
                (images.grad,) = torch.autograd.grad(energy, images)
        assert images.grad is not None
        self.seen.append(float(images.grad.norm()))

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.look(batch[0], by_hand=batch_idx == 0)

    @override
    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self.look(batch[0], by_hand=True)


@feature(
    "gradients with respect to the input in validation, test and predict, and in hooks",
    WORKS,
    "within `torch.enable_grad()`",
)
def test_gradients_in_validation() -> None:
    both = fit_both(Forces, loader(digits(), 20), max_epochs=2, inference_mode=False)
    plain, swarm = both.plain.module, both.swarm.module
    assert isinstance(plain, Forces)
    assert isinstance(swarm, Forces)
    assert swarm.seen == pytest.approx(plain.seen, rel=1e-10)
    assert len(plain.seen) > 2 * both.plain.trainer.num_training_batches  # type: ignore[union-attr]


def by_weights(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    loss = self.cost(images, labels)
    (gradient,) = torch.autograd.grad(loss, self.net[2].weight, retain_graph=True)
    return loss / gradient.norm()


def sharpness_aware(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    self.cost(images, labels).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for weight in self.net.parameters():
            weight.add_(0.05 * weight.grad)
    return self.cost(images, labels)


def hooked(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    self.net[0].weight.register_hook(lambda gradient: 0.5 * gradient)
    return self.cost(images, labels)


def penalised(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    loss = self.cost(images, labels)
    (gradient,) = torch.autograd.grad(loss, images, create_graph=True)
    return loss + gradient.square().sum()


def transformed(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    gradient = torch.func.grad(lambda x: self.cost(x, labels))(images.detach())
    return self.cost(images + gradient, labels)


def forward_mode(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        dual = self.net(forward_ad.make_dual(images.detach(), torch.ones_like(images)))
        tangent = forward_ad.unpack_dual(dual).tangent
    return self.cost(images, labels) * tangent.norm()


def batched(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    rows = torch.autograd.functional.jacobian(lambda x: self.net(x).sum(0), images[:2], vectorize=True)
    return self.cost(images, labels) * rows.norm()


def with_other_weights(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    doubled = {name: 2.0 * weight for name, weight in self.net.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(self.net, doubled, images), labels)


def backward_of_weights(self: Free, loss: Tensor) -> None:
    loss.backward(inputs=list(self.net.parameters()))  # type: ignore[no-untyped-call]


def backward_twice(self: Free, loss: Tensor) -> None:
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]


def before_the_step(self: Free, optimizer: object) -> None:
    self.more()


def early_call(self: Free, batch: list[Tensor], batch_idx: int) -> None:
    self.early = self.net(batch[0])


def use_early_call(self: Free, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(self.early, labels)


def assert_refused_at_once(message: str, make: Callable[[], L.LightningModule], **options: Any) -> None:
    """Check that the plain Trainer runs it, and a swarm refuses it in the first step or two."""
    run_plain(make, loader(digits()), max_steps=2, **options)
    with pytest.raises(ConfigError, match=message):
        run_swarm(make, loader(digits()), max_steps=2, **options)


@feature(
    "gradients with respect to the pipeline's weights, reading their `.grad`, hooks on the weights",
    REFUSED,
    "these gradients are on the servers",
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Free(by_weights), r"with respect to the pipeline's weights .* `configure_stages`"),
        (
            lambda: Free(usual, backward=backward_of_weights),
            r"with respect to the pipeline's weights .* `configure_stages`",
        ),
        (lambda: Free(sharpness_aware), r"use of `\.grad`"),
        (lambda: Free(hooked), r"`register_hook`.* Remove the hook"),
        (lambda: Free(with_other_weights), r"functional_call"),
    ],
)
def test_gradients_by_weights(make: Callable[[], Free], message: str) -> None:
    assert_refused_at_once(message, make)


def norms(self: Free, *_: Any) -> None:
    self.log_dict(grad_norm(self, 2))


def noise(self: Free, *_: Any) -> None:
    for parameter in self.net[2].parameters():
        if parameter.grad is not None:
            parameter.grad.add_(0.1)


def clip(self: Free, *_: Any) -> None:
    nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def zero(self: Free, *_: Any) -> None:
    self.zero_grad()


def replaced(self: Free, *_: Any) -> None:
    self.net[0].bias.grad = torch.ones_like(self.net[0].bias)


@feature(
    "gradients read, changed or cleared in hooks: `grad_norm`, `clip_grad_norm_`, noise, `zero_grad` before the step",
    REFUSED,
    "they are on the servers, which clip by `gradient_clip_val` and call the optimizer's "
    "`register_step_pre_hook`; gradients of layers around the pipeline are on the trainer",
)
@pytest.mark.parametrize(
    ("do", "at", "message", "accumulate_grad_batches"),
    [
        (norms, "on_before_optimizer_step", r"use of `\.grad`.* `gradient_clip_val`", 1),
        (norms, "on_train_batch_end", r"use of `\.grad`", 1),
        (noise, "on_after_backward", r"use of `\.grad`", 1),
        (clip, "on_before_optimizer_step", r"use of `\.grad`", 2),
        (zero, "on_after_backward", r"`zero_grad`.* Return None", 1),
        (zero, "on_before_optimizer_step", r"`zero_grad`", 2),
        (zero, "on_train_batch_end", r"`zero_grad`", 2),
        (replaced, "on_after_backward", r"new `\.grad`", 1),
    ],
)
def test_gradients_in_hooks(do: Callable[..., None], at: str, message: str, accumulate_grad_batches: int) -> None:
    with pytest.raises(ConfigError, match=message):
        run_swarm(
            lambda: Free(usual, **{at: do}),
            loader(digits()),
            max_steps=2,
            accumulate_grad_batches=accumulate_grad_batches,
        )


@feature("`zero_grad` after the step, and checking whether a weight has a gradient", WORKS)
def test_gradients_that_count_nowhere_may_be_cleared() -> None:
    found: list[int] = []

    def count_missing(self: Free) -> None:
        found.append(sum(parameter.grad is None for parameter in self.parameters()))

    fit_both(lambda: Free(usual, on_after_backward=count_missing, on_train_batch_end=zero), max_steps=STEPS)
    assert set(found) == {0}


@feature(
    "`create_graph=True`, `torch.func`, forward-mode AD, `vectorize=True`", REFUSED, "compute one gradient at a time"
)
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (penalised, r"`create_graph=True`"),
        (transformed, r"within `torch\.func`"),
        (forward_mode, r"within forward-mode AD"),
        (batched, r"`vectorize=True`"),
    ],
)
def test_transforms(loss: Loss, message: str) -> None:
    assert_refused_at_once(message, lambda: Free(loss))


@feature(
    "several backwards of one call within Lightning's backward, or a backward outside of it that plain Lightning adds",
    REFUSED,
    "return the sum of all losses",
)
@pytest.mark.parametrize(
    ("make", "message", "accumulate_grad_batches"),
    [
        (lambda: Free(usual, backward=backward_twice), r"call backward once", 1),
        (lambda: Free(backward_before), r"your own `\.backward\(\)`", 2),
        (lambda: Free(usual, on_before_optimizer_step=before_the_step), r"your own `\.backward\(\)`", 1),
        (lambda: Free(use_early_call, on_train_batch_start=early_call), r"in the same `training_step`", 1),
    ],
)
def test_backwards_that_plain_lightning_adds(
    make: Callable[[], Free], message: str, accumulate_grad_batches: int
) -> None:
    assert_refused_at_once(message, make, accumulate_grad_batches=accumulate_grad_batches)
