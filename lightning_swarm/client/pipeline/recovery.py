"""Recovers a microbatch from a peer's failure: finds the peer at fault, replaces it, and lists the calls to resend."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from lightning_swarm.client.pipeline.context import Refusal
from lightning_swarm.client.pipeline.stage_calls import StageCallFailed, StageCalls
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import (
    DeadlineExceeded,
    GradientGone,
    GradientMissing,
    InputMissing,
    NotMember,
    OutOfMemory,
    PeerError,
    StepError,
    TicketGone,
    Unreachable,
)
from lightning_swarm.network import PeerId

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
# A microbatch is given up when it exceeds either number and the call timeout has passed.
_MAX_REPEATS: Final = 8  # repeated requests at one stage
_MAX_FAILURES: Final = 8  # failures at all stages together

_MAX_HOLDER_REPEATS: Final = 2  # times that a living holder is asked again


class GradientHolderGone(PeerError):
    """Raised if the holder that a replay names for a gradient did not add it. No other peer may take its place."""

    def __init__(self, peer: PeerId, error: PeerError) -> None:
        super().__init__(f"{peer} must hold a gradient, but did not add it: {error}")
        self.peer = peer


# A peer that is gone or silent, refuses a call or sends malformed answers is ejected and replaced. A late but living
# peer first gets a cancel request; if it has already added the gradient, the gradient counts. A peer whose input never
# arrived is not at fault: its sender is asked again, and then another pair of peers is tried. Ledgers make repeated
# requests harmless: a peer that is asked twice adds once, and the closing names one holder for each gradient.
@dataclass
class Recovery:
    """Counts failures and replaces peers, in forwards and backwards."""

    calls: StageCalls
    avoid: frozenset[PeerId] = frozenset()  # peers known to be gone
    num_failures: int = 0
    _failing_since_s: float | None = None  # time of the first failure, or of the first after the last wait for servers
    _pause_s: float = FIRST_PAUSE_S
    _repeats: Counter[int] = field(default_factory=Counter)  # stage -> requests that were repeated
    _missing_inputs: Counter[tuple[PeerId, ...]] = field(default_factory=Counter)  # (receiver, *senders) -> failures

    def __post_init__(self) -> None:
        self.context, self.microbatch = self.calls.context, self.calls.microbatch
        self.holders = self.calls.holders or {}  # stage -> peer that no other peer may replace

    async def _count(self, failure: StageCallFailed) -> None:
        """Count a failure; raise `StepError` after too many. Pause before repeated requests, longer each time."""
        if self.context.transport.closed:  # this peer itself is closed
            raise failure.error
        self.num_failures += 1
        key = self.microbatch.key
        if self._failing_since_s is None:
            self._failing_since_s = now_s()
        if isinstance(failure.error, DeadlineExceeded):
            self.context.durations.extend()  # doubles deadlines, because all peers may have become slower
        is_repeat = isinstance(failure.error, (TicketGone, InputMissing))  # the peer itself is not at fault
        self.context.fault_counts["repeated" if is_repeat else "replaced"] += 1
        self.context.events.note(
            "retry", peer=failure.peer, stage=failure.stage, step=key.step, reason=str(failure.error)
        )
        if isinstance(failure.error, Refusal) and isinstance(failure.error.error, OutOfMemory):
            reason = str(failure.error.error)
            self.context.events.log_only(
                "out_of_memory", peer=failure.peer, stage=failure.stage, step=key.step, reason=reason
            )
        self._repeats[failure.stage] += is_repeat
        trying_s = now_s() - self._failing_since_s
        if trying_s > self.context.timeout and self._repeats[failure.stage] > _MAX_REPEATS:
            raise StepError(
                f"stage {failure.stage} did not finish {key} in {self._repeats[failure.stage]} attempts, "
                f"{trying_s:.0f} s; the last error: {failure.error}"
            ) from failure.error
        if trying_s > self.context.timeout and self.num_failures > _MAX_FAILURES:
            raise StepError(
                f"no peer of stage {failure.stage} computed {key} in {self.num_failures} attempts, {trying_s:.0f} s; "
                f"the last error: {failure.error}. Start more servers for that stage, or raise `Limits.call_timeout`."
            ) from failure.error
        if is_repeat and self._repeats[failure.stage] > 1:
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    async def _replace(self, failure: StageCallFailed) -> None:
        """Eject and replace the peer that failed; a living holder is asked again first."""
        if failure.stage in self.holders and not isinstance(failure.error, (Unreachable, NotMember)):
            self._repeats[failure.stage] += 1
            if self._repeats[failure.stage] <= _MAX_HOLDER_REPEATS:
                return  # perhaps a message was lost
        self.context.eject(failure.stage, failure.peer, self.microbatch.key.step, failure.error)
        self.calls.replaced.add((failure.stage, failure.peer))
        if self.calls.peer(failure.stage) == failure.peer:
            self._choose(failure.stage, failure.error)
        if isinstance(failure.error, DeadlineExceeded):
            await self.context.check_reachable(failure.peer)
        if self.context.is_empty(failure.stage):
            await self.context.wait_for_stage(failure.stage, step=self.microbatch.key.step)
            self._failing_since_s = None  # no peer was tried during the wait
        if self.context.is_ejected(failure.stage, self.calls.peer(failure.stage)):  # then all peers of the stage are
            await self._pause()

    def _choose(self, stage: int, error: PeerError) -> None:
        """Choose another peer for a stage; avoid peers whose exchange of an input with a neighbouring stage failed."""
        peer = self.calls.peer(stage)
        if stage in self.holders:
            raise GradientHolderGone(peer, error) from error
        neighbours = {self.calls.peer(near) for near in (stage - 1, stage + 1) if 0 <= near <= self.calls.last_stage}
        unconnected = {member for pair in self._missing_inputs if neighbours.intersection(pair) for member in pair}
        avoid = frozenset({peer, *self.avoid, *(unconnected - neighbours)})
        self.calls.reroute(stage, avoid)

    def _separate(self, failure: StageCallFailed, senders: list[int]) -> int | None:
        """Replace the receiver or a sender of an input that was missing twice; return the replaced peer's stage."""
        pair = (failure.peer, *(self.calls.peer(stage) for stage in senders))
        self._missing_inputs[pair] += 1
        if self._missing_inputs[pair] == 1:  # the caller asks the senders once more
            return None
        for stage in (failure.stage, *senders):
            if stage not in self.holders and self.context.has_other_peer(stage, self.calls.peer(stage)):
                self._choose(stage, failure.error)
                return stage
        return None


class ForwardRecovery(Recovery):
    """Repairs a route so that all forwards can be sent again. Peers repeat no call that is done or under way."""

    async def mend(self, failure: StageCallFailed) -> None:
        """Find and replace the peer that failed. The caller then sends all calls again, in order."""
        if isinstance(failure.error, (InputMissing, DeadlineExceeded)):
            failure = await self._first_failure() or failure  # later stages only pass on earlier failures
        await self._count(failure)
        if isinstance(failure.error, InputMissing):
            self._separate(failure, [failure.stage - 1] if failure.stage else [])
        elif not isinstance(failure.error, TicketGone):
            if isinstance(failure.error, DeadlineExceeded):
                with contextlib.suppress(StageCallFailed):  # a forward adds nothing, so a failed cancel is harmless
                    await self.calls.cancel(failure.stage, "forward")
            await self._replace(failure)
        for stage in range(self.calls.last_stage + 1):  # other microbatches may have found more failures
            if self.context.is_ejected(stage, self.calls.peer(stage)):
                self._choose(stage, failure.error)

    async def _first_failure(self) -> StageCallFailed | None:
        """Wait for each stage in turn, and return the first failure. A stage's time begins with its input."""
        for stage in range(self.calls.last_stage + 1):
            try:
                await self.calls.wait(stage, "forward")
            except StageCallFailed as failure:
                return failure
        return None


@dataclass
class BackwardRecovery(Recovery):
    """Lists the calls to resend so that every stage's gradient is in exactly one sum."""

    forwards: set[int] = field(default_factory=set)  # stages whose forward must be resent, in order, before backwards
    backwards: set[int] = field(default_factory=set)  # stages whose backward must be resent, last first
    done: set[int] = field(default_factory=set)  # stages whose receipt has arrived
    _late: set[tuple[int, PeerId]] = field(default_factory=set)  # (stage, peer) that missed a deadline once

    async def mend(self, failure: StageCallFailed) -> None:
        """Find the calls to resend, and their peers. Raise `GradientHolderGone` if a holder failed."""
        await self._count(failure)
        stage, last = failure.stage, self.calls.last_stage
        if isinstance(failure.error, (GradientGone, GradientMissing)):
            # Each gradient can be fetched once, so all later stages compute their gradients again. Their peers still
            # hold the inputs, or report which are missing.
            self.backwards.update(range(stage, last + 1))
            self.done.difference_update(range(stage, last + 1))
            if isinstance(failure.error, GradientMissing):
                self._note_replaced(self._separate(failure, [stage + 1] if stage < last else []))
        elif isinstance(failure.error, (TicketGone, InputMissing)):
            self.forwards.update(range(stage))
            self.backwards.add(stage)
            if isinstance(failure.error, InputMissing):
                self._note_replaced(self._separate(failure, [stage - 1] if stage else []))
        elif isinstance(failure.error, DeadlineExceeded) and await self._cancel_late(failure):
            self.backwards.add(stage)  # the receipt counts, but the cancel dropped the gradient for the stage before
        else:
            await self._replace(failure)
            self._note_replaced(stage)

    def _note_replaced(self, stage: int | None) -> None:
        """List calls to resend: the stage's new peer has nothing, and earlier stages wait for the former peer."""
        if stage is None:
            return
        self.done.discard(stage)
        self.backwards.update(set(range(self.calls.first_backward_stage, stage + 1)) - self.done)
        if stage < self.calls.first_backward_stage:
            self.forwards.update(range(stage + 1))

    async def _cancel_late(self, failure: StageCallFailed) -> bool:
        """Cancel a late call once; return True if its gradient is in the sum. A peer late twice counts as gone."""
        late = (failure.stage, failure.peer)
        if late in self._late or self.calls.peer(failure.stage) != failure.peer:
            return False
        self._late.add(late)
        try:
            return await self.calls.cancel(failure.stage, "backward")
        except StageCallFailed:
            return False
