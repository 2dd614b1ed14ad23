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
    check_cuts,
    choose_ranges,
    cut,
    insert_at_cuts,
    layers_behind,
    parameter_costs,
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
    "call_bound",
    "check_cuts",
    "choose_ranges",
    "computing",
    "cut",
    "extras_for",
    "find_blocks",
    "guard",
    "insert_at_cuts",
    "is_computing",
    "layers_behind",
    "named_ranges",
    "parameter_costs",
    "time_costs",
]
