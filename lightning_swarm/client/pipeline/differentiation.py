"""Determines the purpose of a backward through the pipelined module, and refuses unsupported uses of autograd."""

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
        """Return a scalar that depends on the weights as far as autograd can see."""
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[None, ...]:
        """Return no gradients, because the servers sum them."""
        return (None,) * len(ctx.needs_input_grad)


def trained(weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the weights that currently require a gradient."""
    with unwatched():  # checking watched weights costs more
        return [weight for weight in weights if weight.requires_grad]


def weights_node(wanted: Sequence[nn.Parameter]) -> Tensor:
    """Connect a call with the weights that train; refuse hooks on their gradients, which stay on the servers."""
    with unwatched():
        hooked = any(weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in wanted)
    if hooked:
        raise ConfigError(
            "hooks on the gradients of the pipeline's weights find none, for the servers sum them: got a weight with "
            "`register_hook` or `register_post_accumulate_grad_hook`. Remove the hook. To keep some weights as they "
            "are, freeze them; `configure_stages` may leave a block with hooks out."
        )
    with unwatched():
        node: Tensor = Weights.apply(*wanted)  # type: ignore[no-untyped-call]
    return node


def adds_nothing(wanted: Sequence[nn.Parameter], at_begin: Sequence[nn.Parameter] | None) -> bool:
    """Return whether all weights are frozen for this call alone, as for an attack; refuse if only some are."""
    # `at_begin` holds the weights that trained when the batch began; None: the call belongs to no batch.
    if at_begin is None or not wanted:
        return not wanted and at_begin != []  # `[]`: all weights are frozen in any case, not for this call alone
    if len(wanted) != len(at_begin) or any(one is not other for one, other in zip(wanted, at_begin, strict=True)):
        raise ConfigError(
            "which of the pipeline's weights train is settled when a batch begins; a call may freeze all of them for "
            f"itself, but not some: got a call with {len(wanted)} weights that require a gradient, where "
            f"{len(at_begin)} did before `training_step`. Set `requires_grad` in `on_train_batch_start`."
        )
    return False


def reaches_weights(ctx: Any, gradients: Sequence[Tensor | None]) -> bool:
    """Return True in a ``.backward()``, False if only the input's gradient is requested; refuse other requests."""
    # `ctx` belongs to a function whose first two inputs are a leaf that only it knows, and the node of the weights.
    if torch.is_grad_enabled():  # set by create_graph
        raise ConfigError(
            "`create_graph=True` needs the graph of the gradient, and the swarm's stages keep theirs to "
            "themselves. Compute gradient penalties outside the pipelined module, or without the swarm."
        )
    if any(gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient) for gradient in gradients):
        refuse_transform("`is_grads_batched=True` (`vectorize=True`)")
    (leaf, _), (weights, _) = ctx.next_functions[:2]
    if torch._C._will_engine_execute_node(leaf):
        return True
    if weights is not None and torch._C._will_engine_execute_node(weights):
        raise ConfigError(
            "gradients by the pipeline's weights are summed on the servers and never get here, got `autograd.grad` or "
            "`.backward(inputs=...)` by some of them. Ask for gradients by the pipeline's input or output, or keep the "
            "layer out of the pipeline by `configure_stages`."
        )
    return False


def check_transforms(tensors: Iterable[Tensor], own: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> None:
    """Refuse calls in a transform that must see into the stages, and calls whose `found` weights are not `own`."""
    if len(own) != len(found) or any(weight is not other for weight, other in zip(own, found, strict=True)):
        raise ConfigError(
            "the pipelined module computes with the weights that the run trains, got a call with other ones, as "
            "`torch.func.functional_call` has it, or a parameter that was replaced. Change weights in place, or do "
            "without the swarm."
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        refuse_transform("`torch.func`")
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        refuse_transform("forward-mode AD")


def refuse_transform(name: str) -> NoReturn:
    """Refuse a transform by its name."""
    raise ConfigError(
        "the pipelined module computes on servers, which know plain calls and backwards only: it was used within "
        f"{name}. Use `torch.autograd.grad`, one gradient at a time, or do without the swarm."
    )


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Disable `parametrize.cached()` inside, because a graph that microbatches share has only one backward."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


_OF_MODULE: Final = frozenset(
    {
        *(Tensor.__deepcopy__, Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half),
        *(Tensor.bfloat16, Tensor.requires_grad_, Tensor.requires_grad.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
    }
)
"""Operations that a module applies to its weights' gradients when it is copied or converted."""


class GradientElsewhere(Tensor):
    """Stands for the gradient of a pipeline's weight, which exists on the servers only."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Collection[type], args: Any = (), kwargs: Any = None) -> Any:
        if func in PROPERTY_FUNCTIONS:
            with unwatched():
                return func(*args, **(kwargs or {}))
        if func in _OF_MODULE:
            return args[0]
        raise ConfigError(
            "gradients of the pipeline's weights are summed on servers, and those of other layers are from the end of "
            "their batch on: got a use of `.grad`, in a hook or after a `.backward()` of one's own. Clip by "
            "`gradient_clip_val`, change gradients in a `register_step_pre_hook` of the optimizer, or use those of "
            "layers outside of the pipeline in `on_after_backward`."
        )


class GradientMarks:
    """Marks on the pipeline's weights, where plain Lightning leaves gradients. Using one raises an error."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._marks: dict[int, Tensor] = {}  # index of the weight -> mark
        self._of_window: list[nn.Parameter] = []  # weights whose mark must stay until Lightning clears gradients
        # Lightning will clear gradients before its next backward, so a user's own `.backward()` adds to no step.
        self.clears_gradients = True

    def set(self) -> None:
        """Mark the weights that train."""
        with unwatched():
            for index, weight in enumerate(self._weights):
                if weight.requires_grad and weight.grad is None:
                    mark = self._marks.get(index)
                    if mark is None or (mark.dtype, mark.device) != (weight.dtype, weight.device):
                        nothing = torch.zeros((), dtype=weight.dtype, device=weight.device).expand_as(weight)
                        self._marks[index] = nothing.as_subclass(GradientElsewhere)
                    weight.grad = self._marks[index]

    def refuse_or_set(self) -> None:
        """Allow a user's own backward only if Lightning will clear the gradients that it leaves at the weights."""
        if not self.clears_gradients:
            raise ConfigError(
                "only the backward that Lightning runs adds to a step. Got a `.backward()` of your own after it, or "
                "within an accumulation window; plain Lightning would add its gradients to the step's. Return the sum "
                "of all losses from `training_step`; for the input's gradient use `torch.autograd.grad`."
            )
        self.set()

    def set_for_step(self) -> None:
        """Mark the weights whose gradients are in the step's sum."""
        self.set()
        with unwatched():
            self._of_window = [weight for weight in self._weights if type(weight.grad) is GradientElsewhere]

    def expect_backward(self, *, clears_gradients: bool) -> None:
        """Prepare for a batch's backward, before which Lightning clears gradients or keeps them."""
        self.clears_gradients = clears_gradients
        if clears_gradients:
            self.begin_window()

    def begin_window(self) -> None:
        """Forget the gradients of earlier steps, because Lightning clears gradients."""
        self._of_window = []

    def check(self) -> None:
        """Raise if user code cleared or replaced a gradient that the servers have summed."""
        with unwatched():
            is_kept = all(type(weight.grad) is GradientElsewhere for weight in self._of_window)
        if not is_kept:
            raise ConfigError(
                "gradients of the pipeline's weights are summed on servers, and cannot be cleared or replaced here: "
                "got a `zero_grad`, or a new `.grad`, between a backward and its step. Return None from "
                "`training_step` to leave a batch out, or freeze the weights that are to stay."
            )

    def clear(self) -> None:
        """Remove all marks."""
        self.begin_window()
        with unwatched():
            for weight in self._weights:
                if type(weight.grad) is GradientElsewhere:
                    weight.grad = None
