"""A stage's weights and optimizer state on their way between the lead and the servers."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from lightning_swarm.types.wire import Count, Wire


class StateRequest(Wire, frozen=True):
    """Read one stage's state at a version."""

    stage_index: int
    step: int
    optimizer: bool  # False: weights and buffers. True: the optimizer's state
    generation: Count


class StageState(Wire, frozen=True):
    """Goes with the tensors of a stage's state."""

    stage_index: int
    step: int
    generation: Count
    optimizer: bool
    names: list[str]  # weights: state-dict names, one a tensor. optimizer: parameter names
    structure: Any  # optimizer: for each parameter, the tree of its state; weights: None


class LentWeights(Wire, frozen=True):
    """Goes with weights that evaluations may mean in place of a stage's own, which stay as they are."""

    stage_index: Count
    generation: Count
    number: Annotated[int, msgspec.Meta(ge=1)]  # by which calls mean them
    names: list[str]  # one a tensor, all of the stage; none: they are given back
