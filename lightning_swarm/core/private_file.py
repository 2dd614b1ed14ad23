"""Files that only this user may read (mode 0600), and that appear under their name only when complete.

On file systems without hard links, `write_new` first creates an empty file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_file(data: bytes, folder: Path) -> Iterator[Path]:
    """Yield the path of a file with this content in a folder; delete the file when the context ends."""
    descriptor, name = tempfile.mkstemp(prefix=".swarm-key-", dir=folder)  # created with mode 0600
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        yield path
    finally:
        path.unlink(missing_ok=True)


def can_see_file(path: Path) -> bool:
    """Return whether the file exists; False if this user has no access, because the file cannot be used then."""
    try:
        return path.exists()
    except PermissionError:
        return False


def write_new(path: Path, data: bytes) -> None:
    """Create a file. Raise `FileExistsError`, and leave the file unchanged, if it exists."""
    with temporary_file(data, path.parent) as written:
        try:
            path.hardlink_to(written)
        except FileExistsError:
            raise
        except OSError:  # some file systems have no hard links
            path.touch(0o600, exist_ok=False)
            written.replace(path)


def replace_file(path: Path, data: bytes) -> None:
    """Create a file, or replace the existing one."""
    with temporary_file(data, path.parent) as written:
        written.replace(path)
