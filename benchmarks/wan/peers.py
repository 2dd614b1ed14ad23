"""What else trains on the same hosts, by turns: pipelines of torch, DDP, and `hivemind.Optimizer`.

The peers compute by waiting, as the swarm's do, the same layers and the same microbatches. In a pipeline each has one
layer; for DDP and hivemind each has the whole model, and averages real gradients of its size. torch's go over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import hivemind
import torch
import torch.multiprocessing
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from benchmarks.hosts import DEVICE, Hosts
from benchmarks.runs import Stepped
from benchmarks.waiting import waited
from lightning_swarm.planner.simulator.microbatches import SyntheticBlock

WAYS: Final = ("gpipe", "1f1b", "ddp", "hivemind")
_MODULE = "benchmarks.wan.peers"
_PATIENCE_S: Final = 1200.0
"""Of peers for each other: all other ways have their turns meanwhile."""
_FLOAT_BYTES = 4


class Layer(nn.Module):
    """A layer that waits.

    Args:
        block: What it gives.
        seconds: Of a microbatch, forward and backward.
    """

    def __init__(self, block: SyntheticBlock, seconds: float) -> None:
        super().__init__()
        self.block = block
        self._seconds = seconds

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        """As the block's."""
        out: Tensor = waited(self.block(hidden), self._seconds)
        return out


class Peers:
    """This process's part in each of the ways.

    Args:
        arguments: Of this program.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.rank, self.size, self._num_microbatches = arguments.rank, arguments.size, arguments.num_microbatches
        width, size = arguments.boundary_bytes // _FLOAT_BYTES, arguments.layer_bytes // _FLOAT_BYTES
        gives = [width] * (self.size - 1) + [1]
        takes = [1, *gives[:-1]]
        self._layers = [Layer(SyntheticBlock(one, size), arguments.seconds) for one in gives]
        own = nn.Sequential(self._layers[self.rank])
        first = torch.ones(1, takes[self.rank], requires_grad=self.rank > 0)  # else no gradient comes back
        last = torch.ones(1, gives[self.rank], requires_grad=True)
        self._own = torch.optim.Adam(own.parameters(), lr=1e-4)
        self._schedules: dict[str, Any] = {
            name: schedule(
                PipelineStage(own, self.rank, self.size, torch.device("cpu"), input_args=(first,), output_args=(last,)),
                n_microbatches=self._num_microbatches,
                loss_fn=_loss,
            )
            for name, schedule in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B))
        }
        whole = nn.Sequential(*(Layer(SyntheticBlock(one, size), arguments.seconds) for one in gives))
        self._parallel = DistributedDataParallel(whole)
        self._whole = torch.optim.Adam(whole.parameters(), lr=1e-4)

    def pipeline(self, name: str) -> None:
        """A step by one of torch's schedules."""
        batch = torch.ones(self._num_microbatches, 1)
        self._own.zero_grad()
        is_last = self.rank == self.size - 1
        given = {"target": batch, "losses": []} if is_last else {}
        self._schedules[name].step(*([batch] if self.rank == 0 else []), **given)
        self._own.step()

    def ddp(self) -> None:
        """A step in which each peer has as many microbatches; with the last one gradients are averaged."""
        self._whole.zero_grad()
        share = self._num_microbatches // self.size
        with self._parallel.no_sync():
            for _ in range(share - 1):
                self._parallel(torch.ones(1, 1)).sum().backward()
        self._parallel(torch.ones(1, 1)).sum().backward()
        self._whole.step()

    def take(self, name: str) -> None:
        """A step by one of the ways."""
        if name == "ddp":
            self.ddp()
        else:
            self.pipeline(name)


class Collaboration:
    """This process's part in hivemind's way: whoever is faster brings more microbatches.

    Args:
        arguments: Of this program.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.multiprocessing.set_sharing_strategy("file_system")  # as an import of hivemind alone would have it
        self._rank = arguments.rank
        known = Path(arguments.folder) / "dht"
        while arguments.rank and not known.exists():
            time.sleep(0.1)
        addresses = known.read_text().split() if arguments.rank else []
        self._dht = hivemind.DHT(
            host_maddrs=[f"/ip4/{arguments.address}/tcp/0"], initial_peers=addresses, start=True, startup_timeout=60.0
        )
        if not arguments.rank:
            new = known.with_suffix(".new")
            new.write_text("\n".join(map(str, self._dht.get_visible_maddrs())))
            new.rename(known)
        width, size = arguments.boundary_bytes // _FLOAT_BYTES, arguments.layer_bytes // _FLOAT_BYTES
        gives = [width] * (arguments.size - 1) + [1]
        self._model = nn.Sequential(*(Layer(SyntheticBlock(one, size), arguments.seconds) for one in gives))
        self._optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id="wan",
            batch_size_per_step=1,
            target_batch_size=arguments.num_microbatches,
            optimizer=torch.optim.Adam(self._model.parameters(), lr=1e-4),
            use_local_updates=False,
            matchmaking_time=2.0,
            averaging_timeout=60.0,
        )

    def take(self) -> bool:
        """A step; whether all peers took it together, for then their weights agree."""
        epoch = self._optimizer.local_epoch
        while self._optimizer.local_epoch == epoch:
            self._model(torch.full((1, 1), 1.0 + self._rank)).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        weights = torch.stack([parameter.sum() for parameter in self._model.parameters()])
        everyone = [torch.empty_like(weights) for _ in range(distributed.get_world_size())]
        distributed.all_gather(everyone, weights.detach())
        return all(torch.equal(one, weights) for one in everyone)

    def close(self) -> None:
        """End it."""
        self._optimizer.shutdown()
        self._dht.shutdown()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@contextmanager
def training(
    hosts: Hosts, layers_s: Sequence[float], *, num_microbatches: int, boundary_bytes: int, layer_bytes: int
) -> Iterator[Stepped]:
    """A peer on each host but the first one, warm. Each step is told its way.

    Args:
        hosts: One more than peers.
        layers_s: For each peer, the seconds that it takes for a layer and a microbatch.
        num_microbatches: Of a step.
        boundary_bytes: From a layer to the next, for each microbatch.
        layer_bytes: Of its weights.
    """
    with TemporaryDirectory() as folder, ExitStack() as stack:
        for rank in reversed(range(len(layers_s))):  # the first one ends first, and tells the others
            options: Mapping[str, object] = {
                "rank": rank, "size": len(layers_s), "seconds": layers_s[rank], "num-microbatches": num_microbatches,
                "boundary-bytes": boundary_bytes, "layer-bytes": layer_bytes, "folder": folder,
                "address": hosts.address(rank + 1),
            }  # fmt: skip
            words = [word for name, value in options.items() for word in (f"--{name}", value)]
            environment = {"GLOO_SOCKET_IFNAME": DEVICE}
            peer = Stepped(_MODULE, *words, before=hosts.on(rank + 1), environment=environment)
            stack.enter_context(peer)
        peer.warm()
        yield peer


def _told(rank: int) -> str:
    """What the first peer reads goes to all. Nothing: it is over."""
    said = [sys.stdin.readline().strip() if rank == 0 else None]
    distributed.broadcast_object_list(said, src=0)
    return str(said[0] or "")


def _serve(rank: int, take: Callable[[str], bool]) -> None:
    say = {"first": 1.0}
    while True:
        if rank == 0:
            print(json.dumps(say), flush=True)
        way = _told(rank)
        if not way:
            return
        distributed.barrier()
        began_s = time.monotonic()
        together = take(way)
        distributed.barrier()  # a step is over when its slowest peer's is
        say = {"took_s": time.monotonic() - began_s if together else float("nan")}


def main(words: Sequence[str] | None = None) -> None:
    """Train, as a peer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--num-microbatches", type=int, required=True)
    parser.add_argument("--boundary-bytes", type=int, required=True)
    parser.add_argument("--layer-bytes", type=int, required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--address", required=True)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    collaboration = Collaboration(arguments)  # before gloo: it forks
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{arguments.folder}/gloo",
        rank=arguments.rank,
        world_size=arguments.size,
        timeout=timedelta(seconds=_PATIENCE_S),
    )
    peers = Peers(arguments)

    def take(way: str) -> bool:
        if way == "hivemind":
            return collaboration.take()
        peers.take(way)
        return True

    _serve(arguments.rank, take)
    collaboration.close()
    os._exit(0)  # what hivemind leaves behind would wait for itself


if __name__ == "__main__":
    main()
