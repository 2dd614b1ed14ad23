"""Where a swarm pays and where it does not: sizes of a model and of a link, against one machine and against DDP.

Two hosts are two network namespaces of this machine, a core each, joined by a line whose rate is limited (`tc`, tbf).
The swarm has a stage on each; Lightning's DDP, over gloo, has the whole model on each; the plain Trainer has one host.
Needs Linux, root, iproute2 and two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from benchmarks.report import picture, table, write
from benchmarks.runs import start, train

NUM_BLOCKS = 4
BATCH_SIZE = 32
DEVICE = "line"
"""Each host's end of the line."""


class Hosts:
    """Two of them, joined by a line.

    Args:
        mbit: What the line carries each way, in Mb/s.
    """

    def __init__(self, mbit: float) -> None:
        self._mbit = mbit
        self._cores = sorted(os.sched_getaffinity(0))
        self._names = [f"swarm-{os.getpid()}-{number}" for number in range(2)]

    @staticmethod
    def address(number: int) -> str:
        """Of a host."""
        return f"10.213.77.{number + 1}"

    def on(self, number: int) -> Sequence[str]:
        """What a command on a host begins with. It has one core there."""
        return ["ip", "netns", "exec", self._names[number], "taskset", "--cpu-list", str(self._cores[number])]

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                _run(f"ip netns add {name}")
            one, other = self._names
            _run(f"ip link add {DEVICE} netns {one} type veth peer name {DEVICE} netns {other}")
            for number, name in enumerate(self._names):
                _run(f"ip -n {name} address add {self.address(number)}/24 dev {DEVICE}")
                _run(f"ip -n {name} link set lo up")
                _run(f"ip -n {name} link set {DEVICE} up")
                _run(f"tc -n {name} qdisc add dev {DEVICE} root tbf rate {self._mbit}mbit burst 128kb latency 200ms")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)  # it may not be there


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextmanager
def serving(hosts: Hosts, *options: object) -> Iterator[str]:
    """A server on the second host, which waits for a run. Yields where it is."""
    where = re.compile(rf"{re.escape(hosts.address(1))}:\d+/\w+")
    serve = ("-m", "lightning_swarm", "serve", "--listen", hosts.address(1), "-m", "benchmarks.train", *options)
    process = start(*serve, before=hosts.on(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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


def swarm(hosts: Hosts, model: Sequence[object], seconds: float) -> float:
    """Samples/s."""
    # A snapshot every five minutes is little, and much in the seconds that this takes.
    options = (*model, "--num-stages", 2, "--microbatch-size", 2, "--snapshot-interval", 0)
    with serving(hosts, *options) as address:
        own = ("--role", "both", "--devices", 1, "--listen", hosts.address(0), "--initial-peers", address)
        return train(*options, *own, seconds=seconds, before=hosts.on(0)).mean_rate()


def ddp(hosts: Hosts, model: Sequence[object], seconds: float) -> float:
    """Samples/s of both hosts."""
    options = (*model, "--ddp", "--batch-size", BATCH_SIZE // 2)
    common = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
    first, second = ({**common, "NODE_RANK": rank} for rank in "01")
    command = ("-m", "benchmarks.train", "--seconds", seconds, *options)
    with tempfile.TemporaryFile("w+") as said:
        other = start(*command, before=hosts.on(1), environment=second, stdout=subprocess.DEVNULL, stderr=said)
        try:
            return 2 * train(*options, seconds=seconds, before=hosts.on(0), environment=first).mean_rate()
        except Exception as error:
            said.seek(0)
            error.add_note(f"The other host said:\n{said.read()[-4000:]}")
            raise
        finally:
            other.kill()
            other.wait()


def main() -> None:
    """Measure each size with each link, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--mbits", type=float, nargs="+", default=[1000.0, 100.0, 20.0])
    arguments = parser.parse_args()
    missing = [name for name in ("ip", "tc", "taskset") if shutil.which(name) is None]
    if missing or os.geteuid() != 0 or len(os.sched_getaffinity(0)) < 2:
        parser.error(f"it needs Linux, root, two cores and iproute2; not found: {missing or 'root, or two cores'}")
    rows: list[list[object]] = [
        ["d_model", "parameters", "link, Mb/s", "one host", "swarm / one host", "DDP / one host"]
    ]
    drawn: dict[str, list[float]] = {}
    for width in arguments.widths:
        model = ("--width", width, "--num-blocks", NUM_BLOCKS, "--batch-size", BATCH_SIZE)
        for mbit in arguments.mbits:
            with Hosts(mbit) as hosts:
                plain = train(*model, "--plain", seconds=arguments.seconds, before=hosts.on(0)).mean_rate()
                ratios = [way(hosts, model, arguments.seconds) / plain for way in (swarm, ddp)]
            size = f"{12 * width * width * NUM_BLOCKS / 1e6:.1f}M"
            rows.append([width, size, f"{mbit:g}", f"{plain:.1f}/s", *(f"{ratio:.2f}" for ratio in ratios)])
            print(*rows[-1], flush=True)
            for name, ratio in zip(("swarm", "DDP"), ratios, strict=True):
                drawn[f"{name}, d_model {width}, {mbit:g} Mb/s"] = [ratio]
    title = "Two hosts of one core against one of them: samples/s"
    write("links", table(title, rows))
    picture("links", title, "ratio", drawn)


if __name__ == "__main__":
    main()
