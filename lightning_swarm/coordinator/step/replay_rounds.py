"""Trainers send microbatches again that a closing step lacks, a few at a time, and the sums show what came of it."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from lightning_swarm.coordinator.context import CoordinatorContext
from lightning_swarm.coordinator.server_calls import ServerCalls
from lightning_swarm.coordinator.step.open_step import OpenStep
from lightning_swarm.coordinator.step.replay_plan import Ledgers
from lightning_swarm.core.errors import DeadlineExceeded, PeerError, ProtocolError
from lightning_swarm.core.tasks import gather
from lightning_swarm.network import PeerId
from lightning_swarm.protocol.messages.calls import Receipt
from lightning_swarm.protocol.messages.run import Member
from lightning_swarm.protocol.messages.step import Replay, ReplayRequest

_MAX_REPLAYS: Final = 16  # of one microbatch in one step
_MAX_UNFILLED: Final = 2  # replays of a microbatch that were answered, and whose holder, which is there, lacks it
_MAX_FAILURES: Final = 3
_MAX_SILENCES: Final = 2  # in a row, each of several call timeouts
_MAX_WORK: Final = 64  # microbatches of one trainer, until the sums are looked at again
_PAUSE_S: Final = 0.5


# A trainer's answer says that all it was asked for was added. The sums show whether that is so: a trainer that was
# granted a place and computed nothing may claim it for ever. So each is asked for a few microbatches at a time, and the
# sums are looked at before it is asked for more.
class ReplayRounds:
    """Has the trainers of one step send microbatches again."""

    def __init__(self, context: CoordinatorContext, servers: ServerCalls, step: OpenStep) -> None:
        self._generation, self._events = context.generation, context.events
        self._servers = servers  # through which trainers are asked, too
        self._step = step
        self._replayed: Counter[Receipt] = Counter()
        self._failures: Counter[PeerId] = Counter()  # of trainers, in a row
        self._silences: Counter[PeerId] = Counter()  # likewise, while nothing more came to be added
        self._num_wanted: dict[PeerId, int] = {}  # at the newest request
        self._unreached: defaultdict[PeerId, set[PeerId]] = defaultdict(set)  # servers, by the trainer that says so
        self._claimed: dict[Receipt, Mapping[int, PeerId]] = {}  # by the newest answers, who added them, by stage
        self._unfilled: defaultdict[Receipt, list[PeerId]] = defaultdict(list)  # the holders that lacked them after all

    def number(self, receipt: Receipt) -> int:
        """Return the number of replays asked for of a microbatch."""
        return self._replayed[receipt]

    def compare(self, ledgers: Ledgers) -> None:
        """Compare what trainers answered with what the sums hold.

        A holder that is gone excuses its trainer, and so does one that reports what it was not to add.
        """
        counted = set(self._step.counted)
        for receipt, holders in self._claimed.items():
            held = {
                index: one.held
                for index, peer in holders.items()
                for member, one in ledgers[index].items()
                if member.peer_id == peer and one.held <= counted
            }
            self._unfilled[receipt] += [holders[index] for index, there in held.items() if receipt not in there]
        self._claimed = {}

    def barred(self, first: int, rosters: Sequence[Sequence[Member]]) -> set[PeerId]:
        """The servers that shall not hold what is missing of a batch."""
        # A server that does not report what it was sent may lie as well as the trainer: another one is asked, if any.
        lacking = {peer for receipt, peers in self._unfilled.items() if receipt[0] == first for peer in peers}
        others = [{member.peer_id for member in roster} for roster in rosters]
        kept = set[PeerId]().union(*(roster for roster in others if roster <= lacking))
        return (lacking - kept) | self._unreached[self._step.trainer_of(first)]

    def never_added(self, holes: Mapping[Receipt, Mapping[int, PeerId]]) -> dict[int, set[PeerId]]:
        """The batches that were said to be added, and were not, by place, with the servers that lack them."""
        found: defaultdict[int, set[PeerId]] = defaultdict(set)
        for receipt in holes:
            if len(self._unfilled[receipt]) >= _MAX_UNFILLED or self._replayed[receipt] >= _MAX_REPLAYS:
                found[receipt[0]] |= {*self._unfilled[receipt]}
        return dict(found)

    async def fill(self, holes: Mapping[Receipt, Mapping[int, PeerId]], gone: Collection[PeerId]) -> set[int]:
        """Have microbatches in `holes` computed again and added, by stage, by the peer named there.

        Each trainer is asked for some of its own. Returns the batches that cannot be computed again.
        """
        by_trainer: defaultdict[PeerId, list[Replay]] = defaultdict(list)
        for receipt, holders in sorted(holes.items()):
            by_trainer[self._step.trainer_of(receipt[0])].append(Replay(receipt=receipt, holders=dict(holders)))
        found = await gather(self._ask(trainer, work, gone) for trainer, work in by_trainer.items())
        return set().union(*found)

    def _count(self, work: Sequence[Replay]) -> None:
        for one in work:
            self._replayed[one.receipt] += 1
            for stage_index, peer in one.holders.items():
                self._events.note("replay", peer=peer, stage=stage_index, step=self._step.step)

    async def _ask(self, trainer: PeerId, wanted: Sequence[Replay], gone: Collection[PeerId]) -> set[int]:
        work = list(wanted[:_MAX_WORK])
        self._count(work)
        came = len(wanted) < self._num_wanted.get(trainer, len(wanted))
        self._num_wanted[trainer] = len(wanted)
        request = ReplayRequest(generation=self._generation, step=self._step.step, work=work, avoid=sorted(gone))
        try:
            reply = await self._servers.replay(trainer, request)
        except (PeerError, ProtocolError) as error:  # anything else is a bug there
            self._failures[trainer] = 1 if came else self._failures[trainer] + 1
            is_silent = isinstance(error, DeadlineExceeded) and not came
            self._silences[trainer] = self._silences[trainer] + 1 if is_silent else 0
            self._events.note("retry", peer=trainer, step=self._step.step, reason=str(error))
            if self._failures[trainer] < _MAX_FAILURES and self._silences[trainer] < _MAX_SILENCES:
                await asyncio.sleep(_PAUSE_S)
                return set()
            return {one.receipt[0] for one in work}
        self._failures[trainer] = self._silences[trainer] = 0
        self._unreached[trainer] |= set(reply.unreached) - set(gone)
        lost = set(reply.lost)
        for one in work:
            if one.receipt not in lost and not self._unreached[trainer].intersection(one.holders.values()):
                self._claimed[one.receipt] = one.holders
        return {first for first, _, _ in lost}
