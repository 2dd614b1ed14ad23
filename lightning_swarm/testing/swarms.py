"""`local_swarm`: a swarm in one thread for tests of other people's models, with faults if they like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from lightning.pytorch import Trainer

from lightning_swarm.testing.faults import FaultPlan
from lightning_swarm.testing.local import InMemoryStrategy

_QUIET: Final[dict[str, Any]] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class LocalSwarm:
    """Makes Trainers whose swarm is in this thread. `local_swarm` makes it.

    Args:
        num_peers: How many, the trainer's own included. They are called ``peer-0`` (the trainer's) to ``peer-<n - 1>``.
        faults: What shall go wrong.
        settings: Arguments of `InMemoryStrategy`, and with it of `SwarmStrategy`.

    Attributes:
        faults: As they were given.
        strategies: Those of the Trainers that were made, in order.
    """

    def __init__(self, num_peers: int, *, faults: FaultPlan | None = None, settings: dict[str, Any]) -> None:
        self.faults = faults or FaultPlan()
        self.strategies: list[InMemoryStrategy] = []
        self._num_peers = num_peers
        self._settings = settings

    def trainer(self, **arguments: Any) -> Trainer:
        """A Trainer on this swarm: on CPU, without logger, checkpoints and bars unless `arguments` say otherwise."""
        strategy = InMemoryStrategy(faults=self.faults, **self._settings)
        self.strategies.append(strategy)
        return Trainer(**{**_QUIET, **arguments, "devices": self._num_peers, "strategy": strategy})


MakeLocalSwarm: TypeAlias = Callable[..., LocalSwarm]
"""What the fixture `local_swarm` gives a test."""


@contextmanager
def local_swarm(num_peers: int = 2, *, faults: FaultPlan | None = None, **settings: Any) -> Iterator[LocalSwarm]:
    """A swarm in this thread, on a virtual clock: nothing is started, nothing sleeps, a seed repeats the run.

    At the end of the block all planned faults must have happened.

    Args:
        num_peers: How many, the trainer's own included.
        faults: What shall go wrong.
        settings: Arguments of `SwarmStrategy`, and ``seed`` (wires the pipelines), ``latency_s`` (of each message)
            and ``microbatch_s`` (of each peer, to compute one).

    Raises:
        AssertionError: Some fault did not happen, so the test has not shown what it was written for.
    """
    swarm = LocalSwarm(num_peers, faults=faults, settings=settings)
    yield swarm
    swarm.faults.check()
