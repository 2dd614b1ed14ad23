"""A server: holds one stage, or several, and computes them for whoever routes microbatches through it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.coordinator import consensus
from lightning_swarm.coordinator.consensus import Voter
from lightning_swarm.core.limits import Limits
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.protocol.events import EventLog
from lightning_swarm.protocol.messages.reports import HeldStage, MachineReport, ServerReport, StepReport
from lightning_swarm.protocol.messages.run import ReleaseRequest, RestartRequest, StageManifest
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.messages.wire import decode
from lightning_swarm.protocol.methods import RELEASE, RESTART
from lightning_swarm.protocol.tickets import TicketStore
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.handlers import ComputeHandlers
from lightning_swarm.server.pending_work import IdleLinkWait
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.server.state_transfer.donor import Donor
from lightning_swarm.server.state_transfer.handlers import CheckpointHandlers, EvaluationWeightHandlers, StateHandlers
from lightning_swarm.server.state_transfer.joiner import Joiner
from lightning_swarm.server.state_transfer.snapshots import Snapshots
from lightning_swarm.server.step_handlers import StepHandlers


@cache
def describe(device: torch.device) -> MachineReport:
    """The machine around a device. Memory is all that there is, whoever uses it."""
    host_bytes = _host_bytes()
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
        return MachineReport(processor="accelerator", memory_bytes=memory_bytes, host_memory_bytes=host_bytes)
    if device.type == "cpu":
        return MachineReport(processor="cpu", memory_bytes=host_bytes)
    return MachineReport(processor="accelerator", host_memory_bytes=host_bytes)


def peak_bytes(device: torch.device) -> int | None:
    """What of a device's memory this process has held at once, at most; None: that cannot be told.

    On a GPU that is what torch had allocated there. On a CPU it is all of the process, Python and libraries included.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _peak_resident_bytes() if device.type == "cpu" else None


def describe_peak(device: torch.device) -> str:
    """The same as a sentence, after a space; nothing where it cannot be told."""
    num_bytes = peak_bytes(device)
    return f" It took at most {num_bytes / 1e9:.2f} GB of memory here." if num_bytes is not None else ""


def _peak_resident_bytes() -> int | None:
    try:
        # Not by `getrusage`: there a child begins with what its parent held.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    except OSError:  # not Linux
        return None


def _host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system says so
        return None


def held(stages: Iterable[Stage], manifests: Sequence[StageManifest]) -> list[HeldStage]:
    """The stages that microbatches go through, and what these take there."""
    return [_held(stage, manifests[stage.index]) for stage in stages if not stage.on_trainers]


def _held(stage: Stage, manifest: StageManifest) -> HeldStage:
    parameters = stage.parameters.values()
    return HeldStage(
        index=stage.index,
        num_blocks=manifest.end_block - manifest.first_block,
        num_parameters=sum(one.numel() for one in parameters),
        weight_bytes=max((one.element_size() for one in parameters), default=4),
        samples_per_s=stage.load.samples_per_s,
        microbatch_size=stage.load.microbatch_size,
        costs=stage.computation.costs,
    )


def newest(record: Record | None) -> StepReport | None:
    """What the newest step was made of, if one was decided, and counted something."""
    if record is None or not record.closing.batches:
        return None
    return StepReport(num_samples=record.closing.num_samples, num_batches=len(record.closing.batches))


def num_parameters(stage: StageManifest) -> int:
    """Of a stage, as the manifest has it."""
    return sum(_product(shape) for _, shape, _ in stage.parameters)


def _product(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


_log = logging.getLogger(__name__)


class Server:
    """Answers the calls of the data plane; `StepHandlers` answers those of the steps, `Admission` those around them.

    Args:
        transport: Its network.
        tickets: Where its results wait to be fetched.
        executor: Computes, one job at a time.
        model: Its copy of the model.
        boot_id: Of this process's life.
        limits: Bounds.
        events: Of this peer.
        connect: Makes the run's other servers reachable.
        announce: Tells those who come later who coordinates the run.
        hosts: Whom this peer was told to join. They may end it while no run has it.
    """

    def __init__(
        self,
        transport: Transport,
        tickets: TicketStore,
        executor: Executor,
        model: PeerModel,
        *,
        boot_id: int,
        limits: Limits,
        events: EventLog,
        connect: Callable[[], Awaitable[None]],
        announce: Callable[[PeerId], Awaitable[None]],
        hosts: Collection[PeerId] = (),
    ) -> None:
        self._transport = transport
        self._tickets = tickets
        self._executor = executor
        self._limits = limits
        self.events = events
        self._tasks = TaskOwner()
        self.stepping = StepHandlers(
            transport,
            tickets,
            executor,
            boot_id=boot_id,
            timeout=limits.call_timeout,
            events=events,
            on_decided=self._take_leave_of,
            on_fenced=self._give_up,
        )
        self.admission = Admission(
            transport,
            executor,
            model,
            self.stepping,
            boot_id=boot_id,
            limits=limits,
            events=events,
            connect=connect,
            announce=announce,
            hosts=hosts,
        )
        self.calls = ComputeHandlers(
            transport, tickets, executor, self.admission, self.stepping, spawn=self._tasks.spawn, limits=limits
        )
        self.stepping.rounds.lull = IdleLinkWait(self.calls.under_way, timeout=limits.call_timeout)
        self.donor = Donor(transport, executor, self.admission, self.stepping, limits=limits)
        self.joiner = Joiner(transport, tickets, executor, model, self.admission, self.stepping, limits=limits)
        self.snapshots = Snapshots(transport, executor, self.admission, self.stepping, limits=limits)
        self.admission.can_inherit = lambda version: version in self.snapshots.loops.versions
        StateHandlers(transport, executor, self.admission, self.stepping, max_bytes=limits.max_message_bytes)
        CheckpointHandlers(transport, executor, self.admission, self.stepping)
        EvaluationWeightHandlers(transport, executor, self.admission, self.stepping, max_bytes=limits.max_message_bytes)
        self.voter = Voter(boot_id)
        consensus.serve(self.voter, transport, self.admission.serves_with)
        transport.handle_call(RESTART, self._handle_restart)
        transport.handle_call(RELEASE, self._handle_release)

    async def start(self) -> None:
        """Begin to answer."""
        await self._tasks.start()

    async def close(self) -> None:
        """Stop computing. Raises what a task of this server raised."""
        self.calls.close()
        try:
            await self.admission.close()
        finally:
            self._executor.close()
            self.snapshots.go_back()
            await self._tasks.close()

    def report(self) -> ServerReport | None:
        """For people; None before there is a run."""
        if not self.admission.ready.is_set():
            return None
        coordinator, run = self.admission.run.coordinator, self.admission.run.manifest
        around = next((index for index, stage in enumerate(run.stages) if stage.on_trainers), None)
        num_pipelined = sum(index != around for index in self.stepping.stages)
        return ServerReport(
            lead=run.lead,
            coordinator=coordinator,
            num_stages=len(run.stages),
            stages=list(self.stepping.stages),
            trainers_stage=around,
            first_step=run.first_step,
            step=self.stepping.version,
            age_s=time.monotonic() - self.stepping.began_s,
            num_samples=self.calls.num_samples // max(1, num_pipelined),
            queued=self._executor.queued,
            held=held(self.stepping.sums.stages.values(), run.stages),
            around_parameters=num_parameters(run.stages[around]) if around is not None else 0,
            machine=describe(self.admission.model.device),
            peak_bytes=peak_bytes(self.admission.model.device),
            newest=newest(self.admission.run.newest),
            compression=run.settings.compression,
        )

    # ------------------------------------------------------------------ going back, and out

    async def step_out(self, *, keeps_snapshots: bool = False) -> None:
        """A record has left this server out: nothing is left here of the run but a stage to join it with again.

        Args:
            keeps_snapshots: And the snapshots that it took and keeps for others: it will be back in the same run soon.
        """
        if not self.admission.has_run:
            return
        holders = [len(roster) for roster in self.admission.run.rosters]
        await self.admission.step_out()  # what comes from now on is refused
        await self.calls.abort_all()
        self.calls.discard_results("g")
        stages = await self.stepping.step_out()
        self.donor.go_back()
        if not keeps_snapshots:
            self.snapshots.go_back()
        self.joiner.keep(stages, holders)

    async def release(self) -> None:
        """The run is void here: this server is as it was before, and may be admitted to one, or join one."""
        await self.step_out()
        self.admission.trains_in = None  # whose peers may end this one no more
        self.voter.void_promises()

    def serve_with(self, model: PeerModel) -> None:
        """Build stages of another copy of the model from now on. Not while there is a run."""
        self.admission.model = self.joiner.model = model

    async def _handle_release(self, caller: PeerId, body: bytes) -> bytes:
        request = decode(body, ReleaseRequest)
        if self.admission.has_run:  # else it was told twice
            self.admission.check_release(caller, request)
            await self.release()
            self.admission.note_release(request)
        else:
            self.admission.check_released_by(caller)
        return b""

    async def _handle_restart(self, caller: PeerId, body: bytes) -> bytes:
        """Nothing is left of the running generation when this returns."""
        run = self.admission.run
        old = run.manifest.generation
        self.admission.go_back(caller, decode(body, RestartRequest))
        await self.admission.leadership.go_back()
        await self.calls.abort_all()
        self.calls.discard_results(f"g{old}.")
        await self.stepping.go_back()
        self.donor.go_back()
        self.snapshots.go_back()
        return b""

    def _take_leave_of(self, record: Record, gradients: Mapping[int, Tensor]) -> None:
        self.calls.discard_results(f"g{record.closing.generation}.s{record.step}.")
        self.admission.on_record(record)
        self.donor.keep_record(record, gradients)
        if (work := self.snapshots.on_record(record)) is not None:
            self._tasks.spawn(work)
        if gradients.keys() - set(self.stepping.stages):  # a stage was given up
            model, manifest, served = self.admission.model, self.admission.run.manifest, self.stepping.stages
            # Asked for at once, so that it is done before anything is built here again.
            self._tasks.spawn(_awaited(self._executor.submit(FIRST, lambda: model.keep_only(manifest, served))))

    def _give_up(self, prefix: str) -> None:
        self.calls.give_up(prefix)


async def _awaited(done: asyncio.Future[Any]) -> None:
    await done
