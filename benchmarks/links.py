"""Where a swarm pays and where it does not: sizes of a model and of a link, against one machine and against DDP.

Two hosts are two network namespaces of this machine, a core each, joined by a link whose rate is limited (`tc`, tbf).
The swarm has a stage on each; Lightning's DDP, over gloo, has the whole model on each; the plain Trainer has one host.
Needs Linux, root, iproute2 and two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Sequence

from benchmarks.hosts import DEVICE, Hosts, serving
from benchmarks.report import picture, table, write
from benchmarks.runs import start, train

NUM_BLOCKS = 4
BATCH_SIZE = 32


def swarm(hosts: Hosts, model: Sequence[object], seconds: float) -> float:
    """Samples/s."""
    # A snapshot every five minutes is little, and much in the seconds that this takes.
    options = (*model, "--num-stages", 2, "--microbatch-size", 2, "--snapshot-interval", 0)
    with serving(hosts, 1, "benchmarks.train", *options, core=1) as address:
        own = ("--role", "both", "--devices", 1, "--listen", hosts.address(0), "--initial-peers", address)
        return train(*options, *own, seconds=seconds, before=hosts.on(0, core=0)).mean_rate()


def ddp(hosts: Hosts, model: Sequence[object], seconds: float) -> float:
    """Samples/s of both hosts."""
    options = (*model, "--ddp", "--batch-size", BATCH_SIZE // 2)
    common = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}
    first, second = ({**common, "NODE_RANK": rank} for rank in "01")
    command = ("-m", "benchmarks.train", "--seconds", seconds, *options)
    with tempfile.TemporaryFile("w+") as said:
        other = start(*command, before=hosts.on(1, core=1), environment=second, stdout=subprocess.DEVNULL, stderr=said)
        try:
            return 2 * train(*options, seconds=seconds, before=hosts.on(0, core=0), environment=first).mean_rate()
        except Exception as error:
            said.seek(0)
            error.add_note(f"The other host said:\n{said.read()[-4000:]}")
            raise
        finally:
            other.kill()
            other.wait()


def main(words: Sequence[str] | None = None) -> None:
    """Measure each size with each link, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--mbits", type=float, nargs="+", default=[1000.0, 100.0, 20.0])
    arguments = parser.parse_args(words)
    if Hosts.missing() or len(os.sched_getaffinity(0)) < 2:
        parser.error(f"it needs Linux, root, two cores and iproute2; not found: {Hosts.missing() or 'two cores'}")
    rows: list[list[object]] = [
        ["d_model", "parameters", "link, Mb/s", "one host", "swarm / one host", "DDP / one host"]
    ]
    drawn: dict[str, list[float]] = {}
    for width in arguments.widths:
        model = ("--width", width, "--num-blocks", NUM_BLOCKS, "--batch-size", BATCH_SIZE)
        for mbit in arguments.mbits:
            with Hosts([mbit, mbit]) as hosts:
                plain = train(*model, "--plain", seconds=arguments.seconds, before=hosts.on(0, core=0)).mean_rate()
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
