"""The doctor: checks whether this machine can be a peer and reaches other peers, as a visitor of their runs."""

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
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_swarm.core.errors import (
    AccessDenied,
    DeadlineExceeded,
    InitialPeersSilent,
    SwarmError,
    Uncertified,
    Untrusted,
)
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.monitor import checks
from lightning_swarm.monitor.checks import DialResult, Finding, Obstacle
from lightning_swarm.network import PeerId
from lightning_swarm.network.access import Certify
from lightning_swarm.network.addresses import Address, HostPort, listen_error
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.protocol import queries
from lightning_swarm.protocol.queries import GreetingResult, installed_version
from lightning_swarm.protocol.rpc import RPCS
from lightning_swarm.trust.credentials import is_untimely

_TIMEOUT_S: Final = 10.0
_MAX_PROBES: Final = 16  # simultaneous connections
_PAUSES_S: Final = (0.5, 1.0)  # between attempts to reach a peer
_START_TIMEOUT_S: Final = 30.0
_BY_INVITATION: Final = "reachable; it answers invited peers only. Pass your invitation: `--invite FILE`"
_SOCKETS: Final = Path("/tmp")  # hivemind puts the daemon's sockets here, whatever TMPDIR says
_MULTISTREAM: Final = b"\x13/multistream/1.0.0\n"  # the first message of libp2p peers, after its length


def probe_port(address: Address, *, timeout: float = _TIMEOUT_S) -> DialResult:
    """Check over a plain socket whether libp2p answers at an address. The peer's id stays unknown."""
    at = str(address.host_port)
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return DialResult(at, Obstacle.NAME, str(error))
    try:
        with socket.create_connection((address.host, address.port), timeout) as connection:
            return DialResult(at, _obstacle_to_libp2p(connection))
    except ConnectionRefusedError as error:
        return DialResult(at, Obstacle.REFUSED, str(error))
    except TimeoutError:
        return DialResult(at, Obstacle.SILENCE, f"no answer within {timeout:g} s")
    except OSError as error:
        return DialResult(at, Obstacle.ROUTE, str(error))


def _obstacle_to_libp2p(connection: socket.socket) -> Obstacle | None:
    """Return None if the other side answers libp2p's first message with the same message."""
    received = b""
    with contextlib.suppress(OSError):  # a program of another protocol may close the connection, or never answer
        connection.sendall(_MULTISTREAM)
        while len(received) < len(_MULTISTREAM) and (chunk := connection.recv(len(_MULTISTREAM) - len(received))):
            received += chunk
    return None if received == _MULTISTREAM else Obstacle.PROTOCOL


def check_answering(addresses: Sequence[Address]) -> None:
    """Raise `InitialPeersSilent` if libp2p answers at none of these addresses, in a few attempts."""
    dialed: list[DialResult] = []
    for pause_s in (*_PAUSES_S, 0.0):
        dialed = _probe_until_answer(addresses)
        if any(result.obstacle is None for result in dialed):
            return
        if not any(result.obstacle is Obstacle.REFUSED for result in dialed):  # else a peer may be starting
            break
        time.sleep(pause_s)
    if addresses:
        raise InitialPeersSilent(" ".join(map(_complaint, addresses, dialed)))


def _probe_until_answer(addresses: Sequence[Address]) -> list[DialResult]:
    """Probe all addresses at once. Return the first answer's result alone or, without any, all results in order."""
    pool = ThreadPoolExecutor(_MAX_PROBES)
    try:
        probes = [pool.submit(probe_port, address) for address in addresses]
        for done in as_completed(probes):
            if done.result().obstacle is None:
                return [done.result()]
        return [probe.result() for probe in probes]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a silent address would take until the timeout


def explain(addresses: Sequence[Address]) -> str:
    """Explain why no peer was reached under its id, although libp2p answers at one of the addresses."""
    dialed = {address: probe_port(address) for address in addresses}
    answering = [address for address, found in dialed.items() if found.obstacle is None]
    dialed.update(zip(answering, (found for found, _ in greet_all(answering)), strict=True))
    return " ".join(map(_complaint, dialed, dialed.values()))


def _complaint(address: Address, dialed: DialResult) -> str:
    """Return the sentences of an error: the rule for an address, the obstacle that was found, and its remedy."""
    obstacle = dialed.obstacle or Obstacle.SILENCE  # the peer has started since
    detail = f" ({dialed.detail})" if dialed.detail else ""
    return (
        f"a peer to join must answer at the address that names it, {address}: {obstacle.text}{detail}. "
        f"{obstacle.remedy}"
    )


@dataclass(frozen=True)
class Visitor:
    """A peer that examines a run, and takes no part in it."""

    certify: Certify | None = None  # issues its certificate; None: it has none
    is_guess: bool = False  # the certificate may be for another run, or the run may take any peer

    async def introduce(self, transport: BaseTransport, peer: PeerId) -> None:
        """Check a guessed certificate at a peer, and drop it if the peer shows none of the same run."""
        if not self.is_guess:
            return
        try:
            await transport.certify(peer)
        except Untrusted:
            transport.set_credentials(None)


ANYONE: Final = Visitor()


@contextlib.contextmanager
def visit(name: str, visitor: Visitor = ANYONE, **options: Any) -> Iterator[tuple[Runtime, BaseTransport]]:
    """Join the network, but no run, until the context ends; `options` are passed to `hivemind.start`."""
    from lightning_swarm.core.event_loop import ThreadRuntime
    from lightning_swarm.network import hivemind  # this import takes a second, and only visits need it

    with contextlib.closing(ThreadRuntime(name)) as runtime:
        transport, directory = runtime.run(hivemind.start(certify=visitor.certify, rpcs=RPCS, **options))
        try:
            yield runtime, transport
        finally:
            runtime.run(directory.close())
            runtime.run(transport.close())


def greet_all(
    addresses: Sequence[Address], visitor: Visitor = ANYONE
) -> Iterator[tuple[DialResult, GreetingResult | None]]:
    """Connect to addresses where libp2p answers, and exchange greetings with the peers there."""
    with visit("doctor", visitor, startup_timeout=_TIMEOUT_S) as (runtime, transport):
        for address in addresses:
            yield runtime.run(_greet(transport, address, visitor))


async def _greet(
    transport: BaseTransport, address: Address, visitor: Visitor = ANYONE
) -> tuple[DialResult, GreetingResult | None]:
    """Connect to one address, and exchange greetings. A failure is returned as the result's obstacle."""
    at, obstacle = str(address.host_port), Obstacle.IDENTITY
    try:
        await transport.connect([address.maddr])
        obstacle = Obstacle.STRANGER
        await visitor.introduce(transport, address.peer_id)
        return DialResult(at), await queries.greet(transport, address.peer_id, timeout=_TIMEOUT_S)
    except AccessDenied as error:
        if isinstance(error, Uncertified) or visitor.is_guess:
            return DialResult(at, detail=_BY_INVITATION), None
        return DialResult(at, Obstacle.CLOCK if is_untimely(str(error)) else Obstacle.DENIED, str(error)), None
    except DeadlineExceeded as error:
        return DialResult(at, Obstacle.SILENCE, str(error)), None
    except SwarmError as error:
        found = await transport.identify(address.host_port.maddr) if obstacle is Obstacle.IDENTITY else None
        return DialResult(at, obstacle, f"it answers as {found}" if found else str(error)), None


def examine(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    addresses: Sequence[Address] = (),
    visitor: Visitor = ANYONE,  # some peers answer only invited peers
) -> Iterator[Finding]:
    """Check this machine, its address to listen on (port 0: any), and the way to running peers; cheap checks first."""
    yield checks.check_python(platform.python_version())
    versions = [checks.check_version(name, installed_version(name)) for name in checks.SUPPORTED]
    yield from versions
    for path, purpose in ((Path.cwd(), "checkpoints and logs"), (_SOCKETS, "the daemon's sockets")):
        yield checks.check_folder(str(path), purpose, *probe_folder(path))
    if all(finding.ok for finding in versions if finding.check == "torch"):
        yield checks.check_threads(_num_threads(), _num_cores())
    daemon = find_daemon()
    binary = checks.check_binary(
        str(daemon) if daemon else None, executable=bool(daemon and os.access(daemon, os.X_OK))
    )
    yield binary
    listening = checks.check_port(host, port, listen_error(host, port))
    yield listening
    # If the daemon cannot start, an earlier finding has named the reason.
    startable = all(finding.ok for finding in (*versions, binary))
    if startable and listening.ok:
        daemon_starts = checks.check_daemon(*try_daemon(host, port))
        yield daemon_starts
        startable = daemon_starts.ok
    yield from _examine_peers(addresses, visitor, with_daemon=startable)


def _examine_peers(addresses: Sequence[Address], visitor: Visitor, *, with_daemon: bool) -> Iterator[Finding]:
    """Check the way to running peers; without the daemon, only whether libp2p answers at their addresses."""
    answering = []
    for address in addresses:
        dialed = probe_port(address)
        if dialed.obstacle is None and with_daemon:
            answering.append(address)
        else:
            yield checks.check_reach(dialed)
    if not answering:
        return
    here = queries.own_greeting(0.0)
    for dialed, meeting in greet_all(answering, visitor):
        yield checks.check_reach(dialed, meeting.round_trip_s if meeting else None)
        if meeting is not None:
            there = meeting.greeting
            yield checks.check_protocol(dialed.address, here.protocol_version, there.protocol_version)
            yield checks.compare_versions(dialed.address, here.versions, there.versions)
            yield checks.check_clock(dialed.address, meeting.ahead_s, meeting.round_trip_s)


def find_daemon() -> Path | None:
    """Return the path of libp2p's daemon, which comes with hivemind."""
    spec = importlib.util.find_spec("hivemind")
    folders = spec.submodule_search_locations if spec else None
    paths = [Path(folder) / "hivemind_cli" / "p2pd" for folder in folders or ()]
    return next((path for path in paths if path.is_file()), None)


def try_daemon(host: str, port: int) -> tuple[str | None, float]:
    """Start and end a daemon; return the error if it did not start, or None, and the seconds that it took."""
    begin_s = time.monotonic()
    try:
        with visit("doctor", listen=HostPort(host, port), startup_timeout=_START_TIMEOUT_S):
            took_s = time.monotonic() - begin_s
    except Exception as error:  # noqa: BLE001 - the doctor reports any error
        return f"{type(error).__name__}: {error}", time.monotonic() - begin_s
    return None, took_s


def probe_folder(path: Path) -> tuple[str | None, int]:
    """Write a file to a folder; return the error, or None, and the free bytes of its disk (0 after an error)."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
        free_bytes = shutil.disk_usage(path).free
    except OSError as error:
        return error.strerror or str(error), 0
    return None, free_bytes


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
