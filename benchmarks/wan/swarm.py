"""A swarm's training by turns, whose stages compute by waiting: what the hosts of these benchmarks run."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import torch
from typing_extensions import override

from benchmarks.hosts import Hosts, serving
from benchmarks.runs import Stepped
from benchmarks.train import Turns
from benchmarks.waiting import PACES, Waiting
from benchmarks.wan.relay import Switch, install
from lightning_swarm import SwarmStrategy
from lightning_swarm.planner.simulator.microbatches import Simulated, batches

_MODULE = "benchmarks.wan.swarm"


@dataclass(frozen=True, kw_only=True)
class Swarm:
    """What trains.

    Args:
        stages: For each peer of each stage, the seconds that it takes for a microbatch.
        num_microbatches: Of a step.
        boundary_bytes: From a stage to the next, for each microbatch.
        stage_bytes: Of its weights.
        window: Batches of a step, each of so many microbatches.
        delays: Each step's record comes while the next one computes.
    """

    stages: Sequence[Sequence[float]]
    num_microbatches: int
    boundary_bytes: int
    stage_bytes: int = 1 << 10
    window: int = 1
    delays: bool = False

    @property
    def num_peers(self) -> int:
        """In all stages."""
        return sum(map(len, self.stages))


@contextmanager
def training(hosts: Hosts, swarm: Swarm) -> Iterator[Stepped]:
    """A trainer on the first host, and a server on each other one. It is warm; `relay` is what a step may be told."""
    options = (
        "--num-stages", len(swarm.stages), "--num-microbatches", swarm.num_microbatches,
        "--boundary-bytes", swarm.boundary_bytes, "--stage-bytes", swarm.stage_bytes, "--window", swarm.window,
        *(["--delays"] if swarm.delays else []),
    )  # fmt: skip
    with TemporaryDirectory() as paces, ExitStack() as stack:
        for stage, peers in enumerate(swarm.stages):
            for number, seconds in enumerate(peers):
                (Path(paces) / f"{stage}-{1 / seconds:09.4f}-{number}").touch()
        addresses = [
            stack.enter_context(serving(hosts, number, _MODULE, *options, environment={PACES: paces}))
            for number in range(1, swarm.num_peers + 1)
        ]
        own = ("--listen", hosts.address(0), "--initial-peers", *addresses)
        with Stepped(_MODULE, *options, *own, before=hosts.on(0)) as trainer:
            trainer.warm()
            yield trainer


class Ways(Turns):
    """Steps by the way that each is told.

    Args:
        relays: What turns passages.
    """

    def __init__(self, relays: Switch) -> None:
        super().__init__()
        self._relays = relays

    @override
    def obey(self, how: str) -> None:
        self._relays.on = how == "relay"


def main(words: Sequence[str] | None = None) -> None:
    """Train; servers run this, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-stages", type=int, required=True)
    parser.add_argument("--num-microbatches", type=int, required=True)
    parser.add_argument("--boundary-bytes", type=int, required=True)
    parser.add_argument("--stage-bytes", type=int, required=True)
    parser.add_argument("--window", type=int, default=1)
    parser.add_argument("--delays", action="store_true")
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--initial-peers", nargs="*", default=())
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=SwarmStrategy(
            num_stages=arguments.num_stages,
            microbatch_size=1,
            rebalancing="none",
            delay_optimizer_step=arguments.delays,
            role="trainer",
            listen=arguments.listen,
            trust="open",  # its hosts are in a network of their own
            initial_peers=arguments.initial_peers,
        ),
        max_epochs=-1,
        accumulate_grad_batches=arguments.window,
        callbacks=[Ways(install())],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Simulated(arguments.num_stages, arguments.boundary_bytes, arguments.stage_bytes, Waiting)
    trainer.fit(model, batches(arguments.num_microbatches))


if __name__ == "__main__":
    main()
