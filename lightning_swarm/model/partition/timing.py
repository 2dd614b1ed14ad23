"""Measures the time of each block of a pipeline on this machine, with one example."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.nn import accepted_keywords
from lightning_swarm.model.partition.blocks import Blocks
from lightning_swarm.protocol import serialization

_NUM_REPEATS = 5

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def time_costs(
    model: nn.Module,
    blocks: Blocks,
    example: Any,  # `example_input_array`; arguments of the pipelined module if the model defines no forward
    *,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,  # around forwards, for autocast
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, ...]:
    """Measure the nanoseconds of each block's forward and backward: the median of a few runs after a first run."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _undisturbed(model, device), context():
        inputs = _inputs(model, blocks, example_arguments(example))

    def measure(block: nn.Module, arguments: Arguments) -> int:
        times = []
        for _ in range(1 + _NUM_REPEATS):
            call = prepare_call(block, arguments, context)
            synchronize(device)
            start_s = clock()
            call()
            synchronize(device)
            times.append(clock() - start_s)
        return round(statistics.median(times[1:]) * 1e9)

    with _undisturbed(model, device, evaluating=False), torch.enable_grad():
        return tuple(measure(*pair) for pair in zip(blocks.modules, inputs, strict=True))


def example_arguments(example: Any) -> Arguments:
    """Split an `example_input_array` into arguments and keyword arguments, as Lightning does."""
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _inputs(model: nn.Module, blocks: Blocks, example: Arguments) -> list[Arguments]:
    """Return the arguments that each block gets for an example."""
    if blocks.root is model:  # the model itself is the chain of blocks
        return _chained(blocks, example)
    if not blocks.one_by_one:  # the model calls the chain as one module: record that call, then run the chain
        return _chained(blocks, _run_forward(model, [blocks.root], blocks, example)[0])
    # The model's own forward calls each block of a list: record each call.
    return _run_forward(model, list(blocks.modules), blocks, example)


def _chained(blocks: Blocks, arguments: Arguments) -> list[Arguments]:
    """Run the blocks one after the other, and return the arguments of each."""
    args, extras = arguments
    inputs = []
    for block in blocks.modules:
        named = accepted_keywords(block)
        inputs.append((args, {name: value for name, value in extras.items() if name in named}))
        args = (block(*inputs[-1][0], **inputs[-1][1]),)
    return inputs


@contextlib.contextmanager
def recorded_calls(modules: Iterable[nn.Module]) -> Iterator[dict[int, tuple[Arguments, Any]]]:
    """Record the arguments and the output of each module's first call inside, by its `id`."""
    calls: dict[int, tuple[Arguments, Any]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(id(module), ((args, kwargs), output))

    handles = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _run_forward(model: nn.Module, modules: list[nn.Module], blocks: Blocks, example: Arguments) -> list[Arguments]:
    """Run the model's own forward, and return the arguments of the first call of each of `modules`."""
    with recorded_calls(modules) as calls:
        try:
            model(*example[0], **example[1])
        except NotImplementedError:  # the model defines no forward
            if not blocks.one_by_one:
                return [example]  # the arguments of the pipelined module
    missing = [module for module in modules if id(module) not in calls]
    if missing:
        raise ConfigError(
            f"`split='time'` runs {type(model).__name__}.forward once with `example_input_array`, which must go "
            f"through {blocks.root_name!r}: {len(missing)} of its modules were not called. Call them in `forward`, or "
            "use `split='parameters'`."
        )
    return [calls[id(module)][0] for module in modules]


def prepare_call(
    block: nn.Module, arguments: Arguments, context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
) -> Callable[[], None]:
    """Return a function that runs one forward and backward of a block, on copies of the arguments."""
    structure, tensors = serialization.flatten(arguments)
    leaves = [tensor.detach().requires_grad_(serialization.is_differentiable(tensor)) for tensor in tensors]
    # Cloned, because a block may write in place, which autograd refuses for leaves.
    args, kwargs = serialization.unflatten(structure, [leaf.clone() for leaf in leaves])
    inputs = [tensor for tensor in [*block.parameters(), *leaves] if tensor.requires_grad]

    def call() -> None:
        with context():
            output = block(*args, **kwargs)
        outputs = [tensor for tensor in serialization.flatten(output)[1] if tensor.requires_grad]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(tensor) for tensor in outputs], allow_unused=True)

    return call


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _undisturbed(model: nn.Module, device: torch.device, *, evaluating: bool = True) -> Iterator[None]:
    """Run the body without gradients, in eval mode if `evaluating`, and restore the model's state afterwards.

    The state is the random state, the train flags and, unless `evaluating`, buffers, which a forward may change.
    """
    flags = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not evaluating]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        if evaluating:
            model.eval()
        try:
            yield
        finally:
            for module, training in flags.items():
                module.training = training
            for buffer, before in buffers:
                buffer.copy_(before)
