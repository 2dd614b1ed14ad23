"""How a user says that tensors travel, and what that is in the planner's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from lightning_swarm.boundary import Bottleneck
from lightning_swarm.compression import CODECS, SMALLEST
from lightning_swarm.config import Compression
from lightning_swarm.planner.wire import Code, Wire

_CPU_S: Final = {"float16": 1.3e-9, "bfloat16": 0.8e-9, "8bit": 9.6e-9, "6bit": 7.0e-9, "4bit": 6.5e-9}
"""Seconds of a core for writing and reading a number, of millions of them. Measured: `benchmarks.codecs`."""


@dataclass(frozen=True)
class Travel:
    """How tensors travel. None: nothing was said.

    Args:
        compression: By which codecs.
        boundary_ratio: How many times fewer features cross from stage to stage.
    """

    compression: Compression | None = None
    boundary_ratio: int | None = None

    @classmethod
    def parse(cls, compression: Any, boundary_ratio: Any) -> Travel:
        """What a user gives.

        Args:
            compression: As `SwarmStrategy` takes it; None: nothing.
            boundary_ratio: As `Bottleneck` takes it; None: nothing.

        Raises:
            ConfigError: It cannot be.
        """
        if compression is not None and not isinstance(compression, Compression | Mapping):
            compression = str(compression)
        return cls(
            compression=None if compression is None else Compression.parse(compression),
            boundary_ratio=None if boundary_ratio is None else Bottleneck(boundary_ratio).ratio,
        )

    def or_else(self, other: Travel) -> Travel:
        """With what the other says where this one says nothing."""
        return Travel(self.compression or other.compression, self.boundary_ratio or other.boundary_ratio)

    @property
    def wire(self) -> Wire:
        """What is left of their bytes. What is no codec counts as none, and is named."""
        by = self.compression or Compression()
        ways = by.activations, by.gradients, by.averaging
        activations, gradients, averaging = map(_code, ways)
        return Wire(
            activations=activations,
            gradients=gradients,
            averaging=averaging,
            error_feedback=bool(by.error_feedback),
            boundary_ratio=self.boundary_ratio or 1,
            uncounted=tuple(sorted({way for way in ways if way not in CODECS} - {"none"})),
        )

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"compression": asdict(self.compression or Compression()), "boundary_ratio": self.boundary_ratio}


NOTHING_SAID: Final = Travel()


def _code(name: str) -> Code | None:
    if name not in CODECS:
        return None
    return Code(bits=CODECS[name].bits, cpu_s=_CPU_S[name], smallest=SMALLEST)
