"""A made-up run, the same each time: it grows, a server dies and comes back, another moves, the coordinator changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lightning_swarm.dashboard.overview import Overview
from lightning_swarm.dashboard.watch import Board
from lightning_swarm.monitor.model_report import ModelReport, ObservedServer
from lightning_swarm.monitor.swarm_report import ObservedNumber, ObservedPeer, SwarmReport

START_S = 1_796_000_000.0
ADDRESS = f"203.0.113.7:31337/12D3KooW{'A' * 44}"
KINDS = (
    "cpu AMD Ryzen 9 7950X, x86_64 AVX512, 16 threads, torch 2.8.0",
    "cuda NVIDIA GeForce RTX 3060, x86_64 AVX2, 8 threads, torch 2.8.0",
    "cpu Apple M2, arm64 NEON, 8 threads, torch 2.8.0",
)
STAGES = ((0,), (1,), (2,), (3,), (0,), (1,), (2,), (1,), (3,))
RATES = (14.2, 6.1, 21.7, 19.3, 12.5, 8.8, 4.9, 7.6, 8.4)
PROBLEM = "connection refused"


def name(number: int) -> str:
    """Return the id of a peer."""
    ends = ("Sow8nd", "kT2xPq", "u7RmVa", "Lz9eHs", "bQ4wFj", "xN6tYc", "Gd3pKm", "rV8hZu", "Jc5sWn")
    return f"12D3KooW{number:038d}{ends[number % len(ends)]}".replace("0", "x")


def peer(number: int, second: int = 0, **options: object) -> ObservedPeer:
    """Return one peer of the run."""
    wave = 1 + 0.08 * math.sin(second / 7 + number)
    made = ObservedPeer(
        peer_id=name(number),
        place=f"203.0.113.{7 + number}:31337",
        stages=STAGES[number % len(STAGES)],
        lead=number == 0,
        coordinator=number == 0,
        role="trainer" if number == 0 else "server",
        step=100,
        samples_per_s=RATES[number % len(RATES)] * wave,
        queued=int(3 + 3 * math.sin(second / 5 + 2 * number)),
        sent_gb_per_hour=1.9 * wave,
        received_gb_per_hour=1.8 * wave,
        peak_gb=3.2 + number % 4,
        arithmetic=KINDS[number % len(KINDS)],
        age_s=second + 400.0 * number,
    )
    return replace(made, **options)  # type: ignore[arg-type]


def logged(step: int) -> tuple[ObservedNumber, ...]:
    """Return the numbers that the lead has logged by a step; it validates after each fifth step."""

    def number(name: str, at: int, value: float) -> ObservedNumber:
        return ObservedNumber(name=name, value=value, step=at, age_s=(step - at) * 4.4)

    validated = step // 5 * 5
    return (
        number("train_loss", step, 4 * 0.995 ** (step - 1200) + 0.1 * math.sin(step * step)),
        number("val_loss", validated, 4.1 * 0.995 ** (validated - 1200)),
    )


def report(
    peers: list[ObservedPeer],
    step: int | None = 100,
    num_stages: int = 4,
    logged: tuple[ObservedNumber, ...] = (),
) -> SwarmReport:
    """Return a report of some peers."""
    stages = tuple(tuple(one.peer_id for one in peers if index in one.stages) for index in range(num_stages))
    return SwarmReport(
        run_id="tiny-gpt", step=step, steps_per_minute=0.0, stages=stages, peers=tuple(peers), logged=logged
    )


def reports(seconds: int) -> Iterator[SwarmReport]:
    """Yield a report for each second. The step stands still for 20 seconds after a server has died."""
    step = 1200.0
    for second in range(seconds):
        peers = [peer(one, second) for one in range(7 if second < 60 else 8 if second < 130 else 9)]
        if second >= 200:
            peers[7] = replace(peers[7], stages=(2,))
        if second >= 240:
            peers[0], peers[3] = replace(peers[0], coordinator=False), replace(peers[3], coordinator=True)
        if 300 <= second < 420:
            peers[6] = replace(peers[6], problem=PROBLEM, stages=(), samples_per_s=0.0, step=None, role=None)
        if 300 <= second < 320:
            peers = [replace(one, samples_per_s=one.samples_per_s / 8) for one in peers]
        else:
            step += len(peers) / 40
        yield report(peers, step=int(step), logged=logged(int(step)))


def overview(seconds: int = 400) -> Overview:
    """Return the run after some seconds."""
    board = Board(ADDRESS)
    for second, each in enumerate(reports(seconds)):
        found = board.add(each, START_S + second)
    return found


def model_report() -> ModelReport:
    """Return a report of a served model."""
    servers = tuple(
        ObservedServer(
            peer_id=name(number),
            place=f"203.0.113.{7 + number}:31337",
            stages=stages,
            weight_bytes=len(stages) * 900_000_000,
            free_text_bytes=1_200_000_000,
            num_texts=3,
            tokens_per_s=41.5 - 3 * number,
            stage_ms=7.4,
            has_files=number == 0,
            is_leaving=number == 2,
        )
        for number, stages in enumerate(((0, 1), (2,), (2, 3)))
    )
    return ModelReport(
        model="a1" * 32, kind="llama", weights="bfloat16", stage_bytes=(900_000_000,) * 4, servers=servers
    )
