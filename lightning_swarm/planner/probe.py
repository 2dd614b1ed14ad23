"""Counts the costs of a LightningModule's blocks on torch's meta device, or measures them on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import Blocks, find_blocks, time_costs
from lightning_swarm.model.partition.timing import Arguments, example_arguments, prepare_call, recorded_calls
from lightning_swarm.planner.cost_model import block as transformer_block
from lightning_swarm.planner.records import BlockProfile, ModelProfile
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import number_bytes

_ROWS: Final = 4  # samples in `measure_transformer`
_REPEATS: Final = 3


def count(model: nn.Module, pipeline: str | None, example: Any) -> ModelProfile:
    """Count the costs of a model by running it on meta tensors; the model stays on the meta device."""
    blocks = find_blocks(model, pipeline)
    if example is None:
        raise ConfigError(
            f"counting a sample's costs needs an example, but {type(model).__name__}.example_input_array is None. "
            "Set it to a batch of inputs of `forward`, or describe the model by --layers, --width and --sequence."
        )
    structure, tensors = serialization.flatten(example)  # each tensor has a row for each sample
    num_rows = tensors[0].shape[0]
    example = serialization.unflatten(structure, [tensor.to("meta") for tensor in tensors])
    model.to("meta")
    calls = _run_on_meta(model, blocks, example)
    counted = tuple(_count_block(block, *calls[id(block)], num_rows) for block in blocks.modules)
    (args, _), (_, kwargs) = (calls[id(block)][0] for block in (blocks.modules[0], blocks.modules[-1]))
    inputs, extras = serialization.flatten(args)[1], serialization.flatten(kwargs)[1]
    around = _count_around(model, blocks.modules, counted, example)
    return ModelProfile(
        blocks=counted,
        input_bytes=_bytes(inputs) // num_rows,
        # Parameters before the pipeline need the gradient of its input.
        input_gradient=bool(around.parameters) and any(map(serialization.is_differentiable, inputs)),
        extra_bytes=_bytes([tensor for tensor in extras if tensor.ndim and len(tensor) == num_rows]) // num_rows,
        around=around,
        weight_bytes=max(parameter.element_size() for parameter in model.parameters()),
        input_number_bytes=number_bytes(inputs),
    )


def _run_on_meta(model: nn.Module, blocks: Blocks, example: Any) -> dict[int, tuple[Arguments, Any]]:
    """Run the model, and return each block's `id` with the arguments and the output of its first call."""
    with recorded_calls(blocks.modules) as calls:
        try:
            time_costs(model, blocks, example)  # for its calls of the blocks: times on the meta device mean nothing
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f"to count a sample's costs, {type(model).__name__} must run on torch's meta device, where tensors "
                f"have no values, got {error}. Describe the model by --layers, --width and --sequence."
            ) from error
    return calls


def _count_around(
    model: nn.Module, modules: Sequence[nn.Module], counted: Sequence[BlockProfile], example: Any
) -> BlockProfile:
    """Count the layers outside the blocks: the costs of the model minus the blocks'. A backward costs two forwards."""
    held = {id(parameter) for block in modules for parameter in block.parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in held)
    if not parameters:
        return BlockProfile(parameters=0, flop=0.0, output_bytes=0, graph_bytes=0)
    args, kwargs = example_arguments(example)
    num_rows = serialization.flatten(example)[1][0].shape[0]
    with torch.enable_grad():
        flop, graph_bytes = _count_call(model, lambda: model(*args, **kwargs))
    return BlockProfile(
        parameters=parameters,
        flop=max(0.0, 3.0 * flop / num_rows - sum(block.flop for block in counted)),
        output_bytes=0,
        graph_bytes=max(0, graph_bytes // num_rows - sum(block.graph_bytes for block in counted)),
    )


def _count_call(module: nn.Module, compute: Callable[[], object]) -> tuple[int, int]:
    """Run a computation, and return its flop and the bytes that autograd saves for backward, without parameters."""
    parameters = {id(parameter) for parameter in module.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if id(tensor) not in parameters:
            saved[id(tensor)] = tensor  # kept, so that no other tensor gets its id
        return tensor

    counter = FlopCounterMode(display=False)
    with counter, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return counter.get_total_flops(), _bytes(list(saved.values()))


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _count_block(block: nn.Module, arguments: Arguments, output: Any, num_rows: int) -> BlockProfile:
    """Count the costs of a block by calling it with these arguments."""
    with torch.enable_grad():
        flop, graph_bytes = _count_call(block, prepare_call(block, arguments))  # forward and backward
    outputs = serialization.flatten(output)[1]
    return BlockProfile(
        parameters=sum(parameter.numel() for parameter in block.parameters()),
        flop=flop / num_rows,
        output_bytes=_bytes(outputs) // num_rows,
        graph_bytes=graph_bytes // num_rows,
        number_bytes=number_bytes(outputs),
    )


def measure_transformer(width: int, sequence: int) -> float:
    """Measure the flop/s of this machine's processor with a transformer's block."""
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
    rows = torch.zeros(_ROWS, sequence, width, requires_grad=True)
    times = []
    for _ in range(1 + _REPEATS):
        start_s = time.perf_counter()
        torch.autograd.grad(layer(rows).sum(), [rows, *layer.parameters()])
        times.append(time.perf_counter() - start_s)
    return _ROWS * transformer_block(width, sequence).flop / statistics.median(times[1:])  # without the warm-up


def measure_blocks(model: nn.Module, pipeline: str | None, example: Any) -> float:
    """Measure the seconds of a forward and a backward of one sample through all blocks on this machine."""
    num_rows = serialization.flatten(example)[1][0].shape[0]
    return sum(time_costs(model, find_blocks(model, pipeline), example)) / 1e9 / num_rows  # from nanoseconds
