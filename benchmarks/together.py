"""Processes that measure together: each runs the same function, and they tell each other things."""

from __future__ import annotations

import importlib
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, TypeVar

_PATIENCE_S = 300.0

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class Together:
    """One of several processes' place among the others.

    Args:
        rank: Which one it is.
        size: How many there are.
        connection: To the process that started them.
    """

    def __init__(self, rank: int, size: int, connection: Connection) -> None:
        self.rank = rank
        self.size = size
        self._connection = connection

    def exchange(self, value: Any = None) -> list[Any]:
        """Wait until all have come here; returns what each one brought, by rank."""
        self._connection.send(value)
        if not self._connection.poll(_PATIENCE_S):
            raise TimeoutError(f"the others of {self.size} did not come within {_PATIENCE_S:g} s")
        found: list[Any] = self._connection.recv()
        return found


def mapped(function: Callable[[_Job], _Result], jobs: Sequence[_Job], num_processes: int) -> Iterator[_Result]:
    """Run jobs in as many processes, a fresh one for each job, or with 0 in this one; yields results in order."""
    if not num_processes:
        yield from map(function, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes, maxtasksperchild=1) as pool:
        yield from pool.imap(function, jobs)


class _Done:
    def __init__(self, result: Any) -> None:
        self.result = result


def run_together(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Run ``function(together, *arguments)`` in as many processes; returns what each one returned, by rank.

    What they write to the standard error is shown only when one fails: hivemind's processes end in tracebacks.

    Raises:
        RuntimeError: One of them ended without a result; has what they wrote last.
    """
    module = function.__module__
    if module == "__main__":
        module = str(sys.modules["__main__"].__spec__.name)  # type: ignore[union-attr]  # `python -m` has set it
    with tempfile.TemporaryDirectory() as folder, Listener(str(Path(folder) / "socket"), backlog=size) as listener:
        command = [sys.executable, "-m", "benchmarks.together", str(listener.address)]
        logs = [Path(folder) / f"{rank}.log" for rank in range(size)]
        processes = [_start(command, log) for log in logs]
        try:
            connections = [listener.accept() for _ in processes]
            for rank, connection in enumerate(connections):
                connection.send((rank, size, module, function.__qualname__, arguments))
            results = _serve(connections)
            for process in processes:
                process.wait(_PATIENCE_S)
        except EOFError:
            said = "\n\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
            raise RuntimeError(f"one of {size} processes ended early:\n{said}") from None
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return results


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("w") as stderr:
        return subprocess.Popen(command, stderr=stderr)


def _serve(connections: Sequence[Connection]) -> list[Any]:
    """Hand round what they exchange, until all are done."""
    while True:
        found: dict[object, Any] = {}
        while len(found) < len(connections):
            for ready in wait([connection for connection in connections if connection not in found]):
                assert isinstance(ready, Connection)
                found[ready] = ready.recv()  # EOFError: that one has ended
        brought = [found[connection] for connection in connections]
        if all(isinstance(one, _Done) for one in brought):
            return [one.result for one in brought]
        for connection in connections:
            connection.send(brought)


def _take_part(address: str) -> None:
    connection = Client(address)
    rank, size, module, name, arguments = connection.recv()
    function = getattr(importlib.import_module(module), name)
    connection.send(_Done(function(Together(rank, size, connection), *arguments)))


if __name__ == "__main__":
    from benchmarks import together  # noqa: PLW0406 - so that what is sent has the names that the other side knows

    together._take_part(sys.argv[1])
