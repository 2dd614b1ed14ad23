"""Runs `benchmarks.train` in processes of its own, and what follows from the times that it says."""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Self

from lightning_swarm.peer.process import NEIGHBOURS

_GRACE_S = 300.0  # to import, begin and end, also where others use the machine

FAR_APART: Mapping[str, str] = MappingProxyType({NEIGHBOURS: "0"})
"""The environment of a swarm whose peers talk over libp2p though they are on one machine, as hivemind's do."""


@dataclass(frozen=True)
class Steps:
    """When each step of a training was over, in seconds after its first one, and how many samples it had."""

    at_s: Sequence[float]
    samples: Sequence[int]
    killed_s: float | None = None  # when a server was killed
    trainer_bytes: int = 0  # the most memory that it had
    server_bytes: int = 0  # the most of any
    peak_bytes: Sequence[int] = ()  # the same of the trainer, then of each of its servers
    num_bytes: Sequence[int] = ()  # by then, over the network device that was to be counted
    held: Sequence[Sequence[Sequence[str]]] = ()  # after each step, from the first on: the peers of each stage

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


def start(
    *arguments: object,
    before: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | IO[str] | None = None,
    own_session: bool = False,
) -> subprocess.Popen[str]:
    """Start a Python process, whose libraries take one thread each, unless the variables say otherwise.

    Args:
        arguments: Of Python.
        before: What the command begins with, as `taskset` and its arguments.
        environment: Variables, beside this process's.
        stdin: As `subprocess.Popen` has it.
        stdout: Likewise.
        stderr: Likewise.
        own_session: Whether it is killed with whatever it started.
    """
    return subprocess.Popen(
        [*before, sys.executable, *map(str, arguments)],
        env={"OMP_NUM_THREADS": "1", **os.environ, **environment},
        text=True,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=own_session,
    )


def lines_of(
    *arguments: object,
    timeout: float,
    before: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Run a Python process to its end; returns the lines of its standard output.

    Args:
        arguments: As `start` has it.
        timeout: Seconds after which it is killed.
        before: As `start` has it.
        environment: Likewise.

    Raises:
        RuntimeError: It failed; has its last lines.
        subprocess.TimeoutExpired: It took longer; likewise.
    """
    with start(
        *arguments, before=before, environment=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        try:
            out, errors = run.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            run.kill()
            error.add_note(f"It wrote last:\n{(error.stderr or b'')[-4000:].decode(errors='replace')}")
            raise
        except BaseException:
            run.kill()
            raise
    if run.returncode != 0:
        raise RuntimeError(f"{shlex.join(map(str, arguments))} ended with {run.returncode}:\n{errors[-4000:]}")
    return out.splitlines()


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
        before: As `start` has it.
        environment: Likewise.

    Raises:
        RuntimeError: It failed; has its last lines.
    """
    command = ["-m", module, "--seconds", seconds, *options]
    lines = lines_of(*command, timeout=seconds + _GRACE_S, before=before, environment=environment)
    said = [
        json.loads(line)
        for line in lines
        if line.startswith(('{"at_s"', '{"trainer_bytes"', '{"peak_bytes"', '{"held"'))
    ]
    steps = [one for one in said if "samples" in one]
    killed = [one["at_s"] for one in said if "killed" in one]
    memory: dict[str, int] = next((one for one in said if "trainer_bytes" in one), {})
    return Steps(
        [one["at_s"] for one in steps],
        [one["samples"] for one in steps],
        killed_s=killed[0] if killed else None,
        num_bytes=[one["bytes"] for one in steps if "bytes" in one],
        held=[one["held"] for one in said if "held" in one],
        peak_bytes=next((one["peak_bytes"] for one in said if "peak_bytes" in one), ()),
        **memory,
    )


class Stepped:
    """A training in a process of its own that takes a step for each line on its standard input.

    Args:
        module: What it runs; knows `--by-turns`, or does without.
        options: Of that.
        before: As `start` has it.
        environment: Likewise.
    """

    def __init__(
        self,
        module: str,
        *options: object,
        before: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._name = module
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `end` closes it
        self._process = start(
            "-m",
            module,
            *options,
            before=before,
            environment=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            own_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.finish()
        self.end(0.0 if kind else _GRACE_S)

    def warm(self) -> None:
        """Wait until its first step is over."""
        self._read("first")

    def take(self, how: str = "") -> float:
        """Have it train a step; the seconds that it took.

        Args:
            how: What it is told.
        """
        stdin = self._process.stdin
        assert stdin is not None
        print(how, file=stdin, flush=True)
        return self._read("took_s")

    def finish(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self, patience_s: float = _GRACE_S) -> None:
        """Wait until it has ended, and end what does not."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with whatever it started
        self._process.wait()
        self._log.close()

    def _read(self, what: str) -> float:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            if line.startswith(f'{{"{what}"'):
                return float(json.loads(line)[what])
        self._log.seek(0)
        raise RuntimeError(f"{self._name} ended without a step:\n{self._log.read()[-4000:]}")


class Turns:
    """Several trainings that take turns, a step each, all of them started and warm.

    Args:
        ways: For each name, the module to run and its options. The module knows `--by-turns`.
        environment: Variables of all of them, beside this process's.
    """

    def __init__(
        self,
        ways: Mapping[str, tuple[str, Sequence[object]]],
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._ways = ways
        self._environment = environment
        self._running: dict[str, Stepped] = {}

    def __enter__(self) -> Self:
        try:
            for name, (module, options) in self._ways.items():
                self._running[name] = Stepped(module, *options, environment=self._environment)
            for one in self._running.values():
                one.warm()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._running.values():
            one.finish()
        for one in self._running.values():
            one.end()

    def take(self, name: str) -> float:
        """Have one of them train a step; the seconds that it took."""
        return self._running[name].take()
