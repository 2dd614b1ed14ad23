"""How parts of a stage's sums travel: as a codec writes them, or as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from lightning_swarm.compression import Codec, decoded, encoded, from_message, to_message
from lightning_swarm.errors import ProtocolError
from lightning_swarm.network import Message
from lightning_swarm.network.tensors import parse_spec, spec_of
from lightning_swarm.trees import Encoded

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]


@dataclass(frozen=True)
class Parts:
    """Of one averaging round.

    Args:
        codec: None: they travel as they are.
        compute: Runs what takes long elsewhere than on the loop. None: nothing does, without a codec.
    """

    codec: Codec | None
    compute: Compute | None

    async def to_message(self, part: Tensor) -> Message:
        """What travels of a part."""
        if self.codec is None or self.compute is None:
            return to_message(part)
        codec = self.codec
        message: Message = await self.compute(lambda: to_message(encoded(part, codec)))
        return message

    async def from_message(self, message: Message, *, like: Tensor, length: int) -> Tensor:
        """What a part is when it has travelled; the same bits for each who gets the message.

        Args:
            message: Whoever's.
            like: Of the part's dtype, on the device where it is wanted.
            length: Of the part.

        Raises:
            ProtocolError: It is none of that length and dtype.
        """
        tree: Any = from_message(message)[0]
        found = tree.spec if isinstance(tree, Encoded) else spec_of(tree) if isinstance(tree, Tensor) else None
        if found is None or parse_spec(found) != (like.dtype, (length,)):
            raise ProtocolError(f"{found} came for a part of shape {(length,)} and {like.dtype}")
        if self.codec is None or self.compute is None:
            whole: Tensor = tree
            return whole
        part: Tensor = await self.compute(lambda: decoded(tree, self.codec, like.device))
        return part


AS_THEY_ARE: Final = Parts(None, None)
