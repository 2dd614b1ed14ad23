"""The passage of one microbatch through the stages: all calls sent at once, linked by tickets.

Every decision about the microbatch (which peers, what to send again) is made here and in `recovery`. While nothing
fails, a passage is as many exchanges as it has calls, and one for each result that it wants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.recovery import BackwardRecovery, ForwardRecovery, GradientHolderGone
from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ReplayCopy
from lightning_swarm.client.pipeline.stage_calls import StageCallFailed, StageCalls
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded, LeaseRevoked, ProtocolError, StepError, TicketGone
from lightning_swarm.core.tasks import gather, gather_bounded
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import from_message
from lightning_swarm.protocol.messages.calls import CallKey, Receipt, StageReport
from lightning_swarm.protocol.messages.step import Replay, ReplayReply, ReplayRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import REPLAY
from lightning_swarm.protocol.run_state import RunState

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_MOMENT_S = 1.0


async def _nothing() -> None:
    """Nobody wants to know."""


class MicrobatchRun:
    """One microbatch on its way.

    Args:
        link: Network and routers.
        microbatch: What goes through the stages.
    """

    def __init__(self, link: PipelineContext, microbatch: Microbatch) -> None:
        self.link = link
        self.microbatch = microbatch
        self._calls = StageCalls(link, microbatch)

    async def forward(self) -> tuple[serialization.Tree, list[bool]]:
        """The output of the last stage, as it travels, and which of its tensors require grad.

        Raises:
            StepError: No way through was found.
            StageError: The model's own.
        """
        calls, link = self._calls, self.link
        await link.room()
        comes_back = False
        with link.passing():
            calls.route = [router.choose(self.microbatch.num_rows, now_s=now_s()) for router in link.routers]
            try:
                found = await self._forward()
                comes_back = calls.gradient_end <= calls.last_stage
            finally:
                if not comes_back:
                    calls.release()
        return found

    async def _forward(self) -> tuple[serialization.Tree, list[bool]]:
        calls, link = self._calls, self.link
        began_s = now_s()
        sender = _ForwardSender(link, calls, self.microbatch)
        recovery = ForwardRecovery(link, calls, self.microbatch)
        while True:
            try:
                await sender.send_forwards(list(range(calls.last_stage + 1)), in_order=recovery.num_failures > 0)
                message, report = await calls.fetch(calls.last_stage, "forward")
                for charge in calls.route:
                    link.heard(charge.peer, step=calls.step)
                # After a failure it is not sure whose reports these are.
                self._learn(() if recovery.num_failures else (report, *report.others), took_s=now_s() - began_s)
                return from_message(message)
            except StageCallFailed as failure:
                await recovery.mend(failure)

    def _learn(self, reports: Sequence[StageReport], *, took_s: float) -> None:
        """By the forwards' times route those that come next: their backwards may come long after.

        Of other stages these are hearsay: none is believed to have taken longer than all together, `took_s`.
        """
        route = self._calls.route
        known = len(reports) == len(route)
        times = [min(report.busy_s, took_s) for report in reversed(reports)] if known else [None] * len(route)
        for router, charge, busy_s in zip(self.link.routers, route, times, strict=True):
            router.note_forward(charge, busy_s=busy_s)

    async def backward(
        self, gradients: serialization.Tree, *, sent: Callable[[], Awaitable[None]] = _nothing
    ) -> serialization.Tree:
        """Have every stage add its gradients; returns the input's gradients if the mode asks for them.

        Args:
            gradients: For each output tensor its gradient or None, as they travel.
            sent: Called once, when all stages have accepted their calls.

        Raises:
            LeaseRevoked: The batch was struck from its step.
            StepError: No way through was found.
            StageError: The model's own.
        """
        calls, link = self._calls, self.link
        calls.gradients = gradients
        way_back = _BackwardRun(link, calls, self.microbatch, wants_input_gradient=self.microbatch.mode.input_grad)
        with link.passing():
            try:
                found = await way_back.go(sent=sent)
                await gather(self._account_forward(stage) for stage in range(calls.gradient_end))
            finally:
                calls.release()
        if calls.gradient_end <= calls.last_stage:
            route = [charge.peer for charge in calls.route]
            await link.copies.keep(ReplayCopy(microbatch=self.microbatch, gradients=gradients, route=route))
        return found

    async def _account_forward(self, stage: int) -> None:
        """Of a stage without a backward. It did its part: what becomes of it now is no matter of this passage."""
        try:
            report = await self._calls.wait(stage, "forward")
        except StageCallFailed as failure:
            self.link.ban(stage, failure.peer, self.microbatch.key.step, failure.error)
        else:
            _settle(self.link, self._calls, stage, report)


async def replay(
    link: PipelineContext, copy: ReplayCopy, holders: Mapping[int, PeerId], avoid: frozenset[PeerId]
) -> None:
    """Compute a microbatch again, so that those who shall hold its gradients add them.

    Args:
        link: Network and routers.
        copy: Of the microbatch.
        holders: By stage.
        avoid: They are gone.

    Raises:
        HolderGone: One of the holders did not do it.
        StepError: No way through the other stages was found.
    """
    microbatch = copy.microbatch
    calls = StageCalls(link, microbatch, holders)
    calls.gradients = copy.gradients
    for stage, (router, before) in enumerate(zip(link.routers, copy.route, strict=True)):
        if stage in holders:
            charge = router.charge(holders[stage], microbatch.num_rows)
        elif before in avoid or before not in router.peers or link.is_banned(stage, before):
            charge = router.choose(microbatch.num_rows, now_s=now_s(), avoid=avoid)
        else:  # who computed it may hold its output still
            charge = router.charge(before, microbatch.num_rows)
        calls.route.append(charge)
    way_back = _BackwardRun(link, calls, microbatch, wants_input_gradient=False, holders=holders, avoid=avoid)
    with link.passing():
        try:
            await way_back.go(anew=True)
        finally:
            calls.release()


class _ForwardSender:
    """Sends forwards, and finds a place for those that meet busy peers."""

    def __init__(self, link: PipelineContext, calls: StageCalls, microbatch: Microbatch) -> None:
        self._link = link
        self._calls = calls
        self._microbatch = microbatch

    async def send_forwards(self, stages: list[int], *, in_order: bool) -> None:
        """Send the calls of `stages`; a busy peer is replaced, and who was to fetch from it is told anew.

        Args:
            stages: In their order.
            in_order: One after the other: who is told to begin again finds that the one before it has begun.
        """
        pause_s = _FIRST_PAUSE_S
        deadline = now_s() + self._link.timeout
        avoid: list[set[PeerId]] = [set() for _ in self._link.routers]
        while stages:
            if in_order:
                accepted = [await self._calls.send_forward(stage) for stage in stages]
            else:
                accepted = await gather(self._calls.send_forward(stage) for stage in stages)
            busy = [stage for stage, ok in zip(stages, accepted, strict=True) if not ok]
            if not busy:
                return
            self._link.count["busy"] += len(busy)
            for stage in busy:
                avoid[stage].add(self._calls.peer(stage))
            if any(len(avoid[stage]) >= len(self._link.routers[stage].peers) for stage in busy):
                pause_s = await self._pause(pause_s, deadline)  # everyone is busy: wait for one
            stages = self._reroute(busy, avoid)

    async def send_forward(self, stage: int) -> None:
        """Send one call to the peer that is on the route, as soon as it takes it."""
        pause_s = _FIRST_PAUSE_S
        deadline = now_s() + self._link.timeout
        while not await self._calls.send_forward(stage):
            self._link.count["busy"] += 1
            pause_s = await self._pause(pause_s, deadline)

    async def _pause(self, pause_s: float, deadline: float) -> float:
        """Wait for a busy peer; returns how long to wait the next time."""
        if now_s() >= deadline:
            raise DeadlineExceeded(
                f"all peers of a stage were busy for {self._link.timeout:g} s; {self._microbatch.key} waits"
            )
        await asyncio.sleep(pause_s)
        return min(2 * pause_s, _LONGEST_PAUSE_S)

    def _reroute(self, busy: list[int], avoid: list[set[PeerId]]) -> list[int]:
        """Choose other peers for `busy`; returns all stages whose call must be sent (again)."""
        for stage in busy:
            self._link.routers[stage].refund(self._calls.route[stage])
            self._calls.reroute(stage, frozenset(avoid[stage]))
        return sorted({*busy, *(stage + 1 for stage in busy if stage < self._calls.last_stage)})


class _BackwardRun:
    """The backward of a microbatch: each stage's receipt, and what is sent again until all are there."""

    def __init__(
        self,
        link: PipelineContext,
        calls: StageCalls,
        microbatch: Microbatch,
        *,
        wants_input_gradient: bool,
        holders: Mapping[int, PeerId] | None = None,
        avoid: frozenset[PeerId] = frozenset(),
    ) -> None:
        self._link = link
        self._calls = calls
        self._replays = holders is not None
        self._wants_input_gradient = wants_input_gradient
        self._sender = _ForwardSender(link, calls, microbatch)
        self._recovery = BackwardRecovery(link, calls, microbatch, holders=holders or {}, avoid=avoid)

    async def go(self, *, anew: bool = False, sent: Callable[[], Awaitable[None]] = _nothing) -> serialization.Tree:
        """Returns the input's gradients, as they travel, or None where they are not wanted.

        Args:
            anew: No forward went before it.
            sent: As in `MicrobatchRun.backward`.
        """
        is_told = False
        calls, recovery = self._calls, self._recovery
        stages = range(calls.last_stage, calls.gradient_end - 1, -1)
        if anew:
            recovery.forwards.update(range(calls.last_stage))
            recovery.backwards.update(stages)
        has_begun = anew
        while True:
            try:
                if not has_begun:
                    has_begun = True
                    recovery.backwards.update(stages)
                    await gather(self._send_first(stage) for stage in stages)
                await self._send_again()
                if not is_told:
                    is_told = True
                    await sent()
                if not recovery.num_failures and not self._replays:
                    await self._receive_all()
                for stage in stages:
                    if stage not in recovery.done:
                        await self._receive(stage)
                return await self._input_gradient() if self._wants_input_gradient else None
            except StageCallFailed as failure:
                await recovery.mend(failure)

    async def _send_first(self, stage: int) -> None:
        await self._calls.send_backward(stage)
        self._recovery.backwards.discard(stage)

    async def _send_again(self) -> None:
        """One after the other: who is told to begin again finds that those it depends on have begun."""
        recovery = self._recovery
        # Who begins anew needs the output of the stage before it, and nobody waits for what was never asked for.
        recovery.forwards.update(self._calls.untold(max(recovery.backwards, default=0)))
        for stage in sorted(recovery.forwards):
            await self._sender.send_forward(stage)
            recovery.forwards.discard(stage)
        for stage in sorted(recovery.backwards, reverse=True):
            await self._calls.send_backward(stage, recompute=True)
            recovery.backwards.discard(stage)

    async def _receive_all(self) -> None:
        """Wait for the stage that ends last: its receipt comes with those of the others.

        If it does not come as long as one stage may take, each is asked for its own, to find whose it is.
        """
        calls, link = self._calls, self._link
        stages = range(calls.gradient_end, calls.last_stage + 1)
        if len(stages) < 2:
            return
        patience_s = link.patience_s(calls.last_stage, calls.route[calls.last_stage])
        try:
            report = await calls.wait(calls.gradient_end, "backward", timeout=patience_s)
        except StageCallFailed as failure:
            if isinstance(failure.error, DeadlineExceeded):  # the last stage has had its time
                await self._receive(calls.last_stage, timeout=_MOMENT_S)
            return
        reports = [report, *report.others]
        if [one.receipt for one in reports] != [calls.accumulates(stage) for stage in stages]:
            return
        for stage, one in zip(stages, reports, strict=True):
            _settle(link, calls, stage, one)
            self._recovery.done.add(stage)

    async def _receive(self, stage: int, *, timeout: float | None = None) -> None:
        """Wait for a stage's receipt, `timeout` seconds at most, or as long as its peer may take."""
        calls = self._calls
        report = await calls.wait(stage, "backward", timeout=timeout)
        if report.receipt != calls.accumulates(stage):
            peer = calls.peer(stage)
            if not self._replays:
                raise ProtocolError(f"{peer} finished stage {stage} with a receipt too few or too many")
            if not report.receipt:  # what is there is of a replay in which it was to add nothing
                await calls.cancel(stage, "backward")
                raise StageCallFailed(stage, peer, TicketGone("the gradient was computed, and not added"))
        _settle(self._link, calls, stage, report)
        self._recovery.done.add(stage)

    async def _input_gradient(self) -> serialization.Tree:
        message, _ = await self._calls.fetch(0, "backward")
        return from_message(message)[0]


def _settle(link: PipelineContext, calls: StageCalls, stage: int, report: StageReport) -> None:
    link.routers[stage].settle(calls.route[stage], busy_s=report.busy_s, queued=report.queued)
    link.heard(calls.peer(stage), step=calls.step)


class Replayer:
    """Answers `REPLAY` on the swarm's loop, whatever the main thread does.

    Args:
        link: Of this trainer's passages; its copies are what is sent.
        run: The run as this trainer knows it.
        max_in_flight: Microbatches under way at once.
    """

    def __init__(self, link: PipelineContext, run: RunState, *, max_in_flight: int) -> None:
        self._link = link
        self._run = run
        self._max_in_flight = max_in_flight
        self._one_by_one = asyncio.Lock()
        link.transport.handle_call(REPLAY, self._handle)

    async def _handle(self, caller: PeerId, body: bytes) -> bytes:
        if caller not in self._run.servers:
            raise ProtocolError(f"only servers of the run ask for replays, and {caller} is none")
        request = decode(body, ReplayRequest)
        self._run.check_generation(request.generation)
        for one in request.work:
            if not one.holders or max(one.holders) >= len(self._link.routers):
                raise ProtocolError(
                    f"a replay must name holders in some of the {len(self._link.routers)} stages, got {one.holders}"
                )
        # Over whole passages: a request that is repeated then finds all done, where two passages of one microbatch at
        # once would give up each other's calls. Each has its deadline, and nothing that it waits for asks for a replay.
        async with self._one_by_one:
            lost, unreached = set[Receipt](), set[PeerId]()
            works = [self._replay(request, one, lost, unreached) for one in request.work]
            await gather_bounded(works, self._max_in_flight)
        return encode(ReplayReply(lost=sorted(lost), unreached=sorted(unreached)))

    async def _replay(self, request: ReplayRequest, one: Replay, lost: set[Receipt], unreached: set[PeerId]) -> None:
        """Do one of them; note what cannot be done."""
        copy = await self._link.copies.find(CallKey.of(request, one.receipt))
        if copy is None:
            lost.add(one.receipt)
            return
        try:
            await replay(self._link, copy, one.holders, frozenset(request.avoid))
        except GradientHolderGone as error:
            unreached.add(error.peer)
        except LeaseRevoked as error:  # the sums are frozen anew, or by another: it is asked for again, if it is missed
            self._link.events.note("retry", step=request.step, reason=str(error))
        except StepError as error:  # no way leads through the stages above: it will not be in this step
            self._link.events.note("retry", step=request.step, reason=str(error))
            lost.add(one.receipt)
