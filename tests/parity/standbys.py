"""Peers that could take a run over, each with a `Trainer.fit` in its own thread; one loop runs the network."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swarm.coordinator.takeover import choose_standby_lead
from lightning_swarm.core.event_loop import ThreadRuntime
from lightning_swarm.core.limits import Limits
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.state import HeldSnapshots
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.strategy.launcher import TrainerCall
from lightning_swarm.strategy.strategy import SwarmStrategy
from lightning_swarm.testing.local import _InlineLauncher
from tests.parity.harness import QUIET
from tests.parity.models import digits, loader
from tests.parity.trainers import Shared, default_dtype, loaders_in_turn

LIMITS = Limits(
    call_timeout=10.0,
    start_timeout=30.0,
    lead_timeout=20.0,
    silence_timeout=0.5,
    revive_timeout=0.5,
    leave_timeout=0.5,
    stage_timeout=60.0,
    snapshot_interval=0.001,
)
"""The interval is so short that a snapshot begins at every step if the one before is complete."""

_SOMEBODY = "127.0.0.1:1/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@dataclass
class Swarm:
    """A swarm of threads, and a log of its steps.

    Args:
        num_standbys: Peers with data beside the lead.
        num_servers: Further peers, without data.
        make: Builds each peer's module.
        kills: Step -> name of the peer to kill, which leads at that time. Each kill happens once.
        callbacks: Peer's name -> its callbacks.
        data: Makes each peer's loader.
        swarm: Arguments of the strategy.
        options: Arguments of the Trainer.
    """

    num_standbys: int
    num_servers: int
    make: Callable[[], L.LightningModule]
    kills: dict[int, str]
    callbacks: Callable[[str], Sequence[L.Callback]] = lambda name: ()
    data: Callable[[], Any] = lambda: loader(digits())
    validation: Callable[[], Any] = lambda: None
    swarm: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    runtime: ThreadRuntime = field(default_factory=ThreadRuntime)
    network: MemoryNetwork = field(default_factory=lambda: MemoryNetwork(silence_s=LIMITS.silence_timeout))
    trainers: dict[str, L.Trainer] = field(default_factory=dict)
    modules: dict[str, L.LightningModule] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)  # step -> loss; a repeated step overwrites its first loss
    steps: list[tuple[str, int]] = field(default_factory=list)  # (peer, step) in the order of computation
    strategies: dict[str, ThreadStrategy] = field(default_factory=dict)
    later: Sequence[str] = ()  # peers that `start` brings in during the run
    _threads: dict[str, threading.Thread] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All peers' names, the first lead's first."""
        standbys = [f"standby-{number}" for number in range(self.num_standbys)]
        return ["lead", *standbys, *(f"server-{number}" for number in range(self.num_servers))]

    @property
    def leads(self) -> list[str]:
        """The leads, in their order."""
        return list(dict.fromkeys(name for name, _ in self.steps))

    def fit(self) -> Swarm:
        """Train; raise if a peer fails that was neither killed nor frozen."""
        names = [*self.names, *self.later]
        for number, name in enumerate(names):
            torch.manual_seed(number)
            self.modules[name] = self.make()
        with default_dtype(torch.float64), loaders_in_turn():
            for name in names:
                self.strategies[name] = ThreadStrategy(name, self, **self.swarm)
                self.trainers[name] = L.Trainer(
                    **{**QUIET, "max_epochs": -1, **self.options},
                    devices=1,
                    strategy=self.strategies[name],
                    callbacks=[*self.callbacks(name), Noting(name, self)],
                )
                self._threads[name] = threading.Thread(target=self._one, args=(name,), daemon=True)
            torch.manual_seed(0)
            for name in self.names:
                self.start(name)
            for name, thread in self._threads.items():
                # Do not wait for killed peers: once cut off, they look for a swarm to start a new run with.
                deadline = time.monotonic() + 60.0
                while thread.is_alive() and name not in self.killed:
                    thread.join(0.1)
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{name} hangs; errors so far: {self.errors}")
            self.runtime.close()
            for name in self.killed:
                self._threads[name].join(10.0)
        for name, error in self.errors.items():
            if name not in (*self.killed, *self.frozen):
                raise error
        assert not self.kills, "nobody was killed"
        return self

    def start(self, name: str) -> None:
        """Start a peer's thread."""
        self._threads[name].start()

    def _one(self, name: str) -> None:
        try:
            self.trainers[name].fit(self.modules[name], self.data(), self.validation())
        except BaseException as error:  # noqa: BLE001 - a thread has nobody above it
            self.errors[name] = error

    def freeze(self, name: str) -> None:
        """Freeze a peer, called on its own thread; its network stops as under SIGSTOP."""

        async def freeze() -> None:
            self.network.freeze(PeerId(name))

        self.frozen.append(name)
        self.runtime.run(freeze())

    def kill(self, name: str) -> None:
        """Kill a peer, called on its own thread; its network stops as under `kill -9`."""

        async def kill() -> None:
            self.network.kill(PeerId(name))

        self.killed.append(name)
        self.runtime.run(kill())

    def has_standby(self) -> bool:
        """Return whether some standby has all it needs to take the run over now."""
        lead = PeerId(self.leads[-1] if self.steps else "lead")
        peers = [one.peer for one in self.strategies.values() if one.peer is not None and one.name not in self.killed]
        servers = {one.transport.peer_id: one.server for one in peers if one.server is not None}
        held = {
            peer: HeldSnapshots(host="", snapshots=one.snapshots.store.held, loops=one.snapshots.loops.versions)
            for peer, one in servers.items()
            if peer != lead
        }
        return choose_standby_lead(held, list(held), len(servers[lead].membership.run.rosters)) is not None

    def waited_for(self, reached: Callable[[], bool], *, within_s: float) -> bool:
        """On a peer's thread, let the other peers run until the condition holds; return False after `within_s`."""

        async def wait() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    while not reached():  # noqa: ASYNC110 - whatever it looks at tells nobody
                        await asyncio.sleep(0)
                    return True
            return False

        return self.runtime.run(wait())

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights of the last lead."""
        return self.modules[self.steps[-1][0]].state_dict()


class Noting(L.Callback):
    """Records each batch, and kills its own peer at the steps in `Swarm.kills`."""

    def __init__(self, name: str, swarm: Swarm) -> None:
        self.name = name
        self.swarm = swarm

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        due = [step for step, name in self.swarm.kills.items() if name == self.name and step <= trainer.global_step]
        # In the first steps no standby has all that a takeover needs, so the kill waits for a later step.
        if due and self.name not in self.swarm.killed and self.swarm.waited_for(self.swarm.has_standby, within_s=2.0):
            del self.swarm.kills[due[0]]
            self.swarm.kill(self.name)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.swarm.steps.append((self.name, trainer.global_step - 1))
        self.swarm.losses[trainer.global_step - 1] = float(outputs["loss"])


class ThreadStrategy(SwarmStrategy):
    """Strategy of one of several peers in this process."""

    def __init__(self, name: str, swarm: Swarm, **kwargs: Any) -> None:
        joins = {} if name == "lead" else {"initial_peers": _SOMEBODY}
        role = "server" if name.startswith("server") else "auto"
        super().__init__(**{"num_stages": 2, "microbatch_size": 3, "limits": LIMITS, "role": role, **joins, **kwargs})
        self.name = name
        self._swarm = swarm

    @override
    def _configure_launcher(self) -> None:
        self._launcher = _ThreadLauncher(self)

    def make_peer(self) -> None:
        transport = self._swarm.network.transport(PeerId(self.name))
        self.peer = Peer(
            Shared(self._swarm.runtime),
            transport,
            self._swarm.network.directory(transport),
            executor=InlineExecutor,
            config=self.config,
            rng=random.Random(self.name),
        )

    @override
    def start_run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._swarm.steps:  # start with all peers, so that each takes part in the first step
            self._swarm.runtime.run(self._all_there())
        return super().start_run(*args, **kwargs)

    async def _all_there(self) -> None:
        assert self.peer is not None
        others = set(self._swarm.names) - {self.name}
        while not others <= set(await self.peer._directory.known_servers()):
            pass


class _ThreadLauncher(_InlineLauncher):
    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        call = TrainerCall(self._strategy, trainer, function, args, kwargs)
        self._strategy.make_peer()
        if self._strategy.config.only_serves:
            path = self._strategy.serve(trainer, None, call.arguments)
            return None if path is None else call.run_as_lead(path)
        self._strategy.check(trainer, call.arguments)
        return call.run()


def shuffled() -> DataLoader[Any]:
    """Return a loader whose order differs in each epoch."""
    return DataLoader(digits(), batch_size=8, shuffle=True)
