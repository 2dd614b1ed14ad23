"""How the state of a server's stages comes, and goes to whoever puts the whole model together."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from lightning_swarm.core.errors import ProtocolError, SwarmError
from lightning_swarm.model import sharded_format
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.state import LentWeights, StageState, StateRequest, WriteReply, WriteRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.methods import LEND, LOAD, STATE, WRITE
from lightning_swarm.protocol.serialization import named
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers

FOLDER: Final = r"\.[^/\\]*\.[0-9a-f]{32}\.partial"
"""Names of folders that servers write to. Who sees one with such a number shares a file system with the lead."""


class CheckpointHandlers:
    """Answers the lead's calls about it.

    Args:
        transport: The server's network.
        executor: Computes.
        admission: Knows the run.
        stepping: Knows the stages.
    """

    def __init__(self, transport: Transport, executor: Executor, admission: Admission, stepping: StepHandlers) -> None:
        self._executor = executor
        self._admission = admission
        self._stepping = stepping
        transport.handle_stream(WRITE, self._handle_write, max_bytes=0)

    async def _handle_write(self, caller: PeerId, message: Message) -> Message:
        run = self._admission.run
        if caller != run.manifest.lead:
            raise ProtocolError(f"the lead {run.manifest.lead} has checkpoints written, not {caller}")
        request = decode(message.body, WriteRequest)
        folder = Path(request.folder)
        if not folder.is_absolute() or not re.fullmatch(FOLDER, folder.name):
            raise ProtocolError(f"a server writes to no other folders than those for parts, got {request.folder!r}")
        run.check_generation(request.generation)
        if not await asyncio.to_thread(folder.is_dir):
            return Message(encode(WriteReply(here=False, written=[])))
        await self._stepping.reached(request.step)
        stage = self._stepping.stage(request.stage_index)

        def read() -> dict[str, Any]:
            run.check_generation(request.generation)  # it may have changed meanwhile
            stage.check_version(request.step)
            return content(stage, optimizer=request.optimizer, without=request.without)

        # On the compute thread, so that it falls between two records.
        found, _ = await self._executor.submit(FIRST, read)
        try:
            # Shared, not copied: the lead waits, and no record is applied meanwhile.
            written = await asyncio.to_thread(sharded_format.write, folder, stage.index, found)
        except OSError as error:
            raise SwarmError(f"stage {stage.index} cannot be written to {folder}: {error}") from error
        return Message(encode(WriteReply(here=True, written=written)))


def content(stage: Stage, *, optimizer: bool, without: Collection[str]) -> dict[str, Any]:
    """What a checkpoint has of a stage. Shared memory, not copies."""
    left_out = {one.name for one in stage.module.spec.buffers if not one.persistent}.union(without)
    found = {sharded_format.WEIGHTS: _all_but(left_out, stage.weights())}
    return {
        **found,
        **({sharded_format.OPTIMIZER: {"state": _all_but(left_out, stage.stepper.saved_state())}} if optimizer else {}),
    }


def _all_but(names: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


class StateHandlers:
    """Answers the trainers' calls about it.

    Args:
        transport: The server's network.
        executor: Computes.
        admission: Knows the run.
        stepping: Knows the stages.
        max_bytes: Of a message.
    """

    def __init__(
        self, transport: Transport, executor: Executor, admission: Admission, stepping: StepHandlers, *, max_bytes: int
    ) -> None:
        self._executor = executor
        self._admission = admission
        self._stepping = stepping
        transport.handle_stream(LOAD, self._handle_load, max_bytes=max_bytes)
        transport.handle_stream(STATE, self._handle_state, max_bytes=0)

    async def _handle_load(self, caller: PeerId, message: Message) -> Message:
        """The initial weights of a stage, from the starter. Nobody else's are ever used."""
        manifest = self._admission.run.manifest
        if caller != manifest.lead:
            raise ProtocolError(f"weights come from the lead {manifest.lead}, not from {caller}")
        state = decode(message.body, StageState)
        self._admission.run.check_generation(state.generation)
        stage = self._stepping.stage(state.stage_index)
        stage.check_version(state.step)
        if state.step != manifest.first_step or (stage.index in self._admission.loaded) != state.optimizer:
            raise ProtocolError(
                f"stage {stage.index} takes its initial weights once, then its optimizer's state, and both before "
                "the first step; from then on records change them"
            )
        if state.optimizer:
            values = serialization.unflatten(state.structure, list(message.tensors))
            await self._executor.submit(FIRST, lambda: stage.load_optimizer_state(named(state.names, values)))
        else:
            await self._executor.submit(FIRST, lambda: stage.load_weights(named(state.names, message.tensors)))
            self._admission.run.check_generation(state.generation)  # it may have changed meanwhile
            self._admission.note_loaded(stage.index)
        return Message()

    async def _handle_state(self, caller: PeerId, message: Message) -> Message:
        self._admission.run.check_trainer(caller)
        request = decode(message.body, StateRequest)
        self._admission.run.check_generation(request.generation)
        await self._stepping.reached(request.step)
        stage = self._stepping.stage(request.stage_index)

        def read() -> Message:
            self._admission.run.check_generation(request.generation)  # it may have changed meanwhile
            return _state(stage, request)

        # On the compute thread, so that it falls between two records.
        message, _ = await self._executor.submit(FIRST, read)
        return message


def _state(stage: Stage, request: StateRequest) -> Message:
    stage.check_version(request.step)
    structure: serialization.Structure = None
    if request.optimizer:
        state = stage.optimizer_state()
        structure, tensors = serialization.flatten(list(state.values()))
    else:
        state = stage.weights()
        tensors = list(state.values())
    # Shared, not copied: the lead reads, and no record is applied meanwhile.
    reply = StageState(
        stage_index=stage.index,
        step=request.step,
        generation=request.generation,
        optimizer=request.optimizer,
        names=list(state),
        structure=structure,
    )
    return Message(encode(reply), tuple(tensor.detach().cpu() for tensor in tensors))


class EvaluationWeightHandlers:
    """Answers the lead's calls about them.

    Args:
        transport: The server's network.
        executor: Computes.
        admission: Knows the run.
        stepping: Knows the stages.
        max_bytes: Of a message.
    """

    def __init__(
        self, transport: Transport, executor: Executor, admission: Admission, stepping: StepHandlers, *, max_bytes: int
    ) -> None:
        self._executor = executor
        self._admission = admission
        self._stepping = stepping
        transport.handle_stream(LEND, self._handle_lend, max_bytes=max_bytes)

    async def _handle_lend(self, caller: PeerId, message: Message) -> Message:
        if caller != self._admission.run.manifest.lead:
            raise ProtocolError(f"weights come from the lead {self._admission.run.manifest.lead}, not from {caller}")
        lent = decode(message.body, LentWeights)
        self._admission.run.check_generation(lent.generation)
        stage = self._stepping.stage(lent.stage_index)
        weights = named(lent.names, message.tensors)
        await self._executor.submit(FIRST, lambda: stage.borrow(lent.number, weights))
        return Message()
