"""Decides where the stages of a chain of blocks begin. Pure."""

from collections.abc import Sequence
from itertools import accumulate

from lightning_swarm.core.errors import ConfigError

_Score = tuple[int, int]
"""The sums of squared costs of stages and of squared numbers of blocks. Less is better."""


def balanced_ranges(costs: Sequence[int], num_stages: int) -> tuple[range, ...]:
    """Partition blocks into contiguous stages, none empty, so that the most expensive stage is as cheap as can be."""
    # Partitions with the same largest stage are compared by the sum of squared stage costs, and then by the sum of
    # squared numbers of blocks. Ties go to the partition whose last stages begin earliest, so that all peers choose
    # alike.
    num_blocks = len(costs)
    if not 1 <= num_stages <= num_blocks:
        raise ConfigError(
            f"`num_stages` must be 1..{num_blocks} (the model's blocks), got {num_stages}. "
            "Lower it, or split the model into more blocks."
        )
    if min(costs) < 0:
        raise ConfigError(f"the cost of a block must be at least 0, got {min(costs)}. Measure it again.")
    prefix = [0, *accumulate(costs)]
    largest = _smallest_bound(costs, num_stages)
    # best[j]: the score of the best partition of the first j blocks into the stages so far, and where stages begin.
    best: list[tuple[_Score, tuple[int, ...]] | None] = [((0, 0), ())] + [None] * num_blocks
    for stage in range(num_stages):
        best = [_best_stage(best, prefix, end, largest) if end > stage else None for end in range(num_blocks + 1)]
    final = best[num_blocks]
    assert final is not None  # `largest` is reachable, and stages can be split until there are enough
    return _ranges(final[1], num_blocks)


def named_ranges(block_names: Sequence[str], starts: Sequence[str]) -> tuple[range, ...]:
    """Partition blocks so that stages begin at the named blocks, and the first stage at the first block."""
    if not block_names:
        raise ConfigError("a pipeline must have at least one block, got none. Give the model blocks.")
    choices = f"choose from {', '.join(block_names)}"
    begins: list[int] = []
    for start in starts:
        if start not in block_names:
            raise ConfigError(f"`split` must name blocks of the model, got {start!r}. Correct it: {choices}.")
        begin = block_names.index(start)
        if begin in begins:
            raise ConfigError(f"`split` must name each block once, got {start!r} twice. Remove one of them.")
        if begins and begin < begins[-1]:
            raise ConfigError(
                f"`split` must name blocks in the model's order, got {start!r} after {block_names[begins[-1]]!r}. "
                f"Sort the names: {choices}."
            )
        begins.append(begin)
    if not begins or begins[0] != 0:
        begins.insert(0, 0)
    return _ranges(tuple(begins), len(block_names))


def _ranges(begins: tuple[int, ...], num_blocks: int) -> tuple[range, ...]:
    return tuple(range(begin, end) for begin, end in zip(begins, (*begins[1:], num_blocks), strict=True))


def _smallest_bound(costs: Sequence[int], num_stages: int) -> int:
    """Find, by bisection, the least possible cost of the most expensive of `num_stages` stages."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(costs: Sequence[int], bound: int) -> int:
    needed, load = 1, 0
    for cost in costs:
        if load + cost > bound:
            needed, load = needed + 1, 0
        load += cost
    return needed


def _best_stage(
    best: list[tuple[_Score, tuple[int, ...]] | None], prefix: list[int], end: int, largest: int
) -> tuple[_Score, tuple[int, ...]] | None:
    """Choose the first block of one more stage, which ends before block `end`; None if it would exceed `largest`."""
    found: tuple[_Score, tuple[int, ...]] | None = None
    for begin in range(end - 1, -1, -1):
        cost = prefix[end] - prefix[begin]
        if cost > largest:
            break
        before = best[begin]
        if before is None:
            continue
        (squares, lengths), begins = before
        score = (squares + cost * cost, lengths + (end - begin) ** 2)
        # `<=`, because the last of equal partitions begins this stage earliest.
        if found is None or score <= found[0]:
            found = (score, (*begins, begin))
    return found
