"""Tensors and arrays that modules keep as ordinary attributes: each peer makes its own, so they are compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_swarm.model.module_states import is_left
from lightning_swarm.model.partition.leftovers import OF_TORCH
from lightning_swarm.model.partition.stages import Named

_MAX_LENGTH: Final = 1 << 16  # elements of a tensor that are looked at
_MAX_ITEMS: Final = 64  # of a list or a dict
_TOLERANCE: Final = 1e-3  # peers' devices round otherwise; other random numbers change it all


def constants(named: Iterable[Named]) -> dict[str, list[float]]:
    """Sketch the tensors in modules' attributes, by name: two numbers tell equal ones from others."""
    return {
        f"{name}.{key}": sketch
        for name, module in named
        for key, value in vars(module).items()
        if key not in OF_TORCH
        and not is_left(module, key)
        and (sketch := [number for tensor in _arrays(value) for number in _sketch(tensor)])
    }


def differing(own: Mapping[str, Sequence[float]], others: Mapping[str, Sequence[float]]) -> list[str]:
    """Name the constants that both have, with other values."""
    return [
        name
        for name in own.keys() & others.keys()
        if len(own[name]) != len(others[name])
        or not all(
            math.isclose(*pair, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
            for pair in zip(own[name], others[name], strict=True)
        )
    ]


def _arrays(value: Any) -> Iterator[Tensor]:
    """The tensors and arrays in an attribute, or in a short list or dict there."""
    kind = type(value)
    items = value.values() if kind is dict else value if kind in (list, tuple) else (value,)
    for item in islice(items, _MAX_ITEMS):
        if type(item) is Tensor and item.layout == torch.strided and not item.is_meta:
            yield item
        elif isinstance(item, np.ndarray) and item.dtype.kind in "biufc":
            yield torch.from_numpy(np.ascontiguousarray(item))


def _sketch(tensor: Tensor) -> list[float]:
    """The norm, and a component in a direction that has nothing to do with what it holds."""
    values = tensor.detach().flatten()[:_MAX_LENGTH].cpu()
    values = torch.view_as_real(values.resolve_conj()).flatten() if values.is_complex() else values
    values = values.double().nan_to_num(0.0, 0.0, 0.0)
    places = torch.arange(1.0, len(values) + 1.0, dtype=torch.float64, device="cpu")
    norm = float(values.norm())
    return [norm, float(values @ (places * places).cos()) / (norm or 1.0)]
