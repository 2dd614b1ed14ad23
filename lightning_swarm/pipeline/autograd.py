"""The pipeline as one autograd function, with many microbatches inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_swarm.errors import ConfigError


class Call(Protocol):
    """One call of the pipelined module, as autograd sees it."""

    def forward(self) -> tuple[list[Tensor], list[bool]]:
        """The output's tensors for the whole batch, and which of them have a gradient."""

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Gradients of the input's tensors."""


def apply(call: Call, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run `call`, so that autograd comes back to it.

    Args:
        call: The call.
        inputs: The tensors of its positional arguments, which `call.backward` gives the gradients of.
    """
    # Without an input that wants a gradient autograd would leave the function out.
    anchor = torch.zeros((), requires_grad=True)
    return list(_Pipeline.apply(call, anchor, *inputs))  # type: ignore[no-untyped-call]  # torch has no types here


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.used = False
        ctx.set_materialize_grads(False)
        outputs, have_gradient = call.forward()
        ctx.mark_non_differentiable(*(o for o, has in zip(outputs, have_gradient, strict=True) if not has))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # set by create_graph
            raise ConfigError(
                "`create_graph=True` needs the graph of the gradient, and the swarm's stages keep theirs to "
                "themselves. Compute gradient penalties outside the pipelined module, or without the swarm."
            )
        if ctx.used:
            raise ConfigError(
                "one call of the pipelined module can be backpropagated once: its gradients are in the step's sum "
                "already. Add the losses up and call backward once."
            )
        ctx.used = True
        if all(gradient is None for gradient in gradients):
            return (None, None, *(None for _ in ctx.needs_input_grad[2:]))
        return (None, None, *ctx.call.backward(gradients))
