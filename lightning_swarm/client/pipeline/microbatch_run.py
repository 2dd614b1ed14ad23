"""Runs one microbatch through the stages. All calls are sent at once, with tickets for inputs from other peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from msgspec.structs import replace as replace_fields

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.recovery import FIRST_PAUSE_S, LONGEST_PAUSE_S, BackwardRecovery, ForwardRecovery
from lightning_swarm.client.pipeline.replay_buffer import Microbatch, ReplayCopy
from lightning_swarm.client.pipeline.stage_calls import StageCallFailed, StageCalls
from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import DeadlineExceeded
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.tasks import gather, gather_bounded, nothing
from lightning_swarm.network import SMALL_BYTES, PeerId
from lightning_swarm.protocol import serialization

# Turns of the event loop between the starts of two microbatches, so that the first stage can begin as soon as the first
# microbatch has arrived. Microbatches small enough to travel inside calls are sent all at once, which is cheaper.
_TURNS_APART: Final = 4


class MicrobatchRun:
    """Runs one microbatch forward and backward through the stages."""

    def __init__(self, context: PipelineContext, microbatch: Microbatch) -> None:
        self.context = context
        self.microbatch = microbatch
        self.calls = StageCalls(context, microbatch)
        self._num_backwards = 0

    async def forward(self) -> tuple[serialization.Tree, list[bool]]:
        """Return the last stage's output, in wire form, and which of its tensors require grad."""
        calls, context = self.calls, self.context
        await context.wait_for_room()
        needs_backward = False
        with context.under_way():
            calls.route = [router.choose(self.microbatch.num_rows, now_s=now_s()) for router in context.routers]
            try:
                result = await context.with_memory(self._forward)
                needs_backward = self.microbatch.key.adds and calls.first_backward_stage <= calls.last_stage
            finally:
                if not needs_backward:
                    calls.release()
        return result

    async def _forward(self) -> tuple[serialization.Tree, list[bool]]:
        """Send the forwards of all stages, and replace peers that fail, until the last stage's result has arrived."""
        calls, context = self.calls, self.context
        began_s = now_s()
        recovery = ForwardRecovery(calls)
        while True:
            try:
                await _send_forwards(calls, in_order=recovery.num_failures > 0)
                result, report = await calls.fetch(calls.last_stage, "forward")
                took_s = now_s() - began_s
                if not recovery.num_failures:
                    context.durations.add(took_s)
                # After a failure it is uncertain which peers have sent these reports.
                reports = () if recovery.num_failures else (report, *report.others)
                context.note_forward(calls.route, reports, took_s=took_s, step=calls.step)
                return result
            except StageCallFailed as failure:
                await recovery.mend(failure)

    async def backward(
        self, gradients: serialization.Tree, *, adds: bool = True, on_accepted: Callable[[], Awaitable[None]] = nothing
    ) -> serialization.Tree:
        """Return the input's gradients if `Microbatch.input_grad` is set, otherwise None.

        With `adds`, every stage that trains adds its weights' gradients to its sum. `on_accepted` is called once all
        stages have accepted their backwards.
        """
        self._num_backwards += 1
        calls = self.calls if adds else self.calls.for_input_gradient(self._num_backwards)
        calls.gradients = gradients
        context, wants_input_gradient = self.context, self.microbatch.input_grad
        began_s, recompute = now_s(), self._num_backwards > 1

        async def run() -> serialization.Tree:
            nonlocal recompute
            backward = _BackwardRun(calls, wants_input_gradient=wants_input_gradient, recompute=recompute)
            recompute = True  # `with_memory` may run this twice, and the first run may have used up what peers kept
            result = await backward.run(on_accepted=on_accepted)
            if not backward.recovery.num_failures:
                context.durations.add(now_s() - began_s)
            return result

        with context.under_way():
            try:
                result = await context.with_memory(run)
                await gather(self._account_forward(stage) for stage in range(calls.first_backward_stage))
            finally:
                calls.release()
        if adds and calls.first_backward_stage <= calls.last_stage:
            await context.replay_buffer.keep(
                ReplayCopy(
                    microbatch=self.microbatch,
                    gradients=gradients,
                    route=[charge.peer for charge in calls.route],
                    evidence=calls.evidence,
                    replaced=frozenset(calls.replaced),
                )
            )
        return result

    def prepare_for_statistics(self) -> None:
        """Prepare a backward that computes no gradient: servers repeat the forward and add batch norm statistics."""
        microbatch = self.microbatch
        # `grad=True`, although no gradient is computed: servers refuse a backward without it.
        modes = [replace_fields(mode, grad=True, input_grad=False) for mode in microbatch.modes]
        self.microbatch = self.calls.microbatch = replace(microbatch, modes=modes)
        self._num_backwards += 1  # so that `backward` recomputes: peers may have kept no graph

    async def _account_forward(self, stage: int) -> None:
        """Wait for the forward's report of a stage without a backward. A failure now does not fail the microbatch."""
        try:
            report = await self.calls.wait(stage, "forward")
        except StageCallFailed as failure:
            self.context.eject(stage, failure.peer, self.microbatch.key.step, failure.error)
        else:
            self.calls.settle(stage, report)


def run_all(
    runtime: Runtime,
    works: Sequence[Coroutine[Any, Any, Any]],  # forwards or backwards of all microbatches of a call
    first: serialization.Tree,  # tensors of the first microbatch; their size decides `turns_apart`
    *others: Coroutine[Any, Any, None],  # run at the same time
    limit: int,  # microbatches under way at once
) -> list[Any]:
    """Run the microbatches of a call, and return their results in order."""
    results = gather_bounded(works, limit, turns_apart=turns_apart(first))
    coroutines: list[Coroutine[Any, Any, Any]] = [results, *others]
    return runtime.run(gather(coroutines))[0] if others else runtime.run(results)


def turns_apart(tensors: serialization.Tree) -> int:
    """Return the turns of the event loop between the starts of two microbatches that send such tensors."""
    return _TURNS_APART if sum(tensor.nbytes for tensor in serialization.flatten(tensors)[1]) > SMALL_BYTES else 0


async def replay(
    context: PipelineContext, copy: ReplayCopy, holders: Mapping[int, PeerId], avoid: frozenset[PeerId]
) -> None:
    """Compute a microbatch again, without the peers in `avoid`; its `holders` (stage -> peer) add its gradients."""
    microbatch = copy.microbatch
    calls = StageCalls(context, microbatch, holders)
    calls.gradients = copy.gradients
    for stage, (router, former) in enumerate(zip(context.routers, copy.route, strict=True)):
        if stage in holders:
            charge = router.charge(holders[stage], microbatch.num_rows)
        elif former in avoid or former not in router.peers or context.is_ejected(stage, former):
            charge = router.choose(microbatch.num_rows, now_s=now_s(), avoid=avoid)
        else:  # the peer that computed it may still hold its output
            charge = router.charge(former, microbatch.num_rows)
        calls.route.append(charge)
    backward = _BackwardRun(calls, wants_input_gradient=False, avoid=avoid)
    with context.under_way():
        try:
            await backward.run()
        finally:
            calls.release()


async def _send_forwards(calls: StageCalls, *, in_order: bool) -> None:
    """Send the forwards of all stages; replace busy peers, and resend the next stages' calls with the new source."""
    pause_s = FIRST_PAUSE_S
    context = calls.context
    deadline = now_s() + context.timeout
    avoid: list[set[PeerId]] = [set() for _ in context.routers]
    stages = list(range(calls.last_stage + 1))
    while True:
        if in_order:  # after a failure, a peer can begin again only after the peer before it
            accepted = [await calls.send_forward(stage) for stage in stages]
        else:
            accepted = await gather(calls.send_forward(stage) for stage in stages)
        busy = [stage for stage, ok in zip(stages, accepted, strict=True) if not ok]
        if not busy:
            return
        context.fault_counts["busy"] += len(busy)
        for stage in busy:
            avoid[stage].add(calls.peer(stage))
        if any(len(avoid[stage]) >= len(context.routers[stage].peers) for stage in busy):
            pause_s = await _pause(calls, pause_s, deadline)  # all peers are busy
        for stage in busy:
            context.routers[stage].refund(calls.route[stage])  # the busy peer refused the microbatch
            calls.reroute(stage, frozenset(avoid[stage]))
        stages = sorted({*busy, *(stage + 1 for stage in busy if stage < calls.last_stage)})


async def send_until_accepted(calls: StageCalls, stage: int) -> None:
    """Send a forward to the route's peer, repeatedly while the peer is busy."""
    pause_s = FIRST_PAUSE_S
    deadline = now_s() + calls.context.timeout
    while not await calls.send_forward(stage):
        calls.context.fault_counts["busy"] += 1
        pause_s = await _pause(calls, pause_s, deadline)


async def _pause(calls: StageCalls, pause_s: float, deadline: float) -> float:
    """Wait for a busy peer, and return the next pause in seconds."""
    if now_s() >= deadline:
        raise DeadlineExceeded(
            f"all peers of a stage were busy for {calls.context.timeout:g} s, and {calls.microbatch.key} still waits. "
            "Start more servers for that stage, or raise `Limits.call_timeout`."
        )
    await asyncio.sleep(pause_s)
    return min(2 * pause_s, LONGEST_PAUSE_S)


class _BackwardRun:
    """Runs the backward of a microbatch until the receipts of all stages have arrived."""

    def __init__(
        self,
        calls: StageCalls,
        *,
        wants_input_gradient: bool,
        recompute: bool = False,  # an earlier backward used up the tensors that peers kept
        avoid: frozenset[PeerId] = frozenset(),
    ) -> None:
        self._calls = calls
        self._replays = calls.holders is not None  # only replays have holders
        self._recomputes = self._replays or recompute
        self._wants_input_gradient = wants_input_gradient
        self.recovery = BackwardRecovery(calls, avoid)

    async def run(self, *, on_accepted: Callable[[], Awaitable[None]] = nothing) -> serialization.Tree:
        """Return the input's gradients in wire form, or None; await `on_accepted` once all stages have accepted."""
        calls, recovery = self._calls, self.recovery
        stages = range(calls.last_stage, calls.first_backward_stage - 1, -1)
        recovery.backwards.update(stages)
        if self._recomputes:
            recovery.forwards.update(range(calls.last_stage))
        sends_first, is_accepted = not self._recomputes, False  # a recomputation begins with `_send_again`
        while True:
            try:
                if sends_first:
                    sends_first = False
                    await gather(self._send_first(stage) for stage in stages)
                if recovery.forwards or recovery.backwards:
                    await self._send_again()
                if not is_accepted:
                    is_accepted = True
                    await on_accepted()
                if not recovery.num_failures and not self._replays:
                    recovery.done.update(await calls.receive_all())
                for stage in stages:
                    if stage not in recovery.done:
                        await calls.receive(stage)
                        recovery.done.add(stage)
                if not self._wants_input_gradient:
                    return None
                (gradients, _), _ = await calls.fetch(0, "backward")
                return gradients
            except StageCallFailed as failure:
                await recovery.mend(failure)

    async def _send_first(self, stage: int) -> None:
        await self._calls.send_backward(stage)
        self.recovery.backwards.discard(stage)

    async def _send_again(self) -> None:
        """Resend calls one by one, because a peer can begin again only after the peers that it depends on."""
        recovery = self.recovery
        # A peer that begins again needs the output of the stage before it, which may never have been requested.
        recovery.forwards.update(self._calls.unsent(max(recovery.backwards, default=0)))
        for stage in sorted(recovery.forwards):
            await send_until_accepted(self._calls, stage)
            recovery.forwards.discard(stage)
        for stage in sorted(recovery.backwards, reverse=True):
            await self._calls.send_backward(stage, recompute=True)
            recovery.backwards.discard(stage)
