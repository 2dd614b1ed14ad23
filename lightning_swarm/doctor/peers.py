"""How other peers are looked at: first their machine, then their port, then they themselves."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Final

from lightning_swarm import hello
from lightning_swarm.doctor.policy import Dialed, Obstacle
from lightning_swarm.errors import DeadlineExceeded, SwarmError
from lightning_swarm.hello import Meeting
from lightning_swarm.network import Transport
from lightning_swarm.network.addresses import Address

_TIMEOUT_S: Final = 10.0
# What two libp2p peers say first, each to the other, with its length before it.
_MULTISTREAM: Final = b"\x13/multistream/1.0.0\n"


def knock(address: Address, *, timeout: float = _TIMEOUT_S) -> Dialed:
    """Look whether libp2p answers at an address, without libp2p.

    Args:
        address: Whose peer id is not looked at.
        timeout: Seconds for each attempt to connect or to read.
    """
    at = str(address.place)
    try:
        socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Dialed(address=at, obstacle=Obstacle.NAME, detail=str(error))
    try:
        with socket.create_connection((address.host, address.port), timeout) as connection:
            return Dialed(address=at, obstacle=_obstacle_to_libp2p(connection))
    except ConnectionRefusedError as error:
        return Dialed(address=at, obstacle=Obstacle.REFUSED, detail=str(error))
    except TimeoutError:
        return Dialed(address=at, obstacle=Obstacle.SILENCE, detail=f"no answer within {timeout:g} s")
    except OSError as error:
        return Dialed(address=at, obstacle=Obstacle.ROUTE, detail=str(error))


def _obstacle_to_libp2p(connection: socket.socket) -> Obstacle | None:
    said = b""
    with contextlib.suppress(OSError):  # who speaks another protocol hangs up, or waits for what never comes
        connection.sendall(_MULTISTREAM)
        while len(said) < len(_MULTISTREAM) and (more := connection.recv(len(_MULTISTREAM) - len(said))):
            said += more
    return None if said == _MULTISTREAM else Obstacle.PROTOCOL


def meet(addresses: Sequence[Address]) -> Iterator[tuple[Dialed, Meeting | None]]:
    """Ask the peers at addresses, behind each of which libp2p answers, who they are."""
    from lightning_swarm.network import hivemind  # a second, and only needed here
    from lightning_swarm.runtime import ThreadRuntime

    with contextlib.closing(ThreadRuntime("doctor")) as runtime:
        transport, directory = runtime.run(hivemind.start(startup_timeout=_TIMEOUT_S))
        try:
            for address in addresses:
                yield runtime.run(_meet(transport, address))
        finally:
            runtime.run(directory.close())
            runtime.run(transport.close())


async def _meet(transport: Transport, address: Address) -> tuple[Dialed, Meeting | None]:
    at, obstacle = str(address.place), Obstacle.IDENTITY
    try:
        await transport.connect([address.maddr])
        obstacle = Obstacle.STRANGER
        return Dialed(address=at), await hello.meet(transport, address.peer_id, timeout=_TIMEOUT_S)
    except DeadlineExceeded as error:
        return Dialed(address=at, obstacle=Obstacle.SILENCE, detail=str(error)), None
    except SwarmError as error:
        return Dialed(address=at, obstacle=obstacle, detail=str(error)), None
