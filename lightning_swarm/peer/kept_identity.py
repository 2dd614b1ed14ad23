"""Private keys of joining peers, kept per run and user: a restarted peer has its old id and takes no further use."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.identity import load_identity
from lightning_swarm.trust.owner import owner_file

_log = logging.getLogger(__name__)
_MAX_PEERS: Final = 1024

_locks: list[int] = []  # descriptors, open until the process ends, however it ends


def keep_identity(find_folder: Callable[[], Path], run_id: str) -> str | None:
    """Return the file of a key that no living process of this user has; None if no file can be kept.

    The file is made if it is missing, and stays locked until this process ends.
    """
    try:
        folder = find_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = (owner_file(folder, run_id).with_suffix(f".peer{number}") for number in ["", *range(2, _MAX_PEERS + 1)])
        path = next((path for path in paths if _lock(path.with_suffix(f"{path.suffix}.lock"))), None)
    except (OSError, ConfigError) as error:
        _log.warning(
            "This peer's key is not kept, so that each start is another use of its invitation: %s. Name a file for the "
            "key by `--identity`, or set XDG_CONFIG_HOME to a folder that lasts.",
            str(error).rstrip("."),
        )
        return None
    if path is None:
        raise ConfigError(
            f"one user has up to {_MAX_PEERS} joined processes of run {run_id!r} on a machine, and all are there. End "
            "some of them, or name a file for this peer's key by `--identity`."
        )
    load_identity(path)
    return str(path)


def _lock(path: Path) -> bool:
    """Lock a file until this process ends; False if another process has locked it."""
    # Forked processes, such as DataLoader workers, inherit no lock of this kind and cannot outlive its owner with it.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return False
    _locks.append(descriptor)
    return True
