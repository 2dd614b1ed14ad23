"""Proofs of a stage's state: BLAKE3 digests by which a server confirms the state that another server sent.

Weights and optimizer state are hashed separately, so that one pass over them can prove either kind, or both.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from blake3 import blake3
from torch import Tensor

from lightning_swarm.model.fingerprint import raw_bytes
from lightning_swarm.protocol import serialization
from lightning_swarm.protocol.messages.state import StateKind

_PIECE_BYTES: Final = 8 << 20  # hashed at once, in some milliseconds
_PREFIX: Final = b"lightning_swarm/state\0"
_END: Final = object()  # returned by `next` instead of a piece
_encoder = msgspec.msgpack.Encoder(order="deterministic")  # equal values have equal bytes


class StatePart:
    """A part of a stage's state: one weight or buffer, or the optimizer state of one parameter."""

    def __init__(self, kind: StateKind, name: str, structure: Any, tensors: Sequence[Tensor]) -> None:
        self.kind = kind
        self.tensors = tensors
        # Includes plain numbers and tensors' names, so that two tensors cannot be exchanged.
        self.label = _encoder.encode((kind, name, structure))


def parts_of_weights(weights: Mapping[str, Tensor]) -> list[StatePart]:
    """Return the parts of weights and buffers by name."""
    return [StatePart("weights", name, None, [tensor]) for name, tensor in weights.items()]


def parts_of_optimizer(state: Mapping[str, Any]) -> list[StatePart]:
    """Return the parts of an optimizer's state by parameter name; refuse values that cannot be sent."""
    parts = []
    for name, values in state.items():
        ordered = dict(sorted(values.items())) if isinstance(values, dict) else values
        parts.append(StatePart("optimizer", name, *serialization.flatten(ordered)))
    return parts


class StateDigests:
    """Computes the BLAKE3 of each part of a state piece by piece; the tensors must not change until it is finished."""

    def __init__(self, parts: Sequence[StatePart]) -> None:
        # Differs if a tensor or number was replaced, or a tensor was written to.
        self.identity = [
            (part.label, [(tensor.data_ptr(), tensor._version) for tensor in part.tensors]) for part in parts
        ]
        self._parts = parts  # kept alive, so that no other tensor gets their memory
        self._pieces = self._hash()
        self._digests: list[bytes] = []

    def advance(self) -> bool:
        """Hash one more piece; return False if all were hashed before."""
        return next(self._pieces, _END) is not _END

    def proof(self, challenge: int, kinds: Iterable[StateKind], context: Any = None) -> bytes:
        """Hash the rest, and return BLAKE3 of a challenge, a `context`, and the digests of all parts of these kinds."""
        while self.advance():
            pass
        chosen = set(kinds)
        hasher = blake3(_PREFIX + _encoder.encode((challenge, sorted(chosen), context)))
        digests = zip(self._parts, self._digests, strict=True)
        for digest in sorted(digest for part, digest in digests if part.kind in chosen):
            hasher.update(digest)
        return hasher.digest()

    def _hash(self) -> Generator[None, None, None]:
        for part in self._parts:
            hasher = blake3(part.label)
            for tensor in part.tensors:
                hasher.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
                raw = raw_bytes(tensor)
                for start in range(0, len(raw), _PIECE_BYTES):
                    hasher.update(raw[start : start + _PIECE_BYTES].cpu().numpy().data)
                    yield
            self._digests.append(hasher.digest())
            yield
