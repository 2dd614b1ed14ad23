"""One process for each peer of this machine: the same script, run again, serves instead of training.

Children hold a pipe to their parent. When it closes, however the parent died, they end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from typing_extensions import override

import __main__
from lightning_swarm.assembly import Peer, hivemind_peer
from lightning_swarm.config import SwarmConfig
from lightning_swarm.errors import ConfigError, Unreachable
from lightning_swarm.framework import FRAMEWORKS
from lightning_swarm.rules import check_data_module

_log = logging.getLogger(__name__)

_JOIN = "SWARM_JOIN"
_RUN = "SWARM_RUN_ID"
_RANK = "SWARM_LOCAL_RANK"
_BOOTSTRAP = Path(__file__).with_name("_bootstrap.py")


class Launched(Protocol):
    """What the launcher needs of a strategy."""

    config: SwarmConfig
    peer: Peer | None

    def check(self, trainer: Trainer) -> None:
        """Refuse what cannot work."""

    def serve(self, trainer: Trainer, datamodule: LightningDataModule | None) -> None:
        """Be a server until the run is over."""


class SwarmLauncher(_Launcher):
    """Starts this machine's other peers, and ends them. Serves both import trees: Lightning never asks for its class.

    Args:
        strategy: Whose peers they are.
        num_peers: On this machine, this process included.
    """

    _first_module: ClassVar[weakref.ref[LightningModule] | None] = None

    def __init__(self, strategy: Launched, num_peers: int) -> None:
        super().__init__()
        self._strategy = strategy
        self._num_peers = num_peers
        self._children: list[subprocess.Popen[bytes]] = []
        self._num_threads: int | None = None  # torch's, before this run shared the cores
        self._join = tuple(filter(None, os.environ.get(_JOIN, "").split()))
        self.local_rank = int(os.environ.get(_RANK, "0"))

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._num_peers == 1  # there is no script to run again for others

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Train here, or serve if this process is a child. A child never returns from it."""
        if trainer is None:
            raise ConfigError("SwarmStrategy needs the Trainer that it works for; call `Trainer.fit`.")
        if self._join:
            self._serve(trainer, (*args, *kwargs.values()))
        datamodule = _datamodule((*args, *kwargs.values()))
        if datamodule is not None:
            check_data_module(trainer, datamodule)
        self._check_module(trainer.lightning_module)
        self._strategy.check(trainer)
        command = _command() if self._num_peers > 1 else []
        if self._num_peers > 1:
            self._num_threads = _share_cores(self._num_peers)
        self._strategy.peer = hivemind_peer(self._strategy.config, ())
        self._start_children(command)
        return function(*args, **kwargs)  # whatever happens in it, Lightning tears the strategy down

    def _check_module(self, module: LightningModule) -> None:
        """Refuse a module that the children would not build: they run the script up to its first `fit`."""
        first = SwarmLauncher._first_module
        if first is None:
            SwarmLauncher._first_module = weakref.ref(module)
        elif first() is not module and self._num_peers > 1:
            raise ConfigError(
                "`devices` above 1 starts this script again for every peer, which serves the module of the script's "
                f"first `fit`; this {type(module).__name__} is another one. Train each module in a run of the script "
                "of its own."
            )

    def _serve(self, trainer: Trainer, handed: Iterable[Any]) -> NoReturn:
        code = 0
        try:
            _share_cores(self._num_peers)
            config = replace(self._strategy.config, run_id=os.environ.get(_RUN, self._strategy.config.run_id))
            self._strategy.peer = hivemind_peer(config, self._join)
            self._strategy.serve(trainer, _datamodule(handed))
        except BaseException:  # noqa: BLE001 - nothing above may go on as if this process were the trainer
            traceback.print_exc()
            code = 1
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: Lightning would take it for a failed fit and have callbacks and loggers act on it.
        os._exit(code)

    @override
    def kill(self, signum: int) -> None:
        """Lightning passes signals on here. The children are asked to leave in `Strategy.teardown` instead."""

    def check_children(self) -> None:
        """Raise if a child has ended."""
        for number, child in enumerate(self._children, start=1):
            if child.poll() is not None:
                raise Unreachable(
                    f"local peer {number} (process {child.pid}) ended with exit code {child.returncode} before the "
                    "run began. Its own error is above. Peers run this script again: it must reach `fit` without "
                    "input and without depending on what an earlier run left behind."
                )

    def end_children(self, timeout: float, *, dismissed: bool) -> None:
        """End the children.

        Args:
            timeout: Seconds that they may take, once they were dismissed.
            dismissed: They were told of the run's end and go by themselves. Else their run never began.
        """
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
            self._num_threads = None
        deadline = time.monotonic() + (timeout if dismissed else 0.0)
        children, self._children = self._children, []
        for child in children:
            try:
                child.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                if dismissed:
                    _log.warning("Local peer %d did not end in %g s and was killed.", child.pid, timeout)
                child.kill()
                child.wait()
            assert child.stdin is not None
            with contextlib.suppress(OSError):
                child.stdin.close()

    def _start_children(self, command: Sequence[str]) -> None:
        peer = self._strategy.peer
        assert peer is not None
        join = " ".join(peer.runtime.run(peer.transport.addresses()))
        for rank in range(1, self._num_peers):
            # LOCAL_RANK keeps Lightning's own rank-zero messages to one process.
            environment = {
                **os.environ,
                _JOIN: join,
                _RUN: self._strategy.config.run_id,
                _RANK: str(rank),
                "LOCAL_RANK": str(rank),
            }
            self._children.append(
                # Its own session: Ctrl-C at the terminal goes to the trainer, which ends its peers in order.
                subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
            )


def _command() -> list[str]:
    """This script or module again, with the same arguments."""
    # -P: the bootstrap's own folder, this package, must not shadow the standard library's modules.
    python = [sys.executable, "-P", str(_BOOTSTRAP)]
    spec = getattr(__main__, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__") if spec.name.endswith(".__main__") else spec.name
        return [*python, "-m", name, *sys.argv[1:]]
    script = Path(sys.argv[0])
    if not script.is_file():
        raise ConfigError(
            f"`devices` above 1 starts this script again for every peer, and {sys.argv[0]!r} is no file. "
            "Put the code into a script, or use `devices=1`."
        )
    return [*python, str(script.resolve()), *sys.argv[1:]]


def _share_cores(num_peers: int) -> int | None:
    """Peers of one machine share its cores, unless the user decided otherwise. Returns the number of threads before."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_peers))
    return before


def _datamodule(handed: Iterable[Any]) -> LightningDataModule | None:
    """The data module among what the Trainer was called with."""
    kinds = tuple(framework.data_module for framework in FRAMEWORKS)
    return next((one for one in handed if isinstance(one, kinds)), None)
