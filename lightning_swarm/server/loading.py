"""How the state of a server's stages comes, and goes to whoever puts the whole model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_swarm import trees
from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.server import LOAD, STATE
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.stepping import Stepping
from lightning_swarm.types.state import StageState, StateRequest
from lightning_swarm.types.wire import decode, encode


class Loading:
    """Answers the trainers' calls about it.

    Args:
        transport: The server's network.
        executor: Computes.
        admission: Knows the run.
        stepping: Knows the stages.
        max_bytes: Of a message.
    """

    def __init__(
        self, transport: Transport, executor: Executor, admission: Admission, stepping: Stepping, *, max_bytes: int
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
            values = trees.unflatten(state.structure, list(message.tensors))
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


def named(names: Sequence[str], values: Any) -> dict[str, Any]:
    """Values by their names, of which there must be as many, all different."""
    if not isinstance(values, (list, tuple)) or not len(values) == len(names) == len(set(names)):
        raise ProtocolError(f"{len(names)} values were named, each by a name of its own; others came")
    return dict(zip(names, values, strict=True))


def _state(stage: Stage, request: StateRequest) -> Message:
    stage.check_version(request.step)
    structure: trees.Structure = None
    if request.optimizer:
        state = stage.optimizer_state()
        structure, tensors = trees.flatten(list(state.values()))
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
