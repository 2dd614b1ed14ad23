"""Keeps hivemind's client alive when a call is cancelled in the moment in which its answer comes.

Cancelling a task cancels the future that it waits for at once, but the client takes the call off its books only when
the task runs again. If the answer is read between the two, the client sets the result of a cancelled future; that
raises in the task that reads for all calls, and from then on no call of this process is ever answered.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from typing_extensions import override

from lightning_swarm.network.hivemind._engine import P2P


class _Answer(asyncio.Future[Any]):
    """A future that takes an answer which nobody waits for any more."""

    @override
    def set_result(self, result: Any, /) -> None:
        if not self.done():
            super().set_result(result)

    @override
    def set_exception(self, exception: type | BaseException, /) -> None:
        if not self.done():
            super().set_exception(exception)


class _PendingCalls(dict[UUID, asyncio.Future[Any]]):
    @override
    def __setitem__(self, call_id: UUID, _: asyncio.Future[Any], /) -> None:
        # The client reads the future that it waits for from here.
        super().__setitem__(call_id, _Answer())


def steady(p2p: P2P) -> asyncio.Task[None]:
    """Have the client take late answers.

    Args:
        p2p: Connected to its daemon.

    Returns:
        What reads for all calls: when it ends, none is answered any more.
    """
    control = p2p._client.control
    control._pending_calls = _PendingCalls(control._pending_calls)
    reading: asyncio.Task[None] = control._read_task
    return reading
