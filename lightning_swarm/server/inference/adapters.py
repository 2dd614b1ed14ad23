"""Clients' LoRA adapters at a server: checks them on arrival, keeps them while there is room, and applies them."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_swarm.core.errors import AdapterMissing, ProtocolError
from lightning_swarm.model.inference.adapter_digest import adapter_digest
from lightning_swarm.model.inference.joint_attention import CannotJoin
from lightning_swarm.model.quantization import is_conv1d, is_quantized, linear_shape
from lightning_swarm.protocol.messages.tuning import AdapterUpload, Lora

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LEAST_DIMENSIONS: Final = 3  # fewest dimensions of a hidden state ``[rows, tokens, ...]``


@dataclass(frozen=True, eq=False)
class Adapter:
    """The part of a client's adapter for one stage."""

    stage: int
    loras: Sequence[Lora]  # one for each adapted layer
    tensors: Sequence[Tensor]  # for each LoRA, A ``[rank, inputs]`` and B ``[outputs, rank]``; they require gradients

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def kind(self) -> tuple[Lora, ...]:
        """The adapter without its tensors; adapters of one kind take equally long to compute."""
        return tuple(self.loras)

    @cached_property
    def layers(self) -> tuple[tuple[int, str], ...]:
        """The adapted layers, by block and name."""
        return tuple((lora.block, lora.module) for lora in self.loras)


class AdapterStore:
    """The most recently used adapters, within a byte budget."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Adapter] = OrderedDict()
        self.num_bytes = 0  # bytes of all kept adapters

    def add(self, name: bytes, adapter: Adapter) -> None:
        """Keep an adapter; drop the least recently used if there is no room for all."""
        if adapter.num_bytes > self._max_bytes:
            raise ProtocolError(
                f"an adapter may have {self._max_bytes} bytes at a stage (`Limits.adapter_bytes`), got "
                f"{adapter.num_bytes}"
            )
        replaced = self._kept.pop(name, None)
        self.num_bytes += adapter.num_bytes - (0 if replaced is None else replaced.num_bytes)
        self._kept[name] = adapter
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def get(self, name: bytes, stage: int) -> Adapter:
        """Return an adapter; raise `AdapterMissing` if it is not here."""
        adapter = self._kept.get(name)
        if adapter is None or adapter.stage != stage:
            raise AdapterMissing(f"this server has no adapter of this name for stage {stage}")
        self._kept.move_to_end(name)
        return adapter


def checked(upload: AdapterUpload, tensors: Sequence[Tensor], layers: LayersOfStage, device: torch.device) -> Adapter:
    """Return an uploaded adapter for the layers of its stage; raise `ProtocolError` if it does not fit."""
    if len(tensors) != 2 * len(upload.loras):
        raise ProtocolError(f"{len(upload.loras)} adapted layers must have two tensors each, got {len(tensors)}")
    for index, lora in enumerate(upload.loras):
        name = f"{lora.module[:100]!r} of block {lora.block}"
        inputs, outputs = layers.shape(lora.block, lora.module)
        down, up = tensors[2 * index : 2 * index + 2]
        if (down.shape, up.shape) != ((lora.rank, inputs), (outputs, lora.rank)):
            raise ProtocolError(
                f"an adapter of {name} must have ({lora.rank}, {inputs}) and ({outputs}, {lora.rank}), got "
                f"{tuple(down.shape)} and {tuple(up.shape)}"
            )
        if down.dtype not in _DTYPES or up.dtype != down.dtype:
            raise ProtocolError(
                f"an adapter must have one of the dtypes {_DTYPES}, got {down.dtype} and {up.dtype} for {name}"
            )
        if not math.isfinite(lora.scaling) or not down.isfinite().all() or not up.isfinite().all():
            raise ProtocolError(f"an adapter's numbers must be finite, and some for {name} are not")
    if adapter_digest(upload.stage, upload.loras, tensors) != upload.digest:
        raise ProtocolError("an adapter's digest must match its layers and tensors, and this one does not")
    return Adapter(
        upload.stage, upload.loras, [tensor.detach().to(device).clone().requires_grad_() for tensor in tensors]
    )


class LayersOfStage:
    """The linear layers of a stage's blocks, found by the number of the block and their name in it."""

    def __init__(self, blocks: Sequence[nn.Module], first_block: int) -> None:
        self._layers = {
            (first_block + index, name): layer
            for index, block in enumerate(blocks)
            for name, layer in block.named_modules()
            if _is_linear(layer)
        }

    def shape(self, block: int, name: str) -> tuple[int, int]:
        """Return a layer's numbers of inputs and outputs."""
        return linear_shape(self._find(block, name))

    def _find(self, block: int, name: str) -> Any:
        layer = self._layers.get((block, name))
        if layer is None:
            raise ProtocolError(f"block {block} has no linear layer {name[:100]!r} at this stage")
        return layer

    @contextlib.contextmanager
    def adapted(self, adapter: Adapter | None, *, drops: bool) -> Iterator[None]:
        """In this context, add the adapter's low-rank products to the outputs of its layers; `drops`: with dropout."""
        with contextlib.ExitStack() as hooks:
            for layer, added in self._added(adapter, drops=drops).items():
                hooks.callback(layer.register_forward_hook(added).remove)
            yield

    @contextlib.contextmanager
    def adapted_by_rows(self, adapters: Sequence[tuple[int, Adapter | None]], *, drops: bool) -> Iterator[None]:
        """In this context, add the products of each text's adapter to the layers' outputs for its rows.

        Args:
            adapters: Each text's number of rows and its adapter, in the order of the rows.
            drops: Whether the adapters' dropout is on.
        """
        if len(adapters) == 1:
            with self.adapted(adapters[0][1], drops=drops):
                yield
            return
        ends = list(accumulate(rows for rows, _ in adapters))
        added_by_layer: dict[nn.Module, list[tuple[slice, _Added]]] = {}
        for (rows, adapter), end in zip(adapters, ends, strict=True):
            for layer, added in self._added(adapter, drops=drops).items():
                added_by_layer.setdefault(layer, []).append((slice(end - rows, end), added))
        with contextlib.ExitStack() as hooks:
            for layer, added_rows in added_by_layer.items():
                hooks.callback(layer.register_forward_hook(_AddedByRows(ends[-1], added_rows)).remove)
            yield

    def _added(self, adapter: Adapter | None, *, drops: bool) -> Mapping[nn.Module, _Added]:
        """Return layer -> the products of an adapter that are added to its output."""
        if adapter is None:
            return {}
        products_by_layer: dict[nn.Module, list[_LowRank]] = {}
        for index, lora in enumerate(adapter.loras):
            down, up = adapter.tensors[2 * index : 2 * index + 2]
            product = _LowRank(down, up, lora.scaling, lora.dropout if drops else 0.0)
            products_by_layer.setdefault(self._find(lora.block, lora.module), []).append(product)
        return {layer: _Added(products) for layer, products in products_by_layer.items()}


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or is_conv1d(layer)


@dataclass(frozen=True, eq=False)
class _LowRank:
    """A low-rank product, computed in peft's order of operations."""

    down: Tensor
    up: Tensor
    scaling: float
    dropout: float

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the product for a layer's input, to be added to its output."""
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return F.linear(F.linear(hidden, self.down), self.up) * self.scaling


@dataclass(frozen=True, eq=False)
class _Added:
    """A forward hook that adds products to a layer's output, and rounds where peft does."""

    products: Sequence[_LowRank]

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        hidden, dtype = args[0], output.dtype
        for product in self.products:
            hidden = hidden.to(product.down.dtype)
            added = product(hidden)
            output = output + (added.to(dtype) if is_quantized(layer) else added)
        return output.to(dtype)


@dataclass(frozen=True, eq=False)
class _AddedByRows:
    """A forward hook that adds each text's own products to the rows of that text in a layer's output."""

    num_rows: int
    added: Sequence[tuple[slice, _Added]]  # rows of a text, and its products

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        hidden = args[0]
        # The rows of an expert's input are sorted by expert, not by text, even if there are as many.
        if hidden.ndim < _LEAST_DIMENSIONS or len(hidden) != self.num_rows:
            raise CannotJoin("texts with adapters share a forward only if layers get inputs [rows, tokens, ...]")
        output = output.clone()
        for rows, added in self.added:
            output[rows] = added(layer, (hidden[rows],), output[rows])
        return output
