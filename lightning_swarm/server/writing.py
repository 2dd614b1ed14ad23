"""How a server's stages come into a sharded checkpoint: it writes them itself, where it sees the lead's folder."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from lightning_swarm import shards
from lightning_swarm.errors import ProtocolError, SwarmError
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.server import WRITE
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stepping import Stepping
from lightning_swarm.types.shards import WriteReply, WriteRequest
from lightning_swarm.types.wire import decode, encode

FOLDER: Final = r"\.[^/\\]*\.[0-9a-f]{32}\.partial"
"""Names of folders that servers write to. Who sees one with such a number shares a file system with the lead."""


class Writing:
    """Answers the lead's calls about it.

    Args:
        transport: The server's network.
        executor: Computes.
        admission: Knows the run.
        stepping: Knows the stages.
    """

    def __init__(self, transport: Transport, executor: Executor, admission: Admission, stepping: Stepping) -> None:
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
            written = await asyncio.to_thread(shards.write, folder, stage.index, found)
        except OSError as error:
            raise SwarmError(f"stage {stage.index} cannot be written to {folder}: {error}") from error
        return Message(encode(WriteReply(here=True, written=written)))


def content(stage: Stage, *, optimizer: bool, without: Collection[str]) -> dict[str, Any]:
    """What a checkpoint has of a stage. Shared memory, not copies."""
    left_out = {one.name for one in stage.module.spec.buffers if not one.persistent}.union(without)
    found = {shards.WEIGHTS: _all_but(left_out, stage.weights())}
    return {
        **found,
        **({shards.OPTIMIZER: {"state": _all_but(left_out, stage.stepper.saved_state())}} if optimizer else {}),
    }


def _all_but(names: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
