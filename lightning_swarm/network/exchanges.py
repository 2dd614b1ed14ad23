"""Exchanges with other peers that are under way, so that they can be ended before their time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.gatekeeper import Gatekeeper
from lightning_swarm.network.rpc import Responder


class OpenExchanges:
    """The exchanges that are under way, by whatever each of them is known by."""

    def __init__(self) -> None:
        self._open: dict[Hashable, tuple[PeerId, Callable[[], None]]] = {}  # ordered, so that a run repeats exactly

    def open(self, exchange: Hashable, peer: PeerId, end: Callable[[], None]) -> None:
        """Have `end` and `end_all` call this to end an exchange, until `close`."""
        self._open[exchange] = peer, end

    def close(self, exchange: Hashable) -> None:
        """Note that an exchange has ended, if it had begun."""
        self._open.pop(exchange, None)

    def end(self, peer: PeerId) -> None:
        """End the exchanges with a peer now."""
        for other, end in [*self._open.values()]:
            if other == peer:
                end()

    def end_all(self) -> None:
        """End all exchanges now."""
        for _, end in [*self._open.values()]:
            end()


def end_now(limit: asyncio.Timeout) -> None:
    """Let a deadline pass."""
    if not limit.expired():
        limit.reschedule(now_s())


class _OpenAnswer:
    """An answer that a task of this peer makes. It costs less than a deadline, and every request has one."""

    __slots__ = ("_cancelled_before", "_ending", "_is_ended", "_task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelled_before, self._is_ended = task, task.cancelling(), False
        self._ending: asyncio.Handle | None = None

    def end(self) -> None:
        """Cancel the task soon, once. It may be the one that runs now, and be done before."""
        if self._ending is None:
            self._ending = self._task.get_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        self._is_ended = True
        self._task.cancel()

    def close(self) -> None:
        """Cancel nothing from now on."""
        if self._ending is not None:
            self._ending.cancel()

    def take_end(self) -> bool:
        """Return whether it was ended, and nobody else has cancelled its task."""
        return self._is_ended and self._task.uncancel() <= self._cancelled_before


async def answer_until_cut_off(
    gate: Gatekeeper, answering: OpenExchanges, caller: PeerId, method: str, respond: Responder, message: Message
) -> Message:
    """Answer a request, unless the caller's certificate ends, or is banned, before the answer is there."""
    gate.check_enters(caller, method)  # Its tensors, or its turn, may have taken a while to come.
    under_way = _OpenAnswer()
    answering.open(under_way, caller, under_way.end)
    try:
        answer = await respond(message)
    except asyncio.CancelledError:
        if not under_way.take_end():
            raise
        gate.check_answered(caller, method)
        raise Busy(f"a ban of {caller} was lifted at once, so this is worth another try") from None
    finally:
        answering.close(under_way)
        under_way.close()
    gate.check_answered(caller, method)  # No timer tells when a certificate ends.
    return answer
