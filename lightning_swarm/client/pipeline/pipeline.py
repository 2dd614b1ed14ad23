"""Runs calls of the pipelined module through the swarm, as one autograd function each."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace as replace_fields
from torch import Tensor, nn

from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.differentiation import (
    GradientMarks,
    adds_nothing,
    check_transforms,
    trained,
    uncached,
    weights_node,
)
from lightning_swarm.client.pipeline.leftovers import Leftovers
from lightning_swarm.client.pipeline.microbatch_run import MicrobatchRun, judged
from lightning_swarm.client.pipeline.microbatches import (
    CallArguments,
    MicrobatchInput,
    num_rows,
    split,
)
from lightning_swarm.client.pipeline.norm_watch import NormWatch
from lightning_swarm.client.pipeline.pipeline_call import PipelineCall, PipelineFunction, by_stage, detached, to_send
from lightning_swarm.client.pipeline.replay_buffer import Microbatch
from lightning_swarm.client.pipeline.row_check import RowCheck
from lightning_swarm.core.errors import ConfigError
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.core.tasks import gather_bounded
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.fidelity.hooks import check_global, describe
from lightning_swarm.model.fidelity.leftovers import part as split_left
from lightning_swarm.model.fidelity.module_states import TrainerStates
from lightning_swarm.model.fidelity.written_inputs import POSITIONAL, Given, arguments_in
from lightning_swarm.model.partition import CALLS, StageModule
from lightning_swarm.network import PeerId
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import PLAIN, Codecs, decoded
from lightning_swarm.protocol.messages.batches import Grant
from lightning_swarm.protocol.messages.calls import PLACES, CallKey, ComputeMode, Receipt


@dataclass
class GrantedBatch:
    """The current batch, from its grant to its end."""

    grant: Grant
    trained: list[nn.Parameter] = field(default_factory=list)  # weights of the pipeline that require a gradient
    num_calls: int = 0
    num_microbatches: int = 0  # sum over its calls
    sent: list[Receipt] = field(default_factory=list)  # microbatches whose backward all stages have accepted
    completed: list[Receipt] = field(default_factory=list)
    calls: list[PipelineCall] = field(default_factory=list)
    counts: bool = False  # Lightning's own backward is under way, so its gradients count
    backward_begun: bool = False  # servers may have added gradients
    # Called together with its first microbatches.
    begin: Callable[[], Coroutine[Any, Any, None]] | None = None
    # Called when all stages have accepted all of its backwards, and no other is to come.
    arm: Callable[[list[Receipt]], Awaitable[None]] | None = None
    # Set when it is armed: asks whether the batch counts although the servers no longer know it.
    confirm: Callable[[], Coroutine[Any, Any, None]] | None = None


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Settings that all calls of a pipeline share."""

    stages: Sequence[StageModule]  # this trainer's copy of the model, without the layers that trainers compute
    shared: tuple[str, ...]  # extras that each microbatch gets whole
    microbatch_size: int | None  # rows; None: each batch is cut into `wanted_microbatches` parts
    wanted_microbatches: Callable[[], int]  # number that keeps the servers of the open step busy
    max_in_flight: int  # microbatches under way at once
    device: torch.device  # device of the trainer's tensors
    codecs: Codecs = PLAIN  # codecs of tensors in transit


class Pipeline:
    """Runs calls of the pipelined module through the swarm."""

    def __init__(self, context: PipelineContext, runtime: Runtime, config: PipelineConfig) -> None:
        self.context = context
        self.runtime = runtime
        self.config = config
        self.generation = 0  # generation of the run
        self.version = 0  # version of the weights for calls outside of a batch
        self.evaluation_number = 0  # number of the evaluation weights for such calls; 0: the weights of `version`
        self.first_trained = 0  # the first stage that trains
        self.batch: GrantedBatch | None = None
        self.before_call: Callable[[bool], None] | None = None  # argument: the call is outside of a batch
        # Lightning will clear gradients before its next backward, so a user's own `.backward()` adds to no step.
        self.clears_gradients = True
        self.num_microbatches = 0  # sum over all calls so far
        self._named_modules = [list(stage.named_block_modules()) for stage in config.stages]
        self.leftovers = Leftovers({name: module for named in self._named_modules for name, module in named})
        # For each stage, the description of the trainer's hooks that goes with each microbatch; see `describe`.
        self._hooks: list[dict[str, Any]] = [{} for _ in config.stages]
        self._evaluations = itertools.count()
        self._weights = [weight for stage in config.stages for weight in stage.parameters()]
        registers = [module._parameters for stage in config.stages for module in stage.modules()]
        self._registers = [(register, list(register)) for register in registers]
        self._registered = self._found_weights()
        self.marks = GradientMarks(self._weights)
        self.norms = NormWatch(one for named in self._named_modules for one in named)
        self.states = [TrainerStates(stage) for stage in config.stages]
        row_check = partial(
            RowCheck, shared=config.shared, codec=config.codecs.activations, has_batch_norm=self.norms.has_norms
        )
        confirmation = None if context.judge is None else row_check(partial(self.evaluate, by=context.judge))
        self._row_check = row_check(self.evaluate, confirmation=confirmation)

    @uncached()
    def __call__(self, *args: Any, **extras: Any) -> Any:
        """Compute the module's own forward on the swarm, with gradients if autograd is on."""
        self._check_extras(extras)
        if self.before_call is not None:
            self.before_call(self.batch is None)
        arguments = CallArguments.of(args, extras)
        tensors = list(arguments.tensors)
        keywords = {name: (extras, arguments.keywords[name][1]) for name in arguments_in(extras)}
        given: Given = {POSITIONAL: (args, tensors), **keywords}
        states = [states.read() for states in self.states]
        self.check_transforms(tensors)
        grad = torch.is_grad_enabled()
        check_global()
        self._hooks = [describe(named) for named in self._named_modules]
        mode = capture(
            self.config.device.type,
            training=any(training for training, _ in states),
            grad=grad,
            input_grad=grad and any(tensor.requires_grad for tensor in tensors),
        )
        modes = by_stage(mode, states)
        with torch.inference_mode(False), torch.no_grad():  # other threads cannot use inference tensors
            arguments = detached(arguments)
            rows = num_rows(arguments, self.config.shared)
            size = self.microbatch_size(rows)
            if 0 < size < rows:
                self._row_check.check(arguments, mode, rows=rows, size=size)
                if self.batch is not None:
                    self.norms.cut(size)
            call = PipelineCall(
                self, arguments, modes, split(arguments, rows=rows, size=size, shared=self.config.shared)
            )
        if grad:
            # Without an input that requires a gradient, autograd would leave the function out.
            leaf = torch.zeros((), requires_grad=True)
            wanted = trained(self._weights)
            call.adds_nothing = adds_nothing(wanted, None if self.batch is None else self.batch.trained)
            weights = weights_node(wanted)
            outputs = list(PipelineFunction.apply(call, leaf, weights, *tensors))  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outputs, _ = call.forward()
        return call.placed(outputs, given)

    def number_evaluations(self, trainer: str) -> None:
        """On a trainer that is not the lead: number evaluations so that no two trainers name theirs alike."""
        self._evaluations = itertools.count(zlib.crc32(trainer.encode()) << 20)

    def check_transforms(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a call under a functional transform, or with other weights in the blocks than the run's."""
        check_transforms(tensors, self._registered, self._found_weights())

    def _found_weights(self) -> list[nn.Parameter | None]:
        """Return the weights that the blocks hold now, without a walk through their modules."""
        # By name, because code that takes a weight out and puts it back, such as pruning, leaves another order.
        return [
            register.get(name)
            for register, names in self._registers
            for name in (names if len(names) == len(register) else register)
        ]

    def expect_backward(self, *, clears_gradients: bool) -> None:
        """Prepare for a batch's backward, before which Lightning clears gradients or keeps them."""
        self.clears_gradients = clears_gradients
        if clears_gradients:
            self.marks.begin_window()

    def refuse_or_mark(self) -> None:
        """Allow a user's own backward only if Lightning will clear the gradients that it leaves at the weights."""
        if not self.clears_gradients:
            raise ConfigError(
                "only the backward that Lightning runs adds to a step. Got a `.backward()` of your own after it, or "
                "within an accumulation window; plain Lightning would add its gradients to the step's. Return the sum "
                "of all losses from `training_step`; for the input's gradient use `torch.autograd.grad`."
            )
        self.marks.set()

    def begin_batch(self, grant: Grant) -> GrantedBatch:
        """Begin a batch."""
        self.batch = GrantedBatch(grant, trained(self._weights))
        return self.batch

    def enter_generation(self, generation: int, version: int) -> None:
        """Switch to this generation of the run, and drop the current batch."""
        self.generation, self.version, self.batch = generation, version, None
        self.marks.begin_window()

    def count_statistics(self) -> None:
        """Let running statistics count the batch's calls without a backward, as plain Lightning does."""
        for call in self.batch.calls if self.batch is not None else ():
            call.count_statistics()

    def end_batch(self) -> None:
        """End the current batch. Its calls without a backward will not get one."""
        batch, self.batch = self.batch, None
        for call in batch.calls if batch is not None else ():
            call.release()

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
        return CallKey(
            generation=grant.generation,
            step=grant.step,
            first=grant.first,
            index=index,
            call=call,
        )

    def next_call(self, batch: GrantedBatch | None) -> int:
        """Return the number of a new call in a batch, or outside of batches."""
        if batch is None:
            return next(self._evaluations)
        batch.num_calls += 1
        return batch.num_calls - 1

    def microbatch_size(self, rows: int) -> int:
        """Return the rows of a microbatch for a batch of `rows`."""
        return self.config.microbatch_size or -(-rows // self.config.wanted_microbatches())

    def microbatch_run(
        self, key: CallKey, structure: serialization.Structure, part: MicrobatchInput, modes: Sequence[ComputeMode]
    ) -> MicrobatchRun:
        """Prepare a microbatch whose positional arguments have this structure."""
        tensors = to_send(part.tensors, self.config.codecs.activations, copy=True)
        microbatch = Microbatch(
            key=key,
            num_rows=part.num_rows,
            inputs=serialization.unflatten(structure, tensors),
            extras=[
                stage.extras_for(part.kwargs) | description
                for stage, description in zip(self.config.stages, self._hooks, strict=True)
            ],
            modes=modes,
            weight=self.batch.grant.weight if self.batch is not None and not key.evaluation else 1.0,
            first_trained=self.first_trained,
        )
        return MicrobatchRun(self.context, microbatch)

    def evaluate(
        self, probes: Sequence[tuple[CallArguments, int]], mode: ComputeMode, by: Callable[[], PeerId] | None = None
    ) -> list[tuple[serialization.Structure, list[Tensor]]]:
        """Compute each probe as one microbatch that leaves no trace.

        A probe is the arguments of a call and a number. Probes of equal numbers draw the same random numbers. With
        `by`, that peer computes all stages, even if it does not hold them.
        """
        config, runs = self.config, []
        modes = by_stage(mode, [states.read() for states in self.states])
        calls: dict[int, int] = {}  # number of a probe -> number of its call
        for index, (arguments, number) in enumerate(probes):
            if number not in calls:
                calls[number] = next(self._evaluations)
            rows = len(arguments.tensors[0])
            (part,) = split(arguments, rows=rows, size=rows, shared=config.shared)
            # Probes of one number need different keys, and servers draw by `first % PLACES`.
            key = replace_fields(self.key(None, calls[number], 0), first=(1 + index) * PLACES)
            runs.append(self.microbatch_run(key, arguments.structure, part, modes))
        work = (
            gather_bounded([run.forward() for run in runs], config.max_in_flight) if by is None else judged(runs, by())
        )
        found = self.runtime.run(work)
        outputs = [split_left(decoded(output, config.codecs.activations, config.device)) for output, _ in found]
        return [serialization.flatten(output) for output, _ in outputs]

    def _check_extras(self, extras: dict[str, Any]) -> None:
        """Refuse keyword arguments that no block names."""
        known = frozenset[str]().union(*(stage.keywords for stage in self.config.stages))
        # With `CALLS`, the arguments were bound to the blocks already.
        for name in () if CALLS in extras else extras:
            if name not in known:
                raise TypeError(
                    f"the pipelined module got an unexpected keyword argument {name!r}: no block's forward names it "
                    f"(they name {sorted(known)})"
                )
