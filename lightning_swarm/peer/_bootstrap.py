"""Runs a script, or ``-m module``, in a process that ends when its parent ends."""

import os
import runpy
import sys
import threading
from pathlib import Path


# Started by its path, this watches before anything slow is imported. The parent holds the other end of standard input
# and never writes, so end of file means that the parent is gone, even by `kill -9`.
def _watch(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(1)


def run(arguments: list[str]) -> None:
    """Run a script, or ``-m module``, as Python would with these arguments."""
    sys.orig_argv[1:] = arguments
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Watch the parent, then run the program."""
    pipe = os.dup(0)
    os.set_inheritable(pipe, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    threading.Thread(target=_watch, args=(pipe,), daemon=True).start()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
