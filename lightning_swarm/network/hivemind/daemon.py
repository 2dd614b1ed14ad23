"""The daemon's process: out of the terminal's reach, dialing from ports of their own, and awaited without SIGCHLD.

A Ctrl-C at a terminal goes to its whole foreground group. A daemon in that group would be gone before its peer could
take leave over it, or fetch what was trained.

libp2p dials from the port that it listens on. Two peers that dial each other while the other's first packet is under
way, which between distant ones is likely when a run begins, would then share one connection that both have opened. They
cannot agree on its keys, and dial again in step after the same pauses, so they never meet.

Event loops learn of a child's end from SIGCHLD, and torch's DataLoader takes the signal's handler for itself as soon
as it starts workers: from then on they would wait for ever.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

from typing_extensions import override

from lightning_swarm.network.hivemind._engine import P2P


# Cancelling a task cancels the future that it waits for at once, but hivemind's client forgets the call only when the
# task runs again. If the answer is read between the two, the client sets the result of a cancelled future. That raises
# in the task that reads for all calls, and from then on no call of this process is ever answered.
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


_POLL_S: Final = 0.2


_DIALING: Final = {"LIBP2P_TCP_REUSEPORT": "false"}
"""Nobody is behind a port that has to be kept open: there is no hole punching."""


@contextmanager
def on_its_own() -> Iterator[None]:
    """The daemon that the running loop starts meanwhile is in no terminal's group, and dials from any port."""
    loop: Any = asyncio.get_running_loop()
    # hivemind starts the daemon itself and passes no options on.
    start = loop.subprocess_exec

    def start_alone(*command: Any, env: Mapping[str, str], **options: Any) -> Any:
        return start(*command, env={**env, **_DIALING}, start_new_session=True, **options)

    loop.subprocess_exec = start_alone
    try:
        yield
    finally:
        loop.subprocess_exec = start


async def exited(pid: int) -> None:
    """Return when the child process `pid` has ended.

    It is not reaped here: hivemind may still signal the pid, which must not be another's by then.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no Linux, or one that is too old
        await _polled(pid)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _polled(pid: int) -> None:
    while not _has_ended(pid):  # noqa: ASYNC110 - another process sets no event
        await asyncio.sleep(_POLL_S)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # somebody else reaped it
        return True
