"""What the blocks of a pipeline cost on this machine, measured with one example."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.nn import accepted_keywords
from lightning_swarm.model.partition.blocks import Blocks
from lightning_swarm.protocol import serialization

_NUM_REPEATS = 5

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def time_costs(
    model: nn.Module,
    blocks: Blocks,
    example: Any,
    *,
    context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, ...]:
    """Nanoseconds of each block for a forward and a backward: the median of a few, after one that does not count.

    Args:
        model: The LightningModule, with its weights, where it computes. It is left as it is, random generators too.
        blocks: What is cut.
        example: What `model.forward` takes: a value, a tuple of them, or a dict of keyword arguments. If the model has
            no forward, what the pipelined module takes.
        context: Entered around forwards, for autocast.
        clock: Seconds.

    Raises:
        ConfigError: The example does not lead through the blocks.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _undisturbed(model, device), context():
        inputs = _inputs(model, blocks, _arguments(example))

    def measure(block: nn.Module, arguments: _Arguments) -> int:
        times = [_once(block, arguments, context, clock, device) for _ in range(1 + _NUM_REPEATS)]
        return round(statistics.median(times[1:]) * 1e9)

    with _undisturbed(model, device, evaluating=False), torch.enable_grad():
        return tuple(measure(*pair) for pair in zip(blocks.modules, inputs, strict=True))


def _arguments(example: Any) -> _Arguments:
    """As Lightning passes `example_input_array` on."""
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _inputs(model: nn.Module, blocks: Blocks, example: _Arguments) -> list[_Arguments]:
    """What each block is called with."""
    if blocks.root is model:
        return _chained(blocks, example)
    if not blocks.one_by_one:
        return _chained(blocks, _seen(model, [blocks.root], blocks, example)[0])
    return _seen(model, list(blocks.modules), blocks, example)


def _chained(blocks: Blocks, arguments: _Arguments) -> list[_Arguments]:
    args, extras = arguments
    inputs = []
    for block in blocks.modules:
        named = accepted_keywords(block)
        inputs.append((args, {name: value for name, value in extras.items() if name in named}))
        args = (block(*inputs[-1][0], **inputs[-1][1]),)
    return inputs


def _seen(model: nn.Module, modules: list[nn.Module], blocks: Blocks, example: _Arguments) -> list[_Arguments]:
    """What `modules` are called with in the model's own forward, each for the first time."""
    seen: dict[int, _Arguments] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault(id(module), (args, kwargs))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules]
    try:
        model(*example[0], **example[1])
    except NotImplementedError:  # a forward that nobody wrote
        if not blocks.one_by_one:
            return [example]
    finally:
        for handle in handles:
            handle.remove()
    missing = [module for module in modules if id(module) not in seen]
    if missing:
        raise ConfigError(
            f"`split='time'` runs {type(model).__name__}.forward once with `example_input_array`, which must go "
            f"through {blocks.root_name!r}: {len(missing)} of its modules were not called. Define `forward` so that it "
            "does, or use `split='parameters'`."
        )
    return [seen[id(module)] for module in modules]


def _once(
    block: nn.Module,
    arguments: _Arguments,
    context: Callable[[], AbstractContextManager[Any]],
    clock: Callable[[], float],
    device: torch.device,
) -> float:
    structure, tensors = serialization.flatten(arguments)
    leaves = [tensor.detach().requires_grad_(serialization.is_differentiable(tensor)) for tensor in tensors]
    args, kwargs = serialization.unflatten(structure, [leaf.clone() for leaf in leaves])  # a block may work in place
    wanted = [one for one in [*block.parameters(), *leaves] if one.requires_grad]
    _synchronize(device)
    start_s = clock()
    with context():
        output = block(*args, **kwargs)
    outputs = [one for one in serialization.flatten(output)[1] if one.requires_grad]
    if outputs and wanted:
        torch.autograd.grad(outputs, wanted, [torch.ones_like(one) for one in outputs], allow_unused=True)
    _synchronize(device)
    return clock() - start_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _undisturbed(model: nn.Module, device: torch.device, *, evaluating: bool = True) -> Iterator[None]:
    """Afterwards generators, train flags and running statistics are as before."""
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
