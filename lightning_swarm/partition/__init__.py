"""From a LightningModule to stages: find its blocks, decide where to cut, cut."""

from lightning_swarm.partition.bindings import CALLS, CARRIED, BlockCall, Pick, argument_of, bind, call_bound, taken
from lightning_swarm.partition.blocks import Blocks, find_blocks
from lightning_swarm.partition.boundaries import check_cuts, insert_at_cuts, layers_behind
from lightning_swarm.partition.choice import choose_ranges
from lightning_swarm.partition.cuts import batch_norms, cut, parameter_costs
from lightning_swarm.partition.guard import computing, guard, is_computing
from lightning_swarm.partition.policy import balanced, named
from lightning_swarm.partition.stages import StageModule, StageSpec, TensorSpec
from lightning_swarm.partition.timing import time_costs

__all__ = [
    "CALLS",
    "CARRIED",
    "BlockCall",
    "Blocks",
    "Pick",
    "StageModule",
    "StageSpec",
    "TensorSpec",
    "argument_of",
    "balanced",
    "batch_norms",
    "bind",
    "call_bound",
    "check_cuts",
    "choose_ranges",
    "computing",
    "cut",
    "find_blocks",
    "guard",
    "insert_at_cuts",
    "is_computing",
    "layers_behind",
    "named",
    "parameter_costs",
    "taken",
    "time_costs",
]
