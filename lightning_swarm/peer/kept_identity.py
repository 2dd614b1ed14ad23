"""Private keys of joining peers, kept per run and user, so that a restarted peer does not use its invitation again."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, structs

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network.identity import load_identity
from lightning_swarm.peer.config import SwarmConfig
from lightning_swarm.trust.invitation_text import MAX_TEXT_BYTES
from lightning_swarm.trust.owner import owner_file

_log = logging.getLogger(__name__)
_MAX_PEERS: Final = 1024
_MAX_RECORD_BYTES: Final = 16 << 10

_locks: dict[Path, int] = {}  # key file -> descriptor of its lock, open until the process ends, however it ends


class PeerStart(Struct, frozen=True):
    """The start of a peer, by which a restart recognizes its own key among the keys of this user's other peers."""

    invitation: str = ""  # digest of the invitation; empty if there is none, or it cannot be read twice
    command: str = ""  # digest of the command line, which may contain secrets, and of the invitation's file name
    listen: str = ""
    folder: str = ""

    @classmethod
    def of(cls, config: SwarmConfig) -> PeerStart:
        """Describe the start of this process."""
        invitation = _digest_of_file(config.invite)
        # `join --invite -` passes the invitation as a descriptor, whose number differs from start to start.
        name = invitation if (config.invite or "").startswith("/dev/fd/") else config.invite or ""
        command = hashlib.sha256("\0".join([name, *sys.argv]).encode(errors="surrogateescape")).hexdigest()
        try:
            folder = str(Path.cwd())
        except FileNotFoundError:  # it was removed
            folder = ""
        return cls(invitation, command, str(config.listen), folder)

    @classmethod
    def decode(cls, data: bytes) -> PeerStart:
        """Read the start of a key's latest process; return an empty start if the record is malformed or missing."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (ValueError, msgspec.DecodeError):
            return cls()

    def may_be(self, other: PeerStart) -> bool:
        """Return whether two starts may be of one peer."""
        # A start with another invitation is another peer, whose invitation would be used once more if it took this key.
        # But if nothing else differs, it is the same peer, with a new invitation in the old file.
        if self.invitation == other.invitation or "" in (self.invitation, other.invitation):
            return True
        return structs.replace(self, invitation=other.invitation) == other

    def likeness(self, other: PeerStart) -> int:
        """Count the properties that two starts have in common."""
        return sum(own == its for own, its in zip(structs.astuple(self), structs.astuple(other), strict=True))


def keep_identity(find_folder: Callable[[], Path], run_id: str, start: PeerStart) -> str | None:
    """Return the file of a key that no living process of this user uses; None if no file can be kept."""
    # The file is created if it is missing, and stays locked until this process ends. A restarted peer gets the key of
    # the most similar earlier start.
    try:
        folder = find_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = [owner_file(folder, run_id).with_suffix(f".peer{number}") for number in ["", *range(2, _MAX_PEERS + 1)]]
        # A key that this process has locked stays untouched: reopening and closing its lock's file would end the lock.
        path = next((path for path in paths if path in _locks), None)
        if path is None:
            path = next((path for path in _by_preference(paths, start) if _try_lock(path, start)), None)
    except (OSError, ConfigError) as error:
        _log.warning(
            "This peer's key is not kept, so that each start is another use of its invitation: %s. Name a file for the "
            "key by `--identity`, or set XDG_CONFIG_HOME to a folder that lasts.",
            str(error).rstrip("."),
        )
        return None
    if path is None:
        raise ConfigError(
            f"a user may have at most {_MAX_PEERS} joined processes of run {run_id!r} on a machine, and {_MAX_PEERS} "
            "are running. End some of them, or name a file for this peer's key by `--identity`."
        )
    load_identity(path)
    return str(path)


def _by_preference(paths: list[Path], start: PeerStart) -> Iterator[Path]:
    """Order the files of keys: first kept keys of similar starts, then new keys, then the remaining kept keys."""
    kept = {path: PeerStart.decode(_lock_file(path).read_bytes()) for path in paths if _lock_file(path).exists()}
    alike = [path for path, former in kept.items() if start.may_be(former)]
    yield from sorted(alike, key=lambda path: -kept[path].likeness(start))
    yield from (path for path in paths if path not in kept)
    yield from (path for path in kept if path not in alike)


def _lock_file(path: Path) -> Path:
    return path.with_suffix(f"{path.suffix}.lock")


def _try_lock(path: Path, start: PeerStart) -> bool:
    """Lock a key's file until this process ends; False if another process has locked it."""
    # Forked processes, such as DataLoader workers, do not inherit this kind of lock, so none of them keeps the key
    # locked after the peer has ended.
    descriptor = os.open(_lock_file(path), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return False
    _locks[path] = descriptor
    if not start.invitation:  # keep the former digest: the invitation's file may be gone by now
        former = PeerStart.decode(os.pread(descriptor, _MAX_RECORD_BYTES, 0))
        start = structs.replace(start, invitation=former.invitation)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(start), 0)
    return True


def _digest_of_file(name: str | None) -> str:
    try:
        # A pipe is left unread: it can be read only once, when the invitation itself is loaded.
        if name is not None and Path(name).is_file():
            with Path(name).open("rb") as file:
                return hashlib.sha256(file.read(MAX_TEXT_BYTES).strip()).hexdigest()
    except (OSError, ValueError) as error:  # a kept certificate may still admit the peer; otherwise an error follows
        _log.info("The invitation in %s cannot be read: %s", name, error)
    return ""
