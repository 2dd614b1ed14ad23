"""A training run in real processes, started by the tests beside it; writes its observations into a folder.

Every peer runs this script again, as with any script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # imports the tests' models in any working directory

from lightning_swarm import SwarmStrategy
from lightning_swarm.core.limits import Limits
from lightning_swarm.testing import FaultPlan, FaultySwarmStrategy, Phase, SharedGPU
from tests.parity.models import MODELS, Net, Recipe, loader
from tests.parity.trainers import numbered, places_of, watched

WIDTH = 512
ROWS = 64


class Wide(Net):
    """Has boundaries so wide that activations outweigh message headers; the trainer has a weight, too."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)),
            Recipe(optimizer="sgd", learning_rate=1e-4),
        )
        self.offset = nn.Parameter(torch.ones(1))

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) + self.offset).square().mean()


def make(name: str, num_workers: int = 0, *, endless: bool = False) -> tuple[Net, DataLoader[Any]]:
    """Return a model and its batches."""
    if name == "wide":
        rows = torch.randn(4 * ROWS, 16, generator=torch.Generator().manual_seed(5))
        return Wide(), DataLoader(TensorDataset(rows), batch_size=2 * ROWS)
    build, data = MODELS[name]
    # OneCycle raises after its last step, so the number of steps must be known.
    return build(Recipe(schedule="constant" if endless else "onecycle")), loader(data(), num_workers=num_workers)


class WatchedStrategy(SwarmStrategy):
    """Writes each peer's traffic to a file when the peer ends."""

    def __init__(self, out: Path, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.out = out

    @override
    def serve(
        self,
        trainer: L.Trainer,
        datamodule: L.LightningDataModule | None,
        call_arguments: Mapping[str, Any] | None = None,
    ) -> str | None:
        peer = self.peer
        assert peer is not None
        path = super().serve(trainer, datamodule, call_arguments)
        self.write_traffic(peer)
        return path

    @override
    def leave(self) -> None:
        if self.peer is not None and self.local_rank == 0:
            self.write_traffic(self.peer)
            torch.save(self.lightning_module.state_dict(), self.out / "weights.pt")  # type: ignore[union-attr]
        super().leave()

    def write_traffic(self, peer: Any) -> None:
        sent = [[to, method, n] for (to, method), n in peer.transport.traffic.sent_bytes.items()]
        content = {"peer_id": peer.transport.peer_id, "sent": sent}
        (self.out / f"traffic-{self.local_rank}.json").write_text(json.dumps(content))


class FaultyStrategy(WatchedStrategy, FaultySwarmStrategy):
    """The same strategy with a fault plan."""


class Notes(L.Callback):
    """Writes one of several trainers' log: its samples, their places, and the batches in the records."""

    def __init__(self, out: Path, module: Net) -> None:
        self.out = out
        self.batches: list[Any] = []
        self.steps: list[Any] = []
        watched(module, lambda *noted: self.batches.append(noted))

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SwarmStrategy)
        assert strategy.run is not None
        record = strategy.run.session.newest_record
        if record is not None and (not self.steps or places_of(record) != self.steps[-1]):
            self.steps.append(places_of(record))

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.write(trainer)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.write(trainer)

    def write(self, trainer: L.Trainer) -> None:
        content = {"batches": self.batches, "steps": self.steps}
        (self.out / f"notes-{trainer.global_rank}.json").write_text(json.dumps(content))


class Watch(L.Callback):
    """Records the losses, and holds the run for joiners and observers."""

    def __init__(self, out: Path, fail_at: int | None, joiner_at: int | None) -> None:
        self.out = out
        self.joiner_at = joiner_at
        self.fail_at = fail_at
        self.losses: list[float] = []
        self.went_back: list[int | None] = []  # the steps of rollbacks
        self.status: Any = None
        self.newcomers: list[Any] = []  # (step, peers) of each record with newcomers
        self.num_left = 0  # stages that a server gave up
        self.num_refused = 0  # requests of uninvited peers

    @override
    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.joiner_at is not None and len(self.losses) == self.joiner_at:
            wait_for_joiner(trainer)
        if self.joiner_at is not None and len(self.losses) == self.joiner_at + 4:
            print("waiting for an onlooker", flush=True)
            wait_until((self.out / "seen").exists, "nobody looked")

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (first := self._first_again(trainer)) is not None:
            del self.losses[first:]
        self.losses.append(float(outputs["loss"]))
        assert isinstance(trainer.strategy, SwarmStrategy)
        assert trainer.strategy.run is not None
        record = trainer.strategy.run.session.newest_record
        if record is not None and record.newcomers:
            self.newcomers.append([record.step, [one.member.peer_id for one in record.newcomers]])
        self.num_left += len(record.left) if record is not None else 0
        print(f"batch {len(self.losses)}\n", end="", flush=True)  # one write: two processes share the pipe
        if len(self.losses) == self.fail_at and trainer.is_global_zero:
            raise RuntimeError("the user's own mistake")

    def _first_again(self, trainer: L.Trainer) -> int | None:
        """Return the step to which the run has rolled back since the last batch."""
        assert isinstance(trainer.strategy, SwarmStrategy)
        assert trainer.strategy.peer is not None
        steps = [event.step for event in trainer.strategy.peer.events.newest if event.kind == "went_back"]
        if len(steps) == len(self.went_back):
            return None
        self.went_back = steps
        return steps[-1]

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, SwarmStrategy)
        assert strategy.peer is not None
        self.num_refused = strategy.peer.events.counts["refused"]
        self.status = [[peer.num_microbatches for peer in stage.peers] for stage in strategy.status().stages]


def wait_for_joiner(trainer: L.Trainer) -> None:
    """Hold the step open until a server has downloaded the state and waits for the record."""
    assert isinstance(trainer.strategy, SwarmStrategy)
    peer = trainer.strategy.peer
    assert peer is not None
    assert peer.server is not None
    coordinator = peer.server.admission.election.coordinator
    assert coordinator is not None
    print("waiting for a joiner", flush=True)
    wait_until(
        lambda: any(one.ready for one in list(coordinator.generation.server_membership._waiting.values())),
        "nobody came",
    )


def wait_until(happened: Callable[[], bool], otherwise: str) -> None:
    """Wait for another thread or process. The test ends its processes if it gives up."""
    deadline = time.monotonic() + 1800.0
    while not happened():
        assert time.monotonic() < deadline, otherwise
        threading.Event().wait(0.1)


def make_strategy(arguments: argparse.Namespace) -> WatchedStrategy:
    """Return the strategy that the arguments describe."""
    options: dict[str, Any] = {
        "num_stages": arguments.num_stages,
        "role": arguments.role,
        "microbatch_size": arguments.microbatch_size,
        "pipeline": "net",
        "target_batch_size": arguments.target_batch_size,
        "compression": arguments.compression,
        "trust": arguments.trust,
        "listen": arguments.listen,
        "rebalancing": arguments.rebalancing,
    }
    if arguments.split is not None:
        options["split"] = arguments.split
    if arguments.kill_at is None:
        return WatchedStrategy(arguments.out, **options)
    return FaultyStrategy(
        arguments.out,
        faults=FaultPlan().kill("peer-1", at=Phase.BACKWARD_DONE, step=arguments.kill_at),
        fired=arguments.out / "fired",
        limits=Limits(snapshot_interval=0.1),
        **options,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["digits", "gpt-losses", "wide"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--role", default="auto")
    parser.add_argument("--microbatch-size", type=int)
    parser.add_argument("--target-batch-size", type=int)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--clip", type=float)
    parser.add_argument("--precision", default="64-true")
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--joiner-at", type=int)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--split", nargs="*")
    parser.add_argument("--trust")
    parser.add_argument("--listen", default="127.0.0.1")
    parser.add_argument("--rebalancing", default="gain")
    parser.add_argument("--gpu", action="store_true", help="all peers are on one GPU")
    parser.add_argument("--kill-at", type=int, help="in which step peer-1 dies")
    parser.add_argument("--ckpt", type=Path, help="goes on from there")
    parser.add_argument("--save", action="store_true", help="what it ends with, as OUT/last.ckpt")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, data = make(arguments.model, arguments.num_workers, endless=arguments.max_steps == -1)
    watch = Watch(arguments.out, arguments.fail_at, arguments.joiner_at)
    callbacks: list[L.Callback] = [watch]
    if arguments.role == "both":
        assert isinstance(data.dataset, TensorDataset)
        data = loader(numbered(data.dataset), shuffle=True)
        callbacks.insert(0, Notes(arguments.out, model))
    trainer = L.Trainer(
        accelerator=SharedGPU() if arguments.gpu else "cpu",
        devices=arguments.devices,
        strategy=make_strategy(arguments),
        max_steps=arguments.max_steps,
        max_epochs=-1,
        precision=arguments.precision,
        gradient_clip_val=arguments.clip,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data, ckpt_path=arguments.ckpt)
    if arguments.save:
        trainer.save_checkpoint(arguments.out / "last.ckpt")
    result = {"pid": os.getpid(), "losses": watch.losses, "status": watch.status, "steps": trainer.global_step}
    result |= {"newcomers": watch.newcomers, "num_left": watch.num_left, "went_back": watch.went_back}
    result["num_refused"] = watch.num_refused
    (arguments.out / "result.json").write_text(json.dumps(result))
    torch.save(model.state_dict(), arguments.out / "weights.pt")


if __name__ == "__main__":
    main()
