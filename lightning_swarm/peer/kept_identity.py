"""Private keys of joining peers, kept per run and user: a restarted peer has its old id and takes no further use."""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path
from typing import Final

from lightning_swarm.network.identity import load_identity
from lightning_swarm.trust.owner import owner_file

_log = logging.getLogger(__name__)
_MAX_PEERS: Final = 1024

_locks: list[int] = []  # descriptors, open until the process ends, however it ends


def keep_identity(folder: Path, run_id: str) -> str | None:
    """Return the file of a key that no living process of this user has; None if no file can be kept.

    The file is made if it is missing, and stays locked until this process ends.
    """
    first = owner_file(folder, run_id).with_suffix(".peer")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(1, _MAX_PEERS + 1):
            path = first if number == 1 else first.with_suffix(f".peer{number}")
            if _lock(path.with_suffix(f"{path.suffix}.lock")):
                load_identity(path)
                return str(path)
    except OSError as error:
        why = error.strerror or str(error)
    else:
        why = f"{_MAX_PEERS} peers of this user are in runs of that name"
    _log.warning(
        "This peer's key is kept in no file under %s: %s. Each start counts as another use of its invitation. To keep "
        "the key, name a file by `--identity`, or set XDG_CONFIG_HOME to a folder that can be written to.",
        folder,
        why,
    )
    return None


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
