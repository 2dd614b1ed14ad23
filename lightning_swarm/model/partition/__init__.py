"""Partitions a LightningModule into stages: finds its blocks, decides where stages begin, and builds them."""

from lightning_swarm.model.partition.blocks import Blocks, can_be_cut, defines_stages, find_blocks, no_blocks
from lightning_swarm.model.partition.call_binding import (
    CALLS,
    BlockCall,
    Pick,
    argument_of,
    bind,
    extras_after,
    extras_for,
    packed_calls,
)
from lightning_swarm.model.partition.checks import guard
from lightning_swarm.model.partition.split import (
    build_stages,
    choose_ranges,
    insert_boundaries,
    layers_by_block,
    plan_boundaries,
)
from lightning_swarm.model.partition.stages import StageModule
from lightning_swarm.model.partition.timing import time_costs
from lightning_swarm.model.partition.twin import twin_of

__all__ = [
    "CALLS",
    "BlockCall",
    "Blocks",
    "Pick",
    "StageModule",
    "argument_of",
    "bind",
    "build_stages",
    "can_be_cut",
    "choose_ranges",
    "defines_stages",
    "extras_after",
    "extras_for",
    "find_blocks",
    "guard",
    "insert_boundaries",
    "layers_by_block",
    "no_blocks",
    "packed_calls",
    "plan_boundaries",
    "time_costs",
    "twin_of",
]
