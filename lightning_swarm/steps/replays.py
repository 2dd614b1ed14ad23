"""Microbatches that sums lack: their trainers send them through the stages again."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Final

from lightning_swarm.errors import PeerError, ProtocolError, StepError
from lightning_swarm.events import EventLog
from lightning_swarm.network import PeerId
from lightning_swarm.run_state import RunState
from lightning_swarm.steps.policy import OpenStep
from lightning_swarm.steps.servers import Servers
from lightning_swarm.tasks import gather
from lightning_swarm.types.calls import Receipt
from lightning_swarm.types.steps import Replay, ReplayRequest

_MAX_REPLAYS: Final = 16
"""Of one microbatch in one step. More is no fault of peers."""

_MAX_FAILURES: Final = 3
_MAX_WORK: Final = 64
_PAUSE_S: Final = 0.5


class Replays:
    """Of one step.

    Args:
        run: As the coordinator's server knows it.
        servers: All that hold a stage; through them trainers are asked, too.
        step: Which.
        events: Of the coordinator.
    """

    def __init__(self, run: RunState, servers: Servers, step: OpenStep, events: EventLog) -> None:
        self._run = run
        self._servers = servers
        self._step = step
        self._events = events
        self._replayed: Counter[Receipt] = Counter()
        self._failures: Counter[PeerId] = Counter()  # of trainers
        self._unreached: defaultdict[PeerId, set[PeerId]] = defaultdict(set)  # by trainers

    def unreached(self, trainer: PeerId) -> Collection[PeerId]:
        """The servers that a trainer did not reach."""
        return self._unreached[trainer]

    async def fill(self, holes: Mapping[Receipt, Mapping[int, PeerId]], gone: Collection[PeerId]) -> set[int]:
        """Have microbatches computed again.

        Args:
            holes: For each one, by stage, who shall add it.
            gone: Whom the others have to do without.

        Returns:
            The batches that cannot be.

        Raises:
            StepError: One was computed too often, and is missing still.
        """
        by_trainer: defaultdict[PeerId, list[Replay]] = defaultdict(list)
        for receipt, holders in sorted(holes.items()):
            self._count(receipt, holders)
            by_trainer[self._step.trainer_of(receipt[0])].append(Replay(receipt=receipt, holders=dict(holders)))
        found = await gather(self._ask(trainer, work, gone) for trainer, work in by_trainer.items())
        return set().union(*found)

    def _count(self, receipt: Receipt, holders: Mapping[int, PeerId]) -> None:
        self._replayed[receipt] += 1
        if self._replayed[receipt] > _MAX_REPLAYS:
            raise StepError(
                f"step {self._step.step}: microbatch {receipt} was computed again {_MAX_REPLAYS} times, and is still "
                f"missing in the stages {sorted(holders)}"
            )
        for stage_index, peer in holders.items():
            self._events.note("replay", peer=peer, stage=stage_index, step=self._step.step)

    async def _ask(self, trainer: PeerId, work: list[Replay], gone: Collection[PeerId]) -> set[int]:
        lost: set[int] = set()
        for begin in range(0, len(work), _MAX_WORK):
            request = ReplayRequest(
                generation=self._run.manifest.generation,
                step=self._step.step,
                attempt=0,
                work=work[begin : begin + _MAX_WORK],
                avoid=sorted(gone),
            )
            try:
                reply = await self._servers.replay(trainer, request)
            except (PeerError, ProtocolError) as error:  # anything else is a bug there
                self._failures[trainer] += 1
                self._events.note("retry", peer=trainer, step=self._step.step, reason=str(error))
                if self._failures[trainer] < _MAX_FAILURES:
                    await asyncio.sleep(_PAUSE_S)
                    return lost
                return {one.receipt[0] for one in work}
            self._failures[trainer] = 0
            self._unreached[trainer] |= set(reply.unreached) - set(gone)
            lost |= {first for first, _, _ in reply.lost}
        return lost
