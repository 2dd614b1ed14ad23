"""Six servers in processes of their own, three stages of two; a seeded hand takes one away again and again."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.config import Limits
from tests.parity.harness import LOSS_TOLERANCE, QUIET, WEIGHT_TOLERANCE, run_plain
from tests.parity.models import DigitsMLP, Net, Recipe, digits, loader

# Cold starts in this file: 1, the process that all peers are forked from.

NUM_STAGES = 3
NUM_SERVERS = 6
LIMITS: dict[str, Any] = {"silence_timeout": 5.0, "call_timeout": 60.0, "leave_timeout": 5.0}
ROOT = Path(__file__).resolve().parents[2]
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+:\d+/\w+")
_PATIENCE_S = 120.0


class Zygote:
    """Begins peers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_begun = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.p2p.zygote"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._read() == "ready"

    def begin(self, initial_peers: list[str]) -> Server:
        """One server; the first one has nobody to join."""
        self._num_begun += 1
        log = self._folder / f"server-{self._num_begun}.log"
        serve = {"model": "digits", "num_stages": NUM_STAGES, "initial_peers": initial_peers, "limits": LIMITS}
        assert self._process.stdin is not None
        print(json.dumps({"log": str(log), "serve": serve}), file=self._process.stdin, flush=True)
        return Server(int(self._read()), log)

    def end(self) -> None:
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
    pid: int
    log: Path

    @property
    def address(self) -> str:
        """Where it listens, as it prints it."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (self.log.exists() and (found := _ADDRESS.search(self.log.read_text()))):
            assert time.monotonic() < deadline, self.log.read_text() if self.log.exists() else "it never began"
            threading.Event().wait(0.05)
        return found[0]

    @property
    def peer_id(self) -> str:
        return self.address.partition("/")[2]

    @property
    def alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True


class Strategy(SwarmStrategy):
    """Waits for all servers before it begins."""

    @property
    @override
    def _num_servers(self) -> int:
        return NUM_SERVERS


@dataclass
class Hand:
    """What takes servers away while the trainer's loop runs.

    Args:
        take: Does it to a server; returns whether a new one is needed.
        times: How often.
    """

    zygote: Zygote
    servers: list[Server]
    take: Callable[[Hand, Server], bool]
    times: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    taken: list[tuple[int, str]] = field(default_factory=list)  # in which step, whom
    strategy: Strategy | None = None
    error: BaseException | None = None
    num_replays: int = 0
    done: bool = False

    @property
    def roster(self) -> set[str]:
        """Who is in it, as the trainer knows."""
        assert self.strategy is not None
        assert self.strategy.peer is not None
        assert self.strategy.peer.run is not None
        return {member.peer_id for stage in self.strategy.peer.run.rosters for member in stage}

    @property
    def step(self) -> int:
        assert self.strategy is not None
        assert self.strategy.peer is not None
        assert self.strategy.peer.run is not None
        return self.strategy.peer.run.version

    def work(self) -> None:
        """On a thread of its own."""
        try:
            for _ in range(self.times):
                self._once()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        finally:
            assert self.strategy is not None
            assert self.strategy.peer is not None
            self.num_replays = self.strategy.peer.events.counts["replay"]
            self.done = True

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline, what
            threading.Event().wait(0.02)

    def _once(self) -> None:
        server = self.rng.choice(self.servers)
        before = self.step
        self.wait_for(lambda: self.step > before, "no step was decided")  # somewhere in a step, not where one begins
        threading.Event().wait(self.rng.uniform(0.0, 0.1))
        self.taken.append((self.step, server.peer_id))
        if self.take(self, server):
            self.servers.remove(server)
            newcomer = self.zygote.begin([one.address for one in self.servers])
            self.servers.append(newcomer)
        self.wait_for(
            lambda: {one.peer_id for one in self.servers} == self.roster,
            f"the roster is not whole again after {self.taken}",
        )


def kill(hand: Hand, server: Server) -> bool:
    os.kill(server.pid, signal.SIGKILL)
    return True


def freeze(hand: Hand, server: Server) -> bool:
    """Until the others have gone on without it. Then it joins again, by itself."""
    os.kill(server.pid, signal.SIGSTOP)
    hand.wait_for(lambda: server.peer_id not in hand.roster, f"{server.peer_id} is frozen and still in the roster")
    os.kill(server.pid, signal.SIGCONT)
    return False


def terminate(hand: Hand, server: Server) -> bool:
    """It leaves by a record, and ends."""
    os.kill(server.pid, signal.SIGTERM)
    hand.wait_for(lambda: not server.alive, f"{server.peer_id} did not leave")
    assert server.peer_id not in hand.roster
    return True


class Steps(L.Callback):
    """The curve; ends the run when the hand has done its work."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.losses: list[float] = []
        self._thread = threading.Thread(target=hand.work, daemon=True)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.strategy, Strategy)
        self.hand.strategy = trainer.strategy
        self._thread.start()

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        trainer.should_stop = self.hand.done


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    made = Zygote(tmp_path_factory.mktemp("servers"))
    yield made
    made.end()


def make() -> Net:
    return DigitsMLP(Recipe(optimizer="sgd"))


@pytest.mark.parametrize(
    ("take", "times"),
    [
        pytest.param(kill, 15, id="kill -9"),
        # Each takes `silence_timeout` at the least.
        pytest.param(freeze, int(os.environ.get("SWARM_FREEZES", "4")), id="SIGSTOP and SIGCONT"),
        pytest.param(terminate, 15, id="SIGTERM"),
    ],
)
def test_the_curve_is_the_plain_trainers_whoever_is_taken_away(
    zygote: Zygote, take: Callable[[Hand, Server], bool], times: int
) -> None:
    first = zygote.begin([])
    servers = [first, *(zygote.begin([first.address]) for _ in range(1, NUM_SERVERS))]
    hand = Hand(zygote, servers, take, times)
    curve = Steps(hand)
    strategy = Strategy(
        role="trainer",
        num_stages=NUM_STAGES,
        pipeline="net",
        microbatch_size=2,
        initial_peers=[first.address],
        limits=Limits(**LIMITS),
    )
    try:
        L.seed_everything(0)
        module = make()
        trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=-1, callbacks=[curve], **QUIET)
        trainer.fit(module, loader(digits()))
        assert hand.error is None, hand.error
        assert len(hand.taken) == times
        if take is terminate:
            assert hand.num_replays == 0
        plain = run_plain(make, loader(digits()), max_steps=trainer.global_step, max_epochs=-1)
        assert len(curve.losses) == trainer.global_step
        for ours, theirs in zip(curve.losses, plain.losses, strict=True):
            assert abs(ours - theirs) <= LOSS_TOLERANCE * abs(theirs)
        for name, tensor in plain.weights.items():
            assert float((module.state_dict()[name] - tensor).abs().max()) <= WEIGHT_TOLERANCE
        hand.wait_for(lambda: not any(one.alive for one in hand.servers), "a server outlived its run")
    finally:
        for server in hand.servers:
            if server.alive:
                os.kill(server.pid, signal.SIGKILL)
