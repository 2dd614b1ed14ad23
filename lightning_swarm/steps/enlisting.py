"""A trainer's way into a run that is under way, out of it, and back where the run went on without it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from lightning_swarm.errors import NotEnlisted, ProtocolError
from lightning_swarm.network import Message, PeerId, Transport
from lightning_swarm.run_state import RunState
from lightning_swarm.steps import ENLIST, RETIRE
from lightning_swarm.steps.coordinator_calls import CoordinatorCalls
from lightning_swarm.types.batches import Quit, ReportReply
from lightning_swarm.types.joining import EnlistReply, EnlistRequest, RetireReply
from lightning_swarm.types.runs import RunView
from lightning_swarm.types.wire import PROTOCOL_VERSION, decode, encode

_MAX_REASON = 2000
_T = TypeVar("_T")


async def enter(
    transport: Transport, seen: RunState, *, timeout: float, patience_s: float, alone_s: float
) -> tuple[RunView, int]:
    """Train in a run from one of its next records on.

    Args:
        transport: This trainer's.
        seen: The run as somebody showed it.
        timeout: Seconds for an answer.
        patience_s: As in `CoordinatorCalls`.
        alone_s: Likewise.

    Returns:
        The run at a version from which on it trains, and the epoch of the lead's loop.

    Raises:
        ConfigError: The run does not take this trainer.
        SwarmError: Nobody answers, or the run broke off.
    """

    def nothing() -> ReportReply:
        return ReportReply(begun=False, leases=[], closed=[])

    calls = CoordinatorCalls(transport, seen, nothing, timeout=timeout, patience_s=patience_s, alone_s=alone_s)
    return await enlist(calls, transport.peer_id, generation=None)


async def enlist(calls: CoordinatorCalls, me: PeerId, *, generation: int | None) -> tuple[RunView, int]:
    """Ask until a record has named this trainer. `generation` as in `EnlistRequest`; the rest as in `enter`."""
    request = encode(EnlistRequest(protocol_version=PROTOCOL_VERSION, generation=generation))
    while True:
        reply = decode(await calls.call(ENLIST, request), EnlistReply)
        if reply.view is None:
            continue
        if me not in reply.view.seats.trainers:
            raise ProtocolError(f"who coordinates shows a run to {me} in which it does not train")
        return reply.view, reply.epoch


class EnlistedCalls:
    """A trainer's calls to whoever coordinates, as one who trains in the run.

    If that went on without this trainer, which was not heard of, it enlists again. Records that it missed come as to
    any other who was busy elsewhere, and so does what became of its batches.

    Args:
        calls: To whoever coordinates.
        run: As this trainer knows it.
        me: This trainer.
    """

    def __init__(self, calls: CoordinatorCalls, run: RunState, me: PeerId) -> None:
        self._calls = calls
        self._run = run
        self._me = me

    async def call(self, method: str, body: bytes) -> bytes:
        """As `CoordinatorCalls.call`."""
        return await self._repeat(partial(self._calls.call, method, body))

    async def stream(self, method: str, message: Message, *, max_bytes: int) -> Message:
        """Likewise, with tensors."""
        return await self._repeat(partial(self._calls.stream, method, message, max_bytes=max_bytes))

    async def enlist(self) -> int:
        """Be sure to train in the run. Returns the epoch of the lead's loop, once it is in one."""
        _, epoch = await enlist(self._calls, self._me, generation=self._run.manifest.generation)
        return epoch

    async def _repeat(self, exchange: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            try:
                return await exchange()
            except NotEnlisted:
                if not self._run.manifest.open_to_trainers:
                    raise
                await self.enlist()


async def retire(calls: CoordinatorCalls, reason: str) -> None:
    """Tell that nothing more will come; returns when a record has let this trainer go."""
    request = encode(Quit(reason=reason[:_MAX_REASON]))
    try:
        while not decode(await calls.call(RETIRE, request), RetireReply).retired:
            pass
    except NotEnlisted:
        return
