"""Computes a stage's blocks, forward and backward, and caches inputs and graphs; changes no weights and no sums."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_swarm.core.errors import ConfigError, ProtocolError
from lightning_swarm.core.readable import few
from lightning_swarm.model import autocast as modes
from lightning_swarm.model.fidelity.hooks import HOOKS, OBSERVED, recording
from lightning_swarm.model.fidelity.leftovers import Changes, ForwardWatch, Left, join, part_inputs, same_trees
from lightning_swarm.model.fidelity.module_states import ServerStates
from lightning_swarm.model.fidelity.written_inputs import (
    POSITIONAL,
    WRITTEN,
    CallWatch,
    arguments_in,
    text_of,
    written_places,
)
from lightning_swarm.model.inference.attention_cache import Shadow, is_in_session, without_cache
from lightning_swarm.model.inference.joint_attention import JointCache, attending_jointly, join_rows, split_rows
from lightning_swarm.model.partition import CALLS, StageModule
from lightning_swarm.model.random import KeyedOnDemand, KeyedRandom
from lightning_swarm.model.running_statistics import BatchStatistics, RunningStatistics
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codecs, decoded, encoded, on_cpu
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.reports import SampleCosts
from lightning_swarm.server.inference.adapters import Adapter
from lightning_swarm.server.sample_costs import measured


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Compare two buffers; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) or (one.is_floating_point() and one.allclose(other, 0.0, 0.0, equal_nan=True))


def _copied(leaf: Any) -> Any:
    return leaf.clone()


@dataclass(frozen=True)
class ForwardCall:
    """All inputs of a forward, enough to compute it again."""

    inputs: tuple[Any, ...]  # trees of tensors ``[microbatch, ...]``, as received
    extras: dict[str, Any]  # keyword arguments for the blocks that name them
    wants_grad: Sequence[bool]  # per input tensor, whether backward returns its gradient
    mode: ComputeMode
    seed: int  # key of all random draws
    is_probe: bool = False  # runs uncompiled, because a few calls do not repay compiling

    @property
    def num_samples(self) -> int:
        """The number of samples in the microbatch, which was cut along the first dimension."""
        return next((leaf.shape[0] for leaf in serialization.leaves(self.inputs) if leaf.ndim), 0)


@dataclass(eq=False)
class SessionPart:
    """The arguments of a stage's blocks for one step of a session."""

    hidden: serialization.Tree  # the first block's input ``[rows, tokens, ...]``, as received
    extras: Mapping[str, Any]  # the blocks' other arguments; the cache itself never travels
    cache: Any = None  # receives these tokens' keys and values; None: the blocks use no cache
    adapter: Adapter | None = None  # the adapter of the session's client

    @property
    def rows(self) -> int:
        """The number of rows."""
        return serialization.leaves(self.hidden)[0].shape[0]

    @property
    def tokens(self) -> int:
        """The number of tokens in each row."""
        return serialization.leaves(self.hidden)[0].shape[1]


@dataclass(frozen=True)
class SavedGraph:
    """The part of a forward that its backward needs."""

    inputs: list[Tensor]  # leaves of the input tree; `requires_grad` is set where a gradient is wanted
    outputs: list[Tensor]  # leaves of the output tree and of values left on modules, with autograd history
    has_drawn: bool  # whether random numbers were drawn
    seen: Tensor | None  # statistics of batch norms
    call: ForwardCall  # to compute the graph again: a backward frees it, and may run twice


@dataclass(frozen=True)
class ForwardResult:
    """A forward's result."""

    output: serialization.Tree  # detached, as it travels
    requires_grad: list[bool]  # one flag per output tensor
    graph: SavedGraph | None
    graph_bytes: int


@dataclass(frozen=True)
class _BlockRun:
    """The results of a run of the blocks."""

    output: Any
    earlier_values: Any  # values that earlier stages left on modules, with a gradient
    observed: dict[str, list[Any]]  # module -> arguments and outputs of each call, if it has observing hooks
    arguments: CallWatch
    written: dict[str, Any]  # argument -> writes into it
    graph_bytes: int
    has_drawn: bool
    seen: Tensor | None  # statistics of batch norms
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
        self._random = KeyedOnDemand(device)
        self._named_modules = dict(module.named_block_modules())
        self._modules = list(module.modules())
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
        return replace(result, output=self._to_send(join(encoded(result.output, self._codecs.activations), left)))

    def session_steps(
        self, parts: Sequence[SessionPart], mode: ComputeMode, first_block: int, *, seed: int | None = None
    ) -> list[serialization.Tree]:
        """Run the blocks on the next tokens of several sessions in one forward; return each session's output.

        Args:
            parts: The blocks' arguments for each session. `CannotJoin` if they cannot be rows of one forward.
            mode: A mode without gradients.
            first_block: The number of blocks in the stages before.
            seed: Key of all random draws; None if no module is in train mode.
        """
        codec = self._codecs.activations
        arguments = [self._session_arguments(part) for part in parts]
        caches, rows = [part.cache for part in parts], [part.rows for part in parts]
        joint = caches[0] if len(parts) == 1 else JointCache(caches, rows)
        with torch.no_grad(), self._in_session(mode, None if seed is None else KeyedRandom(seed)):
            inputs, keywords = arguments[0] if len(parts) == 1 else join_rows(arguments, rows)
            shadows = [
                Shadow(part.cache, first_block=first_block, rows=part.rows, length=part.tokens)
                for part in parts
                if part.cache is not None
            ]
            keywords = {name: joint if is_in_session(value) else value for name, value in keywords.items()}
            with contextlib.nullcontext() if len(parts) == 1 else attending_jointly(self._modules):
                output = without_cache(self._module.uncompiled((inputs,), keywords), joint)
            outputs = [output] if len(parts) == 1 else split_rows(output, rows)
            for shadow in shadows:  # of the caches: extends the lengths of later blocks' layers
                shadow.follow()
        return [self._to_send(encoded(output, codec)) for output in outputs]

    def session_blocks(
        self, part: SessionPart, mode: ComputeMode, first_block: int, *, seed: int | None = None
    ) -> Generator[None, None, serialization.Tree]:
        """Compute a step as `session_steps` does, one block for each `next`; return the output as it travels."""
        with torch.no_grad():
            hidden, keywords = self._session_arguments(part)
        keywords = {name: part.cache if is_in_session(value) else value for name, value in keywords.items()}
        shadow, num_drawn = None, 0
        if part.cache is not None:
            shadow = Shadow(part.cache, first_block=first_block, rows=part.rows, length=part.tokens)
        for number in range(len(self._module.blocks)):
            if number:
                yield
            # Continue the draws of the blocks before, as in a forward of all blocks.
            drawing = None if seed is None else KeyedRandom(seed, first_draw=num_drawn)
            with torch.no_grad(), self._in_session(mode, drawing):
                hidden = self._module.run_block(number, (hidden,), keywords)
            num_drawn = 0 if drawing is None else drawing.draw
        with torch.no_grad():
            output = without_cache(hidden, part.cache)
            if shadow is not None:
                shadow.follow()
            return self._to_send(encoded(output, self._codecs.activations))

    @contextlib.contextmanager
    def _in_session(self, mode: ComputeMode, drawing: KeyedRandom | None) -> Iterator[None]:
        """Apply the modes of a step of a session."""
        keeping = self._keeping_buffers() if mode.training else contextlib.nullcontext()
        entering = modes.enter_modes(mode, self._device.type)
        with self._states.entered(mode), keeping, entering, drawing or contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _keeping_buffers(self) -> Iterator[None]:
        """Run a forward on copies of the modules' buffers; raise `ConfigError` if it changes any of them."""
        own = [(module._buffers, dict(module._buffers)) for module in self._modules if module._buffers]
        copies = {id(buffer): buffer.clone() for _, each in own for buffer in each.values() if buffer is not None}
        given = [{name: copies.get(id(buffer)) for name, buffer in before.items()} for _, before in own]
        for (buffers, _), copied in zip(own, given, strict=True):
            buffers.update(copied)
        try:
            yield
            changed = {
                name
                for (buffers, before), copied in zip(own, given, strict=True)
                for name in {*buffers, *copied}
                # Not by `_version`, which kernels of batch norms do not raise.
                if buffers.get(name) is not copied.get(name) or not _equal(copied[name], before[name])
            }
        finally:
            for buffers, before in own:
                buffers.clear()
                buffers.update(before)
        if changed:
            raise ConfigError(
                "text must be generated without changes to the model, and in train mode its blocks change "
                f"{few(sorted(changed))}. Generate under `model.eval()`."
            )

    def _session_arguments(self, part: SessionPart) -> tuple[Any, dict[str, Any]]:
        """Copy a step's arguments, because a block may work in place, and a replay sends the originals again."""
        inputs = serialization.transform(decoded(part.hidden, self._codecs.activations, self._device), _copied)
        structure, tensors = serialization.flatten(dict(part.extras))
        return inputs, serialization.unflatten(structure, [tensor.to(self._device, copy=True) for tensor in tensors])

    def _forward(self, call: ForwardCall) -> tuple[ForwardResult, Left]:
        """Run the blocks; return the output, still on its device, and the values left on modules."""
        mode = call.mode
        inputs, left = part_inputs(call.inputs)
        names_in_input = left.take_output_note()
        structure, tensors = serialization.flatten(
            decoded((inputs, left.differentiable), self._codecs.activations, self._device)
        )
        if len(tensors) != len(call.wants_grad):
            raise ProtocolError(f"{len(tensors)} input tensors came with {len(call.wants_grad)} flags")
        leaves = [
            tensor.detach().requires_grad_(mode.grad and wants and serialization.is_differentiable(tensor))
            for tensor, wants in zip(tensors, call.wants_grad, strict=True)
        ]
        run_blocks = partial(self._watched, structure, leaves, call)
        # A close look takes longer, and also sees contents of containers and modules around the stage.
        run = run_blocks(closely=self._watch.is_first((mode.training, mode.grad)))
        if self._watch.has_new_changes(run.changes):
            second = run_blocks(closely=True)  # a second run shows which changes repeat
            self._watch.learn(run.changes, second.changes, same_output=same_trees(run.output, second.output))
        left.differentiable = run.earlier_values
        self._watch.take(run.changes, left)
        for name, calls in run.observed.items():
            left.add(name, OBSERVED, calls)
        self._take_written(run.written, left, names_in_input)
        left.note_output(run.output, run.arguments.visible(names_in_input, is_first=self._module.spec.index == 0))
        structure, outputs = serialization.flatten((run.output, left.differentiable))
        output, differentiable = serialization.unflatten(structure, [tensor.detach() for tensor in outputs])
        result = ForwardResult(
            output=output,
            requires_grad=[tensor.requires_grad for tensor in outputs],
            graph=SavedGraph(leaves, outputs, run.has_drawn, run.seen, call) if mode.grad else None,
            graph_bytes=run.graph_bytes,
        )
        return result, Left(differentiable, left.others, left.refused)

    def _watched(
        self, structure: serialization.Structure, leaves: Sequence[Tensor], call: ForwardCall, *, closely: bool
    ) -> _BlockRun:
        """Run the blocks in the modes of the call, and find the changes that they leave on modules."""
        mode = call.mode
        compute = partial(self._run, structure, leaves, call, closely=closely)
        states = mode.modules.modes.items() if mode.modules is not None else ()
        kind = ("forward", mode.training, frozenset(states))
        with self._states.entered(mode):
            before = self._watch.snapshot(closely=closely)
            with self._seeing(mode) as seen, modes.enter_modes(mode, self._device.type):
                found, has_drawn = self._random.run(kind, call.seed, compute)
            changes = self._watch.changes(before)
        return _BlockRun(*found, has_drawn=has_drawn, seen=seen.values, changes=changes)

    def _take_written(
        self, written: Mapping[str, Any], left: Left, names_in_input: Mapping[int, Sequence[str]]
    ) -> None:
        """Add the blocks' writes into arguments to `left`; refuse writes into tensors shared with other machines."""
        for argument, found in written.items():
            if argument != POSITIONAL or self._module.spec.index == 0:
                left.add(next(filter(None, self._module.block_names)), WRITTEN + argument, found)
            elif names := [name for index in written_places(found) for name in names_in_input.get(index, ())]:
                raise ConfigError(
                    "a block must not write into its input if other code holds the same tensor: stage "
                    f"{self._module.spec.index} begins with a block that works in place, and {few(names)} would change "
                    "with it on one machine. Leave `inplace=True` out there, or clone the tensor first."
                )

    def _run(
        self, structure: serialization.Structure, leaves: Sequence[Tensor], call: ForwardCall, *, closely: bool
    ) -> tuple[Any, Any, dict[str, list[Any]], CallWatch, dict[str, Any], int]:
        """Return the output, earlier stages' values, observed calls, arguments, writes into them, and graph bytes."""
        mode, extras = call.mode, dict(call.extras)
        hooks_at_trainer = extras.pop(HOOKS, None)  # the trainer's description of its hooks
        extra_structure, extra_tensors = serialization.flatten(extras)
        # Copy inputs and extras, because a block may work in place. A recomputation needs them unchanged, and so does
        # each microbatch that shares the extras.
        shared = [tensor.to(self._device, copy=True) for tensor in extra_tensors]
        copies = [leaf.clone() for leaf in leaves]
        inputs, earlier_values = serialization.unflatten(structure, copies)
        keywords = serialization.unflatten(extra_structure, shared)
        watch = CallWatch(inputs, keywords)
        module = self._module.uncompiled if call.is_probe else self._module
        run = partial(module, inputs, keywords)
        own_leaves = leaves[: len(watch.tensors[POSITIONAL])]
        with recording(self._named_modules, hooks_at_trainer, self._module.spec.index) as observed:
            if mode.grad and self.costs is None:
                own = [parameter for _, parameter in self._module.named_stage_parameters()]
                output, self.costs = measured(run, own, own_leaves, shared)
            else:
                output = run()
        num_rows = max((leaf.shape[0] for leaf in own_leaves if leaf.dim()), default=1)
        graph_bytes = num_rows * self.costs.graph_bytes if mode.grad and self.costs is not None else 0
        sent = {name: serialization.flatten(extras[name])[1] for name in arguments_in(extras)}
        if self._module.spec.index == 0:  # other stages own their inputs alone, so writes into them need no return
            sent[POSITIONAL] = list(own_leaves)
        written = watch.written(sent, closely=closely)
        self._check_read_later(written, one_by_one=CALLS in extras)
        return output, earlier_values, observed, watch, written, graph_bytes

    def _check_read_later(self, written: Iterable[str], *, one_by_one: bool) -> None:
        """Refuse writes into a keyword argument that later stages read, because each stage has its own copy.

        With `one_by_one`, the extras have values for single calls of blocks, which may share them.
        """
        for name in written:
            if name in self._module.read_later or (one_by_one and name != POSITIONAL):
                raise ConfigError(
                    "blocks must not write into keyword arguments that others read, for each stage has its own copy: "
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
        with self._states.entered(mode, backward=True), self._seeing(mode), modes.enter_backward_modes(mode):
            before = self._watch.snapshot()
            # A block that recomputes itself (`torch.utils.checkpoint`) draws in a backward. Unless it has
            # `checkpoint_contexts`, `KeyedRandom.next_key` then raises `ConfigError`. Such a block restores torch's
            # generators afterwards, so only the mode sees its draws.
            if graph.has_drawn:
                with KeyedRandom(0):
                    found, own = compute(graph)
            else:
                # A block that drew nothing in the forward draws nothing when it is recomputed. So the mode may be left
                # out, if it saw no draw in an earlier backward. If torch's generators move all the same, the backward
                # runs again in the mode. The first run has freed the graph, so the forward is computed again, too.
                with_new_graph = lambda: partial(compute, self.graph(graph.call))  # noqa: E731 - mypy infers it
                found, own = self._random.run("backward", 0, partial(compute, graph), with_new_graph)[0]
            self._watch.undo(self._watch.changes(before))  # changes by blocks that the backward recomputed
        return self._to_send(encoded(found, self._codecs.gradients)), own

    def _to_send(self, tree: serialization.Tree) -> serialization.Tree:
        """Copy tensors to the CPU, from where they are sent."""
        # On the compute thread, because this waits for the GPU, and the loop must keep answering peers.
        return tree if self._device.type == "cpu" else on_cpu(tree)

    def _differentiate(
        self, gradients: Sequence[Tensor | None], graph: SavedGraph
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the graph's inputs, and of the trainable parameters; None: not wanted, or unused."""
        used = [
            (output, gradient if gradient.device == output.device else gradient.to(output))
            for output, gradient in zip(graph.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        indices = [i for i, leaf in enumerate(graph.inputs) if leaf.requires_grad]
        wanted = [*self.trainable, *(graph.inputs[i] for i in indices)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if used and wanted:
            found = torch.autograd.grad(
                [output for output, _ in used], wanted, [gradient for _, gradient in used], allow_unused=True
            )
        input_gradients: list[Tensor | None] = [None] * len(graph.inputs)
        for index, gradient in zip(indices, found[len(self.trainable) :], strict=True):
            input_gradients[index] = gradient
        return input_gradients, list(found[: len(self.trainable)])

    @contextlib.contextmanager
    def _seeing(self, mode: ComputeMode) -> Iterator[BatchStatistics]:
        """Record batch norm statistics; raise `ConfigError` if a forward changes other buffers or parameters."""
        if not mode.training:  # no module of the stage is in train mode
            yield BatchStatistics()
            return
        own = set(map(id, self._statistics.buffers))
        others = self._buffers_but(own)  # keeps the buffers alive, so that their ids stay unique
        parameters = _registered([module._parameters for module in self._modules])
        before = [(id(buffer), buffer._version) for buffer in others]
        versions = [parameter._version for parameter in parameters]
        with self._statistics.kept() as seen:
            yield seen
        if versions != [parameter._version for parameter in parameters]:
            names = [name for name, _ in self._module.named_stage_parameters()]
            raise ConfigError(
                "blocks must not write their parameters in their forward, as `nn.Embedding(max_norm=...)` does, for "
                f"peers of a stage would come to differ: one of {names[:5]} was written. Leave `max_norm` out, and "
                "renormalise in `on_train_batch_end`."
            )
        if before != [(id(buffer), buffer._version) for buffer in self._buffers_but(own)]:
            names = [
                f"{name}.{key}"
                for name, module in self._named_modules.items()
                for key, buffer in module._buffers.items()
                if buffer is not None and id(buffer) not in own and (id(buffer), buffer._version) not in before
            ]
            raise ConfigError(
                "blocks may change nothing but their output, for peers of a stage would come to differ: a forward of "
                f"stage {self._module.spec.index} changed the buffers {few(names)}. Keep queues, running statistics, "
                "codebooks in training_step, or write them in a hook like `on_train_batch_end`; BatchNorm's are kept."
            )

    def _buffers_but(self, own: Container[int]) -> list[Tensor]:
        """Return all buffers whose ids are not in `own`."""
        return [
            buffer for buffer in _registered([module._buffers for module in self._modules]) if id(buffer) not in own
        ]


def _registered(registers: Iterable[Mapping[str, Tensor | None]]) -> list[Tensor]:
    """Return the tensors of modules' registers; runs twice per microbatch, and is faster than walking modules."""
    return [tensor for register in registers if register for tensor in register.values() if tensor is not None]


def check_gradients(outputs: Sequence[Tensor], gradients: Any) -> None:
    """Raise `ProtocolError` unless `gradients` is a list with a matching gradient, or None, for each output."""
    if not isinstance(gradients, list):
        raise ProtocolError(f"a backward must bring a list of gradients, got {type(gradients).__name__}")
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


@dataclass(eq=False)
class CachedForward:
    """A forward that is kept for its backward."""

    call: ForwardCall
    busy_s: float = 0.0  # seconds that the forward took
    graph: SavedGraph | None = None
    graph_bytes: int = 0
    input_bytes: int = 0
    output_digest: bytes = b""  # set by a `WorkLog`

    def take_graph(self) -> SavedGraph | None:
        """Return the graph and drop it, because a backward frees it even if it fails half-way."""
        graph, self.graph = self.graph, None
        return graph


# Backwards come in the order of their forwards, so the oldest entries are needed first. New entries that do not fit
# are therefore not kept, rather than evicting older entries. A missing entry is computed again.
class ActivationCache:
    """Kept forwards by ticket name, within a byte budget; used on the event loop, not on the compute thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: dict[str, CachedForward] = {}
        self.used_bytes = 0
        self.num_dropped_graphs = 0

    @property
    def full(self) -> bool:
        """Whether the budget is used up; then outputs should be dropped as soon as they are fetched."""
        return self.used_bytes >= self._max_bytes

    def keep(self, name: str, kept: CachedForward) -> None:
        """Keep the inputs if they fit, and the graph if it fits beside them."""
        self.pop(name)
        if self.used_bytes + kept.input_bytes + kept.graph_bytes > self._max_bytes:
            self.num_dropped_graphs += 1
            kept.graph, kept.graph_bytes = None, 0
        if self.used_bytes + kept.input_bytes > self._max_bytes:
            return
        self._kept[name] = kept
        self.used_bytes += kept.input_bytes + kept.graph_bytes

    def pop(self, name: str) -> CachedForward | None:
        """Remove and return an entry."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.used_bytes -= kept.input_bytes + kept.graph_bytes
        return kept

    def drop(self, prefix: str) -> None:
        """Remove all entries whose names begin with `prefix`."""
        for name in [name for name in self._kept if name.startswith(prefix)]:
            self.pop(name)
