"""Registers of open exchanges with other peers, so that they can be ended early."""

from __future__ import annotations

import asyncio
from typing import Any

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy
from lightning_swarm.network import PeerId
from lightning_swarm.network.gatekeeper import Gatekeeper
from lightning_swarm.network.rpc import Guard


class OpenExchanges:
    """The open exchanges that this peer has begun, each by its deadline."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, PeerId] = {}  # ordered, so that a run repeats exactly

    def open(self, limit: asyncio.Timeout, peer: PeerId) -> None:
        """Register an exchange until `close`. The methods `end` and `end_all` expire its deadline."""
        self._open[limit] = peer

    def close(self, limit: asyncio.Timeout) -> None:
        """Remove an exchange from the register, if it is there."""
        self._open.pop(limit, None)

    def end(self, peer: PeerId) -> None:
        """End the exchanges with a peer now."""
        for limit, other in [*self._open.items()]:
            if other == peer:
                end_now(limit)

    def end_all(self) -> None:
        """End all exchanges now."""
        for limit in [*self._open]:
            end_now(limit)


def end_now(limit: asyncio.Timeout) -> None:
    """Expire a timeout now, unless it has expired already."""
    if not limit.expired():
        limit.reschedule(now_s())


class OpenAnswers(Guard):
    """The tasks that answer other peers' requests, one task each. It runs for every request, so it must be cheap."""

    def __init__(self) -> None:
        self.gate: Gatekeeper | None = None  # the current gate; a request may outlive the gate that admitted it
        self._caller_of: dict[asyncio.Task[Any], PeerId] = {}  # ordered, so that a run repeats exactly
        self._ended: dict[asyncio.Task[Any], bool] = {}  # task to end -> whether it is cancelled already

    def end(self, caller: PeerId) -> None:
        """Cancel the answers to a caller, on the loop's next turn, because the running task may be an answer itself."""
        for task, peer in self._caller_of.items():
            if peer == caller and task not in self._ended:
                self._ended[task] = False
                task.get_loop().call_soon(self._cancel, task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if task in self._ended:  # else it is done
            self._ended[task] = True
            task.cancel()

    def enter(self, caller: PeerId, method: str) -> asyncio.Task[Any]:
        """See `Guard`."""
        if self.gate is not None:
            self.gate.check_may_enter(caller, method)
        task = asyncio.current_task()
        assert task is not None
        self._caller_of[task] = caller
        return task

    def check_cancelled(self, task: asyncio.Task[Any], caller: PeerId, method: str) -> None:
        """See `Guard`."""
        if self._ended.get(task) and not task.uncancel():  # else other code has cancelled it, too
            self.check_may_be_answered(caller, method)
            raise Busy(f"a ban of {caller} was lifted at once, so this is worth another try") from None

    def leave(self, task: asyncio.Task[Any]) -> None:
        """See `Guard`."""
        del self._caller_of[task]
        if self._ended:
            self._ended.pop(task, None)

    def check_may_be_answered(self, caller: PeerId, method: str) -> None:
        """See `Guard`. This also finds expired certificates, for which there is no timer."""
        if self.gate is not None:
            self.gate.check_may_be_answered(caller, method)
