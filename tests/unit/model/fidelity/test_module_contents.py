"""Changes within attributes are found, and unchanged attributes are not reported."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_swarm.model.fidelity.module_contents import Contents


def held() -> dict[str, Any]:
    return {
        "tensor": torch.tensor([1.0, float("nan")]),
        "large": torch.zeros(1000),
        "array": np.zeros(3),
        "config": SimpleNamespace(
            rate=0.5, nan=float("nan"), layers=[1, 2], module=torch.nn.Tanh(), cache={}, model=SimpleNamespace(rate=0.5)
        ),
        "settings": {"by_layer": {"first": [0.5]}},
        "function": len,
        "number": 3,
    }


CHANGES: dict[str, Callable[[Any], object]] = {
    "tensor": lambda own: own["tensor"].data.mul_(2),
    "large": lambda own: own["large"].add_(1),
    "array": lambda own: own["array"].fill(1),
    "config.rate": lambda own: setattr(own["config"], "rate", 0.25),
    "config.layers": lambda own: own["config"].layers.append(3),
    "config.model.rate": lambda own: setattr(own["config"].model, "rate", 0.25),
    "settings.by_layer": lambda own: own["settings"]["by_layer"]["first"].clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_found(name: str) -> None:
    own = held()
    contents = Contents(("block", *item) for item in own.items())
    assert contents.changed() == []
    CHANGES[name](own)
    assert [found[:2] for found in contents.changed()] == [("block", name)]


def test_what_is_new_in_a_config_is_not_read_by_blocks() -> None:
    own = held()
    contents = Contents(("block", *item) for item in own.items())
    own["config"].step = 3
    own["config"].cache["step"] = 3
    assert contents.changed() == []
