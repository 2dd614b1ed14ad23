"""Hosts on one machine: network namespaces on a switch, each by a link whose rate is limited (`tc`, tbf), and delayed.

Needs Linux, root and iproute2; for links with latency /dev/net/tun.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Self

from benchmarks.delays import TUN, Delayed, delaying
from benchmarks.runs import start

DEVICE = "uplink"  # `ip` takes the word "link" for its own
"""Each host's end of its link."""

SEND_SIZES = "/proc/sys/net/ipv4/tcp_wmem"
"""Of buffers of TCP for what is under way, smallest, first and largest: a network namespace has its own."""

BEHIND = "192.168.77.2"
"""The address of a host behind a router. No host beside that router has a way to it."""

_ROUTER = "192.168.77.1"
_FORWARDS = "/proc/sys/net/ipv4/ip_forward"


class Hosts:
    """Some of them, all on one switch.

    Args:
        mbits: What each one's link carries each way, in Mb/s; 0: no limit.
        latencies_s: From each one to the switch, and back; as many, or none. Between two hosts it is both of theirs.
        send_bytes: Largest buffer of what a connection has under way, with what the kernel needs beside it; 0: Linux's
            own, of 4 MiB.
    """

    def __init__(self, mbits: Sequence[float], latencies_s: Sequence[float] = (), *, send_bytes: int = 0) -> None:
        self._mbits = mbits
        self._latencies_s = latencies_s or [0.0] * len(mbits)
        self._send_bytes = send_bytes
        self._open = ExitStack()
        self._delay: Callable[[Sequence[float]], None] | None = None
        self._cores = sorted(os.sched_getaffinity(0))
        self._switch, *self._names = (f"swarm-{os.getpid()}-{number}" for number in range(len(mbits) + 1))

    @staticmethod
    def missing(*, delayed: bool = False, routed: bool = False) -> str:
        """What this machine lacks of what it needs; more, if links are `delayed`, or hosts stand behind routers."""
        programs = ("ip", "tc", "taskset", *(["iptables"] if routed else []))
        found = [name for name in programs if shutil.which(name) is None]
        found += ["root"] if os.geteuid() != 0 else []
        found += [str(TUN)] if delayed and not TUN.exists() else []
        return ", ".join(found)

    @staticmethod
    def address(number: int) -> str:
        """Of a host."""
        return f"10.213.77.{number + 1}"

    def namespace(self, number: int) -> str:
        """The network namespace of a host."""
        return self._names[number]

    @contextmanager
    def behind(self, number: int) -> Iterator[str]:
        """Make a host a router, with one host behind it. Yields the network namespace of that one.

        It reaches all others, by an address of the router's. None of them can begin a connection to it.
        """
        router, name = self._names[number], f"{self._names[number]}-inner"
        _run(f"ip netns add {name}")
        try:
            _run(f"ip link add inner netns {router} type veth peer name {DEVICE} netns {name}")
            _run(f"ip -n {router} address add {_ROUTER}/24 dev inner")
            _run(f"ip -n {router} link set inner up")
            _run(f"ip -n {name} address add {BEHIND}/24 dev {DEVICE}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set {DEVICE} up")
            _run(f"ip -n {name} route add default via {_ROUTER}")
            subprocess.run([*self.on(number), "tee", _FORWARDS], input=b"1", capture_output=True, check=True)
            _run(f"ip netns exec {router} iptables -t nat -A POSTROUTING -o {DEVICE} -j MASQUERADE")
            yield name
        finally:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def on(self, number: int, *, core: int | None = None) -> Sequence[str]:
        """What a command on a host begins with. With `core` it has one of the machine's for itself."""
        pinned = [] if core is None else ["taskset", "--cpu-list", str(self._cores[core])]
        return ["ip", "netns", "exec", self._names[number], *pinned]

    def __enter__(self) -> Self:
        try:
            _run(f"ip netns add {self._switch}")
            _run(f"ip -n {self._switch} link add switch type bridge")
            _run(f"ip -n {self._switch} link set switch up")
            self._make_lines()
            for number, (name, mbit) in enumerate(zip(self._names, self._mbits, strict=True)):
                port = f"port{number}"
                _run(f"ip -n {self._switch} link set {port} master switch up")
                _run(f"ip -n {name} address add {self.address(number)}/24 dev {DEVICE}")
                _run(f"ip -n {name} link set lo up")
                _run(f"ip -n {name} link set {DEVICE} up")
                if self._send_bytes:
                    sizes = f"4096 16384 {self._send_bytes}".encode()
                    subprocess.run([*self.on(number), "tee", SEND_SIZES], input=sizes, capture_output=True, check=True)
                if mbit:
                    self._limit(number, mbit)
        except BaseException:
            self.__exit__()
            raise
        return self

    def change(self, mbits: Sequence[float], latencies_s: Sequence[float]) -> None:
        """What the links carry, and how late, from now on: of those that have a limit, and a latency, already."""
        for number, mbit in enumerate(mbits):
            self._limit(number, mbit)
        if self._delay is not None:
            self._delay(latencies_s)

    def _limit(self, number: int, mbit: float) -> None:
        for namespace, device in ((self._names[number], DEVICE), (self._switch, f"port{number}")):
            limit = f"tbf rate {mbit}mbit burst 128kb latency 200ms"
            _run(f"tc -n {namespace} qdisc replace dev {device} root {limit}")

    def _make_lines(self) -> None:
        """Each host, and a pair of devices to it. They are not up."""
        late = [
            Delayed(f"{DEVICE}{number}", f"port{number}", latency_s)
            for number, latency_s in enumerate(self._latencies_s)
            if latency_s
        ]
        if late:
            self._delay = self._open.enter_context(delaying(late, before=["ip", "netns", "exec", self._switch]))
        for number, (name, latency_s) in enumerate(zip(self._names, self._latencies_s, strict=True)):
            _run(f"ip netns add {name}")
            if latency_s:
                _run(f"ip -n {self._switch} link set {DEVICE}{number} netns {name} name {DEVICE}")
            else:
                ends = f"{DEVICE} netns {name} type veth peer name port{number} netns {self._switch}"
                _run(f"ip link add {ends}")

    def __exit__(self, *error: object) -> None:
        self._open.close()
        for name in (self._switch, *self._names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)  # it may not be there


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def serving(
    hosts: Hosts,
    number: int,
    module: str,
    *options: object,
    core: int | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """A server on a host, which waits for a run. Yields where it is.

    Args:
        hosts: Of which one.
        number: Which.
        module: Whose LightningModule it serves.
        options: Of that.
        core: As `Hosts.on` has it.
        environment: As `start` has it.
    """
    where = re.compile(rf"{re.escape(hosts.address(number))}:\d+/\w+")
    serve = ("-m", "lightning_swarm", "serve", "--listen", hosts.address(number), "-m", module, *options)
    before = hosts.on(number, core=core)
    process = start(*serve, before=before, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            found = where.search(line)
            if found:
                break
        else:
            raise RuntimeError(f"the server ended before it said where it is:\n{''.join(said)}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # else it would wait for a reader
        yield found[0]
        process.wait(60.0)
    finally:
        process.kill()
        process.wait()
