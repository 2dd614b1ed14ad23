"""Which batches there are in an epoch, and which of them is meant. No sample and no index travels."""

from __future__ import annotations

from typing import Annotated

import msgspec

from lightning_swarm.types.wire import Count, Wire

MAX_RUNS = 1 << 16
"""Changes of a batch's size within an epoch."""

MAX_PLANS = 64
"""Epochs that one step may reach over. All of their plans fit into one message."""

Epoch = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]

BatchNumber = tuple[Epoch, Index]
"""``(epoch, index)`` of a batch. With as many as the epoch has, its end is meant."""

Sizes = Annotated[list[tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 30)], Index]], msgspec.Meta(max_length=MAX_RUNS)]
"""``(samples, batches)``: so many batches of so many samples, one after the other."""

Bits = Annotated[bytes, msgspec.Meta(max_length=1 << 13)]


class RandomNumbers(Wire, frozen=True):
    """Where the generators are that samplers draw from."""

    torch: Bits
    python: Bits
    python_gauss: float | None
    numpy: Bits
    numpy_place: Count
    numpy_gauss: float | None
    own: Annotated[list[Bits], msgspec.Meta(max_length=8)]  # of the loader and its samplers


class EpochPlan(Wire, frozen=True):
    """The order of an epoch: what to list it by, and what it must come to."""

    epoch: Epoch
    begin: Index  # the batch that this generation of the run begins with
    sizes: Sizes
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # of all indices
    random: RandomNumbers
    last: bool  # no epoch follows it

    @property
    def num_batches(self) -> int:
        """Of the epoch."""
        return sum(count for _, count in self.sizes)


class PlanRequest(Wire, frozen=True):
    """The lead has listed an epoch."""

    generation: Count
    plan: EpochPlan
    position: BatchNumber  # the first batch that no step before this generation counts


class TakePlanRequest(Wire, frozen=True):
    """Long poll for the plan of an epoch."""

    generation: Count
    epoch: Epoch


class TakePlanReply(Wire, frozen=True):
    """None: there is none yet; or its epoch is over."""

    plan: EpochPlan | None
    passed: bool = False
