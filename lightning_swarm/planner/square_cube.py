"""Why wide models are worth a swarm: compute grows with the square of the width, traffic with the width. Pure.

Source: SWARM, arXiv:2301.11913, section 3.1, the square-cube law: for n by n matrices, n^3 against n^2.
"""

from __future__ import annotations

from typing import Final

from lightning_swarm.planner.transformer import block

WIDTHS: Final = tuple(2**power for power in range(7, 15))
"""From 128 to 16384 features of a token."""


def busy_share(width: int, sequence: int, flop_per_s: float, line_bytes_per_s: float, latency_s: float) -> float:
    """The share of its time for which a machine with one block as its stage computes, one sample at a time.

    An activation comes and one goes, and so do two gradients; the two ways of the line work at once, but not with the
    computing. Nothing hides the latency either, so a swarm with many microbatches under way does better.

    Args:
        width: Of the block.
        sequence: Tokens of the sample.
        flop_per_s: Of the machine.
        line_bytes_per_s: Each way.
        latency_s: One way.
    """
    costs = block(width, sequence)
    computing_s = costs.flop / flop_per_s
    return computing_s / (computing_s + 2 * (costs.output_bytes / line_bytes_per_s + latency_s))
