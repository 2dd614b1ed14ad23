"""Writes names and dtypes for messages and records."""

from collections.abc import Sequence
from typing import Final

import torch

_MAX_NAMED: Final = 5


def few(names: Sequence[str]) -> str:
    """List the first names, and say how many there are if these are not all."""
    more = f", ... ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
