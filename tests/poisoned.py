"""Servers that send false weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from lightning_swarm.model.state_proof import StateDigests, parts_of_optimizer, parts_of_weights
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.state import ProofReply, ProofRequest
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.rpc import PROVE, STATE
from lightning_swarm.server.server import Server

Poison: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def lies(server: Server, poison: Poison) -> None:
    """Make a server send a false state, and a proof of that state."""
    transport: Any = server._transport
    handler, *bounds = transport._stream_handlers[STATE.name]

    async def answer(caller: PeerId, message: Message) -> Message:
        reply = await handler(caller, message)
        return Message(reply.body, tuple(poison([tensor.clone() for tensor in reply.tensors])))

    async def vouch(caller: PeerId, body: bytes) -> bytes:
        """Return the proof of a server that has this false state."""
        request = decode(body, ProofRequest)
        stage = server.steps.stage(request.stage_index)
        weights = dict(zip(stage.weights(), poison([one.clone() for one in stage.weights().values()]), strict=True))
        structure, tensors = serialization.flatten(list(stage.optimizer.state().values()))
        values = serialization.unflatten(structure, poison([tensor.clone() for tensor in tensors]))
        state = dict(zip(stage.optimizer.state(), values, strict=True))
        digests = StateDigests([*parts_of_weights(weights), *parts_of_optimizer(state)])
        return encode(ProofReply(proof=digests.proof(request.challenge, [request.kind])))

    transport._stream_handlers[STATE.name] = answer, *bounds
    transport._call_handlers[PROVE.name] = vouch


def raised(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor + 1 if tensor.is_floating_point() else tensor for tensor in tensors]
