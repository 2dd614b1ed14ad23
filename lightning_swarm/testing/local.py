"""A whole swarm in one thread: the same strategy, servers and protocol, over the in-memory network."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from lightning_swarm.client.run_session import Session
from lightning_swarm.core.clock import VirtualLoop
from lightning_swarm.core.errors import SwarmError
from lightning_swarm.core.event_loop import InlineRuntime
from lightning_swarm.core.override import changed
from lightning_swarm.core.progress import ProgressLines
from lightning_swarm.core.rebase import written_once
from lightning_swarm.core.tasks import TaskOwner
from lightning_swarm.model.fidelity.module_states import copy_first_values
from lightning_swarm.network import PeerId
from lightning_swarm.network.memory import MemoryNetwork
from lightning_swarm.network.simulated_link import SimulatedLink
from lightning_swarm.peer.peer import Peer
from lightning_swarm.protocol.messages.run import Selection
from lightning_swarm.server.executor import InlineExecutor, PacedExecutor
from lightning_swarm.server.server import Server
from lightning_swarm.server.stage_builder import PeerModel
from lightning_swarm.strategy import model_setup
from lightning_swarm.strategy.launcher import TrainerCall
from lightning_swarm.strategy.strategy import SwarmStrategy
from lightning_swarm.testing.faults import FaultPlan
from lightning_swarm.testing.sabotage import sabotage
from lightning_swarm.testing.unlike import UnlikeMachine, check_rounded_differently

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    _SwarmStrategy = SwarmStrategy
else:
    _SwarmStrategy = object


# At run time `written_once` derives the class, from the `SwarmStrategy` of `lightning.pytorch` or `pytorch_lightning`.
@written_once(SwarmStrategy)
class InMemoryStrategy(_SwarmStrategy):
    """`SwarmStrategy` whose peers all run in this thread; ``devices`` is their number.

    The servers' copies of the model start with NaN in every parameter, to reveal weights that did not come from the
    starter. The trainer's module holds NaN in place of the servers' weights until code reads them.

    Args:
        seed: Seeds routing and the peers' boot ids; the same seed replays the same run.
        latency_s: Latency of each message, on the virtual clock. With 0, the clock moves only when nothing else is
            left to do, so a pause, such as before another attempt to join, ends last.
        microbatch_s: Seconds that each peer's server takes for a microbatch at a stage, on the virtual clock; further
            peers take as long as the last. Empty: computing takes no time.
        links: Simulated links of the peers; further peers have links without limits.
        faults: Planned faults. Peers are called ``peer-0`` (the trainer's), ``peer-1``, and so on.
        unlike: Machines of other kinds, by the names of their peers.
        modify_peer: Changes each new peer before it serves; called with the peer and its name in a `FaultPlan`. The
            attributes of a peer are private and may change in any version.
        keepers: In a run with strangers, the keepers beside the trainer's peer.
        kwargs: Arguments of `SwarmStrategy`. By default peers do not move between stages, because moves gain nothing in
            one thread.
    """

    strategy_name = "swarm_in_memory"

    def __init__(
        self,
        *,
        seed: int = 0,
        latency_s: float = 0.0,
        microbatch_s: Sequence[float] = (),
        links: Sequence[SimulatedLink] = (),
        faults: FaultPlan | None = None,
        unlike: Mapping[str, UnlikeMachine] | None = None,
        modify_peer: Callable[[Peer, PeerId], None] | None = None,
        keepers: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"rebalancing": "none", **kwargs})
        self.microbatch_s = list(microbatch_s)
        self._links = {_name(number): link for number, link in enumerate(links)}
        self._faults = faults
        self._unlike = unlike or {}
        self._modify_peer = modify_peer
        self._keepers = [PeerId(name) for name in keepers]
        self._rng = random.Random(seed)
        self._latency_s = latency_s
        self.network: MemoryNetwork | None = None
        self.peers: list[Peer] = []
        self.servers: list[Server] = []  # servers of the last run, in the order of their peers
        self.refusals: list[SwarmError] = []  # errors that kept servers from joining, or ended their part in the run
        self._copies: list[LightningModule] = []  # models of the peers after the first
        self._original: LightningModule | None = None  # the model before the run, for peers that join later
        self._side_tasks = TaskOwner()  # tasks beside the run, such as servers that join
        self._shared_loop: VirtualLoop | None = None
        self._ending_tasks: list[asyncio.Task[None]] = []  # close the servers of killed peers

    @property
    def virtual_loop(self) -> VirtualLoop:
        """The event loop on which all peers run, from the beginning of a run to its end."""
        assert self._shared_loop is not None
        return self._shared_loop

    @property
    @override
    def is_plain(self) -> bool:
        return False  # a test always gets a swarm, even for a model that one machine could train plainly

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = _InlineLauncher(self)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.run is not None:
            self.run.access.poison()

    def prepare(self) -> None:
        """Make the network, this peer, and a copy of the model for every other peer."""
        self._shared_loop = VirtualLoop()
        self.network = MemoryNetwork(
            latency_s=self._latency_s, silence_s=self.config.limits.silence_timeout, links=self._links
        )
        if self._faults is not None:
            sabotage(self.network, self._faults, killed=self._end_tasks_of)
        self.servers = []
        self.peers = [self._peer(number) for number in range(len(self._devices))]
        self.peer = self.peers[0]
        module = self.lightning_module
        assert module is not None
        self._copies = [_copy(module) for _ in self.peers[1:]]
        self._original = _copy(module)
        self._side_tasks = TaskOwner()
        self._shared_loop.run_until_complete(self._side_tasks.start())

    @override
    def start_run(self, trainer: Trainer, model: PeerModel, selection: Selection | None) -> Session:
        # Peers that joined later have no copy in `_copies`.
        for peer, module in zip(self.peers[1:], self._copies, strict=False):
            if peer.server is None:  # unless the peer has served since before a rollback
                peer.serve(self._set_up_model(module, trainer))
                if self.config.settings.rebalancing != "none":  # the peer may have to move to another stage
                    peer.runtime.run(self.spawn(self._serve_run(peer)))
        session = super().start_run(trainer, model, selection)
        self.servers = [peer.server for peer in self.peers if peer.server is not None]
        return session

    def join(self, module: LightningModule | None = None) -> Server:
        """Start one more server, which a later record admits, with a copy of `module` or of the initial model."""
        peer, model = self._make_newcomer(module)
        return peer.runtime.run(self._start_server(peer, model))

    async def add_server(self, microbatch_s: float, link: SimulatedLink) -> PeerId:
        """Like `join`, but on the loop, with a server of this pace and link; return its peer's id."""
        self._links[_name(len(self.peers))] = link
        peer, model = self._make_newcomer()
        self.set_pace(peer.transport.peer_id, microbatch_s)
        await self._start_server(peer, model)
        return peer.transport.peer_id

    def set_pace(self, peer_id: PeerId, microbatch_s: float) -> None:
        """Set the seconds that a peer takes for a microbatch from now on."""
        number = [peer.transport.peer_id for peer in self.peers].index(peer_id)
        self.microbatch_s += self.microbatch_s[-1:] * (len(self.peers) - len(self.microbatch_s))
        self.microbatch_s[number] = microbatch_s

    def kill_peer(self, peer_id: PeerId) -> None:
        """End a peer as `kill -9` does; call it on the loop."""
        assert self.network is not None
        self.network.kill(peer_id)
        self._end_tasks_of(peer_id)

    async def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Schedule a coroutine beside the run; it is cancelled when the run ends."""
        self._side_tasks.spawn(work)

    async def _start_server(self, peer: Peer, model: PeerModel) -> Server:
        """Start a new peer's server, and let it serve the run in a task."""
        await peer.start_server(model)
        assert peer.server is not None
        self.servers.append(peer.server)
        await self.spawn(self._serve_run(peer))
        return peer.server

    def _make_newcomer(self, module: LightningModule | None = None) -> tuple[Peer, PeerModel]:
        """Make one more peer, and its model: a copy of `module`, or of the model before the run."""
        assert self._original is not None
        assert self.lightning_module is not None
        peer = self._peer(len(self.peers))
        self.peers.append(peer)
        return peer, self._set_up_model(_copy(module or self._original), self.lightning_module.trainer)

    async def _serve_run(self, peer: Peer) -> None:
        try:
            await peer.serve_run(ProgressLines(_log.info))
        except SwarmError as error:
            self.refusals.append(error)

    def _end_tasks_of(self, peer_id: PeerId) -> None:
        """End a killed peer's tasks, as its process would end."""
        server = next((peer.server for peer in self.peers if peer.transport.peer_id == peer_id), None)
        if server is not None:
            self._ending_tasks.append(asyncio.get_running_loop().create_task(_close(server)))

    def _set_up_model(self, module: LightningModule, trainer: Trainer) -> PeerModel:
        """Set up a copy of the model as another process would, with NaN in every parameter."""
        module.trainer = trainer
        # Other processes would draw random numbers from their own generators.
        with isolate_rng():
            self.framework.call._call_lightning_module_hook(trainer, "setup", stage=trainer.state.fn, pl_module=module)
            module.configure_model()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    parameter.fill_(float("nan"))  # reveals weights that the starter did not send
        return model_setup.served_model(self, module)

    @override
    def leave(self) -> None:
        try:
            super().leave()
        finally:
            if self._shared_loop is not None:
                self._shared_loop.run_until_complete(self._side_tasks.close())
                for task in self._ending_tasks:
                    self._shared_loop.run_until_complete(task)
            for peer in self.peers:
                peer.close()
            if self._shared_loop is not None:
                self._shared_loop.close()
                self._shared_loop = None

    def _peer(self, number: int) -> Peer:
        """Make the peer of this number, on the in-memory network."""
        assert self.network is not None
        assert self._shared_loop is not None
        runtime = InlineRuntime(self._shared_loop)
        transport = self.network.transport(_name(number))
        directory = self.network.directory(transport)
        paced = partial(PacedExecutor, lambda: self.microbatch_s[min(number, len(self.microbatch_s) - 1)])
        executor = paced if self.microbatch_s else InlineExecutor
        peer = Peer(
            runtime, transport, directory, executor=executor, config=self.config, keepers=self._keepers, rng=self._rng
        )
        if self._modify_peer is not None:
            self._modify_peer(peer, transport.peer_id)
        if (machine := self._unlike.get(transport.peer_id)) is not None:
            machine.watch(peer)
        return peer


class _InlineLauncher(_Launcher):
    """Runs a Trainer's call in this thread."""

    def __init__(self, strategy: InMemoryStrategy) -> None:
        super().__init__()
        self._strategy = strategy

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        call = TrainerCall(self._strategy, trainer, function, args, kwargs)
        self._strategy.check(trainer, call.arguments)
        self._strategy.prepare()
        return call.run()

    @override
    def kill(self, signum: int) -> None:
        """Do nothing, because there is no other process to stop."""


def _name(number: int) -> PeerId:
    return PeerId(f"peer-{number}")


async def _close(server: Server) -> None:
    with contextlib.suppress(Exception):  # closing may fail, because the peer was killed during its work
        await server.close()


def _copy(module: LightningModule) -> LightningModule:
    """Copy a module without its Trainer."""
    with changed(module, _trainer=None):
        twin = copy.deepcopy(module)
    copy_first_values(twin, module)
    return twin


QUIET: Final[dict[str, Any]] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class LocalSwarm:
    """Makes Trainers whose swarm runs in this thread; made by `local_swarm`, which explains the fields."""

    num_peers: int
    faults: FaultPlan
    unlike: Mapping[str, UnlikeMachine]
    settings: Mapping[str, Any]
    strategies: list[InMemoryStrategy] = field(default_factory=list, init=False)  # one for each Trainer made so far

    def trainer(self, **arguments: Any) -> Trainer:
        """Make a Trainer on this swarm: on CPU, without logger, checkpoints and bars unless `arguments` differ."""
        strategy = InMemoryStrategy(faults=self.faults, unlike=self.unlike, **self.settings)
        self.strategies.append(strategy)
        return Trainer(**{**QUIET, **arguments, "devices": self.num_peers, "strategy": strategy})


MakeLocalSwarm: TypeAlias = Callable[..., LocalSwarm]  # the type of the fixture `local_swarm`


@contextmanager
def local_swarm(
    num_peers: int = 2,
    *,
    faults: FaultPlan | None = None,
    unlike: Mapping[str, UnlikeMachine] | None = None,
    **settings: Any,
) -> Iterator[LocalSwarm]:
    """Run a swarm in this thread, on a virtual clock: no process starts, nothing sleeps, a seed repeats the run.

    At the end of the block all planned faults must have struck, and all unlike machines must have rounded differently.

    Args:
        num_peers: Number of peers: ``peer-0``, the trainer's own, to ``peer-<n - 1>``.
        faults: Planned faults.
        unlike: Machines of other kinds, by the names of their peers.
        settings: Arguments of `SwarmStrategy`, and ``seed`` (seeds routing and boot ids), ``latency_s`` (latency
            of each message), ``microbatch_s`` (seconds that each peer takes for a microbatch) and ``modify_peer``
            (changes each new peer).

    Raises:
        AssertionError: A fault did not strike, or an unlike machine rounded nothing differently, so the test has not
            tested it.
    """
    swarm = LocalSwarm(num_peers, faults or FaultPlan(), unlike or {}, settings)
    yield swarm
    swarm.faults.check()
    check_rounded_differently(swarm.unlike)
