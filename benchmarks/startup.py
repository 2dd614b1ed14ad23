"""From the command to the first batch: a swarm of four peers, against four processes that only import.

The imports are those of torch, lightning and hivemind, which every peer needs. The two take turns. With ``--join``:
from the command `lightning-swarm join` to the first microbatch that counts, and where the seconds go.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

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


JOINED = "benchmarks.joined"
# The line that ends each part, and the name of the part. The lead prints the last line.
PARTS: Mapping[str, str] = {
    "Importing torch": "the command itself",
    "imported": "imports of torch, Lightning and the script",
    "Connecting to": "the script up to `fit`",
    "This peer asks": "import of hivemind, start of the daemon, connection to the run",
    "Downloading": "the model, and the request for a stage",
    "Stage ": "the download of a stage, 1.2 MB",
    "In run": "admission, and the wait for a step to end",
    "counted": "the first microbatch that counts",
}


@dataclass(frozen=True)
class _Line:
    text: str
    came_s: float
    cpu_s: float  # that the process and its daemon had used by then


class _Heard:
    """The lines on a process's standard error, and when each of them came."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[_Line] = []
        self._pid = process.pid
        self._new = threading.Condition()
        assert process.stderr is not None
        threading.Thread(target=self._read, args=(process.stderr,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._new:
                self.lines.append(_Line(line, time.monotonic(), _cpu_s(self._pid)))
                self._new.notify_all()

    def line(self, begin: str) -> _Line:
        """Wait for a line that begins so."""
        with self._new:
            self._new.wait_for(lambda: self._find(begin), _PATIENCE_S)
            found = self._find(begin)
        if found is None:
            said = "".join(line.text for line in self.lines)
            raise RuntimeError(f"no line began with {begin!r} in {_PATIENCE_S:g} s:\n{said}")
        return found

    def _find(self, begin: str) -> _Line | None:
        return next((line for line in self.lines if line.text.startswith(begin)), None)


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # Started by any thread of the process.
        ids = [one for task in Path(f"/proc/{pid}/task").iterdir() for one in (task / "children").read_text().split()]
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(_cpu_s(int(one)) for one in ids)


@contextmanager
def _running(*arguments: object) -> Iterator[_Heard]:
    with start(*arguments, stderr=subprocess.PIPE) as process:
        try:
            yield _Heard(process)
            process.wait(_PATIENCE_S)
        except BaseException:
            process.kill()
            raise


def join() -> tuple[list[float], list[float]]:
    """Join a run; returns the seconds of each of the `PARTS`, and this peer's CPU seconds in each but the last."""
    *own, last = PARTS
    with _running("-m", JOINED) as lead:
        address = re.search(r"lightning-swarm join (\S+)", lead.line("Peers of this machine only").text)
        assert address is not None
        lead.line("first step")
        begin_s = time.monotonic()
        with _running("-m", "lightning_swarm", "join", address[1], "-m", JOINED) as joiner:
            lines = [joiner.line(begin) for begin in own]
            times = [begin_s, *(line.came_s for line in lines), lead.line(last).came_s]
    used = [0.0, *(line.cpu_s for line in lines)]
    return [after - before for before, after in pairwise(times)], [after - before for before, after in pairwise(used)]


def measure_joins(repeats: int) -> None:
    """Measure joins, and print the medians of their parts."""
    runs = [join() for _ in range(repeats + 1)][1:]  # the first one fills the disk's cache
    rows: list[list[object]] = [["what", "seconds", "CPU seconds"]]
    for number, what in enumerate(PARTS.values()):
        took, used = (
            [found[number] for found in runs_of if number < len(found)] for runs_of in zip(*runs, strict=True)
        )
        rows.append([what, f"{statistics.median(took):.2f}", f"{statistics.median(used):.2f}" if used else ""])
    rows.append(["all", *(f"{statistics.median(map(sum, found)):.2f}" for found in zip(*runs, strict=True))])
    write("join", table(f"From `lightning-swarm join` to work that counts, medians of {repeats}", rows))


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--join", action="store_true", help="of a peer that joins a run")
    arguments = parser.parse_args(words)
    if arguments.join:
        measure_joins(arguments.repeats)
        return
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
