"""Sketches of the constants that modules keep as ordinary attributes, to compare them between peers.

Each peer builds these tensors, arrays and numbers itself, so random ones may differ. Numbers are compared only if they
may be random: floats, or several in a list. A single integer is not compared: it is a size, or a count of the
modules made so far, which may differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lightning_swarm.model.fidelity.leftovers import TORCH_ATTRIBUTES
from lightning_swarm.model.fidelity.module_states import built_values, is_exempt
from lightning_swarm.model.partition.stages import Named

_MAX_LENGTH: Final = 1 << 16  # elements of a tensor that are sketched
_MAX_ITEMS: Final = 64  # items of a list or dict that are sketched
_TOLERANCE: Final = 1e-3  # allows for devices that round differently; other random numbers differ far more


def constants(named: Iterable[Named]) -> dict[str, list[float]]:
    """Sketch the tensors and numbers in blocks' attributes, by name; equal constants have equal sketches."""
    named = list(named)
    sketches = {
        f"{name}.{key}": [number for tensor in _arrays(value) for number in _sketch(tensor)]
        for name, module in named
        for key, value in vars(module).items()
        if key not in TORCH_ATTRIBUTES and not is_exempt(module, key)
    }
    tensors = {name: sketch for name, sketch in sketches.items() if sketch}
    return tensors | built_numbers(named)


def built_numbers(named: Iterable[Named]) -> dict[str, list[float]]:
    """Sketch the numbers in the attributes that modules had when they were built, by name."""
    numbers = {
        f"{name}.{key}": torch.tensor(_numbers(value), dtype=torch.float64, device="cpu")
        for name, module in named
        for key, value in built_values(module).items()
    }
    return {name: _sketch(tensor) for name, tensor in numbers.items() if len(tensor)}


def differing(own: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the names of the constants that both peers have but with different sketches."""
    return [
        name
        for name in own.keys() & theirs.keys()
        if len(own[name]) != len(theirs[name])
        or not all(
            math.isclose(*pair, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
            for pair in zip(own[name], theirs[name], strict=True)
        )
    ]


def _arrays(value: Any) -> Iterator[Tensor]:
    """Yield an attribute's tensor or array, or all among the first items of its list or dict."""
    kind = type(value)
    items = value.values() if kind is dict else value if kind in (list, tuple) else (value,)
    for item in islice(items, _MAX_ITEMS):
        if type(item) is Tensor and item.layout == torch.strided and not item.is_meta:
            yield item
        elif isinstance(item, np.ndarray) and item.dtype.kind in "biufc":
            yield torch.from_numpy(np.ascontiguousarray(item))


def _numbers(value: Any) -> list[float]:
    """Return the numbers in a plain attribute if they may be random: a float, or several in a list."""
    if type(value) in (list, tuple):
        numbers = [float(item) for item in islice(value, _MAX_ITEMS) if type(item) in (int, float)]
        return numbers if len(numbers) > 1 else []
    return [value] if type(value) is float else []


def _sketch(tensor: Tensor) -> list[float]:
    """Return the norm and the projection onto a fixed direction; different tensors almost surely differ in these."""
    values = tensor.detach().flatten()[:_MAX_LENGTH].cpu()
    values = torch.view_as_real(values.resolve_conj()).flatten() if values.is_complex() else values
    values = values.double().nan_to_num(0.0, 0.0, 0.0)
    positions = torch.arange(1.0, len(values) + 1.0, dtype=torch.float64, device="cpu")
    norm = float(values.norm())
    direction = (positions * positions).cos()  # fixed, and pseudo-random
    return [norm, float(values @ direction) / (norm or 1.0)]
