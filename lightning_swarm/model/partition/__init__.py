"""Partitions a LightningModule into stages: finds its blocks, decides where stages begin, and builds them."""

from lightning_swarm.model.partition.blocks import Blocks, find_blocks
from lightning_swarm.model.partition.call_binding import (
    CALLS,
    CARRIED,
    BlockCall,
    Pick,
    argument_of,
    bind,
    call_bound,
    extras_for,
)
from lightning_swarm.model.partition.checks import computing, guard, is_computing
from lightning_swarm.model.partition.policy import balanced_ranges, named_ranges
from lightning_swarm.model.partition.split import (
    batch_norms,
    build_stages,
    choose_ranges,
    insert_boundaries,
    layers_by_block,
    parameter_costs,
    plan_boundaries,
)
from lightning_swarm.model.partition.stages import ParameterSpec, StageModule, StageSpec
from lightning_swarm.model.partition.timing import time_costs

__all__ = [
    "CALLS",
    "CARRIED",
    "BlockCall",
    "Blocks",
    "ParameterSpec",
    "Pick",
    "StageModule",
    "StageSpec",
    "argument_of",
    "balanced_ranges",
    "batch_norms",
    "bind",
    "build_stages",
    "call_bound",
    "choose_ranges",
    "computing",
    "extras_for",
    "find_blocks",
    "guard",
    "insert_boundaries",
    "is_computing",
    "layers_by_block",
    "named_ranges",
    "parameter_costs",
    "plan_boundaries",
    "time_costs",
]
