"""The daemon's process: out of the terminal's reach, and awaited without SIGCHLD.

A Ctrl-C at a terminal goes to its whole foreground group. A daemon in that group would be gone before its peer could
take leave over it, or fetch what was trained.

Event loops learn of a child's end from SIGCHLD, and torch's DataLoader takes the signal's handler for itself as soon
as it starts workers: from then on they would wait for ever.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

_POLL_S: Final = 0.2


@contextmanager
def sessions_of_their_own() -> Iterator[None]:
    """The processes that the running loop starts meanwhile are in no terminal's group."""
    loop: Any = asyncio.get_running_loop()
    # hivemind starts the daemon itself and passes no options on.
    start = loop.subprocess_exec
    loop.subprocess_exec = partial(start, start_new_session=True)
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
