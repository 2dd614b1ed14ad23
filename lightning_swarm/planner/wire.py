"""How tensors travel: what codecs and boundary layers leave of their bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

USUAL_MICROBATCH: Final = 8
"""Samples, where something has to be known of microbatches before their size is chosen."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """What a codec makes of tensors.

    Args:
        bits: That a number takes.
        cpu_s: Seconds of a core for writing and reading a number.
        smallest: Numbers of the smallest tensor that is encoded.
    """

    bits: float
    cpu_s: float
    smallest: int = 1

    def takes(self, numbers: float, number_bytes: int) -> bool:
        """Whether tensors of so many numbers become shorter by it."""
        return numbers >= self.smallest and self.bits < 8 * number_bytes


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How a run's tensors travel. None: as they are.

    Args:
        activations: From stage to stage, from the trainer and to it.
        gradients: On the way back.
        averaging: Sums of gradients, within a stage.
        error_feedback: Whether servers keep what was lost of these sums.
        boundary_ratio: How many times fewer features travel between stages, by layers that stand there.
        uncounted: Names of ways to travel of which it is not known what they leave.
    """

    activations: Code | None = None
    gradients: Code | None = None
    averaging: Code | None = None
    error_feedback: bool = False
    boundary_ratio: int = 1
    uncounted: tuple[str, ...] = ()


PLAIN: Final = Wire()
"""All travels as it is."""


@dataclass(frozen=True)
class Travelling:
    """A sample's share of a tensor.

    Args:
        num_bytes: Over a line.
        coding_s: Seconds of a core for writing and reading it, half of them at either end.
    """

    num_bytes: float
    coding_s: float


def travelling(num_bytes: float, number_bytes: int, code: Code | None) -> Travelling:
    """What travels of a sample.

    Args:
        num_bytes: Of its tensor.
        number_bytes: Of one number of that; 0: there is none that a codec takes.
        code: None: it travels as it is.
    """
    if code is None or not number_bytes:
        return Travelling(num_bytes, 0.0)
    numbers = num_bytes / number_bytes
    if not code.takes(numbers * USUAL_MICROBATCH, number_bytes):
        return Travelling(num_bytes, 0.0)
    return Travelling(numbers * code.bits / 8, numbers * code.cpu_s)
