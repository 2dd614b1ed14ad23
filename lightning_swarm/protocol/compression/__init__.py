"""Codecs, by which tensors travel in fewer bits, and their use for trees of tensors."""

from lightning_swarm.protocol.compression.codec import Codec, NotFinite
from lightning_swarm.protocol.compression.packing import (
    PLAIN,
    SMALLEST,
    Codecs,
    decoded,
    encoded,
    from_message,
    number_bytes,
    to_message,
)
from lightning_swarm.protocol.compression.quantization import CODECS, codec

__all__ = [
    "CODECS",
    "PLAIN",
    "SMALLEST",
    "Codec",
    "Codecs",
    "NotFinite",
    "codec",
    "decoded",
    "encoded",
    "from_message",
    "number_bytes",
    "to_message",
]
