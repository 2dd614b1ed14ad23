"""Opens and closes a client's inference sessions, and passes them the messages of their servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from lightning_swarm.client.inference.adapters import PackedAdapter
from lightning_swarm.client.inference.routes import SessionRoutes
from lightning_swarm.client.inference.session import InferenceSession, SessionInput, SessionWeights
from lightning_swarm.core.errors import ProtocolError, SessionLost, SwarmError
from lightning_swarm.model.random import key_seed
from lightning_swarm.network import Message, PeerId
from lightning_swarm.protocol import rpc
from lightning_swarm.protocol.messages.inference import CacheRecipe, SessionFailed, SessionOutputs
from lightning_swarm.protocol.outbox import StepOutbox


@dataclass(eq=False)
class InferenceSessions:
    """Holds one client's sessions by id. Runs on the event loop."""

    routes: SessionRoutes
    _open: dict[str, InferenceSession] = field(default_factory=dict)
    _num_opened: int = 0
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        transport, self._outbox = self.routes.transport, StepOutbox(self.routes.send)
        rpc.SESSION_OUTPUTS.serve(transport, self._handle_outputs, admit=self._check_server)
        rpc.SESSION_FAILED.serve(transport, self._handle_failed)

    def open(
        self,
        recipe: CacheRecipe | None,
        weights: SessionWeights,
        adapters: Sequence[PackedAdapter | None] = (),
        *,
        exact: bool = False,
        prefix: Sequence[SessionInput] = (),
    ) -> InferenceSession:
        """Open a session; `recipe` is None if the blocks take no cache. Its first step will choose the servers."""
        # Texts in train mode depend on `seed_everything`, and on the number of texts before them in this process.
        seed = key_seed(torch.initial_seed(), self._num_opened)
        self._num_opened += 1
        session = InferenceSession(
            self.routes, self._outbox, recipe, weights, adapters, seed=seed, exact=exact, prefix=prefix
        )
        self._open[session.id] = session
        return session

    def has(self, session: InferenceSession) -> bool:
        """Return whether a session is open here."""
        return session.id in self._open

    def close_soon(self, session: InferenceSession) -> None:
        """On the loop: close a session and notify its servers."""
        if self._open.pop(session.id, None) is not None:
            task = asyncio.ensure_future(session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _find(self, session_id: str) -> InferenceSession:
        session = self._open.get(session_id)
        if session is None:
            raise SessionLost("this client has no such session")
        return session

    def _check_server(self, caller: PeerId) -> None:
        if not any(session.is_served_by(caller) for session in self._open.values()):
            raise ProtocolError(f"{caller} serves no session of this client")

    async def _handle_outputs(self, caller: PeerId, request: SessionOutputs, message: Message) -> None:
        """Accept outputs of several sessions. An error concerns one session, so it is raised only after all outputs."""
        ends = list(accumulate(output.num_tensors for output in request.outputs))
        if ends[-1] != len(message.tensors):
            raise ProtocolError(f"outputs name {ends[-1]} tensors, but came with {len(message.tensors)}")
        errors = []
        for output, end in zip(request.outputs, ends, strict=True):
            try:
                tensors = message.tensors[end - output.num_tensors : end]
                self._find(output.session).accept_output(caller, output, tensors)
            except SwarmError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    async def _handle_failed(self, caller: PeerId, failed: SessionFailed) -> None:
        self._find(failed.session).accept_failure(caller, failed)
