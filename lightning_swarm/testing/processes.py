"""Planned faults in real processes: each peer strikes itself, by signals, when its moment comes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_swarm.client.session import Session
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.network import PeerId, Transport
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.strategy.strategy import SwarmStrategy
from lightning_swarm.testing.faults import Fault, FaultPlan, MessagePoint
from lightning_swarm.testing.sabotage import Saboteur


class _OwnProcess:
    """The peers of this process: only the process itself."""

    def is_live(self, peer: PeerId) -> bool:
        return True

    def hit(self, fault: Fault, peer: PeerId) -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            return
        # A stopped process cannot wake itself up.
        subprocess.Popen(["sh", "-c", f"sleep {fault.for_s}; kill -CONT {os.getpid()}"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def strike_in_process(transport: Transport, plan: FaultPlan, name: str, fired: Path) -> None:
    """Carry out those faults of a swarm's plan that strike this process, which the plan calls `name`.

    A line for each fault goes to the file `fired` before it strikes: a killed process cannot report it any more.
    """
    for fault in plan.faults:
        if (
            fault.peer is None
            or fault.kind in ("corrupt", "partition")
            or fault.when.get("of", fault.peer) != fault.peer
        ):
            raise ConfigError(
                f"in real processes a peer is struck by itself, in its own phase: kill, freeze, delay, drop and "
                f"duplicate with a name, got {fault}. Use the in-memory network for the others."
            )

    def write(fault: Fault, _: MessagePoint) -> None:
        with fired.open("a") as file:
            print(fault, file=file)

    own_plan = FaultPlan()
    own_plan.faults = [fault for fault in plan.faults if fault.peer == name]
    assert isinstance(transport, BaseTransport)
    transport.tap = Saboteur(own_plan, _OwnProcess(), struck=write, names={transport.peer_id: PeerId(name)})


class FaultySwarmStrategy(SwarmStrategy):
    """`SwarmStrategy` whose processes are struck by planned faults.

    Every process runs the script again, and so makes this strategy with the same plan.

    Args:
        faults: Faults for the peers that the launcher starts, ``peer-0`` (the trainer's) to ``peer-<devices - 1>``.
        fired: A file to which each process appends a line before a fault strikes: a killed process cannot report it.
        name: This process's name in the plan, if no launcher numbers it.
        kwargs: Arguments of `SwarmStrategy`.
    """

    def __init__(self, *, faults: FaultPlan, fired: Path, name: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._faults = faults
        self._fired = fired
        self._name = name

    @override
    def serve(
        self, trainer: pl.Trainer, datamodule: pl.LightningDataModule | None, handed: Mapping[str, Any] | None = None
    ) -> str | None:
        self._strike()
        return super().serve(trainer, datamodule, handed)

    @override
    def _start_run(
        self, trainer: pl.Trainer, model: PeerModel, ranges: Sequence[range], selection: Selection | None
    ) -> Session:
        self._strike()
        return super()._start_run(trainer, model, ranges, selection)

    def _strike(self) -> None:
        assert self.peer is not None
        strike_in_process(self.peer.transport, self._faults, self._name or f"peer-{self.local_rank}", self._fired)
