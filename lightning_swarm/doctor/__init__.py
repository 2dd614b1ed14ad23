"""Can this machine be a peer? Looks at everything that can be seen here, and at peers that it is to reach.

`policy` decides what is wrong; here is only how it is found out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightning_swarm import hello
from lightning_swarm.doctor import peers, policy
from lightning_swarm.doctor.policy import Finding, Folder
from lightning_swarm.hello import installed_version
from lightning_swarm.network.addresses import Address

__all__ = ["Finding", "examine"]

_SOCKETS = Path("/tmp")  # fixed by hivemind, whatever TMPDIR says
_START_TIMEOUT_S = 30.0


def examine(*, host: str = "127.0.0.1", port: int = 0, addresses: Sequence[Address] = ()) -> Iterator[Finding]:
    """Check this machine, the cheap things first, and the way to other peers.

    Args:
        host: The address to listen on.
        port: The TCP port; 0 for any.
        addresses: Of running peers.
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
    startable = all(finding.ok for finding in (*versions, binary))
    if startable and listening.ok:
        daemon_starts = policy.check_daemon(*try_daemon(host, port))
        yield daemon_starts
        startable = daemon_starts.ok
    yield from _examine_peers(addresses, with_daemon=startable)


def _examine_peers(addresses: Sequence[Address], *, with_daemon: bool) -> Iterator[Finding]:
    answering = []
    for address in addresses:
        dialed = peers.knock(address)
        if dialed.obstacle is None and with_daemon:
            answering.append(address)
        else:
            yield policy.check_reach(dialed)
    if not answering:
        return
    here = hello.own_greeting(0.0)
    for dialed, meeting in peers.meet(answering):
        yield policy.check_reach(dialed, meeting.round_trip_s if meeting else None)
        if meeting is not None:
            there = meeting.greeting
            yield policy.check_protocol(dialed.address, here.protocol_version, there.protocol_version)
            yield policy.compare_versions(dialed.address, here.versions, there.versions)
            yield policy.check_clock(dialed.address, meeting.ahead_s, meeting.round_trip_s)


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
