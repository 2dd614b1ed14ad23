"""What `delay_optimizer_step` does to the loss: the small GPT on bytes of `benchmarks.compression`, at several rates.

Each is trained on the same batches from the same weights, with steps that wait and with late ones. Its learning rate
rises for a tenth of the steps, and falls to a tenth along a cosine; Adam's betas are 0.9 and 0.95, gradients clipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from benchmarks.compression import WAYS, Rate, train
from benchmarks.report import OUT, picture, table, write
from benchmarks.together import mapped

RATES: Final = (3e-4, 5e-4, 1e-3)
NAMES: Final = ("none", "delay_optimizer_step")

Found: TypeAlias = dict[str, float]
"""Losses at the end, by rate, seed and name."""


def _key(rate: float, seed: int, name: str) -> str:
    return f"{rate:g} {seed} {name}"


def _trained(job: tuple[float, int, str, int]) -> tuple[float, int, str, float]:
    rate, seed, name, num_steps = job
    return rate, seed, name, train(WAYS[name], seed, num_steps, Rate(rate, num_steps // 10), every=num_steps)[-1]


def study(jobs: Sequence[tuple[float, int, str, int]], num_processes: int) -> Found:
    """Train them all; what was found is also written down after each."""
    found: Found = {}
    OUT.mkdir(parents=True, exist_ok=True)
    for rate, seed, name, loss in mapped(_trained, jobs, num_processes):
        found[_key(rate, seed, name)] = loss
        (OUT / "late.json").write_text(json.dumps(found))
        print(f"{rate:g}, seed {seed}, {name}: {loss:.4f}", flush=True)
    return found


def show(found: Mapping[str, float], rates: Sequence[float], seeds: Sequence[int], num_steps: int) -> None:
    """A table."""
    rows: list[Sequence[object]] = [["highest learning rate", "loss", "with late steps", "against it", "seeds"]]
    drawn: dict[str, list[float]] = {}
    for rate in rates:
        waits, lates = ([found[_key(rate, seed, name)] for seed in seeds] for name in NAMES)
        shares = [100 * (late / wait - 1) for wait, late in zip(waits, lates, strict=True)]
        drawn |= {f"steps that wait, {rate:g}": waits, f"late steps, {rate:g}": lates}
        rows.append(
            [
                f"{rate:g}",
                f"{statistics.mean(waits):.4f}",
                f"{statistics.mean(lates):.4f}",
                f"{statistics.mean(shares):+.1f} %",
                f"{min(shares):+.1f} to {max(shares):+.1f}",
            ]
        )
    title = f"Loss on unseen files after {num_steps} steps, by highest learning rate"
    write("late", table(f"{title}, in nats a byte", rows))
    picture("late", title, "nats a byte", drawn)


def main(words: Sequence[str] | None = None) -> None:
    """Train, and show what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rates", type=float, nargs="*", default=list(RATES), help="each one's highest")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(words)
    jobs = [(rate, seed, name, options.steps) for rate in options.rates for seed in options.seeds for name in NAMES]
    show(study(jobs, options.processes), options.rates, options.seeds, options.steps)


if __name__ == "__main__":
    main()
