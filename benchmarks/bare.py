"""`benchmarks.train`, in which every other `BLOCK` steps go without what a swarm does against faults.

A machine's speed changes from minute to minute by more than what is to be found out, so both ways take turns within one
run. Every peer of the swarm runs this module and counts the steps by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks import train
from lightning_swarm.client.pipeline.replay_buffer import ReplayBuffer, ReplayCopy
from lightning_swarm.coordinator import commit, record_check
from lightning_swarm.coordinator.membership.rosters import choose_voters
from lightning_swarm.network import PeerId
from lightning_swarm.network.liveness import Liveness, _WatchedPeer
from lightning_swarm.protocol.messages.run import Member, SeatedMembers
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.run_state import RunState

BLOCK = 4


def is_bare(step: int) -> bool:
    """Whether `step` goes without."""
    return step // BLOCK % 2 == 1


def take_turns() -> None:
    """In the bare steps: no copies of microbatches, no pings, and nobody votes but the coordinator."""
    keep, arm, apply = ReplayBuffer.keep, Liveness._arm, RunState.apply
    step = 0  # that is open

    async def keep_by_turns(self: ReplayBuffer, copy: ReplayCopy) -> None:
        if not is_bare(copy.microbatch.key.step):
            await keep(self, copy)

    def arm_by_turns(self: Liveness, peer: PeerId, watched: _WatchedPeer) -> None:
        if not is_bare(step):
            arm(self, peer, watched)

    def count(self: RunState, record: Record, seats: SeatedMembers | None = None) -> None:
        nonlocal step
        apply(self, record, seats)
        step = record.step + 1

    def choose(
        rosters: Sequence[Sequence[Member]],
        on_trainers: Sequence[bool],
        voters: Sequence[Member],
        hosts: Mapping[PeerId, str],
    ) -> list[Member]:
        chosen = choose_voters(rosters, on_trainers, voters, hosts)
        return chosen[:1] if is_bare(step + 1) else chosen  # for the step after the one that closes

    ReplayBuffer.keep = keep_by_turns  # type: ignore[method-assign]
    Liveness._arm = arm_by_turns  # type: ignore[method-assign]
    RunState.apply = count  # type: ignore[method-assign]
    commit.choose_voters = choose
    record_check._check_voters = lambda run, record: None  # who vote are too few


if __name__ == "__main__":
    take_turns()
    train.main()
