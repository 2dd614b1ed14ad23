"""Registers ``strategy="swarm"`` with `lightning.pytorch`. The strategy is imported when a Trainer uses the name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry


def register(registry: Any, module: str) -> None:
    """Register `module`'s SwarmStrategy with an import tree, by the name "swarm" and by its path."""

    def make(**arguments: Any) -> Any:
        return import_module(module).SwarmStrategy(**arguments)

    # Lightning converts a bare class path on a command line to lower case before it looks the name up.
    for name in ("swarm", f"{module}.SwarmStrategy".lower()):
        description = "SWARM parallelism: pipeline stages on unequal, unreliable peers"
        registry.register(name, make, description=description, override=True)


register(StrategyRegistry, "lightning_swarm")
