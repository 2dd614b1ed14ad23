"""The scale of the loss in ``precision="16-mixed"``: torch's `GradScaler`, told what became of each step."""

from __future__ import annotations

import math

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from lightning_swarm.errors import StepError


class LossScale:
    """What the lead's losses are multiplied by, so that small gradients stay in the range of float16.

    Lightning's precision plugin multiplies; the servers divide the mean. The scaler sees no gradient of the model.

    Args:
        scaler: Of the plugin; None: it never scales.
    """

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler

    @property
    def adapts(self) -> bool:
        """Whether it changes with the steps."""
        return self._scaler is not None and self._scaler.is_enabled()

    @property
    def value(self) -> float:
        """The scale of the next loss.

        Raises:
            StepError: It has come down to nothing.
        """
        value = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        if not 0.0 < value < math.inf:
            raise StepError(
                f"the scale of the loss must be positive and finite, it has become {value:g}: gradients were not "
                "finite at any scale. Look for what makes them so with `Trainer(detect_anomaly=True)`, or use "
                "`bf16-mixed`."
            )
        return value

    def update(self, *, skipped: bool) -> None:
        """Let the scaler grow or back off after a step, as it does on one machine."""
        if self._scaler is None:
            return
        # It looks for what is not finite in an optimizer's gradients, and those are on the servers: one stands in.
        stand_in = torch.nn.Parameter(torch.zeros(()))
        stand_in.grad = torch.full((), math.inf if skipped else 0.0)
        self._scaler.unscale_(SGD([stand_in], lr=0.0))
        self._scaler.update()
