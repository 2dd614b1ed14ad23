"""Trees as they travel: large tensors of real numbers as a run's codecs write them, all else as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_swarm.core.errors import ProtocolError
from lightning_swarm.network import Message
from lightning_swarm.network.tensors import parse_spec, spec_of
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.compression.codec import Codec, NotFinite
from lightning_swarm.protocol.compression.quantization import codec
from lightning_swarm.protocol.messages.calls import Computed
from lightning_swarm.protocol.messages.wire import decode, encode
from lightning_swarm.protocol.serialization import Encoded, Tree
from lightning_swarm.protocol.settings import Compression


def to_message(tree: serialization.Tree, flags: Sequence[bool] = ()) -> Message:
    """The tensors of a result, and what says how they belong together."""
    structure, tensors = serialization.flatten(tree)
    return Message(encode(Computed(structure=structure, flags=list(flags))), tuple(tensor.cpu() for tensor in tensors))


def from_message(message: Message) -> tuple[serialization.Tree, list[bool]]:
    """The way back.

    Raises:
        ProtocolError: It is none.
    """
    computed = decode(message.body, Computed)
    return serialization.unflatten(computed.structure, list(message.tensors)), computed.flags


SMALLEST: Final = 1024
"""Elements of the smallest tensors that are encoded: losses of a microbatch stay exact, and take no room."""


@dataclass(frozen=True)
class Codecs:
    """Of a run, by what travels; None: as it is.

    Args:
        activations: Of hidden states.
        gradients: Of their gradients.
        averaging: Of what the servers of a stage exchange.
        rank: Of the products that these exchange in place of matrices. None: whole ones.
        error_feedback: Carry what averaging loses to the next step.
    """

    activations: Codec | None = None
    gradients: Codec | None = None
    averaging: Codec | None = None
    rank: int | None = None
    error_feedback: bool = False

    @classmethod
    def of(cls, compression: Compression) -> Codecs:
        """Those that a run's tensors travel by."""
        by_rank = compression.averaging == "powersgd"
        return cls(
            activations=codec(compression.activations),
            gradients=codec(compression.gradients),
            averaging=None if by_rank else codec(compression.averaging),
            rank=compression.rank if by_rank else None,
            error_feedback=bool(compression.error_feedback),
        )


PLAIN: Final = Codecs()
"""All as it is."""


def encoded(tree: Tree, by: Codec | None) -> Tree:
    """The tree with its tensors encoded. What is small stays as it is, and so does what no codec takes: NaN, infinity.

    A step of such numbers is skipped, with or without a codec.
    """
    if by is None:
        return tree
    return serialization.transform(tree, lambda leaf: _encoded(leaf, by))


def decoded(tree: Tree, by: Codec | None, device: torch.device) -> Tree:
    """The tree as `encoded` got it, but for what the codec lost; on `device`, where the codec works, too.

    Raises:
        ProtocolError: A tensor was encoded otherwise, or is damaged.
    """
    return serialization.transform(tree, lambda leaf: _decoded(leaf, by, device))


def number_bytes(tensors: Sequence[Tensor]) -> int:
    """Of one number of the largest of these tensors that may be encoded; 0: there is none."""
    real = [tensor for tensor in tensors if tensor.is_floating_point()]
    return max(real, key=Tensor.numel).element_size() if real else 0


def _encoded(leaf: Tensor | Encoded, by: Codec) -> Tensor | Encoded:
    if isinstance(leaf, Encoded) or not leaf.is_floating_point() or leaf.numel() < SMALLEST:
        return leaf
    if leaf.element_size() * 8 <= by.bits:
        return leaf
    try:
        return Encoded(by.name, spec_of(leaf), by.encode(leaf))
    except NotFinite:
        return leaf


def _decoded(leaf: Tensor | Encoded, by: Codec | None, device: torch.device) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.to(device)
    if by is None or leaf.codec != by.name:
        raise ProtocolError(
            f"a tensor came encoded as {leaf.codec!r}, and this run's are {'as they are' if by is None else by.name}"
        )
    dtype, shape = parse_spec(leaf.spec)
    return by.decode([part.to(device) for part in leaf.parts], dtype, shape)
