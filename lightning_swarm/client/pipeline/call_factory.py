"""Makes the microbatches of calls (keys, tensors in wire form), and runs the forwards of calls and of probes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor, nn

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.leftovers import Leftovers
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun, run_all
from lightning_swarm.client.pipeline.microbatches import CallArguments, MicrobatchInput, split
from lightning_swarm.client.pipeline.replay_buffer import Microbatch
from lightning_swarm.client.pipeline.result_check import Forwards, Result, opened
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.model.fidelity.leftovers import Left
from lightning_swarm.model.fidelity.module_states import TrainerStates
from lightning_swarm.model.partition import StageModule
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import PLAIN, Codecs, to_send
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import PLACES, CallKey, ComputeMode, ModuleStates, Receipt

if TYPE_CHECKING:
    from lightning_swarm.client.pipeline.pipeline_call import PipelineCall


@dataclass
class GrantedBatch:
    """The current batch, from its grant to its end."""

    grant: Grant
    trained: list[nn.Parameter] = field(default_factory=list)  # weights of the pipeline that require a gradient
    num_calls: int = 0
    num_microbatches: int = 0  # sum over the calls
    accepted: list[Receipt] = field(default_factory=list)  # microbatches whose backward all stages have accepted
    completed: list[Receipt] = field(default_factory=list)  # microbatches whose gradients all stages have added
    calls: list[PipelineCall] = field(default_factory=list)
    counts: bool = False  # Lightning's own backward is under way, so its gradients count
    backward_begun: bool = False  # servers may have added gradients
    # Runs together with the batch's first microbatches.
    begin: Callable[[], Coroutine[Any, Any, None]] | None = None
    # Called when all stages have accepted the backwards of all microbatches.
    arm: Callable[[list[Receipt]], Awaitable[None]] | None = None
    # Set when the batch is armed. Asks the coordinator whether the batch counts, if servers no longer know it.
    confirm: Callable[[], Coroutine[Any, Any, None]] | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Settings that all calls of a pipeline share."""

    stages: Sequence[StageModule]  # this trainer's copy of the model, without the layers that trainers compute
    shared: tuple[str, ...]  # keyword arguments that each microbatch gets whole
    microbatch_size: int | None  # rows; None: each batch is cut into `wanted_microbatches` parts
    wanted_microbatches: Callable[[], int]  # number that keeps the servers of the open step busy
    max_in_flight: int  # microbatches under way at once
    device: torch.device  # device of the trainer's tensors
    codecs: Codecs = PLAIN  # codecs of tensors in transit


@dataclass(frozen=True)
class CallMicrobatches:
    """The microbatches of one call."""

    arguments: CallArguments
    modes: Sequence[ComputeMode]  # one for each stage
    sizes: Sequence[int]  # rows of each microbatch
    runs: Sequence[MicrobatchRun]


class CallFactory:
    """Makes the microbatches of calls, with keys of the current batch or version, and runs their forwards."""

    def __init__(
        self, context: PipelineContext, runtime: Runtime, config: PipelineConfig, leftovers: Leftovers
    ) -> None:
        self.context, self.runtime, self.config, self.leftovers = context, runtime, config, leftovers
        self.generation = 0  # generation of the run
        self.version = 0  # version of the weights for calls outside of a batch
        self.evaluation_number = 0  # number of the evaluation weights for these calls; 0: the weights of `version`
        self.first_trained = 0  # the first stage that trains
        self.batch: GrantedBatch | None = None  # the current batch
        # For each stage, the description of the trainer's hooks, which each microbatch carries; see `describe`.
        self.hooks: list[dict[str, Any]] = [{} for _ in config.stages]
        self.states = [TrainerStates(stage) for stage in config.stages]
        self._evaluations = itertools.count()

    def number_evaluations(self, trainer: str) -> None:
        """On a trainer that is not the lead: number evaluations so that no two trainers use the same numbers."""
        self._evaluations = itertools.count(zlib.crc32(trainer.encode()) << 20)

    def key(self, batch: GrantedBatch | None, call: int, index: int) -> CallKey:
        """Name a microbatch of a batch, or of an evaluation."""
        if batch is None:
            return CallKey(
                generation=self.generation,
                step=self.version,
                first=0,
                index=index,
                call=call,
                evaluation=True,
                weights=self.evaluation_number,
            )
        grant = batch.grant
        return CallKey(generation=grant.generation, step=grant.step, first=grant.first, index=index, call=call)

    def has_weights_of(self, key: CallKey) -> bool:
        """Return whether evaluations currently compute with the weights that this key names."""
        return (key.generation, key.step, key.weights) == (self.generation, self.version, self.evaluation_number)

    def microbatches(
        self,
        batch: GrantedBatch | None,  # None: the call is an evaluation
        arguments: CallArguments,
        modes: Sequence[ComputeMode],
        parts: Sequence[MicrobatchInput],
    ) -> CallMicrobatches:
        """Number a call, and prepare its microbatches."""
        if batch is None:
            number = next(self._evaluations)
        else:
            number = batch.num_calls
            batch.num_calls += 1
            batch.num_microbatches += len(parts)
        weight = 1.0 if batch is None else batch.grant.weight
        runs = [
            self._run_of(self.key(batch, number, index), arguments.structure, part, modes, weight)
            for index, part in enumerate(parts)
        ]
        return CallMicrobatches(arguments, modes, [part.num_rows for part in parts], runs)

    def _run_of(
        self,
        key: CallKey,
        structure: serialization.Structure,  # structure of the positional arguments
        part: MicrobatchInput,
        modes: Sequence[ComputeMode],
        weight: float = 1.0,
    ) -> MicrobatchRun:
        tensors = to_send(part.tensors, self.config.codecs.activations, copy=True)
        microbatch = Microbatch(
            key=key,
            num_rows=part.num_rows,
            inputs=serialization.unflatten(structure, tensors),
            extras=[
                stage.extras_for(part.kwargs) | description
                for stage, description in zip(self.config.stages, self.hooks, strict=True)
            ],
            modes=modes,
            weight=weight,
            first_trained=self.first_trained,
        )
        return MicrobatchRun(self.context, microbatch)

    def forwards(self, runs: Sequence[MicrobatchRun], *others: Coroutine[Any, Any, None]) -> list[Result]:
        """Return the results of microbatches' forwards; run the other coroutines at the same time."""
        works, limit = [run.forward() for run in runs], self.config.max_in_flight
        return run_all(self.runtime, works, runs[0].microbatch.inputs, *others, limit=limit)

    def trial(self, call: CallMicrobatches, training: bool) -> tuple[list[Left], Sequence[int]]:
        """Compute two microbatches apart and as one; return the values that each of the three leaves, and the sizes."""
        size = call.sizes[0]
        cut = partial(split, call.arguments, rows=sum(call.sizes), shared=self.config.shared)
        parts = [*cut(size=size)[:2], cut(size=2 * size)[0]]
        mode = replace_fields(call.modes[0], training=training, grad=False, input_grad=False)
        modes = by_stage(mode, [(mode.training, mode.modules) for mode in call.modes])
        results = self.forwards(self.microbatches(None, call.arguments, modes, parts).runs)
        return [opened(result, self.config)[1] for result in results], call.sizes[:2]

    def evaluate(
        self, probes: Sequence[tuple[CallArguments, int]], mode: ComputeMode, *, forwards: Forwards | None = None
    ) -> list[tuple[serialization.Structure, list[Tensor]]]:
        """Compute each probe as one microbatch that changes no state; return the outputs, flattened."""
        # A probe is a call's arguments and a number. Probes of equal numbers draw the same random numbers. `forwards`
        # replaces the usual forwards.
        runs = []
        modes = by_stage(mode, [states.read() for states in self.states])
        calls: dict[int, int] = {}  # number of a probe -> number of the call
        for index, (arguments, number) in enumerate(probes):
            if number not in calls:
                calls[number] = next(self._evaluations)
            rows = len(arguments.tensors[0])
            (part,) = split(arguments, rows=rows, size=rows, shared=self.config.shared)
            # Probes of one number need different keys, and servers draw by `first % PLACES`.
            key = replace_fields(self.key(None, calls[number], 0), first=(1 + index) * PLACES)
            runs.append(self._run_of(key, arguments.structure, part, modes))
        results = self.forwards(runs) if forwards is None else self.runtime.run(forwards(runs))
        return [serialization.flatten(opened(result, self.config)[0]) for result in results]


def by_stage(mode: ComputeMode, states: Sequence[tuple[bool, ModuleStates | None]]) -> list[ComputeMode]:
    """Return each stage's mode. If `mode` is eval mode, so are all modules of all stages."""
    if mode.training:
        return [replace_fields(mode, training=training, modules=modules) for training, modules in states]
    without_modes = [None if modules is None else replace_fields(modules, modes={}) for _, modules in states]
    return [replace_fields(mode, modules=modules) for modules in without_modes]
