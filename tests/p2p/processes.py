"""Real processes: started, marked so that all their descendants can be found, and monitored until they end."""

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
"""The commands that users type, from the installed project."""

MARK = "LIGHTNING_SWARM_TEST_RUN"


@contextlib.contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Let started processes react to Ctrl-C, even if a background shell makes the tests ignore it.

    A new program inherits an ignored signal as ignored; a handled signal, here by Python, is reset to its default.
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
    """`train.py`, or another program, with arguments, and all its descendants."""

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
                start_new_session=True,  # sends a Ctrl-C to this run's foreground group, not to the tests
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
        """Return its exit status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            error.add_note("".join(self.output))
            raise
        self._reader.join(10.0)
        return status

    def interrupt(self) -> None:
        """Send Ctrl-C to the foreground group, as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def survivors(self, within_s: float = 60.0) -> list[str]:
        """Return the command lines of the run's processes that are still alive after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while (alive := self.alive()) and time.monotonic() < deadline:
            threading.Event().wait(0.1)  # only children can be awaited
        return list(alive.values())

    def alive(self) -> dict[int, str]:
        """Return all living processes of the run, by the mark in their environment: parents, children, daemons."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                environment = (folder / "environ").read_bytes()
                status = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended
                continue
            if f"{MARK}={self.mark}".encode() in environment and status != "Z":
                found[int(folder.name)] = command
        return found

    def end(self) -> None:
        """Kill the run's remaining processes, recognized by their mark."""
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
