"""Several trainers of one run, each with Lightning's own `fit` in a thread; one loop runs servers and network.

The assignment of batches to steps is not deterministic, as in a real swarm. So the reference is a plain loop over the
batches in each record; the trainers log the contents of their batches.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops import evaluation_loop, fit_loop
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from typing_extensions import override

from lightning_swarm.coordinator.coordinator import Coordinator
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.event_loop import Runtime, ThreadRuntime
from lightning_swarm.core.limits import Limits
from lightning_swarm.model.partition import find_blocks
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.batches import RecordReply
from lightning_swarm.protocol.messages.run import Manifest, Member
from lightning_swarm.protocol.messages.step import Record
from lightning_swarm.server.executor import InlineExecutor
from lightning_swarm.server.stage_builder import ComputeSettings, PeerModel
from lightning_swarm.strategy.launcher import TrainerCall
from lightning_swarm.strategy.strategy import SwarmStrategy
from lightning_swarm.testing.local import _InlineLauncher
from tests.held import batches_of
from tests.parity.harness import QUIET
from tests.parity.models import DigitsMLP, NanoGPT, Net, digits, make_optimizer, make_schedule

SOMEBODY = "127.0.0.1:31337/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
LIMITS = Limits(call_timeout=30.0, start_timeout=30.0, lead_timeout=30.0)
Place = tuple[int, int]
"""A batch's step, and the position of its first sample there."""
Number = tuple[int, int]
"""A batch's epoch and index in its trainer's count. A batch that was not counted may run again at another place."""


@dataclass
class Curve:
    """Log of a run's batches, steps and weights."""

    batches: dict[Place, tuple[int, list[int]]] = field(default_factory=dict)  # (rank, sample numbers) by place
    numbers: dict[Place, Number] = field(default_factory=dict)
    losses: dict[Place, float] = field(default_factory=dict)
    withdrawn: set[Place] = field(default_factory=set)
    steps: list[list[Place]] = field(default_factory=list)  # the batches of each record
    weights: dict[str, Tensor] = field(default_factory=dict)  # at the run's end


@dataclass
class Seen(Curve):
    """Log of a run with trainers in threads."""

    records: list[Record] = field(default_factory=list)
    rosters: list[list[list[Member]]] = field(default_factory=list)  # after each record
    trainers_of_the_run: list[PeerId] = field(default_factory=list)  # according to the newest record's lead
    trainers: dict[int, L.Trainer] = field(default_factory=dict)
    modules: dict[int, Net | NanoGPT] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    validated: list[int] = field(default_factory=list)  # ranks that validated
    peers: list[Peer] = field(default_factory=list)  # the trainers' peers
    servers: list[Peer] = field(default_factory=list)  # peers without a trainer
    killed: list[PeerId] = field(default_factory=list)
    went_back: list[int] = field(default_factory=list)  # the steps of rollbacks
    generation: int = 0  # the run's; entries of older generations from the rollback step on are deleted
    runtime: ThreadRuntime = field(default_factory=ThreadRuntime)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)

    def note(self, rank: int) -> Note:
        """Return the function that a trainer calls with each batch."""

        def note(place: Place, number: Number, ids: list[int], loss: float) -> None:
            strategy = self.trainers[rank].strategy
            assert isinstance(strategy, ThreadStrategy)
            if strategy.generation < self.generation:
                return
            self.batches[place] = rank, ids
            self.numbers[place] = number
            self.losses[place] = loss

        return note

    def kill(self, *peers: str) -> None:
        """Kill peers, called on a trainer's thread; their network stops as under `kill -9`."""

        async def kill() -> None:
            for peer in map(PeerId, peers):
                self.network.kill(peer)
                self.killed.append(peer)

        self.runtime.run(kill())

    def go_back(self, step: int, generation: int) -> None:
        """Delete all entries from a step on."""
        self.went_back.append(step)
        self.generation = generation
        self.records = [record for record in self.records if record.step < step]
        self.rosters = self.rosters[: len(self.records)]
        self.steps = self.steps[: len(self.records)]
        for seen in (self.batches, self.numbers, self.losses):
            for place in [place for place in seen if place[0] >= step]:
                del seen[place]

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """On a trainer's thread, let the other trainers run until a condition holds."""

        async def wait() -> None:
            async with asyncio.timeout(120.0):
                while not reached():  # noqa: ASYNC110 - whatever it looks at tells nobody
                    await asyncio.sleep(0.001)  # leaves the processor to the other threads

        self.runtime.run(wait())

    def pause(self, seconds: float) -> None:
        """On a trainer's thread, let the other trainers run for a time."""
        self.runtime.run(asyncio.sleep(seconds))


def places_of(record: Record) -> list[Place]:
    """Return the batches that a record counts."""
    return [(record.step, first) for first in batches_of(record)]


def place_of(module: L.LightningModule) -> Place:
    """Return the place where the current batch counts."""
    strategy = module.trainer.strategy
    assert isinstance(strategy, SwarmStrategy)
    assert strategy.run is not None
    assert strategy.run.session.pipeline.batch is not None
    grant = strategy.run.session.pipeline.batch.grant
    return grant.step, grant.first


def coordinator_of(peers: Iterable[Peer]) -> Coordinator | None:
    """Return the newest coordinator of a run; on a busy machine another server may have taken over from the lead's."""
    roles = [peer.server.admission.election.coordinator for peer in list(peers) if peer.server is not None]
    found = [role for role in roles if role is not None]
    runs = [role.generation.context.run for role in found]
    terms = [(run.manifest.generation, run.term) for run in runs]
    return found[terms.index(max(terms))] if found else None


Note = Callable[[Place, Number, list[int], float], None]


def watched(module: Net | NanoGPT, note: Note) -> None:
    """Make the module log each batch of a numbered dataset: its samples, its place, and its loss."""
    step = module.training_step

    def training_step(batch: list[Tensor], batch_idx: int) -> Any:
        loss = step(batch[:-1], batch_idx)
        number = module.trainer.current_epoch, batch_idx
        note(place_of(module), number, batch[-1].tolist(), 0.0 if loss is None else loss.item())
        return loss

    module.training_step = training_step  # type: ignore[method-assign]


def numbered(data: TensorDataset) -> TensorDataset:
    """Add each sample's number to the dataset."""
    return TensorDataset(*data.tensors, torch.arange(len(data)))


def shuffled(data: TensorDataset, *, num_workers: int = 0) -> DataLoader[Any]:
    """Return a shuffled loader with a generator of its own: trainers in threads share the process's generators."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(numbered(data), batch_size=4, shuffle=True, generator=generator, num_workers=num_workers)


def parted(loader: DataLoader[Any], num_trainers: int, rank: int) -> DataLoader[Any]:
    """Return the part of the data that the process of that rank reads in `ddp`."""
    sampler: DistributedSampler[Any] = DistributedSampler(loader.dataset, num_trainers, rank)
    return DataLoader(loader.dataset, loader.batch_size, sampler=sampler)


class Shared(Runtime):
    """One loop that several peers share."""

    def __init__(self, runtime: ThreadRuntime) -> None:
        self._runtime = runtime

    @override
    def run(self, work: Any) -> Any:
        return self._runtime.run(work)

    @override
    def post(self, callback: Callable[[], None]) -> None:
        self._runtime.post(callback)

    @override
    def close(self) -> None:
        """Keep the loop running for the other peers."""


class ThreadStrategy(SwarmStrategy):
    """`SwarmStrategy` of one of several trainers in this process."""

    def __init__(self, rank: int, network: MemoryNetwork, seen: Seen, *, comes: bool = False, **kwargs: Any) -> None:
        if comes:
            kwargs["initial_peers"] = SOMEBODY
        super().__init__(**{"role": "both", **kwargs})
        self.comes = comes
        self.manifests: list[Manifest] = []  # one per run that it took part in
        self._rank = rank
        self._network = network
        self._seen = seen
        prepare = self.rollback.prepare

        def noting(trainer: L.Trainer, error: SwarmError) -> str | None:
            path = prepare(trainer, error)
            if path is not None and self.is_global_zero:
                self._note_rollback()
            return path

        self.rollback.prepare = noting  # type: ignore[method-assign]

    @property
    @override
    def local_rank(self) -> int:
        return 0 if self.comes else self._rank

    @property
    def generation(self) -> int:
        """Return the generation of the run that the current batch belongs to."""
        assert self.run is not None
        assert self.run.session.pipeline.batch is not None
        return self.run.session.pipeline.batch.grant.generation

    @override
    def serve(self, trainer: L.Trainer, datamodule: Any, call_arguments: Any = None) -> str | None:
        path = super().serve(trainer, datamodule, call_arguments)
        if path is not None:
            self._note_rollback()
        return path

    def _note_rollback(self) -> None:
        step = self.rollback.first_step
        assert step is not None
        assert self.peer is not None
        former = self.peer.lead._former
        assert former is not None
        self._seen.go_back(step, former.generation + 1)

    @override
    def _configure_launcher(self) -> None:
        self._launcher = _ThreadLauncher(self)

    def make_peer(self) -> None:
        self.peer = self._peer(f"peer-{self._rank}")
        self.peer.lead.num_known_dead = lambda: len(self._seen.killed)
        self._seen.peers.append(self.peer)

    def _peer(self, name: str) -> Peer:
        transport = self._network.transport(name)
        return Peer(
            Shared(self._seen.runtime),
            transport,
            self._network.directory(transport),
            executor=InlineExecutor,
            config=self.config,
            rng=random.Random(f"{name} {len(self._seen.peers)}"),
        )

    def add_server(self) -> None:
        """Start another server that waits for the run and does not train."""
        peer = self._peer("server")
        self._seen.servers.append(peer)
        module = DigitsMLP().double()
        blocks = find_blocks(module, None)
        model = PeerModel(
            module,
            blocks,
            lambda _: make_optimizer(module, module.recipe),
            ComputeSettings(torch.device("cpu")),
        )
        peer.serve(model)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        assert self.run is not None
        steps = self.run.session._steps
        self.manifests.append(self.run.session.run.manifest)
        learn = steps._apply_record

        async def noted(record: Record, reply: RecordReply) -> None:
            await learn(record, reply)
            if self.is_global_zero:
                self._seen.records.append(record)
                self._seen.rosters.append(steps.run.rosters)
                self._seen.trainers_of_the_run = steps.run.trainers
                self._seen.steps.append(places_of(record))

        steps._apply_record = noted  # type: ignore[method-assign]


class _ThreadLauncher(_InlineLauncher):
    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        call = TrainerCall(self._strategy, trainer, function, args, kwargs)
        if self._strategy.config.only_serves:
            self._strategy.make_peer()
            path = self._strategy.serve(trainer, None, call.arguments)
            return None if path is None else call.run_as_lead(path)
        self._strategy.check(trainer, call.arguments)
        self._strategy.make_peer()
        if self._strategy.comes:
            assert self._strategy.join_running(trainer)
        if not self._strategy.is_global_zero:
            self._strategy.follow(trainer)
        return call.run()


def train(
    num_trainers: int,
    make_module: Callable[[Seen], Any] = lambda seen: DigitsMLP(),
    *,
    data: Callable[[], DataLoader[Any]] = lambda: shuffled(digits()),
    validation: Callable[[], DataLoader[Any]] | None = None,
    callbacks: Callable[[int], list[L.Callback]] = lambda rank: [],
    each: dict[str, Callable[[], Any]] | None = None,
    raises: bool = True,
    ckpt_path: Path | None = None,
    apart: bool = False,
    come: Mapping[int, Callable[[Seen], None]] | None = None,
    swarm: dict[str, Any] | None = None,
    roles: Mapping[int, dict[str, Any]] | None = None,
    **options: Any,
) -> Seen:
    """Train; raise the errors of trainers, the lead's first.

    Args:
        num_trainers: Trainers, each with a server.
        make_module: Makes each trainer's module; all draw the same weights.
        data: Makes each trainer's loader.
        validation: Makes each trainer's validation loader; only the lead uses it.
        callbacks: Rank -> callbacks.
        each: Makes those arguments of the Trainer that must not be shared.
        raises: False: errors are left in the result.
        ckpt_path: Checkpoint to resume from.
        apart: Give each trainer a separate part of the data.
        come: Rank -> condition to wait for, for trainers that join during the run. They read all of the data.
        swarm: Arguments of the strategy.
        roles: Rank -> further arguments of its strategy.
        options: Arguments of the Trainer.
    """
    arguments = {"num_stages": 2, "target_batch_size": 12, "microbatch_size": 3, "limits": LIMITS, **(swarm or {})}
    come = come or {}
    seen = Seen(network=MemoryNetwork(silence_s=arguments["limits"].silence_timeout))

    def one(rank: int) -> None:
        try:
            trainer = seen.trainers[rank]
            if rank in come:
                come[rank](seen)
            loader = parted(data(), num_trainers, rank) if apart else data()
            trainer.fit(seen.modules[rank], loader, validation() if validation else None, ckpt_path=ckpt_path)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody above it
            seen.errors[rank] = error

    # The default dtype belongs to the process, and trainers in threads would take turns in setting it.
    with default_dtype(torch.float64), loaders_in_turn():
        for rank in range(num_trainers):
            own = {**arguments, **(roles or {}).get(rank, {})}
            strategy = ThreadStrategy(rank, seen.network, seen, comes=rank in come, **own)
            seen.trainers[rank] = L.Trainer(
                **{
                    **QUIET,
                    "max_steps": 8,
                    "max_epochs": -1,
                    **options,
                    **{k: make() for k, make in (each or {}).items()},
                },
                devices=num_trainers - len(come),
                strategy=strategy,
                callbacks=callbacks(rank),
            )
            torch.manual_seed(0)
            seen.modules[rank] = make_module(seen)
            watched(seen.modules[rank], seen.note(rank))
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(num_trainers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError("a trainer hangs")  # no AssertionError, which some tests expect
    for peer in seen.servers:
        peer.close()
    seen.runtime.close()
    seen.weights = seen.modules[0].state_dict()
    if raises and seen.errors:
        raise seen.errors[min(seen.errors)]
    return seen


def copied(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return copies of its weights and buffers."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_exact(
    curve: Curve,
    make_module: Callable[[], Net | NanoGPT],
    data: TensorDataset,
    *,
    num_trainers: int,
    target_batch_size: int = 12,
    made_as: torch.dtype = torch.float64,
    gone: Collection[int] = (),
    late: bool = False,
) -> None:
    """Check losses and weights against plain torch on the batches in the records, which must be all batches.

    Args:
        curve: The swarm's curve.
        make_module: Makes the module that was trained.
        data: The data without numbers.
        num_trainers: Ranks up to this one must have brought batches that count.
        target_batch_size: Least number of samples per step.
        made_as: The default dtype under which the module was made.
        gone: Ranks of dead trainers, some of whose batches may count nowhere.
        late: Each gradient but the first is computed with weights that are one step old.
    """
    torch.manual_seed(0)
    with default_dtype(made_as):
        module = make_module().double()
    with default_dtype(torch.float64):
        module.log = lambda *_, **__: None  # type: ignore[method-assign]  # there is no Trainer here
        optimizer = make_optimizer(module, module.recipe)
        schedule = make_schedule(optimizer, module.recipe)
        before = copied(module)
        for places in curve.steps:
            newest = copied(module)
            if late:
                module.load_state_dict(before)
            batches = [curve.batches[place][1] for place in places]
            num_samples = sum(map(len, batches))
            assert num_samples >= target_batch_size
            optimizer.zero_grad()
            for place, ids in zip(places, batches, strict=True):
                tensors = [part[ids].double() if part.is_floating_point() else part[ids] for part in data.tensors]
                loss = module.training_step(tensors, 0)
                assert isinstance(loss, Tensor)
                assert abs(curve.losses[place] - loss.item()) <= 1e-10 * abs(loss.item()), place
                (loss * len(ids) / num_samples).backward()
            if late:
                module.load_state_dict(newest)
            before = newest
            optimizer.step()
            if schedule is not None:
                schedule.step()
        weights = module.state_dict()
        assert weights.keys() == curve.weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(curve.weights[name], tensor, rtol=0.0, atol=1e-10)
    counted = [place for places in curve.steps for place in places]
    assert len(set(counted)) == len(counted) > 0
    assert {curve.batches[place][0] for place in counted} == set(range(num_trainers)), "some trainer brought nothing"
    ran_last = {(rank, curve.numbers[place]): place for place, (rank, _) in curve.batches.items() if rank not in gone}
    undecided = {place for place in curve.batches if place[0] > max(counted)[0]}
    assert not set(ran_last.values()) - set(counted) - undecided - curve.withdrawn, "batches that ran count nowhere"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def loaders_in_turn() -> Iterator[None]:
    """Make the trainers of this process request their loaders one after the other.

    Lightning replaces methods of `DataLoader` meanwhile, and the first trainer to finish restores them for all.
    """
    turn = threading.Lock()

    def in_turn(request: Callable[..., Any]) -> Callable[..., Any]:
        def requested(source: Any) -> Any:
            with turn:
                return request(source)

        return requested

    with pytest.MonkeyPatch.context() as patch:
        for loop in (fit_loop, evaluation_loop):
            patch.setattr(loop, "_request_dataloader", in_turn(loop._request_dataloader))
        yield
