"""Which blocks make up which stage, as the user's settings say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_swarm.errors import ConfigError
from lightning_swarm.partition.blocks import Blocks
from lightning_swarm.partition.policy import balanced, named
from lightning_swarm.partition.stages import parameter_costs


def choose_ranges(
    blocks: Blocks,
    num_stages: int,
    split: str | tuple[str, ...],
    measured: Callable[[], Sequence[int]] | None = None,
) -> tuple[range, ...]:
    """Which blocks make up which stage.

    Args:
        blocks: What is cut.
        num_stages: Into how many.
        split: As in `SwarmConfig`.
        measured: What each block costs, for ``split="time"``; None: any cut will do.

    Raises:
        ConfigError: Too few blocks, unknown names, or names that disagree with `num_stages`.
    """
    if isinstance(split, str):
        by_size = parameter_costs(blocks)
        return balanced(measured() if split == "time" and measured else by_size, num_stages)
    ranges = named(blocks.names, list(split))
    if len(ranges) != num_stages:
        raise ConfigError(
            f"`split` must name the beginnings of `num_stages` stages: it makes {len(ranges)}, and `num_stages` is "
            f"{num_stages}. Make them agree."
        )
    return ranges
