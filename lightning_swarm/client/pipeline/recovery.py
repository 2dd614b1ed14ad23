"""What a passage does about a peer that failed: who is to blame, who takes its place, what is sent again.

A peer that is gone, silent, refuses or cannot be understood is banned and replaced. One that is late, and lives, is
told to stop first: it may have added the gradient, and then that counts. One whose input never came is not to blame:
its sender is asked again, and if that does not help another pair of peers is tried. The ledgers keep all of it
harmless: whoever is asked twice adds once, and the closing names one holder.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.replay_buffer import Microbatch
from lightning_swarm.client.pipeline.stage_calls import StageCallFailed, StageCalls
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    DeadlineExceeded,
    GradientGone,
    GradientMissing,
    InputMissing,
    NotMember,
    PeerError,
    StepError,
    TicketGone,
    Unreachable,
)
from lightning_swarm.network import PeerId

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_MAX_REPEATS: Final = 8
_MIN_FAILURES: Final = 8
_MAX_OF_A_HOLDER: Final = 2


class GradientHolderGone(PeerError):
    """Nobody else may take the place of this peer.

    Args:
        peer: Which.
        error: What became of it.
    """

    def __init__(self, peer: PeerId, error: PeerError) -> None:
        super().__init__(f"{peer} shall hold a gradient, and did not add it: {error}")
        self.peer = peer


class Recovery:
    """Common to both ways.

    Args:
        link: Network and routers.
        calls: Of the microbatch.
        microbatch: Which.
        holders: By stage, peers whose place nobody takes.
        avoid: They are gone.
    """

    def __init__(
        self,
        link: PipelineContext,
        calls: StageCalls,
        microbatch: Microbatch,
        *,
        holders: Mapping[int, PeerId] | None = None,
        avoid: frozenset[PeerId] = frozenset(),
    ) -> None:
        self._link = link
        self._calls = calls
        self._microbatch = microbatch
        self._holders = holders or {}
        self._avoid = avoid
        self._since_s: float | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._repeats: Counter[int] = Counter()  # by stage
        self._missed: Counter[tuple[PeerId, ...]] = Counter()  # by the peers that had to do with it
        self.num_failures = 0

    async def _note(self, failure: StageCallFailed) -> None:
        """Count a failure. What is asked for again, and again, is asked for less and less often.

        Raises:
            StepError: It was one too many.
            Unreachable: It is this peer that has gone.
        """
        if self._link.transport.closed:
            raise failure.error
        self.num_failures += 1
        key = self._microbatch.key
        if self._since_s is None:
            self._since_s = now_s()
        repeated = isinstance(failure.error, (TicketGone, InputMissing))
        self._link.count["repeated" if repeated else "replaced"] += 1
        self._link.events.note(
            "retry", peer=failure.peer, stage=failure.stage, step=key.step, reason=str(failure.error)
        )
        self._repeats[failure.stage] += repeated
        trying_s = now_s() - self._since_s
        if trying_s > self._link.timeout and self._repeats[failure.stage] > _MAX_REPEATS:
            raise StepError(
                f"stage {failure.stage} did not finish {key} in {self._repeats[failure.stage]} attempts, "
                f"{trying_s:.0f} s; the last: {failure.error}"
            ) from failure.error
        if trying_s > self._link.timeout and self.num_failures > _MIN_FAILURES:
            raise StepError(
                f"no peer of stage {failure.stage} computed {key} in {self.num_failures} attempts, {trying_s:.0f} s; "
                f"the last: {failure.error}. Start more servers for that stage, or raise `Limits.call_timeout`."
            ) from failure.error
        if repeated and self._repeats[failure.stage] > 1:
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    async def _replace(self, failure: StageCallFailed) -> None:
        """Ban the peer that failed, and choose another one. One that nobody can replace is asked again if it lives."""
        if failure.stage in self._holders and not isinstance(failure.error, (Unreachable, NotMember)):
            self._repeats[failure.stage] += 1
            if self._repeats[failure.stage] <= _MAX_OF_A_HOLDER:
                return  # it lives: a message was lost, say
        self._link.ban(failure.stage, failure.peer, self._microbatch.key.step, failure.error)
        if self._calls.peer(failure.stage) == failure.peer:
            self._choose(failure.stage, failure.error)
        if isinstance(failure.error, DeadlineExceeded):
            await self._link.check_reachable(failure.peer)
        if self._link.is_empty(failure.stage):
            await self._link.wait_for(failure.stage, step=self._microbatch.key.step)
            self._since_s = None  # nobody was tried meanwhile
        if self._link.is_banned(failure.stage, self._calls.peer(failure.stage)):  # then all are
            await self._pause()

    def _choose(self, stage: int, error: PeerError) -> None:
        """Choose another peer for a stage, if there is another one."""
        peer = self._calls.peer(stage)
        if stage in self._holders:
            raise GradientHolderGone(peer, error) from error
        neighbours = {self._calls.peer(one) for one in (stage - 1, stage + 1) if 0 <= one <= self._calls.last_stage}
        apart = {one for pair in self._missed if neighbours.intersection(pair) for one in pair}
        avoid = frozenset({peer, *self._avoid, *(apart - neighbours)})
        self._calls.reroute(stage, avoid)

    def _part(self, failure: StageCallFailed, senders: list[int]) -> list[int]:
        """An input did not come, again: have another peer wait for it, or else another one send it.

        Returns:
            The stages that have another peer now; none the first time, when the senders are asked once more.
        """
        pair = (failure.peer, *(self._calls.peer(stage) for stage in senders))
        self._missed[pair] += 1
        if self._missed[pair] == 1:
            return []
        for stage in (failure.stage, *senders):
            if stage not in self._holders and self._link.others(stage, self._calls.peer(stage)):
                self._choose(stage, failure.error)
                return [stage]
        return []


class ForwardRecovery(Recovery):
    """Makes a route fit to be sent again, whole: what is done or under way is not done again."""

    async def mend(self, failure: StageCallFailed) -> None:
        """Find out who failed, and choose another one. Then all calls are to be sent again, in order.

        Raises:
            StepError: It was one failure too many.
        """
        if isinstance(failure.error, (InputMissing, DeadlineExceeded)):
            failure = await self._first() or failure  # those behind it only pass on what they got
        await self._note(failure)
        if isinstance(failure.error, InputMissing):
            self._part(failure, [failure.stage - 1] if failure.stage else [])
        elif not isinstance(failure.error, TicketGone):
            if isinstance(failure.error, DeadlineExceeded):
                await self._stop(failure)
            await self._replace(failure)
        for stage in range(self._calls.last_stage + 1):  # what others found out meanwhile
            if self._link.is_banned(stage, self._calls.peer(stage)):
                self._choose(stage, failure.error)

    async def _first(self) -> StageCallFailed | None:
        """Wait for one stage after the other; the first one that fails. Its time began when its input was there."""
        for stage in range(self._calls.last_stage + 1):
            try:
                await self._calls.wait(stage, "forward")
            except StageCallFailed as failure:
                return failure
        return None

    async def _stop(self, failure: StageCallFailed) -> None:
        try:
            await self._calls.cancel(failure.stage, "forward")
        except StageCallFailed:
            return  # then it is gone, and adds nothing in a forward anyway


class BackwardRecovery(Recovery):
    """Says what is to be sent again so that every stage's gradient is in one sum.

    Attributes:
        forwards: Stages whose forward is to be sent again, in their order, before the backwards.
        backwards: Stages whose backward is to be sent again, last first, with all that it takes to begin anew.
        done: Stages whose receipt is there.
    """

    forwards: set[int]
    backwards: set[int]
    done: set[int]
    _late: set[tuple[int, PeerId]]

    def __init__(
        self,
        link: PipelineContext,
        calls: StageCalls,
        microbatch: Microbatch,
        *,
        holders: Mapping[int, PeerId],
        avoid: frozenset[PeerId],
    ) -> None:
        super().__init__(link, calls, microbatch, holders=holders, avoid=avoid)
        self.forwards, self.backwards, self.done = set(), set(), set()
        self._late = set()

    async def mend(self, failure: StageCallFailed) -> None:
        """Find out what to send again, and to whom.

        Raises:
            HolderGone: The one peer that may do it failed.
            StepError: It was one failure too many.
        """
        await self._note(failure)
        stage, last = failure.stage, self._calls.last_stage
        if isinstance(failure.error, (GradientGone, GradientMissing)):
            # Each can be fetched once, so all of them are made anew, from the last one on. What that takes is there,
            # or its peer says what is not.
            self.backwards.update(range(stage, last + 1))
            self.done.difference_update(range(stage, last + 1))
            if isinstance(failure.error, GradientMissing):
                for moved in self._part(failure, [stage + 1] if stage < last else []):
                    self._moved(moved)
        elif isinstance(failure.error, (TicketGone, InputMissing)):
            self.forwards.update(range(stage))
            self.backwards.add(stage)
            if isinstance(failure.error, InputMissing):
                for moved in self._part(failure, [stage - 1] if stage else []):
                    self._moved(moved)
        elif isinstance(failure.error, DeadlineExceeded) and await self._added_late(failure):
            self.backwards.add(stage)  # its receipt counts; the gradient for the stage before went with the cancel
        else:
            await self._replace(failure)
            self._moved(stage)

    def _moved(self, stage: int) -> None:
        """A stage has another peer, which kept nothing; those before it wait for its gradient, and were told whose."""
        self.done.discard(stage)
        self.backwards.update(one for one in range(self._calls.gradient_end, stage + 1) if one not in self.done)
        if stage < self._calls.gradient_end:
            self.forwards.update(range(stage + 1))

    async def _added_late(self, failure: StageCallFailed) -> bool:
        """Stop a peer that is late; whether the gradient is in its sum. Late twice, it is as good as gone."""
        late = (failure.stage, failure.peer)
        if late in self._late or self._calls.peer(failure.stage) != failure.peer:
            return False
        self._late.add(late)
        try:
            return await self._calls.cancel(failure.stage, "backward")
        except StageCallFailed:
            return False
