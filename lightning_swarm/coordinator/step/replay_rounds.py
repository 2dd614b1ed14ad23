"""Has trainers resend microbatches that a closing step lacks, a few at a time, and checks that the sums have them."""

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
from lightning_swarm.protocol.rpc import REPLAY

_MAX_REPLAYS: Final = 16  # replays of one microbatch in one step
_MAX_UNFILLED: Final = 2  # answered replays of a microbatch that a present holder still lacks
_MAX_FAILURES: Final = 3  # consecutive failed requests to a trainer, after which its batches are lost
_MAX_SILENCES: Final = 2  # consecutive requests without an answer, each of several call timeouts
_MAX_WORK: Final = 64  # microbatches of one trainer between two checks of the sums
_TIMEOUTS: Final = 3  # call timeouts of a request: for a holder that does not answer, for its replacement, and the rest
_PAUSE_S: Final = 0.5  # wait after a failed request


# A trainer answers that its microbatches were added, but it could answer so without computing, and only the sums prove
# it. So each request has few microbatches, and the sums are checked before the next request.
class ReplayRounds:
    """Has the trainers of one step send microbatches again."""

    def __init__(self, context: CoordinatorContext, servers: ServerCalls, step: OpenStep) -> None:
        self._generation, self._events, self._step = context.generation, context.events, step
        self._servers = servers  # also calls trainers
        self._replayed: Counter[Receipt] = Counter()
        self._failures: Counter[PeerId] = Counter()  # trainer -> consecutive failures
        self._silences: Counter[PeerId] = Counter()  # trainer -> consecutive silences without progress
        self._num_wanted: dict[PeerId, int] = {}  # trainer -> microbatches missing at its newest request
        self._unreached: defaultdict[PeerId, set[PeerId]] = defaultdict(set)  # trainer -> servers
        self._claimed: dict[Receipt, Mapping[int, PeerId]] = {}  # receipt -> stage -> server, by the newest answers
        self._unfilled: defaultdict[Receipt, list[PeerId]] = defaultdict(list)  # receipt -> holders that lack it

    def num_replays(self, receipt: Receipt) -> int:
        """Return how often a replay of a microbatch was requested."""
        return self._replayed[receipt]

    def check_claims(self, ledgers: Ledgers) -> None:
        """Check the trainers' answers against the sums."""
        # A trainer is excused if the holder is gone, or holds more than the step counts.
        counted = set(self._step.counted)
        for receipt, holders in self._claimed.items():
            for index, holder in holders.items():
                for member, ledger in ledgers[index].items():
                    if member.peer_id == holder and ledger.held <= counted and receipt not in ledger.held:
                        self._unfilled[receipt].append(holder)
        self._claimed = {}

    def barred_holders(self, first: int, rosters: Sequence[Sequence[Member]]) -> set[PeerId]:
        """Return the servers that must not hold the missing microbatches of a batch."""
        # If a server lacks a replay, its report or the trainer's is false. So another server of the stage is tried.
        lacking = {peer for receipt, peers in self._unfilled.items() if receipt[0] == first for peer in peers}
        stages = [{member.peer_id for member in roster} for roster in rosters]
        without_others = set[PeerId]().union(*(servers for servers in stages if servers <= lacking))
        return (lacking - without_others) | self._unreached[self._step.trainer_of(first)]

    def unfillable_batches(self, holes: Mapping[Receipt, Mapping[int, PeerId]]) -> dict[int, set[PeerId]]:
        """Return the batches that replays failed to add: place -> servers that lack them despite trainers' answers."""
        unfillable: dict[int, set[PeerId]] = {}
        for receipt in holes:
            if len(self._unfilled[receipt]) >= _MAX_UNFILLED or self._replayed[receipt] >= _MAX_REPLAYS:
                unfillable.setdefault(receipt[0], set()).update(self._unfilled[receipt])
        return unfillable

    async def fill(self, holes: Mapping[Receipt, Mapping[int, PeerId]], gone: Collection[PeerId]) -> set[int]:
        """Have some microbatches replayed; return the batches that cannot be computed again."""
        # `holes`: missing microbatch -> stage -> server that must add it.
        by_trainer: defaultdict[PeerId, list[Replay]] = defaultdict(list)
        for receipt, holders in sorted(holes.items()):
            by_trainer[self._step.trainer_of(receipt[0])].append(Replay(receipt=receipt, holders=dict(holders)))
        lost = await gather(self._ask(trainer, work, gone) for trainer, work in by_trainer.items())
        return set().union(*lost)

    async def _ask(self, trainer: PeerId, wanted: Sequence[Replay], gone: Collection[PeerId]) -> set[int]:
        """Request at most `_MAX_WORK` replays from a trainer; return the batches that cannot be computed again."""
        work = list(wanted[:_MAX_WORK])
        for replay in work:
            self._replayed[replay.receipt] += 1
            for stage_index, peer in replay.holders.items():
                self._events.note("replay", peer=peer, stage=stage_index, step=self._step.step)
        # If fewer are missing than at the last request, the trainer makes progress, even if it did not answer.
        has_progressed = len(wanted) < self._num_wanted.get(trainer, len(wanted))
        self._num_wanted[trainer] = len(wanted)
        request = ReplayRequest(generation=self._generation, step=self._step.step, work=work, avoid=sorted(gone))
        try:
            # The time does not grow with the work: finished replays stay, and the rest is requested again.
            reply = await self._servers.ask(trainer, REPLAY, request, num_timeouts=min(1 + len(work), _TIMEOUTS))
        except (PeerError, ProtocolError) as error:  # any other error is a bug in the trainer's handler
            self._failures[trainer] = 1 if has_progressed else self._failures[trainer] + 1
            is_silent = isinstance(error, DeadlineExceeded) and not has_progressed
            self._silences[trainer] = self._silences[trainer] + 1 if is_silent else 0
            self._events.note("retry", peer=trainer, step=self._step.step, reason=str(error))
            if self._failures[trainer] < _MAX_FAILURES and self._silences[trainer] < _MAX_SILENCES:
                await asyncio.sleep(_PAUSE_S)
                return set()
            return {replay.receipt[0] for replay in work}
        self._failures[trainer] = self._silences[trainer] = 0
        self._unreached[trainer] |= set(reply.unreached) - set(gone)
        lost = set(reply.lost)
        for replay in work:
            if replay.receipt not in lost and not self._unreached[trainer].intersection(replay.holders.values()):
                self._claimed[replay.receipt] = replay.holders
        return {first for first, _, _ in lost}
