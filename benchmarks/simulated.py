"""Does the simulator tell the truth? The same swarms of real processes, and as simulated: samples/s of both.

The peers compute by waiting, each at a pace of its own, so that they do not share this machine's cores. Where links are
limited each is a network namespace of its own. Needs Linux, root and iproute2 for those, and TAP devices for links with
latency. Takes about fifteen minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from pathlib import Path

from benchmarks.hosts import Hosts, serving
from benchmarks.report import picture, table, write
from benchmarks.runs import train
from benchmarks.waiting import PACES
from lightning_swarm.network import PeerId
from lightning_swarm.network.simulated_link import Direction, SimulatedLink
from lightning_swarm.planner.simulator.fluid import Change, Scenario
from lightning_swarm.planner.simulator.microbatches import Work, simulate

_LATENCY_S = 5e-4
"""Of a message between processes of one machine."""


@dataclass(frozen=True)
class _Host:
    """Of a peer.

    Args:
        rate: Microbatches/s.
        mbit: Of its link.
        latency_s: Of its link.
    """

    rate: float
    mbit: float
    latency_s: float

    def link(self) -> SimulatedLink:
        """As simulated, a new one."""
        bytes_per_s = self.mbit * 1e6 / 8
        return SimulatedLink(Direction(bytes_per_s), Direction(bytes_per_s), self.latency_s)


@dataclass(frozen=True)
class Swarm:
    """One of them.

    Args:
        stages: The microbatches/s of each stage's peers. They are dealt out from the last stage on, so that later
            stages have as many as earlier ones, or one more.
        per_step: Microbatches of a step.
        boundary_bytes: From a stage to the next.
        stage_bytes: Of its weights.
        mbits: Of each peer's link, likewise. None: they are on one host. Else who gets which stage is left to chance.
        latencies_s: Of each peer's link, likewise: to the trainer it is that, to another peer both of theirs. None: of
            no link.
    """

    stages: Sequence[Sequence[float]]
    per_step: int = 64
    boundary_bytes: int = 1 << 10
    stage_bytes: int = 1 << 10
    mbits: Sequence[Sequence[float]] = ()
    latencies_s: Sequence[Sequence[float]] = ()

    @property
    def peers(self) -> Sequence[Sequence[_Host]]:
        """By stage, what there is to each one that is a host of its own; empty: they are on one."""
        if not self.mbits:
            return []
        latencies_s = self.latencies_s or [[0.0] * len(stage) for stage in self.mbits]
        stages = zip(self.stages, self.mbits, latencies_s, strict=True)
        return [list(starmap(_Host, zip(*stage, strict=True))) for stage in stages]

    @property
    def num_peers(self) -> int:
        """In all stages."""
        return sum(map(len, self.stages))


SWARMS: Mapping[str, Swarm] = {
    "2 stages, equal peers": Swarm([[8.0], [8.0]]),
    "2 stages, one peer is slower": Swarm([[8.0], [5.0]]),
    "2 stages, 4 unequal peers": Swarm([[2.0, 6.0], [5.0, 3.0]]),
    "4 stages, equal peers": Swarm([[6.0]] * 4),
    "3 stages, 7 peers of 1 to 8": Swarm([[8.0, 1.0], [4.0, 4.0], [1.0, 2.0, 5.0]]),
    "a link binds": Swarm([[20.0], [20.0]], boundary_bytes=250_000, mbits=[[20.0], [20.0]]),
    "compute binds, a link is busy": Swarm([[8.0], [8.0]], boundary_bytes=500_000, mbits=[[50.0], [50.0]]),
    "4 peers, unequal links": Swarm(
        [[6.0, 6.0], [6.0, 6.0]], boundary_bytes=250_000, mbits=[[10.0, 40.0], [20.0, 40.0]]
    ),
    "averaging over links": Swarm([[6.0, 6.0], [6.0, 6.0]], stage_bytes=2_000_000, mbits=[[40.0] * 2] * 2),
    "50 ms, a link binds": Swarm(
        [[20.0], [20.0]], boundary_bytes=250_000, mbits=[[20.0], [20.0]], latencies_s=[[0.025], [0.025]]
    ),
    "100 ms, compute binds": Swarm(
        [[8.0], [8.0]], boundary_bytes=500_000, mbits=[[100.0], [100.0]], latencies_s=[[0.05], [0.05]]
    ),
    "4 unequal peers, links of 5 to 60 ms": Swarm(
        [[6.0, 3.0], [4.0, 5.0]],
        boundary_bytes=250_000,
        mbits=[[20.0, 40.0], [40.0, 100.0]],
        latencies_s=[[0.01, 0.06], [0.03, 0.005]],
    ),
    "averaging over 80 ms": Swarm(
        [[6.0, 6.0], [6.0, 6.0]],
        stage_bytes=2_000_000,
        mbits=[[40.0] * 2] * 2,
        latencies_s=[[0.04] * 2] * 2,
    ),
}


def predicted(swarm: Swarm, seconds: float) -> float:
    """Samples/s of all steps but the first one, simulated."""
    dealt = list(_dealt(swarm))
    peers = [PeerId(f"{stage} {number}") for stage, number in dealt]
    changes = [Change(0.0, peer, swarm.stages[i][j]) for peer, (i, j) in zip(peers, dealt, strict=True)]
    hosts = swarm.peers
    links = {peer: hosts[i][j].link for peer, (i, j) in zip(peers, dealt, strict=True) if hosts}
    work = Work(
        swarm.per_step,
        boundary_bytes=swarm.boundary_bytes,
        stage_bytes=swarm.stage_bytes,
        lines=links,
        latency_s=_LATENCY_S,
    )
    first, *others = simulate(Scenario(len(swarm.stages), changes, 2 * seconds, rule="none"), work)
    spans = [span for span in others if span.begin_s < first.end_s + seconds]  # as long as the real ones train
    if not spans:
        raise ValueError(
            f"steps must end within the seconds of a training, none did in {seconds:g}. Give more (--seconds)."
        )
    num_samples = sum((span.end_s - span.begin_s) * span.samples_per_s for span in spans)
    return num_samples / (spans[-1].end_s - first.end_s)


def _dealt(swarm: Swarm) -> Sequence[tuple[int, int]]:
    """Stage and number of each peer, in the order in which a starter deals them out."""
    most = max(map(len, swarm.stages))
    stages = range(len(swarm.stages) - 1, -1, -1)
    return [(stage, number) for number in range(most) for stage in stages if number < len(swarm.stages[stage])]


def measured(swarm: Swarm, seconds: float) -> tuple[float, Swarm]:
    """Samples/s of all steps but the first one, of real processes; and the swarm with everybody where they were."""
    options = (
        "--num-stages", len(swarm.stages), "--num-microbatches", swarm.per_step,
        "--boundary-bytes", swarm.boundary_bytes, "--stage-bytes", swarm.stage_bytes,
    )  # fmt: skip
    real = partial(train, *options, "--role", "trainer", seconds=seconds, module="benchmarks.waiting")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if not swarm.mbits:
            for stage, rates in enumerate(swarm.stages):
                for number, rate in enumerate(rates):
                    (Path(folder) / f"{stage}-{rate:09.4f}-{number}").touch()
            return real("--devices", swarm.num_peers + 1, environment={PACES: folder}).mean_rate(), swarm
        peers = [peer for stage in swarm.peers for peer in stage]
        hosts = stack.enter_context(
            Hosts([0.0, *(peer.mbit for peer in peers)], [0.0, *(peer.latency_s for peer in peers)])
        )
        at: dict[str, _Host] = {}
        addresses = []
        for number, peer in enumerate(peers, start=1):
            paces = Path(folder) / str(number)  # a host's pace is its own, whatever stage it gets
            paces.mkdir()
            for index in range(len(swarm.stages)):
                (paces / f"{index}-{peer.rate:09.4f}-0").touch()
            address = stack.enter_context(
                serving(hosts, number, "benchmarks.waiting", "--seconds", 0, *options, environment={PACES: str(paces)})
            )
            addresses.append(address)
            at[address.rpartition("/")[2]] = peer
        steps = real("--listen", hosts.address(0), "--initial-peers", *addresses, before=hosts.on(0))
        held = [[at[peer_id] for peer_id in stage] for stage in steps.held[-1]]
        return steps.mean_rate(), replace(
            swarm,
            stages=[[peer.rate for peer in one] for one in held],
            mbits=[[peer.mbit for peer in one] for one in held],
            latencies_s=[[peer.latency_s for peer in one] for one in held],
        )


def main(words: Sequence[str] | None = None) -> None:
    """Measure and simulate each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--only", default="", help="those whose names have this in them")
    arguments = parser.parse_args(words)
    if Hosts.missing(delayed=True):
        parser.error(f"it needs Linux, root, iproute2 and TAP devices; not found: {Hosts.missing(delayed=True)}")
    rows: list[list[object]] = [["swarm", "samples/s", "simulated", "simulated / real"]]
    drawn: dict[str, list[float]] = {}
    for name, swarm in SWARMS.items():
        if arguments.only in name:
            real, placed = measured(swarm, arguments.seconds)
            told = predicted(placed, arguments.seconds)
            rows.append([name, f"{real:.2f}", f"{told:.2f}", f"{told / real:.3f}"])
            drawn[name] = [told / real]
            print(*rows[-1], flush=True)
    write("simulated", table("Real swarms on this machine, and the same ones simulated", rows))
    picture("simulated", "Samples/s, simulated / real", "ratio", drawn)


if __name__ == "__main__":
    main()
