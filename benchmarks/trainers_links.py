"""Two trainers without a cut, on two hosts with a slow link between them: samples/s of both together, against DDP.

Hosts are network namespaces of this machine, a core each. A step is sixteen batches. The swarm averages gradients in
float32, as DDP does over gloo, and with 8 bits. Needs Linux, root, iproute2 and two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.hosts import DEVICE, Hosts
from benchmarks.report import table, write
from benchmarks.runs import start
from benchmarks.trainers import BATCH_SIZE, MANY, NUM_TRAINERS, WIDTH_IN, Net
from lightning_swarm import Limits, SwarmStrategy

NUM_WARM = 2  # steps that do not count
NUM_SAMPLES = MANY * BATCH_SIZE
SIZES = {"1M": (700, 2), "30M": (2700, 4)}
TIMEOUT_S = 300.0


class Clock(L.Callback):
    """Ends the run some steps after both trainers are there, and says how many samples/s these were."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._seen = 0  # steps
        self._at_s: list[float] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        strategy = trainer.strategy
        if not isinstance(strategy, SwarmStrategy) or len(strategy.status().trainers) == NUM_TRAINERS:
            self._at_s.append(time.monotonic())
        is_over = len(self._at_s) > NUM_WARM + self._num_steps
        trainer.should_stop = strategy.reduce_boolean_decision(is_over, all=False)
        if trainer.should_stop and trainer.is_global_zero:
            took_s = self._at_s[-1] - self._at_s[NUM_WARM]
            rate = NUM_SAMPLES * (len(self._at_s) - 1 - NUM_WARM) / took_s
            print(json.dumps({"rate": rate}), flush=True)


def fit(arguments: argparse.Namespace) -> None:
    """Train on one of the hosts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    is_ddp = arguments.way == "ddp"
    swarm = SwarmStrategy(
        num_stages=1,
        role="both",
        target_batch_size=NUM_SAMPLES,
        listen=arguments.listen,
        trust="open",
        initial_peers=arguments.initial_peers,
        compression="none" if is_ddp else arguments.way,
        limits=Limits(snapshot_interval=None),  # many of them in the little time that this takes
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=NUM_TRAINERS if is_ddp else 1,
        strategy="ddp" if is_ddp else swarm,
        accumulate_grad_batches=MANY // NUM_TRAINERS if is_ddp else 1,
        max_epochs=-1,
        callbacks=[Clock(arguments.steps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(64 * NUM_SAMPLES, WIDTH_IN)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    trainer.fit(Net(*SIZES[arguments.size]), DataLoader(data, BATCH_SIZE))


def measure(hosts: Hosts, way: str, size: str, steps: int) -> float:
    """Samples/s of both hosts."""
    common = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": DEVICE}

    def begin(number: int, *options: object) -> subprocess.Popen[str]:
        environment: Mapping[str, str] = {**common, "NODE_RANK": str(number)} if way == "ddp" else {}
        own = ("--way", way, "--size", size, "--steps", steps, "--listen", hosts.address(number))
        return start(
            *("-m", "benchmarks.trainers_links", *own, *options),
            before=hosts.on(number, core=number),
            environment=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    begun_s = time.monotonic()
    running = [begin(0)]
    said: list[str] = []
    try:
        if way == "ddp":
            running.append(begin(1))
        assert running[0].stdout is not None
        for line in running[0].stdout:
            said.append(line)
            found = re.search(rf"{re.escape(hosts.address(0))}:\d+/\w+", line)
            if found and len(running) < NUM_TRAINERS:
                running.append(begin(1, "--initial-peers", found[0]))
            if line.startswith('{"rate"'):
                return float(json.loads(line)["rate"])
            if time.monotonic() > begun_s + TIMEOUT_S:
                break
    finally:
        for process in running:
            process.kill()
            process.wait()
    raise RuntimeError(f"{way}: the first trainer said no rate:\n{''.join(said[-40:])}")


def main(words: Sequence[str] | None = None) -> None:
    """Measure each way, and print the table; or, of a process that this module starts, train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbits", type=float, nargs="+", default=[100.0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--way", choices=["none", "8bit", "ddp"], help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    parser.add_argument("--listen", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--initial-peers", nargs="*", default=(), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.way:
        fit(arguments)
        return
    if Hosts.missing() or len(os.sched_getaffinity(0)) < 2:
        parser.error(f"it needs Linux, root, two cores and iproute2; not found: {Hosts.missing() or 'two cores'}")
    rows: list[list[object]] = [["parameters", "link, Mb/s", "DDP", "swarm / DDP", "with 8 bits / DDP"]]
    for mbit in arguments.mbits:
        for size in arguments.sizes:
            with Hosts([mbit] * NUM_TRAINERS) as hosts:
                rates = {way: measure(hosts, way, size, arguments.steps) for way in ("ddp", "none", "8bit")}
            ratios = [f"{rates[way] / rates['ddp']:.2f}" for way in ("none", "8bit")]
            rows.append([size, f"{mbit:g}", f"{rates['ddp']:.0f}/s", *ratios])
    write("trainers_links", table("Two trainers without a cut, on two hosts: samples/s", rows))


if __name__ == "__main__":
    main()
