"""Peers forked from a process that has all imports, and access to their processes."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.p2p.processes import COMMAND, MARK, SCRIPT, Run

LIMITS: dict[str, Any] = {"silence_timeout": 5.0, "call_timeout": 60.0, "leave_timeout": 5.0}
PATIENCE_S = 120.0
SERVING = ("transformers.models.llama.modeling_llama", "peft")
"""Modules of processes that serve a model, which take seconds to import."""

_ROOT = Path(__file__).resolve().parents[2]
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+:\d+/\w+")


class Zygote:
    """Starts peers."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._num_begun = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.p2p.zygote", *modules],
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._read() == "ready"

    def begin(self, initial_peers: list[str], **options: Any) -> Server:
        """Start a server; without `initial_peers` it is the first. `options` are as in `serve` in `zygote.py`."""
        return self._begin("serve", {"model": "digits", "initial_peers": initial_peers, "limits": LIMITS, **options})

    def begin_trainer(self, *, netns: str = "", **options: Any) -> Server:
        """Start a trainer that also serves, in a network namespace if `netns` names one.

        `options` are as in `train` in `several.py`.
        """
        return self._begin("train", options, netns)

    def begin_kind(self, **options: Any) -> Server:
        """Start a server of a project. `options` are as in `serve_kind` in `kinds.py`."""
        return self._begin("kind", options)

    def type_in(self, command: list[str], folder: Path, *, netns: str, **environment: str) -> Server:
        """Run a command of a documentation page in a folder. `environment` adds to this process's."""
        options = {"command": command, "folder": str(folder), "environment": environment}
        return self._begin("type", options, netns)

    def _begin(self, role: str, options: dict[str, Any], netns: str = "") -> Server:
        self._num_begun += 1
        log = self._folder / f"{role}-{self._num_begun}.log"
        log.touch()
        return Server(int(self._ask(log=str(log), role=role, options=options, netns=netns)), log)

    def status(self, pid: int) -> int | None:
        """Return the exit status of a peer, or None while it lives. A status is returned once."""
        found = self._ask(ended=pid)
        return int(found) if found else None

    def _ask(self, **order: Any) -> str:
        with self._lock:
            assert self._process.stdin is not None
            print(json.dumps(order), file=self._process.stdin, flush=True)
            return self._read()

    def end_peers(self) -> None:
        """Kill all peers that still live."""
        self._ask(end=True)

    def close(self) -> None:
        """End it, and with it all peers that still live."""
        self._process.kill()
        self._process.wait(10.0)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass
class Server:
    """A forked peer."""

    pid: int
    log: Path

    @property
    def address(self) -> str:
        """Return its address, from its output."""
        wait_until(lambda: _ADDRESS.search(self.said) is not None, f"{self.log} names no address")
        found = _ADDRESS.search(self.said)
        assert found is not None
        return found[0]

    @property
    def peer_id(self) -> str:
        return self.address.partition("/")[2]

    @property
    def said(self) -> str:
        """Return all its output."""
        return self.log.read_text() if self.log.exists() else ""

    @property
    def alive(self) -> bool:
        return self.state not in ("", "Z")

    @property
    def state(self) -> str:
        """Return the kernel's state letter, ``T`` while it is stopped; empty if it has ended."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""


def wait_until(reached: Callable[[], bool], otherwise: str) -> None:
    """Wait while other processes and threads work."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, otherwise
        threading.Event().wait(0.02)


@contextmanager
def shared_zygote(*modules: str) -> Iterator[Zygote]:
    """A zygote that all tests of this process share. Peers that still live in the end are killed."""
    zygote = _shared(*modules)
    yield zygote
    zygote.end_peers()


@functools.cache
def _shared(*modules: str) -> Zygote:
    folder = tempfile.TemporaryDirectory()
    zygote = Zygote(Path(folder.name), *modules)
    atexit.register(folder.cleanup)
    atexit.register(zygote.close)
    return zygote


class _Forked:
    """A forked process, with the methods of `subprocess.Popen` that a `Run` needs."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self._zygote = zygote
        self._lock = threading.Lock()
        self._status: int | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None:
                self._status = self._zygote.status(self.pid)
            return self._status

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            threading.Event().wait(0.05)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class WarmRun(Run):
    """A `Run` whose first process is a fork of a zygote, so that its imports take no time.

    Its program is ``python`` or ``lightning-swarm``. Variables of the environment that imports read have no effect.
    """

    def __init__(
        self,
        *arguments: object,
        program: Sequence[str] = (sys.executable, str(SCRIPT)),
        environment: Mapping[str, str] | None = None,
        netns: str = "",
        modules: Sequence[str] = (),
    ) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1", **(environment or {})}
        words = ["lightning-swarm"] if tuple(program) == COMMAND else ["python", *program[1:]]
        zygote = _shared(*modules)
        server = zygote.type_in([*words, *map(str, arguments)], Path.cwd(), netns=netns, **environment)
        self.process: Any = _Forked(zygote, server.pid)
        self._log = server.log
        self._begin_to_read()

    @override
    def alive(self) -> dict[int, str]:
        found = super().alive()
        if self.process.poll() is None:
            found[self.process.pid] = "forked"  # the kernel shows the zygote's environment for it, without a mark
        return found

    @override
    def _read(self) -> None:
        line, ended = "", False
        with self._log.open() as log:
            while not ended:
                ended = self.process.poll() is not None  # asked first, so that the last lines are read
                while piece := log.readline():
                    line += piece
                    if line.endswith("\n"):
                        self._note(line)
                        line = ""
                threading.Event().wait(0.05)
        if line:
            self._note(line)
        self._note(None)
