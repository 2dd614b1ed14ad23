"""Microbatches through a stage's blocks, forward and backward. Nothing of the stage is changed by it.

Everything here runs on the compute thread, one call at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.model import autocast as modes
from lightning_swarm.model.partition import StageModule, computing
from lightning_swarm.model.random import KeyedOnDemand, KeyedRandom
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import Codecs, decoded, encoded, number_bytes
from lightning_swarm.protocol.messages.calls import ComputeMode
from lightning_swarm.protocol.messages.reports import SampleCosts
from lightning_swarm.server.batch_norm import BatchStatistics, RunningStatistics

_BOTH_WAYS: Final = 3.0
"""Times what the forward computes: the backward takes twice as much."""


class FlopCounter(TorchDispatchMode):
    """Counts what the products of matrices inside compute, as `FlopCounterMode` does, but on this thread alone.

    That one's hooks are on the modules of all threads.

    Attributes:
        flop: So far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.flop = 0.0

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True  # a stage is to be compiled in its first forward, too

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count: Callable[..., Any] | None = flop_registry.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.flop += count(*args, **(kwargs or {}), out_val=out)
        return out


class SavedTensorCounter:
    """Counts what autograd keeps for a backward of the forward inside, but for some tensors' own memory."""

    def __init__(self, own: Sequence[Tensor]) -> None:
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._saved: dict[int, int] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside them it is counted."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._saved[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a saved output would otherwise hold itself alive through its own graph

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        """So far."""
        return sum(self._saved.values())


def of_sample(
    inputs: Sequence[Tensor],
    extras: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    forward_flop: float,
    graph_bytes: int,
) -> SampleCosts:
    """A sample's share of a microbatch. Its bytes are those of tensors as they are computed with, not as they travel.

    Args:
        inputs: Of the blocks; those that want a gradient require it.
        extras: Beside them; what has another first dimension is shared by all microbatches.
        outputs: Of the blocks.
        forward_flop: Of the microbatch.
        graph_bytes: Likewise.
    """
    num_rows = max((len(one) for one in inputs if one.dim()), default=1) or 1
    return SampleCosts(
        flop=_BOTH_WAYS * forward_flop / num_rows,
        input_bytes=_bytes(inputs) // num_rows,
        extra_bytes=_bytes([one for one in extras if one.dim() and len(one) == num_rows]) // num_rows,
        gradient_bytes=_bytes([one for one in inputs if one.requires_grad]) // num_rows,
        output_bytes=_bytes(outputs) // num_rows,
        graph_bytes=graph_bytes // num_rows,
        input_number_bytes=number_bytes(inputs),
        output_number_bytes=number_bytes(outputs),
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class SavedGraph:
    """What backward needs of a forward."""

    inputs: list[Tensor]  # leaves of the input tree; those that want a gradient require it
    outputs: list[Tensor]  # leaves of the output tree, with their autograd history
    has_drawn: bool  # random numbers
    seen: Tensor | None  # by batch norms
    again: Callable[[], SavedGraph]  # the same graph once more; backward leaves nothing of this one


@dataclass(frozen=True)
class ForwardResult:
    """A forward's result."""

    output: serialization.Tree  # detached, as it travels
    requires_grad: list[bool]  # of its tensors
    graph: SavedGraph | None
    graph_bytes: int


class Computation:
    """What a stage's blocks compute.

    Args:
        module: The stage's run of blocks.
        device: Where it computes.
        codecs: What comes in and goes out is encoded by.
        statistics: Of its batch norms.

    Attributes:
        trainable: The parameters that backward gives gradients of.
        costs: Of a sample, seen in the first forward that keeps a graph; None: there was none yet.
    """

    def __init__(
        self, module: StageModule, device: torch.device, codecs: Codecs, statistics: RunningStatistics
    ) -> None:
        self._module = module
        self._device = device
        self._codecs = codecs
        self._statistics = statistics
        self._random = KeyedOnDemand(device)
        self.costs: SampleCosts | None = None
        self.trainable: list[nn.Parameter] = []

    def train(self, trainable: list[nn.Parameter]) -> None:
        """Give gradients of these parameters from now on."""
        self.trainable = trainable
        self.costs = None  # of a graph that begins elsewhere now

    def forward(
        self, inputs: tuple[Any, ...], extras: dict[str, Any], wants_grad: Sequence[bool], mode: ComputeMode, seed: int
    ) -> ForwardResult:
        """Run the blocks.

        Args:
            inputs: Positional inputs, trees of tensors ``[microbatch, ...]``, as they came.
            extras: Keyword arguments for the blocks that name them.
            wants_grad: For each tensor of `inputs`, whether backward shall give its gradient.
            mode: The trainer's mode.
            seed: Of all random draws.
        """
        found = self._forward(inputs, extras, wants_grad, mode, seed)
        return replace(found, output=encoded(found.output, self._codecs.activations))

    def _forward(
        self, inputs: tuple[Any, ...], extras: dict[str, Any], wants_grad: Sequence[bool], mode: ComputeMode, seed: int
    ) -> ForwardResult:
        """`forward`, with an output that is not encoded."""
        structure, tensors = serialization.flatten(decoded(inputs, self._codecs.activations, self._device))
        if len(tensors) != len(wants_grad):
            raise ProtocolError(f"{len(tensors)} input tensors came with {len(wants_grad)} flags")
        leaves = [
            tensor.detach().requires_grad_(mode.grad and wants and serialization.is_differentiable(tensor))
            for tensor, wants in zip(tensors, wants_grad, strict=True)
        ]
        compute = partial(self._run, structure, leaves, extras, mode)
        self._module.train(mode.training)
        with self._seeing(mode) as seen, computing(), modes.entered(mode, self._device.type):
            (output, graph_bytes), has_drawn = self._random.run(("forward", mode.training), seed, compute)
        _, outputs = serialization.flatten(output)

        def again() -> SavedGraph:
            graph = self._forward(inputs, extras, wants_grad, mode, seed).graph
            assert graph is not None
            return graph

        return ForwardResult(
            output=serialization.transform(output, _detached),
            requires_grad=[tensor.requires_grad for tensor in outputs],
            graph=SavedGraph(leaves, outputs, has_drawn, seen.values, again) if mode.grad else None,
            graph_bytes=graph_bytes,
        )

    def _run(
        self, structure: serialization.Structure, leaves: Sequence[Tensor], extras: dict[str, Any], mode: ComputeMode
    ) -> tuple[Any, int]:
        """The blocks' output, and the bytes of its graph."""
        extra_structure, extra_tensors = serialization.flatten(extras)
        # Copied and cloned: a block may work in place, but both are kept for a recomputation, and what is shared
        # by all microbatches must reach each as it was sent.
        shared = [tensor.to(self._device, copy=True) for tensor in extra_tensors]
        run = partial(
            self._module,
            serialization.unflatten(structure, [leaf.clone() for leaf in leaves]),
            serialization.unflatten(extra_structure, shared),
        )
        if mode.grad and self.costs is None:
            output, self.costs = self._measured(run, leaves, shared)
        else:
            output = run()
        num_rows = max((len(leaf) for leaf in leaves if leaf.dim()), default=1)
        return output, num_rows * self.costs.graph_bytes if mode.grad and self.costs is not None else 0

    def backward(
        self, graph: SavedGraph, gradients: serialization.Tree, mode: ComputeMode
    ) -> tuple[serialization.Tree, list[Tensor | None]]:
        """Gradients of the input tensors, as they travel, and of the trainable parameters; adds nothing.

        Args:
            graph: Of the forward.
            gradients: For each output tensor its gradient of the same shape, or None, as they came.
            mode: The trainer's mode in the forward.
        """
        received = decoded(gradients, self._codecs.gradients, self._device)
        _check_gradients(graph.outputs, received)

        def compute(graph: SavedGraph) -> tuple[list[Tensor | None], list[Tensor | None]]:
            return self._differentiate(graph, received)

        # Norms in blocks that are computed again in a backward see nothing new.
        with self._seeing(mode), computing(), modes.entered_backward(mode):
            # A backward that draws is an error. A block that recomputes in it what it drew in its forward puts torch's
            # generators back afterwards, so only the mode notices.
            if graph.has_drawn:
                with KeyedRandom(0):
                    found, own = compute(graph)
            else:
                again = lambda: partial(compute, graph.again())  # noqa: E731 - mypy infers it
                found, own = self._random.run("backward", 0, partial(compute, graph), again)[0]
        return encoded(found, self._codecs.gradients), own

    def _differentiate(
        self, graph: SavedGraph, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        used = [
            (output, gradient.to(output))
            for output, gradient in zip(graph.outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        places = [i for i, leaf in enumerate(graph.inputs) if leaf.requires_grad]
        wanted = [*self.trainable, *(graph.inputs[i] for i in places)]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if used and wanted:
            found = torch.autograd.grad(
                [output for output, _ in used], wanted, [gradient for _, gradient in used], allow_unused=True
            )
        input_gradients: list[Tensor | None] = [None] * len(graph.inputs)
        for place, gradient in zip(places, found[len(self.trainable) :], strict=True):
            input_gradients[place] = gradient
        return input_gradients, list(found[: len(self.trainable)])

    @contextlib.contextmanager
    def _seeing(self, mode: ComputeMode) -> Iterator[BatchStatistics]:
        """Have norms say what they see, and refuse other blocks that keep something of a forward."""
        if not mode.training:
            yield BatchStatistics()
            return
        own = set(map(id, self._statistics.buffers))
        others = [buffer for buffer in self._module.buffers() if id(buffer) not in own]
        before = [buffer._version for buffer in others]
        with self._statistics.kept() as seen:
            yield seen
        if before != [buffer._version for buffer in others]:
            raise ProtocolError(
                f"a block of stage {self._module.spec.index} changed a buffer in its forward; peers of the stage would "
                "come to differ. Blocks may change nothing but their output: keep running statistics in training_step."
            )

    def _measured(
        self, run: Callable[[], Any], inputs: Sequence[Tensor], extras: Sequence[Tensor]
    ) -> tuple[Any, SampleCosts]:
        """What `run` gives, and what it costs a sample; that of others is in proportion to their rows."""
        own = [parameter for _, parameter in self._module.named_stage_parameters()]
        saved, flops = SavedTensorCounter(own), FlopCounter()
        with saved.hooks(), flops:
            output = run()
        outputs = serialization.flatten(output)[1]
        return output, of_sample(inputs, extras, outputs, forward_flop=flops.flop, graph_bytes=saved.num_bytes)


def _detached(leaf: Tensor | serialization.Encoded) -> Tensor | serialization.Encoded:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _check_gradients(outputs: Sequence[Tensor], gradients: Any) -> None:
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
