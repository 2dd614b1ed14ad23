"""Real processes: started, marked so that none of their descendants can hide, and watched to their end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SCRIPT = Path(__file__).with_name("train.py")
MODULE = (sys.executable, "-m", "lightning_swarm")
_INSTALLED = Path(sys.executable).with_name("lightning-swarm")
COMMAND = (str(_INSTALLED),) if _INSTALLED.exists() else MODULE
"""What users type, where the project is installed."""

MARK = "LIGHTNING_SWARM_TEST_RUN"


@contextlib.contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """What is started here heeds Ctrl-C, though a shell that has the tests in its background lets them ignore it.

    A signal that is ignored stays so in a new program; one that is handled, here by Python, gets its default there.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def free_port() -> int:
    """Return a TCP port of this machine on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Run:
    """`train.py`, or another program, with some arguments, and all processes that come of it."""

    def __init__(
        self,
        *arguments: object,
        program: Sequence[str] = (sys.executable, str(SCRIPT)),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", **(environment or {})}
        with _heeding_interrupts():
            self.process = subprocess.Popen(
                [*program, *map(str, arguments)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # so that a Ctrl-C reaches this run's foreground group and not the tests
            )
        self._begin_to_read()

    def _begin_to_read(self) -> None:
        self.output: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, timeout: float = 120.0) -> str:
        """Read the output until a line holds `text`; returns it."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._lines.get(timeout=max(deadline - time.monotonic(), 0.0))
            assert line is not None, f"the run ended before it said {text!r}:\n" + "".join(self.output)
            if text in line:
                return line

    def wait(self, timeout: float = 150.0) -> int:
        """Its exit status."""
        status = self.process.wait(timeout)
        self._reader.join(10.0)
        return status

    def interrupt(self) -> None:
        """Ctrl-C: to the foreground group, as a terminal sends it."""
        os.killpg(self.process.pid, signal.SIGINT)

    def survivors(self, within_s: float = 60.0) -> list[str]:
        """Command lines of the run's processes that are still alive `within_s` seconds from now."""
        deadline = time.monotonic() + within_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            threading.Event().wait(0.1)  # processes of others cannot be awaited
        return list(alive.values())

    def alive(self) -> dict[int, str]:
        """All living processes of the run, by their marked environment: parents, children, daemons."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                environment = (folder / "environ").read_bytes()
                status = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it ended meanwhile
                continue
            if f"{MARK}={self.mark}".encode() in environment and status != "Z":
                found[int(folder.name)] = command
        return found

    def end(self) -> None:
        """End what is left of the run: only processes that carry its mark."""
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10.0)
        self._reader.join(10.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._note(line)
        self._note(None)

    def _note(self, line: str | None) -> None:
        """Keep a line, or the end of the output."""
        if line is not None:
            self.output.append(line)
        self._lines.put(line)
