"""Determines whether a backward through the pipelined module trains it; refuses unsupported uses of autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from typing_extensions import override

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.fidelity.watched import PROPERTY_FUNCTIONS, unwatched


class Weights(torch.autograd.Function):
    """A node of autograd's graph that stands for the pipeline's weights, which live on the servers."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        """Return a scalar that depends on the weights in autograd's graph."""
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        """Return no gradients, because the servers sum them."""
        return (None,) * len(ctx.needs_input_grad)


def trained_weights(weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the weights that currently require a gradient."""
    with unwatched():  # reading watched weights is slower
        return [weight for weight in weights if weight.requires_grad]


def weights_node(weights: Sequence[nn.Parameter]) -> Tensor:
    """Return a tensor that connects a call with the weights that train; refuse weights with hooks on gradients."""
    with unwatched():
        hooked = any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights)
    if hooked:
        raise ConfigError(
            "hooks on the gradients of the pipeline's weights never run, because servers sum these gradients: got a "
            "weight with `register_hook` or `register_post_accumulate_grad_hook`. Remove the hook. To keep weights "
            "unchanged, freeze them; `configure_stages` may exclude a block with hooks."
        )
    with unwatched():
        node: Tensor = Weights.apply(*weights)  # type: ignore[no-untyped-call]
    return node


def is_frozen_call(trained_now: Sequence[nn.Parameter], trained_at_begin: Sequence[nn.Parameter] | None) -> bool:
    """Return whether this call alone freezes all weights, as an attack on inputs does; refuse to freeze only some."""
    # `trained_at_begin` holds the weights that trained when the batch began; None: the call belongs to no batch.
    if trained_at_begin is None or not trained_now:
        return not trained_now and trained_at_begin != []  # `[]`: all weights are frozen, not for this call alone
    if list(map(id, trained_now)) != list(map(id, trained_at_begin)):
        raise ConfigError(
            "the set of trained weights in the pipeline is fixed when a batch begins; a call may freeze all of them "
            f"for itself, but not some: got a call with {len(trained_now)} weights that require a gradient, where "
            f"{len(trained_at_begin)} did before `training_step`. Set `requires_grad` in `on_train_batch_start`."
        )
    return False


def reaches_weights(ctx: Any, gradients: Sequence[Tensor | None]) -> bool:
    """Return True in a ``.backward()``, False if only the input's gradient is requested; refuse other requests."""
    # `ctx` belongs to `PipelineFunction`. Its first two inputs are a private leaf, which only a `.backward()` reaches,
    # and the tensor of `weights_node`.
    if torch.is_grad_enabled():  # `create_graph` enables it
        raise ConfigError(
            "`create_graph=True` needs the graph of the gradient, which stays on the servers. Compute gradient "
            "penalties outside the pipelined module, or without the swarm."
        )
    if any(gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient) for gradient in gradients):
        refuse_transform("`is_grads_batched=True` (`vectorize=True`)")
    (leaf, _), (weights, _) = ctx.next_functions[:2]
    if torch._C._will_engine_execute_node(leaf):
        return True
    if weights is not None and torch._C._will_engine_execute_node(weights):
        raise ConfigError(
            "gradients with respect to the pipeline's weights stay on the servers, got `autograd.grad` or "
            "`.backward(inputs=...)` with respect to some of them. Ask for gradients with respect to the pipeline's "
            "input or output, or exclude the layer from the pipeline by `configure_stages`."
        )
    return False


def check_transforms(
    tensors: Iterable[Tensor], trained: Sequence[Tensor | None], current: Sequence[Tensor | None]
) -> None:
    """Refuse a call in a transform that needs the stages' graphs, or whose `current` weights are not the `trained`."""
    if list(map(id, trained)) != list(map(id, current)):
        raise ConfigError(
            "the pipelined module must be called with the weights that the run trains, got other weights, as from "
            "`torch.func.functional_call`, or a replaced parameter. Change weights in place, or train without the "
            "swarm."
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        refuse_transform("`torch.func`")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        refuse_transform("forward-mode AD")


def refuse_transform(name: str) -> NoReturn:
    """Raise the error for an unsupported transform with this name."""
    raise ConfigError(
        "the pipelined module computes on servers, which support only plain calls and backwards: it was used within "
        f"{name}. Use `torch.autograd.grad`, one gradient at a time, or train without the swarm."
    )


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Within this context, disable `parametrize.cached()`: microbatches would share a graph that has one backward."""
    former, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = former


_MODULE_OPERATIONS: Final = frozenset(
    {
        *(Tensor.__deepcopy__, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half),
        *(Tensor.bfloat16, Tensor.requires_grad_, Tensor.requires_grad.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
    }
)
"""Operations on gradients that occur when a module is copied or converted."""


class GradientElsewhere(Tensor):
    """A placeholder at `grad` of a pipeline's weight, whose gradient exists on the servers only."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if func in PROPERTY_FUNCTIONS:
            with unwatched():
                return func(*args, **(kwargs or {}))
        if func in _MODULE_OPERATIONS:
            return args[0]
        raise ConfigError(
            "gradients of the pipeline's weights are summed on servers, as are those of other layers once their batch "
            "ends: got a use of `.grad`, in a hook or after your own `.backward()`. Clip by `gradient_clip_val`, "
            "change gradients in a `register_step_pre_hook` of the optimizer, or use gradients of layers outside of "
            "the pipeline in `on_after_backward`."
        )


class GradientMarks:
    """Puts marks at `grad` of weights, where plain Lightning leaves gradients. Using a mark raises an error."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._marks: dict[int, Tensor] = {}  # index of the weight -> mark
        self._marked_in_window: list[nn.Parameter] = []  # their marks must stay until Lightning clears gradients
        # Whether Lightning clears gradients before its next backward, so a user's own `.backward()` adds to no step.
        self.clears_gradients = True

    def set(self) -> None:
        """Mark the weights that train."""
        with unwatched():
            for index, weight in enumerate(self._weights):
                if weight.requires_grad and weight.grad is None:
                    mark = self._marks.get(index)
                    if mark is None or (mark.dtype, mark.device) != (weight.dtype, weight.device):
                        zeros = torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight)
                        self._marks[index] = zeros.as_subclass(GradientElsewhere)
                    weight.grad = self._marks[index]

    def refuse_or_set(self) -> None:
        """Set marks after a user's own backward; refuse it if Lightning would not clear its gradients."""
        if not self.clears_gradients:
            raise ConfigError(
                "only the backward that Lightning runs adds to a step, got your own `.backward()` after it, or within "
                "an accumulation window, where plain Lightning would add its gradients to the step. Return the sum "
                "of all losses from `training_step`; for the input's gradient use `torch.autograd.grad`."
            )
        self.set()

    def set_for_step(self) -> None:
        """Mark the weights whose gradients are in the step's sum."""
        self.set()
        with unwatched():
            self._marked_in_window = [weight for weight in self._weights if type(weight.grad) is GradientElsewhere]

    def expect_backward(self, *, clears_gradients: bool) -> None:
        """Prepare for a batch's backward. `clears_gradients`: Lightning clears gradients before it."""
        self.clears_gradients = clears_gradients
        if clears_gradients:
            self.begin_window()

    def begin_window(self) -> None:
        """Begin an accumulation window: Lightning clears gradients, so earlier marks may disappear."""
        self._marked_in_window = []

    def check(self) -> None:
        """Raise if user code cleared or replaced a gradient that the servers have summed."""
        with unwatched():
            is_kept = all(type(weight.grad) is GradientElsewhere for weight in self._marked_in_window)
        if not is_kept:
            raise ConfigError(
                "gradients of the pipeline's weights are summed on servers, and cannot be cleared or replaced here: "
                "got a `zero_grad`, or a new `.grad`, between a backward and its step. Return None from "
                "`training_step` to skip a batch, or freeze the weights that must not change."
            )

    def clear(self) -> None:
        """Remove all marks."""
        self.begin_window()
        with unwatched():
            for weight in self._weights:
                if type(weight.grad) is GradientElsewhere:
                    weight.grad = None
