"""Checks the calls of the pipelined module, and runs each through the swarm as one autograd function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swarm.client.pipeline.call_factory import CallFactory, GrantedBatch, PipelineConfig, by_stage
from lightning_swarm.client.pipeline.context import PipelineContext
from lightning_swarm.client.pipeline.differentiation import (
    GradientMarks,
    check_transforms,
    is_frozen_call,
    trained_weights,
    uncached,
    weights_node,
)
from lightning_swarm.client.pipeline.leftovers import Leftovers
from lightning_swarm.client.pipeline.microbatches import CallArguments, detached, num_rows, split
from lightning_swarm.client.pipeline.norm_watch import NormWatch
from lightning_swarm.client.pipeline.pipeline_call import PipelineCall, PipelineFunction
from lightning_swarm.client.pipeline.row_check import RowCheck
from lightning_swarm.core.event_loop import Runtime
from lightning_swarm.model.autocast import capture
from lightning_swarm.model.fidelity.hooks import check_global, describe
from lightning_swarm.model.fidelity.written_inputs import POSITIONAL, Given, arguments_in
from lightning_swarm.model.partition import CALLS
from lightning_swarm.protocol.messages.batches import Grant


class Pipeline:
    """Runs calls of the pipelined module through the swarm."""

    def __init__(self, context: PipelineContext, runtime: Runtime, config: PipelineConfig) -> None:
        self.context, self.config = context, config
        self.before_call: Callable[[bool], None] | None = None  # its argument: whether the call is outside of a batch
        self.num_microbatches = 0  # sum over all calls so far
        self._named_modules = [list(stage.named_block_modules()) for stage in config.stages]
        self.leftovers = Leftovers({name: module for named in self._named_modules for name, module in named})
        self.factory = CallFactory(context, runtime, config, self.leftovers)
        self._weights = [weight for stage in config.stages for weight in stage.parameters()]
        owners = [module._parameters for stage in config.stages for module in stage.modules()]
        self._owners = [(owner, list(owner)) for owner in owners]  # (a module's parameters by name, their first order)
        self._first_weights = self._current_weights()
        self.marks = GradientMarks(self._weights)
        self.norms = NormWatch(pair for named in self._named_modules for pair in named)
        row_check = partial(
            RowCheck, shared=config.shared, codec=config.codecs.activations, has_batch_norm=bool(self.norms.names)
        )
        evaluate, referee = self.factory.evaluate, context.results.by_referee
        confirmation = None if referee is None else row_check(partial(evaluate, forwards=referee))
        self._row_check = row_check(evaluate, confirmation=confirmation)

    @property
    def batch(self) -> GrantedBatch | None:
        """The current batch."""
        return self.factory.batch

    @uncached()
    def __call__(self, *args: Any, **extras: Any) -> Any:
        """Compute the module's own forward on the swarm, with gradients if autograd is on."""
        self._check_extras(extras)
        batch = self.factory.batch
        if self.before_call is not None:
            self.before_call(batch is None)
        arguments = CallArguments.of(args, extras)
        tensors = list(arguments.tensors)
        keywords = {name: (extras, arguments.keywords[name][1]) for name in arguments_in(extras)}
        given: Given = {POSITIONAL: (args, tensors), **keywords}  # blocks may write into them
        states = [state.read() for state in self.factory.states]
        self.check_transforms(tensors)
        grad = torch.is_grad_enabled()
        check_global()
        self.factory.hooks = [describe(named) for named in self._named_modules]
        mode = capture(
            self.config.device.type,
            training=any(training for training, _ in states),
            grad=grad,
            input_grad=grad and any(tensor.requires_grad for tensor in tensors),
        )
        trained_now = trained_weights(self._weights) if grad else []
        with torch.inference_mode(False), torch.no_grad():  # other threads cannot use inference tensors
            arguments = detached(arguments)
            rows = num_rows(arguments, self.config.shared)
            size = self.config.microbatch_size or -(-rows // self.config.wanted_microbatches())
            if 0 < size < rows:
                self._row_check.check(arguments, mode, rows=rows, size=size)
                if batch is not None:
                    self.norms.cut(size)
            parts = split(arguments, rows=rows, size=size, shared=self.config.shared)
            self.num_microbatches += len(parts)
            changes_statistics = self.norms.changes(in_batch=batch is not None)
            # A call without gradients that changes no statistics is an evaluation, and belongs to no batch.
            call_batch = batch if grad or changes_statistics else None
            call = PipelineCall(
                self.factory,
                self.marks,
                call_batch,
                self.factory.microbatches(call_batch, arguments, by_stage(mode, states), parts),
                is_frozen=grad and is_frozen_call(trained_now, None if batch is None else batch.trained),
                changes_statistics=changes_statistics,
            )
        if grad:
            # Without an input that requires a gradient, autograd would leave the function out.
            leaf = torch.zeros((), requires_grad=True)
            weights = weights_node(trained_now)
            outputs = PipelineFunction.apply(call, leaf, weights, *tensors)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                outputs, _ = call.forward()
        return call.form.assemble(outputs, given)

    def check_transforms(self, tensors: Iterable[Tensor]) -> None:
        """Refuse a call in a functional transform, or with weights in the blocks that are not the run's."""
        check_transforms(tensors, self._first_weights, self._current_weights())

    def _current_weights(self) -> list[nn.Parameter | None]:
        """Return the weights that the blocks hold now, without a walk through their modules."""
        # By name, because code that removes a weight and restores it, such as pruning, changes the order.
        return [
            owner.get(name) for owner, names in self._owners for name in (names if len(names) == len(owner) else owner)
        ]

    def begin_batch(self, grant: Grant) -> GrantedBatch:
        """Begin a batch."""
        self.factory.batch = GrantedBatch(grant, trained_weights(self._weights))
        return self.factory.batch

    def enter_generation(self, generation: int, version: int) -> None:
        """Switch to this generation of the run, and drop the current batch."""
        self.factory.generation, self.factory.version, self.factory.batch = generation, version, None
        self.marks.begin_window()

    def count_statistics(self) -> None:
        """Add the batch's calls without a backward to the running statistics, as plain Lightning does."""
        for call in self.batch.calls if self.batch is not None else ():
            call.count_statistics()

    def end_batch(self) -> None:
        """End the current batch. No call of it gets a backward any more."""
        batch, self.factory.batch = self.factory.batch, None
        for call in batch.calls if batch is not None else ():
            call.release()

    def _check_extras(self, extras: dict[str, Any]) -> None:
        """Refuse keyword arguments that no block names."""
        known = frozenset[str]().union(*(stage.keywords for stage in self.config.stages))
        # With `CALLS`, the arguments are already bound to the blocks.
        for name in () if CALLS in extras else extras:
            if name not in known:
                raise TypeError(
                    f"the pipelined module got an unexpected keyword argument {name!r}: no block's forward names it "
                    f"(they name {sorted(known)})"
                )
