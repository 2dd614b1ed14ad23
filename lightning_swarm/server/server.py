"""A server: holds one stage, or several, and computes them for the trainers that route microbatches through it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.core.errors import StepError
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import rpc
from lightning_swarm.protocol.messages.reports import HeldStage, MachineReport, ServerReport, StepReport
from lightning_swarm.protocol.messages.run import ReleaseRequest, RestartRequest, StageManifest
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.executor import FIRST
from lightning_swarm.server.gradients import WrittenByStage
from lightning_swarm.server.handlers import ComputeHandlers
from lightning_swarm.server.inference.handlers import SessionHandlers
from lightning_swarm.server.inference.host import RunSessionHost
from lightning_swarm.server.pending_work import IdleLinkWait
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.state_transfer.donor import Donor
from lightning_swarm.server.state_transfer.handlers import StateHandlers
from lightning_swarm.server.state_transfer.joiner import Joiner
from lightning_swarm.server.state_transfer.snapshots import Snapshots
from lightning_swarm.server.step_handlers import StepHandlers

_log = logging.getLogger(__name__)


class Server:
    """Builds and connects the parts of a server; moves them to a run's next generation, or out of the run."""

    def __init__(self, context: ServerContext, model: PeerModel) -> None:
        self._transport, self._tickets, self._executor = context.transport, context.tickets, context.executor
        self._tasks, self.events, self.membership = context.tasks, context.events, context.membership
        self.steps = StepHandlers(context)
        self.admission = Admission(context, model, self.steps)
        self.calls = ComputeHandlers(context, self.steps)
        self.steps.on_decided, self.steps.on_failed = self._on_decided, self._on_failed
        self.steps.on_fenced = self.calls.give_up
        self.membership.oversee = context.overseer(context, self.steps, lambda: self.admission.model)
        self.steps.rounds.idle_link = IdleLinkWait(self.calls.under_way, timeout=context.limits.call_timeout)
        host = RunSessionHost(context.membership, self.steps)
        self.sessions = SessionHandlers(context.transport, context.executor, context.limits, context.tasks, host)
        self.donor = Donor(context, self.steps)
        self.joiner = Joiner(context, self.admission, self.steps)
        self.snapshots = Snapshots(context, self.steps)
        self.admission.can_inherit = lambda version: version in self.snapshots.loops.versions
        StateHandlers(context, self.steps, on_loaded=self.admission.note_loaded)
        self.voter = self.admission.election.voter
        rpc.RESTART.serve(context.transport, self._handle_restart)
        rpc.RELEASE.serve(context.transport, self._handle_release)

    async def start(self) -> None:
        """Begin to answer calls."""
        await self._tasks.start()

    async def close(self) -> None:
        """Stop computing; raise the error of a task of this server, if any."""
        self.calls.close()
        try:
            await self.admission.election.close()
        finally:
            self._executor.close()
            self.snapshots.discard()
            await self.steps.rounds.close()
            await self._tasks.close()

    def report(self) -> ServerReport | None:
        """Report the server's state for users; None before there is a run."""
        if not self.admission.ready.is_set():
            return None
        run, device = self.membership.run, self.admission.model.device
        stages = run.manifest.stages
        # The stage of the layers around the pipeline, which trainers compute; None if there are no such layers.
        around = next((index for index, stage in enumerate(stages) if stage.on_trainers), None)
        parameters_around = stages[around].parameters if around is not None else []
        # `calls.num_samples` counts a sample once in each pipelined stage here.
        num_pipelined = sum(index != around for index in self.steps.stages)
        return ServerReport(
            lead=run.manifest.lead,
            coordinator=run.coordinator,
            num_stages=len(stages),
            stages=list(self.steps.stages),
            trainers_stage=around,
            first_step=run.manifest.first_step,
            step=self.steps.version,
            age_s=time.monotonic() - self.steps.began_s,
            num_samples=self.calls.num_samples // max(1, num_pipelined),
            queued=self._executor.queued,
            held=[_held(stage, stages[i]) for i, stage in self.steps.sums.stages.items() if not stage.on_trainers],
            around_parameters=sum(math.prod(shape) for _, shape, _ in parameters_around),
            machine=_describe_machine(device),
            peak_bytes=peak_bytes(device),
            newest=_newest_step(run.newest),
            compression=run.manifest.settings.compression,
            arithmetic=self.steps.sums.arithmetic,
        )

    # ------------------------------------------------------------------ the next generation, and out

    async def step_out(self, *, keeps_snapshots: bool = False) -> None:
        """Leave the run after a record that excludes this server; keep its stages, with which it can join again."""
        run = self.membership.run_or_none
        # The next run may admit this server only when this run has no job left here, even on the compute thread.
        async with self.admission.transition:
            if run is None or run is not self.membership.run_or_none:
                return
            holders = [len(roster) for roster in run.rosters]
            await self.admission.step_out()  # refuses calls of the run from now on
            await self.calls.under_way.abort_all()
            await self.steps.rounds.close()  # before dropping its tickets: the next run may reuse their names
            self.calls.discard_results("g")  # all results, whose names begin with "g" and the generation
            self.sessions.discard()
            stages = await self.steps.leave_run()
            self.donor.enter_generation()  # drops its followers
            if not keeps_snapshots:  # if kept, this server soon joins the same run again
                self.snapshots.discard()
            self.joiner.rejoin_with(stages, holders)

    async def release(self) -> None:
        """Leave a run for good, so that this server may be admitted to a run or join a run, as at its start."""
        await self.step_out()
        self.membership.trains_in = None  # peers of that run may not end this peer any more
        self.voter.void_promises()

    async def _handle_release(self, caller: PeerId, request: ReleaseRequest) -> None:
        """Leave a run that rolls back, to be admitted to its next generation; the trainer here rolls back, too."""
        if self.membership.has_run:  # unless the call is repeated
            self.membership.check_lead(caller, "releases its servers")
            self.membership.run.check_generation(request.generation)
            await self.release()
            self.admission.continues_at = request.first_step
            self.admission.released.set()
        else:
            self.membership.check_released_by(caller)

    async def _handle_restart(self, caller: PeerId, request: RestartRequest) -> None:
        """Enter the run's next generation. Nothing of the old generation is left when this returns."""
        async with self.admission.transition:
            old = self.membership.run.manifest.generation
            self.membership.enter_generation(caller, request)
            await self.admission.election.enter_generation()
            await self.calls.under_way.abort_all()
            self.calls.discard_results(f"g{old}.")
            self.sessions.discard()
            await self.steps.enter_generation()
            self.donor.enter_generation()
            self.snapshots.discard()

    def _on_decided(self, record: Record, gradients: Mapping[int, Tensor], written: WrittenByStage) -> None:
        """Report an applied record to the other parts, and free the results of its step."""
        self.calls.discard_results(f"g{record.closing.generation}.s{record.step}.")
        self.admission.on_record(record)
        self.donor.keep_record(record, gradients, written)
        if (work := self.snapshots.on_record(record)) is not None:
            self._tasks.spawn(work)
        if gradients.keys() - set(self.steps.stages):  # this server released a stage
            model, manifest, served = self.admission.model, self.membership.run.manifest, self.steps.stages
            # Queue the job now, so that memory is freed before another stage is built here.
            self._tasks.spawn(_awaited(self._executor.submit(FIRST, lambda: model.keep_only(manifest, served))))

    def _on_failed(self, failure: StepError) -> None:
        _log.error("This server leaves the run: %s", failure)
        self.admission.failure = failure
        self._tasks.spawn(self.step_out())
        self.admission.election.behind.set()  # wakes the task that waits for the end of this server


async def _awaited(job: asyncio.Future[Any]) -> None:
    await job


def _held(stage: Stage, manifest: StageManifest) -> HeldStage:
    parameters = stage.parameters.values()
    return HeldStage(
        index=stage.index,
        num_blocks=manifest.end_block - manifest.first_block,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=max((parameter.element_size() for parameter in parameters), default=4),
        samples_per_s=stage.load.samples_per_s,
        microbatch_size=stage.load.microbatch_size,
        costs=stage.computation.costs,
    )


def _newest_step(record: Record | None) -> StepReport | None:
    """Report the batches of the newest step; None if no step was decided, or the newest step counted no batch."""
    if record is None or not record.closing.batches:
        return None
    closing, portable = record.closing, record.portable or []
    return StepReport(num_samples=closing.num_samples, num_batches=len(closing.batches), portable=portable)


@cache
def _describe_machine(device: torch.device) -> MachineReport:
    """Describe a device and its machine, with all of their memory, used or free."""
    host_bytes: int | None = None
    with contextlib.suppress(AttributeError, OSError, ValueError):  # unknown on some systems
        host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        return MachineReport(processor="accelerator", memory_bytes=memory_bytes, host_memory_bytes=host_bytes)
    if device.type == "cpu":
        return MachineReport(processor="cpu", memory_bytes=host_bytes)
    return MachineReport(processor="accelerator", host_memory_bytes=host_bytes)


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest amount of device memory that this process held at once, in bytes; None: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        # Not from `getrusage`, where a child process begins with its parent's peak.
        match = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(match[1]) * 1024 if match else None
    except OSError:  # not Linux
        return None


def describe_peak(device: torch.device) -> str:
    """Return a space and a sentence with `peak_bytes`, or an empty text if it is unknown."""
    num_bytes = peak_bytes(device)
    return f" It took at most {num_bytes / 1e9:.2f} GB of memory here." if num_bytes is not None else ""
