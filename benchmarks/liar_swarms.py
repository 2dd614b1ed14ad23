"""Two small trainings and the swarms in memory that run them, some of their servers liars: for `benchmarks.liars`."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_swarm.coordinator.audit.policy import AuditMemory
from lightning_swarm.network import Message, PeerId
from lightning_swarm.network.transport import BaseTransport
from lightning_swarm.protocol import rpc
from lightning_swarm.server.compute import Computation
from lightning_swarm.testing import FaultPlan, InMemoryStrategy
from lightning_swarm.testing.faults import DidNotHappen
from tests.adversaries.adversary import Adversary
from tests.adversaries.swarms import local_swarm

NUM_PEERS: Final = 16
KEEPER: Final = "peer-0"
"""The trainer's own peer. It coordinates, judges, and serves, too; it never lies."""


# ---------------------------------------------------------------------- trainings


class Training(L.LightningModule):
    """A model with its loss; `blocks` is what the swarm cuts into stages.

    Args:
        blocks: The model.
        learning_rate: Of SGD with momentum.
    """

    def __init__(self, blocks: nn.Sequential, learning_rate: float) -> None:
        super().__init__()
        self.blocks, self._learning_rate = blocks, learning_rate

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy over all classes ``[..., C]``."""
        return cross_entropy(self.blocks(inputs).flatten(0, -2), targets.flatten())

    @override
    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        return self.loss(batch[0], batch[1])

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self._learning_rate, momentum=0.9)

    def weights(self) -> Tensor:
        """All weights in one vector, in float64."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()]).double()


@dataclass(frozen=True)
class Task:
    """A training, and the swarm that it is for.

    Args:
        name: Of the task.
        num_stages: Of the swarm.
        batch_size: Samples of a step.
        microbatch_size: So that each server has one or two in a step.
        make: Makes the model; called with the seed set.
        train: Inputs and targets to train on.
        test: Those to measure loss and accuracy on.
    """

    name: str
    num_stages: int
    batch_size: int
    microbatch_size: int
    make: Callable[[], Training]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def model(self, seed: int) -> Training:
        """Make the model as the seed has it."""
        torch.manual_seed(seed)
        return self.make()

    def loader(self, seed: int, num_steps: int) -> DataLoader[tuple[Tensor, ...]]:
        """Samples for so many steps, in an order that the seed decides."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(self.train[0]), (num_steps * self.batch_size,), generator=generator)
        return DataLoader(TensorDataset(*(one[drawn] for one in self.train)), self.batch_size)

    @torch.no_grad()
    def measure(self, model: Training) -> tuple[float, float]:
        """Return loss and accuracy on the test data."""
        inputs, targets = self.test
        logits: Tensor = model.blocks(inputs)
        loss = float(cross_entropy(logits.flatten(0, -2), targets.flatten()))
        return loss, float((logits.argmax(-1) == targets).double().mean())


@cache
def digits() -> Task:
    """Make BTARD's shape of task: images of digits, one stage of 16 servers."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]  # it has no types, and takes a second

    pixels, labels = load_digits(return_X_y=True)
    images, classes = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    kept = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = kept[:1408], kept[1408:]

    def make() -> Training:
        return Training(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), learning_rate=0.6)

    return Task("digits", 1, 96, 4, make, (images[train], classes[train]), (images[test], classes[test]))


_LENGTH: Final = 32  # of a sample of text, in characters
_WIDTH: Final = 32


class _Embedding(nn.Module):
    def __init__(self, num_characters: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(num_characters, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)

    @override
    def forward(self, characters: Tensor) -> Tensor:
        found: Tensor = self.characters(characters) + self.places.weight
        return found


class _Block(nn.Module):
    """A transformer's block: causal attention of two heads, and an MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self._dropout = dropout
        self.drop = nn.Dropout(dropout)
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norms[0](hidden)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        dropout = self._dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        hidden = hidden + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        found: Tensor = hidden + self.drop(self.mlp(self.norms[1](hidden)))
        return found


def text() -> Task:
    """Make a task of a pipeline: a character-level transformer on the text of Python's `help`, four stages."""
    return _text("text", 0.0)


def dropped() -> Task:
    """Make the same task with dropout."""
    return _text("text with dropout", 0.1)


@cache
def _text(name: str, dropout: float) -> Task:
    from pydoc_data.topics import topics  # Python's own help, which is there wherever Python is

    read = "".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()[:200_000]
    alphabet = {character: number for number, character in enumerate(sorted(set(read)))}
    samples = torch.tensor([alphabet[one] for one in read])
    inputs = samples[: len(samples) // _LENGTH * _LENGTH].view(-1, _LENGTH)
    targets = samples[1:].unfold(0, _LENGTH, _LENGTH)
    pairs = min(len(inputs), len(targets))
    inputs, targets = inputs[:pairs], targets[:pairs]

    def make() -> Training:
        ends = _Embedding(len(alphabet)), nn.Linear(_WIDTH, len(alphabet))
        return Training(nn.Sequential(ends[0], _Block(dropout), _Block(dropout), ends[1]), learning_rate=0.4)

    kept = slice(256, None), slice(256)
    return Task(name, 4, 32, 4, make, (inputs[kept[0]], targets[kept[0]]), (inputs[kept[1]], targets[kept[1]]))


TASKS: Final[dict[str, Callable[[], Task]]] = {"digits": digits, "text": text}
"""The tasks by name."""


# ---------------------------------------------------------------------- counting


@dataclass
class Traffic:
    """What the swarms of this process compute and send."""

    jobs: int = 0  # forwards and backwards, by whomever and for whatever
    tensor_bytes: Counter[str] = field(default_factory=Counter)  # between peers, by what they are for


# The package counts the bytes of each method, but neither the purpose of its tensors nor the jobs of audits. Each
# replacement counts and calls the original, whatever the arguments.
@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is computed and sent inside."""
    found, honest, stream = Traffic(), (Computation.forward, Computation.backward), BaseTransport.stream

    def forward(self: Computation, *arguments: Any) -> Any:
        found.jobs += 1
        return honest[0](self, *arguments)

    def backward(self: Computation, *arguments: Any) -> Any:
        found.jobs += 1
        return honest[1](self, *arguments)

    async def counting(self: BaseTransport, peer: PeerId, method: str, message: Message, **options: Any) -> Message:
        answer = await stream(self, peer, method, message, **options)
        if peer != self.peer_id:
            found.tensor_bytes[_purpose(method, message)] += message.num_tensor_bytes + answer.num_tensor_bytes
        return answer

    Computation.forward, Computation.backward = forward, backward  # type: ignore[method-assign, assignment]
    BaseTransport.stream = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Computation.forward, Computation.backward = honest  # type: ignore[method-assign]
        BaseTransport.stream = stream  # type: ignore[method-assign]


def _purpose(method: str, message: Message) -> str:
    if method in (rpc.WAIT.name, rpc.FETCH.name):
        return "averaging" if b"/average/" in message.body else "activations"
    if method in (rpc.AUDIT.name, rpc.KEPT_WORK.name):
        return "audits"
    return "activations" if method in (rpc.FORWARD.name, rpc.BACKWARD.name) else "other"


# ---------------------------------------------------------------------- swarms


@dataclass(kw_only=True)
class Outcome:
    """What came of one run."""

    loss: float
    accuracy: float
    weights: Tensor
    traffic: Traffic
    convicted: dict[str, int]  # peers, and the steps in which they were
    out: dict[str, int]  # likewise, with those that the coordinator goes on without for another reason
    disputes: int
    audits: int  # of server-steps, that found nothing
    num_steps: int
    refusals: list[str]


class _Watch(L.Callback):
    """Keeps hold of what a coordinator knows, which is gone with the run; and ends a run when nobody lies any more."""

    def __init__(self, strategy: InMemoryStrategy, each_step: Callable[[L.Trainer, InMemoryStrategy], None]) -> None:
        self._strategy, self._each_step = strategy, each_step
        self.memory = AuditMemory()
        self.num_steps = 0

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        server = self._strategy.peers[0].server
        assert server is not None
        if (coordinator := server.admission.election.coordinator) is not None:
            # A run without audits has no memory.
            self.memory = getattr(coordinator.generation.context.oversight, "memory", self.memory)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_steps = trainer.global_step
        self._each_step(trainer, self._strategy)


def out(strategy: InMemoryStrategy, *kinds: str) -> dict[str, int]:
    """Return the peers of the coordinator's events of some kinds, and the first step of each."""
    events = strategy.peers[0].events.newest if strategy.peers else ()
    found: dict[str, int] = {}
    for one in events:
        if one.kind in kinds and one.step is not None:
            found.setdefault(str(one.peer), one.step)
    return found


def run(
    task: Task,
    num_steps: int,
    seed: int,
    adversaries: Sequence[Adversary] = (),
    *,
    num_peers: int = NUM_PEERS,
    wiring: int | None = None,
    num_threads: int = 1,
    each_step: Callable[[L.Trainer, InMemoryStrategy], None] = lambda *_: None,
    faults: FaultPlan | None = None,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Outcome:
    """Run a swarm in memory, and measure what came of it.

    Args:
        task: The training.
        num_steps: At most.
        seed: Decides initial weights and the order of data.
        adversaries: The liars.
        num_peers: Of the swarm.
        wiring: Decides which server gets which microbatch; None: the seed.
        num_threads: Of torch.
        each_step: Called after each step.
        faults: Planned faults.
        arguments: Of the Trainer.
        settings: Of the strategy.
    """
    torch.set_num_threads(num_threads)
    hush()
    model = task.model(seed)
    settings = {
        "num_stages": task.num_stages,
        "microbatch_size": task.microbatch_size,
        "deterministic": True,
        "seed": seed if wiring is None else wiring,
        **settings,
    }
    with (
        contextlib.suppress(DidNotHappen),
        counted() as traffic,
        local_swarm(num_peers, adversaries=adversaries, faults=faults, **settings) as swarm,
    ):
        trainer = swarm.trainer(max_steps=num_steps, **(arguments or {}))
        strategy = swarm.strategies[-1]
        watch = _Watch(strategy, each_step)
        trainer.callbacks.append(watch)  # type: ignore[attr-defined]
        trainer.fit(model, task.loader(seed, num_steps))
    loss, accuracy = task.measure(model)
    return Outcome(
        loss=loss,
        accuracy=accuracy,
        weights=model.weights(),
        traffic=traffic,
        convicted=out(strategy, "convicted"),
        out=out(strategy, "convicted", "gone"),
        disputes=strategy.peers[0].events.counts["disputed"],
        audits=sum(watch.memory.standing.passed.values()),
        num_steps=watch.num_steps,
        refusals=[str(one) for one in strategy.refusals],
    )


def stages_of(task: Task, seed: int) -> dict[str, int]:
    """Return the stage of each peer: the same in all runs of a task."""
    if task.num_stages == 1:
        return {f"peer-{number}": 0 for number in range(NUM_PEERS)}
    found: dict[str, int] = {}

    def look(_: L.Trainer, strategy: InMemoryStrategy) -> None:
        found.update(
            {
                str(server.membership.me.peer_id): index
                for server in strategy.servers
                for index in server.steps.sums.stages
            }
        )

    run(task, 1, seed, each_step=look)
    return found


def hush() -> None:
    """Keep what others log out of the output."""
    warnings.filterwarnings("ignore", module="lightning")
    for name in ("lightning.pytorch", "lightning_swarm"):
        logging.getLogger(name).setLevel(logging.ERROR)
