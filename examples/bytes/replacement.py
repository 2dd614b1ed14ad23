"""A machine is lost in the middle of the training, and another one takes its place."""

import csv
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lightning_swarm import SwarmStrategy

GRACE_S = 15.0


class Replacement(L.Callback):
    """Kills one of the local peers after a step, and has a new one join by the command that a user would type.

    Writes ``peers.csv``: the number of peers after each step, and what happened to one of them.

    Args:
        at_step: The step after which the peer is killed.
        out: Folder for that file, and for the output of the new peer.
        program: The program that all peers run.

    Raises:
        RuntimeError: At the end of the training, if the peer is not gone, or no new one has joined.
    """

    def __init__(self, at_step: int, out: Path, program: Sequence[str]) -> None:
        self.at_step = at_step
        self.out = out
        self.program = program
        self.joiner: subprocess.Popen[bytes] | None = None
        self.rows: list[tuple[int, int, str]] = []
        self._struck = False
        self._there: set[str] = set()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Note which peers are in the run; when the time has come, kill one and start another."""
        strategy = trainer.strategy
        if not isinstance(strategy, SwarmStrategy):
            raise RuntimeError("only a swarm goes on without one of its machines: leave out `--plain` or `--kill-at`")
        there = {str(peer.peer_id) for stage in strategy.status().stages for peer in stage.peers}
        gone, come = self._there - there, there - self._there if self._there else set()
        self._there = there
        happened = [*(["gone"] if gone else []), *(["joined"] if come else [])]
        if not self._struck and trainer.global_step >= self.at_step:
            self._struck = True
            self._kill(strategy.local_processes[-1], trainer.global_step)
            self._start(strategy.address)
            happened.append("killed")
        # Only the first time: later on, peers that move to another stage leave and join again.
        known = {event for _, _, event in self.rows}
        for peer in sorted(gone) if "gone" not in known else ():
            print(
                f"step {trainer.global_step}: the run goes on without peer {peer[-6:]}; {len(there)} are left",
                flush=True,
            )
        for peer in sorted(come) if "joined" not in known else ():
            print(f"step {trainer.global_step}: the new peer {peer[-6:]} is in; {len(there)} peers train", flush=True)
        self.rows += [(trainer.global_step, len(there), event) for event in happened or [""]]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the file; fail if nothing was demonstrated."""
        with (self.out / "peers.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("step", "peers", "event"), *self.rows])
        missing = {"killed", "gone", "joined"} - {happened for _, _, happened in self.rows}
        if missing:
            raise RuntimeError(
                f"A peer was to be killed after step {self.at_step} and replaced before step {trainer.global_step}; "
                f"what did not happen: {', '.join(sorted(missing))}. Raise `--max-steps`: the new peer needs time "
                f"to start, or look into {self.out / 'joiner.log'}."
            )

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Wait for the new peer, which ends by itself when the run is over or has failed."""
        if self.joiner is None:
            return
        try:
            self.joiner.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.joiner.kill()
            self.joiner.wait()
        self.joiner = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """End the new peer, which must not wait for a run that is no more."""
        if self.joiner is not None:
            self.joiner.terminate()
            self.teardown(trainer, pl_module, "fit")

    def _kill(self, process: int, step: int) -> None:
        os.kill(process, signal.SIGKILL)
        print(f"step {step}: one of the peers is killed (process {process}), as if its machine had failed", flush=True)

    def _start(self, address: str) -> None:
        command = ["join", address, *self.program]
        log = self.out / "joiner.log"
        with log.open("wb") as file:
            self.joiner = subprocess.Popen(
                [sys.executable, "-m", "lightning_swarm", *command], stdout=file, stderr=subprocess.STDOUT
            )
        host, _, peer = address.partition("/")
        typed = f"lightning-swarm join {host}/...{peer[-6:]} {shlex.join(self.program[:2])} ..."
        print(f"a new peer starts: {typed}", flush=True)
