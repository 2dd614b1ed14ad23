"""A model that takes more memory than any of its processes may: `examples/large`, with and without what makes it fit.

Each process may take a number of megabytes of its own; Linux refuses it more. One process alone then has no room to
train the model, and neither has the starter of a swarm that builds it in memory. Built on meta it trains, writes its
checkpoint in parts, and goes on from it in another number of stages.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.report import table, write
from benchmarks.runs import start

WAYS: Final[dict[str, tuple[object, ...]]] = {
    "one process, as much as it likes": ("--plain", "--memory-mb", 0),
    "one process": ("--plain",),
    "a swarm of 4, built in memory": ("--in-memory",),
    "a swarm of 4, built on meta": (),
    "the same, goes on in 5 stages": ("--resume", "--max-steps", 8, "--devices", 5, "--num-stages", 5),
}
_TIMEOUT_S: Final = 900.0


def main(words: Sequence[str] | None = None) -> None:
    """One row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-mb", type=int, default=2300, help="of each process (default: %(default)s)")
    arguments = parser.parse_args(words)
    rows: list[list[object]] = [["built and trained by", "ended at", "processes held at most, MB"]]
    with tempfile.TemporaryDirectory() as folder:
        for way, options in WAYS.items():
            command = ("-m", "examples.large.train", "--memory-mb", arguments.memory_mb, *options)
            # What writes no parts has a folder of its own.
            of_its_own = Path(folder, "parts" if options == () or "--resume" in options else way)
            rows.append([way, *_run(*command, "--folder", of_its_own)])
            print(*rows[-1], sep="; ", flush=True)
    write("large", table(f"171M parameters, {arguments.memory_mb} MB for each process", rows))


def _run(*command: object) -> tuple[str, str]:
    """How it ended, and what its processes held."""
    with start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, own_session=True) as run:
        try:
            said, _ = run.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            run.kill()
            raise
    held = re.search(r"at most: (.*) MB", said)
    if run.returncode == 0:
        end = re.findall(r"^step \d+: .*$", said, flags=re.MULTILINE)[-1]
    else:
        end = next((line for line in said.splitlines()[::-1] if re.search(r"memory|thread|Memory", line)), "?").strip()
    return end, held[1] if held is not None else "-"


if __name__ == "__main__":
    main()
