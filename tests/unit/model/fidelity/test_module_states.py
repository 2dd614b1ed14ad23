"""Attributes that the trainer's code sets on modules are read with each call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from lightning_swarm.model.fidelity.module_states import TrainerStates


class Cooled(nn.Module):
    """A block with one rate from its class and another one of its own."""

    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._rate = 0.5


def test_attributes_of_classes_and_private_ones_are_read(monkeypatch: Any) -> None:
    blocks = [Cooled(), Cooled()]
    stage: Any = SimpleNamespace(block_names=["net.0", "net.1"], blocks=blocks)
    states = TrainerStates(stage)
    assert states.read() == (True, None)
    with monkeypatch.context() as patched:
        patched.setattr(Cooled, "rate", 0.25)
        blocks[1]._rate = 2.0
        blocks[1]._note = 3  # set by a library
        found = states.read()[1]
        assert found is not None
        assert found.attributes == {"0": {"rate": 0.25}, "1": {"rate": 0.25, "_rate": 2.0}}
    found = states.read()[1]
    assert found is not None
    assert found.attributes == {"1": {"_rate": 2.0}}
