"""Computes a stage's blocks for a microbatch, forward and backward; changes no weights and no sums.

A forward (`_forward`) decodes its inputs, runs the blocks, and detaches the outputs; `SavedGraph` is the part that its
backward needs. Blocks run as they would on one machine (`_watched`): in the trainer's modes, with random draws keyed by
the call, and with the hooks of the whole model's modules. Values that blocks leave on modules, and writes into their
arguments, therefore travel with the output. Other effects would reach only one replica, so they are refused
(`_guarding_buffers`). A backward differentiates the graph, and computes it again if it was dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.readable import few
from lightning_swarm.model import autocast as modes
from lightning_swarm.model.fidelity.hooks import HOOKS, OBSERVED, recording
from lightning_swarm.model.fidelity.leftovers import Changes, ForwardWatch, Left, join, same_trees, split_inputs
from lightning_swarm.model.fidelity.module_states import ServerStates
from lightning_swarm.model.fidelity.written_inputs import (
    POSITIONAL,
    WRITTEN,
    CallWatch,
    arguments_in,
    text_of,
    written_indices,
)
from lightning_swarm.model.partition import CALLS, StageModule
from lightning_swarm.model.random import KeyedOnDemand, KeyedRandom
from lightning_swarm.model.running_statistics import BatchStatistics, RunningStatistics
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codecs, decoded, encoded
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.reports import SampleCosts
from lightning_swarm.server.inference.session_compute import SessionComputation, to_send
from lightning_swarm.server.sample_costs import measured


@dataclass(frozen=True)
class ForwardCall:
    """All inputs of a forward, enough to compute it again."""

    inputs: tuple[Any, ...]  # trees of tensors ``[microbatch, ...]``, as received
    extras: dict[str, Any]  # keyword arguments for the blocks that name them
    wants_grad: Sequence[bool]  # per input tensor, whether backward returns its gradient
    mode: ComputeMode
    seed: int  # key of all random draws
    is_probe: bool = False  # runs uncompiled, because compiling takes longer than a few calls

    @property
    def num_samples(self) -> int:
        """The number of samples in the microbatch, which was cut along the first dimension."""
        return next((leaf.shape[0] for leaf in serialization.leaves(self.inputs) if leaf.ndim), 0)


@dataclass(frozen=True)
class SavedGraph:
    """The part of a forward that its backward needs."""

    inputs: list[Tensor]  # leaves of the input tree; `requires_grad` is set where a gradient is wanted
    outputs: list[Tensor]  # leaves of the output tree and of values left on modules, with autograd history
    has_drawn: bool  # whether random numbers were drawn
    batch_statistics: Tensor | None  # set if the stage has batch norms
    call: ForwardCall  # to compute the graph again: a backward frees it, and may run twice


@dataclass
class ForwardResult:
    """A forward's result."""

    output: serialization.Tree  # detached, as it travels
    requires_grad: list[bool]  # one flag per output tensor
    graph: SavedGraph | None  # the caller takes it out, because no second object may keep it
    graph_bytes: int


@dataclass(frozen=True)
class _BlockRun:
    """The results of one run of the blocks, and its effects on modules and arguments."""

    output: Any
    earlier_values: Any  # values that earlier stages left on modules, with a gradient
    observed: dict[str, list[Any]]  # module -> arguments and outputs of each call, if it has observing hooks
    arguments: CallWatch
    written: dict[str, Any]  # argument -> writes into it
    graph_bytes: int
    has_drawn: bool
    batch_statistics: Tensor | None  # set if the stage has batch norms
    changes: Changes


class Computation:
    """Computes a stage's blocks, on the compute thread, one call at a time."""

    def __init__(
        self, module: StageModule, device: torch.device, codecs: Codecs, statistics: RunningStatistics
    ) -> None:
        self._module = module
        self._device = device
        self._codecs = codecs  # encode inputs and outputs
        self._statistics = statistics
        self._states = ServerStates(module)
        self.sessions = SessionComputation(module, device, codecs, self._states)
        self._random = KeyedOnDemand(device)
        self._named_modules = dict(module.named_block_modules())
        modules = list(module.modules())
        self._parameters = [module._parameters for module in modules]
        self._buffers = [module._buffers for module in modules]
        self._watch = ForwardWatch(self._named_modules.items(), module.around)
        self.costs: SampleCosts | None = None  # measured in the first forward that keeps a graph
        self.trainable: Sequence[Tensor] = ()  # parameters whose gradients backward computes

    def train(self, trainable: Sequence[Tensor]) -> None:
        """Compute gradients of these parameters from now on."""
        self.trainable = trainable
        self.costs = None  # autograd saves another graph from now on

    def graph(self, call: ForwardCall) -> SavedGraph:
        """Run the blocks, and return only the graph for a backward."""
        graph = self._forward(call)[0].graph
        assert graph is not None
        return graph

    def forward(self, call: ForwardCall) -> ForwardResult:
        """Run the blocks, and collect the values that they leave on modules."""
        result, left = self._forward(call)
        # Left values travel unencoded, because each stage would encode them again, and most of them are small.
        output = join(encoded(result.output, self._codecs.activations), left)
        result.output = to_send(output, self._device)
        return result

    def _forward(self, call: ForwardCall) -> tuple[ForwardResult, Left]:
        """Run the blocks; return the output, still on its device, and the values left on modules, here or before."""
        mode = call.mode
        inputs, left = split_inputs(call.inputs)
        names_in_input = left.take_aliases()  # see `_collect_left`
        received = inputs, left.differentiable
        tensors: list[Tensor] = decoded(serialization.leaves(received), self._codecs.activations, self._device)
        if len(tensors) != len(call.wants_grad):
            raise ProtocolError(
                f"each input tensor must have a flag, got {len(tensors)} tensors and {len(call.wants_grad)} flags"
            )
        leaves = [
            tensor.detach().requires_grad_(mode.grad and wants and serialization.is_differentiable(tensor))
            for tensor, wants in zip(tensors, call.wants_grad, strict=True)
        ]
        run_blocks = partial(self._watched, received, leaves, call)
        # Checking contents takes longer, and finds changes inside containers and on modules around the stage.
        run = run_blocks(checks_contents=self._watch.note_kind((mode.training, mode.grad)))
        if self._watch.has_new_changes(run.changes):
            second = run_blocks(checks_contents=True)  # a second run shows which changes repeat
            self._watch.learn(run.changes, second.changes, same_output=same_trees(run.output, second.output))
        self._collect_left(run, left, names_in_input)
        results = run.output, left.differentiable
        _, outputs = serialization.flatten(results)  # refuses values that cannot travel
        output, differentiable = serialization.transform(results, Tensor.detach)
        result = ForwardResult(
            output=output,
            requires_grad=[tensor.requires_grad for tensor in outputs],
            graph=SavedGraph(leaves, outputs, run.has_drawn, run.batch_statistics, call) if mode.grad else None,
            graph_bytes=run.graph_bytes,
        )
        return result, Left(differentiable, left.others, left.refused)

    def _collect_left(self, run: _BlockRun, left: Left, names_in_input: Mapping[int, Sequence[str]]) -> None:
        """Add the values that a run left on modules to those of earlier stages."""
        left.differentiable = run.earlier_values
        self._watch.take(run.changes, left)
        for name, calls in run.observed.items():
            left.add(name, OBSERVED, calls)
        self._take_written(run.written, left, names_in_input)
        # Aliases are values that share memory with a tensor of the output, such as `self.last = out` on a module. If
        # the next stage writes into its input, they would change on one machine, but not here. The next stage gets
        # their names, so that it can refuse such a write.
        is_first = self._module.spec.index == 0
        left.note_aliases(run.output, run.arguments.tensors_held_elsewhere(names_in_input, is_first=is_first))

    def _watched(
        self, received: serialization.Tree, leaves: Sequence[Tensor], call: ForwardCall, *, checks_contents: bool
    ) -> _BlockRun:
        """Run the blocks in the modes of the call, and find the changes that they make on modules."""
        mode = call.mode
        compute = partial(self._run, received, leaves, call, checks_contents=checks_contents)
        states = mode.modules.modes.items() if mode.modules is not None else ()
        kind = ("forward", mode.training, frozenset(states))
        with self._states.entered(mode):
            before = self._watch.snapshot(with_contents=checks_contents)
            with self._guarding_buffers(mode) as statistics, modes.enter_modes(mode, self._device.type):
                results, has_drawn = self._random.run(kind, call.seed, compute)
            changes = self._watch.changes(before)
        return _BlockRun(*results, has_drawn, statistics.values, changes)

    def _take_written(
        self, written: Mapping[str, Any], left: Left, names_in_input: Mapping[int, Sequence[str]]
    ) -> None:
        """Add the blocks' writes into arguments to `left`; refuse writes into tensors shared with other machines."""
        for argument, writes in written.items():
            if argument != POSITIONAL or self._module.spec.index == 0:
                # The write travels like a value on a module. Any named module will do; boundary layers have no names.
                left.add(next(filter(None, self._module.block_names)), WRITTEN + argument, writes)
            elif names := [name for index in written_indices(writes) for name in names_in_input.get(index, ())]:
                raise ConfigError(
                    "a block must not write into its input if other code holds the same tensor: stage "
                    f"{self._module.spec.index} begins with a block that works in place, and {few(names)} would change "
                    "with it on one machine. Remove `inplace=True` there, or clone the tensor first."
                )

    def _run(
        self, received: serialization.Tree, leaves: Sequence[Tensor], call: ForwardCall, *, checks_contents: bool
    ) -> tuple[Any, Any, dict[str, list[Any]], CallWatch, dict[str, Any], int]:
        """Run the blocks on copies of their inputs; return the first six fields of `_BlockRun`."""
        mode, extras = call.mode, dict(call.extras)
        hooks_at_trainer = extras.pop(HOOKS, None)  # the trainer's description of its hooks
        # Copy inputs and extras, because a block may work in place. A recomputation needs them unchanged, and so does
        # each microbatch that shares the extras.
        copies = (leaf.clone() for leaf in leaves)
        inputs, earlier_values = serialization.transform(received, lambda _: next(copies))
        keywords = serialization.transform(extras, lambda extra: extra.to(self._device, copy=True))
        watch = CallWatch(inputs, keywords)
        module = self._module.uncompiled if call.is_probe else self._module
        run = partial(module, inputs, keywords)
        input_leaves = leaves[: len(watch.tensors[POSITIONAL])]
        with recording(self._named_modules, hooks_at_trainer, self._module.spec.index) as observed:
            if mode.grad and self.costs is None:
                parameters = [parameter for _, parameter in self._module.named_stage_parameters()]
                output, self.costs = measured(run, parameters, input_leaves, _tensors(keywords))
            else:
                output = run()
        num_rows = max((leaf.shape[0] for leaf in input_leaves if leaf.dim()), default=1)
        graph_bytes = num_rows * self.costs.graph_bytes if mode.grad and self.costs is not None else 0
        sent = {name: _tensors(extras[name]) for name in arguments_in(extras)}
        if self._module.spec.index == 0:  # other stages own their inputs alone, so writes into them need no return
            sent[POSITIONAL] = list(input_leaves)
        written = watch.written(sent, checks_values=checks_contents)
        self._check_read_later(written, one_by_one=CALLS in extras)
        return output, earlier_values, observed, watch, written, graph_bytes

    def _check_read_later(self, written: Iterable[str], *, one_by_one: bool) -> None:
        """Refuse writes into a keyword argument that later stages read, because each stage has its own copy."""
        # With `one_by_one`, the extras have values for single calls of blocks, which may share them.
        for name in written:
            if name in self._module.read_later or (one_by_one and name != POSITIONAL):
                raise ConfigError(
                    "blocks must not write into keyword arguments that others read, because each stage has a copy: "
                    f"a forward of stage {self._module.spec.index} wrote into {text_of(name)}. Have the block clone it."
                )

    def backward(
        self, graph: SavedGraph, gradients: serialization.Tree, mode: ComputeMode
    ) -> tuple[serialization.Tree, list[Tensor | None]]:
        """Compute gradients of inputs, encoded to travel, and of trainable parameters, from the outputs' gradients."""
        received = decoded(gradients, self._codecs.gradients, self._device)
        check_gradients(graph.outputs, received)
        compute = partial(self._differentiate, received)
        # Discard the statistics of blocks that a backward recomputes, because the forward recorded them.
        with self._states.entered(mode, backward=True), self._guarding_buffers(mode), modes.enter_backward_modes(mode):
            before = self._watch.snapshot()
            # A block that recomputes itself (`torch.utils.checkpoint`) draws in a backward. Unless it has
            # `checkpoint_contexts`, `KeyedRandom.next_key` then raises `ConfigError`. Such a block restores torch's
            # generators afterwards, so only the mode sees its draws.
            if graph.has_drawn:
                with KeyedRandom(0):
                    input_gradients, own_gradients = compute(graph)
            else:
                # A block that drew nothing in the forward draws nothing when it is recomputed. Therefore `_random` runs
                # a backward without the mode, unless an earlier backward drew. If torch's generators advance all the
                # same, it runs the backward again in the mode, with a new graph, because the first run freed the graph.
                with_new_graph = lambda: partial(compute, self.graph(graph.call))  # noqa: E731 - mypy infers it
                (input_gradients, own_gradients), _ = self._random.run(
                    kind="backward", seed=0, compute=partial(compute, graph), anew=with_new_graph
                )
            self._watch.undo(self._watch.changes(before))  # changes by blocks that the backward recomputed
        return to_send(encoded(input_gradients, self._codecs.gradients), self._device), own_gradients

    def _differentiate(
        self, gradients: Sequence[Tensor | None], graph: SavedGraph
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return gradients of the graph's inputs and of the trainable parameters; None if not wanted, or unused."""
        used = [
            (output, gradient if gradient.device == output.device else gradient.to(output))
            for output, gradient in zip(graph.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        indices = [i for i, leaf in enumerate(graph.inputs) if leaf.requires_grad]
        wanted = [*self.trainable, *(graph.inputs[i] for i in indices)]
        results: Sequence[Tensor | None] = [None] * len(wanted)
        if used and wanted:
            results = torch.autograd.grad(
                [output for output, _ in used], wanted, [gradient for _, gradient in used], allow_unused=True
            )
        input_gradients: list[Tensor | None] = [None] * len(graph.inputs)
        for index, gradient in zip(indices, results[len(self.trainable) :], strict=True):
            input_gradients[index] = gradient
        return input_gradients, list(results[: len(self.trainable)])

    @contextlib.contextmanager
    def _guarding_buffers(self, mode: ComputeMode) -> Iterator[BatchStatistics]:
        """Record batch norm statistics; raise `ConfigError` if a forward changes other buffers or parameters."""
        if not mode.training:  # no module of the stage is in train mode
            yield BatchStatistics()
            return
        statistics_ids = set(map(id, self._statistics.buffers))
        others = self._buffers_but(statistics_ids)  # keeps the buffers alive, so that their ids stay unique
        parameters = _registered(self._parameters)
        before = [(id(buffer), buffer._version) for buffer in others]
        versions = [parameter._version for parameter in parameters]
        with self._statistics.unchanged() as batch_statistics:
            yield batch_statistics
        if versions != [parameter._version for parameter in parameters]:
            names = [name for name, _ in self._module.named_stage_parameters()]
            raise ConfigError(
                "blocks must not write their parameters in their forward, as `nn.Embedding(max_norm=...)` does, "
                f"because replicas would then differ: one of {names[:5]} was written. Leave `max_norm` out, and "
                "renormalise in `on_train_batch_end`."
            )
        if before != [(id(buffer), buffer._version) for buffer in self._buffers_but(statistics_ids)]:
            names = [
                f"{name}.{key}"
                for name, module in self._named_modules.items()
                for key, buffer in module._buffers.items()
                if buffer is not None
                and id(buffer) not in statistics_ids
                and (id(buffer), buffer._version) not in before
            ]
            raise ConfigError(
                "blocks may change nothing but their output, because replicas would then differ: a forward of "
                f"stage {self._module.spec.index} changed the buffers {few(names)}. Update queues, running statistics "
                "and codebooks in `training_step`, or in a hook like `on_train_batch_end`. Only BatchNorm's "
                "buffers may change."
            )

    def _buffers_but(self, ids: Container[int]) -> list[Tensor]:
        """Return all buffers whose ids are not in `ids`."""
        return [buffer for buffer in _registered(self._buffers) if id(buffer) not in ids]


def _tensors(tree: serialization.Tree) -> list[Tensor]:
    """Return the tensors of a tree without encoded tensors."""
    return cast(list[Tensor], serialization.leaves(tree))


def _registered(registers: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    """Return the tensors of modules' registers. Iterating over modules would be slower, in each microbatch."""
    return [tensor for register in registers if register for tensor in register.values() if tensor is not None]


def check_gradients(outputs: Sequence[Tensor], gradients: Any) -> None:
    """Raise `ProtocolError` unless `gradients` is a list with a matching gradient, or None, for each output."""
    if not isinstance(gradients, list):
        raise ProtocolError(f"a backward must have a list of gradients, got {type(gradients).__name__}")
    if len(outputs) != len(gradients):
        raise ProtocolError(f"a stage with {len(outputs)} output tensors got {len(gradients)} gradients")
    for output, gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and not isinstance(gradient, Tensor):
            raise ProtocolError(f"the gradient of an output must be a tensor or None, got {type(gradient).__name__}")
        if gradient is not None and (gradient.shape, gradient.dtype) != (output.shape, output.dtype):
            raise ProtocolError(
                f"an output of shape {tuple(output.shape)} and {output.dtype} got a gradient of shape "
                f"{tuple(gradient.shape)} and {gradient.dtype}"
            )
