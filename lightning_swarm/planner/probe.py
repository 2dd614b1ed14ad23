"""What a LightningModule's blocks cost: counted with an example on torch's meta device, or measured here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_swarm.core.errors import ConfigError
from lightning_swarm.model.partition import Blocks, find_blocks, time_costs
from lightning_swarm.planner.cost_model import block as transformer_block
from lightning_swarm.planner.records import BlockProfile, ModelProfile
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression import number_bytes

_ROWS: Final = 4
"""Samples of the measurement, if the model brings no example."""

_REPEATS: Final = 3


_Call = tuple[tuple[Any, ...], dict[str, Any], Any]
"""What a block was called with, and what came out."""


def count(model: nn.Module, pipeline: str | None, example: Any) -> ModelProfile:
    """What the blocks of a model cost, by a forward and a backward of each without its numbers.

    Args:
        model: The LightningModule. It is on meta afterwards.
        pipeline: What is cut, as in `SwarmStrategy`.
        example: What its forward takes, as `example_input_array`; all its tensors have a row for each sample.

    Raises:
        ConfigError: There is no example, or nothing that can be cut, or the model needs numbers to run.
    """
    blocks = find_blocks(model, pipeline)
    if example is None:
        raise ConfigError(
            f"to count what a sample costs, the model must have an example, and {type(model).__name__}"
            ".example_input_array is None. Set it to a batch of what `forward` takes, or describe the model by "
            "--layers, --width and --sequence."
        )
    structure, tensors = serialization.flatten(example)
    num_rows = tensors[0].shape[0]
    example = serialization.unflatten(structure, [tensor.to("meta") for tensor in tensors])
    model.to("meta")
    seen = _seen(model, blocks, example)
    counted = tuple(_cost(block, *seen[id(block)], num_rows) for block in blocks.modules)
    first = serialization.flatten(seen[id(blocks.modules[0])][0])[1]
    extras = serialization.flatten(seen[id(blocks.modules[-1])][1])[1]
    around = _around(model, blocks.modules, counted, example)
    return ModelProfile(
        blocks=counted,
        input_bytes=_bytes(first) // num_rows,
        # Who has parameters before the pipeline wants the gradient of what they gave.
        input_gradient=bool(around.parameters) and any(serialization.is_differentiable(one) for one in first),
        extra_bytes=_bytes([one for one in extras if one.ndim and one.shape[0] == num_rows]) // num_rows,
        around=around,
        weight_bytes=max(parameter.element_size() for parameter in model.parameters()),
        input_number_bytes=number_bytes(first),
    )


def _seen(model: nn.Module, blocks: Blocks, example: Any) -> dict[int, _Call]:
    """The first call of each block, by its identity."""
    calls: dict[int, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(id(module), (args, kwargs, output))

    handles = [block.register_forward_hook(note, with_kwargs=True) for block in blocks.modules]
    try:
        time_costs(model, blocks, example)
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"to count what a sample costs, {type(model).__name__} is run without numbers (on torch's meta device), "
            f"and it needs some: {error}. Describe it by --layers, --width and --sequence."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _around(
    model: nn.Module, modules: Sequence[nn.Module], counted: Sequence[BlockProfile], example: Any
) -> BlockProfile:
    """What is in no block: what the whole forward computes beyond the blocks, and twice as much backward."""
    held = {id(parameter) for block in modules for parameter in block.parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in held)
    if not parameters:
        return BlockProfile(parameters=0, flop=0.0, output_bytes=0, graph_bytes=0)
    args, kwargs = (
        ((), example) if isinstance(example, dict) else (example if isinstance(example, tuple) else (example,), {})
    )
    num_rows = serialization.flatten(example)[1][0].shape[0]
    kept = _SavedTensorBytes(model)
    counter = FlopCounterMode(display=False)
    with torch.enable_grad(), counter, kept.hooks():
        model(*args, **kwargs)
    inside = sum(block.graph_bytes for block in counted)
    return BlockProfile(
        parameters=parameters,
        flop=max(0.0, 3.0 * counter.get_total_flops() / num_rows - sum(block.flop for block in counted)),
        output_bytes=0,
        graph_bytes=max(0, kept.num_bytes() // num_rows - inside),
    )


class _SavedTensorBytes:
    """What autograd keeps for a backward, but for parameters."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {id(parameter) for parameter in module.parameters()}
        self._tensors: dict[int, Tensor] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            if id(tensor) not in self._own:
                self._tensors[id(tensor)] = tensor  # kept, so that no other one gets its id
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def num_bytes(self) -> int:
        return _bytes(list(self._tensors.values()))


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _cost(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, num_rows: int) -> BlockProfile:
    structure, tensors = serialization.flatten((args, kwargs))
    leaves = [tensor.detach().requires_grad_(serialization.is_differentiable(tensor)) for tensor in tensors]
    kept = _SavedTensorBytes(block)
    counter = FlopCounterMode(display=False)
    with torch.enable_grad(), counter, kept.hooks():
        given, named = serialization.unflatten(structure, [leaf.clone() for leaf in leaves])
        outputs = [one for one in serialization.flatten(block(*given, **named))[1] if one.requires_grad]
        wanted = [one for one in [*block.parameters(), *leaves] if one.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(one) for one in outputs], allow_unused=True)
    given_on = serialization.flatten(output)[1]
    return BlockProfile(
        parameters=sum(parameter.numel() for parameter in block.parameters()),
        flop=counter.get_total_flops() / num_rows,
        output_bytes=_bytes(given_on) // num_rows,
        graph_bytes=kept.num_bytes() // num_rows,
        number_bytes=number_bytes(given_on),
    )


def measure_transformer(width: int, sequence: int) -> float:
    """FLOP/s of this machine's processor at a transformer's block of these measures."""
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
    rows = torch.zeros(_ROWS, sequence, width, requires_grad=True)
    times = []
    for _ in range(1 + _REPEATS):
        began_s = time.perf_counter()
        torch.autograd.grad(layer(rows).sum(), [rows, *layer.parameters()])
        times.append(time.perf_counter() - began_s)
    return _ROWS * transformer_block(width, sequence).flop / statistics.median(times[1:])


def measure_blocks(model: nn.Module, pipeline: str | None, example: Any) -> float:
    """Seconds that a forward and a backward of one sample through all blocks of a model take on this machine."""
    num_rows = serialization.flatten(example)[1][0].shape[0]
    return sum(time_costs(model, find_blocks(model, pipeline), example)) / 1e9 / num_rows
