"""Finds the stages that compute inference sessions, on a run's server or on a server of a finished model."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_swarm.core.errors import NotMember, ProtocolError
from lightning_swarm.core.tasks import nothing
from lightning_swarm.model.inference import attention_cache
from lightning_swarm.model.partition import StageModule, extras_after
from lightning_swarm.model.random import key_seed
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.inference import SessionBranch, SessionStep
from lightning_swarm.server.compute import Computation
from lightning_swarm.server.context import RunMembership
from lightning_swarm.server.inference.adapters import Adapter, LayersOfStage
from lightning_swarm.server.inference.session_compute import SessionPart
from lightning_swarm.server.stage import Stage
from lightning_swarm.server.step_handlers import StepHandlers


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionStage:
    """A stage that computes steps of sessions, on the compute thread."""

    index: int
    module: StageModule
    computation: Computation
    first_block: int  # the number of blocks in the stages before
    holding: Callable[[], AbstractContextManager[None]]  # context in which the stage has the step's weights
    ready: Callable[[], Awaitable[None]] = nothing  # waits for these weights
    batches_texts: bool = False  # computes steps of several sessions together, which may change their last bits
    # Most tokens of a step, in all rows; long steps let other steps run between blocks. None: no limit and no pauses.
    max_tokens: int | None = None
    adapter: Adapter | None = None  # the adapter of the session's client
    layers: LayersOfStage | None = None  # layers that adapters may change; None: adapters are refused

    def prepare(self, step: SessionStep, cache: Any, *, max_bytes: int) -> None:
        """Apply the step's operations to the cache."""
        for operation in step.operations:
            attention_cache.apply(cache, operation, max_bytes=max_bytes)

    def compute(self, step: SessionStep, parts: Sequence[SessionPart]) -> list[serialization.Tree]:
        """Compute steps of several sessions together, all with the modes of `step`; return each session's output."""
        with self._entered(step, parts):
            return self.computation.sessions.steps(parts, step.modes[0], self.first_block, seed=self._seed_of(step))

    def compute_by_blocks(self, step: SessionStep, part: SessionPart) -> Generator[None, None, serialization.Tree]:
        """Compute a step, one block for each `next`; return the output as it travels."""
        computing = self.computation.sessions.blocks(part, step.modes[0], self.first_block, seed=self._seed_of(step))
        while True:
            with self._entered(step, [part]):
                try:
                    next(computing)
                except StopIteration as end:
                    return end.value
            yield

    def _seed_of(self, step: SessionStep) -> int | None:
        """Return the seed of a step's random draws, the same on each server that repeats the step."""
        return key_seed(step.seed, step.number, self.index) if step.draws and step.seed is not None else None

    @contextlib.contextmanager
    def _entered(self, step: SessionStep, parts: Sequence[SessionPart]) -> Iterator[None]:
        """Apply the weights of a step and the adapters of its texts."""
        adapters = [(part.rows, part.adapter) for part in parts]
        if self.layers is None:
            adapting: AbstractContextManager[None] = contextlib.nullcontext()
        else:
            adapting = self.layers.adapted_by_rows(adapters, drops=step.adapter_drops)
        with self.holding(), adapting:
            yield

    def left_of(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that the blocks of later stages need."""
        return extras_after(extras, self.module.spec.block_names)


class SessionHost(Protocol):
    """Decides which peers may have sessions here, and finds the stages of their steps."""

    def check_client(self, client: PeerId) -> None:
        """Refuse a peer that may have no sessions here."""
        ...

    def is_server(self, caller: PeerId) -> bool:
        """Return whether a peer may send steps of other peers' sessions."""
        ...

    def stage_of(self, step: SessionStep | SessionBranch) -> SessionStage:
        """Return the stage of a step; raise if it is not here with the weights that the step names."""
        ...


@dataclass(frozen=True, eq=False)
class RunSessionHost:
    """A `SessionHost` with the stages that a server holds in a run."""

    membership: RunMembership
    steps: StepHandlers

    def check_client(self, client: PeerId) -> None:
        """Refuse a peer that does not train in the run."""
        self.membership.check_trainer(client)

    def is_server(self, caller: PeerId) -> bool:
        """Return whether a peer is a server of the run, or joins it."""
        return self.membership.knows_server(caller)

    def stage_of(self, step: SessionStep | SessionBranch) -> SessionStage:
        """Return the stage of a step; raise if this server does not hold it with the step's weights."""
        run = self.membership.run
        run.check_generation(step.generation)
        if step.adapter is not None:
            raise ProtocolError("stages of a training run compute with no client's adapter")
        stage = self.steps.stage(step.stage_index)
        if stage.on_trainers or step.stage_index not in self.membership.loaded:
            raise NotMember(f"stage {step.stage_index} has no weights here")
        stage.check_evaluation_weights(step.weights)
        return SessionStage(
            index=stage.index,
            module=stage.module,
            computation=stage.computation,
            first_block=run.manifest.stages[stage.index].first_block,
            holding=lambda: _holding(stage, step.version, step.weights),
            ready=lambda: self.steps.wait_for_version(step.version),
        )


@contextlib.contextmanager
def _holding(stage: Stage, version: int, weights: int) -> Iterator[None]:
    """In this context, the stage has the weights of a version, or the evaluation weights of this number."""
    with stage.at(version), stage.holding(weights):
        yield
