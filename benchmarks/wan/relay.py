"""The published SWARM's way, as a mode: every tensor goes through the trainer, which calls one stage after the other.

The same servers, routers and microbatches in flight; but each output is fetched by the trainer, and goes from there, as
the first stage's input does, to the next stage. So do gradients.

Source: the code published with arXiv:2301.11913.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from typing_extensions import override

from lightning_swarm.client.pipeline import call_factory
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun
from lightning_swarm.core.tasks import nothing
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.calls import BackwardRequest, ComputeMode, ForwardRequest, StageReport
from lightning_swarm.protocol.rpc import BACKWARD, FORWARD


@dataclass
class Switch:
    """Decides whether microbatches that begin go through the trainer."""

    on: bool = False


# The package routes tensors in one way only, so it has no argument for another. `Relayed` builds on internals of the
# class that it replaces; tests/benchmarks/test_wan.py compares both ways.
def install() -> Switch:
    """Have this trainer's microbatches follow the switch that is returned."""
    switch = Switch()

    class Either(Relayed):
        """Relayed, or as they are."""

        relays = property(lambda self: switch.on)

    call_factory.MicrobatchRun = Either  # type: ignore[attr-defined]
    return switch


class Relayed(MicrobatchRun):
    """A microbatch whose tensors all go through the trainer. What fails is not mended."""

    relays = True

    @override
    async def _forward(self) -> tuple[serialization.Tree, list[bool]]:
        if not self.relays:
            return await super()._forward()
        calls = self.calls
        hidden: serialization.Tree = self.microbatch.inputs
        reports: list[StageReport] = []
        for stage in range(calls.last_stage + 1):
            await self._send_forward(stage, hidden)
            (output, flags), report = await calls.fetch(stage, "forward")
            hidden = (output,)
            reports.insert(0, report)
        self.context.note_forward(calls.route, reports, took_s=float("inf"), step=calls.step)
        return output, flags

    @override
    async def backward(
        self, gradients: serialization.Tree, *, adds: bool = True, on_accepted: Callable[[], Awaitable[None]] = nothing
    ) -> serialization.Tree:
        if not (self.relays and adds):
            return await super().backward(gradients, adds=adds, on_accepted=on_accepted)
        calls = self.calls
        with self.context.under_way():
            try:
                for stage in range(calls.last_stage, -1, -1):
                    await self._send_backward(stage, gradients)
                    (gradients, _), report = await calls.fetch(stage, "backward")
                    calls.settle(stage, report)
                await on_accepted()
            finally:
                calls.release()
        return gradients

    def _mode(self, stage: int) -> ComputeMode:
        """What comes to a later stage is an output that wants its gradient."""
        mode = self.microbatch.modes[stage]
        return msgspec.structs.replace(mode, input_grad=mode.grad) if stage else mode

    async def _send_forward(self, stage: int, hidden: serialization.Tree) -> None:
        structure, tensors = serialization.flatten((hidden, self.microbatch.extras[stage]))
        request = ForwardRequest(
            key=self.microbatch.key,
            stage_index=stage,
            mode=self._mode(stage),
            source=None,
            result_key=self.calls.result_name(stage, "forward")[1],
            structure=structure,
        )
        await self.context.send(self.calls.peer(stage), FORWARD, request, tensors)

    async def _send_backward(self, stage: int, gradients: serialization.Tree) -> None:
        structure, tensors = serialization.flatten((gradients, None))
        request = BackwardRequest(
            key=self.microbatch.key,
            stage_index=stage,
            mode=self._mode(stage),
            weight=self.microbatch.weight,
            accumulate=True,
            source=None,
            result_key=self.calls.result_name(stage, "backward")[1],
            structure=structure,
        )
        await self.context.send(self.calls.peer(stage), BACKWARD, request, tensors)
