"""What one machine would do without a swarm. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_swarm.planner.records import Alone, Machine, Model
from lightning_swarm.planner.stages import ADAM

_RECOMPUTING = 4 / 3
"""Who offloads keeps no graph, and computes each forward twice."""


def fastest_alone(model: Model, machines: Iterable[Machine], batch_size: int) -> Alone | None:
    """The best that one of the machines can do by itself, or None if none holds the model in any memory."""
    found = [one for one in (alone(model, machine, batch_size) for machine in machines) if one is not None]
    return max(found, key=lambda one: one.samples_per_s, default=None)


def alone(model: Model, machine: Machine, batch_size: int) -> Alone | None:
    """What a machine can do by itself: an upper bound where it offloads, for its bus never waits.

    Args:
        model: What is trained: weights, their gradients, the optimizer's state, a sample at a time if need be.
        machine: The one.
        batch_size: Samples of a step.
    """
    held_bytes = float(model.parameters * (2 + ADAM) * model.weight_bytes)
    if held_bytes + model.graph_bytes <= machine.memory_bytes:
        return Alone(name=machine.name, samples_per_s=machine.flop_per_s / model.flop, offloads=False)
    parts = [*model.blocks, model.around]
    weights_bytes = 2 * max(part.parameters for part in parts) * model.weight_bytes  # in use, and on its way
    graph_bytes = max(part.graph_bytes for part in parts)
    room_bytes = machine.memory_bytes - 2 * weights_bytes
    if not machine.bus_bytes_per_s or held_bytes > machine.host_memory_bytes or room_bytes < graph_bytes:
        return None
    size = min(float(batch_size), room_bytes // graph_bytes if graph_bytes else batch_size)
    computing_s = _RECOMPUTING * model.flop * batch_size / machine.flop_per_s
    # Weights come for the forward and for the backward, gradients go, of each part and for each microbatch.
    moved_bytes = 2 * model.parameters * model.weight_bytes * batch_size / size
    bus_s = moved_bytes / machine.bus_bytes_per_s
    return Alone(name=machine.name, samples_per_s=batch_size / max(computing_s, bus_s), offloads=True)
