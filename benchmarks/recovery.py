"""How fast a swarm is itself again when one of two replicas of a stage is killed.

A trainer that holds no stage, and two stages of two servers. After some time one server gets `kill -9`. What the
survivors can do is what they do in the last third of the run. The figure is the time from the kill until the samples/s
over the next `WINDOW_S` seconds are at 0.9 of that.

With `--faults` other peers run: a trainer, and three stages of two servers over libp2p alone. Faults follow each other:
`kill -9`; SIGSTOP of a server for 1, 4 and 20 s; a cut of all of its connections for as long, by SIGSTOP of its libp2p
daemon. The figure is the time from the fault, less its own length, until five steps in a row take no longer than usual.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lightning as L
import matplotlib as mpl
from matplotlib import pyplot as plt
from typing_extensions import override

from benchmarks.overhead import SWARM
from benchmarks.report import OUT, table, write
from benchmarks.runs import FAR_APART, Steps, train
from lightning_swarm import Limits, SwarmStrategy
from tests.p2p.warm import Server, Zygote
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, Recipe, digits, loader

WINDOW_S = 2.0

NUM_SERVERS: Final = 6
NUM_STAGES: Final = 3
LENGTHS_S: Final = (1.0, 4.0, 20.0)  # of freezes and cuts
_USUAL: Final = 1.5  # times the median step before the fault, that the median of the steps after it may take
_IN_A_ROW: Final = 5
_LONG_S: Final = 0.5  # a step that takes longer is printed
_MOST_S: Final = 90.0  # until a swarm is whole again
_DETECTED: Final = frozenset({"ban", "retry", "gone", "round_repeated", "takeover"})


def recovery_s(steps: Steps, *, share: float = 0.9) -> float:
    """Seconds from the kill until the survivors' rate is reached again."""
    assert steps.killed_s is not None
    end_s = steps.at_s[-1]
    able = steps.median_rate(steps.killed_s + (end_s - steps.killed_s) * 2 / 3, end_s)
    for at_s in steps.at_s:
        if at_s >= steps.killed_s and steps.rate(at_s, at_s + WINDOW_S) >= share * able:
            return at_s - steps.killed_s
    return float("inf")


def picture(runs: list[Steps]) -> None:
    """Samples/s over time, the kill at 0."""
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(8, 4))
    for steps in runs:
        assert steps.killed_s is not None
        rates = [steps.samples[i] / (steps.at_s[i] - steps.at_s[i - 1]) for i in range(1, len(steps.at_s))]
        axes.step([at_s - steps.killed_s for at_s in steps.at_s[1:]], rates, where="pre")
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel="seconds after the kill", ylabel="samples/s of each step", title="One of two replicas is killed")
    axes.set_ylim(bottom=0.0)
    figure.savefig(OUT / "recovery.png", dpi=120, bbox_inches="tight")


@dataclass
class Fault:
    """A fault that struck, and what came of it, in seconds after it."""

    kind: str
    length_s: float
    at_s: float  # Unix time
    back_s: float = float("inf")  # until the steps take no longer than usual
    events: list[tuple[float, str]] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(
        default_factory=list
    )  # steps that took long: when each began, and how long

    @property
    def beyond_s(self) -> float:
        """Seconds beyond the fault's own length until the steps were as usual."""
        return max(0.0, self.back_s - self.length_s)

    @property
    def detected_s(self) -> float | None:
        """Seconds until the trainer or the coordinator noted something; None: the fault was waited out."""
        return next((at_s for at_s, kind in self.events if kind in _DETECTED), None)


class Hand(L.Callback):
    """Strikes servers, one after the other, and measures how long steps take meanwhile.

    Args:
        zygote: Begins servers in the place of killed ones.
        num_faults: Number of faults.
        seed: Chooses the faults and their victims.
    """

    def __init__(self, zygote: Zygote, num_faults: int, seed: int) -> None:
        self._zygote = zygote
        self._num_faults = num_faults
        self._rng = random.Random(seed)
        self.servers: list[Server] = []
        for _ in range(NUM_SERVERS):
            self._begin()
        self.faults: list[Fault] = []
        self._ends_s: list[float] = []  # of steps, Unix times
        self._strategy: SwarmStrategy | None = None
        self._work = threading.Thread(target=self._strike_all, daemon=True)

    def _begin(self) -> None:
        known = [self.servers[0].address] if self.servers else []
        limits = {"leave_timeout": 5.0}
        self.servers.append(self._zygote.begin(known, num_stages=NUM_STAGES, limits=limits))

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._ends_s.append(time.time())
        if self._strategy is None:
            assert isinstance(trainer.strategy, SwarmStrategy)
            self._strategy = trainer.strategy
            self._work.start()
        trainer.should_stop = not self._work.is_alive()

    def _strike_all(self) -> None:
        kinds = itertools.cycle([("kill", 0.0), *itertools.product(("freeze", "cut"), LENGTHS_S)])
        for kind, length_s in itertools.islice(kinds, self._num_faults):
            self._wait_until_whole()
            threading.Event().wait(2.0 + self._rng.random())
            self.faults.append(one := self._strike(kind, length_s))
            print(one.kind, one.length_s, f"{one.beyond_s:.2f}", one.pauses, one.events[:12], flush=True)

    def _wait_until_whole(self) -> None:
        end_s = time.time() + _MOST_S
        while {one.peer_id for one in self.servers} != self._roster():
            if time.time() > end_s:
                raise RuntimeError(f"the swarm is not whole again after {self.faults[-1:]}")
            threading.Event().wait(0.05)

    def _roster(self) -> set[str]:
        assert self._strategy is not None
        assert self._strategy.peer is not None
        run = self._strategy.peer.lead.run
        return set() if run is None else {member.peer_id for stage in run.rosters for member in stage}

    def _strike(self, kind: str, length_s: float) -> Fault:
        server = self._rng.choice(self.servers)
        fault = Fault(kind, length_s, time.time())
        if kind == "kill":
            os.kill(server.pid, signal.SIGKILL)
        else:
            pid = server.pid if kind == "freeze" else _daemon_of(server.pid)
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(length_s, os.kill, (pid, signal.SIGCONT)).start()
        self._wait_until_usual(fault)
        if kind == "kill":
            self.servers.remove(server)
            self._begin()
        return fault

    def _wait_until_usual(self, fault: Fault) -> None:
        """Wait until the fault is over and the steps take no longer than before it, and note what happened."""
        before = [b - a for a, b in itertools.pairwise(self._ends_s[-40:])]
        usual_s = _USUAL * statistics.median(before)
        while fault.back_s == float("inf") and time.time() < fault.at_s + _MOST_S:
            threading.Event().wait(0.05)
            ends_s = [fault.at_s, *(one for one in [*self._ends_s] if one > fault.at_s)]
            took_s = [b - a for a, b in itertools.pairwise(ends_s)]
            # Once the fault is over, or all steps went on as usual while it lasted.
            since = 0 if time.time() > fault.at_s + fault.length_s + 2.0 else len(took_s)
            for first in range(since, len(took_s) - _IN_A_ROW):
                run = took_s[first + 1 : first + 1 + _IN_A_ROW]
                slow = [one for one in took_s[first + 1 :] if one > 1.0]
                if statistics.median(run) <= usual_s and not slow:
                    fault.back_s = ends_s[first + 1] - fault.at_s
                    break
        fault.pauses = [
            (round(a - fault.at_s, 1), round(b - a, 1))
            for a, b in itertools.pairwise(self._ends_s)
            if b > fault.at_s and b - a > 0.5
        ]
        assert self._strategy is not None
        assert self._strategy.peer is not None
        fault.events = [
            (round(one.unix_time_s - fault.at_s, 2), one.kind)
            for one in self._strategy.peer.events.newest
            if one.unix_time_s > fault.at_s
        ]


def _daemon_of(pid: int) -> int:
    """The process id of a peer's libp2p daemon."""
    for child in Path(f"/proc/{pid}/task").glob("*/children"):
        for one in child.read_text().split():
            if "p2pd" in Path(f"/proc/{one}/cmdline").read_text():
                return int(one)
    raise RuntimeError(f"process {pid} has no libp2p daemon")


def strike(num_faults: int, seed: int) -> list[Fault]:
    """Train while faults strike; returns them."""
    os.environ.update(FAR_APART)
    with tempfile.TemporaryDirectory() as folder, closing(Zygote(Path(folder))) as zygote:
        hand = Hand(zygote, num_faults, seed)
        strategy = SwarmStrategy(
            role="trainer",
            num_stages=NUM_STAGES,
            pipeline="net",
            initial_peers=[hand.servers[0].address],
            microbatch_size=2,
            limits=Limits(leave_timeout=5.0),
        )
        type(strategy).num_awaited_servers = NUM_SERVERS  # type: ignore[assignment,method-assign]
        trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=-1, callbacks=[hand], **QUIET)
        trainer.fit(DigitsMLP(Recipe(optimizer="sgd")), loader(digits()))
    return hand.faults


def summary(faults: Sequence[Fault]) -> str:
    """Table of the faults by kind and length."""
    rows: list[list[object]] = [["fault", "times", "median", "95 %", "longest", "noticed after (median)"]]
    names = dict.fromkeys((one.kind, one.length_s) for one in faults)
    groups = [(f"{kind} {length:g} s" if length else kind, kind, length) for kind, length in sorted(names)]
    for name, kind, length in [*groups, ("all", "", 0.0)]:
        chosen = [one for one in faults if not kind or (one.kind, one.length_s) == (kind, length)]
        beyond = sorted(one.beyond_s for one in chosen)
        noticed = [one.detected_s for one in chosen if one.detected_s is not None]
        rows.append(
            [
                name,
                len(chosen),
                f"{statistics.median(beyond):.1f} s",
                f"{beyond[min(len(beyond) - 1, int(0.95 * len(beyond)))]:.1f} s",
                f"{beyond[-1]:.1f} s",
                f"{statistics.median(noticed):.1f} s" if noticed else "never",
            ]
        )
    return table("Seconds beyond the fault's own length until steps take no longer than usual", rows)


def main(words: Sequence[str] | None = None) -> None:
    """Run it as often as asked, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--faults", type=int, default=0, help="strike so many times, in place of the kills by default")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if arguments.faults:
        write("faults", summary(strike(arguments.faults, arguments.seed)))
        return
    runs = [
        train(*SWARM, "--kill-after-s", arguments.seconds / 3, seconds=arguments.seconds)
        for _ in range(arguments.repeats)
    ]
    rows: list[list[object]] = [["run", "before", "survivors", "ratio", "back at 0.9 after"]]
    for number, steps in enumerate(runs, start=1):
        assert steps.killed_s is not None
        before = steps.median_rate(0.0, steps.killed_s)
        after = steps.median_rate(steps.killed_s + (steps.at_s[-1] - steps.killed_s) * 2 / 3)
        rows.append(
            [number, f"{before:.1f}/s", f"{after:.1f}/s", f"{after / before:.2f}", f"{recovery_s(steps):.1f} s"]
        )
    write("recovery", table("One of two replicas of a stage is killed: samples/s, and the time to recover", rows))
    picture(runs)


if __name__ == "__main__":
    main()
