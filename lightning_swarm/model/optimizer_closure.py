"""The closure passed to an optimizer's `step`. Unlike Lightning's, it sets gradients that were computed before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_swarm.core.errors import ConfigError

_SAMPLE: Final = 256  # compared values of a parameter


class GradientClosure:
    """Sets the parameters' gradients when `step` calls it, and requires unchanged weights."""

    def __init__(self, parameters: Sequence[nn.Parameter], kind: str) -> None:
        """Remove the gradients of `parameters` until the closure is called; `kind` is the optimizer's class name."""
        self._parameters = parameters
        self._kind = kind
        self._gradients = [parameter.grad for parameter in parameters]
        # One parameter is enough, because an optimizer that changes weights before its closure changes all of them.
        self._with_gradient = [parameter for parameter in parameters if parameter.grad is not None][-1:]
        self._called = False
        for parameter in parameters:
            parameter.grad = None  # as in Lightning, hooks before the step see no gradient
        self._before = self._fingerprint()

    def _fingerprint(self) -> list[Any]:
        # Versions do not count writes to `data`, so a few values are compared, too.
        values = [parameter.detach().flatten()[:_SAMPLE].clone() for parameter in self._with_gradient]
        return [*((parameter.data_ptr(), parameter._version) for parameter in self._parameters), *values]

    def __call__(self) -> None:
        """Set the parameters' gradients; raise `ConfigError` if weights have changed since the step began."""
        pairs = zip(self._before, self._fingerprint(), strict=True)
        if not all(torch.equal(old, new) if isinstance(old, Tensor) else old == new for old, new in pairs):
            raise ConfigError(
                "an optimizer must compute each step from one gradient at the weights before the step, because the "
                f"batches have already passed all stages; {self._kind} changes weights and calls its closure again, "
                "as sharpness-aware optimizers do. Use another optimizer, such as SGD or AdamW. For flat minima, use "
                "`StochasticWeightAveraging` or `EMAWeightAveraging`."
            )
        self._called = True
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def check(self) -> None:
        """Refuse an optimizer that stepped without calling the closure, as Lightning does."""
        if not self._called:
            raise ConfigError(
                f"an optimizer's `step` must call its argument `closure`, but the `step` of {self._kind} did not. Let "
                "it begin with `loss = closure()`."
            )
