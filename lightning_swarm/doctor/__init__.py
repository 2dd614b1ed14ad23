"""Can this machine be a peer? Looks at everything that can be seen without another one.

`policy` decides what is wrong; here is only how it is found out.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_swarm.doctor import policy
from lightning_swarm.doctor.policy import Finding, Folder

__all__ = ["Finding", "examine"]

_SOCKETS = Path("/tmp")  # fixed by hivemind, whatever TMPDIR says
_START_TIMEOUT_S = 30.0


def examine(*, host: str = "127.0.0.1", port: int = 0) -> Iterator[Finding]:
    """Check this machine, the cheap things first.

    Args:
        host: The address to listen on.
        port: The TCP port; 0 for any.
    """
    yield policy.check_python(platform.python_version())
    versions = [policy.check_version(name, installed_version(name)) for name in policy.SUPPORTED]
    yield from versions
    for path, purpose in _folders().items():
        yield policy.check_folder(look_at_folder(path, purpose))
    if all(finding.ok for finding in versions if finding.check == "torch"):
        yield policy.check_threads(_num_threads(), _num_cores())
    daemon = find_daemon()
    binary = policy.check_binary(
        str(daemon) if daemon else None, executable=bool(daemon and os.access(daemon, os.X_OK))
    )
    yield binary
    listening = policy.check_port(host, port, try_port(host, port))
    yield listening
    # Where it cannot start, the reason has been said.
    if all(finding.ok for finding in (*versions, binary, listening)):
        yield policy.check_daemon(*try_daemon(host, port))


def installed_version(package: str) -> str | None:
    """The version of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_daemon() -> Path | None:
    """The program that hivemind brings along."""
    spec = importlib.util.find_spec("hivemind")
    folders = spec.submodule_search_locations if spec else None
    paths = [Path(folder) / "hivemind_cli" / "p2pd" for folder in folders or ()]
    return next((path for path in paths if path.is_file()), None)


def try_port(host: str, port: int) -> str | None:
    """Listen for a moment. Returns why that is impossible, or None."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the daemon: ended connections may linger
            server.bind((host, port))
            server.listen()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def try_daemon(host: str, port: int) -> tuple[str | None, float]:
    """Start and end a daemon. Returns why it did not start, or None, and how many seconds that took."""
    begin_s = time.monotonic()
    try:
        from lightning_swarm.network import hivemind
        from lightning_swarm.runtime import ThreadRuntime

        with contextlib.closing(ThreadRuntime("doctor")) as runtime:
            transport, directory = runtime.run(hivemind.start(host=host, port=port, startup_timeout=_START_TIMEOUT_S))
            took_s = time.monotonic() - begin_s
            runtime.run(directory.close())
            runtime.run(transport.close())
    except Exception as error:  # noqa: BLE001 - whatever it is, to say it is the purpose
        return f"{type(error).__name__}: {error}", time.monotonic() - begin_s
    return None, took_s


def look_at_folder(path: Path, purpose: str) -> Folder:
    """Write a file, and ask for the room."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
        free_bytes = shutil.disk_usage(path).free
    except OSError as error:
        return Folder(path=str(path), purpose=purpose, problem=error.strerror or str(error), free_bytes=0)
    return Folder(path=str(path), purpose=purpose, problem=None, free_bytes=free_bytes)


def _folders() -> dict[Path, str]:
    return {Path.cwd(): "checkpoints and logs", _SOCKETS: "the daemon's sockets"}


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
