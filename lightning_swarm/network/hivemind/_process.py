"""Waiting for the daemon's end without SIGCHLD.

Event loops learn of it from that signal, and torch's DataLoader takes the signal's handler for itself as soon as it
starts workers: from then on they would wait for ever.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

_POLL_S: Final = 0.2


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
