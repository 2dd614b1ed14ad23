"""Partitions a LightningModule into stages: finds its blocks, decides where stages begin, and builds them."""

from lightning_swarm.model.partition.blocks import Blocks as Blocks
from lightning_swarm.model.partition.blocks import can_be_cut as can_be_cut
from lightning_swarm.model.partition.blocks import defines_stages as defines_stages
from lightning_swarm.model.partition.blocks import find_blocks as find_blocks
from lightning_swarm.model.partition.blocks import no_blocks as no_blocks
from lightning_swarm.model.partition.call_binding import CALLS as CALLS
from lightning_swarm.model.partition.call_binding import BlockCall as BlockCall
from lightning_swarm.model.partition.call_binding import Pick as Pick
from lightning_swarm.model.partition.call_binding import argument_of as argument_of
from lightning_swarm.model.partition.call_binding import bind as bind
from lightning_swarm.model.partition.call_binding import extras_after as extras_after
from lightning_swarm.model.partition.call_binding import extras_for as extras_for
from lightning_swarm.model.partition.call_binding import packed_calls as packed_calls
from lightning_swarm.model.partition.checks import guard as guard
from lightning_swarm.model.partition.split import build_stages as build_stages
from lightning_swarm.model.partition.split import choose_ranges as choose_ranges
from lightning_swarm.model.partition.split import insert_boundaries as insert_boundaries
from lightning_swarm.model.partition.split import layers_by_block as layers_by_block
from lightning_swarm.model.partition.split import plan_boundaries as plan_boundaries
from lightning_swarm.model.partition.stages import StageModule as StageModule
from lightning_swarm.model.partition.timing import time_costs as time_costs
from lightning_swarm.model.partition.twin import twin_of as twin_of
