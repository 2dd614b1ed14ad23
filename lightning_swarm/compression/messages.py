"""What a call leaves to be fetched: a tree, and of a forward which of its tensors require grad."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_swarm import trees
from lightning_swarm.network import Message
from lightning_swarm.types.calls import Computed
from lightning_swarm.types.wire import decode, encode


def to_message(tree: trees.Tree, flags: Sequence[bool] = ()) -> Message:
    """The tensors of a result, and what says how they belong together."""
    structure, tensors = trees.flatten(tree)
    return Message(encode(Computed(structure=structure, flags=list(flags))), tuple(tensor.cpu() for tensor in tensors))


def from_message(message: Message) -> tuple[trees.Tree, list[bool]]:
    """The way back.

    Raises:
        ProtocolError: It is none.
    """
    computed = decode(message.body, Computed)
    return trees.unflatten(computed.structure, list(message.tensors)), computed.flags
