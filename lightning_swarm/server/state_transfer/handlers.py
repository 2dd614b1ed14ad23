"""Calls that load and read the state of a server's stages, for trainers and for checkpoints."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.model import sharded_format
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import to_cpu
from lightning_swarm.protocol.messages.state import (
    EvaluationWeights,
    ProofReply,
    ProofRequest,
    StageState,
    StateRequest,
    WriteReply,
    WriteRequest,
)
from lightning_swarm.protocol.rpc import LOAD, PROVE, SET_EVALUATION_WEIGHTS, STATE, WRITE, WithTensors
from lightning_swarm.protocol.serialization import named
from lightning_swarm.server.context import ServerContext
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers

_T = TypeVar("_T")

# Servers write only to such folders, of unfinished checkpoints. A server that finds one shares the lead's file system.
_PARTIAL_FOLDER: Final = r"\.[^/\\]*\.[0-9a-f]{32}\.partial"


class StateHandlers:
    """Handles the calls that load, read or write the state of this server's stages."""

    def __init__(self, context: ServerContext, steps: StepHandlers, *, on_loaded: Callable[[int], None]) -> None:
        self._compute = context.compute
        self._membership = context.membership
        self._steps = steps
        self._on_loaded = on_loaded  # called with the index of a stage that has received its initial weights
        transport, max_bytes = context.transport, context.limits.max_message_bytes
        admit = self._check_sends_weights
        LOAD.serve(transport, self._handle_load, max_bytes=max_bytes, admit=admit)
        SET_EVALUATION_WEIGHTS.serve(transport, self._handle_evaluation_weights, max_bytes=max_bytes, admit=admit)
        STATE.serve(transport, self._handle_state)
        PROVE.serve(transport, self._handle_prove)
        WRITE.serve(transport, self._handle_write)

    # ------------------------------------------------------------------ loading

    def _check_sends_weights(self, caller: PeerId) -> None:
        self._membership.check_lead(caller, "sends weights")

    async def _handle_load(self, caller: PeerId, state: StageState, message: Message) -> None:
        """Load a stage's initial weights, or its optimizer's state, from the lead. No other peer may send them."""
        run = self._membership.run
        run.check_generation(state.generation)
        stage = self._steps.stage(state.stage_index)
        stage.check_version(state.version)
        is_loaded = stage.index in self._membership.loaded
        if state.version != run.manifest.first_step or state.optimizer != is_loaded:
            raise ProtocolError(
                f"stage {stage.index} accepts its initial weights once, then its optimizer's state, and both only "
                "before the first step; later, only records change them"
            )
        if state.optimizer:
            values = serialization.unflatten(state.structure, message.tensors)
            await self._compute(lambda: stage.load_optimizer_state(named(state.names, values)))
        else:
            await self._compute(lambda: stage.load_weights(named(state.names, message.tensors)))
            self._membership.run.check_generation(state.generation)  # it may have changed meanwhile
            self._on_loaded(stage.index)

    async def _handle_evaluation_weights(self, caller: PeerId, head: EvaluationWeights, message: Message) -> None:
        """Keep weights from the lead for evaluations, or drop them if the request names none."""
        self._membership.run.check_generation(head.generation)
        stage = self._steps.stage(head.stage_index)
        weights = named(head.names, message.tensors)
        await self._compute(lambda: stage.set_evaluation_weights(head.number, weights))

    # ------------------------------------------------------------------ reading

    async def _handle_state(self, caller: PeerId, request: StateRequest) -> WithTensors[StageState]:
        """Send a stage's weights or optimizer state at a version to a trainer."""
        run = self._membership.run
        # If servers are not trusted, the coordinator also reads states, to settle contradictions.
        if caller != run.coordinator or not run.trusted:
            run.check_trainer(caller)
        # Copy if a record may change the tensors while they are sent. Records wait for the lead, except late records.
        copy = caller != run.manifest.lead or run.manifest.settings.delay_optimizer_step
        return (await self._read(request, lambda stage: _state(stage, request, copy=copy)))[1]

    async def _handle_prove(self, caller: PeerId, request: ProofRequest) -> ProofReply:
        """Prove this server's state of a stage to a trainer or coordinator that received it from another server."""
        run = self._membership.run
        if caller != run.coordinator:
            run.check_trainer(caller)
        prove = self._membership.oversight.work.prover(request.challenge, request.kind)
        _, proof = await self._read(request, prove)
        return ProofReply(proof=proof)

    async def _handle_write(self, caller: PeerId, request: WriteRequest) -> tuple[WriteReply, tuple[()]]:
        """Write a stage's part of a checkpoint, if the lead's folder is on a file system of this machine."""
        self._membership.check_lead(caller, "has checkpoints written")
        folder = Path(request.folder)
        if not folder.is_absolute() or not re.fullmatch(_PARTIAL_FOLDER, folder.name):
            raise ProtocolError(f"a server writes only to folders of partial checkpoints, got {request.folder!r}")
        self._membership.run.check_generation(request.generation)
        if not await asyncio.to_thread(folder.is_dir):
            return WriteReply(here=False, written=[]), ()
        stage, parts = await self._read(request, lambda stage: _content(stage, request))
        try:
            # Shared, not copied: the lead has received all records, even late ones, and none comes while it waits.
            written = await asyncio.to_thread(sharded_format.write, folder, stage.index, parts)
        except OSError as error:
            raise SwarmError(f"stage {stage.index} cannot be written to {folder}: {error}") from error
        return WriteReply(here=True, written=written), ()

    async def _read(
        self, request: StateRequest | WriteRequest | ProofRequest, read: Callable[[Stage], _T]
    ) -> tuple[Stage, _T]:
        """Read a stage at a version of the running generation, as soon as the stage has reached that version."""
        self._membership.run.check_generation(request.generation)
        await self._steps.wait_for_version(request.version)
        stage = self._steps.stage(request.stage_index)

        def read_at_version() -> _T:
            self._membership.run.check_generation(request.generation)  # it may have changed meanwhile
            stage.check_version(request.version)
            return read(stage)

        # On the compute thread, so that the read falls between two records.
        return stage, await self._compute(read_at_version)


def _content(stage: Stage, request: WriteRequest) -> dict[str, Any]:
    """Return the content of a stage's part of a checkpoint, in shared memory instead of copies."""
    excluded = {buffer.name for buffer in stage.module.spec.buffers if not buffer.persistent}.union(request.without)

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in excluded}

    content = {sharded_format.WEIGHTS: kept(stage.weights())}
    if request.optimizer:
        content[sharded_format.OPTIMIZER] = {"state": kept(stage.optimizer.saved_state())}
    return content


def _state(stage: Stage, request: StateRequest, *, copy: bool) -> WithTensors[StageState]:
    """Return a stage's weights, or its optimizer's state, on the CPU; without `copy`, in shared memory if possible."""
    state: Mapping[str, Any] = stage.optimizer.state() if request.optimizer else stage.weights()
    structure, tensors = serialization.flatten(list(state.values()))
    reply = StageState(
        stage_index=stage.index,
        version=request.version,
        generation=request.generation,
        optimizer=request.optimizer,
        names=list(state),
        structure=structure if request.optimizer else None,
    )
    return reply, [to_cpu(tensor.detach(), copy=copy) for tensor in tensors]
