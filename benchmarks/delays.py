"""Links with latency, where the kernel has no `netem`: whole frames wait in a process of this program.

Each link is a pair of TAP devices. What the kernel sends over the one comes out of the other after the link's latency,
so handshakes and acknowledgements are late, too, no address is changed, and `tc` limits either end as it does any
device's. Frames pass as the kernel's offloading leaves them, of up to 64 KiB each: that makes Python fast enough.

Needs Linux, root and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

TUN: Final = Path("/dev/net/tun")

# <linux/if_tun.h>
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUMS, _TSO4, _TSO6 = 0x01, 0x02, 0x04

_FRAME_BYTES: Final = (64 << 10) + 512
_AT_ONCE: Final = 64
"""Frames that are read from a link before others have their turn."""


@dataclass(frozen=True)
class Delayed:
    """A link.

    Args:
        one: Name of the device at its one end.
        other: At its other end.
        latency_s: From end to end, either way.
    """

    one: str
    other: str
    latency_s: float


@contextmanager
def delaying(links: Sequence[Delayed], *, before: Sequence[str]) -> Iterator[Callable[[Sequence[float]], None]]:
    """Make the links' devices, and carry frames between them; they are gone afterwards. Yields what changes latencies.

    Args:
        links: Each of them.
        before: What a command in the network namespace begins with where the devices are made. An end that is moved to
            another namespace goes on carrying.
    """
    words = [word for link in links for word in (link.one, link.other, str(link.latency_s))]
    program = [*before, sys.executable, "-m", "benchmarks.delays", *words]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def change(latencies_s: Sequence[float]) -> None:
            assert process.stdin is not None
            print(*latencies_s, file=process.stdin, flush=True)

        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("the process that was to delay frames ended before it began; it has said why")
            yield change
        finally:
            process.kill()


@dataclass
class _Way:
    """One direction of a link: where frames come out of the kernel, where they go, and those between."""

    source: int
    target: int
    latency_s: float
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)

    def take(self) -> None:
        """What has come. It is late from now on."""
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                frame = os.read(self.source, _FRAME_BYTES)
                self.waiting.append((time.monotonic() + self.latency_s, frame))

    def give(self, now_s: float) -> None:
        """What is due."""
        while self.waiting and self.waiting[0][0] <= now_s:
            with suppress(OSError):  # the device is down, or full: a frame may be lost
                os.write(self.target, self.waiting.popleft()[1])


def _carry(ways: Sequence[_Way]) -> None:
    sources = {way.source: way for way in ways}
    orders = sys.stdin.fileno()
    while True:
        due_s = min((way.waiting[0][0] for way in ways if way.waiting), default=None)
        # Not asyncio: its loop sleeps in whole milliseconds.
        ready, _, _ = select.select(
            [*sources, orders], (), (), None if due_s is None else max(0.0, due_s - time.monotonic())
        )
        for source in ready:
            if source == orders:
                _obey(ways)
            else:
                sources[source].take()
        for way in ways:
            way.give(time.monotonic())


def _obey(ways: Sequence[_Way]) -> None:
    """Frames that come from now on take as long as is said on the standard input: by line, seconds."""
    said = os.read(sys.stdin.fileno(), 1 << 12).decode()
    if not said:
        sys.exit()  # nobody is there any more
    for number, latency_s in enumerate(map(float, said.splitlines()[-1].split())):
        for way in ways[2 * number : 2 * number + 2]:
            way.latency_s = latency_s


def _open(name: str) -> int:
    """A new TAP device. It is gone when this is closed."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUMS | _TSO4 | _TSO6)
    return device


def main() -> None:
    """Carry frames until somebody ends this; says when it begins."""
    words = sys.argv[1:]
    ways = []
    for one, other, latency_s in zip(words[::3], words[1::3], words[2::3], strict=True):
        ends = _open(one), _open(other)
        ways += [_Way(*pair, float(latency_s)) for pair in (ends, ends[::-1])]
    print("ready", flush=True)
    _carry(ways)


if __name__ == "__main__":
    main()
