"""Files that only this user may read (mode 0600), and that have their name only once they are whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_file(data: bytes, folder: Path) -> Iterator[Path]:
    """Keep a file with this content in a folder, within the context."""
    descriptor, name = tempfile.mkstemp(prefix=".swarm-key-", dir=folder)  # of the mode 0600 from the beginning
    path = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        yield path
    finally:
        path.unlink(missing_ok=True)


def is_there(path: Path) -> bool:
    """Return whether there is a file of that name; not where this user may not look, for then it can use none."""
    try:
        return path.exists()
    except PermissionError:
        return False


def write_new(path: Path, data: bytes) -> None:
    """Make a file of that name; `FileExistsError` if there is one, which stays as it is."""
    with temporary_file(data, path.parent) as written:
        try:
            path.hardlink_to(written)
        except FileExistsError:
            raise
        except OSError:  # some file systems have no hard links
            path.touch(0o600, exist_ok=False)
            written.replace(path)


def write_over(path: Path, data: bytes) -> None:
    """Make a file of that name, in the place of the one that there may be."""
    with temporary_file(data, path.parent) as written:
        written.replace(path)
