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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet

from lightning_swarm.core.errors import DeadlineExceeded, SwarmError
from lightning_swarm.network import Transport
from lightning_swarm.network.addresses import Address, HostPort
from lightning_swarm.protocol import handshake
from lightning_swarm.protocol.handshake import HandshakeResult, installed_version

SUPPORTED_PYTHON: Final = ">=3.11"
SUPPORTED: Final[Mapping[str, str]] = {
    "lightning": ">=2.5,<2.7",
    "torch": ">=2.4",
    "hivemind": ">=1.1.12,<1.2",
    "numpy": "<2.4",
}
"""As in the package's own requirements, which pip does not enforce on what is installed later."""

LEAST_FREE_BYTES: Final = 1 << 30

MOST_SKEW_S: Final = 3.0
"""hivemind lets nobody into its DHT whose clock is farther off: announcements expire by wall clock."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Args:
        check: What was looked at.
        found: What is there.
        remedy: What to do; None where nothing is wrong.
    """

    check: str
    found: str
    remedy: str | None = None

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return self.remedy is None


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """What is known of a folder.

    Args:
        path: Where it is.
        purpose: What a swarm keeps there.
        problem: Why no file can be written; None if one can.
        free_bytes: Room on its disk; 0 if it could not be asked.
    """

    path: str
    purpose: str
    problem: str | None
    free_bytes: int


def check_python(version: str) -> Finding:
    """The interpreter is new enough."""
    fits = SpecifierSet(SUPPORTED_PYTHON).contains(version, prereleases=True)
    remedy = None if fits else f"Use a Python {SUPPORTED_PYTHON}."
    return Finding(check="Python", found=version, remedy=remedy)


def check_version(package: str, version: str | None) -> Finding:
    """An installed package is one that the swarm works with.

    Args:
        package: One of `SUPPORTED`.
        version: The installed one; None if there is none.
    """
    supported = SUPPORTED[package]
    install = f'Run: pip install "{package}{supported}"'
    if version is None:
        return Finding(check=package, found="not installed", remedy=install)
    if not SpecifierSet(supported).contains(version, prereleases=True):
        return Finding(check=package, found=f"{version}, but {supported} is needed", remedy=install)
    return Finding(check=package, found=version)


def check_binary(path: str | None, *, executable: bool) -> Finding:
    """libp2p's daemon, which carries all connections, is there and can be run.

    Args:
        path: Where it is; None if it is nowhere.
        executable: This user may run it.
    """
    reinstall = f'Run: pip install --force-reinstall --no-deps "hivemind{SUPPORTED["hivemind"]}"'
    if path is None:
        return Finding(check="daemon's file", found="hivemind was installed without its program p2pd", remedy=reinstall)
    if not executable:
        return Finding(check="daemon's file", found=f"{path} must not be run", remedy=f"Run: chmod +x {path}")
    return Finding(check="daemon's file", found=path)


def check_port(host: str, port: int, problem: str | None) -> Finding:
    """This machine can listen.

    Args:
        host: The address.
        port: The TCP port; 0 for any.
        problem: Why it cannot; None if it can.
    """
    where = f"{host}, {f'port {port}' if port else 'any port'}"
    if problem is None:
        return Finding(check="port", found=f"{where}: free")
    if not 0 <= port < 1 << 16:
        return Finding(check="port", found=f"{where}: {problem}", remedy="Take a port of 1 to 65535, or 0 for any.")
    remedy = (
        f"End the program that listens there (`ss -ltnp 'sport = :{port}'` names it), or take another port."
        if port
        else "Take an address of this machine: 127.0.0.1 for itself only, 0.0.0.0 for all of its networks."
    )
    return Finding(check="port", found=f"{where}: {problem}", remedy=remedy)


def check_daemon(problem: str | None, start_s: float) -> Finding:
    """The daemon starts.

    Args:
        problem: Why it did not; None if it did.
        start_s: Seconds that this took.
    """
    if problem is None:
        return Finding(check="daemon", found=f"starts in {start_s:.1f} s")
    return Finding(
        check="daemon",
        found=f"does not start: {problem}",
        remedy="Mend what is named above first. Else: a firewall or a container may forbid it to run or to listen.",
    )


def check_folder(folder: FolderReport) -> Finding:
    """A folder can be written to and has room."""
    check = f"folder for {folder.purpose}"
    if folder.problem is not None:
        return Finding(
            check=check,
            found=f"{folder.path}: {folder.problem}",
            remedy=f"Make {folder.path} a folder that this user may write to.",
        )
    free = f"{folder.path}, {folder.free_bytes / (1 << 30):.1f} GiB free"
    if folder.free_bytes < LEAST_FREE_BYTES:
        return Finding(
            check=check,
            found=free,
            remedy=f"Make room on the disk of {folder.path}: at least {LEAST_FREE_BYTES >> 30} GiB.",
        )
    return Finding(check=check, found=free)


def check_threads(num_threads: int, num_cores: int) -> Finding:
    """Threads do not outnumber the cores that this process may use.

    Args:
        num_threads: With which torch computes.
        num_cores: That this process may run on.
    """
    found = f"{num_threads} on {num_cores} core{'s' if num_cores > 1 else ''}"
    if num_threads <= num_cores:
        return Finding(check="torch's threads", found=found)
    return Finding(
        check="torch's threads",
        found=f"{found}: they wait for each other",
        remedy=f"Run: export OMP_NUM_THREADS={num_cores} (divided by the number of peers on this machine)",
    )


# ---------------------------------------------------------------------- other peers


class Obstacle(Enum):
    """What stands between this machine and a peer: what is wrong, and what to do."""

    NAME = ("its name does not resolve", "Check the spelling, or give its IP address.")
    REFUSED = (
        "its machine refuses the connection",
        "Check that the peer still runs, and its port. Without `listen` only its own machine can reach it.",
    )
    SILENCE = (
        "it does not answer",
        "Check that the peer still runs, and that the firewalls on the way (a cloud's too) let its port through.",
    )
    ROUTE = ("there is no way to it", "Check the address, and this machine's network.")
    PROTOCOL = ("what listens there is no peer", "Check the port: another program has it.")
    IDENTITY = (
        "another peer than the address says listens there",
        "Copy the address again: a peer that was started anew has another id, unless it has an `identity_path`.",
    )
    STRANGER = (
        "it is a libp2p peer, but none of lightning_swarm that this one understands",
        "Install the same version of lightning_swarm here and there.",
    )

    def __init__(self, what: str, remedy: str) -> None:
        self.what = what
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class DialResult:
    """How far an attempt to reach a peer got.

    Args:
        address: Host and port of whom it was for.
        obstacle: What ended it; None if nothing did.
        detail: What the system said.
    """

    address: str
    obstacle: Obstacle | None = None
    detail: str = ""


def check_reach(dialed: DialResult, round_trip_s: float | None = None) -> Finding:
    """A peer can be reached.

    Args:
        dialed: How far it went.
        round_trip_s: Of the quickest question and answer; None if nobody was asked.
    """
    check = f"peer {dialed.address}"
    if dialed.obstacle is not None:
        said = f" ({' '.join(dialed.detail.split())})" if dialed.detail else ""
        return Finding(check=check, found=f"{dialed.obstacle.what}{said}", remedy=dialed.obstacle.remedy)
    if round_trip_s is None:
        return Finding(check=check, found="libp2p answers there; who it is needs a daemon here")
    return Finding(check=check, found=f"reachable, round trip {round_trip_s * 1e3:.1f} ms")


def check_clock(address: str, ahead_s: float, round_trip_s: float) -> Finding:
    """The clocks here and there agree.

    Args:
        address: The peer's.
        ahead_s: By how much its clock is ahead of the one here.
        round_trip_s: Half of it is how well that is known.
    """
    way = "ahead of" if ahead_s > 0 else "behind"
    found = f"{address} is {abs(ahead_s):.2f} s {way} this machine"
    if abs(ahead_s) <= MOST_SKEW_S + round_trip_s / 2:
        return Finding(check="clock", found=found)
    return Finding(
        check="clock",
        found=f"{found}, at most {MOST_SKEW_S:g} s are allowed",
        remedy="Set the clock that is wrong, here or there. Run: sudo timedatectl set-ntp true "
        "(on macOS: sudo sntp -sS pool.ntp.org)",
    )


def check_protocol(address: str, here: int, there: int) -> Finding:
    """A peer speaks as this one does.

    Args:
        address: The peer's.
        here: Protocol version of this package.
        there: Of the peer's.
    """
    if here == there:
        return Finding(check="protocol", found=f"version {here} here and at {address}")
    return Finding(
        check="protocol",
        found=f"version {here} here, {there} at {address}",
        remedy="Install the same version of lightning_swarm on both sides.",
    )


def compare_versions(address: str, here: Mapping[str, str], there: Mapping[str, str]) -> Finding:
    """What else is installed may differ; it is said, because numbers then agree up to rounding only.

    Args:
        address: The peer's.
        here: Versions by package.
        there: Those of the peer.
    """
    names = [*here, *(name for name in there if name not in here)]
    others = [
        f"{name} {here.get(name, 'none')} here, {there.get(name, 'none')} there"
        for name in names
        if here.get(name) != there.get(name)
    ]
    same = ", ".join(f"{name} {version}" for name, version in here.items())
    found = f"differ, which works: {'; '.join(others)}" if others else f"{same}, as here"
    return Finding(check=f"versions at {address}", found=found)


_TIMEOUT_S: Final = 10.0
# What two libp2p peers say first, each to the other, with its length before it.
_MULTISTREAM: Final = b"\x13/multistream/1.0.0\n"


def knock(address: Address, *, timeout: float = _TIMEOUT_S) -> DialResult:
    """Look whether libp2p answers at an address, without libp2p.

    Args:
        address: Whose peer id is not looked at.
        timeout: Seconds for each attempt to connect or to read.
    """
    at = str(address.place)
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return DialResult(address=at, obstacle=Obstacle.NAME, detail=str(error))
    try:
        with socket.create_connection((address.host, address.port), timeout) as connection:
            return DialResult(address=at, obstacle=_obstacle_to_libp2p(connection))
    except ConnectionRefusedError as error:
        return DialResult(address=at, obstacle=Obstacle.REFUSED, detail=str(error))
    except TimeoutError:
        return DialResult(address=at, obstacle=Obstacle.SILENCE, detail=f"no answer within {timeout:g} s")
    except OSError as error:
        return DialResult(address=at, obstacle=Obstacle.ROUTE, detail=str(error))


def _obstacle_to_libp2p(connection: socket.socket) -> Obstacle | None:
    said = b""
    with contextlib.suppress(OSError):  # who speaks another protocol hangs up, or waits for what never comes
        connection.sendall(_MULTISTREAM)
        while len(said) < len(_MULTISTREAM) and (more := connection.recv(len(_MULTISTREAM) - len(said))):
            said += more
    return None if said == _MULTISTREAM else Obstacle.PROTOCOL


def meet(addresses: Sequence[Address]) -> Iterator[tuple[DialResult, HandshakeResult | None]]:
    """Ask the peers at addresses, behind each of which libp2p answers, who they are."""
    from lightning_swarm.core.event_loop import ThreadRuntime
    from lightning_swarm.network import hivemind  # a second, and only needed here

    with contextlib.closing(ThreadRuntime("doctor")) as runtime:
        transport, directory = runtime.run(hivemind.start(startup_timeout=_TIMEOUT_S))
        try:
            for address in addresses:
                yield runtime.run(_meet(transport, address))
        finally:
            runtime.run(directory.close())
            runtime.run(transport.close())


async def _meet(transport: Transport, address: Address) -> tuple[DialResult, HandshakeResult | None]:
    at, obstacle = str(address.place), Obstacle.IDENTITY
    try:
        await transport.connect([address.maddr])
        obstacle = Obstacle.STRANGER
        return DialResult(address=at), await handshake.meet(transport, address.peer_id, timeout=_TIMEOUT_S)
    except DeadlineExceeded as error:
        return DialResult(address=at, obstacle=Obstacle.SILENCE, detail=str(error)), None
    except SwarmError as error:
        return DialResult(address=at, obstacle=obstacle, detail=str(error)), None


_SOCKETS = Path("/tmp")  # fixed by hivemind, whatever TMPDIR says
_START_TIMEOUT_S = 30.0


def examine(*, host: str = "127.0.0.1", port: int = 0, addresses: Sequence[Address] = ()) -> Iterator[Finding]:
    """Check this machine, the cheap things first, and the way to other peers.

    Args:
        host: The address to listen on.
        port: The TCP port; 0 for any.
        addresses: Of running peers.
    """
    yield check_python(platform.python_version())
    versions = [check_version(name, installed_version(name)) for name in SUPPORTED]
    yield from versions
    for path, purpose in _folders().items():
        yield check_folder(look_at_folder(path, purpose))
    if all(finding.ok for finding in versions if finding.check == "torch"):
        yield check_threads(_num_threads(), _num_cores())
    daemon = find_daemon()
    binary = check_binary(str(daemon) if daemon else None, executable=bool(daemon and os.access(daemon, os.X_OK)))
    yield binary
    listening = check_port(host, port, try_port(host, port))
    yield listening
    # Where it cannot start, the reason has been said.
    startable = all(finding.ok for finding in (*versions, binary))
    if startable and listening.ok:
        daemon_starts = check_daemon(*try_daemon(host, port))
        yield daemon_starts
        startable = daemon_starts.ok
    yield from _examine_peers(addresses, with_daemon=startable)


def _examine_peers(addresses: Sequence[Address], *, with_daemon: bool) -> Iterator[Finding]:
    answering = []
    for address in addresses:
        dialed = knock(address)
        if dialed.obstacle is None and with_daemon:
            answering.append(address)
        else:
            yield check_reach(dialed)
    if not answering:
        return
    here = handshake.own_greeting(0.0)
    for dialed, meeting in meet(answering):
        yield check_reach(dialed, meeting.round_trip_s if meeting else None)
        if meeting is not None:
            there = meeting.greeting
            yield check_protocol(dialed.address, here.protocol_version, there.protocol_version)
            yield compare_versions(dialed.address, here.versions, there.versions)
            yield check_clock(dialed.address, meeting.ahead_s, meeting.round_trip_s)


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
        from lightning_swarm.core.event_loop import ThreadRuntime
        from lightning_swarm.network import hivemind

        with contextlib.closing(ThreadRuntime("doctor")) as runtime:
            listen = HostPort(host, port)
            transport, directory = runtime.run(hivemind.start(listen=listen, startup_timeout=_START_TIMEOUT_S))
            took_s = time.monotonic() - begin_s
            runtime.run(directory.close())
            runtime.run(transport.close())
    except Exception as error:  # noqa: BLE001 - whatever it is, to say it is the purpose
        return f"{type(error).__name__}: {error}", time.monotonic() - begin_s
    return None, took_s


def look_at_folder(path: Path, purpose: str) -> FolderReport:
    """Write a file, and ask for the room."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
        free_bytes = shutil.disk_usage(path).free
    except OSError as error:
        return FolderReport(path=str(path), purpose=purpose, problem=error.strerror or str(error), free_bytes=0)
    return FolderReport(path=str(path), purpose=purpose, problem=None, free_bytes=free_bytes)


def _folders() -> dict[Path, str]:
    return {Path.cwd(): "checkpoints and logs", _SOCKETS: "the daemon's sockets"}


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
