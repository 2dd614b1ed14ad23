"""From the command to the first batch: a swarm of four peers, against four processes that only import.

The imports are those of torch, lightning and hivemind, which every peer needs. The two take turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence

from benchmarks.report import picture, table, write
from benchmarks.runs import start

IMPORTS = "import torch, lightning, hivemind"
NUM_PEERS = 4
_PATIENCE_S = 300.0


def imports_s() -> float:
    """Seconds until four processes have imported, all at once."""
    began_s = time.monotonic()
    processes = [start("-c", IMPORTS) for _ in range(NUM_PEERS)]
    for process in processes:
        if process.wait(_PATIENCE_S):
            raise RuntimeError(f"`{IMPORTS}` ended with {process.returncode}")
    return time.monotonic() - began_s


def swarm_s() -> float:
    """Seconds until the first batch of a swarm of four is through."""
    began_s = time.monotonic()
    options = ("--devices", NUM_PEERS, "--num-stages", 2, "--width", 64, "--batch-size", 8, "--seconds", 0)
    with tempfile.TemporaryFile("w+") as said:
        process = start("-m", "benchmarks.train", *options, stdout=subprocess.PIPE, stderr=said)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"first"'):
                took_s = time.monotonic() - began_s
                process.communicate(timeout=_PATIENCE_S)
                return took_s
        status = process.wait(_PATIENCE_S)
        said.seek(0)
        raise RuntimeError(f"the swarm ended with {status} before its first batch:\n{said.read()[-4000:]}")


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args(words)
    pairs = [(imports_s(), swarm_s()) for _ in range(arguments.repeats + 1)][1:]  # the first one fills the disk's cache
    rows: list[list[object]] = [["run", "four imports", "swarm's first batch", "ratio"]]
    for number, (bare, whole) in enumerate(pairs, start=1):
        rows.append([number, f"{bare:.1f} s", f"{whole:.1f} s", f"{whole / bare:.2f}"])
    median = statistics.median(whole / bare for bare, whole in pairs)
    title = "From the command to the first batch"
    write("startup", f"{table(title, rows)}\nmedian ratio {median:.2f}")
    imports, swarm = (list(found) for found in zip(*pairs, strict=True))
    picture("startup", title, "seconds", {"swarm of 4": swarm, "4 imports": imports})


if __name__ == "__main__":
    main()
