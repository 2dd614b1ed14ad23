"""The codecs by their names."""

from __future__ import annotations

from functools import cache
from typing import Final

from lightning_swarm.compression.blockwise import Blockwise8Bit
from lightning_swarm.compression.codec import Codec
from lightning_swarm.compression.halves import BFloat16, Float16
from lightning_swarm.compression.rotated import Rotated4Bit, Rotated6Bit
from lightning_swarm.config import CodecName

CODECS: Final[dict[str, type[Codec]]] = {
    kind.name: kind for kind in (Float16, BFloat16, Blockwise8Bit, Rotated6Bit, Rotated4Bit)
}


@cache
def codec(name: CodecName) -> Codec | None:
    """The codec of that name; None: tensors travel as they are."""
    return None if name == "none" else CODECS[name]()
