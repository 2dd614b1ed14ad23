"""A model cut into stages: what each computes, keeps and sends. Pure."""

from __future__ import annotations

from typing import Final

from lightning_swarm.config import Limits
from lightning_swarm.partition.policy import balanced
from lightning_swarm.planner.records import Machine, Model, Stage

FLOAT32: Final = 4
"""Bytes. Sums of gradients have at least these."""

ADAM: Final = 2
"""Numbers that the optimizer keeps for each parameter: that many with Adam, the most that is usual."""


def cut(model: Model, num_stages: int) -> tuple[Stage, ...]:
    """The stages, so that the slowest one has as little to compute as can be.

    Args:
        model: What is cut.
        num_stages: 1 to the number of its blocks.
    """
    blocks = model.blocks
    # Blocks that compute nothing, embeddings, go with their neighbours.
    ranges = balanced([max(1, round(block.flop / 1e6)) for block in blocks], num_stages)
    stages = []
    for span in ranges:
        run = [blocks[index] for index in span]
        first, last = span[0] == 0, span[-1] == len(blocks) - 1
        came = model.input_bytes if first else blocks[span[0] - 1].output_bytes
        stages.append(
            Stage(
                blocks=len(run),
                parameters=sum(block.parameters for block in run),
                flop=sum(block.flop for block in run),
                input_bytes=came + (model.extra_bytes if last else 0),
                gradient_bytes=0 if first and not model.input_gradient else came,
                output_bytes=run[-1].output_bytes,
                graph_bytes=sum(block.graph_bytes for block in run),
            )
        )
    return tuple(stages)


def state_bytes(parameters: int, weight_bytes: int) -> float:
    """What a server keeps of a stage where it computes, but for activations.

    Its weights, what the optimizer keeps, the gradients of one microbatch, their sum over the step, and the mean.
    Snapshots are not counted: beyond `Limits.snapshot_bytes` they are in files.
    """
    return float(parameters * ((2 + ADAM) * weight_bytes + 2 * max(FLOAT32, weight_bytes)))


def room_samples(stage: Stage, machine: Machine, weight_bytes: int) -> float:
    """Of how many samples a machine has room for the graph, beside the stage; below 0: it has none for the stage."""
    room = machine.memory_bytes - state_bytes(stage.parameters, weight_bytes)
    return room / max(1, stage.graph_bytes)


def kept_samples(stage: Stage, machine: Machine, weight_bytes: int, limits: Limits) -> float:
    """Of how many samples a server keeps the graph until their backward; of others it computes the forward again."""
    room = room_samples(stage, machine, weight_bytes)
    return min(room, limits.cache_bytes / max(1, stage.graph_bytes))
