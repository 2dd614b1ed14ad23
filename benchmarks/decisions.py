"""What a decision costs: which peer gets a microbatch, and who moves to which stage.

A trainer decides on the first for each microbatch and stage, whoever coordinates on the second whenever a peer comes,
goes or arrives.
"""

from __future__ import annotations

import argparse
import random
import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.report import picture, table, write
from lightning_swarm.client.pipeline.router import StageRouter
from lightning_swarm.coordinator.rebalancing.policy import MoveCosts, StageRates, plan
from lightning_swarm.network import PeerId

NUM_PEERS: Final = (10, 100, 1_000, 10_000)
"""Of a stage that microbatches are routed to."""
NUM_STAGES: Final = (4, 8, 16, 32)
"""Of a pipeline whose peers may move."""
PER_STAGE: Final = 1_000
NUM_LOST: Final = (0, 2, 20)
REPEATS: Final = 11


def median_us(decide: Callable[[], object], number: int) -> float:
    """Microseconds of a decision; it is taken so many times at once."""
    return statistics.median(timeit.repeat(decide, number=number, repeat=REPEATS)) / number * 1e6


def route_us(num_peers: int) -> float:
    """To choose a peer, and to settle its account once it is done."""
    rng = random.Random(0)
    router = StageRouter(rng)
    router.set_peers(PeerId(f"peer-{number}") for number in range(num_peers))
    samples_per_s = {peer: rng.uniform(50.0, 150.0) for peer in router.peers}

    def decide() -> None:
        charge = router.choose(4, now_s=0.0)
        router.settle(charge, busy_s=rng.gauss(4.0, 0.1) / samples_per_s[charge.peer], queued=0)

    for _ in range(3 * num_peers):  # all are measured
        decide()
    return median_us(decide, 1000)


def move_us(num_stages: int, num_lost: int) -> tuple[float, int]:
    """To decide on moves after a stage has lost some of its peers; and how many moves that brings."""
    rng = random.Random(0)
    stages = StageRates(num_stages)
    for number in range(PER_STAGE * num_stages):
        stages.put(PeerId(f"peer-{number}"), number % num_stages, rng.choice([1.0, 2.0, 5.0]))
    costs = MoveCosts([30.0] * num_stages, horizon_s=600.0)
    while moves := plan(stages, costs):
        for move in moves:
            stages.move(move)
    for _ in range(num_lost):
        stages.remove(stages.movable(0)[-1][1])
    return median_us(lambda: plan(stages, costs), 100), len(plan(stages, costs))


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(words)
    routes: list[list[object]] = [["peers", "microseconds"]]
    routes += [[num_peers, f"{route_us(num_peers):.0f}"] for num_peers in NUM_PEERS]
    moves: list[list[object]] = [["stages", "lost", "moves", "microseconds"]]
    drawn: dict[str, list[float]] = {}
    for num_stages in NUM_STAGES:
        for num_lost in NUM_LOST:
            took_us, num_moves = move_us(num_stages, num_lost)
            moves.append([num_stages, num_lost, num_moves, f"{took_us:.0f}"])
            drawn[f"{num_stages} stages, {num_lost} lost, {num_moves} moves"] = [took_us]
    tables = [table("A microbatch's peer, by peers of the stage", routes)]
    tables.append(table(f"Who moves, by stages of {PER_STAGE:,} peers and how many one of them has lost", moves))
    write("decisions", "\n\n".join(tables))
    picture("decisions", f"Who moves, {PER_STAGE:,} peers a stage", "microseconds", drawn)


if __name__ == "__main__":
    main()
