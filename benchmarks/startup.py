"""From the command to the first batch: a swarm of four peers, against four processes that only import.

The imports are those of torch, lightning and hivemind, which every peer needs. The two take turns. With ``--join``:
from the command `lightning-swarm join` to the first microbatch that counts, and where the seconds go. With
``--from-nothing``: on a second machine that has only Python, by the commands of docs/join.md; needs root and iproute2.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import IO

from typing_extensions import override

from benchmarks.hosts import Hosts
from benchmarks.report import picture, table, write
from benchmarks.runs import start
from lightning_swarm.peer.process import ANNOUNCE, LISTEN

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
def _until_end(process: subprocess.Popen[str]) -> Iterator[_Heard]:
    with process:
        try:
            yield _Heard(process)
            process.wait(_PATIENCE_S)
        except BaseException:
            process.kill()
            raise


def join() -> tuple[list[float], list[float]]:
    """Join a run; returns the seconds of each of the `PARTS`, and this peer's CPU seconds in each but the last."""
    *own, last = PARTS
    with _until_end(start("-m", JOINED, stderr=subprocess.PIPE)) as lead:
        address = re.search(r"lightning-swarm join (\S+)", lead.line("Peers of this machine only").text)
        assert address is not None
        lead.line("first step")
        begin_s = time.monotonic()
        words = ("-m", "lightning_swarm", "join", address[1], "-m", JOINED)
        with _until_end(start(*words, stderr=subprocess.PIPE)) as joiner:
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


PAGE = "docs/join.md"


class _PageHosts(Hosts):
    """Two hosts with the addresses of the page."""

    @staticmethod
    @override
    def address(number: int) -> str:
        return f"203.0.113.{7 + number}"


def _ended_cpu_s() -> float:
    """CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def from_nothing(folder: Path) -> list[list[object]]:
    """Follow the page on a second host, from an empty environment to work that counts; returns a row for each part."""
    from tests.docs.commands import lines  # imports the whole package
    from tests.docs.pages import ROOT, blocks

    first, second, python = folder / "first", folder / "second", folder / "environment"
    for made in (first, second):
        made.mkdir()
    pip = (sys.executable, "-m", "pip", "wheel", "-qq", ROOT, "--no-deps", "--wheel-dir", first)
    subprocess.run(pip, check=True)
    shutil.copytree(ROOT / "benchmarks", second / "benchmarks")
    (second / "train.py").write_text(f"from {JOINED} import main\n\nif __name__ == '__main__':\n    main()\n")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
        "PATH": f"{python / 'bin'}:{os.environ['PATH']}",
        "HOME": str(second),
        "OMP_NUM_THREADS": "1",
    }
    own = {"XDG_CONFIG_HOME": str(first), LISTEN: "0.0.0.0:31337", ANNOUNCE: f"{_PageHosts.address(0)}:31337"}
    typed = [words for block in blocks(PAGE) if block.kind == "sh" for words in lines(block.text)]
    with _PageHosts([0.0, 0.0]) as hosts:
        lead_process = start("-m", JOINED, before=hosts.on(0), environment=own, stderr=subprocess.PIPE)
        with _until_end(lead_process) as lead:
            address = re.search(r"lightning-swarm join (\S+)", lead.line("Peers can join").text)
            assert address is not None
            words = ("lightning_swarm", "invite", "--role", "server", "--out", second / "swarm.invite")
            assert start("-m", *words, environment=own).wait(_PATIENCE_S) == 0
            lead.line("first step")
            times, used = [time.monotonic()], [_ended_cpu_s()]
            subprocess.run([sys.executable, "-m", "venv", python], check=True)
            [wheel] = first.glob("*.whl")
            subprocess.run([python / "bin" / "pip", "install", "-qq", wheel], check=True, env=environment)
            times.append(time.monotonic())
            used.append(_ended_cpu_s())
            doctor, join = (
                [*hosts.on(1), *(address[1] if "12D3" in word else word for word in words)] for words in typed[:2]
            )
            subprocess.run(doctor, check=True, cwd=second, env=environment, stdout=subprocess.DEVNULL)
            times.append(time.monotonic())
            used.append(_ended_cpu_s())
            process = subprocess.Popen(join, cwd=second, env=environment, text=True, stderr=subprocess.PIPE)
            with _until_end(process) as joiner:
                entered = joiner.line("In run")
                times += [entered.came_s, lead.line("counted").came_s]
    num_bytes = sum(path.stat().st_size for path in python.rglob("*") if path.is_file())
    parts = (
        f"an environment, and pip ({num_bytes / 1e9:.1f} GB of files)",
        "doctor",
        "join, up to `In run`",
        "a microbatch that counts",
    )
    cpu_s = [*(after - before for before, after in pairwise(used)), entered.cpu_s]
    rows: list[list[object]] = [["part", "seconds", "CPU seconds"]]
    for part, (before, after), used_s in zip_longest(parts, pairwise(times), cpu_s):
        rows.append([part, f"{after - before:.1f}", "" if used_s is None else f"{used_s:.1f}"])
    return [*rows, ["all", f"{times[-1] - times[0]:.1f}", f"{sum(cpu_s):.1f}"]]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--join", action="store_true", help="of a peer that joins a run")
    parser.add_argument("--from-nothing", action="store_true", help="of a machine that joins, with its installation")
    arguments = parser.parse_args(words)
    if arguments.from_nothing:
        with tempfile.TemporaryDirectory() as folder:
            write("from_nothing", table(f"From nothing to work that counts, by {PAGE}", from_nothing(Path(folder))))
        return
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
