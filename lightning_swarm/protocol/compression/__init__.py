"""The codecs of a run, which encode tensors in fewer bits; and the conversion of tensors to and from messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message
from lightning_swarm.network.tensors import parse_spec, spec_of
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression.codec import Codec, NotFinite
from lightning_swarm.protocol.compression.quantization import CODECS, codec
from lightning_swarm.protocol.messages.calls import Computed
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.serialization import Encoded, Tree
from lightning_swarm.protocol.settings import Compression

__all__ = [
    "CODECS",
    "MIN_ELEMENTS",
    "PLAIN",
    "Codec",
    "Codecs",
    "NotFinite",
    "codec",
    "decoded",
    "encoded",
    "from_message",
    "number_bytes",
    "on_cpu",
    "to_cpu",
    "to_message",
    "to_send",
]


def to_message(tree: serialization.Tree, flags: Sequence[bool] = ()) -> Message:
    """Make a message from a computed tree; `flags`: as in `Computed`."""
    structure, tensors = serialization.flatten(tree)
    return Message(encode(Computed(structure=structure, flags=list(flags))), tuple(map(to_cpu, tensors)))


def from_message(message: Message) -> tuple[serialization.Tree, list[bool]]:
    """Read a computed tree, and its `Computed.flags`, from a message; refuse a malformed message."""
    computed = decode(message.body, Computed)
    return serialization.unflatten(computed.structure, list(message.tensors)), computed.flags


MIN_ELEMENTS: Final = 1024  # smaller tensors are not encoded, so that a microbatch's losses stay exact


@dataclass(frozen=True)
class Codecs:
    """The codecs of a run; None: no encoding."""

    activations: Codec | None = None  # hidden states
    gradients: Codec | None = None  # gradients of hidden states
    averaging: Codec | None = None  # gradient sums between the servers of a stage
    rank: int | None = None  # rank of the products that PowerSGD sends for matrices; None: matrices are sent whole
    error_feedback: bool = False  # add the encoding error of averaging to the next step

    @classmethod
    def of(cls, compression: Compression) -> Codecs:
        """Return the codecs that a run's settings name."""
        by_rank = compression.averaging == "powersgd"
        return cls(
            activations=codec(compression.activations),
            gradients=codec(compression.gradients),
            averaging=None if by_rank else codec(compression.averaging),
            rank=compression.rank if by_rank else None,
            error_feedback=bool(compression.error_feedback),
        )


PLAIN: Final = Codecs()  # no encoding


def encoded(tree: Tree, by: Codec | None) -> Tree:
    """Encode a tree's large tensors, except tensors with NaN or infinity, because their step is skipped anyway."""
    if by is None:
        return tree
    return serialization.transform(tree, lambda leaf: _encoded(leaf, by))


def decoded(tree: Tree, by: Codec | None, device: torch.device) -> Tree:
    """Decode a tree's tensors on `device`; refuse damaged tensors, and tensors of another codec."""
    return serialization.transform(tree, lambda leaf: _decoded(leaf, by, device))


def on_cpu(tree: Tree, *, copy: bool = False) -> Tree:
    """Move a tree's tensors to the CPU for sending; with `copy`, also copy unencoded tensors that are already there."""
    return serialization.transform(tree, lambda leaf: _on_cpu(leaf, copy=copy))


def to_send(tensors: Sequence[Tensor | None], by: Codec | None, *, copy: bool) -> list[Any]:
    """Encode tensors on their device, and move them to the CPU, from which they can be sent repeatedly."""
    # `copy` is for inputs, because the user may overwrite the batch before a microbatch is sent again.
    return list(on_cpu(encoded(list(tensors), by), copy=copy))


def number_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the element size in bytes of the largest tensor that may be encoded; 0: there is no such tensor."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return max(floating, key=Tensor.numel).element_size() if floating else 0


def _on_cpu(leaf: Tensor | Encoded, *, copy: bool) -> Tensor | Encoded:
    if isinstance(leaf, Encoded):
        return replace(leaf, parts=tuple(map(to_cpu, leaf.parts)))
    return to_cpu(leaf.detach() if copy else leaf, copy=copy)


def to_cpu(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """Move a tensor to the CPU; with `copy`, copy it even if it is already there."""
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=copy) if copy or tensor.device.type != "cpu" else tensor
    # torch reuses pinned memory. New pageable memory has to be mapped page by page, which took 40 times as long.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


def _encoded(leaf: Tensor | Encoded, by: Codec) -> Tensor | Encoded:
    if isinstance(leaf, Encoded) or not leaf.is_floating_point() or leaf.numel() < MIN_ELEMENTS:
        return leaf
    if leaf.element_size() * 8 <= by.bits:
        return leaf
    try:
        return Encoded(by.name, spec_of(leaf), by.encode(leaf))
    except NotFinite:
        return leaf


def _decoded(leaf: Tensor | Encoded, by: Codec | None, device: torch.device) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf if leaf.device == device else leaf.to(device)
    if by is None or leaf.codec != by.name:
        expected = "not encoded" if by is None else f"encoded as {by.name!r}"
        raise ProtocolError(f"this run's tensors must be {expected}, got one that is encoded as {leaf.codec!r}")
    dtype, shape = parse_spec(leaf.spec)
    return by.decode([part.to(device) for part in leaf.parts], dtype, shape)
