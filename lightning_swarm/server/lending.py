"""Weights that the lead lends a server to evaluate with, in place of those that it trains."""

from __future__ import annotations

from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.server import LEND
from lightning_swarm.server.admission import Admission
from lightning_swarm.server.executor import FIRST, Executor
from lightning_swarm.server.loading import named
from lightning_swarm.server.stepping import Stepping
from lightning_swarm.types.state import LentWeights
from lightning_swarm.types.wire import decode


class Lending:
    """Answers the lead's calls about them.

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
