"""Adapts hivemind's libp2p daemon: its session, the port that it dials from, late answers, sockets and its exit."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from typing_extensions import override

from lightning_swarm.network.hivemind._engine import P2P


# Cancelling a task cancels its awaited future at once, but hivemind's client forgets the call only when the task runs
# again. If the answer arrives in between, the client sets the result of a cancelled future. That raises in the task
# that reads the answers of all calls, and from then on no call of this process is ever answered.
class _Answer(asyncio.Future[Any]):
    """A future that ignores an answer once it is done or cancelled."""

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
        # Replaces the client's future by an `_Answer`. The client looks up the future to await in this dict.
        super().__setitem__(call_id, _Answer())


def ignore_late_answers(p2p: P2P) -> asyncio.Task[None]:
    """Make a connected client ignore late answers; return its reading task, which every call depends on."""
    control = p2p._client.control
    control._pending_calls = _PendingCalls(control._pending_calls)
    reading: asyncio.Task[None] = control._read_task
    return reading


_POLL_S: Final = 0.2

# By default libp2p dials from the port that it listens on. If two peers dial each other and their first packets cross,
# which is likely between distant peers when a run begins, they share one connection that both have opened. They cannot
# agree on its keys, and dial again after the same pauses, so they never meet. Only hole punching needs that port.
_DIALING: Final = {"LIBP2P_TCP_REUSEPORT": "false"}


@contextmanager
def in_own_session() -> Iterator[None]:
    """Start daemons within this context in a session of their own, and let them dial from any port."""
    # Ctrl-C ends all processes of the terminal's foreground group. A daemon in this group would end before its peer
    # could leave the run or fetch the trained weights. hivemind starts the daemon itself, without options for this.
    loop: Any = asyncio.get_running_loop()
    start = loop.subprocess_exec

    def start_alone(*command: Any, env: Mapping[str, str], **options: Any) -> Any:
        return start(*command, env={**env, **_DIALING}, start_new_session=True, **options)

    loop.subprocess_exec = start_alone
    try:
        yield
    finally:
        loop.subprocess_exec = start


SOCKETS: Final = Path("/tmp")
"""The folder of the daemons' sockets; hivemind ignores TMPDIR."""

_BEGINNING_S: Final = 60.0  # longest time from the creation of a socket's file until its process listens


def remove_dead_sockets(folder: Path = SOCKETS) -> None:
    """Remove sockets of this user's killed peers; sockets of live processes and of other users stay."""
    for path in folder.glob("hivemind-p2p*.sock"):
        with suppress(OSError):  # another peer has removed it, or access is denied
            status = path.lstat()
            is_own = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.getuid()
            if is_own and time.time() - status.st_mtime > _BEGINNING_S and _is_dead(path):
                path.unlink()


def _is_dead(path: Path) -> bool:
    """Return whether no process listens on this socket, without connecting to it."""
    # A socket of the wrong type cannot connect. The error shows whether the type is wrong or no process listens.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


async def wait_for_exit(pid: int) -> None:
    """Wait until the child process `pid` has ended."""
    # The child is not reaped here: hivemind may still signal its pid, which must not belong to another process then.
    # SIGCHLD is of no use: torch's DataLoader replaces the signal's handler as soon as it starts workers.
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux, or too old a kernel
        while not _has_ended(pid):  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(_POLL_S)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # other code has reaped it
        return True
