"""Which blocks make up which stage, as the user's settings say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from lightning_swarm.errors import ConfigError
from lightning_swarm.partition.blocks import Blocks
from lightning_swarm.partition.cuts import parameter_costs
from lightning_swarm.partition.policy import balanced, named


def choose_ranges(
    blocks: Blocks,
    num_stages: int,
    split: str | tuple[str, ...],
    measured: Callable[[], Sequence[int]] | None = None,
    *,
    seams: Collection[int] = (),
) -> tuple[range, ...]:
    """Which blocks make up which stage.

    Args:
        blocks: What is cut.
        num_stages: Into how many.
        split: As in `SwarmConfig`.
        measured: What each block costs, for ``split="time"``; None: any cut will do.
        seams: Blocks that boundary layers stand after. If there are any, stages end only there, or as `split` names.

    Raises:
        ConfigError: Too few blocks, unknown names, or names that disagree with `num_stages`.
    """
    if isinstance(split, str):
        by_size = parameter_costs(blocks)
        costs = measured() if split == "time" and measured else by_size
        return _at_seams(costs, num_stages, seams) if seams else balanced(costs, num_stages)
    ranges = named(blocks.names, list(split))
    if len(ranges) != num_stages:
        raise ConfigError(
            f"`split` must name the beginnings of `num_stages` stages: it makes {len(ranges)}, and `num_stages` is "
            f"{num_stages}. Make them agree."
        )
    return ranges


def _at_seams(costs: Sequence[int], num_stages: int, seams: Collection[int]) -> tuple[range, ...]:
    ends = sorted({*seams, len(costs) - 1})
    if not 1 <= num_stages <= len(ends):
        raise ConfigError(
            f"a model with boundary layers is cut where they stand: `num_stages` must be 1..{len(ends)}, got "
            f"{num_stages}. Lower it, or name the blocks where stages begin with `split=[...]`."
        )
    parts = [range(start + 1, end + 1) for start, end in zip([-1, *ends], ends, strict=False)]
    runs = balanced([sum(costs[index] for index in part) for part in parts], num_stages)
    return tuple(range(parts[run.start].start, parts[run.stop - 1].stop) for run in runs)
