"""Boundary layers: learned ones where a model is cut, so that fewer features travel from stage to stage.

A layer stands *after* a block: its first half, `compress`, makes ``features / ratio`` numbers of each position's
``features``, its second half, `decompress`, makes as many as before of them. They are two halves of the model like
others: trained by its optimizer, saved in its checkpoint. What a swarm adds is that it cuts between the two.

Without a swarm a hook on the block does the same, so that nobody's forward, and no name in a checkpoint, changes. A
layer's own name tells where it stands: ``boundary_layers.net.3`` comes after ``net.3``.

Source: SWARM, arXiv:2301.11913, section 4.4 and appendix J.
"""

from lightning_swarm.boundary.insertion import (
    adopt,
    boundary_layers,
    described,
    hook,
    insert_boundary,
    restore_boundary,
    sized,
    unhook,
)
from lightning_swarm.boundary.layers import Bottleneck, Boundary, BoundaryLayer, Maxout

__all__ = [
    "Bottleneck",
    "Boundary",
    "BoundaryLayer",
    "Maxout",
    "adopt",
    "boundary_layers",
    "described",
    "hook",
    "insert_boundary",
    "restore_boundary",
    "sized",
    "unhook",
]
