"""One of several trainers, each in its own process, which may be killed; so each log line is written at once."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm import SwarmStrategy
from lightning_swarm.coordinator.coordinator import Coordinator
from lightning_swarm.coordinator.takeover import choose_standby_lead, has_majority, seniority
from lightning_swarm.core import process
from lightning_swarm.core.limits import Limits
from lightning_swarm.protocol.messages.batches import RecordReply
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.protocol.queries import ask_held
from tests.p2p.warm import wait_until
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, Recipe, digits
from tests.parity.trainers import Curve, places_of, shuffled, watched

NUM_EPOCHS = 3  # the last lead's, of which it begins in the first
BATCHES = 12  # per epoch
BATCHES_OF_A_STEP = 2
_BATCH_SIZE = 4


class Validated(DigitsMLP):
    """Has its own data loader, as every trainer of a run does."""

    num_batches, batches_of_a_step = BATCHES, BATCHES_OF_A_STEP

    def __init__(self) -> None:
        super().__init__(Recipe(schedule="constant"))

    def train_dataloader(self) -> DataLoader[Any]:
        data = digits()
        rows = torch.arange(self.num_batches * _BATCH_SIZE) % len(data)
        return shuffled(TensorDataset(*(part[rows] for part in data.tensors)))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(digits(), 26)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch[:2], batch_idx)  # the plain Trainer's batch also has the samples' numbers

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", DigitsMLP.training_step(self, batch, batch_idx))


class Long(Validated):
    """Has twenty steps per epoch, in each of which five trainers have a batch."""

    num_batches, batches_of_a_step = 100, 5


class Losses(L.Callback):
    """Collects the validation losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


class Notes:
    """A log file whose lines survive its process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, kind: str, *values: Any) -> None:
        """Append a line; safe from any thread."""
        os.write(self._file, f"{json.dumps([kind, *values])}\n".encode())


class NotedStrategy(SwarmStrategy):
    """Logs each generation of the run, and its records."""

    def __init__(self, notes: Notes, **options: Any) -> None:
        super().__init__(**options)
        self._notes = notes

    @property
    def generation(self) -> int:
        """Return the run's generation."""
        assert self.run is not None
        return self.run.session.run.manifest.generation

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        assert self.run is not None
        generation, steps = self.generation, self.run.session._steps
        learn = steps._apply_record

        async def noted(record: Record, reply: RecordReply) -> None:
            await learn(record, reply)
            self._notes.write("record", generation, places_of(record))

        steps._apply_record = noted  # type: ignore[method-assign]
        assert self.peer is not None
        self._notes.write("begun", generation, self.run.session.run.manifest.first_step, self.peer.address)

    def has_standby(self) -> bool:
        """Return whether another trainer could take the run over now, if this process died."""
        assert self.peer is not None
        assert self.run is not None
        run, own = self.run.session.run, self.peer.transport.peer_id
        held = self.peer.runtime.run(ask_held(self.peer.transport, run.servers, timeout=10.0))
        held.pop(own, None)
        return choose_standby_lead(held, seniority(run), len(run.rosters)) is not None and has_majority(run, list(held))


class Watch(Losses):
    """Logs validations. The first lead waits for the other trainers, then to be killed; the next lead ends.

    Args:
        notes: Log of this trainer.
        others: Number of trainers that it waits for; 0: this is not the first lead.
        waits: Wait from the first batch on. Without a cut trainers join by a record, so it must not.
    """

    def __init__(self, notes: Notes, others: int, *, waits: bool) -> None:
        super().__init__()
        self._notes = notes
        self._others = others
        self._waits = waits

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        strategy = trainer.strategy
        if not self._others or not self._waits or batch_idx or trainer.current_epoch:
            return
        assert isinstance(strategy, NotedStrategy)
        assert strategy.peer is not None
        assert strategy.peer.server is not None
        runtime = strategy.peer.runtime
        coordinator = strategy.peer.server.admission.election.coordinator
        assert coordinator is not None
        enrolment = coordinator.generation.trainers.membership

        async def all_there() -> bool:  # must run on the loop, whose clock it reads
            return len(enrolment.waiting) == self._others

        wait_until(lambda: runtime.run(all_there()), "not all have come")

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._notes.write("validated", trainer.current_epoch, self.losses[-1])
        trainer.should_stop = not self._others and len(self.losses) == NUM_EPOCHS

    def hold(self, trainer: L.Trainer) -> None:
        """Stay in a batch once a standby could lead and the run is in the middle of an epoch."""
        strategy = trainer.strategy
        assert isinstance(strategy, NotedStrategy)
        assert strategy.run is not None
        run = strategy.run.session.run
        position = run.position
        if not self._others or position is None or position[0] == 0 or not 0 < position[1] < BATCHES:
            return
        if len(run.trainers) == 1 + self._others and strategy.has_standby():
            self._notes.write("held", *position)
            threading.Event().wait()


class Gate:
    """Holds each trainer in its batch until the batch's step is released.

    The test releases steps. So does the coordinator's trainer while a peer is about to join or leave, and so does the
    lead while no standby could take over: both need a record. Otherwise the lead logs the step that it is held in.
    """

    def __init__(self, folder: Path, notes: Notes, strategy: NotedStrategy) -> None:
        self._folder = folder
        self._notes = notes
        self._strategy = strategy
        self._noted: tuple[int, int] | None = None

    def hold(self, step: int) -> None:
        """Wait within a batch until its step is released."""
        wait_until(lambda: self._is_open(step), f"step {step} was not let go")

    def _is_open(self, step: int) -> bool:
        peer = self._strategy.peer
        assert peer is not None
        assert peer.server is not None
        coordinator = peer.server.admission.election.coordinator
        if coordinator is not None and peer.runtime.run(_changes_members(coordinator)):
            let_go(self._folder, step)
        if self._strategy.is_global_zero and not self._note(step):
            let_go(self._folder, step)  # the next record orders a snapshot, with which a standby could lead
        # A batch that a rollback drops is held no longer. The lead drops its own before it comes here again.
        drops = peer.follower.follows and peer.follower.is_rolling_back
        return drops or _gate(self._folder, step).exists()

    def _note(self, step: int) -> bool:
        """Log that this lead is held, once a standby exists; return whether one exists or soon will."""
        generation = self._strategy.generation
        if self._noted == (generation, step):
            return True
        assert self._strategy.peer is not None
        sending = self._strategy.peer._sending_loop
        is_sent = sending is None or sending.done()
        if not self._strategy.has_standby():
            return not is_sent
        assert self._strategy.run is not None
        run = self._strategy.run.session.run
        self._noted = generation, step
        self._notes.write("held", generation, step, sorted(run.trainers), run.servers)
        return True


async def _changes_members(coordinator: Coordinator) -> bool:
    """Return whether the next record is to admit or exclude a peer; runs on the loop."""
    generation = coordinator.generation
    servers = generation.server_membership
    return (
        bool(servers.leaving) or servers.has_ready_joiner() or any(generation.trainers.membership.next_record_changes())
    )


def _gate(folder: Path, step: int) -> Path:
    """Return the file that releases a step."""
    return folder / f"step-{step}"


def let_go(folder: Path, *steps: int) -> None:
    for step in steps:
        _gate(folder, step).touch()


def train(
    *,
    folder: str,
    number: int,
    others: int,
    initial_peers: list[str],
    limits: Mapping[str, Any],
    cut: bool = True,
    gated: bool = False,
    listen: str = "",
    log: str = "",
) -> None:
    """Train as a user's script in a run would.

    Args:
        folder: For the log, and for the last lead's weights.
        number: Number of this trainer.
        others: As in `Watch`.
        initial_peers: Peers to join; empty: it begins the run.
        limits: As in `Limits`.
        cut: False: each trainer computes the whole model.
        gated: Use the model `Long`, end the run after its epochs, and hold each step by a `Gate`.
        listen: Address on its host; empty: only peers of this machine can connect.
        log: Lowest level of messages that it prints, as in `SWARM_LOG`.
    """
    if log:
        os.environ[process.LOG] = log
        process.follow_environment()
    notes, make = Notes(Path(folder) / f"trainer-{number}"), Long if gated else Validated
    strategy = NotedStrategy(
        notes,
        role="both",
        num_stages=2 if cut and not initial_peers else None,
        pipeline="net" if cut else None,
        microbatch_size=2 if cut else None,
        target_batch_size=make.batches_of_a_step * _BATCH_SIZE,
        initial_peers=initial_peers,
        limits=Limits(**limits),
        **({"listen": listen, "trust": "open"} if listen else {}),
    )
    L.seed_everything(0)
    module, watch, gate = make(), Watch(notes, others, waits=cut), Gate(Path(folder), notes, strategy)
    max_epochs = NUM_EPOCHS if gated else -1
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=max_epochs, callbacks=[watch], **QUIET)

    def note(place: tuple[int, int], at: tuple[int, int], ids: list[int], loss: float) -> None:
        generation = strategy.generation  # the run may roll back while the batch is held
        if gated:
            gate.hold(place[0])
        watch.hold(trainer)  # a batch that it never finishes is not logged
        notes.write("batch", generation, place, ids, loss)

    watched(module, note)
    trainer.fit(module)
    notes.write("led", trainer.global_step)
    torch.save(module.state_dict(), Path(folder) / "weights.pt")


@dataclass
class Several(Curve):
    """The trainers' logs, without entries that a rollback voided."""

    generations: dict[int, int] = field(default_factory=dict)  # generation -> its first step
    validated: dict[int, tuple[int, float]] = field(default_factory=dict)  # epoch -> (trainer, loss)

    @classmethod
    def read(cls, folder: Path) -> Several:
        """Read the logs of a run that is over."""
        found = cls(weights=torch.load(folder / "weights.pt"))
        lines = [(number, one) for number in range(len(list(folder.glob("trainer-*")))) for one in said(folder, number)]
        found.generations = {one[1]: one[2] for _, one in lines if one[0] == "begun"}
        ends = {generation: found.generations.get(generation + 1) for generation in found.generations}
        records: dict[int, list[tuple[int, int]]] = {}
        for number, (kind, first, *rest) in lines:
            if kind == "validated":
                found.validated[first] = number, rest[0]
            places = [rest[0]] if kind == "batch" else rest[0] if kind == "record" else []
            end = ends.get(first)
            for step, place in places:
                if end is not None and step >= end:
                    continue
                if kind == "batch":
                    found.batches[step, place] = number, rest[1]
                    found.losses[step, place] = rest[2]
                else:
                    records[step] = [(a, b) for a, b in places]
        found.steps = [records[step] for step in sorted(records)]
        return found


def said(folder: Path, number: int) -> list[Any]:
    """Return the lines of a trainer's log."""
    path = folder / f"trainer-{number}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
