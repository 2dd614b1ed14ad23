"""Registers of open exchanges with other peers, so that they can be ended early."""

from __future__ import annotations

import asyncio
from typing import Any

from lightning_swarm.core.clock import now_s
from lightning_swarm.core.errors import Busy
from lightning_swarm.core.tasks import running_task
from lightning_swarm.network import PeerId
from lightning_swarm.network.gatekeeper import Gatekeeper


class OpenExchanges(dict[asyncio.Timeout, PeerId]):
    """The open exchanges that this peer has begun: deadline -> the asked peer."""

    def end(self, peer: PeerId | None = None) -> None:
        """End the exchanges with a peer now; None: with all peers."""
        for limit, asked in [*self.items()]:
            if peer in (None, asked) and not limit.expired():
                limit.reschedule(now_s())


class OpenAnswers:
    """The tasks that answer other peers' requests, one for each request, so registering a task must be cheap."""

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
        if task in self._ended:  # else its handler is done
            self._ended[task] = True
            task.cancel()

    def enter(self, caller: PeerId, method: str) -> asyncio.Task[Any]:
        """Register the running task as an answer to a caller and return it, or refuse a caller that may not call."""
        if self.gate is not None:  # the permit may have changed while the request waited for room, or for tensors
            self.gate.check_before_handler(caller, method)
        task = running_task()
        self._caller_of[task] = caller
        return task

    def check_cancelled(self, task: asyncio.Task[Any], caller: PeerId, method: str) -> None:
        """Raise the error for the caller if `end`, and no other code, has cancelled the task."""
        if self._ended.get(task) and not task.uncancel():  # else other code has cancelled it, too
            self.check_before_answer(caller, method)
            raise Busy(f"the ban of {caller} was lifted during this request, which may be sent again") from None

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Unregister a task whose handler is done."""
        del self._caller_of[task]
        if self._ended:
            self._ended.pop(task, None)

    def check_before_answer(self, caller: PeerId, method: str) -> None:
        """Refuse an answer if the caller may not call any more, for example because its certificate has expired."""
        if self.gate is not None:
            self.gate.check_before_answer(caller, method)
