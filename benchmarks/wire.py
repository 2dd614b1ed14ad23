"""What goes over the link between two stages with each codec, counted at its network device.

Two hosts are two network namespaces of this machine. The trainer and the last stage are on one, the first stage is on
the other, so its link carries three tensors of one shape for each microbatch: what the trainer sends, the hidden state
for the last stage, and its gradient. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.hosts import DEVICE, Hosts, serving
from benchmarks.report import picture, table, write
from benchmarks.runs import train
from benchmarks.train import SEQUENCE
from lightning_swarm.protocol.compression import CODECS

NUM_TENSORS = 3
MICROBATCH_SIZE = 4
BITS = {"none": 32, "float16": 16, "bfloat16": 16, "8bit": 8, "6bit": 6, "4bit": 4}


def counted(codec: str, width: int, seconds: float) -> tuple[float, float]:
    """Bytes of a tensor of a microbatch, and samples/s."""
    # Blocks that compute nothing, so that all that takes time is the link.
    model = ("--width", width, "--nop", "--num-blocks", 2, "--batch-size", 8 * MICROBATCH_SIZE)
    options = (*model, "--num-stages", 2, "--microbatch-size", MICROBATCH_SIZE, "--snapshot-interval", 0)
    with Hosts([0.0, 0.0]) as hosts, serving(hosts, 1, "benchmarks.train", *options) as address:
        own = ("--role", "both", "--devices", 1, "--listen", hosts.address(0), "--initial-peers", address)
        steps = train(*options, *own, "--compression", codec, "--count", DEVICE, seconds=seconds, before=hosts.on(0))
    return steps.num_bytes[-1] / (sum(steps.samples) / MICROBATCH_SIZE) / NUM_TENSORS, steps.mean_rate()


def main(words: Sequence[str] | None = None) -> None:
    """Count with each codec, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--width", type=int, default=2048)
    arguments = parser.parse_args(words)
    if Hosts.missing():
        parser.error(f"it needs Linux, root and iproute2; not found: {Hosts.missing()}")
    elements = MICROBATCH_SIZE * SEQUENCE * arguments.width
    rows: list[list[object]] = [["codec", "KiB, counted", "KiB, by the bits", "ratio", "samples/s"]]
    drawn: dict[str, list[float]] = {}
    for codec in ("none", *CODECS):
        num_bytes, rate = counted(codec, arguments.width, arguments.seconds)
        expected = elements * BITS[codec] / 8
        ratio = f"{num_bytes / expected:.3f}"
        rows.append([codec, f"{num_bytes / 1024:.0f}", f"{expected / 1024:.0f}", ratio, f"{rate:.0f}"])
        drawn[codec] = [num_bytes / 1024]
        print(*rows[-1], flush=True)
    shape = f"[{MICROBATCH_SIZE}, {SEQUENCE}, {arguments.width}]"
    title = f"A tensor of shape {shape} over one link"
    write("wire", table(title, rows))
    picture("wire", title, "KiB", drawn)


if __name__ == "__main__":
    main()
