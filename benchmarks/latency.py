"""What links with latency give a program: the round trip of a byte, and Mb/s of a long transfer, by TCP.

The latency of each row is that from host to host, half of it on either's link. Needs Linux, root, iproute2 and
/dev/net/tun. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product

from benchmarks.ends import Measured
from benchmarks.hosts import Hosts
from benchmarks.report import picture, table, write

ROWS = tuple(product((100.0, 500.0, 0.0), (0.0, 0.01, 0.05, 0.1)))
"""Mb/s of the links, and seconds one way."""


def measure(
    mbit: float, latency_s: float, *, seconds: float = 8.0, num_trips: int = 20, send_bytes: int = 0
) -> Measured:
    """Of two hosts.

    Args:
        mbit: Of either's link; 0: no limit.
        latency_s: From the one to the other.
        seconds: Of the transfer.
        num_trips: Of the byte.
        send_bytes: As `Hosts` has it.
    """
    with Hosts([mbit] * 2, [latency_s / 2] * 2, send_bytes=send_bytes) as hosts:
        return ask(hosts, seconds=seconds, num_trips=num_trips)


def ask(hosts: Hosts, *, seconds: float, num_trips: int) -> Measured:
    """As `measure`, of the first two of some hosts."""
    options = hosts.address(1), str(seconds), str(num_trips)
    program = sys.executable, "-m", "benchmarks.ends"
    with subprocess.Popen([*hosts.on(1), *program, "serve", *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()  # it listens
            asking = [*hosts.on(0), *program, "ask", *options]
            said = subprocess.run(
                asking, stdout=subprocess.PIPE, text=True, check=True, timeout=30.0 + 4 * seconds
            ).stdout
            return Measured(**json.loads(said))
        finally:
            server.kill()


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args(words)
    if Hosts.missing(delayed=True):
        parser.error(f"it needs Linux, root, iproute2 and TAP devices; not found: {Hosts.missing(delayed=True)}")
    rows: list[list[object]] = [["link, Mb/s", "one way, ms", "round trip, ms", "Mb/s"]]
    drawn: dict[str, list[float]] = {}
    for mbit, latency_s in ROWS:
        found = measure(mbit, latency_s, seconds=arguments.seconds)
        link = f"{mbit:.0f}" if mbit else "no limit"
        rows.append([link, f"{latency_s * 1e3:.0f}", f"{found.round_trip_s * 1e3:.2f}", f"{found.mbit:.0f}"])
        if mbit:  # what no link limits would dwarf the others
            drawn[f"{link}, {latency_s * 1e3:.0f} ms one way"] = [found.mbit]
        print(*rows[-1], flush=True)
    write("latency", table("Links with latency", rows))
    picture("latency", "What one TCP connection carries, by link, Mb/s", "Mb/s", drawn)


if __name__ == "__main__":
    main()
