"""Two ends of TCP connections: what a byte takes there and back, and what a long transfer carries.

As a program: ``serve`` or ``ask``, the address of who serves, seconds of the transfer, trips of the byte. It imports
nothing of this package, so that it begins at once.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from dataclasses import asdict, dataclass

_PORT = 5201
_CHUNK = bytes(1 << 18)
_RAMP = 0.5
"""Of a transfer: TCP finds out in it what the way carries."""


@dataclass(frozen=True)
class Measured:
    """Of the way between two hosts.

    Args:
        connect_s: For a handshake.
        round_trip_s: The median, of one byte there and one back.
        mbit: Mb/s that arrived, without headers, in the second half of a transfer.
    """

    connect_s: float
    round_trip_s: float
    mbit: float


def serve(address: str, seconds: float) -> None:
    """Send every byte back of the first connection; of the second, say what has come."""
    with socket.create_server((address, _PORT)) as listening:
        print("listening", flush=True)
        with listening.accept()[0] as trips:
            _send_at_once(trips)
            while byte := trips.recv(1):
                trips.sendall(byte)
        with listening.accept()[0] as transfer:
            transfer.sendall(json.dumps(_arriving(transfer, seconds)).encode())
            transfer.shutdown(socket.SHUT_WR)
            while transfer.recv(1 << 20):
                pass


def _arriving(transfer: socket.socket, seconds: float) -> float:
    """Mb/s, after the ramp."""
    view, num_bytes, began_s = memoryview(bytearray(1 << 20)), 0, time.monotonic()
    counted_s = began_s + _RAMP * seconds
    while (now_s := time.monotonic()) < began_s + seconds:
        came = transfer.recv_into(view)
        num_bytes += came if now_s >= counted_s else 0
    return num_bytes * 8e-6 / (time.monotonic() - counted_s)


def ask(address: str, seconds: float, num_trips: int) -> Measured:
    """Of the way to who serves."""
    began_s = time.monotonic()
    with socket.create_connection((address, _PORT)) as trips:
        connect_s = time.monotonic() - began_s
        _send_at_once(trips)
        taken_s = []
        for _ in range(num_trips):
            began_s = time.monotonic()
            trips.sendall(b"x")
            trips.recv(1)
            taken_s.append(time.monotonic() - began_s)
    with socket.create_connection((address, _PORT)) as transfer:
        until_s = time.monotonic() + 2 * seconds
        while time.monotonic() < until_s and not _readable(transfer):
            transfer.send(_CHUNK)
        transfer.shutdown(socket.SHUT_WR)
        mbit = json.loads(transfer.recv(1 << 10))
    return Measured(connect_s, statistics.median(taken_s), mbit)


def _readable(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return False


def _send_at_once(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main() -> None:
    """One of the ends."""
    what, address, seconds, num_trips = sys.argv[1:]
    if what == "serve":
        serve(address, float(seconds))
    else:
        print(json.dumps(asdict(ask(address, float(seconds), int(num_trips)))))


if __name__ == "__main__":
    main()
