"""The common loss scale of a run's trainers for float16, which records change."""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace as replaced

from lightning_swarm.protocol.messages.wire import Count, WireMessage

# Largest float32 number, because trainers multiply in float32.
_MAX: Final = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


class LossScaling(WireMessage, frozen=True):
    """The scale of all losses of a step, and the rule for the next step's scale, as in torch's `GradScaler`."""

    scale: Annotated[float, msgspec.Meta(ge=0, le=_MAX)]
    growth_factor: Annotated[float, msgspec.Meta(ge=1, le=_MAX)]
    backoff_factor: Annotated[float, msgspec.Meta(gt=0, le=1)]
    # Steps without overflow after which the scale grows.
    growth_interval: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    num_applied: Count = 0  # steps without overflow so far

    def after(self, *, skipped: bool) -> LossScaling:
        """Return the scaling after a step; `skipped`: a gradient overflowed."""
        if skipped:
            return replaced(self, scale=_rounded(self.scale * self.backoff_factor), num_applied=0)
        if self.num_applied + 1 < self.growth_interval:
            return replaced(self, num_applied=self.num_applied + 1)
        grown = self.scale * self.growth_factor
        return replaced(self, scale=_rounded(grown) if grown <= _MAX else self.scale, num_applied=0)


def _rounded(scale: float) -> float:
    float32: float = struct.unpack("<f", struct.pack("<f", scale))[0]
    return float32
