"""`benchmarks.train`, in which every other `BLOCK` steps go without a swarm's safeguards against faults.

A machine's speed changes from minute to minute by more than the safeguards cost, so both ways take turns within one
run. Every peer of the swarm runs this module and counts the steps by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks import train
from lightning_swarm.client.pipeline.replay_buffer import ReplayBuffer, ReplayCopy
from lightning_swarm.coordinator import record_check
from lightning_swarm.coordinator.membership import rosters
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import Exchange, Liveness
from lightning_swarm.protocol.messages.run import SeatedMembers
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState

BLOCK = 4


def is_bare(step: int) -> bool:
    """Return whether `step` goes without safeguards."""
    return step // BLOCK % 2 == 1


# No user may switch these safeguards off, and no setting changes within a run, so the package has no argument for it.
# Each replacement has a public name and calls the original with the same arguments.
@contextmanager
def taking_turns() -> Iterator[None]:
    """Make the bare steps keep no copies of microbatches, ping no peer, and have the coordinator vote alone."""
    keep, watch, apply, number = ReplayBuffer.keep, Liveness.watch, RunState.apply, rosters.number_of_voters
    step = 0  # the open one

    async def keep_by_turns(self: ReplayBuffer, copy: ReplayCopy) -> None:
        if not is_bare(copy.microbatch.key.step):
            await keep(self, copy)

    def watch_by_turns(self: Liveness, peer: PeerId, exchange: Exchange) -> None:
        if not is_bare(step):
            watch(self, peer, exchange)

    def apply_and_count(self: RunState, record: Record, seats: SeatedMembers | None = None) -> None:
        nonlocal step
        apply(self, record, seats)
        step = record.step + 1

    def number_by_turns(num_members: int) -> int:
        # A record names the voters of the step after its own.
        return min(number(num_members), 1) if is_bare(step + 1) else number(num_members)

    ReplayBuffer.keep, Liveness.watch = keep_by_turns, watch_by_turns  # type: ignore[method-assign]
    RunState.apply = apply_and_count  # type: ignore[method-assign]
    rosters.number_of_voters = record_check.number_of_voters = number_by_turns  # type: ignore[attr-defined]
    try:
        yield
    finally:
        ReplayBuffer.keep, Liveness.watch = keep, watch  # type: ignore[method-assign]
        RunState.apply = apply  # type: ignore[method-assign]
        rosters.number_of_voters = record_check.number_of_voters = number  # type: ignore[attr-defined]


if __name__ == "__main__":
    with taking_turns():
        train.main()
