"""Runs `benchmarks.train` in processes of its own, and what follows from the times that it says."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Self

import matplotlib as mpl
from matplotlib import pyplot as plt

OUT = Path("runs/bench")
"""Pictures and tables."""

_GRACE_S = 120.0


@dataclass(frozen=True)
class Steps:
    """When each step of a training was over, in seconds after its first one, and how many samples it had."""

    at_s: Sequence[float]
    samples: Sequence[int]
    killed_s: float | None = None  # when a server was killed
    trainer_bytes: int = 0  # the most memory that it had
    server_bytes: int = 0  # the most of any

    def rate(self, begin_s: float, end_s: float) -> float:
        """Samples/s of the steps that began and ended between two times."""
        inside = [i for i in range(1, len(self.at_s)) if self.at_s[i - 1] >= begin_s and self.at_s[i] <= end_s]
        if not inside:
            return 0.0
        return sum(self.samples[i] for i in inside) / (self.at_s[inside[-1]] - self.at_s[inside[0] - 1])

    def mean_rate(self) -> float:
        """Samples/s of all steps but the first one."""
        return sum(self.samples) / self.at_s[-1]

    def median_rate(self, begin_s: float = 0.0, end_s: float = float("inf")) -> float:
        """Samples/s of the median step between two times: what else the machine does weighs less."""
        rates = [
            self.samples[i] / (self.at_s[i] - self.at_s[i - 1])
            for i in range(1, len(self.at_s))
            if self.at_s[i - 1] >= begin_s and self.at_s[i] <= end_s
        ]
        return statistics.median(rates)


def train(
    *options: object,
    seconds: float,
    module: str = "benchmarks.train",
    before: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Steps:
    """Run a training to its end.

    Args:
        options: Of `benchmarks.train`.
        seconds: How long it trains.
        module: What to run in its place.
        before: What the command begins with, as `taskset` and its arguments.
        environment: Variables, beside this process's.

    Raises:
        RuntimeError: It failed; has its last lines.
    """
    command = [*before, sys.executable, "-m", module, "--seconds", str(seconds), *map(str, options)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **environment},
        capture_output=True,
        text=True,
        check=False,  # it is told with what the run said last
        timeout=seconds + _GRACE_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"at_s"', '{"trainer_bytes"'))]
    steps = [one for one in said if "samples" in one]
    killed = [one["at_s"] for one in said if "killed" in one]
    memory = next((one for one in said if "trainer_bytes" in one), {})
    return Steps(
        [one["at_s"] for one in steps],
        [one["samples"] for one in steps],
        killed_s=killed[0] if killed else None,
        **memory,
    )


class Turns:
    """Several trainings that take turns, a step each, all of them started and warm.

    Args:
        ways: For each name, the module to run and its options. The module knows `--by-turns`.
    """

    def __init__(self, ways: Mapping[str, tuple[str, Sequence[object]]]) -> None:
        self._ways = ways
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, IO[str]] = {}

    def __enter__(self) -> Self:
        try:
            for name, (module, options) in self._ways.items():
                self._logs[name] = tempfile.TemporaryFile("w+")
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", module, *map(str, options)],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._logs[name],
                    text=True,
                    start_new_session=True,
                )
            for name in self._processes:
                self._read(name, "first")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
            process.wait()
        for log in self._logs.values():
            log.close()

    def take(self, name: str) -> float:
        """Have one of them train a step; the seconds that it took."""
        stdin = self._processes[name].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()
        return self._read(name, "took_s")

    def _read(self, name: str, what: str) -> float:
        stdout = self._processes[name].stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(f'{{"{what}"'):
                return float(json.loads(line)[what])
        log = self._logs[name]
        log.seek(0)
        raise RuntimeError(f"{name} ended without a step:\n{log.read()[-4000:]}")


def table(title: str, rows: Sequence[Sequence[object]]) -> str:
    """Rows in columns, the first row as a head."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def write(name: str, text: str) -> None:
    """Print a table, and keep it."""
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.txt").write_text(text + "\n")
    print(text, flush=True)


def picture(name: str, title: str, unit: str, found: Mapping[str, Sequence[float]]) -> None:
    """Keep a picture: for each way a bar, the median, and a dot for each value.

    Args:
        name: Of the file.
        title: Over it.
        unit: Of the values.
        found: The values by way; those whose names begin with ``"swarm"`` stand out.
    """
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.45 * len(found)))
    for place, (way, values) in enumerate(found.items()):
        axes.barh(place, statistics.median(values), color="tab:blue" if way.startswith("swarm") else "tab:gray")
        axes.plot(values, [place] * len(values), ".", color="black", markersize=3)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)
    axes.set_xlim(left=0.0)
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / f"{name}.png", dpi=120, bbox_inches="tight")
    plt.close(figure)
