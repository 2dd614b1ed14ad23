"""How tensors travel in fewer bits: codecs, and what is encoded by them."""

from lightning_swarm.compression.codec import Codec, NotFinite
from lightning_swarm.compression.codecs import CODECS, codec
from lightning_swarm.compression.messages import from_message, to_message
from lightning_swarm.compression.packing import PLAIN, SMALLEST, Codecs, decoded, encoded, number_bytes

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
