"""`benchmarks.train` without what a swarm does against faults: nothing can die here without loss.

Every peer of the swarm runs this module, so all of them go without.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import train
from lightning_swarm import starting
from lightning_swarm.network.liveness import Liveness
from lightning_swarm.pipeline.copies import Copies, Copy
from lightning_swarm.steps import closing
from lightning_swarm.types.runs import Member


async def keep_none(self: Copies, copy: Copy) -> None:
    """Trainers keep nothing of the microbatches of the open step."""


def never_ping(*_: object) -> None:
    """Nobody looks whether a peer is alive that owes an answer."""


def one_voter(_rosters: object, voters: Sequence[Member], *_: object) -> list[Member]:
    """The coordinator decides by itself."""
    return list(voters[:1])


def strip() -> None:
    """Take it all out. Snapshots are an option of the strategy."""
    Copies.keep = keep_none  # type: ignore[method-assign]
    Liveness._arm = never_ping  # type: ignore[method-assign]
    starting.choose_voters = one_voter  # type: ignore[assignment]
    closing.choose_voters = one_voter  # type: ignore[assignment]


if __name__ == "__main__":
    strip()
    train.main()
